"""Workloads whose pods were refused for quota, and which of them may try again when some of it is free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from vcuda.affinity import oversized
from vcuda.charge import Charge
from vcuda.objects import ObjectMeta, Pod, View
from vcuda.placement import Nodes, find_candidates
from vcuda.quota import Limit, NamespaceQuota
from vcuda.requests import read_request

REFUSAL = "exceeded GPU quota"
"""What every refusal for want of quota says; see `vcuda.charge.exceeded`."""


JOB_ENDED = ("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget")
"""Conditions after which a Job creates no more pods."""


class Condition(View, frozen=True, gc=False):
    """A status condition."""

    type: str = ""
    status: str = ""
    message: str = ""
    last_transition_time: str | None = None


class OwnerSpec(View, frozen=True, gc=False):
    """How many pods of which template; a Job calls its number parallelism, and ends after so many completions."""

    replicas: int | None = None
    parallelism: int | None = None
    completions: int | None = None
    suspend: bool | None = None
    template: Pod = Pod()


class OwnerStatus(View, frozen=True, gc=False):
    """How many pods there are; a Job calls its number active, a DaemonSet counts nodes."""

    replicas: int = 0
    active: int = 0
    succeeded: int = 0
    desired_number_scheduled: int = 0
    current_number_scheduled: int = 0
    conditions: tuple[Condition, ...] | None = None


class Owner(View, frozen=True, gc=False):
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
        for condition in self.status.conditions or ():
            if condition.type == "ReplicaFailure" and condition.status == "True" and REFUSAL in condition.message:
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
