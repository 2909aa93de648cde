"""Example nodes with the labels, annotations and resources that report their GPUs, and a function to find their model.

Device plugins and GPU feature discovery write these fields of a node. DRA drivers publish ResourceSlices instead.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from vcuda.claims.devices import read_slice
from vcuda.claims.objects import ResourceSlice
from vcuda.discovery.discovered import Found, find_model
from vcuda.discovery.sources import published_cards
from vcuda.k8s_types import Node
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.device_plugins import DISCOVERED, read_facts
from vcuda.placement.registers import read_registers
from vcuda.requests import card_models
from vcuda.requests.resources import BUILT_IN, NO_ROWS, CardModels, GpuResources
from vcuda.requests.schemes import HAMI, SCHEMES, VGPU_MANAGER, Scheme

Manifest = dict[str, Any]

MODEL = NodeLabels().model
NAME = "gpu-1"
A100, T4 = "NVIDIA A100-SXM4-40GB", "Tesla T4"
A100_PRODUCT, T4_PRODUCT = "NVIDIA-A100-SXM4-40GB", "NVIDIA-Tesla-T4"
REPORTED, REQUESTING, DELETED = "Reported 2026-01-02 15:04:05", "Requesting_2026-01-02 15:04:05", "Deleted_2026-01-02"


def node(
    *parts: Mapping[str, Mapping[str, str]], labels: Mapping[str, str] | None = None, name: str = NAME
) -> Manifest:
    """Return a node with all labels, annotations and allocatable resources of these ``parts``.

    Each part has the fields that one program writes, for example a device plugin.
    """
    found: dict[str, dict[str, str]] = {"labels": dict(labels or {}), "annotations": {}, "allocatable": {}}
    for part in parts:
        for key, values in part.items():
            found[key] |= values
    metadata = {"name": name, "uid": f"uid-of-{name}", "labels": found["labels"], "annotations": found["annotations"]}
    return {"metadata": metadata, "status": {"allocatable": found["allocatable"]}}


def hami(
    *types: str, handshake: str = REPORTED, offered: str | None = "10", memory: int = 40960, count: int = 10
) -> Manifest:
    """Return the node fields that HAMi's device plugin writes for cards of these types.

    ``offered``: the allocatable amount of nvidia.com/gpu. ``count``: the devices into which HAMi divides each card.
    """
    cards = [{"id": f"GPU-{i}", "count": count, "devmem": memory, "type": kind} for i, kind in enumerate(types)]
    return _registered(HAMI, json.dumps(cards), offered, {"hami.io/node-handshake": handshake} if handshake else {})


def vgpu_manager(*types: str, offered: str | None = "10") -> Manifest:
    """Return the node fields that vgpu-manager's device plugin writes for cards of these types."""
    cards = [{"id": i, "uuid": f"GPU-{i}", "memory": 16384, "type": kind} for i, kind in enumerate(types)]
    return _registered(VGPU_MANAGER, json.dumps(cards), offered, {})


def _registered(scheme: Scheme, text: str, offered: str | None, annotations: Mapping[str, str]) -> Manifest:
    allocatable = {} if offered is None else {scheme.main_resource: offered}
    return {"annotations": {str(scheme.register): text, **annotations}, "allocatable": allocatable}


def features(product: str, count: str = "1", memory: str = "15360", offered: str = "1") -> Manifest:
    """Return the node fields that GPU feature discovery and NVIDIA's device plugin write."""
    labels = {"product": product, "count": count, "memory": memory}
    return {
        "labels": {f"nvidia.com/gpu.{key}": value for key, value in labels.items()},
        "allocatable": {"nvidia.com/gpu": offered},
    }


def labelled(model: str, *, by: str = "") -> Manifest:
    """Return a node's GPU model label. ``by``: where the controller found the model; empty if a user set the label."""
    return {"labels": {MODEL: model}, "annotations": {DISCOVERED: f"{model} from {by}"} if by else {}}


def rows(text: str) -> CardModels:
    """Return the parsed value of ``gpu_models``, a key of the quota ConfigMap."""
    return card_models.parse_models(text) if text else NO_ROWS


def known_by(text: str = "", schemes: tuple[Scheme, ...] = SCHEMES) -> GpuResources:
    """Return the built-in GPU resources. ``text``: GPU models, in the format of gpu_models in the quota ConfigMap."""
    return msgspec.structs.replace(BUILT_IN, models=rows(text), schemes=schemes)


def found_on(manifest: Manifest, slices: Iterable[ResourceSlice] = (), known: GpuResources = BUILT_IN) -> Found:
    """Return the GPU model that the controller finds for this node, with its source."""
    read = msgspec.convert(manifest, Node)
    registers = read_registers(read.annotations, lambda *_: None)
    published = published_cards(map(read_slice, slices)).get(read.metadata.name, {})
    facts = read_facts(read, known, registers)
    return find_model(read.labels, MODEL, registers, facts, published=published, known=known)
