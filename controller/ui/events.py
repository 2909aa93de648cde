"""Follows the Events about refusals of pods (`controller.refusals`) and about removals of stale allocations."""

import datetime
import threading
from collections.abc import Callable, Sequence
from typing import Generic

import msgspec

from controller.refusals import MAX_MESSAGE_LENGTH, about, last_occurrence
from controller.ui.snapshot import RemovedAllocation, T
from vcuda.k8s_types import K8sStruct, ObjectMeta
from vcuda.kube import Kube, Reflector

MAX_EVENTS = 500
"""The most Events of one kind that are kept, the newest ones. Each has a few hundred bytes."""

MAX_EVENTS_A_NAMESPACE = 20
"""The most Events of one namespace that are kept, so that a tenant's Events cannot replace those of others."""


class EventObject(K8sStruct, frozen=True, gc=False):
    """The object that an Event is about."""

    kind: str = ""
    namespace: str = ""
    name: str = ""


class Series(K8sStruct, frozen=True, gc=False):
    """The number of occurrences and the last time, as writers of events.k8s.io set them."""

    count: int = 0
    last_observed_time: str | None = None


class StoredEvent(K8sStruct, frozen=True, gc=False):
    """The fields of an Event that are read. Different writers set different time fields."""

    metadata: ObjectMeta = ObjectMeta()
    involved_object: EventObject = EventObject()
    message: str | None = None
    count: int | None = None
    last_timestamp: str | None = None
    event_time: str | None = None
    series: Series | None = None

    def last(self, now: datetime.datetime) -> str:
        """Return the time of the last occurrence (RFC 3339), or the creation time if that one is impossible."""
        stored = self.metadata.creation_timestamp or ""
        # client-go's recorders set lastTimestamp for core/v1, and eventTime and a series for events.k8s.io.
        written = (self.series and self.series.last_observed_time) or self.last_timestamp or self.event_time or ""
        return last_occurrence(stored, written, now)

    @property
    def namespace(self) -> str:
        return self.metadata.namespace

    @property
    def kind(self) -> str:
        return self.involved_object.kind

    @property
    def name(self) -> str:
        return self.involved_object.name

    @property
    def times(self) -> int:
        return max(self.series.count if self.series else 0, self.count or 1)


_EVENT = msgspec.json.Decoder(StoredEvent)


def read_removal(event: StoredEvent, at: str) -> RemovedAllocation:
    kind, name = about(event)
    message = (event.message or "")[:MAX_MESSAGE_LENGTH]
    return RemovedAllocation(event.involved_object.namespace and event.metadata.namespace, name, kind, message, at)


class Newest(Generic[T]):
    """The newest entries by the uid of their Event: at most ``most``, and ``most_of_one`` per namespace."""

    def __init__(self, most: int = MAX_EVENTS, most_of_one: int = MAX_EVENTS_A_NAMESPACE) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._lock = threading.Lock()
        self._by_namespace: dict[str, dict[str, T]] = {}

    def add(self, namespace: str, uid: str, told: T) -> None:
        """Keep an entry, or replace the earlier one of this Event. Drop the oldest entry if there are too many."""
        with self._lock:
            self._by_namespace.setdefault(namespace, {})[uid] = told
            if len(self._by_namespace[namespace]) > self._most_of_one:
                self._forget_oldest_of(namespace)
            # Many refusals, for example after a quota was lowered, must not fill the leader's memory. The namespace
            # with the most entries loses one, so that the only refusal of another namespace is kept.
            if sum(map(len, self._by_namespace.values())) > self._most:
                self._forget_oldest_of(max(self._by_namespace, key=lambda name: len(self._by_namespace[name])))

    def all(self) -> Sequence[T]:
        with self._lock:
            told = [told for of_one in self._by_namespace.values() for told in of_one.values()]
        return sorted(told, key=lambda told: told.at, reverse=True)

    def _forget_oldest_of(self, namespace: str) -> None:
        of_one = self._by_namespace[namespace]
        del of_one[min(of_one, key=lambda uid: of_one[uid].at)]
        if not of_one:
            del self._by_namespace[namespace]


class EventInformer(Generic[T]):
    """Watches the Events of one reason in all namespaces, and keeps the newest for which ``read`` returns an entry."""

    def __init__(self, kube: Kube, reason: str, read: Callable[[StoredEvent, str], T | None]) -> None:
        self._read: Callable[[StoredEvent, str], T | None] = read
        self._newest: Newest[T] = Newest()
        # The reflector's own store stays empty, because it is not bounded. `Newest` recognizes repeated Events by uid.
        self.reflector: Reflector[None] = Reflector(
            kube, "/api/v1/events", self._decode, params={"fieldSelector": f"reason={reason}"}
        )

    def newest(self) -> Sequence[T] | None:
        """Return the entries, newest first; None until the Events have been listed once."""
        return self._newest.all() if self.reflector.synced.is_set() else None

    def _decode(self, raw: bytes) -> None:
        event = _EVENT.decode(raw)
        told = self._read(event, event.last(datetime.datetime.now(datetime.UTC)))
        if told is not None:
            self._newest.add(event.metadata.namespace, event.metadata.uid, told)
