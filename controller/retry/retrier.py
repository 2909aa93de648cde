"""When quota becomes free, makes owners (ReplicaSets, Jobs …) retry the pods that were rejected for quota.

After a change of the nodes' GPU models, owners also retry the pods that could use no GPU model. For example, the node
of a DaemonSet's pod may have got its model label only after the pod was rejected.

The namespaces of a team share quota. So when quota of a team becomes free, the owners of all its namespaces are checked
together, and the owner that was rejected first retries first. If a retry creates no pod, the other namespaces are
next: tenants can write the Events and owners by which a retry is decided.

After a rejection, Kubernetes' controller retries after up to 16 minutes (kubernetes/kubernetes#98656). A change
of the owner makes the controller retry immediately. So this module sets an annotation that no other program reads.
"""

import math
import time
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec
import structlog

from controller.recount.team_usages import TeamUsages, team_in, team_key
from controller.retry.rejected import LOOK_SECONDS, WITH_CONDITION, RejectedOwner, RejectedOwners, find_rejected
from controller.workqueue import Reconciler
from vcuda import errors, k8s_types
from vcuda.kube import MERGE_PATCH, Kube, NodeInformer, QuotaInformer
from vcuda.ledger.report import ModelUse, NamespaceUse, TeamUse
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
IN_VAIN_SECONDS = 300.0
"""If a retry creates no pod, the owner and its namespace come after all others for this many seconds."""
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


FreeByModel = Mapping[str, FreeQuota]

ALL_MODELS = ""
"""The key for the free cards of all models together, in a mapping of free quota by model."""


def record_free(
    recorded: dict[str, FreeByModel], key: str, use: NamespaceUse | TeamUse | None
) -> tuple[FreeByModel, bool]:
    """Record the free quota of a namespace or team by model, and return it. The second value is True if a model, or all
    models together, have more free quota than before."""
    free = {model.model: FreeQuota.of(model) for model in use.models} if use else {}
    if use and use.total:
        free[ALL_MODELS] = FreeQuota.of(use.total)
    before = recorded.get(key, {})
    unlimited = bool(free) and ALL_MODELS in before.keys() - free.keys()
    # Another thread may read the record at any time. So the record is replaced in one step.
    if free:
        recorded[key] = free
    else:
        recorded.pop(key, None)
    return free, unlimited or any(each.exceeds(before.get(model, FreeQuota(0, 0))) for model, each in free.items())


ALL_NAMESPACES = "*"
"""The key for the free quota of a team, in a mapping by namespace."""


def has_free_cards(free: FreeByModel) -> bool:
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


def oldest_first(
    rejected: Collection[RejectedOwner],
    judged: Collection[str] = (),
    in_vain: Mapping[str, float] = types.MappingProxyType({}),
) -> list[RejectedOwner]:
    """Return the owners in the order in which they retry.

    ``in_vain``: the owners whose last retry created no pod, with the time of this retry. An owner in a namespace with
    such an owner comes after all other namespaces.
    """
    failed: dict[str, float] = {}
    for each in rejected:
        failed[each.namespace] = max(failed.get(each.namespace, 0.0), in_vain.get(each.path, 0.0))

    def place(each: RejectedOwner) -> tuple[object, ...]:
        return each.path in judged, failed[each.namespace], in_vain.get(each.path, 0.0), each.since, each.path

    return sorted(rejected, key=place)


class Room(NamedTuple):
    """The free quota of a namespace or team, by model, with the limits to which it belongs."""

    free: FreeByModel
    limits: Mapping[str, Limit]

    def takes(self, model: str, charge: Charge) -> bool:
        keys = self.free.keys() & {model, ALL_MODELS}
        return model in keys and all(self.free[key].takes(charge, self.limits[model]) for key in keys)

    def without(self, model: str, charge: Charge) -> "Room":
        less = {
            key: self.free[key].without(charge, self.limits[model]) for key in (model, ALL_MODELS) if key in self.free
        }
        return self._replace(free={**self.free, **less})


