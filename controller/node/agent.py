"""The loop: a sweep whenever a pod has gone, and every period."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from controller.node.outcome import Report
from controller.node.removal import OutOfTime
from controller.node.report import Teller
from vcuda.vm_directories import Keep

SPACING = 5.0
"""Seconds between the end of a sweep and the next that an event brings: a thousand pods that end make no storm."""

MISSED = 5
"""Periods without the end of a sweep after which the agent is not healthy."""

Run = Callable[[Report, Callable[[], bool], Callable[[], bool]], Keep | None]
"""`controller.node.sweep.Sweep.run`, or what stands for it."""


@dataclass(frozen=True, slots=True)
class Pace:
    """``period`` between sweeps, ``spacing`` at least, in seconds."""

    period: float = 60.0
    spacing: float = SPACING


class Wakes:
    """Ends a wait, from any thread or signal handler: a SimpleQueue may be put to from both (Python's docs, queue)."""

    def __init__(self) -> None:
        self.stopping = False
        self._queue: queue.SimpleQueue[None] = queue.SimpleQueue()

    def wake(self) -> None:
        """Let a sweep come soon."""
        self._queue.put(None)

    def stop(self) -> None:
        """Let the loop end."""
        self.stopping = True
        self._queue.put(None)

    def wait(self, pace: Pace) -> None:
        """Return after a period, or after an event and the spacing, or at once when stopping."""
        began = time.monotonic()
        woken = self._next(pace.period)
        while woken and not self.stopping:
            woken = self._next(began + min(pace.spacing, pace.period) - time.monotonic())

    def _next(self, seconds: float) -> bool:
        try:
            self._queue.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return False
        return True


class Agent:
    """Sweeps until it is stopped. A sweep that takes longer than a period makes a pause, and another goes on."""

    def __init__(self, run: Run, teller: Teller, wakes: Wakes, pace: Pace) -> None:
        self._run = run
        self._teller = teller
        self._wakes = wakes
        self._pace = pace
        self._ended = time.monotonic()
        self._log = structlog.get_logger()
        self._blocked: Keep | None = None

    def loop(self) -> None:
        """Sweep and wait, until ``wakes`` stops it; what was blocked is tried again soon."""
        soon = Pace(min(self._pace.period, self._pace.spacing), 0)
        while not self._wakes.stopping:
            self.sweep()
            self._wakes.wait(soon if self._blocked else self._pace)

    def sweep(self) -> None:
        """Make one pass, whatever comes of it."""
        deadline = time.monotonic() + self._pace.period
        self._teller.begin()
        result = self._result(lambda: time.monotonic() > deadline)
        self._teller.end(result, time.time())
        if result != "failed":
            self._ended = time.monotonic()

    def unhealthy(self) -> str | None:
        """Return what is wrong where no sweep has ended for too long, else None.

        One that did nothing, because the API server is not heard, has ended too: a new agent would hear it no better.
        """
        silent = time.monotonic() - self._ended
        return f"no sweep has ended for {silent:.0f} s" if silent > MISSED * self._pace.period else None

    def _result(self, give_up: Callable[[], bool]) -> str:
        try:
            blocked = self._run(self._teller, give_up, lambda: self._wakes.stopping)
        except OutOfTime:
            return "unfinished"
        except OSError as error:
            self._log.error("sweep failed", error=str(error))
            return "failed"
        if blocked != self._blocked:
            if blocked:
                self._log.warning("nothing is removed", why=str(blocked))
            else:
                self._log.info("removing again")
        self._blocked = blocked
        return "blocked" if blocked else "complete"
