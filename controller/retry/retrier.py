"""When quota becomes free, makes owners (ReplicaSets, Jobs …) retry the pods that were rejected for quota.

After a change of the nodes' GPU models, owners also retry the pods that could use no GPU model. For example, the node
of a DaemonSet's pod may have got its model label only after the pod was rejected.

After a rejection, Kubernetes' controller retries after up to 16 minutes (kubernetes/kubernetes#98656). A change
of the owner makes the controller retry immediately. So this module sets an annotation that no other program reads.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec
import structlog

from controller.retry.rejected import LOOK_SECONDS, WITH_CONDITION, Owner, RejectedOwner, RejectedOwners, find_rejected
from controller.workqueue import Reconciler
from vcuda import errors, k8s_types
from vcuda.kube import MERGE_PATCH, Kube, NodeInformer, QuotaInformer
from vcuda.ledger.report import ModelUse, NamespaceUse
from vcuda.placement import placement
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import CORES_PER_CARD, Charge, Limit, NamespaceQuota
from vcuda.quota.rejections import lacks_model
from vcuda.requests.pod_request import read_request
from vcuda.requests.resources import BUILT_IN, GpuResources

RETRY_ANNOTATION = "quota.vcuda.io/retried-at"

NEXT_LOOK_SECONDS = 5.0
"""Seconds until a namespace with free quota and rejected workloads is checked again."""
CREATION_TIMEOUT_SECONDS = 8.0
"""Minimum seconds between two retries of one workload, so that its controller has time to create the pods."""
# The check of one namespace must not delay the checks of others. So a check may take BUDGET_SECONDS to read the owners
# of rejected pods, and BUDGET_SECONDS to decide which of them retry. The next check continues with the remaining
# owners. After a slow check, the namespace waits REST_PER_SECOND times as long as the check has taken.
BUDGET_SECONDS = 1.0
REST_PER_SECOND = 9.0
MODELS_DELAY_SECONDS = 2.0
"""Seconds from a change of the nodes' models to the retries, so that the webhook replicas have seen the change."""
MODELS_INTERVAL_SECONDS = 15.0
"""Minimum seconds between two checks of a namespace for pods without a usable model, in case a node's label flaps."""
MAX_PODS = 1000
"""Of the missing pods of one owner, only this many are counted, to save time. So later owners may retry in vain."""

LISTED_EVERY_SECONDS = 300.0
"""Seconds after which ReplicaSets and ReplicationControllers are listed even if no Event refers to any of them."""


class FreeQuota(msgspec.Struct, frozen=True):
    """The free quota of one GPU model.

    ``cores``: in hundredths of a card, rounded down; infinite if only memory is limited.
    ``memory``: in MiB; None if not limited.
    """

    cores: float
    memory: int | None = None

    @classmethod
    def of(cls, use: ModelUse) -> "FreeQuota":
        cores = math.inf if use.available is None else round(use.available * CORES_PER_CARD)
        return cls(cores, use.memory_available)

    def takes(self, charge: Charge, limit: Limit) -> bool:
        """Return True if the charge seems to fit. Return False for 0 cores, which are never rejected for quota."""
        # Like the free cores, the charge is rounded down. An unnecessary retry does no harm.
        memory_fits = self.memory is None or _least_memory(charge, limit) <= self.memory
        return charge.cores > 0 and math.floor(charge.cores) <= self.cores and memory_fits

    def without(self, charge: Charge, limit: Limit) -> "FreeQuota":
        memory = None if self.memory is None else self.memory - _least_memory(charge, limit)
        return FreeQuota(self.cores - math.floor(charge.cores), memory)

    def exceeds(self, other: "FreeQuota") -> bool:
        ours = math.inf if self.memory is None else self.memory
        return self.cores > other.cores or (other.memory is not None and ours > other.memory)


ALL_MODELS = ""
"""The key for the free cards of all models together, in a mapping of free quota by model."""


def record_free(
    recorded: dict[str, Mapping[str, FreeQuota]], namespace: str, use: NamespaceUse | None
) -> tuple[Mapping[str, FreeQuota], bool]:
    """Record a namespace's free quota by model, and return it. The second value is True if a model, or all models
    together, have more free quota than before."""
    free = {model.model: FreeQuota.of(model) for model in use.models} if use else {}
    if use and use.total:
        free[ALL_MODELS] = FreeQuota.of(use.total)
    before = recorded.get(namespace, {})
    unlimited = bool(free) and ALL_MODELS in before.keys() - free.keys()
    # Another thread may read the record at any time. So the record is replaced in one step.
    if free:
        recorded[namespace] = free
    else:
        recorded.pop(namespace, None)
    return free, unlimited or any(each.exceeds(before.get(model, FreeQuota(0, 0))) for model, each in free.items())


