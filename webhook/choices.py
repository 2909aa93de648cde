"""Short local holds: what /mutate has just promised, until /validate charges it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from vcuda.quota.model import Charge, Usage

HOLD = 2.0
"""Seconds after which a hold is forgotten: its pod was charged by another replica, or refused by somebody else."""


class _Hold(NamedTuple):
    until: float
    model: str
    charge: Charge


class _Held:
    """The holds of one namespace, oldest first, and their sums per model."""

    def __init__(self) -> None:
        self.holds: deque[_Hold] = deque()
        self.totals: dict[str, Charge] = {}

    def add(self, hold: _Hold) -> None:
        self.holds.append(hold)
        self.totals[hold.model] = self.totals.get(hold.model, Charge()) + hold.charge

    def expire(self, now: float) -> None:
        while self.holds and self.holds[0].until <= now:
            self._subtract(self.holds.popleft())

    def release(self, model: str, charge: Charge) -> None:
        for hold in self.holds:
            if (hold.model, hold.charge) == (model, charge):
                self.holds.remove(hold)
                self._subtract(hold)
                return

    def _subtract(self, hold: _Hold) -> None:
        left = self.totals[hold.model] - hold.charge
        if left == Charge():
            del self.totals[hold.model]
        else:
            self.totals[hold.model] = left


class RecentChoices:
    """Lets a burst of flexible pods spread over the models that have room, instead of all taking the same last card.

    A hold only steers the choice. It never refuses a pod, and it is no charge.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}

    def add(self, namespace: str, model: str, charge: Charge) -> None:
        """Hold a charge that was promised."""
        with self._lock:
            self._current(namespace).add(_Hold(self._clock() + HOLD, model, charge))

    def release(self, namespace: str, model: str, charge: Charge) -> None:
        """Forget the oldest hold like this one: it is about to be charged."""
        with self._lock:
            self._current(namespace).release(model, charge)

    def on_top_of(self, usages: Mapping[str, Usage], namespace: str) -> Mapping[str, Usage]:
        """Return the usages with what is held counted as used."""
        with self._lock:
            totals = dict(self._current(namespace).totals)
        if not totals:
            return usages
        held = {
            model: Usage(usages.get(model, Usage()).used + charge, usages.get(model, Usage()).pending)
            for model, charge in totals.items()
        }
        return {**usages, **held}

    def _current(self, namespace: str) -> _Held:
        held = self._held.setdefault(namespace, _Held())
        held.expire(self._clock())
        return held
