"""Limits the use of memory by a cache with a maximum size in bytes."""

import threading
from collections.abc import Callable
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
