"""Tests of the work queue, and of the loop that serves its keys."""

import itertools
import math
from typing import Any

import msgspec
import pytest
import structlog
from hypothesis import given, strategies as st

from controller.workqueue import MAX_RETRY_SECONDS, Reconciler, WorkQueue
from tests.replicas import Clock
from tests.unit.test_kept_bytes import keeping_at_most
from vcuda.errors import Unavailable

INTERVAL = 10.0
ENDS = itertools.count()


@pytest.fixture
def queue(clock: Clock) -> WorkQueue:
    return WorkQueue(INTERVAL, clock.monotonic)


def due_now(queue: WorkQueue) -> list[str]:
    """Return the keys that are due now, in their order. An extra key at the end keeps ``next`` from blocking."""
    end = f"end-{next(ENDS)}"  # a new key for each call, because the queue delays a key that it served recently
    queue.add(end)
    due = list(iter(lambda: str(queue.next()), end))
    queue.served(end)
    return due


def test_a_name_is_due_at_once_and_many_events_share_one_turn(queue: WorkQueue) -> None:
    for _ in range(100):
        queue.add("a")
    assert due_now(queue) == ["a"]
    assert due_now(queue) == []


def test_names_are_served_in_the_order_of_their_times(queue: WorkQueue, clock: Clock) -> None:
    for name, delay in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        queue.add(name, delay)
    clock.now += 3
    assert due_now(queue) == ["a", "b", "c"]


def due_after(queue: WorkQueue, clock: Clock, seconds: float) -> list[str]:
    """Advance the clock by ``seconds``, and return the due keys. Fails if one was due 0.1 s earlier."""
    clock.now += seconds - 0.1
    assert due_now(queue) == []
    clock.now += 0.1
    return due_now(queue)


@pytest.mark.parametrize("delays", [(5.0, 2.0), (2.0, 5.0), (2.0, 2.0)])
def test_the_earliest_time_is_used(queue: WorkQueue, clock: Clock, delays: tuple[float, float]) -> None:
    for delay in delays:
        queue.add("a", delay)
    assert due_after(queue, clock, 2.0) == ["a"]
    clock.now += 100
    assert due_now(queue) == [], "the turn must clear the key's later time"


def test_two_turns_of_a_name_are_an_interval_apart_and_delay_no_other(queue: WorkQueue, clock: Clock) -> None:
    """A turn may miss the change whose event arrives during the turn. So another turn must follow."""
    queue.add("a")
    assert due_now(queue) == ["a"]
    queue.add("b")
    for expected in ("b", *[None] * 9):
        queue.add("a")
        assert due_now(queue) == ([expected] if expected else [])
        clock.now += 1
    assert due_now(queue) == ["a"]


def test_a_name_that_is_not_urgent_waits_longer_after_a_turn_and_delays_no_other(
    queue: WorkQueue, clock: Clock
) -> None:
    queue.add("a", interval=3 * INTERVAL)
    assert due_now(queue) == ["a"], "the first turn must be at once"
    queue.add("a", interval=3 * INTERVAL)
    assert due_after(queue, clock, 3 * INTERVAL) == ["a"]
    queue.add("a", interval=3 * INTERVAL)
    queue.add("a")
    assert due_after(queue, clock, INTERVAL) == ["a"]


def test_a_failed_turn_is_repeated_after_its_delay(queue: WorkQueue, clock: Clock) -> None:
    queue.add("a")
    assert due_now(queue) == ["a"]
    queue.retry("a", 2.0)
    queue.add("a")
    assert due_after(queue, clock, 2.0) == ["a"]
    queue.add("a")
    assert due_after(queue, clock, INTERVAL) == ["a"]


def test_an_event_during_a_turn_does_not_shorten_the_delay_of_its_retry(queue: WorkQueue, clock: Clock) -> None:
    """A namespace with slow LISTs and a changing usage must not take all the time of the loop."""
    queue.add("a")
    assert due_now(queue) == ["a"]
    clock.now += INTERVAL
    queue.add("a")
    queue.retry("a", 90.0)
    assert due_after(queue, clock, 90.0) == ["a"]


def test_the_last_turns_of_keys_that_are_no_longer_served_are_forgotten(queue: WorkQueue, clock: Clock) -> None:
    with keeping_at_most(20_000):
        for number in range(10_000):
            queue.add(f"namespace-{number}")
            assert queue.next()
            queue.served(f"namespace-{number}")
            clock.now += 1


def test_a_delay_counts_from_the_event_and_the_spacing_from_the_turn(queue: WorkQueue, clock: Clock) -> None:
    queue.add("a")
    assert due_now(queue) == ["a"]
    queue.add("a", 25.0)
    assert due_after(queue, clock, 25.0) == ["a"]


def test_the_queue_contains_names_that_wait_or_were_served_recently(queue: WorkQueue, clock: Clock) -> None:
    assert not queue.is_active("a")
    queue.add("a", 100.0)
    assert queue.is_active("a")
    clock.now += 100
    assert due_now(queue) == ["a"]
    clock.now += 2 * INTERVAL - 1
    assert queue.is_active("a")
    clock.now += 1
    assert not queue.is_active("a")