def has_free_cards(free: Mapping[str, FreeQuota]) -> bool:
    """Return True if a model has free cards, and all models together have free cards too."""
    of_models = (each.cores for model, each in free.items() if model != ALL_MODELS)
    return any(of_models) and (ALL_MODELS not in free or free[ALL_MODELS].cores > 0)


def retry_patch(**metadata: str) -> bytes:
    annotations = {RETRY_ANNOTATION: k8s_types.micro_time_now()}
    return msgspec.json.encode({"metadata": {**metadata, "annotations": annotations}})


def _least_memory(charge: Charge, limit: Limit) -> int:
    # Return the memory of a charge in MiB, rounded down like the free memory. If it were rounded up, a workload whose
    # pod fits exactly would not retry. An unnecessary retry does no harm.
    return max(charge.memory_under(limit) - 1, charge.memory)


def oldest_first(rejected: Iterable[RejectedOwner], judged: Collection[str] = ()) -> list[RejectedOwner]:
    return sorted(rejected, key=lambda each: (each.path in judged, each.since, each.path))


def select_retries(
    in_order: Iterable[RejectedOwner],
    quota: NamespaceQuota,
    free: Mapping[str, FreeQuota],
    nodes: Nodes,
    known: GpuResources = BUILT_IN,
) -> list[RejectedOwner]:
    """Return the owners that have free quota for at least one missing pod. Earlier owners take their quota first.

    ``free``: the free quota of each model. A pod takes quota of the first of its models with enough free quota.
    """
    left = dict(free)
    return [candidate for candidate in in_order if _take(candidate.owner, quota, left, nodes, known)]


def _take(owner: Owner, quota: NamespaceQuota, left: dict[str, FreeQuota], nodes: Nodes, known: GpuResources) -> bool:
    """Subtract from the free quota ``left`` the charges of missing pods that fit. Return True if at least one fits."""
    request = read_request(owner.spec.template, known)
    models = placement.find_candidates(owner.spec.template, request, quota, nodes).models
    took = False
    for _ in range(min(owner.missing, MAX_PODS)):
        fitting = (
            model
            for model in models
            if model in left
            and all(
                left[key].takes(request.charge_on(model), quota.limits[model])
                for key in (model, ALL_MODELS)
                if key in left
            )
        )
        if (model := next(fitting, None)) is None:
            break
        for key in left.keys() & {model, ALL_MODELS}:
            left[key] = left[key].without(request.charge_on(model), quota.limits[model])
        took = True
    return took


