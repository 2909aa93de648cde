"""Decides whether the directory of a deleted pod is old enough to be deleted, even if the wall clock jumps."""

from typing import NamedTuple

from controller.garbage.node.names import Keep, KeepReason

# The ages of at most this many directories are tracked. Further directories stay until a tracked directory is deleted.
MAX_TRACKED = 100_000


class Now(NamedTuple):
    """One moment on two clocks, in seconds. ``wall``: Unix time, which may jump. ``steady``: a monotonic clock."""

    wall: float
    steady: float


class ObservedAge:
    """Tracks how long directories of deleted pods have been observed.

    A directory is old enough if at least two consecutive sweeps have found it, the first one ``seconds`` ago or
    earlier. Its last change, the Unix time ``stamp``, must also be at least ``seconds`` ago. This condition alone is
    not enough, because the wall clock may have jumped forward. A ``stamp`` in the future is ignored.

    Each sweep (one pass over all directories) calls ``begin``, and then ``hold`` for each directory of a deleted pod.
    If a sweep does not call ``hold`` for a directory, the age of the directory starts over.
    """

    def __init__(self, seconds: float, most: int = MAX_TRACKED) -> None:
        self._seconds = seconds
        self._most = most
        self._now = Now(0, 0)
        # The inode of each directory, and when a sweep first found it, in seconds of the monotonic clock.
        self._before: dict[str, tuple[int, float]] = {}
        self._seen: dict[str, tuple[int, float]] = {}

    def begin(self, now: Now) -> None:
        self._now = now
        self._before, self._seen = self._seen, {}

    def hold(self, name: str, inode: int, stamp: float) -> Keep | None:
        """Return why to keep a directory; None if it is old enough. ``stamp``: Unix time of its last change."""
        if len(self._seen) >= self._most:
            return Keep(KeepReason.TOO_MANY)
        before = self._before.get(name)
        # A directory with a different inode is a new directory under the same name, so its age starts now.
        if before is None or before[0] != inode:
            self._seen[name] = inode, self._now.steady
            return Keep(KeepReason.SEEN_ONCE)
        self._seen[name] = before
        short = self._now.steady - before[1] < self._seconds
        return Keep(KeepReason.YOUNG) if short or 0 <= self._now.wall - stamp < self._seconds else None
