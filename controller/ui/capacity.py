"""How many cards of which model the nodes have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from vcuda.charge import CORES_PER_CARD
from vcuda.kube import Kube, Reflector
from vcuda.objects import Node, Quantity
from vcuda.placement import NodeLabels
from vcuda.quantities import parse_whole
from vcuda.schemes import HAMI, SCHEMES

HAMI_DEVICES = "hami.io/node-nvidia-register"
"""Annotation in which HAMi's device plugin lists a node's cards (HAMi ``docs/develop/protocol.md``)."""

MOST_DEVICES = 1024
"""Cards that one node may claim; more is a mistake."""


class ModelNode(msgspec.Struct, frozen=True):
    """The model of a node, and its cards; None where it does not say how many."""

    model: str
    cards: float | None


_NODE = msgspec.json.Decoder(Node)


def read_node(raw: bytes, model_label: str) -> ModelNode | None:
    """Return what a node offers, or None where it has no model."""
    node = _NODE.decode(raw)
    model = node.labels.get(model_label)
    if not model:
        return None
    offered = (node.status and node.status.allocatable) or {}
    return ModelNode(model, cards_of(offered, node.annotations.get(HAMI_DEVICES)))


def cards_of(offered: Mapping[str, Quantity], hami_devices: str | None = None) -> float | None:
    """Return the cards that a node offers, by its allocatable resources; None where they do not tell.

    A scheme that offers cores offers 100 a card. ``nvidia.com/gpu`` counts cards where NVIDIA's own plugin runs. Under
    HAMi it counts the parts that cards can be split into, so there its own list of devices counts.
    """
    for scheme in SCHEMES:
        cores = _whole(offered.get(scheme.cores))
        if cores:
            return cores / CORES_PER_CARD
    if hami_devices is not None:
        return _listed(hami_devices)
    return _whole(offered.get(HAMI.count or ""))


def total_cards(nodes: Iterable[ModelNode]) -> Mapping[str, float | None]:
    """Return the cards of each model; None where a node of it does not say how many it has."""
    found: dict[str, list[float | None]] = {}
    for node in nodes:
        found.setdefault(node.model, []).append(node.cards)
    return {
        model: None if None in counts else math.fsum(count for count in counts if count)
        for model, counts in found.items()
    }


def _whole(quantity: Quantity | None) -> int | None:
    if quantity is None:
        return None
    try:
        count = parse_whole(quantity)
    except ValueError:
        return None
    return count if count <= MOST_DEVICES * CORES_PER_CARD else None


def _listed(devices: str) -> int | None:
    """Count the entries of HAMi's list: separated by colons up to 2.4, a JSON list since."""
    if not devices.lstrip().startswith("["):
        return sum(bool(entry.strip()) for entry in devices.split(":"))
    try:
        return len(msgspec.json.decode(devices, type=list[msgspec.Raw]))
    except msgspec.MsgspecError:
        return None


class CapacityWatch:
    """Follows the nodes for the cards that they offer."""

    def __init__(self, kube: Kube, labels: NodeLabels) -> None:
        self.reflector = Reflector(kube, "/api/v1/nodes", lambda raw: read_node(raw, labels.model))

    def totals(self) -> Mapping[str, float | None]:
        """Return the cards of each model as last seen; nothing until the nodes have been listed once."""
        return total_cards(self.reflector.snapshot().values())
