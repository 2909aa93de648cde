"""Callers that arrive together are served together: in order, each once, and nobody is left waiting."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.waiting import PATIENT, Deadline
from webhook.ledger_client import Ticket, Turns

Batch = Sequence[Ticket[str, str]]


def capitals(batch: Batch) -> None:
    for ticket in batch:
        ticket.result = ticket.item.upper()


class Desk:
    """Turns whose work stops at a gate: each batch waits until the test lets it through.

    ``batches`` holds their items, ``leaders`` whose thread worked each of them off.
    """

    def __init__(self) -> None:
        self.work: Callable[[Batch], None] = capitals
        self.batches: list[list[str]] = []
        self.leaders: list[str] = []
        self.turns: Turns[str, str] = Turns(self._at_the_gate, self._gather)
        self.gathered = 0
        self._arrived = threading.Semaphore(0)
        self._gate = threading.Semaphore(0)
        self._callers = ThreadPoolExecutor(16)

    def _gather(self) -> None:
        self.gathered += 1

    def _at_the_gate(self, batch: Batch) -> None:
        self.batches.append([ticket.item for ticket in batch])
        self.leaders.append(threading.current_thread().name)
        self._arrived.release()
        assert self._gate.acquire(timeout=PATIENT)
        self.work(batch)

    def leads(self, item: str, deadline: float | None = None) -> Future[str | None]:
        """Let a caller in that finds nobody there; return when its batch is at the gate."""
        caller = self._call(item, Deadline() if deadline is None else deadline)
        self.arrived()
        return caller

    def waits(self, item: str, deadline: Deadline | None = None) -> Future[str | None]:
        """Let a caller in behind others; return when it stands in the queue."""
        deadline = deadline or Deadline()
        caller = self._call(item, deadline)
        assert deadline.read.wait(PATIENT)
        return caller

    def arrived(self) -> None:
        """Wait until the next batch is at the gate."""
        assert self._arrived.acquire(timeout=PATIENT)

    def open(self, batches: int = 1) -> None:
        self._gate.release(batches)

    def close(self) -> None:
        self.open(1000)
        self._callers.shutdown()

    def _call(self, item: str, deadline: float) -> Future[str | None]:
        def serve() -> str | None:
            threading.current_thread().name = item
            return self.turns.serve(item, deadline)

        return self._callers.submit(serve)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.close()


def results(*callers: Future[str | None]) -> list[str | None]:
    return [caller.result(PATIENT) for caller in callers]


# Batches


def test_a_caller_alone_is_served_at_once(desk: Desk) -> None:
    desk.open(2)
    assert [desk.turns.serve(item, Deadline()) for item in "ab"] == ["A", "B"]
    assert desk.batches == [["a"], ["b"]]


def test_callers_that_wait_together_are_one_batch_in_order(desk: Desk) -> None:
    callers = [desk.leads("a"), *(desk.waits(item) for item in "bcde")]
    desk.open(2)
    assert results(*callers) == list("ABCDE")
    assert desk.batches == [["a"], ["b", "c", "d", "e"]]


def test_the_lead_is_handed_to_the_first_that_waits(desk: Desk) -> None:
    """Nobody works for others for long: who led has its answer while the next batch is still in work."""
    first, second, third = desk.leads("a"), desk.waits("b"), desk.waits("c")
    desk.open()
    assert results(first) == ["A"]
    desk.arrived()
    fourth = desk.waits("d")
    desk.open(2)
    assert results(second, third, fourth) == ["B", "C", "D"]
    assert list(zip(desk.leaders, desk.batches, strict=True)) == [("a", ["a"]), ("b", ["b", "c"]), ("d", ["d"])]


def test_a_leader_waits_for_more_only_after_a_batch_of_several(desk: Desk) -> None:
    callers = [desk.leads("a"), desk.waits("b"), desk.waits("c")]
    desk.open(4)
    assert results(*callers) == list("ABC")
    assert (desk.batches, desk.gathered) == ([["a"], ["b", "c"]], 0)
    assert [desk.turns.serve(item, Deadline()) for item in "de"] == ["D", "E"]
    assert desk.gathered == 1, "before d, and no more before e"


# Deadlines


def test_a_caller_whose_deadline_comes_leaves_the_queue(desk: Desk) -> None:
    first, late, last = desk.leads("a"), desk.waits("b", Deadline(0)), desk.waits("c")
    assert results(late) == [None]
    desk.open(2)
    assert results(first, last) == ["A", "C"]
    assert desk.batches == [["a"], ["c"]]


def test_when_the_last_that_waited_has_left_the_next_caller_leads(desk: Desk) -> None:
    first, late = desk.leads("a"), desk.waits("b", Deadline(0))
    assert results(late) == [None]
    desk.open()
    assert results(first) == ["A"]
    assert desk.leads("c").running()


def test_a_caller_whose_deadline_comes_as_it_is_asked_to_lead_still_leads(desk: Desk) -> None:
    """Were it to leave with the lead, nobody would ever be served again."""
    deadline = Deadline(0, held=True)
    first, promoted, last = desk.leads("a"), desk.waits("b", deadline), desk.waits("c")
    desk.open()
    assert results(first) == ["A"]
    deadline.goes_on.set()
    desk.arrived()
    desk.open()
    assert results(promoted, last) == ["B", "C"]
    assert desk.leaders == ["a", "b"]


def test_a_leader_whose_deadline_has_come_works_its_batch_off(desk: Desk) -> None:
    first = desk.leads("a", deadline=Deadline(-1))
    last = desk.waits("b")
    desk.open(2)
    assert results(first, last) == ["A", "B"]


def test_a_deadline_that_comes_while_the_item_is_in_work_ends_the_wait(desk: Desk) -> None:
    """The caller is told nothing of what became of it, and the others never notice."""
    deadline = Deadline(0, held=True)
    callers = [desk.leads("a"), desk.waits("b"), desk.waits("c", deadline), desk.waits("d")]
    desk.open()
    desk.arrived()
    deadline.goes_on.set()
    assert results(callers[2]) == [None]
    desk.open()
    assert results(callers[0], callers[1], callers[3]) == ["A", "B", "D"]
    assert desk.batches == [["a"], ["b", "c", "d"]]


# Errors


class BrokenError(Exception):
    """What went wrong in the work."""


def test_an_error_reaches_every_caller_that_has_no_result(desk: Desk) -> None:
    def half(batch: Batch) -> None:
        capitals([ticket for ticket in batch if ticket.item in "ac"])
        raise BrokenError

    desk.work = half
    callers = [desk.leads("a"), *(desk.waits(item) for item in "bcd")]
    desk.open(2)
    assert results(callers[0], callers[2]) == ["A", "C"]
    for caller in (callers[1], callers[3]):
        with pytest.raises(BrokenError):
            caller.result(PATIENT)


def test_after_an_error_the_queue_goes_on(desk: Desk) -> None:
    def first_fails(_: Batch) -> None:
        desk.work = capitals
        raise BrokenError

    desk.work = first_fails
    first, second = desk.leads("a"), desk.waits("b")
    desk.open(3)
    with pytest.raises(BrokenError):
        first.result(PATIENT)
    assert results(second, desk.leads("c")) == ["B", "C"]


def test_a_leader_whose_thread_is_ended_wakes_everybody_and_hands_over(desk: Desk) -> None:
    """gunicorn ends a thread by SystemExit: its batch has no answer, the queue goes on."""

    def ended(_: Batch) -> None:
        desk.work = capitals
        raise SystemExit

    callers = [desk.leads("a"), desk.waits("b"), desk.waits("c")]
    desk.open()
    assert results(callers[0]) == ["A"]
    desk.arrived()
    last = desk.waits("d")
    desk.work = ended
    desk.open(2)
    with pytest.raises(SystemExit):
        callers[1].result(PATIENT)
    assert results(callers[2], last) == [None, "D"]


def test_an_item_that_the_work_passes_over_has_no_result(desk: Desk) -> None:
    desk.work = lambda batch: capitals([ticket for ticket in batch if ticket.item != "b"])
    callers = [desk.leads("a"), desk.waits("b"), desk.waits("c")]
    desk.open(2)
    assert results(*callers) == ["A", None, "C"]


# Many threads


class Crowd:
    """Many threads that call again and again, some with no time to wait, while the work fails now and then."""

    def __init__(self, seed: int) -> None:
        self.served: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self._turns: Turns[str, str] = Turns(self._work)
        self._random = random.Random(seed)  # noqa: S311  # chooses the interleavings of a test
        self._working = threading.Lock()
        self._lock = threading.Lock()

    def run(self, threads: int, calls: int) -> None:
        with ThreadPoolExecutor(threads) as executor:
            for caller in [executor.submit(self._caller, name, calls) for name in range(threads)]:
                caller.result(PATIENT)

    def _work(self, batch: Batch) -> None:
        assert self._working.acquire(blocking=False), "two batches are in work at once"
        try:
            if self._random.random() < 0.1:
                raise BrokenError
            self.served.extend(ticket.item for ticket in batch)
            capitals(batch)
        finally:
            self._working.release()

    def _caller(self, name: int, calls: int) -> None:
        for number in range(calls):
            outcome = self._call(f"caller-{name}-{number}", patient=bool((name + number) % 3))
            with self._lock:
                self.outcomes[outcome] += 1

    def _call(self, item: str, *, patient: bool) -> str:
        try:
            result = self._turns.serve(item, time.monotonic() + (2 * PATIENT if patient else 0))
        except BrokenError:
            return "failed"
        if result is None:
            return "lost" if patient else "late"
        assert result == item.upper(), "a caller got another's result"
        return "served"


@pytest.mark.parametrize("seed", range(3))
def test_no_wake_up_is_lost_and_nothing_is_served_twice(seed: int) -> None:
    crowd = Crowd(seed)
    crowd.run(threads=12, calls=150)
    assert crowd.outcomes["lost"] == 0
    assert crowd.outcomes.total() == 12 * 150
    assert len(set(crowd.served)) == len(crowd.served) >= crowd.outcomes["served"] > 0
    for name in range(12):
        own = [int(item.rpartition("-")[2]) for item in crowd.served if item.startswith(f"caller-{name}-")]
        assert own == sorted(own), "each caller's items are in order"
