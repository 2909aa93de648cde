"""The figures of the page: how full something is, in which words, and in which of the heat's steps."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping

import msgspec

from vcuda.k8s_types import Node, Quantity, parse_whole
from vcuda.kube import Kube, Reflector
from vcuda.ledger.ledger import ModelUse, NamespaceUse
from vcuda.placement.affinity import NodeLabels
from vcuda.quota.model import CORES_PER_CARD
from vcuda.requests.schemes import HAMI, SCHEMES

FULL = 10
"""The step of what is used up: one step for each tenth, 0 for what is not used at all."""

OVER = 11
"""The step of what is over its limit: the limit was lowered, or only warns."""

_SPANS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class Amount(msgspec.Struct, frozen=True):
    """So many of a limit, pending included, in cards; memory in MiB, None where it is not limited."""

    used: float
    limit: float
    pending: float = 0.0
    memory_used: int | None = None
    memory_limit: int | None = None

    @property
    def fullness(self) -> float:
        """The share of the limit that is used, the larger of cores and memory; more than 1 is over it."""
        cores = _share(self.used, self.limit)
        return max(cores, _share(self.memory_used or 0, self.memory_limit)) if self.memory_limit else cores

    @property
    def step(self) -> int:
        """The step of the heat: 0 unused, 1 to 9 by tenths, FULL, OVER."""
        return step(self.fullness)

    @property
    def blocked(self) -> bool:
        """Whether the model is blocked, and nothing of it is used."""
        return not self.limit and not self.used


class Row(msgspec.Struct, frozen=True):
    """One namespace in the table: an amount for each model that it may use, or uses, and for all of them."""

    namespace: str
    mode: str
    total: Amount
    amounts: dict[str, Amount]
    unpinned: int = 0


def step(fullness: float) -> int:
    """Return the step of the heat for a share of a limit."""
    if fullness > 1:
        return OVER
    return max(int(fullness * FULL + 1e-9), 1) if fullness > 0 else 0


def row_of(use: NamespaceUse) -> Row:
    """Return a namespace's row."""
    amounts = {model.model: amount_of(model) for model in use.models}
    total = Amount(
        used=rounded(amount.used for amount in amounts.values()),
        limit=rounded(amount.limit for amount in amounts.values()),
        pending=rounded(amount.pending for amount in amounts.values()),
    )
    return Row(use.namespace, use.mode, total, amounts, len(use.unpinned))


def amount_of(model: ModelUse) -> Amount:
    """Return what a namespace has of one model."""
    return Amount(model.used, model.limit, model.pending, model.memory_used, model.memory_limit)


def rounded(cards: Iterable[float]) -> float:
    """Return a sum of cards, exact to hundredths of a card, which is what they are counted in."""
    return round(sum(cards) * CORES_PER_CARD) / CORES_PER_CARD


def number(cards: float) -> str:
    """Render a number of cards: 8, 2.5, 0.05."""
    return f"{cards:.2f}".rstrip("0").rstrip(".")


def plural(count: float, one: str, many: str) -> str:
    """Render a number with its noun."""
    return f"{number(count)} {one if count == 1 else many}"


def memory(mebibytes: int) -> str:
    """Render MiB in the unit that people would use."""
    if mebibytes < 1024:  # noqa: PLR2004  # MiB in a GiB
        return f"{mebibytes} MiB"
    return f"{mebibytes / 1024:.1f}".removesuffix(".0") + " GiB"


def moment(text: str) -> datetime.datetime | None:
    """Return an RFC 3339 time as the API server writes it, or None for what is none."""
    try:
        at = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return at if at.tzinfo else None


def span(seconds: float) -> str:
    """Render a time span in its largest unit: 3 d, 5 h, 12 min, 40 s."""
    whole = max(int(seconds), 0)
    for size, unit in _SPANS:
        if whole >= size:
            return f"{whole // size} {unit}"
    return "0 s"


def _share(used: float, limit: float | None) -> float:
    if limit:
        return used / limit
    return 2.0 if used else 0.0


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
