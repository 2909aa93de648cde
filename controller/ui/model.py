"""What the page's tables show: rows, how full they are, their order, the words for figures, and the cluster's cards."""

import datetime
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from urllib.parse import urlencode

import msgspec

from vcuda.k8s_types import Node, Quantity, parse_whole
from vcuda.kube import Kube, Reflector
from vcuda.ledger.report import ModelUse, NamespaceUse
from vcuda.placement.affinity import NodeLabels
from vcuda.quota.model import CORES_PER_CARD
from vcuda.requests.resources import NO_ROWS, PLAIN_CARDS, CardModels
from vcuda.requests.schemes import SCHEMES

FULL = 10
"""The step of what is used up."""

OVER = 11
"""The step of what is over its limit: the limit was lowered, or only warns."""


class ModelRow(ModelUse, frozen=True):
    """What a namespace uses of a model, or of all, without the pods; and how full that is."""

    @property
    def fullness(self) -> float:
        """The share of the limit that is used, the larger of cores and memory; more than 1 is over it."""
        cores = _share(self.used, self.limit)
        return max(cores, _share(self.memory_used or 0, self.memory_limit)) if self.memory_limit else cores

    @property
    def step(self) -> int:
        """The step on the scale of colours: 0 unused, 1 to 9 by tenths of the limit, `FULL`, `OVER`."""
        if self.fullness > 1:
            return OVER
        # The least use shows too; and floats make 6.99 of seven tenths.
        return max(int(self.fullness * FULL + 1e-9), 1) if self.fullness > 0 else 0

    @property
    def blocked(self) -> bool:
        """Whether the model is blocked, and nothing of it is used."""
        return not self.limit and not self.used


def _share(used: float, limit: float) -> float:
    if limit:
        return used / limit
    return 2.0 if used else 0.0  # any use of what is blocked is over the limit


class NamespaceRow(msgspec.Struct, frozen=True):
    """One namespace in the table: each model that it may use, or uses, and the sum of them all."""

    namespace: str
    mode: str
    total: ModelRow
    amounts: dict[str, ModelRow]
    unpinned: int = 0
    taking_effect: bool = False
    ledger_lost: bool = False


def row_of(use: NamespaceUse) -> NamespaceRow:
    """Return a namespace's row."""
    # Without its pods a row stays the same while they come and go at the same use, and is not rendered again.
    rows = {
        each.model: ModelRow(
            *(each.model, each.limit, each.used, each.pending, each.available, each.memory_limit, each.memory_used),
            terminating=each.terminating,
            reserved=each.reserved,
        )
        for each in use.models
    }
    limit = rounded(row.limit for row in rows.values())
    used = rounded(row.used for row in rows.values())
    pending = rounded(row.pending for row in rows.values())
    reserved = rounded(row.reserved for row in rows.values())
    total = ModelRow("", limit, used, pending, max(limit - used - reserved, 0.0), reserved=reserved)
    return NamespaceRow(use.namespace, use.mode, total, rows, len(use.unpinned), use.taking_effect, use.ledger_lost)


class HolderRow(msgspec.Struct, frozen=True):
    """A pod that holds cards, or a claim.

    ``cores`` are hundredths of a card, ``memory`` is in MiB. ``model`` is None where it is held to none and runs on
    none that is known; ``node`` is empty until it is bound, or a claim allocated; ``created`` is RFC 3339.
    """

    name: str
    model: str | None
    cores: int
    memory: int
    node: str
    created: str
    claim: bool = False

    @property
    def kind(self) -> str:
        """What it is, in a word."""
        return "claim" if self.claim else "pod"


def rounded(cards: Iterable[float]) -> float:
    """Return a sum of cards, exact to hundredths of a card."""
    # They are counted in hundredths; as floats three times 0.1 would be 0.30000000000000004.
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
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if whole >= size:
            return f"{whole // size} {unit}"
    return f"{whole} s"


NAME = "name"
TOTAL = "total"
MODEL = "model."
"""What the sort by a model begins with, so that no model's name means something else."""

MAX_SEARCH_LENGTH = 100
"""Characters of a search that count."""


class TableQuery(msgspec.Struct, frozen=True):
    """What is searched for, and what the rows are sorted by."""

    search: str = ""
    sort: str = NAME
    descending: bool = False

    def toggled(self, sort: str) -> "TableQuery":
        """Return the order that a click on a column's header asks for: fullest first, names from a to z, or turned."""
        turned = not self.descending if sort == self.sort else sort != NAME
        return TableQuery(self.search, sort, turned)

    def query(self) -> str:
        """Return the query of an address that asks for this order; empty for the default."""
        fields = {"q": self.search, "sort": self.sort, "order": "desc" if self.descending else ""}
        defaults = {"q": "", "sort": NAME, "order": ""}
        return urlencode({key: value for key, value in fields.items() if value != defaults[key]})

    def aria(self, sort: str) -> str:
        """Return the value of a column header's ``aria-sort``."""
        if sort != self.sort:
            return "none"
        return "descending" if self.descending else "ascending"


def read_table_query(query: Mapping[str, str], sorts: Iterable[str]) -> TableQuery:
    """Return the order of an address; what it asks for and does not exist counts as not asked for."""
    search, sort = query.get("q", "").strip()[:MAX_SEARCH_LENGTH], query.get("sort", NAME)
    # An address outlives what it names: the model may be gone since it was kept.
    return TableQuery(search, sort, query.get("order") == "desc") if sort in sorts else TableQuery(search)


