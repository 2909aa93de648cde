"""The quota at the present moment, by the clock of this process."""

import time
from collections.abc import Callable
from typing import NamedTuple

from vcuda.quota.model import Quota


class _Known(NamedTuple):
    """A quota with the limits of a time."""

    written: Quota
    since: float
    until: float
    quota: Quota


class QuotaClock:
    """Returns a quota with the limits of now. ``seconds``, Unix time, is the only clock that decides about a limit."""

    def __init__(self, seconds: Callable[[], float] = time.time) -> None:
        self.seconds = seconds
        self._known: _Known | None = None

    def now(self, written: Quota) -> Quota:
        """Return a quota, given as it is written, with the limits of now."""
        if not written.times:
            return written
        moment, known = self.seconds(), self._known
        # A clock may be set back. Two threads may come here at once, and make the same twice.
        if known is None or known.written is not written or not known.since <= moment < known.until:
            known = self._known = _Known(written, moment, written.next_change(moment), written.at(moment))
        return known.quota
