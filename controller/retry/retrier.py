"""Lets workloads that were refused for quota try again as soon as some is free.

A controller that was refused a pod waits before it asks again, up to 16 minutes (kubernetes/kubernetes#98656). A
change of its object makes it ask at once; the change here is one annotation that nothing else reads.
"""

import datetime
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec
import structlog

from controller.retry.refused import WITH_CONDITION, Owner, RefusedOwner, RefusedOwners, find_refused
from controller.workqueue import Reconciler
from vcuda import errors
from vcuda.kube import MERGE_PATCH, Kube, NodeInformer, QuotaInformer
from vcuda.ledger.report import ModelUse, NamespaceUse
from vcuda.placement import placement
from vcuda.quota.model import CORES_PER_CARD, Charge, Limit, NamespaceQuota
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

LISTED_EVERY_SECONDS = 300.0
"""After which owners that keep a refusal as a condition are listed, though no Event refers to one."""


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
        judged = self._judged.pop(namespace, set())
        try:
            found = self._find(namespace, started, judged)
        except errors.ListOverdue as error:
            self._rest(namespace, self._clock() - started, str(error))
            return None
        in_order = oldest_first(found.owners, judged)
        nodes, known = self._nodes.current(), self._quota.resources()
        chosen = select_retries(self._in_time(in_order, judged), limits, free, nodes, known)
        unjudged = {each.path for each in in_order} - judged
        if unjudged or not found.complete:
            self._judged[namespace] = judged
            self._log.info("refused workloads left for the next look", namespace=namespace, count=len(unjudged))
        for refused in chosen:
            if self._told.get(refused.path, -math.inf) + CREATION_TIMEOUT_SECONDS <= self._clock():
                self._tell(refused)
        # Their controllers take their time, and their pods change the ledger: what is left is for others then.
        again = NEXT_LOOK_SECONDS if chosen or unjudged or not found.complete else None
        spent = self._clock() - started
        if again and spent > BUDGET_SECONDS:
            self.reconciler.queue.retry(namespace, max(again, spent * REST_PER_SECOND))
            return None
        return again

    def _rest(self, namespace: str, spent: float, reason: str) -> None:
        """Let a namespace rest that took too long, so that others have turns. Its workloads retry by themselves."""
        self._log.warning("refused workloads not found in time", namespace=namespace, reason=reason)
        self.reconciler.queue.retry(namespace, max(NEXT_LOOK_SECONDS, spent * REST_PER_SECOND))

    def _find(self, namespace: str, now: float, judged: Collection[str]) -> RefusedOwners:
        at, kinds = self._listed.get(namespace, (-math.inf, ()))
        if now - at >= LISTED_EVERY_SECONDS:
            at, kinds = now, WITH_CONDITION
        found = find_refused(self._kube, namespace, self._budget(), kinds, judged)
        left = [kind for kind in WITH_CONDITION if any(each.is_of(kind, namespace) for each in found.owners)]
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
