"""A bounded queue in which namespaces take turns, so that no namespace delays the reviews of another for long.

An entry is one review. A turn permits the entry to be decided now. Each namespace (key) has a line: the queue of its
waiting entries. The lines are in an order. The next turn goes to the first line whose key may have another turn. A
line moves behind all other lines when one of its entries gets a turn, and again when this entry leaves. So the first
entry of a new key waits for at most one entry of each other key.
"""

import asyncio
import enum
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec

from vcuda.errors import Dropped, DropReason

SHARED = ""
"""The key of the line for reviews without a namespace, and for new namespaces if `Bounds.keys` lines already exist."""


class Bounds(msgspec.Struct, frozen=True):
    """The maximum number and size of a queue's entries (waiting reviews) and turns (reviews being decided)."""

    turns: int
    """The maximum number of reviews that have a turn (are being decided) at the same time."""
    size: int
    """The maximum total size in bytes of the reviews with a turn. If no review has a turn, any review fits."""
    key_turns: int
    """The maximum number of reviews of one key (namespace) that have a turn at the same time."""
    key_size: int
    """The maximum total size in bytes of one key's reviews with a turn. If the key has no turn, any review fits."""
    waiting: int
    """The maximum number of reviews that wait in the queue."""
    keys: int
    """The maximum number of keys (namespaces) with a queue (line) of their own. Reviews of other keys share one."""


class EntryState(enum.Enum):
    """The state of a review in the queue. It is LEFT after the caller has ended the wait or the turn."""

    WAITING = "waiting"
    ON_TURN = "on-turn"
    DROPPED = "dropped"
    LEFT = "left"


class QueueEntry:
    """One review of ``size`` bytes. It waits for a turn at most until ``end``, and keeps the turn until it leaves."""

    def __init__(self, key: str, size: int, end: float) -> None:
        self.key = key
        self.size = size
        self.end = end
        self.state = EntryState.WAITING
        self.reason = DropReason.LATE
        self.decided = asyncio.Event()  # the event is set when the state changes to ON_TURN or DROPPED


class _Held(NamedTuple):
    """The number and the total size of the reviews with a turn, of one key (namespace) or of all keys."""

    turns: int = 0
    size: int = 0

    def has_room(self, entry: QueueEntry, turns: int, size: int) -> bool:
        return not self.turns or (self.turns < turns and self.size + entry.size <= size)

    def changed(self, turns: int, size: int) -> "_Held":
        return _Held(self.turns + turns, self.size + size)


class FairQueue:
    """The waiting reviews, in one line per key (namespace), and those with a turn. One event loop must make all calls.

    ``crowded`` and ``late``: messages of exception Dropped if too many reviews wait, or if one has waited too long.
    """

    def __init__(self, bounds: Bounds, crowded: str, late: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._messages = {DropReason.CROWDED: crowded, DropReason.LATE: late}
        self._clock = clock
        # Maps each key to its line of waiting entries. The first line has the next turn. An empty line is removed.
        self._lines: OrderedDict[str, deque[QueueEntry]] = OrderedDict()
        self._held: dict[str, _Held] = {}
        self._total = _Held()
        self.waiting = 0

    @asynccontextmanager
    async def turn(self, key: str, size: int, end: float) -> AsyncIterator[None]:
        """Wait until ``end`` for a turn, and keep it during the ``with`` block. Raises Dropped if no turn comes."""
        entry = self.enter(key, size, end)
        try:
            if entry.state is EntryState.WAITING:
                await self._await_decision(entry)
            if entry.state is EntryState.DROPPED:
                raise self._dropped(entry.reason)
            yield
        finally:
            self.leave(entry)

    async def _await_decision(self, entry: QueueEntry) -> None:
        # In Python 3.11, asyncio.wait_for() loses a cancellation that arrives together with the result. So this method
        # uses asyncio.timeout() instead.
        try:
            async with asyncio.timeout(None if math.isinf(entry.end) else entry.end - self._clock()):
                await entry.decided.wait()
        except TimeoutError:
            if entry.state is EntryState.WAITING:
                self._drop(entry, DropReason.LATE)

    def enter(self, key: str, size: int, end: float = math.inf) -> QueueEntry:
        """Add an entry to its line, and give it a turn if possible. Raises Dropped if too many entries wait."""
        if key not in self._lines and len(self._lines) >= self._bounds.keys:
            key = SHARED
        if self.waiting >= self._bounds.waiting:
            # A full queue drops the last entry of its longest line, or the new entry if the new entry's line is about
            # as long. So a namespace with few reviews still gets in if another namespace has filled the queue.
            longest = max(self._lines.values(), key=len)
            if len(longest) < len(self._lines.get(key, ())) + 2:
                raise self._dropped(DropReason.CROWDED)
            self._drop(longest[-1], DropReason.CROWDED)
        entry = QueueEntry(key, size, end)
        self._lines.setdefault(key, deque()).append(entry)
        self.waiting += 1
        self._give_turns()
        return entry

    def leave(self, entry: QueueEntry) -> None:
        """End the wait or the turn of an entry. Another call for the same entry has no effect."""
        if entry.state is EntryState.WAITING:
            self._take_out(entry)
        elif entry.state is EntryState.ON_TURN:
            self._add(entry, -1)
            if entry.key in self._lines:
                self._lines.move_to_end(entry.key)
        entry.state = EntryState.LEFT
        self._give_turns()

    def _give_turns(self) -> None:
        while entry := self._next():
            # If this process was suspended, the deadline of a waiting entry may have passed unnoticed.
            if entry.end <= self._clock():
                self._drop(entry, DropReason.LATE)
                continue
            self._take_out(entry)
            if entry.key in self._lines:
                self._lines.move_to_end(entry.key)
            self._add(entry, 1)
            entry.state = EntryState.ON_TURN
            entry.decided.set()

    def _next(self) -> QueueEntry | None:
        bounds = self._bounds
        for key, line in self._lines.items():
            if self._held.get(key, _Held()).has_room(line[0], bounds.key_turns, bounds.key_size):
                # If the first entry of this line does not fit, no entry gets a turn. Otherwise smaller entries of other
                # lines could overtake this entry forever.
                return line[0] if self._total.has_room(line[0], bounds.turns, bounds.size) else None
        return None

    def _drop(self, entry: QueueEntry, reason: DropReason) -> None:
        self._take_out(entry)
        entry.state, entry.reason = EntryState.DROPPED, reason
        entry.decided.set()

    def _dropped(self, reason: DropReason) -> Dropped:
        return Dropped(self._messages[reason], reason)

    def _take_out(self, entry: QueueEntry) -> None:
        line = self._lines[entry.key]
        line.remove(entry)
        if not line:
            del self._lines[entry.key]
        self.waiting -= 1

    def _add(self, entry: QueueEntry, turns: int) -> None:
        size = turns * entry.size
        held = self._held.pop(entry.key, _Held()).changed(turns, size)
        if held.turns:
            self._held[entry.key] = held
        self._total = self._total.changed(turns, size)
