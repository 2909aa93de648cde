"""The rows of the usage page's tables and their order, the format of numbers, and the number of cards of each node."""

import datetime
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

import msgspec

from controller import refusals
from vcuda.k8s_types import UNDECODABLE, Decoder, Node, Quantity, parse_whole
from vcuda.ledger.report import ModelUse, NamespaceUse
from vcuda.quota.model import CORES_PER_CARD
from vcuda.requests.resources import NO_ROWS, PLAIN_CARDS, CardModels, CardWorth
from vcuda.requests.schemes import SCHEMES

FULL = 10
"""The step on the page's scale of colours for usage that has reached the limit."""

OVER = 11
"""The step on the page's scale of colours for usage above the limit, for example after the limit was lowered."""


@dataclass(frozen=True, slots=True)
class ModelRow(ModelUse):
    """A namespace's usage of one GPU model, or of all models together, without the list of pods."""

    @property
    def fullness(self) -> float:
        """The used part of the limit, where 1 is the whole limit. If memory is limited too, the larger part counts."""
        cores = 0.0 if self.limit is None else _share(self.used, self.limit)
        return max(cores, _share(self.memory_used or 0, self.memory_limit)) if self.memory_limit else cores

    @property
    def step(self) -> int:
        """The step on the scale of colours: 0 for no usage, 1 to 9 for tenths of the limit, then `FULL` and `OVER`."""
        if self.fullness > 1:
            return OVER
        # Any usage above 0 gets at least step 1 of the colours. The term 1e-9 corrects rounding errors (6.99 for 7).
        return max(int(self.fullness * FULL + 1e-9), 1) if self.fullness > 0 else 0

    @property
    def share(self) -> str:
        """The used part of the limit as text, for example ``94 %``. For a limit of 0, the text is ``over``."""
        # The percentage is rounded down, so that 100 % is shown only when the limit is reached.
        return f"{math.floor(self.fullness * 100 + 1e-9)} %" if self.limit or self.memory_limit else "over"

    @property
    def blocked(self) -> bool:
        """True if the limit is 0 and nothing is used, so that the namespace cannot use the model."""
        return self.limit == 0 and not self.used


def _share(used: float, limit: float) -> float:
    if limit:
        return used / limit
    return 2.0 if used else 0.0  # If the limit is 0, any usage is over the limit.


class NamespaceRow(msgspec.Struct, frozen=True):
    """The table row of a namespace, with its usage by GPU model. ``unpinned``: how many pods have no known model."""

    namespace: str
    mode: str
    total: ModelRow
    amounts: dict[str, ModelRow]
    unpinned: int = 0
    taking_effect: bool = False
    ledger_lost: bool = False
    unregistered: str = ""

    @property
    def fullest(self) -> ModelRow | None:
        return max(self.amounts.values(), key=lambda amount: (amount.fullness, amount.used), default=None)


def row_of(use: NamespaceUse) -> NamespaceRow:
    # The row lacks the namespace's pods, so that it is rendered again only if the usage of the namespace changes.
    rows = {
        each.model: ModelRow(
            *(each.model, each.limit, each.used, each.pending, each.available, each.memory_limit, each.memory_used),
            terminating=each.terminating,
            reserved=each.reserved,
            card_memory=each.card_memory,
            grants=each.grants,
        )
        for each in use.models
    }
    limits = [row.limit for row in rows.values() if row.limit is not None]
    limit = rounded(limits) if len(limits) == len(rows) else None
    used = rounded(row.used for row in rows.values())
    pending = rounded(row.pending for row in rows.values())
    reserved = rounded(row.reserved for row in rows.values())
    available = None if limit is None else max(limit - used - reserved, 0.0)
    total = ModelRow("", limit, used, pending, available, reserved=reserved)
    states = (use.taking_effect, use.ledger_lost, use.unregistered)
    return NamespaceRow(use.namespace, use.mode, total, rows, len(use.unpinned), *states)


