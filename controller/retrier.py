"""Lets workloads that were refused for quota try again as soon as some is free.

A controller that was refused a pod waits before it asks again, up to 16 minutes (kubernetes/kubernetes#98656). A
change of its object makes it ask at once; the change here is one annotation that nothing else reads.
"""

import contextlib
import datetime
import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec
import structlog

from controller.workqueue import Reconciler
from vcuda import errors, k8s_types
from vcuda.kube import MERGE_PATCH, Kube, NodeInformer, QuotaInformer, objects, segment
from vcuda.ledger.report import ModelUse, NamespaceUse
from vcuda.placement import placement
from vcuda.quota.model import CORES_PER_CARD, NOT_MUTATED, OVER_QUOTA, Charge, Limit, NamespaceQuota
from vcuda.requests.pod_request import read_request
from vcuda.requests.resources import BUILT_IN, GpuResources

RETRY_ANNOTATION = "quota.vcuda.io/retried-at"

NEXT_LOOK_SECONDS = 5.0  # after which a namespace with free quota and refused workloads is looked at again
# How long a workload that may try again has to create its pods, before it is told so once more.
CREATION_TIMEOUT_SECONDS = 8.0
# What a look at a namespace may take to read the workloads that Events tell of, and again to judge; the rest is for the
# next look. One that takes longer all the same, by the size of what is listed, is followed by a rest, nine times as
# long. So nobody holds up the workloads of other namespaces, with however many or large ones of their own.
BUDGET_SECONDS = 1.0
REST_PER_SECOND = 9.0
MAX_PODS = 1000  # of one workload that are looked for a place; more are told in vain at worst

JOB_ENDED = ("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget")
"""Conditions after which a Job creates no more pods."""

_COLLECTIONS = {
    "ReplicaSet": "/apis/apps/v1/namespaces/{}/replicasets",
    "StatefulSet": "/apis/apps/v1/namespaces/{}/statefulsets",
    "DaemonSet": "/apis/apps/v1/namespaces/{}/daemonsets",
    "ReplicationController": "/api/v1/namespaces/{}/replicationcontrollers",
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
}
# These two keep a refusal as condition ReplicaFailure until a pod could be created; the others only write an Event,
# which the API server forgets after an hour (--event-ttl). The two write it as well, at each try anew: so all of them,
# with their templates, are listed only where Events tell of one, where one was found before, and now and then.
LISTED_EVERY_SECONDS = 300.0
_WITH_CONDITION = ("ReplicaSet", "ReplicationController")
_WITH_EVENT = ("StatefulSet", "DaemonSet", "Job")


class Condition(k8s_types.K8sStruct, frozen=True, gc=False):
    """A status condition."""

    type: str = ""
    status: str = ""
    message: str = ""
    last_transition_time: str | None = None


class OwnerSpec(k8s_types.K8sStruct, frozen=True, gc=False):
    """How many pods of which template; a Job calls its number parallelism, and ends after so many completions."""

    replicas: int | None = None
    parallelism: int | None = None
    completions: int | None = None
    suspend: bool | None = None
    template: k8s_types.Pod = k8s_types.Pod()


class OwnerStatus(k8s_types.K8sStruct, frozen=True, gc=False):
    """How many pods there are; a Job calls its number active, a DaemonSet counts nodes."""

    replicas: int = 0
    active: int = 0
    succeeded: int = 0
    desired_number_scheduled: int = 0
    current_number_scheduled: int = 0
    conditions: tuple[Condition, ...] | None = None


class Owner(k8s_types.K8sObject, frozen=True, gc=False):
    """A ReplicaSet, ReplicationController, StatefulSet, DaemonSet or Job."""

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
        # As Kubernetes' job controller counts (manageJob in pkg/controller/job).
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
            if condition.type == "ReplicaFailure" and condition.status == "True" and may_pass_later(condition.message):
                return condition.last_transition_time or ""
        return None


def may_pass_later(message: str) -> bool:
    """Return whether a message is of a refusal that may be none at the next try, as far as it is ours."""
    return OVER_QUOTA in message or NOT_MUTATED in message


class RefusedOwner(msgspec.Struct, frozen=True):
    """An owner that was refused: where it is in the API, since when, and what it is."""

    path: str
    since: str
    owner: Owner

    def is_of(self, kind: str, namespace: str) -> bool:
        """Return whether it is of this kind, in this namespace."""
        return self.path.startswith(f"{_COLLECTIONS[kind].format(segment(namespace))}/")


class FreeQuota(msgspec.Struct, frozen=True):
    """What is free of one model: cores in hundredths of a card, memory in MiB, None where that is not limited."""

    cores: int
    memory: int | None = None

    @classmethod
    def of(cls, use: ModelUse) -> "FreeQuota":
        """Return what a report says to be free."""
        return cls(round(use.available * CORES_PER_CARD), use.memory_available)

    def takes(self, charge: Charge, limit: Limit) -> bool:
        """Return whether a charge fits, as far as can be told; one without cores never does: no quota refuses it."""
        memory_fits = self.memory is None or _least_memory(charge, limit) <= self.memory
        return 0 < charge.cores <= self.cores and memory_fits

    def without(self, charge: Charge, limit: Limit) -> "FreeQuota":
        """Return what a charge leaves."""
        memory = None if self.memory is None else self.memory - _least_memory(charge, limit)
        return FreeQuota(self.cores - charge.cores, memory)

    def exceeds(self, other: "FreeQuota") -> bool:
        """Return whether there is more of anything than in another."""
        ours = math.inf if self.memory is None else self.memory
        return self.cores > other.cores or (other.memory is not None and ours > other.memory)


