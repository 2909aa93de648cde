"""Deadlines for tests of queues: they tell when a caller waits, so that no test has to guess."""

from __future__ import annotations

import threading
import time

PATIENT = 20.0
"""Seconds that a test waits for what must happen, and half of what a caller waits; all of it happens at once."""


class Deadline(float):
    """A deadline that tells when its caller stands in the queue and is about to wait, and may hold it there.

    `webhook.ledger_client` reads it once a wait, to subtract the time. ``held``: that takes until ``goes_on`` is set.
    """

    read: threading.Event
    goes_on: threading.Event

    def __new__(cls, seconds: float = 2 * PATIENT, *, held: bool = False) -> Deadline:
        """Return one so many seconds from now."""
        deadline = super().__new__(cls, time.monotonic() + seconds)
        deadline.read, deadline.goes_on = threading.Event(), threading.Event()
        if not held:
            deadline.goes_on.set()
        return deadline

    def __sub__(self, now: float) -> float:
        self.read.set()
        assert self.goes_on.wait(PATIENT)
        return float(self) - now
