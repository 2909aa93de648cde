"""Lets workloads that were refused for quota try again as soon as some is free.

A controller that was refused a pod waits before it asks again, up to 16 minutes (kubernetes/kubernetes#98656). A
change of its object makes it ask at once; the change here is one annotation that nothing else reads.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
import structlog

from controller.workqueue import WorkQueue
from vcuda.errors import NotFound, VcudaError
from vcuda.k8s_types import K8sStruct, ObjectMeta, Pod, can_be_name
from vcuda.kube import MERGE_PATCH, Kube, NodeInformer, QuotaInformer, segment
from vcuda.ledger.ledger import ModelUse, NamespaceUse
from vcuda.placement.affinity import oversized
from vcuda.placement.placement import Nodes, find_candidates
from vcuda.quota.model import CORES_PER_CARD, OVER_QUOTA, Charge, Limit, NamespaceQuota
from vcuda.requests.pod_request import read_request

JOB_ENDED = ("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget")
"""Conditions after which a Job creates no more pods."""


class Condition(K8sStruct, frozen=True, gc=False):
    """A status condition."""

    type: str = ""
    status: str = ""
    message: str = ""
    last_transition_time: str | None = None


class OwnerSpec(K8sStruct, frozen=True, gc=False):
    """How many pods of which template; a Job calls its number parallelism, and ends after so many completions."""

    replicas: int | None = None
    parallelism: int | None = None
    completions: int | None = None
    suspend: bool | None = None
    template: Pod = Pod()


class OwnerStatus(K8sStruct, frozen=True, gc=False):
    """How many pods there are; a Job calls its number active, a DaemonSet counts nodes."""

    replicas: int = 0
    active: int = 0
    succeeded: int = 0
    desired_number_scheduled: int = 0
    current_number_scheduled: int = 0
    conditions: tuple[Condition, ...] | None = None


class Owner(K8sStruct, frozen=True, gc=False):
    """A ReplicaSet, ReplicationController, StatefulSet, DaemonSet or Job."""

    metadata: ObjectMeta = ObjectMeta()
    spec: OwnerSpec = OwnerSpec()
    status: OwnerStatus = OwnerStatus()

    @property
    def missing(self) -> int:
        """How many pods it still wants to create. The API server fills in the numbers that people leave out."""
        spec, status = self.spec, self.status
        if self.metadata.deletion_timestamp:
            return 0
        if spec.parallelism is not None:
            return max(self._wanted_by_job(spec.parallelism) - status.active, 0)
        if spec.replicas is not None:
            return max(spec.replicas - status.replicas, 0)
        return max(status.desired_number_scheduled - status.current_number_scheduled, 0)

    def _wanted_by_job(self, parallelism: int) -> int:
        """Return how many pods a Job wants to have at once, as Kubernetes' job controller counts (``manageJob``)."""
        ended = any(each.type in JOB_ENDED and each.status == "True" for each in self.status.conditions or ())
        if self.spec.suspend or ended:
            return 0
        if self.spec.completions is None:
            return 0 if self.status.succeeded else parallelism
        return min(parallelism, self.spec.completions - self.status.succeeded)

    def refused_since(self) -> str | None:
        """Return when its condition began to say that it was refused for quota, or None where it does not."""
        # Whoever creates pods keeps of a refusal nothing but its text: the Status' causes are lost there.
        for condition in self.status.conditions or ():
            if condition.type == "ReplicaFailure" and condition.status == "True" and OVER_QUOTA in condition.message:
                return condition.last_transition_time or ""
        return None


class RefusedOwner(msgspec.Struct, frozen=True):
    """An owner that was refused: where it is in the API, since when, and what it is."""

    path: str
    since: str
    owner: Owner


class Room(msgspec.Struct, frozen=True):
    """What is free of one model: cores in hundredths of a card, memory in MiB, None where that is not limited."""

    cores: int
    memory: int | None = None

    def takes(self, charge: Charge, limit: Limit) -> bool:
        """Return whether a charge fits, as far as can be told; one that asks for no cores is nobody's business."""
        memory_fits = self.memory is None or _least_memory(charge, limit) <= self.memory
        return 0 < charge.cores <= self.cores and memory_fits

    def without(self, charge: Charge, limit: Limit) -> Room:
        """Return what a charge leaves."""
        memory = None if self.memory is None else self.memory - _least_memory(charge, limit)
        return Room(self.cores - charge.cores, memory)

    def exceeds(self, other: Room) -> bool:
        """Return whether there is more of anything than in another."""
        return self.cores > other.cores or (other.memory is not None and self._memory > other._memory)

    @property
    def _memory(self) -> float:
        return math.inf if self.memory is None else self.memory


def _least_memory(charge: Charge, limit: Limit) -> int:
    """Return a charge's memory in MiB, a card's share rounded down.

    What is free was rounded already, and the other way: rounded up here too, an owner whose pod fits exactly would
    not be woken. One that is woken in vain asks once more, no harm done.
    """
    if not limit.memory or not limit.cores:
        return charge.memory
    return charge.memory + charge.card_memory * limit.memory // limit.cores


def worth_a_try(
    refused: Iterable[RefusedOwner], quota: NamespaceQuota, free: Mapping[str, Room], nodes: Nodes
) -> list[RefusedOwner]:
    """Return the owners that may try again, oldest refusal first, and no more than fit into what is ``free`` by model.

    An owner takes from the model with the most free cores that it may use.
    """
    left = dict(free)
    in_order = sorted(refused, key=lambda each: (each.since, each.path))
    return [candidate for candidate in in_order if _take(candidate.owner, quota, left, nodes)]


def _take(owner: Owner, quota: NamespaceQuota, left: dict[str, Room], nodes: Nodes) -> bool:
    """Take what its missing pods would, as far as it goes, from what is left; return whether one fits at all."""
    if oversized(owner.spec.template.spec):
        return False  # its pods would be refused for that, and to look at it could take minutes
    request = read_request(owner.spec.template)
    models = find_candidates(owner.spec.template, request.schemes, quota, nodes).models
    took = False
    for _ in range(owner.missing):
        model = _roomiest(models, quota, left, request.charge)
        if model is None:
            break
        left[model] = left[model].without(request.charge, quota.limits[model])
        took = True
    return took


def _roomiest(models: Iterable[str], quota: NamespaceQuota, left: Mapping[str, Room], charge: Charge) -> str | None:
    fitting = [model for model in models if model in left and left[model].takes(charge, quota.limits[model])]
    return max(fitting, key=lambda model: left[model].cores, default=None)


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


class _Involved(K8sStruct, frozen=True, gc=False):
    kind: str = ""
    name: str = ""


class _Event(K8sStruct, frozen=True, gc=False):
    involved_object: _Involved = _Involved()
    message: str | None = None
    first_timestamp: str | None = None


_EVENT = msgspec.json.Decoder(_Event)
_OWNER = msgspec.json.Decoder(Owner)


class Nudger:
    """Watches the reports for quota that becomes free, and nudges the owners that it is enough for."""

    def __init__(
        self, kube: Kube, quota: QuotaInformer, nodes: NodeInformer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.due = WorkQueue(SPACING, clock)
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
                if kind in _WITH_EVENT and can_be_name(name) and OVER_QUOTA in (event.message or ""):
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