def _least_memory(charge: Charge, limit: Limit) -> int:
    # In MiB, a card's share rounded down. What is free was rounded already, and the other way: rounded up here too, an
    # owner whose pod fits exactly would not be told. One that is told in vain asks once more, which harms nobody.
    if not limit.memory or not limit.cores:
        return charge.memory
    return charge.memory + charge.card_memory * limit.memory // limit.cores


def oldest_first(refused: Iterable[RefusedOwner], judged: Collection[str] = ()) -> list[RefusedOwner]:
    """Return the owners by the age of their refusal; behind the others those whose paths were ``judged`` already."""
    return sorted(refused, key=lambda each: (each.path in judged, each.since, each.path))


def select_retries(
    in_order: Iterable[RefusedOwner],
    quota: NamespaceQuota,
    free: Mapping[str, FreeQuota],
    nodes: placement.Nodes,
    known: GpuResources = BUILT_IN,
) -> list[RefusedOwner]:
    """Return the owners that may try again, the first ones first, and no more than fit into what is ``free`` by model.

    An owner takes from the model with the most free cores that it may use.
    """
    left = dict(free)
    return [candidate for candidate in in_order if _take(candidate.owner, quota, left, nodes, known)]


def _take(
    owner: Owner, quota: NamespaceQuota, left: dict[str, FreeQuota], nodes: placement.Nodes, known: GpuResources
) -> bool:
    """Take what its missing pods would, as far as it goes, from what is left; return whether one fits at all."""
    request = read_request(owner.spec.template, known)
    models = placement.find_candidates(owner.spec.template, request.schemes, quota, nodes).models
    took = False
    for _ in range(min(owner.missing, MAX_PODS)):
        fitting = [
            model
            for model in models
            if model in left and left[model].takes(request.charge_on(model), quota.limits[model])
        ]
        if not fitting:
            break
        model = max(fitting, key=lambda model: left[model].cores)
        left[model] = left[model].without(request.charge_on(model), quota.limits[model])
        took = True
    return took


class RefusedObject(k8s_types.K8sStruct, frozen=True, gc=False):
    """What an Event of a refusal is about."""

    kind: str = ""
    name: str = ""
    uid: str = ""


class RefusalEvent(k8s_types.K8sStruct, frozen=True, gc=False):
    """An Event that tells why something could not be created."""

    involved_object: RefusedObject = RefusedObject()
    message: str | None = None
    first_timestamp: str | None = None


_EVENT = msgspec.json.Decoder(RefusalEvent)
_OWNER = msgspec.json.Decoder(Owner)


def find_refused(
    kube: Kube,
    namespace: str,
    in_time: Callable[[], bool] = lambda: True,
    listed: Collection[str] = _WITH_CONDITION,
) -> list[RefusedOwner]:
    """Return the owners that still miss pods and were refused for quota, by their conditions and by Events.

    Of kinds with such a condition those are listed that Events tell of, and those that are ``listed``. What else Events
    tell of is read while ``in_time`` says so. An owner that cannot be decoded costs only itself.
    """
    told = refused_by_events(kube, namespace, "FailedCreate")
    kinds = [kind for kind in _WITH_CONDITION if kind in listed or any(each.kind == kind for each in told)]
    found = [*_refused_by_condition(kube, namespace, kinds), *_refused_by_event(kube, namespace, told, in_time)]
    return [refused for refused in found if refused.owner.missing]


def _refused_by_condition(kube: Kube, namespace: str, kinds: Iterable[str]) -> Iterator[RefusedOwner]:
    for kind in kinds:
        collection = _COLLECTIONS[kind].format(segment(namespace))
        for owner in objects.decode_each(_OWNER, (raw for page in kube.list_pages(collection) for raw in page.items)):
            since = owner.refused_since()
            if since is not None:
                yield RefusedOwner(f"{collection}/{segment(owner.metadata.name)}", since, owner)


def refused_by_events(kube: Kube, namespace: str, reason: str) -> dict[RefusedObject, str]:
    """Return what Events of this reason tell was refused for quota, each with its first refusal that is remembered."""
    first: dict[RefusedObject, str] = {}
    pages = kube.list_pages(f"/api/v1/namespaces/{segment(namespace)}/events", {"fieldSelector": f"reason={reason}"})
    for event in objects.decode_each(_EVENT, (raw for page in pages for raw in page.items)):
        told, since = event.involved_object, event.first_timestamp or ""
        # Whoever may write Events in the namespace may have one name anything, another namespace's path too.
        if k8s_types.can_be_name(told.name) and may_pass_later(event.message or ""):
            first[told] = min(since, first.get(told, since))
    return first


