"""Tests of the queue of large reviews. Each entry has a key, the namespace of the review."""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.replicas import Clock
from tests.waiting import PATIENT
from vcuda.errors import Dropped, DropReason
from webhook.intake.fair_queue import SHARED, Bounds, EntryState, FairQueue, QueueEntry

ONE = Bounds(turns=1, size=0, key_turns=1, key_size=0, waiting=100, keys=100)
FEW = Bounds(turns=4, size=100, key_turns=2, key_size=60, waiting=6, keys=3)


def queue(bounds: Bounds, clock: Clock | None = None) -> FairQueue:
    return FairQueue(bounds, "crowded", "late", (clock or Clock()).monotonic)


def on_turn(entries: Sequence[QueueEntry]) -> list[QueueEntry]:
    return [entry for entry in entries if entry.state is EntryState.ON_TURN]


def served(line: FairQueue, entries: Sequence[QueueEntry]) -> str:
    """Return the keys of the entries in the order of their turns. Each entry leaves before the next gets a turn."""
    order = ""
    while found := on_turn(entries):
        assert len(found) == 1
        order += found[0].key
        line.leave(found[0])
    return order


def test_keys_are_served_in_turn_and_the_entries_of_one_in_order() -> None:
    line = queue(ONE)
    entries = [line.enter(key, 0) for key in "aaaabbc"]
    assert served(line, entries) == "abcabaa"
    assert line.waiting == 0


def test_a_new_key_waits_for_at_most_one_entry_of_each_other_key() -> None:
    """The first entry has its turn already when the new key arrives."""
    line = queue(ONE)
    flood = [line.enter("a", 0) for _ in range(20)]
    assert served(line, [*flood, line.enter("b", 0)])[:3] == "aba"
    flood = [line.enter(key, 0) for key in "ac" * 10]
    assert served(line, [*flood, line.enter("b", 0)])[:4] == "acba"


def test_one_key_never_has_all_turns_and_others_get_the_rest_at_once() -> None:
    line = queue(FEW)
    flood = [line.enter("a", 1) for _ in range(5)]
    assert len(on_turn(flood)) == FEW.key_turns
    assert line.enter("b", 1).state is EntryState.ON_TURN


def test_bytes_are_bounded_per_key_and_in_total() -> None:
    line = queue(FEW)
    first, second = line.enter("a", 50), line.enter("a", 11)
    assert (first.state, second.state) == (EntryState.ON_TURN, EntryState.WAITING)
    third, fourth = line.enter("b", 50), line.enter("c", 1)
    assert (third.state, fourth.state) == (EntryState.ON_TURN, EntryState.WAITING)
    line.leave(first)
    assert (second.state, fourth.state) == (EntryState.ON_TURN, EntryState.ON_TURN)


def test_an_entry_larger_than_the_bound_gets_a_turn_alone_and_is_not_overtaken() -> None:
    line = queue(FEW)
    small, large, later = line.enter("a", 1), line.enter("b", 500), line.enter("c", 1)
    assert (large.state, later.state) == (EntryState.WAITING, EntryState.WAITING)
    line.leave(small)
    assert (large.state, later.state) == (EntryState.ON_TURN, EntryState.WAITING)


def test_if_too_many_wait_the_newest_of_the_longest_line_is_dropped_for_another_key() -> None:
    line = queue(FEW)
    flood = [line.enter("a", 1) for _ in range(FEW.key_turns + FEW.waiting)]
    with pytest.raises(Dropped, match="crowded") as told:
        line.enter("a", 1)
    assert told.value.reason is DropReason.CROWDED
    others = [line.enter("b", 1) for _ in range(4)]
    assert [entry.state for entry in flood[-3:]] == [EntryState.WAITING, EntryState.DROPPED, EntryState.DROPPED]
    assert [entry.state for entry in others] == [
        EntryState.ON_TURN,
        EntryState.ON_TURN,
        EntryState.WAITING,
        EntryState.WAITING,
    ]
    assert line.waiting == FEW.waiting


