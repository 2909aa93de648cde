"""For how long something has been seen, by clocks of which one may jump."""

import math
from typing import NamedTuple, Protocol

import msgspec

from controller.garbage.node.names import Keep, KeepReason

# So many names are remembered at once; what is more waits until some of them are done.
MAX_TRACKED = 100_000

_FIRST_RETRY, _LAST_RETRY = 60.0, 3600.0
_MOST_DOUBLINGS = 6


class Now(NamedTuple):
    """A moment: Unix seconds, which an operator or NTP may set at will, and those of a clock that only runs forward."""

    wall: float
    steady: float


class AgePolicy(Protocol):
    """Says whether something must wait. ``begin`` opens each sweep, after which each name is asked for once."""

    def begin(self, now: Now) -> None:
        """Take the time of the sweep that begins."""

    def hold(self, name: str, inode: int, stamp: float) -> Keep | None:
        """Return why this must wait, or None; ``stamp`` is what it tells of its own age, in Unix seconds."""

    def put_off(self, name: str, keep: Keep) -> None:
        """Let what failed for this reason wait, for longer each time in a row."""


class AgeRecord(msgspec.Struct, frozen=True):
    """What was seen under a name, in how many sweeps in a row, and since when; and why, and until when, it is put off.

    ``since`` and ``retry_at`` are seconds of the steady clock.
    """

    inode: int
    since: float
    times: int = 1
    failures: int = 0
    retry_at: float = -math.inf
    failed: Keep | None = None


class ObservedAge:
    """For a process that stays: lets go what it has seen itself, in ``times`` sweeps in a row, for ``seconds``.

    The wall clock alone never lets anything go: it may have jumped forward. Where a stamp lies in the future the clock
    has jumped back, and the stamp says nothing. A name that one sweep does not ask for is forgotten.
    """

    def __init__(self, seconds: float, times: int, most: int = MAX_TRACKED) -> None:
        self._seconds = seconds
        self._times = times
        self._most = most
        self._now = Now(0, 0)
        self._before: dict[str, AgeRecord] = {}
        self._seen: dict[str, AgeRecord] = {}

    def begin(self, now: Now) -> None:
        """Take the time of the sweep that begins."""
        self._now = now
        self._before, self._seen = self._seen, {}

    def hold(self, name: str, inode: int, stamp: float) -> Keep | None:
        """Return why this must wait, or None."""
        if len(self._seen) >= self._most:
            return Keep(KeepReason.TOO_MANY)
        before = self._before.get(name)
        # Another inode is another directory under the same name: made anew, it is as young as any.
        if before is None or before.inode != inode:
            record = AgeRecord(inode, self._now.steady)
        else:
            record = msgspec.structs.replace(before, times=before.times + 1)
        self._seen[name] = record
        if record.times < self._times:
            return Keep(KeepReason.SEEN_ONCE)
        if self._now.steady < record.retry_at:
            return record.failed
        short = self._now.steady - record.since < self._seconds
        return Keep(KeepReason.YOUNG) if short or 0 <= self._now.wall - stamp < self._seconds else None

    def put_off(self, name: str, keep: Keep) -> None:
        """Let what failed wait a minute, and twice as long each time in a row, up to an hour."""
        record = self._seen[name]
        delay = min(_LAST_RETRY, _FIRST_RETRY * 2 ** min(record.failures, _MOST_DOUBLINGS))
        self._seen[name] = msgspec.structs.replace(
            record, failures=record.failures + 1, retry_at=self._now.steady + delay, failed=keep
        )


class ModifiedAge:
    """For a single sweep: goes by what each thing tells of its age, as of its beginning, and at the latest ``as_of``.

    The latter is in Unix seconds. A stamp in the future is no age. This holds only where somebody sees to the clock,
    and to what is let go.
    """

    def __init__(self, seconds: float, as_of: float = math.inf) -> None:
        self._seconds = seconds
        self._as_of = as_of

    def begin(self, now: Now) -> None:
        """Take the time of the sweep that begins."""
        self._as_of = min(self._as_of, now.wall)

    def hold(self, name: str, inode: int, stamp: float) -> Keep | None:  # noqa: ARG002  # the stamp alone counts
        """Return why this must wait, or None."""
        return Keep(KeepReason.YOUNG) if self._as_of - stamp < self._seconds else None

    def put_off(self, name: str, keep: Keep) -> None:
        """There is no later sweep."""
