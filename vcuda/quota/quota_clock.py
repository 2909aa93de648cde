"""Computes the limits that a quota has now. Grants (temporary additions to limits) change them at certain times."""

import math
import time
from collections.abc import Callable

from vcuda.quota.model import Quota


class QuotaClock:
    """Computes the present limits of a quota. ``seconds`` returns the Unix time."""

    def __init__(self, seconds: Callable[[], float] = time.time) -> None:
        self.seconds = seconds
        # `_known`: a quota, the same quota with the limits of a moment, and the time in Unix seconds when these end.
        self._known = (Quota(), Quota(), -math.inf)

    def now(self, written: Quota) -> Quota:
        """Return the quota ``written`` with its present limits. The result is cached until a grant begins or ends."""
        if not written.times:
            return written
        moment, (known, quota, until) = self.seconds(), self._known
        # The clock may be set back, so the present time is also compared with the start of the cached result. No lock
        # is needed, because two threads would compute equal results.
        if known is not written or not (quota.moment or 0) <= moment < until:
            quota = written.at(moment)
            self._known = (written, quota, written.next_change(moment))
        return quota