def test_further_keys_share_a_line() -> None:
    """Further keys share one line of the queue. So a tenant with a new key for each entry cannot fill the queue."""
    line = queue(FEW)
    for key in "abcd":
        line.enter(key, 1)
    keys = [line.enter(key, 1).key for key in "abcefa"]
    assert keys == [*"abc", SHARED, SHARED, "a"]


def test_an_entry_never_gets_a_turn_after_its_end(clock: Clock) -> None:
    """The process was suspended, so deadlines of waiting entries passed before their timers could run."""
    line = queue(ONE, clock)
    first, late, good = (line.enter(key, 0, end=clock.now + end) for key, end in (("a", 9), ("b", 5), ("c", 7)))
    clock.pass_by(6)
    line.leave(first)
    assert (late.state, late.reason, good.state) == (EntryState.DROPPED, DropReason.LATE, EntryState.ON_TURN)
    with pytest.raises(Dropped, match="late"):
        asyncio.run(wait(line, "a", end=clock.now))


async def wait(line: FairQueue, key: str, end: float = math.inf) -> str:
    async with line.turn(key, 0, end):
        return key


def test_a_waiting_entry_is_woken_dropped_at_its_end_and_frees_its_place_when_cancelled() -> None:
    async def run() -> None:
        clock = Clock()
        line = queue(ONE, clock)
        first = line.enter("a", 0)
        ends = {"b": clock.now + 0.01, "c": clock.now + 9, "d": clock.now + 9}
        late, gone, last = (asyncio.create_task(wait(line, key, end)) for key, end in ends.items())
        with pytest.raises(Dropped, match="late"):
            await late
        # This gives a turn to the entry of the caller `gone`, which is cancelled before its task runs again.
        line.leave(first)
        gone.cancel()
        assert await asyncio.wait_for(last, PATIENT) == "d"
        assert (gone.cancelled(), line.waiting) == (True, 0)
        assert line.enter("e", 0).state is EntryState.ON_TURN

    asyncio.run(run())


class Machine(RuleBasedStateMachine):
    """A state machine of the queue of large reviews. Entries arrive, leave and expire in any order."""

    entries = Bundle("entries")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.queue = queue(FEW, self.clock)
        self.all: list[QueueEntry] = []

    @rule(target=entries, key=st.sampled_from("abcdefgh"), size=st.integers(0, 120), wait=st.integers(1, 9))
    def enter(self, key: str, size: int, wait: int) -> QueueEntry:
        try:
            entry = self.queue.enter(key, size, self.clock.now + wait)
        except Dropped:
            assert self.queue.waiting == FEW.waiting
            return self.all[0]
        self.all.append(entry)
        return entry

    @rule(entry=entries)
    def leave(self, entry: QueueEntry) -> None:
        self.queue.leave(entry)

    @rule()
    def pass_time(self) -> None:
        self.clock.now += 1

    @invariant()
    def nothing_exceeds_its_bounds(self) -> None:
        held, waiting = on_turn(self.all), [entry for entry in self.all if entry.state is EntryState.WAITING]
        assert len(held) <= FEW.turns
        assert len(held) <= 1 or sum(entry.size for entry in held) <= FEW.size
        for key, count in Counter(entry.key for entry in held).items():
            assert count <= FEW.key_turns
            assert count == 1 or sum(entry.size for entry in held if entry.key == key) <= FEW.key_size
        assert len(waiting) == self.queue.waiting <= FEW.waiting
        assert len({entry.key for entry in waiting}) <= FEW.keys + 1
        assert all(
            entry.decided.is_set() for entry in self.all if entry.state in (EntryState.ON_TURN, EntryState.DROPPED)
        )

    @invariant()
    def nobody_waits_if_no_entry_has_a_turn_and_no_key_alone(self) -> None:
        held, waiting = on_turn(self.all), [entry for entry in self.all if entry.state is EntryState.WAITING]
        assert held or not waiting
        # An entry waits only if its key already has a turn, or if the bounds leave no room for the entry.
        fits = [entry for entry in waiting if entry.key not in {each.key for each in held}]
        room = len(held) < FEW.turns and sum(entry.size for entry in held) + 120 <= FEW.size
        assert not (room and fits)


def test_no_order_of_callers_exceeds_the_bounds_or_waits_without_need() -> None:
    run_state_machine_as_test(Machine)