class HolderRow(msgspec.Struct, frozen=True):
    """The table row of a pod or claim that is charged for cards.

    ``model``: the GPU model; None if no model is known for the pod or claim.
    ``cores``: the charge in hundredths of a card.
    ``memory``: the charge in MiB.
    ``node``: empty until the pod is bound or the claim is allocated.
    ``created``: the time of creation (RFC 3339).
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
        return "claim" if self.claim else "pod"


def rounded(cards: Iterable[float]) -> float:
    """Return the sum of several numbers of cards, rounded up to hundredths of a card."""
    # Subtract rounding errors first: the sum of three times 0.1 is 0.30000000000000004.
    return math.ceil(sum(cards) * CORES_PER_CARD - 1e-6) / CORES_PER_CARD


def number(cards: float) -> str:
    """Return a number of cards as text, for example 8, 2.5 or 0.05."""
    return f"{cards:.2f}".rstrip("0").rstrip(".")


def local(time: str) -> str:
    """Return a time in RFC 3339 without its seconds, in its own time zone, for example 2026-12-02 00:00+01:00."""
    return datetime.datetime.fromisoformat(time).isoformat(sep=" ", timespec="minutes")


def plural(count: float, one: str, many: str) -> str:
    return f"{number(count)} {one if count == 1 else many}"


def memory(mebibytes: int) -> str:
    if mebibytes < 1024:  # noqa: PLR2004  # A GiB has 1024 MiB.
        return f"{mebibytes} MiB"
    return f"{mebibytes / 1024:.1f}".removesuffix(".0") + " GiB"


def span(seconds: float) -> str:
    """Return a time span as text in its largest unit, for example 3 d, 5 h, 12 min or 40 s."""
    whole = max(int(seconds), 0)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if whole >= size:
            return f"{whole // size} {unit}"
    return f"{whole} s"


NAME = "name"
FULLEST = "fullest"
MODEL = "model."
"""The sort key of a GPU model's column begins with this text. So a model named ``fullest`` differs from `FULLEST`."""

TEXTS = (NAME, "kind", "model", "node")
"""The columns with text. A first click sorts them from a to z, and sorts other columns from the largest number."""

MAX_SEARCH_LENGTH = 100
"""The maximum length of a search text. Further characters are ignored."""


class TableQuery(msgspec.Struct, frozen=True):
    """The search text and the order of a table on the page."""

    search: str = ""
    sort: str = NAME
    descending: bool = False

    def toggled(self, sort: str) -> "TableQuery":
        """Return the table query after a click on the header of column ``sort``. A second click reverses the order."""
        turned = not self.descending if sort == self.sort else sort not in TEXTS
        return TableQuery(self.search, sort, turned)

    def query(self) -> str:
        fields = {"q": self.search, "sort": self.sort, "order": "desc" if self.descending else ""}
        defaults = {"q": "", "sort": NAME, "order": ""}
        return urlencode({key: value for key, value in fields.items() if value != defaults[key]})

    def aria(self, sort: str) -> str:
        if sort != self.sort:
            return "none"
        return "descending" if self.descending else "ascending"


def read_table_query(query: Mapping[str, str], sorts: Iterable[str]) -> TableQuery:
    """Return the search text and the order in a URL's query string. An order by an unknown column is ignored."""
    search, sort = query.get("q", "").strip()[:MAX_SEARCH_LENGTH], query.get("sort", NAME)
    # A bookmarked URL may request the order by a GPU model that no longer exists.
    return TableQuery(search, sort, query.get("order") == "desc") if sort in sorts else TableQuery(search)


def sorts_of(models: Iterable[str]) -> list[str]:
    return [NAME, FULLEST, *(MODEL + model for model in models)]


def matches(search: str, name: str) -> bool:
    return all(word in name.casefold() for word in search.casefold().split())


def ordered(rows: Iterable[NamespaceRow], order: TableQuery) -> list[NamespaceRow]:
    """Return the namespaces' table rows that match the search text, in order.

    The rows are sorted by name, by the used cards of one model, or by the limit that is used up the most. If they are
    sorted by a model, rows without this model come last.
    """
    # The rows are sorted by name first. The later sort by a number is stable, so rows with equal numbers stay in the
    # order of their names.
    found = sorted((row for row in rows if matches(order.search, row.namespace)), key=lambda row: row.namespace)
    if order.sort == NAME:
        return found[::-1] if order.descending else found
    having = [(amount, row) for row in found if (amount := _amount(row, order.sort))]
    having.sort(key=lambda pair: _figures(pair[0], order.sort), reverse=order.descending)
    return [row for _, row in having] + [row for row in found if not _amount(row, order.sort)]


