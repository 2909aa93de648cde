"""Stores the objects of a reflector by namespace and name, and decodes the lists and events that contain them."""

import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import structlog

from vcuda import errors
from vcuda.k8s_types import UNDECODABLE
from vcuda.kube import watch
from vcuda.kube.pages import Page, SkippedObject, name_in

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreEntry(Generic[T]):
    """One stored object: its uid, its resourceVersion and its decoded value."""

    uid: str
    version: str
    value: T


@dataclass(slots=True)
class ReflectorCounts:
    """Counters of a reflector since its start, for metrics."""

    lists: int = 0
    watches: int = 0
    events: int = 0
    failures: int = 0
    undecodable: int = 0
    callback_errors: int = 0


Unread = dict[watch.Key, bool]
"""The objects whose newest state could not be decoded. The value is True if their last good value is stored."""


class Store(Generic[T]):
    """Stores objects. Only one thread may write. Any thread may read, and gets each change completely or not at all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[watch.Key, StoreEntry[T]] = {}
        # `_grouped` maps a namespace to its objects. The mapping is changed in place, because copies would be slow.
        self._grouped: dict[str, dict[watch.Key, StoreEntry[T]]] | None = None
        self._snapshot: Mapping[watch.Key, T] | None = None
        self.unread_objects: Unread = {}
        self.version = ""
        """The newest resourceVersion that the store includes; empty before the first call of `swap`."""

    def get(self, key: tuple[str, str]) -> T | None:
        entry = self.entry(watch.Key(*key))
        return entry.value if entry else None

    def entry(self, key: watch.Key) -> StoreEntry[T] | None:
        with self._lock:
            return self._entries.get(key)

    def snapshot(self) -> Mapping[watch.Key, T]:
        """Return all objects in an immutable mapping. The same mapping is returned until an object changes."""
        with self._lock:
            if self._snapshot is None:
                self._snapshot = MappingProxyType({key: entry.value for key, entry in self._entries.items()})
            return self._snapshot

    def versioned(self, namespace: str) -> tuple[str, list[T]]:
        """Return the store's resourceVersion, and the objects of one namespace at this version."""
        with self._lock:
            return self.version, [entry.value for entry in self._by_namespace().get(namespace, {}).values()]

    def within(self, namespace: str) -> list[T]:
        return self.versioned(namespace)[1]

    def namespaces(self) -> list[str]:
        with self._lock:
            return list(self._by_namespace())

    def _by_namespace(self) -> dict[str, dict[watch.Key, StoreEntry[T]]]:
        # Objects are grouped by namespace only at the first call, because most resources are never read by namespace.
        if self._grouped is None:
            self._grouped = {}
            for key, entry in self._entries.items():
                self._grouped.setdefault(key.namespace, {})[key] = entry
        return self._grouped

    def unread(self) -> Unread:
        """Return the objects whose newest state could not be decoded."""
        return dict(self.unread_objects)  # a copy, because the reflector's thread changes the original

    def check_read(self, namespace: str) -> None:
        """Raise Unavailable if the namespace has an object of which no state could be decoded so far."""
        if unread := [key for key, kept in self.unread().items() if key.namespace == namespace and not kept]:
            raise errors.Unavailable(f"{unread[0].name} cannot be decoded; it may have to be deleted")

    def swap(self, listing: "Listing[T]") -> Mapping[watch.Key, StoreEntry[T]]:
        """Replace all objects in one step, and return the previous objects."""
        with self._lock:
            before, self._entries = self._entries, listing.entries
            self._snapshot, self._grouped, self.version = None, None, listing.version
            self.unread_objects = listing.unread
        return before

    def put(self, key: watch.Key, entry: StoreEntry[T] | None, version: str) -> None:
        with self._lock:
            _put(self._entries, key, entry)
            if self._grouped is not None:
                _put(siblings := self._grouped.setdefault(key.namespace, {}), key, entry)
                if not siblings:
                    del self._grouped[key.namespace]
            self._snapshot, self.version = None, version

    def advance(self, version: str) -> None:
        with self._lock:
            self.version = version


class Listing(NamedTuple, Generic[T]):
    """A complete list: the decoded objects, its resourceVersion, and the objects that could not be decoded."""

    entries: dict[watch.Key, StoreEntry[T]]
    version: str
    unread: Unread


@dataclass(frozen=True, slots=True)
class ObjectReader(Generic[T]):
    """Decodes objects. If an object cannot be decoded, this is counted and logged once, and its last value is used.

    An object that is already stored at the same version is decoded again only if ``anew`` is True.
    ``unread``: collects the objects of a list that cannot be decoded; None for a watch.
    """

    decode: Callable[[bytes], T | None]
    store: Store[T]
    counts: ReflectorCounts
    _log: structlog.typing.FilteringBoundLogger
    unread: Unread | None = None
    anew: bool = False

    def entry(self, meta: watch.Meta, raw: bytes) -> StoreEntry[T] | None:
        old = self.store.entry(meta.key)
        last_good = old if old is not None and old.uid == meta.uid else None
        if last_good is not None and last_good.version == meta.resource_version and not self.anew:
            return last_good
        try:
            value = self.decode(raw)
        except Exception as error:  # noqa: BLE001  # an object that cannot be decoded must not affect other objects
            self._leave_out(meta.key, error, kept=last_good is not None)
            return last_good
        if self.store.unread_objects and self.unread is None:
            self.store.unread_objects.pop(meta.key, None)
        return None if value is None else StoreEntry(meta.uid, meta.resource_version, value)

    def last_good(self, skipped: SkippedObject) -> Mapping[watch.Key, StoreEntry[T]]:
        """Count an object that is too large. Return a mapping with its key and last good value, or an empty mapping."""
        key = watch.Key(*skipped)
        known = self.store.entry(key)
        self._leave_out(key, errors.TooLarge("the object is too large to be read", b""), kept=known is not None)
        return {key: known} if known else {}

    def meta(self, raw: bytes) -> watch.Meta | None:
        """Return the metadata of an object in a list; None if the metadata cannot be read."""
        try:
            return watch.read_meta(raw)
        except UNDECODABLE as error:
            self._leave_out(watch.Key(*name_in(raw)), error, kept=False)
            return None

    def _leave_out(self, key: watch.Key, error: Exception, *, kept: bool) -> None:
        self.counts.undecodable += 1
        known = self.store.unread_objects
        if key not in known:
            # The text of the error is not logged, because it may repeat what a tenant wrote.
            frames = traceback.extract_tb(error.__traceback__)
            where = f"{type(error).__name__} in {frames[-1].name}" if frames else str(error)
            self._log.error("object left out", namespace=key.namespace, name=key.name, error=where, last_good=kept)
        (known if self.unread is None else self.unread)[key] = kept


def from_pages(pages: Iterable[Page], reader: ObjectReader[T]) -> Listing[T]:
    """Return the objects of one LIST. Each page is decoded before the next page is requested."""
    version = ""
    entries: dict[watch.Key, StoreEntry[T]] = {}
    for page in pages:
        version = version or page.resource_version
        for raw in page.items:
            if (meta := reader.meta(raw)) and (entry := reader.entry(meta, raw)):
                entries[meta.key] = entry
    return Listing(entries, version, reader.unread or {})


def _put(entries: dict[watch.Key, StoreEntry[T]], key: watch.Key, entry: StoreEntry[T] | None) -> None:
    if entry is None:
        entries.pop(key, None)
    else:
        entries[key] = entry