def select_retries(
    in_order: Iterable[RejectedOwner],
    quotas: Mapping[str, NamespaceQuota],
    rooms: Mapping[str, Room],
    nodes: Nodes,
    known: GpuResources = BUILT_IN,
) -> list[RejectedOwner]:
    """Return the owners that have free quota for at least one missing pod. Earlier owners take their quota first.

    ``quotas``: the quota of each namespace. ``rooms``: the free quota of each namespace and, with the key
    `ALL_NAMESPACES`, of their team. A pod takes quota of the first of its models with enough free quota.
    """
    left = dict(rooms)
    chosen = []
    for each in in_order:
        pod = each.owner.spec.template
        request = read_request(pod, known)
        models = placement.find_candidates(pod, request, quotas[each.namespace], nodes).models
        keys = [key for key in (each.namespace, ALL_NAMESPACES) if key in left]
        if _take(each.owner.missing, {model: request.charge_on(model) for model in models}, left, keys):
            chosen.append(each)
    return chosen


def _take(missing: int, charges: Mapping[str, Charge], left: dict[str, Room], keys: Collection[str]) -> bool:
    """Subtract the charges of missing pods that fit from ``left``, under each of ``keys``. Return True if one fits.

    ``charges``: the charge of a pod on each model that it may use.
    """
    took = False
    for _ in range(min(missing, MAX_PODS)):
        fitting = (model for model in charges if all(left[key].takes(model, charges[model]) for key in keys))
        if (model := next(fitting, None)) is None:
            break
        left.update({key: left[key].without(model, charges[model]) for key in keys})
        took = True
    return took