def _amount(row: NamespaceRow, sort: str) -> ModelRow | None:
    return row.fullest if sort == FULLEST else row.amounts.get(sort.removeprefix(MODEL))


def _figures(amount: ModelRow, sort: str) -> tuple[float, float]:
    # Column `FULLEST` is sorted by the used part of the limit, and a model's column by the used cards. Equal rows are
    # then sorted by the other number.
    return (amount.fullness, amount.used) if sort == FULLEST else (amount.used, amount.fullness)


def _age(holder: HolderRow) -> float:
    at = refusals.moment(holder.created)
    return -at.timestamp() if at else -math.inf


HOLDER_SORTS: Mapping[str, Callable[[HolderRow], str | float]] = {
    NAME: lambda holder: holder.name,
    "kind": lambda holder: holder.kind,
    "model": lambda holder: holder.model or "",
    "cards": lambda holder: holder.cores,
    "memory": lambda holder: holder.memory,
    "node": lambda holder: holder.node,
    "age": _age,
}
"""The columns by which the table of pods and claims can be sorted, each with a function that returns its sort key."""


def ordered_holders(holders: Iterable[HolderRow], order: TableQuery) -> Sequence[HolderRow]:
    found = sorted((each for each in holders if matches(order.search, each.name)), key=lambda each: each.name)
    return sorted(found, key=HOLDER_SORTS[order.sort], reverse=order.descending)


MAX_DEVICES = 1024
"""The maximum number of cards of one node. A larger number must be a mistake, and is ignored."""


class ModelNode(msgspec.Struct, frozen=True):
    """The GPU model of a node, and the number of its cards.

    ``model``: the value of the node's model label.
    ``cards``: the number of cards; None if the node does not report the number.
    ``plain``: True if NVIDIA's own device plugin runs on the node.
    """

    model: str
    cards: float | None
    plain: bool = False


_NODE = Decoder(Node)
_REGISTERS = tuple(scheme.register for scheme in SCHEMES if scheme.register and scheme.counts_cards_by_register)


def read_node(raw: bytes, model_label: str) -> ModelNode | None:
    """Return the GPU model and the number of cards of a node in JSON; None if the node has no model label."""
    node = _NODE.decode(raw)
    model = node.labels.get(model_label)
    if not model:
        return None
    offered = (node.status and node.status.allocatable) or {}
    register = next((node.annotations[name] for name in _REGISTERS if name in node.annotations), None)
    plain = register is None and not any(_whole(offered.get(scheme.cores)) for scheme in SCHEMES)
    return ModelNode(model, cards_of(offered, register), plain=plain and PLAIN_CARDS in offered)


def cards_of(offered: Mapping[str, Quantity], register: str | None = None) -> float | None:
    """Return the number of a node's cards; None if neither allocatable resources nor ``register`` show it.

    If the node has a resource of cores, 100 cores are a card. With NVIDIA's own plugin, ``nvidia.com/gpu`` is the
    number of cards. With HAMi, the same resource is the number of shares, so the cards in ``register`` (HAMi's node
    annotation that lists the cards) are counted.
    """
    for scheme in SCHEMES:
        cores = _whole(offered.get(scheme.cores))
        # A resource with the value 0 is ignored. kubelet keeps such a resource after the end of its device plugin.
        if cores:
            return cores / CORES_PER_CARD
    if register is not None:
        return _listed(register)
    return _whole(offered.get(PLAIN_CARDS))


def total_cards(nodes: Iterable[ModelNode], named: CardModels = NO_ROWS) -> Mapping[str, float | None]:
    """Return the number of cards of each GPU model; None for a model if one of its nodes does not report a number."""
    found: dict[str, list[float | None]] = {}
    for node in nodes:
        model = named.model_of(node.model)
        cores = named.worths.get(model, CardWorth()).cores if node.plain else CORES_PER_CARD
        found.setdefault(model, []).append(node.cards and node.cards * cores / CORES_PER_CARD)
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
    # Up to version 2.4, HAMi separates the cards in its register (a node annotation) by colons. Later it writes JSON.
    if not devices.lstrip().startswith("["):
        return sum(bool(entry.strip()) for entry in devices.split(":"))
    try:
        return len(msgspec.json.decode(devices, type=list[msgspec.Raw]))
    except UNDECODABLE:
        return None
