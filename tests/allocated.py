"""Pods as the vendors' schedulers and device plugins leave them: asked for by a scheme, and allocated by it."""

import datetime
from collections.abc import Mapping
from typing import Any

from tests.builders import Manifest, vcuda_pod
from vcuda.requests.schemes import GPU_MANAGER, HAMI, NVIDIA_VCUDA, SECONDS, VGPU_MANAGER, Scheme

NODE = "gpu-1"
"""Where they are allocated."""

ASKED: Mapping[str, Mapping[str, Any]] = {
    GPU_MANAGER.name: {GPU_MANAGER.cores: 100},
    NVIDIA_VCUDA.name: {NVIDIA_VCUDA.cores: 100},
    HAMI.name: {"nvidia.com/gpu": 1},
    VGPU_MANAGER.name: {"nvidia.com/vgpu-number": 1},
}

_BESIDES: Mapping[str, Mapping[str, str]] = {
    GPU_MANAGER.name: {"tencent.com/predicate-gpu-idx-0": "3"},
    NVIDIA_VCUDA.name: {"nvidia.com/predicate-gpu-idx-0": "3"},
    HAMI.name: {
        "hami.io/vgpu-devices-to-allocate": "GPU-1,NVIDIA,1000,30:;",
        "hami.io/vgpu-devices-allocated": "GPU-1,NVIDIA,1000,30:;",
    },
    VGPU_MANAGER.name: {"nvidia.com/pre-allocated": "main[GPU-1_30_1000]", "nvidia.com/real-allocated": ""},
}

_FIRST_PHASE = {GPU_MANAGER.name: "false", NVIDIA_VCUDA.name: "false"}
"""gpu-admission writes its mark at once; the others only begin with binding."""


def unix(scheme: Scheme, at: float) -> str:
    return str(int(at) * scheme.time_unit) if scheme.time_unit != SECONDS else str(int(at))


def rfc3339(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def marks(
    scheme: Scheme, at: float, *, node: str | None = NODE, phase: str | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """The annotations and labels of an allocation at ``at`` (Unix seconds), in a phase of `schemes.Phase`."""
    annotations = {**_BESIDES[scheme.name], **{key: unix(scheme, at) for key in scheme.predicate_times}}
    if node is not None:
        annotations[str(scheme.predicate_node)] = node
    labels: dict[str, str] = {}
    assert scheme.phase
    told = getattr(scheme.phase, phase) if phase else _FIRST_PHASE.get(scheme.name)
    if told is not None:
        (labels if scheme.phase.key in scheme.allocation_labels else annotations)[scheme.phase.key] = told
    return annotations, labels


def allocated_pod(scheme: Scheme, at: float, *, created: float | None = None, **fields: Any) -> Manifest:
    """A stored pod allocated at ``at``, and created ``created``, or just then.

    ``fields``: ``node`` and ``phase`` as in ``marks``; ``status`` is the pod's phase, ``bound`` the node that it is
    bound to, ``annotations`` and ``labels`` are its owner's own; all others are of its metadata.
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
    spec = {"nodeName": bound} if bound else {}
    return {**vcuda_pod(ASKED[scheme.name], metadata=metadata, **spec), "status": {"phase": status}}