def _refused_by_event(
    kube: Kube, namespace: str, told: Mapping[RefusedObject, str], in_time: Callable[[], bool]
) -> Iterator[RefusedOwner]:
    """Yield the owners of kinds that have no such condition, each with its first refusal that is remembered."""
    first: dict[str, str] = {}
    for each, since in told.items():
        if each.kind in _WITH_EVENT:
            path = f"{_COLLECTIONS[each.kind].format(segment(namespace))}/{segment(each.name)}"
            first[path] = min(since, first.get(path, since))
    # In another order each time: where there are more than can be read in time, each has its turn.
    for path, since in random.sample(sorted(first.items()), len(first)):
        if not in_time():
            return
        # Events outlive their object.
        with contextlib.suppress(errors.NotFound):
            yield from (RefusedOwner(path, since, owner) for owner in objects.decode_each(_OWNER, [kube.get(path)]))


class Retrier:
    """Watches the reports for quota that becomes free, and tells the owners that it is enough for to try again."""

    def __init__(
        self, kube: Kube, quota: QuotaInformer, nodes: NodeInformer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        failure = "refused workloads not looked at"
        self.reconciler = Reconciler("nudge", self._reconcile, failure=failure, clock=clock)
        self._kube = kube
        self._quota = quota
        self._nodes = nodes
        self._clock = clock
        self._free: dict[str, dict[str, FreeQuota]] = {}
        self._told: dict[str, float] = {}
        self._listed: dict[str, tuple[float, Collection[str]]] = {}
        self._judged: dict[str, set[str]] = {}
        self._log = structlog.get_logger()

    def report(self, namespace: str, use: NamespaceUse | None) -> None:
        """Take note of what is free; more than before makes the namespace's refused owners due."""
        free = {model.model: FreeQuota.of(model) for model in use.models} if use else {}
        before = self._free.pop(namespace, {})
        if free:
            self._free[namespace] = free
        else:
            self._listed.pop(namespace, None)
        if any(each.exceeds(before.get(model, FreeQuota(0, 0))) for model, each in free.items()):
            self.reconciler.queue.add(namespace)

    def _reconcile(self, namespace: str) -> float | None:
        quota = self._quota.current()
        limits = quota.for_namespace(namespace) if quota else None
        free = self._free.get(namespace, {})
        if limits is None or not any(each.cores for each in free.values()):
            return None
        started = self._clock()
        found = self._find(namespace, started)
        judged = self._judged.pop(namespace, set())
        in_order = oldest_first(found, judged)
        nodes, known = self._nodes.current(), self._quota.resources()
        chosen = select_retries(self._in_time(in_order, judged), limits, free, nodes, known)
        if unjudged := {each.path for each in in_order} - judged:
            self._judged[namespace] = judged
            self._log.info("refused workloads left for the next look", namespace=namespace, count=len(unjudged))
        for refused in chosen:
            if self._told.get(refused.path, -math.inf) + CREATION_TIMEOUT_SECONDS <= self._clock():
                self._tell(refused)
        # Their controllers take their time, and their pods change the ledger: what is left is for others then.
        again = NEXT_LOOK_SECONDS if chosen or unjudged else None
        spent = self._clock() - started
        if again and spent > BUDGET_SECONDS:
            self.reconciler.queue.retry(namespace, max(again, spent * REST_PER_SECOND))
            return None
        return again

    def _find(self, namespace: str, now: float) -> list[RefusedOwner]:
        at, kinds = self._listed.get(namespace, (-math.inf, ()))
        if now - at >= LISTED_EVERY_SECONDS:
            at, kinds = now, _WITH_CONDITION
        found = find_refused(self._kube, namespace, self._budget(), kinds)
        left = [kind for kind in _WITH_CONDITION if any(each.is_of(kind, namespace) for each in found)]
        self._listed[namespace] = at, left
        return found

    def _budget(self) -> Callable[[], bool]:
        """Return what says whether there is time left, from now on."""
        deadline = self._clock() + BUDGET_SECONDS
        return lambda: self._clock() < deadline

    def _in_time(self, in_order: Iterable[RefusedOwner], judged: set[str]) -> Iterator[RefusedOwner]:
        """Yield the owners until the time is over, one at least, and note which."""
        in_time = self._budget()
        for refused in in_order:
            judged.add(refused.path)
            yield refused
            if not in_time():
                return

    def _tell(self, refused: RefusedOwner) -> None:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        body = msgspec.json.encode({"metadata": {"annotations": {RETRY_ANNOTATION: now}}})
        recent = self._clock() - CREATION_TIMEOUT_SECONDS
        # Before the patch: one whose answer is lost may have landed, and counts as told.
        self._told = {path: at for path, at in self._told.items() if at > recent} | {refused.path: self._clock()}
        try:
            self._kube.patch(refused.path, body, MERGE_PATCH)
        except errors.NotFound:
            return
        self._log.info("nudged", owner=refused.path, refused_since=refused.since)
