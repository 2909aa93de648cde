"""Shares the LISTs of a process between namespaces, so that a tenant with large objects keeps only himself waiting."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from vcuda.errors import ListOverdue

T = TypeVar("T")

REST_PER_SECOND = 4.0
"""Seconds of rest after each second of a LIST that was not finished in time."""

SLOW_FOR_SECONDS = 600.0
"""For which a namespace counts as slow after a LIST that was."""

MOST_REMEMBERED = 10_000
"""Slow namespaces that are remembered."""


class ListTurns:
    """Turns for LISTs, each of one namespace. It is safe in every thread.

    A LIST first has ``quick_seconds``. If it takes longer, it is abandoned and made again with ``slow_seconds``. Every
    later LIST of that namespace begins there. At most ``quick`` LISTs of the first sort run at a time, and ``slow`` of
    the second. This bounds the memory for pages. It also bounds the wait of a namespace that is not slow: for every
    ``quick`` namespaces that are listed for the first time, it waits at most ``quick_seconds``.

    After a LIST that was not finished in ``slow_seconds``, the namespace rests for four times as long. ``clock`` is in
    seconds.
    """

    def __init__(
        self,
        quick_seconds: float = 2.0,
        slow_seconds: float = 8.0,
        *,
        quick: int = 4,
        slow: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quick_seconds = quick_seconds
        self._slow_seconds = slow_seconds
        self._quick = threading.BoundedSemaphore(quick)
        self._slow = threading.BoundedSemaphore(slow)
        self._clock = clock
        self._slow_until: dict[str, float] = {}
        self._rests_until: dict[str, float] = {}

    def run(self, namespace: str, make: Callable[[float], T], patience: float) -> T:
        """Return what ``make`` returns, which is given the seconds that its LISTs may take.

        ``patience`` are the seconds to wait for a turn. Raises ListOverdue if there was no turn in time, if the LISTs
        took too long, and while the namespace rests after that. Any other error of ``make`` is raised too.
        """
        self._check_rest(namespace)
        if self._slow_until.get(namespace, 0.0) <= self._clock():
            try:
                with self._turn(self._quick, namespace, patience):
                    return make(self._quick_seconds)
            except _NoTurn:
                raise
            except ListOverdue:
                self._remember(self._slow_until, namespace, SLOW_FOR_SECONDS)
        with self._turn(self._slow, namespace, patience):
            return self._make_slowly(namespace, make)

    def _make_slowly(self, namespace: str, make: Callable[[float], T]) -> T:
        started = self._clock()
        try:
            made = make(self._slow_seconds)
        except ListOverdue as error:
            rest = self._slow_seconds * REST_PER_SECOND
            self._remember(self._rests_until, namespace, rest)
            raise self._overdue(namespace, rest) from error
        if self._clock() - started < self._quick_seconds / 2:
            self._slow_until.pop(namespace, None)
        return made

    def _check_rest(self, namespace: str) -> None:
        if (left := self._rests_until.get(namespace, 0.0) - self._clock()) > 0:
            raise self._overdue(namespace, left)
        self._rests_until.pop(namespace, None)

    def _overdue(self, namespace: str, left: float) -> ListOverdue:
        return ListOverdue(
            f"the pods and claims of namespace {namespace} could not be listed within {self._slow_seconds:g} s, as "
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
    """There was no turn in time."""
