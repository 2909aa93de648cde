"""Creates pods with annotations and labels by which vendors' schedulers record an allocation of cards."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from examples.allocations import card_of, marks
from tests.builders import vcuda_pod
from tests.e2e.cluster import Cluster, Json
from vcuda.requests.schemes import Scheme, is_listed_key

REASON = "StaleAllocationRemoved"
BY_HAND = "by-hand"
"""The schedulerName of pods that no scheduler places. The tests bind these pods themselves."""


@dataclass(frozen=True)
class Allocated:
    """A pod whose annotations and labels record an allocation of now. Tests check whether the allocation is removed.

    ``scheme``: the vendor's annotations, labels and resources. ``node``: the node of the allocation, or None.
    ``bound``: the node to which the pod is bound, or None. ``status``: the phase that the test sets in the pod's
    status, for example Running, or None. ``own``: annotations of the pod that do not belong to the allocation.
    """

    name: str
    scheme: Scheme
    node: str | None
    phase: str | None = None
    bound: str | None = None
    status: str | None = None
    own: Mapping[str, str] = field(default_factory=dict)
    scheduler: str = BY_HAND

    def create(self, cluster: Cluster, namespace: str) -> Json:
        annotations, labels = marks(self.scheme, time.time(), node=self.node, phase=self.phase)
        metadata = {"namespace": namespace, "name": self.name, "annotations": {**self.own, **annotations}}
        spec = {"schedulerName": self.scheduler, **({"nodeName": self.bound} if self.bound else {})}
        manifest = vcuda_pod(card_of(self.scheme), metadata={**metadata, "labels": labels}, **spec)
        limits = {key: str(value) for key, value in card_of(self.scheme).items()}
        manifest["spec"]["containers"][0]["resources"] = {"limits": limits}
        cluster.create(manifest)
        if self.status == "Running":
            return cluster.run_pod(namespace, self.name)
        if self.status:
            return cluster.finish_pod(namespace, self.name, self.status)
        return cluster.pod(namespace, self.name)


def is_allocated(found: Json, scheme: Scheme) -> bool:
    metadata = found["metadata"]
    return any(is_listed_key(key, scheme.allocation_annotations) for key in metadata.get("annotations", {})) or any(
        is_listed_key(key, scheme.allocation_labels) for key in metadata.get("labels", {})
    )


def await_freed(cluster: Cluster, namespace: str, pod: Allocated) -> Json:
    return cluster.wait_pod(namespace, pod.name, lambda found: not is_allocated(found, pod.scheme))


def await_removal_event(cluster: Cluster, namespace: str, name: str) -> Json:
    """Return the only Event about the removal of an allocation or lock from the object with this name."""
    [event] = cluster.await_events(namespace, f"involvedObject.name={name},reason={REASON}")
    return event
