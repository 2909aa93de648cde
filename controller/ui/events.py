"""Lists the Kubernetes Events about rejections and about removals of stale GPU allocations, for the usage page."""

import datetime
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypedDict

import msgspec
import structlog

from controller import seen_events
from controller.garbage import stale_gc
from controller.seen_events import MAX_MESSAGE_LENGTH, MAX_NAME_LENGTH, ReportedObject, SeenEvent
from vcuda import errors
from vcuda.k8s_types import UNDECODABLE, Decoder
from vcuda.kube import Kube

MAX_EVENTS = 500
"""The maximum number of Events that are kept in memory for each list. An Event needs a few hundred bytes."""

MAX_EVENTS_A_NAMESPACE = 20
"""The most Events of one namespace that are kept, so that one tenant cannot displace the Events of other tenants."""

PERIOD_SECONDS = 10.0  # Minimum seconds between two reads of the Events.
REST_PER_SECOND = 10.0  # After a slow read, the next read waits this many times as long as the read has taken.
LIST_SECONDS = 30.0  # Seconds after which the LIST of the Events with one reason is given up.


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
        self._by_namespace: dict[str, dict[str, ReportedObject]] = {}
        self._count = 0

    def add(self, namespace: str, uid: str, item: ReportedObject) -> None:
        """Add the entry of an Event, or replace its earlier entry. If there are too many entries, drop an old entry."""
        of_one = self._by_namespace.setdefault(namespace, {})
        self._count += uid not in of_one
        of_one[uid] = item
        if len(of_one) > self._most_of_one:
            self._forget_oldest_of(namespace)
        # Many rejections, for example after a quota was lowered, must not fill the leader's memory. So the namespace
        # with the most entries loses its oldest entry. All other namespaces keep their entries.
        if self._count > self._most:
            self._forget_oldest_of(max(self._by_namespace, key=lambda name: len(self._by_namespace[name])))

    def all(self) -> Sequence[ReportedObject]:
        """Return the entries, the newest first."""
        items = [item for of_one in self._by_namespace.values() for item in of_one.values()]
        return sorted(items, key=lambda item: item.at, reverse=True)

    def _forget_oldest_of(self, namespace: str) -> None:
        of_one = self._by_namespace[namespace]
        del of_one[min(of_one, key=lambda uid: of_one[uid].at)]
        self._count -= 1
        if not of_one:
            del self._by_namespace[namespace]


def by_turns(entries: Sequence[ReportedObject]) -> Sequence[ReportedObject]:
    """Return the first entry of each namespace, then the second entry of each namespace, and so on."""
    # If only the age of the entries mattered, one tenant could fill the whole list by writing many Events.
    counts: Counter[str] = Counter()
    turns = []
    for each in entries:
        turns.append(counts[each.namespace])
        counts[each.namespace] += 1
    return [entries[index] for index in sorted(range(len(entries)), key=turns.__getitem__)]


class Reported(msgspec.Struct, frozen=True):
    """The entries of both lists, in the order of `by_turns`; None if the Events have not been listed."""

    rejections: Sequence[ReportedObject] | None = None
    removals: Sequence[ReportedObject] | None = None


class ReportedEvents:
    """Lists the Events in a thread while the page is requested. ``clock``: returns seconds."""

    def __init__(self, kube: Kube, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._clock = clock
        self._lock = threading.Lock()
        self._reading = False
        self._due = -math.inf
        self._reported = Reported()
        self._log = structlog.get_logger()

    def current(self) -> Reported:
        """Return the entries of the last read, unless it failed. Begin the next read if it is due."""
        with self._lock:
            if not self._reading and self._clock() >= self._due:
                self._reading = True
                threading.Thread(target=self.read, name="page events", daemon=True).start()
            return self._reported

    def read(self) -> None:
        started = self._clock()
        reported = Reported()
        try:
            rejected = self._list(seen_events.REASON, seen_events.read_rejection)
            rejected += self._list(seen_events.CLAIM_REASON, seen_events.read_rejection)
            rejected.sort(key=lambda each: each.at, reverse=True)
            # Removals are read from Events, so that removals by earlier leaders are shown too.
            removed = self._list(stale_gc.REASON, read_removal)
            reported = Reported(by_turns(seen_events.merge_by_workload(rejected)), by_turns(removed))
        except errors.VcudaError as error:
            self._log.warning("the Events for the usage page could not be listed", reason=str(error))
        finally:
            spent = self._clock() - started
            with self._lock:
                self._reported, self._reading = reported, False
                self._due = started + spent + max(PERIOD_SECONDS, spent * REST_PER_SECOND)

    def _list(self, reason: str, read: Callable[[SeenEvent], ReportedObject | None]) -> list[ReportedObject]:
        newest, now = Newest(), datetime.datetime.now(datetime.UTC)
        params = {"fieldSelector": f"reason={reason}"}
        pages = self._kube.list_pages("/api/v1/events", params, seconds=LIST_SECONDS, skip=lambda *_: None)
        for raw in (raw for page in pages for raw in page.items):
            try:
                event = _EVENT.decode(raw)
            except UNDECODABLE:
                continue  # It is not logged, because a tenant may write many such Events.
            if (item := read(SeenEvent.of(event, now))) is not None:
                newest.add(event["metadata"]["namespace"], event["metadata"]["uid"], item)
        return [*newest.all()]
