"""Short local holds: what /mutate has just promised, until /validate charges it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from vcuda.charge import Charge, Usage

HOLD = 2.0
"""Seconds after which a hold is forgotten: its pod was charged by another replica, or refused by somebody else."""


class _Hold(NamedTuple):
    until: float
    model: str
    charge: Charge


class Holds:
    """Lets a burst of flexible pods spread over the models that have room, instead of all taking the same last card.

    A hold only steers the choice. It never refuses a pod, and it is no charge.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, deque[_Hold]] = {}

    def add(self, namespace: str, model: str, charge: Charge) -> None:
        """Hold a charge that was promised."""
        with self._lock:
            self._current(namespace).append(_Hold(self._clock() + HOLD, model, charge))

    def release(self, namespace: str, model: str, charge: Charge) -> None:
        """Forget the oldest hold like this one: it is about to be charged."""
        with self._lock:
            held = self._current(namespace)
            for hold in held:
                if (hold.model, hold.charge) == (model, charge):
                    held.remove(hold)
                    return

    def on_top_of(self, usages: Mapping[str, Usage], namespace: str) -> Mapping[str, Usage]:
        """Return the usages with what is held counted as used."""
        with self._lock:
            held = tuple(self._current(namespace))
        total = dict(usages)
        for hold in held:
            usage = total.get(hold.model, Usage())
            total[hold.model] = Usage(usage.used + hold.charge, usage.pending)
        return total

    def _current(self, namespace: str) -> deque[_Hold]:
        held = self._held.setdefault(namespace, deque())
        now = self._clock()
        while held and held[0].until <= now:
            held.popleft()
        return held
