"""The queue of names that fall due: each once, at its earliest time, and never more often than it may."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.workqueue import WorkQueue
from tests.waiting import PATIENT

INTERVAL = 10.0
ENDS = itertools.count()


class Clock:
    """Seconds that pass when the test says so. ``looked`` is released with every look at it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.looked = threading.Semaphore(0)

    def __call__(self) -> float:
        self.looked.release()
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> WorkQueue:
    return WorkQueue(INTERVAL, clock)


def due_now(queue: WorkQueue) -> list[str]:
    """Take everything that is due by now, in order: a name that is due last of all tells where that ends."""
    end = f"end-{next(ENDS)}"  # another each time, as no interval may keep it waiting
    queue.add(end)
    return list(iter(lambda: str(queue.next()), end))


def test_a_name_is_due_at_once_and_has_one_turn(queue: WorkQueue) -> None:
    queue.add("a")
    assert due_now(queue) == ["a"]
    assert due_now(queue) == []


def test_many_events_share_one_turn(queue: WorkQueue) -> None:
    for _ in range(100):
        queue.add("a")
    assert due_now(queue) == ["a"]


def test_names_come_in_the_order_of_their_times(queue: WorkQueue, clock: Clock) -> None:
    for name, delay in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        queue.add(name, delay)
    clock.now += 3
    assert due_now(queue) == ["a", "b", "c"]


@pytest.mark.parametrize("delays", [(5.0, 2.0), (2.0, 5.0), (2.0, 2.0)])
def test_the_earliest_time_counts(queue: WorkQueue, clock: Clock, delays: tuple[float, float]) -> None:
    for delay in delays:
        queue.add("a", delay)
    clock.now += 1.9
    assert due_now(queue) == []
    clock.now += 0.1
    assert due_now(queue) == ["a"]
    clock.now += 100
    assert due_now(queue) == [], "the later time is gone with the turn"


def test_between_two_turns_of_a_name_is_the_spacing(queue: WorkQueue, clock: Clock) -> None:
    queue.add("a")
    assert due_now(queue) == ["a"]
    for _ in range(9):
        queue.add("a")
        assert due_now(queue) == []
        clock.now += 1
    clock.now += 1
    assert due_now(queue) == ["a"]


def test_other_names_do_not_wait_for_it(queue: WorkQueue) -> None:
    queue.add("a")
    assert due_now(queue) == ["a"]
    queue.add("a")
    queue.add("b")
    assert due_now(queue) == ["b"]


def test_a_turn_that_came_to_nothing_is_had_again_after_its_delay_and_not_before(
    queue: WorkQueue, clock: Clock
) -> None:
    """The next one counts for the spacing as ever."""
    queue.add("a")
    assert due_now(queue) == ["a"]
    queue.retry("a", 2.0)
    queue.add("a")
    clock.now += 1.9
    assert due_now(queue) == []
    clock.now += 0.1
    assert due_now(queue) == ["a"]
    queue.add("a")
    clock.now += INTERVAL - 0.1
    assert due_now(queue) == []
    clock.now += 0.1
    assert due_now(queue) == ["a"]


def test_an_event_after_a_turn_has_one_of_its_own(queue: WorkQueue, clock: Clock) -> None:
    """What happens while a name is being served may not have been seen."""
    queue.add("a")
    assert due_now(queue) == ["a"]
    queue.add("a")
    clock.now += INTERVAL
    assert due_now(queue) == ["a"]


def test_a_delay_counts_from_the_event_and_the_spacing_from_the_turn(queue: WorkQueue, clock: Clock) -> None:
    queue.add("a")
    assert due_now(queue) == ["a"]
    queue.add("a", 25.0)
    clock.now += 24
    assert due_now(queue) == []
    clock.now += 1
    assert due_now(queue) == ["a"]


def test_it_holds_a_name_that_waits_or_was_served_lately(queue: WorkQueue, clock: Clock) -> None:
    assert not queue.is_active("a")
    queue.add("a", 100.0)
    assert queue.is_active("a")
    clock.now += 100
    assert due_now(queue) == ["a"]
    clock.now += 2 * INTERVAL - 1
    assert queue.is_active("a")
    clock.now += 1
    assert not queue.is_active("a")


@given(events=st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 30), st.floats(0, 20)), max_size=30))
def test_every_event_has_a_turn_after_it_and_turns_are_apart(events: list[tuple[str, float, float]]) -> None:
    clock = Clock()
    queue = WorkQueue(INTERVAL, clock)
    turns: dict[str, list[float]] = {"a": [], "b": [], "c": []}
    wanted: dict[str, float] = {}

    def serve() -> None:
        for name in due_now(queue):
            turns[name].append(clock.now)
            wanted.pop(name, None)

    for name, delay, pause in events:
        queue.add(name, delay)
        wanted[name] = min(clock.now + delay, wanted.get(name, clock.now + delay))
        serve()
        clock.now += pause
        serve()
        assert all(at + INTERVAL > clock.now for at in wanted.values()), "late by more than the spacing"
    clock.now += 60
    serve()
    assert not wanted
    for times in turns.values():
        assert all(later >= earlier + INTERVAL for earlier, later in itertools.pairwise(times))


# Threads


def asleep(queue: WorkQueue, clock: Clock, executor: ThreadPoolExecutor) -> Future[str | None]:
    """Have a thread wait for a turn, and return when it has looked at the clock, and found nothing due."""
    while clock.looked.acquire(blocking=False):
        continue
    turn = executor.submit(queue.next)
    # It has looked, and holds the queue's lock until it sleeps: whatever else is done to the queue comes after that.
    assert clock.looked.acquire(timeout=PATIENT)
    return turn


@pytest.mark.parametrize("before", [None, 3600.0], ids=["nothing waits", "something waits, for long"])
def test_a_name_that_is_added_wakes_who_sleeps(queue: WorkQueue, clock: Clock, before: float | None) -> None:
    if before is not None:
        queue.add("later", before)
    with ThreadPoolExecutor(1) as executor:
        turn = asleep(queue, clock, executor)
        queue.add("a")
        assert turn.result(PATIENT) == "a"


def test_a_time_that_comes_earlier_wakes_who_sleeps(queue: WorkQueue, clock: Clock) -> None:
    queue.add("a", 3600.0)
    with ThreadPoolExecutor(1) as executor:
        turn = asleep(queue, clock, executor)
        queue.add("a")
        assert turn.result(PATIENT) == "a"


def test_close_ends_every_next(queue: WorkQueue, clock: Clock) -> None:
    with ThreadPoolExecutor(2) as executor:
        turns = [asleep(queue, clock, executor), asleep(queue, clock, executor)]
        queue.close()
        assert [turn.result(PATIENT) for turn in turns] == [None, None]
    queue.add("a")
    assert queue.next() is None


def test_time_that_passes_alone_is_enough() -> None:
    """On the real clock: nobody is there to wake who sleeps. Late it may be, on a busy machine; early never."""
    queue = WorkQueue(0.0)
    started = time.monotonic()
    queue.add("b", 0.02)
    queue.add("a", 0.01)
    assert queue.next() == "a"
    assert time.monotonic() >= started + 0.01
    assert queue.next() == "b"
    assert time.monotonic() >= started + 0.02
