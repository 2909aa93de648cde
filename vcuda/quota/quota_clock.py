"""Computes the limits that a quota has now. Grants (temporary additions to limits) change them at certain times."""

import time
from collections.abc import Callable
from typing import NamedTuple

from vcuda.quota.model import Quota


class _Known(NamedTuple):
    """A cached result: the quota with the limits from the time ``since`` until ``until``, in Unix seconds."""

    written: Quota
    since: float
    until: float
    quota: Quota


class QuotaClock:
    """Computes the present limits of a quota. ``seconds`` returns the Unix time."""

    def __init__(self, seconds: Callable[[], float] = time.time) -> None:
        self.seconds = seconds
        self._known: _Known | None = None

    def now(self, written: Quota) -> Quota:
        """Return the quota ``written`` with its present limits. The result is cached until a grant begins or ends."""
        if not written.times:
            return written
        moment, known = self.seconds(), self._known
        # The clock may be set back, so the present time is also compared with the start of the cached result. No lock
        # is needed, because two threads would compute equal results.
        if known is None or known.written is not written or not known.since <= moment < known.until:
            known = self._known = _Known(written, moment, written.next_change(moment), written.at(moment))
        return known.quota
