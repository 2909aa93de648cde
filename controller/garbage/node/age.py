"""Decides whether a directory is old enough to be removed, although the wall clock may jump."""

import math
from typing import NamedTuple, Protocol

import msgspec

from controller.garbage.node.names import Keep, KeepReason

# The most directories that are tracked at once. Further ones wait until some of these are removed.
MAX_TRACKED = 100_000

_FIRST_RETRY, _LAST_RETRY = 60.0, 3600.0
_MOST_DOUBLINGS = 6


class Now(NamedTuple):
    """A time: Unix seconds, which an operator or NTP may change, and seconds of a monotonic clock."""

    wall: float
    steady: float


class AgePolicy(Protocol):
    """Decides whether a directory must wait. Each sweep calls ``begin``, and then ``hold`` once for each name."""

    def begin(self, now: Now) -> None:
        """Start a sweep at this time."""

    def hold(self, name: str, inode: int, stamp: float) -> Keep | None:
        """Return why a directory must wait, or None; ``stamp`` is its own time, in Unix seconds."""

    def put_off(self, name: str, keep: Keep) -> None:
        """Delay the next try after a failure for this reason, longer after each failure in a row."""


class AgeRecord(msgspec.Struct, frozen=True):
    """The sightings of one name.

    ``since``: when it was seen first, in seconds of the monotonic clock.
    ``times``: the number of sweeps in a row that saw it.
    ``failures``, ``failed``: the number of failed removals, and the reason of the last one.
    ``retry_at``: the earliest time of the next try, in seconds of the monotonic clock.
    """

    inode: int
    since: float
    times: int = 1
    failures: int = 0
    retry_at: float = -math.inf
    failed: Keep | None = None


class ObservedAge:
    """The policy of a process that stays: a name must be seen in ``times`` sweeps in a row, and for ``seconds``.

    The wall clock alone is never enough, because it may have jumped forward. A stamp in the future is ignored, because
    the clock has jumped back. A name that a sweep does not ask for is forgotten.
    """

    def __init__(self, seconds: float, times: int, most: int = MAX_TRACKED) -> None:
        self._seconds = seconds
        self._times = times
        self._most = most
        self._now = Now(0, 0)
        self._before: dict[str, AgeRecord] = {}
        self._seen: dict[str, AgeRecord] = {}

    def begin(self, now: Now) -> None:
        self._now = now
        self._before, self._seen = self._seen, {}

    def hold(self, name: str, inode: int, stamp: float) -> Keep | None:
        if len(self._seen) >= self._most:
            return Keep(KeepReason.TOO_MANY)
        before = self._before.get(name)
        # A different inode means that this is a new directory of the same name.
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
        """Delay the next try by a minute, and by twice as long after each further failure, up to an hour."""
        record = self._seen[name]
        delay = min(_LAST_RETRY, _FIRST_RETRY * 2 ** min(record.failures, _MOST_DOUBLINGS))
        self._seen[name] = msgspec.structs.replace(
            record, failures=record.failures + 1, retry_at=self._now.steady + delay, failed=keep
        )


class ModifiedAge:
    """The policy of a single sweep: the age is the time from the stamp to the start of the sweep, or to ``as_of``.

    The earlier of the two counts; ``as_of`` is in Unix seconds. A stamp in the future means too young. This policy
    trusts the wall clock, so a person must check the clock and the result.
    """

    def __init__(self, seconds: float, as_of: float = math.inf) -> None:
        self._seconds = seconds
        self._as_of = as_of

    def begin(self, now: Now) -> None:
        self._as_of = min(self._as_of, now.wall)

    def hold(self, name: str, inode: int, stamp: float) -> Keep | None:  # noqa: ARG002  # the stamp alone counts
        return Keep(KeepReason.YOUNG) if self._as_of - stamp < self._seconds else None

    def put_off(self, name: str, keep: Keep) -> None:
        """Do nothing, because there is no later sweep."""
