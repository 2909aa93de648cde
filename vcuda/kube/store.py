"""What a reflector knows: objects by namespace and name, the version of all of them, and how it came by them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Key(NamedTuple):
    """How an object is found; the namespace of a cluster-wide one, such as a node, is empty."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """One object: its uid and resourceVersion, and what was decoded from it."""

    uid: str
    version: str
    value: T


@dataclass(slots=True)
class Counts:
    """What happened since the start, for a caller to publish as counters; ``lists`` include the ``streamed_lists``."""

    lists: int = 0
    streamed_lists: int = 0
    watches: int = 0
    events: int = 0
    failures: int = 0
    undecodable: int = 0
    callback_errors: int = 0


class Store(Generic[T]):
    """Written by one thread, read by any; every state that a reader sees is one that the writer made whole."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Key, Entry[T]] = {}
        self._snapshot: Mapping[Key, T] | None = None
        self._version = ""

    @property
    def version(self) -> str:
        """The newest resourceVersion that the view includes; empty before the first ``swap``."""
        return self._version

    def entry(self, key: Key) -> Entry[T] | None:
        """Return one object, or None."""
        with self._lock:
            return self._entries.get(key)

    def snapshot(self) -> Mapping[Key, T]:
        """Return all objects in a mapping that never changes; the same one until something does."""
        with self._lock:
            if self._snapshot is None:
                self._snapshot = MappingProxyType({key: entry.value for key, entry in self._entries.items()})
            return self._snapshot

    def swap(self, entries: dict[Key, Entry[T]], version: str) -> Mapping[Key, Entry[T]]:
        """Change over to other objects in one step; return those of before."""
        with self._lock:
            before, self._entries = self._entries, entries
            self._snapshot, self._version = None, version
        return before

    def put(self, key: Key, entry: Entry[T] | None, version: str) -> None:
        """Store one object, or remove it where ``entry`` is None."""
        with self._lock:
            if entry is None:
                self._entries.pop(key, None)
            else:
                self._entries[key] = entry
            self._snapshot, self._version = None, version

    def advance(self, version: str) -> None:
        """Note that nothing changed up to ``version``."""
        with self._lock:
            self._version = version
