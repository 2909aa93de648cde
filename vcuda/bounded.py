"""Limits the use of memory: a cache with a maximum size, and a count of the bytes of objects for each namespace."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

ENTRY_BYTES = 700
"""The bytes that are counted for each entry in addition to its size, because Python objects and names need memory."""


class SizedCache(Generic[K, V]):
    """A thread-safe cache that drops the least recently used entries. ``size_of`` returns an entry's size in bytes."""

    def __init__(self, most_bytes: int, size_of: Callable[[K, V], int]) -> None:
        self._most = most_bytes
        self._size_of = size_of
        self._lock = threading.Lock()
        self._entries: dict[K, tuple[V, int]] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        with self._lock:
            if (found := self._entries.pop(key, None)) is None:
                return None
            self._entries[key] = found  # moves the used entry to the end, because entries are dropped from the start
            return found[0]

    def put(self, key: K, value: V) -> None:
        """Cache a value. A value that is larger than the whole cache is not cached."""
        size = self._size_of(key, value) + ENTRY_BYTES
        with self._lock:
            if old := self._entries.pop(key, None):
                self.bytes -= old[1]
            if size > self._most:
                return
            self._entries[key] = value, size
            self.bytes += size
            while self.bytes > self._most:
                self.bytes -= self._entries.pop(next(iter(self._entries)))[1]


class ByteAllowance:
    """Counts the bytes of objects in memory within two limits: one for each namespace, one for all. Not thread-safe."""

    def __init__(self, most_of_namespace: int, most: int) -> None:
        self._most_of_namespace = most_of_namespace
        self._most = most
        self._kept: dict[tuple[str, str], int] = {}
        self._of_namespace: Counter[str] = Counter()
        self.bytes = 0

    def keep(self, namespace: str, uid: str, size: int) -> bool:
        """Count an object's size instead of the size that was last counted for it. Return False, and do not count the
        object, if a limit would be exceeded."""
        self.release(namespace, uid)
        size += ENTRY_BYTES
        if self._of_namespace[namespace] + size > self._most_of_namespace or self.bytes + size > self._most:
            return False
        self._kept[namespace, uid] = size
        self._of_namespace[namespace] += size
        self.bytes += size
        return True

    def release(self, namespace: str, uid: str) -> None:
        size = self._kept.pop((namespace, uid), 0)
        self.bytes -= size
        self._of_namespace[namespace] -= size
        if not self._of_namespace[namespace]:
            del self._of_namespace[namespace]

    def retain(self, objects: Iterable[tuple[str, str]]) -> None:
        """Stop counting all objects except ``objects``, pairs of a namespace and a uid."""
        for namespace, uid in self._kept.keys() - objects:
            self.release(namespace, uid)
