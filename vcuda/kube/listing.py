"""Everything under one resource path at one version: gathered from pages, or from the initial events of a watch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

import msgspec
import structlog

from vcuda.errors import Unavailable
from vcuda.kube.client import Page
from vcuda.kube.store import Counts, Entry, Key, Store
from vcuda.kube.watch import Meta, WatchEvent, read_meta

T = TypeVar("T")


class Listing(NamedTuple, Generic[T]):
    """All objects that are kept, decoded, and the version at which there were these."""

    entries: dict[Key, Entry[T]]
    version: str


class ObjectReader(Generic[T]):
    """Decodes objects, unless this very version of one is known, from ``view`` for example.

    What cannot be decoded is logged and counted.
    """

    def __init__(
        self,
        decode: Callable[[bytes], T | None],
        view: Store[T],
        counts: Counts,
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._decode = decode
        self._view = view
        self._counts = counts
        self._log = log

    def entry(self, meta: Meta, raw: bytes, known: Entry[T] | None = None) -> Entry[T] | None:
        """Decode an object; None when it is not kept, its last good value when it cannot be decoded.

        ``known`` is what a list that is not complete yet has of it.
        """
        old = known or self._view.entry(meta.key)
        last_good = old if old is not None and old.uid == meta.uid else None
        if last_good is not None and last_good.version == meta.resource_version:
            return last_good
        try:
            value = self._decode(raw)
        except Exception:  # noqa: BLE001  # whatever a decoder raises costs this object alone; logged and counted
            self._counts.undecodable += 1
            self._log.exception("undecodable object", namespace=meta.namespace, name=meta.name)
            return last_good
        return None if value is None else Entry(meta.uid, meta.resource_version, value)

    def meta(self, raw: bytes) -> Meta | None:
        """Return the metadata of an object in a list, or None where they cannot be read: it is left out."""
        try:
            return read_meta(raw)
        except msgspec.MsgspecError as error:
            self._counts.undecodable += 1
            self._log.error("object without readable metadata", error=str(error))
            return None


def from_pages(pages: Iterable[Page], reader: ObjectReader[T]) -> Listing[T]:
    """Gather the pages of one LIST; each is decoded before the next is asked for."""
    version = ""
    entries: dict[Key, Entry[T]] = {}
    for page in pages:
        version = version or page.resource_version
        for raw in page.items:
            meta = reader.meta(raw)
            entry = reader.entry(meta, raw) if meta else None
            if meta and entry:
                entries[meta.key] = entry
    return Listing(entries, version)


def from_initial_events(events: Iterable[WatchEvent], reader: ObjectReader[T], what: str) -> Listing[T]:
    """Gather the initial events of the watch ``what``, up to the bookmark that ends them.

    What changes meanwhile may come before that bookmark too, so that every kind of event is applied.
    Raises Unreachable where the events end without it: nobody can tell what is still missing.
    """
    entries: dict[Key, Entry[T]] = {}
    for event in events:
        if event.ends_initial_events:
            return Listing(entries, event.meta.resource_version)
        if event.type == "BOOKMARK":
            continue
        key = event.meta.key
        entry = None if event.type == "DELETED" else reader.entry(event.meta, event.raw, entries.get(key))
        if entry is None:
            entries.pop(key, None)
        else:
            entries[key] = entry
    raise Unavailable(f"{what}: the stream ended before the list was complete")
