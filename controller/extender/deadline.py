"""How long the scheduler may be kept waiting."""

from __future__ import annotations

import time
from collections.abc import Callable

from vcuda.errors import NotPlaced

BUDGET = 12.0
"""Seconds for one answer, whatever fails: fewer than the scheduler's httpTimeout, 15, by more than one call takes."""

LEAST = 0.2
"""Seconds; with fewer a call is not begun: it would only be left without an answer."""


class Deadline:
    """When an answer is due, ``BUDGET`` seconds from now. ``clock`` only runs forward, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock() + BUDGET

    def within(self, seconds: float) -> float:
        """Return how many seconds what is done next may take: so many, or those that are left.

        Raises:
            NotPlaced: too few are left.

        """
        left = self._at - self._clock()
        if left < LEAST:
            raise NotPlaced("there was no time left to place the pod")
        return min(seconds, left)
