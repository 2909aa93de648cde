"""The quota at present, by the clock of this process."""

import time
from collections.abc import Callable
from typing import NamedTuple

from vcuda.quota.model import Quota


class _Known(NamedTuple):
    """A quota with the limits that hold from ``since`` until ``until``, in Unix seconds."""

    written: Quota
    since: float
    until: float
    quota: Quota


class QuotaClock:
    """Returns a quota with its present limits. ``seconds`` returns the Unix time, which alone decides about limits."""

    def __init__(self, seconds: Callable[[], float] = time.time) -> None:
        self.seconds = seconds
        self._known: _Known | None = None

    def now(self, written: Quota) -> Quota:
        """Return the quota ``written`` with its present limits."""
        if not written.times:
            return written
        moment, known = self.seconds(), self._known
        # The clock may be set back. If two threads compute the limits at the same time, their results are equal.
        if known is None or known.written is not written or not known.since <= moment < known.until:
            known = self._known = _Known(written, moment, written.next_change(moment), written.at(moment))
        return known.quota
