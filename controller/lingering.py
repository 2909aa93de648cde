"""Remembers deleted objects whose containers may still run, in bounded memory."""

import math
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog

T = TypeVar("T")

MAX_PER_NAMESPACE, MAX_ENTRIES = 1024, 8192
"""The most deleted objects that are remembered: first for one namespace, then for all namespaces together."""

PRUNE_SECONDS = 10.0
"""Seconds between two searches of all namespaces for remembered objects whose time is over."""


class FullUntil:
    """The namespaces with too many deleted objects. Each counts as full until the last such object has ended.

    The class is thread-safe. ``clock``: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until: dict[str, float] = {}
        self._log = structlog.get_logger()

    def extend(self, namespace: str, until: float) -> None:
        with self._lock:
            now = self._clock()
            self._until = {each: at for each, at in self._until.items() if at > now}
            if namespace not in self._until:
                message = "too many pods or claims were deleted by force, so the namespace counts as full for some time"
                self._log.warning(message, namespace=namespace)
            self._until[namespace] = max(until, self._until.get(namespace, until))

    def of(self, namespace: str) -> float:
        """Return the time until which the namespace counts as full; -infinity if it does not."""
        with self._lock:
            return self._until.get(namespace, -math.inf)


class Lingering(Generic[T]):
    """Remembers deleted objects by namespace and key, each until a time on ``clock``. The class is thread-safe.

    If there are too many objects, all objects of one namespace are forgotten, and ``full`` records this namespace.
    """

    def __init__(self, clock: Callable[[], float], full: FullUntil) -> None:
        self._clock = clock
        self._full = full
        self._lock = threading.Lock()
        self._entries: dict[str, dict[str, tuple[T, float]]] = {}
        self._prune_at = 0.0

    def add(self, namespace: str, key: str, value: T, until: float) -> None:
        with self._lock:
            now = self._clock()
            if now >= self._prune_at:
                self._prune_at = now + PRUNE_SECONDS
                for each in tuple(self._entries):
                    self._prune(each, now)
            entries = self._entries.setdefault(namespace, {})
            entries[key] = value, until
            if len(entries) > MAX_PER_NAMESPACE:
                self._forget_all_of(namespace)
            elif sum(map(len, self._entries.values())) > MAX_ENTRIES:
                self._forget_all_of(max(self._entries, key=lambda each: len(self._entries[each])))

    def count(self, namespace: str) -> int:
        with self._lock:
            return len(self._entries.get(namespace, ()))

    def remove(self, namespace: str, key: str) -> None:
        with self._lock:
            self._entries.get(namespace, {}).pop(key, None)

    def within(self, namespace: str) -> dict[str, T]:
        with self._lock:
            return {key: value for key, (value, _) in self._prune(namespace, self._clock()).items()}

    def all(self) -> list[T]:
        with self._lock:
            now = self._clock()
            return [value for each in tuple(self._entries) for value, _ in self._prune(each, now).values()]

    def _prune(self, namespace: str, now: float) -> dict[str, tuple[T, float]]:
        left = {key: entry for key, entry in self._entries.pop(namespace, {}).items() if entry[1] > now}
        if left:
            self._entries[namespace] = left
        return left

    def _forget_all_of(self, namespace: str) -> None:
        self._full.extend(namespace, max(until for _, until in self._entries.pop(namespace).values()))
