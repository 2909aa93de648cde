"""What a sweep says about each thing that it came upon."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from vcuda.vm_directories import Keep


class Verdict(StrEnum):
    """What was done."""

    KEPT = "kept"
    MOVED = "moved"
    DELETED = "deleted"
    RESTORED = "restored"
    WOULD_MOVE = "would move"
    WOULD_DELETE = "would delete"
    WOULD_RESTORE = "would restore"


class Outcome(msgspec.Struct, frozen=True):
    """``path`` is relative to the root; ``keep`` tells why it was kept; ``freed`` is in bytes.

    The path may hold bytes that are no UTF-8, as os.fsdecode gives them, and control characters: see `shown`.
    """

    path: str
    verdict: Verdict
    keep: Keep | None = None
    freed: int = 0

    @property
    def why(self) -> str:
        """The reason as a clause."""
        return str(self.keep) if self.keep else _BECAUSE[self.verdict]


_BECAUSE = {
    Verdict.KEPT: "",
    Verdict.MOVED: "its pod is gone",
    Verdict.DELETED: "its time in the trash is over",
    Verdict.RESTORED: "its pod exists, or its move was interrupted",
}
_BECAUSE |= {
    Verdict.WOULD_MOVE: _BECAUSE[Verdict.MOVED],
    Verdict.WOULD_DELETE: _BECAUSE[Verdict.DELETED],
    Verdict.WOULD_RESTORE: _BECAUSE[Verdict.RESTORED],
}

Report = Callable[[Outcome], None]
"""Told of everything in the root and in the trash, once a sweep."""


def shown(text: str) -> str:
    """Return a name that came from a disk as plain text: what a terminal might obey, or JSON not hold, is escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
