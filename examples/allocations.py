"""Example pods with GPU allocations: the annotations and labels that each vendor's scheduler and device plugin write.

The pods are created from `SCHEMES`, the table of the vendors' resources and annotations.
"""

import datetime
from typing import Any

from vcuda.requests.schemes import SCHEMES, SECONDS, Scheme

NODE = "gpu-1"
"""The node on which the example pods have allocated cards."""

RECORDED = tuple(each for each in SCHEMES if each.predicate_node and each.predicate_times and each.phase)
"""The schemes (tables of a vendor's resources and annotations) that record an allocation's node, times and phase."""


def card_of(scheme: Scheme) -> dict[str, int]:
    """Return the limits of a container that requests one whole card."""
    return {scheme.main_resource: 1 if scheme.count else 100}


def share_of(scheme: Scheme) -> dict[str, int]:
    """Return the limits of a container that requests a share of a card."""
    return {**({scheme.count: 1} if scheme.count else {}), scheme.cores: 20, scheme.memory: 100}


def _cards(scheme: Scheme) -> dict[str, str]:
    """Return the annotations that name an allocation's cards, without those for its node, times and phase."""
    judged = {scheme.predicate_node, *scheme.predicate_times, scheme.phase and scheme.phase.key}
    return {
        f"{key}0" if key.endswith("-") else key: "3" if key.endswith("-") else "GPU-1,NVIDIA,1000,30:;"
        for key in scheme.allocation_annotations
        if key not in judged
    }


def unix(scheme: Scheme, at: float) -> str:
    return str(int(at) * scheme.time_unit) if scheme.time_unit != SECONDS else str(int(at))


def rfc3339(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def marks(
    scheme: Scheme, at: float, *, node: str | None = NODE, phase: str | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """Return a pair: the annotations and the labels by which a vendor records an allocation of cards to a pod.

    ``at``: the time of the allocation, in Unix seconds.
    ``phase``: the name of a field of `AllocationPhase`, by default ``placed``.
    """
    annotations = {**_cards(scheme), **{key: unix(scheme, at) for key in scheme.predicate_times}}
    if node is not None:
        annotations[str(scheme.predicate_node)] = node
    labels: dict[str, str] = {}
    told = getattr(scheme.phase, phase or "placed") if scheme.phase else None
    if scheme.phase and told is not None:
        (labels if scheme.phase.key in scheme.allocation_labels else annotations)[scheme.phase.key] = told
    return annotations, labels


def allocated_pod(scheme: Scheme, at: float, *, created: float | None = None, **fields: Any) -> dict[str, Any]:
    """Return a stored pod to which cards were allocated.

    ``at``: the time of the allocation, in Unix seconds.
    ``created``: the time of the pod's creation; by default the time of the allocation.
    ``node``, ``phase``: the node and the phase of the allocation, as in `marks`.
    ``status``: the phase of the pod, such as Running.
    ``bound``: the node that the pod is bound to.
    ``annotations``, ``labels``: further annotations and labels of the pod.

    The other keys in ``fields`` are fields of the pod's metadata.
    """
    annotations, labels = marks(scheme, at, **{key: fields.pop(key) for key in ("node", "phase") if key in fields})
    status, bound = fields.pop("status", "Pending"), fields.pop("bound", None)
    own = {"annotations": fields.pop("annotations", {}), "labels": fields.pop("labels", {})}
    metadata = {
        "namespace": "team-a",
        "name": "train-0",
        "uid": "uid-1",
        **fields,
        "creationTimestamp": rfc3339(at if created is None else created),
        "annotations": {**own["annotations"], **annotations},
        "labels": {**own["labels"], **labels},
    }
    container = {"name": "main", "image": "cuda", "resources": {"limits": card_of(scheme)}}
    spec = {"containers": [container], **({"nodeName": bound} if bound else {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": status}}
