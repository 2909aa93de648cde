"""What the cluster remembers by Events: pods that were refused, and stale allocations that were removed.

The webhook refuses a pod and keeps nothing. The owner that wanted it (a ReplicaSet, Job, StatefulSet ...) writes an
Event with reason FailedCreate and the refusal as its message, which the API server keeps for an hour
(kube-apiserver ``--event-ttl``). A pod that a person creates directly leaves no trace: only its creator sees why.
"""

import datetime
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Generic

import msgspec

from controller.ui import model
from controller.ui.snapshot import RefusedWorkload, RemovedAllocation, T
from vcuda.k8s_types import K8sStruct, ObjectMeta
from vcuda.kube import Kube, Reflector
from vcuda.quota.model import OVER_QUOTA
from vcuda.requests.pod_request import MALFORMED

MAX_EVENTS = 500
"""Events of a kind that are remembered: the newest. Each is a few hundred bytes."""

MAX_EVENTS_A_NAMESPACE = 20
"""So many of one namespace: whoever may write Events there cannot push those of others off the page."""

ALLOWED_SKEW = datetime.timedelta(minutes=1)
"""The clock of a writer of Events may be ahead by so much."""

MAX_MESSAGE_LENGTH = 1024
"""Characters of a message that are kept: as many as the API server lets an Event have."""

MAX_SEARCHED_LENGTH = 16 * 1024
"""Characters of a message in which a refusal is looked for: in an Event of core/v1 the API server bounds none."""

MAX_NAME_LENGTH = 253
"""Characters of a name or a kind that are kept: as long as names are. In an Event the API server bounds neither."""

# The operator may name the webhook configuration as he likes, so a refusal is known by its own beginning too.
_OURS = re.compile(
    r'admission webhook "[^"]*quota\.vcuda\.io" denied the request: (?P<reason>.*)'
    rf"|(?P<known>({OVER_QUOTA}|{MALFORMED}): .*)",
    re.DOTALL,
)
"""What kube-apiserver says of a refusal (``pkg/admission/plugin/webhook/errors``); else how our own sentences begin."""


class EventObject(K8sStruct, frozen=True, gc=False):
    """The object that an Event is about."""

    kind: str = ""
    namespace: str = ""
    name: str = ""


class Series(K8sStruct, frozen=True, gc=False):
    """How often it happened, and when last, as writers of events.k8s.io say it."""

    count: int = 0
    last_observed_time: str | None = None


class StoredEvent(K8sStruct, frozen=True, gc=False):
    """An Event as far as it is read; of its times each kind of writer sets others."""

    metadata: ObjectMeta = ObjectMeta()
    involved_object: EventObject = EventObject()
    message: str | None = None
    count: int | None = None
    last_timestamp: str | None = None
    event_time: str | None = None
    series: Series | None = None

    def last(self, now: datetime.datetime) -> str:
        """Return when it last happened, RFC 3339, where that can be: not before it was stored, not after now."""
        stored = self.metadata.creation_timestamp or ""
        # client-go's recorders of core/v1 set lastTimestamp, those of events.k8s.io eventTime and a series.
        written = (self.series and self.series.last_observed_time) or self.last_timestamp or self.event_time or ""
        # Whoever may write Events writes these as he likes; the time of storing alone is the API server's own.
        first, last = model.moment(stored), model.moment(written)
        return written if first and last and first <= last <= now + ALLOWED_SKEW else stored

    @property
    def times(self) -> int:
        """How often it happened."""
        return max(self.series.count if self.series else 0, self.count or 1)


_EVENT = msgspec.json.Decoder(StoredEvent)


def read_refusal(event: StoredEvent, at: str) -> RefusedWorkload | None:
    """Return the refusal that an Event tells of, the last one ``at``, or None where it tells of none of ours."""
    found = _OURS.search((event.message or "")[:MAX_SEARCHED_LENGTH])
    if not found:
        return None
    kind, name = _about(event)
    message = (found["reason"] or found["known"])[:MAX_MESSAGE_LENGTH]
    return RefusedWorkload(event.metadata.namespace, kind, name, message, at, event.times)


