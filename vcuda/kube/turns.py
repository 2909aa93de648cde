"""Limits how many LISTs a process runs at a time, so that a tenant with large objects does not delay other tenants."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from vcuda.errors import ListOverdue

T = TypeVar("T")

QUICK_SECONDS, SLOW_SECONDS = 2.0, 8.0
"""The time limits of a LIST in seconds: normally, and for a slow namespace (whose last LISTs took long)."""

MAX_QUICK, MAX_SLOW = 4, 2
"""The maximum numbers of LISTs at a time: of quick namespaces, and of slow ones (whose last LISTs took long)."""

REST_PER_SECOND = 4.0
"""If a LIST timed out, its namespace is not listed for this many times the duration of the LIST."""

SLOW_FOR_SECONDS = 600.0
"""A namespace counts as slow for this many seconds after a LIST of its objects took longer than `QUICK_SECONDS`."""

MAX_REMEMBERED = 10_000
"""The most namespaces in each of two records: of slow namespaces, and of namespaces whose LIST timed out."""


class ListTurns:
    """Limits how many LISTs of namespaces run at a time. While too many LISTs run, a new LIST waits. Thread-safe.

    A LIST first gets `QUICK_SECONDS`. If a LIST takes longer, the LIST is ended and repeated with `SLOW_SECONDS`. Later
    LISTs of that slow namespace get `SLOW_SECONDS` from the beginning. At most `MAX_SLOW` LISTs of slow namespaces and
    `MAX_QUICK` LISTs of quick (all other) namespaces run at a time. These bounds limit the memory for pages. They also
    limit the wait of a quick namespace. It waits at most `QUICK_SECONDS` for every `MAX_QUICK` namespaces before it.

    If a LIST takes longer than `SLOW_SECONDS`, its namespace is not listed for `REST_PER_SECOND` times as long.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._quick = threading.BoundedSemaphore(MAX_QUICK)
        self._slow = threading.BoundedSemaphore(MAX_SLOW)
        self._clock = clock
        self._slow_until: dict[str, float] = {}
        self._rests_until: dict[str, float] = {}

    def run(self, namespace: str, make: Callable[[float], T], patience: float) -> T:
        """Wait until the namespace may be listed. Then call ``make``, which makes the LISTs, and return its result.

        ``make`` gets the time limit of its LISTs. ``patience``: the most seconds to wait. Raises ListOverdue if the
        wait or the LISTs take too long, and for some time after LISTs of this namespace took too long. Also raises the
        errors of ``make``.
        """
        if (left := self._rests_until.get(namespace, 0.0) - self._clock()) > 0:
            raise self._overdue(namespace, left)
        self._rests_until.pop(namespace, None)
        if self._slow_until.get(namespace, 0.0) <= self._clock():
            with self._turn(self._quick, namespace, patience):
                try:
                    return make(QUICK_SECONDS)
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
            f"the pods and claims of namespace {namespace} are too many or too large to be listed within "
            f"{SLOW_SECONDS:g} s; the next attempt is made in {left:.0f} s"
        )

    @contextmanager
    def _turn(self, turns: threading.Semaphore, namespace: str, patience: float) -> Iterator[None]:
        if not turns.acquire(timeout=patience):
            raise ListOverdue(f"too many other LISTs are running, so namespace {namespace} is not listed yet")
        try:
            yield
        finally:
            turns.release()

    def _remember(self, until: dict[str, float], namespace: str, seconds: float) -> None:
        if len(until) >= MAX_REMEMBERED:
            until.clear()
        until[namespace] = self._clock() + seconds