class Retrier:
    """Makes workloads with rejected pods retry when a usage report of their namespace shows more free quota."""

    def __init__(
        self, kube: Kube, quota: QuotaInformer, nodes: NodeInformer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        failure = "the controller could not check whether workloads were rejected"
        self.reconciler = Reconciler("retry", self._reconcile, failure=failure, clock=clock)
        # These checks have their own thread, because one change of a node causes a check of every limited namespace.
        self.models = Reconciler(
            "retry-models",
            self._retry_without_model,
            failure=failure,
            retry_seconds=LOOK_SECONDS * REST_PER_SECOND,
            min_interval=MODELS_INTERVAL_SECONDS,
            clock=clock,
        )
        self._kube = kube
        self._quota = quota
        self._nodes = nodes
        self._clock = clock
        self._free: dict[str, Mapping[str, FreeQuota]] = {}
        self._retried_at: dict[str, float] = {}
        self._listed: dict[str, tuple[float, Collection[str]]] = {}
        self._judged: dict[str, set[str]] = {}
        self._log = structlog.get_logger()

    def report(self, namespace: str, use: NamespaceUse | None) -> None:
        """Record the free quota of a namespace. If it has grown, queue a check of its rejected workloads."""
        free, has_grown = record_free(self._free, namespace, use)
        if not free:
            self._listed.pop(namespace, None)
        if has_grown:
            self.reconciler.queue.add(namespace)

    def models_changed(self, namespaces: Iterable[str]) -> None:
        """Queue checks of these namespaces for pods that could use no GPU model before nodes or the quota changed."""
        for namespace in namespaces:
            self.models.queue.add(namespace, MODELS_DELAY_SECONDS)

    def _retry_without_model(self, namespace: str) -> None:
        if (limits := self._limits(namespace)) is None:
            return
        found = find_rejected(self._kube, namespace, self._budget(), (), reports=lacks_model)
        nodes, known = self._nodes.current(), self._quota.resources()
        for rejected in self._in_time(oldest_first(found.owners), set()):
            # A pod retries even without free quota. If its next rejection is for quota, it retries when quota is free.
            pod = rejected.owner.spec.template
            if placement.find_candidates(pod, read_request(pod, known), limits, nodes).models:
                self._trigger(rejected)

    def _limits(self, namespace: str) -> NamespaceQuota | None:
        quota = self._quota.current()
        return quota.for_namespace(namespace) if quota else None

    def _reconcile(self, namespace: str) -> float | None:
        limits = self._limits(namespace)
        free = self._free.get(namespace, {})
        judged = self._judged.pop(namespace, set())
        if limits is None or not has_free_cards(free):
            return None
        started = self._clock()
        try:
            found = self._find(namespace, started, judged)
        except errors.ListOverdue as error:
            # After slow LISTs, check other namespaces first. Kubernetes also retries by itself.
            self._log.warning("rejected workloads not listed in time", namespace=namespace, reason=str(error))
            spent = self._clock() - started
            self.reconciler.queue.retry(namespace, max(NEXT_LOOK_SECONDS, spent * REST_PER_SECOND))
            return None
        in_order = oldest_first(found.owners, judged)
        nodes, known = self._nodes.current(), self._quota.resources()
        chosen = select_retries(self._in_time(in_order, judged), limits, free, nodes, known)
        unjudged = {each.path for each in in_order} - judged
        if unjudged or not found.complete:
            self._judged[namespace] = judged & found.paths
            self._log.info("the next check handles the other workloads", namespace=namespace, count=len(unjudged))
        for rejected in chosen:
            if self._retried_at.get(rejected.path, -math.inf) + CREATION_TIMEOUT_SECONDS <= self._clock():
                self._trigger(rejected)
        # Kubernetes' controllers need time to create pods. The next check sees the quota that these pods leave free.
        again = NEXT_LOOK_SECONDS if chosen or unjudged or not found.complete else None
        spent = self._clock() - started
        if again and spent > BUDGET_SECONDS:
            self.reconciler.queue.retry(namespace, max(again, spent * REST_PER_SECOND))
            return None
        return again

    def _find(self, namespace: str, now: float, judged: Collection[str]) -> RejectedOwners:
        at, kinds = self._listed.get(namespace, (-math.inf, ()))
        if now - at >= LISTED_EVERY_SECONDS:
            at, kinds = now, WITH_CONDITION
        found = find_rejected(self._kube, namespace, self._budget(), kinds, judged)
        left = [kind for kind in WITH_CONDITION if any(each.is_of(kind, namespace) for each in found.owners)]
        self._listed[namespace] = at, left
        return found

    def _budget(self) -> Callable[[], bool]:
        deadline = self._clock() + BUDGET_SECONDS
        return lambda: self._clock() < deadline

    def _in_time(self, in_order: Iterable[RejectedOwner], judged: set[str]) -> Iterator[RejectedOwner]:
        """Yield owners until BUDGET_SECONDS have passed, but at least one. Add the path of each to ``judged``."""
        in_time = self._budget()
        for rejected in in_order:
            judged.add(rejected.path)
            yield rejected
            if not in_time():
                return

    def _trigger(self, rejected: RejectedOwner) -> None:
        recent = self._clock() - CREATION_TIMEOUT_SECONDS
        # Two threads call this method. If one overwrites the other's record, a workload may retry once more.
        # Record the time of the retry before the patch, because the patch may succeed although its answer is lost.
        kept = {path: at for path, at in self._retried_at.items() if at > recent}
        self._retried_at = {**kept, rejected.path: self._clock()}
        try:
            self._kube.patch(rejected.path, retry_patch(), MERGE_PATCH)
        except errors.NotFound:
            return
        self._log.info("retry triggered", owner=rejected.path, rejected_since=rejected.since)