def read_removal(event: StoredEvent, at: str) -> RemovedAllocation:
    """Return the removal that an Event of `controller.garbage.stale_gc` tells of."""
    kind, name = _about(event)
    message = (event.message or "")[:MAX_MESSAGE_LENGTH]
    return RemovedAllocation(event.involved_object.namespace and event.metadata.namespace, name, kind, message, at)


def _about(event: StoredEvent) -> tuple[str, str]:
    return event.involved_object.kind[:MAX_NAME_LENGTH], event.involved_object.name[:MAX_NAME_LENGTH]


def merge_by_workload(refusals: Iterable[RefusedWorkload]) -> Sequence[RefusedWorkload]:
    """Return one refusal for each workload, with its newest reason and the sum of all; the newest first."""
    # A workload has more than one Event: writers count up only those of one message, and its figures change.
    latest: dict[tuple[str, str, str], RefusedWorkload] = {}
    for each in refusals:
        key = (each.namespace, each.kind, each.name)
        seen = latest.setdefault(key, each)
        if seen is not each:
            latest[key] = msgspec.structs.replace(seen, count=seen.count + each.count)
    return tuple(latest.values())


class Newest(Generic[T]):
    """The newest of what Events tell, by the uid of each Event: so many in all, and so many of one namespace."""

    def __init__(self, most: int = MAX_EVENTS, most_of_one: int = MAX_EVENTS_A_NAMESPACE) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._lock = threading.Lock()
        self._by_namespace: dict[str, dict[str, T]] = {}

    def add(self, namespace: str, uid: str, told: T) -> None:
        """Remember it, or that it happened again; an older one goes where there are too many."""
        with self._lock:
            self._by_namespace.setdefault(namespace, {})[uid] = told
            if len(self._by_namespace[namespace]) > self._most_of_one:
                self._forget_oldest_of(namespace)
            # A storm of refusals, as when a quota was lowered, must not fill the leader's memory; nor may one in many
            # namespaces take the place of a refusal that is the only one in its own.
            if sum(map(len, self._by_namespace.values())) > self._most:
                self._forget_oldest_of(max(self._by_namespace, key=lambda name: len(self._by_namespace[name])))

    def all(self) -> Sequence[T]:
        """Return them, newest first."""
        with self._lock:
            told = [told for of_one in self._by_namespace.values() for told in of_one.values()]
        return sorted(told, key=lambda told: told.at, reverse=True)

    def _forget_oldest_of(self, namespace: str) -> None:
        of_one = self._by_namespace[namespace]
        del of_one[min(of_one, key=lambda uid: of_one[uid].at)]
        if not of_one:
            del self._by_namespace[namespace]


class EventInformer(Generic[T]):
    """Follows the Events of one reason, in all namespaces, and remembers the newest of those that ``read`` knows."""

    def __init__(self, kube: Kube, reason: str, read: Callable[[StoredEvent, str], T | None]) -> None:
        self._read: Callable[[StoredEvent, str], T | None] = read
        self._newest: Newest[T] = Newest()
        # The reflector's own store stays empty, since nothing bounds it. What a LIST brings again is known by its uid.
        self.reflector: Reflector[None] = Reflector(
            kube, "/api/v1/events", self._decode, params={"fieldSelector": f"reason={reason}"}
        )

    def newest(self) -> Sequence[T] | None:
        """Return what was told, newest first; None until the Events have been listed once."""
        return self._newest.all() if self.reflector.synced.is_set() else None

    def _decode(self, raw: bytes) -> None:
        event = _EVENT.decode(raw)
        told = self._read(event, event.last(datetime.datetime.now(datetime.UTC)))
        if told is not None:
            self._newest.add(event.metadata.namespace, event.metadata.uid, told)
