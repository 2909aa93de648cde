"""Lets workloads that were refused for quota try again as soon as some is free.

A controller that was refused a pod waits before it asks again, up to 16 minutes (kubernetes/kubernetes#98656). A
change of its object makes it ask at once; the change here is one annotation that nothing else reads.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator

import msgspec
import structlog

from controller.due import DueQueue
from vcuda.charge import CORES_PER_CARD
from vcuda.errors import NotFound, VcudaError
from vcuda.kube import MERGE_PATCH, Kube, NodeWatch, QuotaWatch, segment
from vcuda.objects import View, can_be_name
from vcuda.owners import REFUSAL, Owner, RefusedOwner, Room, worth_a_try
from vcuda.usage import ModelUse, NamespaceUse

RETRY_ANNOTATION = "quota.vcuda.io/retried-at"

SPACING = 1.0
"""Seconds between two looks at one namespace's refused workloads, at least."""

AGAIN = 5.0
"""Seconds after which a namespace with free quota and refused workloads is looked at again."""

PATIENCE = 8.0
"""Seconds that a workload is given to create its pods before it is nudged once more."""

NOTHING = Room(0, 0)

_COLLECTIONS = {
    "ReplicaSet": "/apis/apps/v1/namespaces/{}/replicasets",
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
    "DaemonSet": "/apis/apps/v1/namespaces/{}/daemonsets",
    "ReplicationController": "/api/v1/namespaces/{}/replicationcontrollers",
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
}


_WITH_CONDITION = ("ReplicaSet", "ReplicationController")
_WITH_EVENT = ("StatefulSet", "DaemonSet", "Job")


class _Involved(View, frozen=True, gc=False):
    kind: str = ""
    name: str = ""


class _Event(View, frozen=True, gc=False):
    involved_object: _Involved = _Involved()
    message: str | None = None
    first_timestamp: str | None = None


_EVENT = msgspec.json.Decoder(_Event)
_OWNER = msgspec.json.Decoder(Owner)


class Nudger:
    """Watches the reports for quota that becomes free, and nudges the owners that it is enough for."""

    def __init__(
        self, kube: Kube, quota: QuotaWatch, nodes: NodeWatch, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.due = DueQueue(SPACING, clock)
        self._kube = kube
        self._quota = quota
        self._nodes = nodes
        self._clock = clock
        self._free: dict[str, dict[str, Room]] = {}
        self._nudged: dict[str, float] = {}
        self._log = structlog.get_logger()

    def report(self, namespace: str, use: NamespaceUse | None) -> None:
        """Take note of what is free; more than before makes the namespace's refused owners due."""
        free = {model.model: _room(model) for model in use.models} if use else {}
        before = self._free.get(namespace, {})
        self._free[namespace] = free
        if any(room.exceeds(before.get(model, NOTHING)) for model, room in free.items()):
            self.due.add(namespace)

    def run(self) -> None:
        """Nudge until `due` is closed."""
        while (namespace := self.due.next()) is not None:
            try:
                self._nudge(namespace)
            except VcudaError as error:
                self._log.warning("refused workloads not looked at", namespace=namespace, error=str(error))
                self.due.add(namespace, AGAIN)

    def _nudge(self, namespace: str) -> None:
        quota = self._quota.current()
        limits = quota.for_namespace(namespace) if quota else None
        free = self._free.get(namespace, {})
        if limits is None or not any(room.cores for room in free.values()):
            return
        chosen = worth_a_try(self._refused(namespace), limits, free, self._nodes.current())
        for refused in chosen:
            if self._nudged.get(refused.path, -PATIENCE) + PATIENCE <= self._clock():
                self._touch(refused)
        if chosen:
            self.due.add(namespace, AGAIN)

    def _touch(self, refused: RefusedOwner) -> None:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        body = msgspec.json.encode({"metadata": {"annotations": {RETRY_ANNOTATION: now}}})
        self._nudged = {path: at for path, at in self._nudged.items() if at + PATIENCE > self._clock()}
        self._nudged[refused.path] = self._clock()
        try:
            self._kube.patch(refused.path, body, MERGE_PATCH)
        except NotFound:
            return
        self._log.info("nudged", owner=refused.path, refused_since=refused.since)

    def _refused(self, namespace: str) -> list[RefusedOwner]:
        """Return the owners that still miss pods and were refused for quota, by their conditions and by Events."""
        found = [*self._by_condition(namespace), *self._by_event(namespace)]
        return [refused for refused in found if refused.owner.missing]

    def _by_condition(self, namespace: str) -> Iterator[RefusedOwner]:
        for kind in _WITH_CONDITION:
            collection = _COLLECTIONS[kind].format(segment(namespace))
            for page in self._kube.list_pages(collection):
                for raw in page.items:
                    owner = _OWNER.decode(raw)
                    since = owner.refused_since()
                    if since is not None:
                        yield RefusedOwner(f"{collection}/{segment(owner.metadata.name)}", since, owner)

    def _by_event(self, namespace: str) -> Iterator[RefusedOwner]:
        """Yield the owners of kinds that have no such condition, each with its first refusal that is remembered.

        Whoever may write Events in the namespace may have one name anything.
        """
        first: dict[str, str] = {}
        events = f"/api/v1/namespaces/{segment(namespace)}/events"
        for page in self._kube.list_pages(events, {"fieldSelector": "reason=FailedCreate"}):
            for raw in page.items:
                event = _EVENT.decode(raw)
                kind, name = event.involved_object.kind, event.involved_object.name
                if kind in _WITH_EVENT and can_be_name(name) and REFUSAL in (event.message or ""):
                    path = f"{_COLLECTIONS[kind].format(segment(namespace))}/{segment(name)}"
                    since = event.first_timestamp or ""
                    first[path] = min(since, first.get(path, since))
        for path, since in first.items():
            owner = self._read(path)
            if owner:
                yield RefusedOwner(path, since, owner)

    def _read(self, path: str) -> Owner | None:
        try:
            return _OWNER.decode(self._kube.get(path))
        except NotFound:
            return None


def _room(model: ModelUse) -> Room:
    """Return what a report says to be free of a model."""
    memory = None
    if model.memory_limit is not None:
        memory = max(model.memory_limit - (model.memory_used or 0), 0)
    return Room(round(model.available * CORES_PER_CARD), memory)