def sorts_of(models: Iterable[str]) -> list[str]:
    """Return what the rows of namespaces can be sorted by."""
    return [NAME, TOTAL, *(MODEL + model for model in models)]


def matches(search: str, name: str) -> bool:
    """Return whether a name holds every word of a search, whatever their case."""
    return all(word in name.casefold() for word in search.casefold().split())


def ordered(rows: Iterable[NamespaceRow], order: TableQuery) -> list[NamespaceRow]:
    """Return the rows that are searched for, sorted. Those without the model that is sorted by always come last."""
    # By name first: sorting is stable, so rows that are as full stay in the order of their names.
    found = sorted((row for row in rows if matches(order.search, row.namespace)), key=lambda row: row.namespace)
    if order.sort == NAME:
        return found[::-1] if order.descending else found
    having = [(amount, row) for row in found if (amount := _amount(row, order.sort))]
    having.sort(key=lambda pair: (pair[0].fullness, pair[0].used), reverse=order.descending)
    return [row for _, row in having] + [row for row in found if not _amount(row, order.sort)]


def _amount(row: NamespaceRow, sort: str) -> ModelRow | None:
    return row.total if sort == TOTAL else row.amounts.get(sort.removeprefix(MODEL))


HOLDER_SORTS: Mapping[str, Callable[[HolderRow], str | int]] = {
    NAME: lambda holder: holder.name,
    "kind": lambda holder: holder.kind,
    "model": lambda holder: holder.model or "",
    "cards": lambda holder: holder.cores,
    "memory": lambda holder: holder.memory,
    "node": lambda holder: holder.node,
    "created": lambda holder: holder.created,
}
"""What a namespace's pods and claims can be sorted by."""


def ordered_holders(holders: Iterable[HolderRow], order: TableQuery) -> Sequence[HolderRow]:
    """Return the pods and claims that are searched for, sorted."""
    found = sorted((each for each in holders if matches(order.search, each.name)), key=lambda each: each.name)
    return sorted(found, key=HOLDER_SORTS[order.sort], reverse=order.descending)


MAX_DEVICES = 1024
"""Cards that one node may claim; more is a mistake."""


class ModelNode(msgspec.Struct, frozen=True):
    """What the label of a node says of its model, and its cards; None where it does not say how many.

    ``plain``: they are so many devices of NVIDIA's own plugin.
    """

    model: str
    cards: float | None
    plain: bool = False


_NODE = msgspec.json.Decoder(Node)
_REGISTERS = tuple(scheme.register for scheme in SCHEMES if scheme.register and scheme.counts_cards_by_register)


def read_node(raw: bytes, model_label: str) -> ModelNode | None:
    """Return what a node offers, or None where it has no model."""
    node = _NODE.decode(raw)
    model = node.labels.get(model_label)
    if not model:
        return None
    offered = (node.status and node.status.allocatable) or {}
    register = next((node.annotations[name] for name in _REGISTERS if name in node.annotations), None)
    plain = register is None and not any(_whole(offered.get(scheme.cores)) for scheme in SCHEMES)
    return ModelNode(model, cards_of(offered, register), plain=plain and PLAIN_CARDS in offered)


def cards_of(offered: Mapping[str, Quantity], register: str | None = None) -> float | None:
    """Return the cards that a node offers by its allocatable resources; None if they do not say.

    A scheme that offers cores offers 100 per card. ``nvidia.com/gpu`` counts cards if NVIDIA's own plugin runs. Under
    HAMi it counts the parts that cards can be split into, so that HAMi's ``register`` of the node is counted instead.
    """
    for scheme in SCHEMES:
        cores = _whole(offered.get(scheme.cores))
        # A plugin that was turned off leaves its resource at 0 (kubelet's device manager), beside another's.
        if cores:
            return cores / CORES_PER_CARD
    if register is not None:
        return _listed(register)
    return _whole(offered.get(PLAIN_CARDS))


def total_cards(nodes: Iterable[ModelNode], named: CardModels = NO_ROWS) -> Mapping[str, float | None]:
    """Return the cards of each model; None where a node of it does not say how many it has."""
    found: dict[str, list[float | None]] = {}
    for node in nodes:
        model = named.model_of(node.model)
        worth = named.cores.get(model, CORES_PER_CARD) if node.plain else CORES_PER_CARD
        found.setdefault(model, []).append(node.cards and node.cards * worth / CORES_PER_CARD)
    # A sum without a node that does not tell would be a wrong number.
    return {model: None if None in counts else math.fsum(filter(None, counts)) for model, counts in found.items()}


def _whole(quantity: Quantity | None) -> int | None:
    if quantity is None:
        return None
    try:
        count = parse_whole(quantity)
    except ValueError:
        return None
    return count if count <= MAX_DEVICES * CORES_PER_CARD else None


def _listed(devices: str) -> int | None:
    # HAMi separates the entries by colons up to 2.4, and writes a JSON list since.
    if not devices.lstrip().startswith("["):
        return sum(bool(entry.strip()) for entry in devices.split(":"))
    try:
        return len(msgspec.json.decode(devices, type=list[msgspec.Raw]))
    except msgspec.MsgspecError:
        return None


class CapacityInformer:
    """Follows the nodes for the cards that they offer."""

    def __init__(self, kube: Kube, labels: NodeLabels) -> None:
        self.reflector = Reflector(kube, "/api/v1/nodes", lambda raw: read_node(raw, labels.model))

    def totals(self, named: CardModels) -> Mapping[str, float | None]:
        """Return the cards of each model as last seen; nothing until the nodes have been listed once."""
        return total_cards(self.reflector.snapshot().values(), named)
