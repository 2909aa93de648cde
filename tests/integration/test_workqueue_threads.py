"""Tests of threads that wait for a key of the work queue to be due: which thread wakes, and when."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from controller.workqueue import WorkQueue
from tests.waiting import PATIENT


class Clock:
    """A clock that does not advance. Each reading of it releases the semaphore ``looked``."""

    def __init__(self) -> None:
        self.looked = threading.Semaphore(0)

    def __call__(self) -> float:
        self.looked.release()
        return 1000.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> WorkQueue:
    return WorkQueue(10.0, clock)


def asleep(queue: WorkQueue, clock: Clock, executor: ThreadPoolExecutor) -> Future[str | None]:
    """Start a thread that waits for the next key of the work queue. Return when it has found no key that is due."""
    while clock.looked.acquire(blocking=False):
        continue
    turn = executor.submit(queue.next)
    # The thread has read the clock, and holds the queue's lock until it sleeps. So the test cannot change the queue
    # before.
    assert clock.looked.acquire(timeout=PATIENT)
    return turn


@pytest.mark.parametrize("before", [[], ["later"], ["a"]], ids=["nothing waits", "another does", "itself, for long"])
def test_a_name_that_is_due_earlier_wakes_a_sleeping_thread(queue: WorkQueue, clock: Clock, before: list[str]) -> None:
    for name in before:
        queue.add(name, 3600.0)
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


def test_a_waiting_thread_wakes_when_its_name_is_due() -> None:
    """The test uses the real clock. No other thread wakes the waiting thread."""
    queue = WorkQueue(0.0)
    queue.add("b", 0.02)
    queue.add("a", 0.01)
    assert [queue.next(), queue.next()] == ["a", "b"]
