"""Decides whether the directory of a deleted pod is old enough to be removed, even if the wall clock jumps."""

import math
from typing import NamedTuple

import msgspec

from controller.garbage.node.names import Keep, KeepReason

# The ages of at most this many directories are tracked. Other directories stay until a tracked directory is removed.
MAX_TRACKED = 100_000

_FIRST_RETRY, _LAST_RETRY = 60.0, 3600.0
_MOST_DOUBLINGS = 6


class Now(NamedTuple):
    """One moment on two clocks, in seconds. ``wall``: Unix time, which may jump. ``steady``: a monotonic clock."""

    wall: float
    steady: float


class AgeRecord(msgspec.Struct, frozen=True):
    """The state of one directory that an age policy keeps between sweeps (passes over all directories).

    ``since``: when a sweep first found the directory, in seconds of the monotonic clock.
    ``times``: the number of consecutive sweeps that found the directory.
    ``failures``, ``failed``: the number of failed removals, and the reason of the last failure.
    ``retry_at``: the earliest time of the next attempt to remove the directory, in seconds of the monotonic clock.
    """

    inode: int
    since: float
    times: int = 1
    failures: int = 0
    retry_at: float = -math.inf
    failed: Keep | None = None


class ObservedAge:
    """The age policy of a running agent.

    A directory is old enough if at least ``times`` consecutive sweeps have found it, the first one ``seconds`` ago or
    earlier. The Unix time ``stamp`` must be ``seconds`` ago, too. ``stamp`` alone is not enough, because the wall clock
    may have jumped forward. A ``stamp`` in the future is ignored.

    Each sweep (one pass over all directories) calls ``begin``, and then ``hold`` for each directory of a deleted pod.
    If a sweep does not call ``hold`` for a directory, the record of the directory is deleted.
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
        """Return why to keep a directory; None if it is old enough. ``stamp``: Unix time of its last change or move."""
        if len(self._seen) >= self._most:
            return Keep(KeepReason.TOO_MANY)
        before = self._before.get(name)
        # A directory with a different inode is a new directory under the same name, so its age starts now.
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
        """Record why a directory could not be removed, and delay the next attempt by a minute.

        Each further failure doubles the delay, up to an hour.
        """
        record = self._seen[name]
        delay = min(_LAST_RETRY, _FIRST_RETRY * 2 ** min(record.failures, _MOST_DOUBLINGS))
        self._seen[name] = msgspec.structs.replace(
            record, failures=record.failures + 1, retry_at=self._now.steady + delay, failed=keep
        )


class ModifiedAge:
    """The age policy of a single sweep (``--once``): a directory's age is the time from ``stamp`` to the sweep's start.

    If the list of pods is older than the sweep, the age ends at the time of the list: ``as_of``, in Unix seconds. A
    directory with a ``stamp`` in the future counts as too young. This policy trusts the wall clock, so a person must
    check the clock and the result.
    """

    def __init__(self, seconds: float, as_of: float = math.inf) -> None:
        self._seconds = seconds
        self._as_of = as_of

    def begin(self, now: Now) -> None:
        self._as_of = min(self._as_of, now.wall)

    def hold(self, name: str, inode: int, stamp: float) -> Keep | None:  # noqa: ARG002  # Only `stamp` decides the age.
        return Keep(KeepReason.YOUNG) if self._as_of - stamp < self._seconds else None

    def put_off(self, name: str, keep: Keep) -> None:
        """Do nothing, because this process makes no later sweep that would retry the removal."""


AgePolicy = ObservedAge | ModifiedAge
"""Decides whether a directory is old enough to be removed."""
