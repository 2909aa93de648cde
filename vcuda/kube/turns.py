"""Shares the LISTs of a process between namespaces, so that a tenant with large objects delays no other tenant."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from vcuda.errors import ListOverdue

T = TypeVar("T")

QUICK_SECONDS, SLOW_SECONDS = 2.0, 8.0
"""Seconds for a LIST of a usual namespace, and for a LIST of a slow namespace."""

MOST_QUICK, MOST_SLOW = 4, 2
"""The most LISTs of usual namespaces, and of slow namespaces, that run at a time."""

REST_PER_SECOND = 4.0
"""Seconds of rest for each second of a LIST that was not finished in time."""

SLOW_FOR_SECONDS = 600.0
"""Seconds for which a namespace counts as slow after a LIST took longer than `QUICK_SECONDS`."""

MOST_REMEMBERED = 10_000
"""The most namespaces that are remembered as slow, or as resting."""


class ListTurns:
    """Turns for LISTs, each of one namespace. Any thread may use it.

    A LIST first has `QUICK_SECONDS`. If a LIST takes longer, it is abandoned and repeated with `SLOW_SECONDS`. Later
    LISTs of that namespace have `SLOW_SECONDS` from the beginning. At most `MOST_QUICK` LISTs of usual namespaces and
    `MOST_SLOW` of slow namespaces run at a time. This bounds the memory for pages. It also bounds the wait of a usual
    namespace: for every `MOST_QUICK` namespaces that are listed for the first time, it waits at most `QUICK_SECONDS`.

    After a LIST that was not finished in `SLOW_SECONDS`, the namespace rests for four times as long. ``clock`` returns
    seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._quick = threading.BoundedSemaphore(MOST_QUICK)
        self._slow = threading.BoundedSemaphore(MOST_SLOW)
        self._clock = clock
        self._slow_until: dict[str, float] = {}
        self._rests_until: dict[str, float] = {}

    def run(self, namespace: str, make: Callable[[float], T], patience: float) -> T:
        """Call ``make`` in a turn, and return its result. ``make`` gets the seconds that its LISTs may take.

        ``patience``: seconds to wait for a turn. Raises ListOverdue if no turn was free in time, if the LISTs took too
        long, and while the namespace rests after that. Raises any other error of ``make`` too.
        """
        if (left := self._rests_until.get(namespace, 0.0) - self._clock()) > 0:
            raise self._overdue(namespace, left)
        self._rests_until.pop(namespace, None)
        if self._slow_until.get(namespace, 0.0) <= self._clock():
            try:
                with self._turn(self._quick, namespace, patience):
                    return make(QUICK_SECONDS)
            except _NoTurn:
                raise
            except ListOverdue:
                self._remember(self._slow_until, namespace, SLOW_FOR_SECONDS)
        with self._turn(self._slow, namespace, patience):
            return self._make_slowly(namespace, make)

    def _make_slowly(self, namespace: str, make: Callable[[float], T]) -> T:
        started = self._clock()
        try:
            made = make(SLOW_SECONDS)
        except ListOverdue as error:
            rest = SLOW_SECONDS * REST_PER_SECOND
            self._remember(self._rests_until, namespace, rest)
            raise self._overdue(namespace, rest) from error
        if self._clock() - started < QUICK_SECONDS / 2:
            self._slow_until.pop(namespace, None)
        return made

    def _overdue(self, namespace: str, left: float) -> ListOverdue:
        return ListOverdue(
            f"the pods and claims of namespace {namespace} could not be listed within {SLOW_SECONDS:g} s, as "
            f"they are too many or too large; the next attempt is made in {left:.0f} s"
        )

    @contextmanager
    def _turn(self, turns: threading.Semaphore, namespace: str, patience: float) -> Iterator[None]:
        if not turns.acquire(timeout=patience):
            raise _NoTurn(f"the pods of namespace {namespace} could not be listed yet, as other LISTs take too long")
        try:
            yield
        finally:
            turns.release()

    def _remember(self, until: dict[str, float], namespace: str, seconds: float) -> None:
        if len(until) >= MOST_REMEMBERED:
            until.clear()
        until[namespace] = self._clock() + seconds


class _NoTurn(ListOverdue):
    """No turn was free in time."""
