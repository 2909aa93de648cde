"""Watches the Kubernetes Events about refused pods and about removals of stale GPU allocations, for the usage page."""

import datetime
import threading
from collections.abc import Callable, Sequence
from typing import TypedDict

from controller.refusals import MAX_MESSAGE_LENGTH, MAX_NAME_LENGTH, ReportedObject, SeenEvent
from vcuda.k8s_types import Decoder
from vcuda.kube import Kube, Reflector

MAX_EVENTS = 500
"""The maximum number of Events per reason that are kept in memory. An Event needs a few hundred bytes."""

MAX_EVENTS_A_NAMESPACE = 20
"""The most Events of one namespace that are kept, so that one tenant cannot displace the Events of other tenants."""


class _EventMetadata(TypedDict, total=False):
    namespace: str
    uid: str
    creationTimestamp: str | None


class _Involved(TypedDict, total=False):
    kind: str
    namespace: str
    name: str


class _Series(TypedDict, total=False):
    count: int
    lastObservedTime: str | None


class StoredEvent(TypedDict, total=False):
    """The fields of an Event that `SeenEvent.of` reads. Others are skipped, because an Event may have very many."""

    metadata: _EventMetadata
    involvedObject: _Involved
    message: str | None
    count: int | None
    lastTimestamp: str | None
    eventTime: str | None
    series: _Series | None


_EVENT = Decoder(StoredEvent)


def read_removal(event: SeenEvent) -> ReportedObject:
    namespace, kind = event.object_namespace and event.namespace, event.kind[:MAX_NAME_LENGTH]
    message = event.message[:MAX_MESSAGE_LENGTH]
    return ReportedObject(namespace, kind, event.name[:MAX_NAME_LENGTH], message, event.at, event.times)


class Newest:
    """The newest entries of a list on the page: at most ``most`` in all, and at most ``most_of_one`` per namespace."""

    def __init__(self, most: int = MAX_EVENTS, most_of_one: int = MAX_EVENTS_A_NAMESPACE) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._lock = threading.Lock()
        self._by_namespace: dict[str, dict[str, ReportedObject]] = {}

    def add(self, namespace: str, uid: str, item: ReportedObject) -> None:
        """Add the entry of an Event, or replace its earlier entry. If there are too many entries, drop an old entry."""
        with self._lock:
            self._by_namespace.setdefault(namespace, {})[uid] = item
            if len(self._by_namespace[namespace]) > self._most_of_one:
                self._forget_oldest_of(namespace)
            # Many refusals, for example after a quota was lowered, must not fill the leader's memory. So the namespace
            # with the most entries loses its oldest entry. All other namespaces keep their entries.
            if sum(map(len, self._by_namespace.values())) > self._most:
                self._forget_oldest_of(max(self._by_namespace, key=lambda name: len(self._by_namespace[name])))

    def all(self) -> Sequence[ReportedObject]:
        with self._lock:
            items = [item for of_one in self._by_namespace.values() for item in of_one.values()]
        return sorted(items, key=lambda item: item.at, reverse=True)

    def _forget_oldest_of(self, namespace: str) -> None:
        of_one = self._by_namespace[namespace]
        del of_one[min(of_one, key=lambda uid: of_one[uid].at)]
        if not of_one:
            del self._by_namespace[namespace]


class EventInformer:
    """Watches the Events with one reason in all namespaces. ``read``: turns an Event into an entry of the page."""

    def __init__(self, kube: Kube, reason: str, read: Callable[[SeenEvent], ReportedObject | None]) -> None:
        self._read = read
        self._newest = Newest()
        # `_decode` returns None, so the reflector (which watches the Events) stores nothing. `Newest` stores the
        # entries, in bounded memory.
        self.reflector: Reflector[None] = Reflector(
            kube, "/api/v1/events", self._decode, params={"fieldSelector": f"reason={reason}"}
        )

    def newest(self) -> Sequence[ReportedObject] | None:
        """Return the entries in memory, the newest first; None until the Events have been listed once."""
        return self._newest.all() if self.reflector.synced.is_set() else None

    def _decode(self, raw: bytes) -> None:
        event = _EVENT.decode(raw)
        item, metadata = self._read(SeenEvent.of(event, datetime.datetime.now(datetime.UTC))), event["metadata"]
        if item is not None:
            self._newest.add(metadata["namespace"], metadata["uid"], item)
