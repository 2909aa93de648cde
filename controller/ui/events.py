"""What the cluster remembers by Events: pods that were refused, and stale allocations that were removed.

The webhook refuses a pod and keeps nothing. The owner that wanted it (a ReplicaSet, Job, StatefulSet ...) writes an
Event with reason FailedCreate and the refusal as its message, which the API server keeps for an hour
(kube-apiserver ``--event-ttl``). A pod that a person creates directly leaves no trace: only its creator sees why.
"""

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from controller.ui.snapshot import RefusedWorkload, RemovedAllocation
from vcuda.k8s_types import K8sStruct, ObjectMeta
from vcuda.kube import Kube, Reflector
from vcuda.quota.model import OVER_QUOTA
from vcuda.requests.pod_request import MALFORMED

MAX_EVENTS = 500
"""Events of a kind that are remembered: the newest. Each is a few hundred bytes."""

MAX_MESSAGE_LENGTH = 1024
"""Characters of a message that are kept: as many as the API server lets an Event have."""

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

    @property
    def at(self) -> str:
        """When it last happened, RFC 3339."""
        # client-go's recorders of core/v1 set lastTimestamp, those of events.k8s.io eventTime and a series.
        last = self.series.last_observed_time if self.series else None
        return last or self.last_timestamp or self.event_time or self.metadata.creation_timestamp or ""

    @property
    def times(self) -> int:
        """How often it happened."""
        return max(self.series.count if self.series else 0, self.count or 1)


_EVENT = msgspec.json.Decoder(StoredEvent)


def read_refusal(event: StoredEvent) -> RefusedWorkload | None:
    """Return the refusal that an Event tells of, or None where it tells of none of ours."""
    found = _OURS.search(event.message or "")
    if not found:
        return None
    involved = event.involved_object
    message = (found["reason"] or found["known"])[:MAX_MESSAGE_LENGTH]
    return RefusedWorkload(event.metadata.namespace, involved.kind, involved.name, message, event.at, event.times)


def read_removal(event: StoredEvent) -> RemovedAllocation:
    """Return the removal that an Event of `controller.stale_gc` tells of."""
    involved = event.involved_object
    message = (event.message or "")[:MAX_MESSAGE_LENGTH]
    return RemovedAllocation(involved.namespace, involved.name, involved.kind, message, event.at)


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


T = TypeVar("T", RefusedWorkload, RemovedAllocation)


class Newest(Generic[T]):
    """The newest ``most`` of what Events tell, by the uid of each Event."""

    def __init__(self, most: int = MAX_EVENTS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._by_uid: dict[str, T] = {}

    def add(self, uid: str, told: T) -> None:
        """Remember it, or that it happened again; the oldest goes where there are too many."""
        with self._lock:
            self._by_uid[uid] = told
            # A storm of refusals, as when a quota was lowered, must not fill the leader's memory.
            if len(self._by_uid) > self._most:
                del self._by_uid[min(self._by_uid, key=lambda each: self._by_uid[each].at)]

    def all(self) -> Sequence[T]:
        """Return them, newest first."""
        with self._lock:
            return sorted(self._by_uid.values(), key=lambda told: told.at, reverse=True)


class EventInformer(Generic[T]):
    """Follows the Events of one reason, in all namespaces, and remembers the newest of those that ``read`` knows."""

    def __init__(self, kube: Kube, reason: str, read: Callable[[StoredEvent], T | None]) -> None:
        self._read: Callable[[StoredEvent], T | None] = read
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
        told = self._read(event)
        if told is not None:
            self._newest.add(event.metadata.uid, told)