def test_a_held_queue_keeps_no_key_until_it_is_released(queue: WorkQueue, clock: Clock) -> None:
    queue.add("failing")
    assert due_now(queue) == ["failing"]
    clock.now += 60
    queue.add("before")
    queue.hold()
    assert queue.lag() == 0.0, "another replica serves the keys now"
    for number in range(100):
        queue.add(f"key-{number}")
    queue.release()
    assert due_now(queue) == []
    queue.add("after")
    assert due_now(queue) == ["after"]


@given(events=st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 30), st.floats(0, 20)), max_size=30))
def test_every_event_is_followed_by_a_turn_and_turns_are_apart(events: list[tuple[str, float, float]]) -> None:
    clock = Clock()
    queue = WorkQueue(INTERVAL, clock.monotonic)
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
        assert all(at + INTERVAL > clock.now for at in wanted.values()), (
            "the turn is late by more than the minimum interval"
        )
    clock.now += 60
    serve()
    assert not wanted
    for times in turns.values():
        assert all(later >= earlier + INTERVAL for earlier, later in itertools.pairwise(times))


def test_the_lag_is_that_of_due_names_without_a_successful_turn(queue: WorkQueue, clock: Clock) -> None:
    assert queue.lag() == 0
    queue.add("a", 5.0)
    clock.now += 5
    assert queue.lag() == 0, "a name that is not due yet must not count as waiting"
    clock.now += 3
    queue.add("b")
    assert queue.lag() == 3
    assert [queue.next(), queue.next()] == ["a", "b"]
    queue.retry("a", 2.0)
    for key in ("a", "b"):
        queue.served(key)
    clock.now += 4
    assert queue.lag() == 7, "the turn failed, so the name has been due since before"
    assert queue.next() == "a"
    queue.served("a")
    assert queue.lag() == 0


# Tests of the reconcile loop


class Reconciled:
    """A `Reconciler` that returns or raises ``answers[key]`` for each key. It retries errors within 4 s."""

    def __init__(self, clock: Clock) -> None:
        self.answers: dict[str, float | Exception | None] = {}
        self.turns: list[tuple[str, float]] = []
        self.clock = clock
        self.loop = Reconciler(
            "test", self._reconcile, failure="not done", retry_seconds=4.0, key_name="of", clock=clock.monotonic
        )

    def serve(self, until: float = 0.0) -> list[Any]:
        """Reconcile all keys that become due within ``until`` seconds. Return the log lines."""
        with structlog.testing.capture_logs() as logs:
            for _ in range(math.ceil(until * 10) + 1):
                for key in due_now(self.loop.queue):
                    self.loop.turn(key)
                self.clock.now += 0.1
        return logs

    def _reconcile(self, key: str) -> float | None:
        self.turns.append((key, self.clock.now))
        answer = self.answers.get(key)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def reconciled(clock: Clock) -> Reconciled:
    return Reconciled(clock)


def test_a_key_is_served_again_when_its_turn_requests_it(reconciled: Reconciled) -> None:
    reconciled.answers["again"] = 5.0
    for key in ("again", "once"):
        reconciled.loop.queue.add(key)
    assert reconciled.serve(11) == []
    assert [key for key, _ in reconciled.turns] == ["again", "once", "again", "again"]


@pytest.mark.parametrize("error", [Unavailable("timed out"), msgspec.DecodeError("truncated"), RecursionError("deep")])
def test_a_failed_turn_is_logged_and_affects_only_its_key(reconciled: Reconciled, error: Exception) -> None:
    reconciled.answers["bad"] = error
    for key in ("bad", "good"):
        reconciled.loop.queue.add(key)
    [line] = reconciled.serve()
    assert (line["event"], line["log_level"], line["of"], line["error"]) == ("not done", "warning", "bad", str(error))
    assert [key for key, _ in reconciled.turns] == ["bad", "good"]


def test_a_failing_key_is_retried_less_and_less_often_until_it_succeeds(reconciled: Reconciled) -> None:
    reconciled.answers["bad"] = Unavailable("timed out")
    reconciled.loop.queue.add("bad")
    reconciled.serve(120)
    assert reconciled.loop.queue.lag() > 119
    waits = [later - earlier for (_, earlier), (_, later) in itertools.pairwise(reconciled.turns)]
    assert 2 <= waits[0] <= 4.2
    assert all(MAX_RETRY_SECONDS / 2 <= wait <= MAX_RETRY_SECONDS + 0.2 for wait in waits[3:])
    reconciled.answers["bad"] = None
    reconciled.serve(MAX_RETRY_SECONDS)
    assert reconciled.loop.queue.lag() == 0
    reconciled.turns.clear()
    reconciled.answers["bad"] = Unavailable("timed out")
    reconciled.loop.queue.add("bad")
    reconciled.serve(5)
    assert len(reconciled.turns) == 2, "the delay must restart at its shortest value"


def test_an_internal_error_ends_the_loop(reconciled: Reconciled) -> None:
    """In the controller, the function `spawn` runs the loop. After an error, it logs the error and ends the process."""
    reconciled.answers["bad"] = KeyError("bug")
    reconciled.loop.queue.add("bad")
    with pytest.raises(KeyError):
        reconciled.loop.run()


def test_a_stopped_loop_begins_no_turn(reconciled: Reconciled) -> None:
    reconciled.loop.queue.add("a")
    reconciled.loop.stop()
    reconciled.loop.run()
    assert reconciled.turns == []
