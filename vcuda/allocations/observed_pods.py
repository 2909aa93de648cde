"""Stored pods as the ledger counts them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from vcuda.allocations.annotations import Allocation, PodCards, read_allocation, read_holding
from vcuda.k8s_types import MIRROR_ANNOTATION, Pod
from vcuda.placement.placement import NodeLabels, Nodes, read_pin
from vcuda.quota.charge import Charge
from vcuda.requests.pod_request import asks_for_vcuda, read_request

FINISHED = ("Succeeded", "Failed")


class StoredPod(msgspec.Struct, frozen=True):
    """What is kept of a vcuda pod that is stored.

    ``model`` is what its spec holds it to, or None; ``node`` is the node it is bound to, or empty. ``live``: it holds,
    or will hold, its cards; a terminating pod does too, until its containers have ended. ``allocation`` is what its
    scheduler and device plugin have written on it; None where that is nothing. ``holding`` are the cards that this
    gives it by number. ``version`` is its resourceVersion. ``terminating``: its deletion has been accepted. ``mirror``:
    it shows a static pod, which runs whatever becomes of it here.
    """

    uid: str
    namespace: str
    name: str
    model: str | None
    node: str
    live: bool
    charge: Charge
    created: str
    allocation: Allocation | None = None
    holding: PodCards | None = None
    version: str = ""
    terminating: bool = False
    mirror: bool = False

    def model_on(self, nodes: Nodes) -> str | None:
        """Return the model it is charged to: the one it is held to, else its node's; None where neither is known."""
        return self.model or (nodes.model_of(self.node) if self.node else None)


def read_stored(pod: Pod, labels: NodeLabels) -> StoredPod | None:
    """Return what is kept of a pod, or None where it asks for no vcuda."""
    if not asks_for_vcuda(pod):
        return None
    metadata = pod.metadata
    request = read_request(pod)
    return StoredPod(
        uid=metadata.uid,
        namespace=metadata.namespace,
        name=metadata.name,
        model=read_pin(pod, labels).model,
        node=pod.spec.node_name,
        live=pod.status is None or pod.status.phase not in FINISHED,
        charge=request.charge,
        created=metadata.creation_timestamp or "",
        allocation=read_allocation(pod, request.schemes),
        holding=read_holding(pod),
        version=metadata.resource_version,
        terminating=metadata.deletion_timestamp is not None,
        mirror=MIRROR_ANNOTATION in pod.annotations,
    )


def charges_of(pods: Iterable[StoredPod], nodes: Nodes) -> Iterator[tuple[str, Charge]]:
    """Yield (model, charge) of every pod that holds cards of a known model."""
    for pod in pods:
        model = pod.model_on(nodes) if pod.live else None
        if model:
            yield model, pod.charge