class Rests:
    """Namespaces with slow LISTs, which checks of their team leave out for some time. So they do not delay others."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}

    def rested(self, namespaces: Iterable[str]) -> list[str]:
        """Return the namespaces that do not rest now."""
        self._until = {name: until for name, until in self._until.items() if until > self._clock()}
        return [name for name in namespaces if name not in self._until]

    def measure(self, namespace: str, began: float) -> float:
        """Let a namespace rest if its LISTs were slow. Return the seconds that they took; 0 if they were fast."""
        spent = self._clock() - began
        if spent <= BUDGET_SECONDS:
            return 0.0
        self._until[namespace] = self._clock() + spent * REST_PER_SECOND
        return spent


class Retrier:
    """Makes workloads with rejected pods retry when a usage report of their namespace shows more free quota."""

    def __init__(
        self,
        kube: Kube,
        quota: QuotaInformer,
        nodes: NodeInformer,
        clock: Callable[[], float] = time.monotonic,
        *,
        teams: TeamUsages | None = None,
    ) -> None:
        self._teams = teams or TeamUsages()
        self._rests = Rests(clock)
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
        # `_free`: the free quota of each namespace, and of each team by its `team_key`.
        self._free: dict[str, FreeByModel] = {}
        # `_retried`: when each owner has retried last, and the number of pods that it had created before.
        self._retried: dict[str, tuple[float, int]] = {}
        self._listed: dict[str, tuple[float, Collection[str]]] = {}
        self._looked_at: dict[str, float] = {}
        self._judged: dict[str, set[str]] = {}
        self._log = structlog.get_logger()

    def report(self, namespace: str, use: NamespaceUse | None) -> None:
        """Record the free quota of a namespace and its team. If it has grown, queue a check of rejected workloads."""
        free, has_grown = record_free(self._free, namespace, use)
        if not free:
            self._listed.pop(namespace, None)
            self._looked_at.pop(namespace, None)
        key, interval = namespace, None
        if use and use.team:
            key = team_key(use.team.name)
            _, of_team_has_grown = record_free(self._free, key, use.team)
            has_grown, interval = has_grown or of_team_has_grown, self._teams.interval(use.team.name)
        if has_grown:
            self.reconciler.queue.add(key, interval=interval)

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

    def _reconcile(self, key: str) -> float | None:
        judged = self._judged.pop(key, set())
        quotas, rooms = self._rooms(key)
        if not quotas:
            return None
        started = self._clock()
        found, slow = self._find(quotas, started, judged)
        in_vain = {each.path: self._retried[each.path][0] for each in found.owners if self._has_failed(each)}
        in_order = oldest_first(found.owners, judged, in_vain)
        nodes, known = self._nodes.current(), self._quota.resources()
        chosen = select_retries(self._in_time(in_order, judged), quotas, rooms, nodes, known)
        unjudged = {each.path for each in in_order} - judged
        if unjudged or not found.complete:
            self._judged[key] = judged & found.paths
        if unjudged:
            self._log.info("the next check handles the other workloads", namespace=key, count=len(unjudged))
        for rejected in chosen:
            if rejected.path not in self._retried or self._has_had_time(rejected):
                self._trigger(rejected)
        # Kubernetes' controllers need time to create pods. The next check sees the quota that these pods leave free.
        again = NEXT_LOOK_SECONDS if chosen or unjudged or not found.complete else None
        # A namespace of a team that was slow rests by itself, so that it does not delay the others.
        spent = self._clock() - started - (slow if ALL_NAMESPACES in rooms else 0.0)
        if again and spent > BUDGET_SECONDS:
            self.reconciler.queue.retry(key, max(again, spent * REST_PER_SECOND))
            return None
        return again

    def _rooms(self, key: str) -> tuple[Mapping[str, NamespaceQuota], Mapping[str, Room]]:
        """Return the quota and the free quota of each namespace of a team, or of one namespace, if cards are free."""
        team = team_in(key)
        quotas: dict[str, NamespaceQuota] = {}
        rooms: dict[str, Room] = {}
        for namespace in [key] if team is None else self._rests.rested(self._teams.members(team)):
            limits, free = self._limits(namespace), self._free.get(namespace, {})
            if limits and has_free_cards(free) and (limits.team.name if limits.team else None) == team:
                quotas[namespace], rooms[namespace] = limits, Room(free, limits.limits)
                if limits.team:
                    rooms[ALL_NAMESPACES] = Room(self._free.get(key, {}), limits.team.limits)
        is_full = ALL_NAMESPACES in rooms and not has_free_cards(rooms[ALL_NAMESPACES].free)
        return ({}, {}) if is_full else (quotas, rooms)

    def _find(self, namespaces: Collection[str], now: float, judged: Collection[str]) -> tuple[RejectedOwners, float]:
        """Return the owners with rejected pods, and the seconds that slow namespaces took."""
        found, in_time, slow = RejectedOwners(judged), self._budget(), 0.0
        # If one check has no time for all namespaces, the next check begins with the other ones.
        longest_ago = sorted(namespaces, key=lambda namespace: (self._looked_at.get(namespace, -math.inf), namespace))
        for number, namespace in enumerate(longest_ago):
            if number and not in_time():
                found.complete = False
                break
            began = self._looked_at[namespace] = self._clock()
            try:
                self._find_in(namespace, now, found)
            except errors.ListOverdue as error:
                # After slow LISTs, check other namespaces first. Kubernetes also retries by itself.
                found.complete = False
                self._log.warning("rejected workloads not listed in time", namespace=namespace, reason=str(error))
            slow += self._rests.measure(namespace, began)
        return found, slow

    def _find_in(self, namespace: str, now: float, found: RejectedOwners) -> None:
        at, kinds = self._listed.get(namespace, (-math.inf, ()))
        if now - at >= LISTED_EVERY_SECONDS:
            at, kinds = now, WITH_CONDITION
        find_rejected(self._kube, namespace, self._budget(), kinds, found=found)
        left = [kind for kind in WITH_CONDITION if any(each.is_of(kind, namespace) for each in found.owners)]
        self._listed[namespace] = at, left

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

    def _has_had_time(self, rejected: RejectedOwner) -> bool:
        return self._retried[rejected.path][0] + CREATION_TIMEOUT_SECONDS <= self._clock()

    def _has_failed(self, rejected: RejectedOwner) -> bool:
        """Return True if the last retry of an owner has created no pod."""
        if rejected.path not in self._retried or not self._has_had_time(rejected):
            return False
        return rejected.owner.created <= self._retried[rejected.path][1]

    def _trigger(self, rejected: RejectedOwner) -> None:
        recent = self._clock() - IN_VAIN_SECONDS
        # Two threads call this method. If one overwrites the other's record, a workload may retry once more.
        # Record the time of the retry before the patch, because the patch may succeed although its answer is lost.
        kept = {path: each for path, each in self._retried.items() if each[0] > recent}
        self._retried = {**kept, rejected.path: (self._clock(), rejected.owner.created)}
        try:
            self._kube.patch(rejected.path, retry_patch(), MERGE_PATCH)
        except errors.NotFound:
            return
        self._log.info("retry triggered", owner=rejected.path, rejected_since=rejected.since)
