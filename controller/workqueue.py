"""A queue of names that fall due: each stands in it once, at its earliest time, and is served at most so often."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable

import structlog


class WorkQueue:
    """Names with the time when each is due, in seconds of the monotonic clock.

    ``spacing`` is the least time between two turns of one name: events in between share the later one.
    """

    def __init__(self, spacing: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._spacing = spacing
        self._clock = clock
        self._due: dict[str, float] = {}
        self._order: list[tuple[float, int, str]] = []
        self._number = itertools.count()
        self._served: dict[str, float] = {}
        self._changed = threading.Condition()
        self._closed = False

    def add(self, name: str, delay: float = 0.0) -> None:
        """Let a name be due after ``delay`` seconds, or sooner if it is already."""
        now = self._clock()
        with self._changed:
            at = max(now + delay, self._served.get(name, -math.inf) + self._spacing)
            if at < self._due.get(name, math.inf):
                self._due[name] = at
                heapq.heappush(self._order, (at, next(self._number), name))
                self._changed.notify()

    def retry(self, name: str, delay: float) -> None:
        """Let a name be due after ``delay`` seconds, and not before, whose last turn came to nothing.

        That turn does not count for the spacing.
        """
        with self._changed:
            self._served[name] = self._clock() + delay - self._spacing
        self.add(name, delay)

    def holds(self, name: str) -> bool:
        """Return whether a name waits for its turn, or had one within the last two spacings."""
        with self._changed:
            return name in self._due or self._clock() < self._served.get(name, -math.inf) + 2 * self._spacing

    def close(self) -> None:
        """End every `next` from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def next(self) -> str | None:
        """Block until a name is due, and return it; None when closed."""
        with self._changed:
            while not self._closed:
                name = self._first()
                now = self._clock()
                if name is not None and self._due[name] <= now:
                    del self._due[name]
                    heapq.heappop(self._order)
                    if self._spacing:
                        self._served[name] = now
                    return name
                self._changed.wait(None if name is None else self._due[name] - now)
            return None

    def _first(self) -> str | None:
        """Return the name that is due first, at the top of the heap, or None; times that a sooner one replaced go."""
        while self._order:
            at, _, name = self._order[0]
            if self._due.get(name) == at:
                return name
            heapq.heappop(self._order)
        return None


def spawn(name: str, loop: Callable[[], None], on_fault: Callable[[], None]) -> threading.Thread:
    """Run a loop; ``on_fault`` is called when it ends by a fault of its own, as nobody would see that."""

    def guarded() -> None:
        try:
            loop()
        except Exception:  # noqa: BLE001  # it is logged, and whoever hears of the fault ends the process
            structlog.get_logger().exception("loop ended by a fault of its own", loop=name)
            on_fault()

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread
