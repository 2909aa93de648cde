"""The data of the usage page, and the functions from which the page reads its data.

The page does not use the controller's watches and loops directly. `Source` has one function for each part of the page.
These functions are called by one thread at a time, at most once a second, and only while a browser shows the page.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from controller.refusals import ReportedObject
from controller.ui.model import HolderRow, NamespaceRow, rounded, row_of
from controller.ui.page import Views
from vcuda.ledger.report import NamespaceUse


class ModelCards(msgspec.Struct, frozen=True):
    """The cards of one GPU model in the whole cluster.

    ``cards``: the number of cards of all nodes; None if a node does not report its number.
    ``used``: the charged cards. Pods and claims that are not placed yet count only if their quota is enforced.
    ``promised``: the sum of all namespaces' limits.
    ``fragmented``: the free parts of partly used cards, which pods for whole cards cannot use; None if unknown.
    """

    model: str
    cards: float | None
    used: float
    promised: float
    fragmented: float | None = None

    @property
    def free(self) -> float | None:
        """The number of cards that are not used, at least 0; None if the number of cards is unknown."""
        return None if self.cards is None else max(self.cards - self.used, 0.0)


class Certificate(msgspec.Struct, frozen=True):
    """A certificate of the webhook. ``not_after``: its end (RFC 3339). ``problem``: why it is unreadable, or empty."""

    name: str
    not_after: str
    problem: str = ""


class Source(msgspec.Struct, frozen=True):
    """The functions that return the data of each part of the usage page.

    ``uses``: returns the usage report of every limited namespace, by the namespace's name.
    ``pods``: returns the pods and claims of a namespace that are charged for GPUs.
    ``cluster``: returns the cards of each GPU model in the cluster.
    ``refusals``: returns the refused workloads, newest first; None if they are not known yet.
    ``removals``, ``certificates``: return the entries of a list; None if the page must not show the list.
    ``findings``: returns the stored pods and claims that the quota would not admit now, each with the time when this
    was first found; None if the page must not show the list.
    """

    uses: Callable[[], Mapping[str, NamespaceUse]]
    pods: Callable[[str], Sequence[HolderRow]]
    cluster: Callable[[], Sequence[ModelCards]]
    refusals: Callable[[], Sequence[ReportedObject] | None] = lambda: None
    removals: Callable[[], Sequence[ReportedObject] | None] = lambda: None
    certificates: Callable[[], Sequence[Certificate] | None] = lambda: None
    findings: Callable[[], Sequence[ReportedObject] | None] = lambda: None


PARTS = ("summary", "cluster", "free", "refusals", "removals", "certificates", "findings")
"""The parts of the overview that browsers replace as a whole when their data change. Each part has its own template."""

MAX_LISTED = 50
"""The most entries in each list on the page, for example in the list of refusals."""


class Line(msgspec.Struct, frozen=True):
    """The table row of a namespace, as data and as HTML."""

    row: NamespaceRow
    html: str


class Picture(msgspec.Struct, frozen=True):
    """A copy of the usage page's data at one time. It has no rows of pods, which are read for one namespace at a time.

    ``updated``: the time when the data was read last (RFC 3339).
    ``version``: a text that changes only when the data changes.
    """

    version: str
    updated: str
    uses: Mapping[str, NamespaceUse]
    columns: tuple[str, ...]
    lines: Mapping[str, Line]
    cluster: Sequence[ModelCards]
    refusals: Sequence[ReportedObject] | None
    removals: Sequence[ReportedObject] | None
    certificates: Sequence[Certificate] | None
    findings: Sequence[ReportedObject] | None

    @property
    def unregistered(self) -> Sequence[str]:
        """The texts about webhooks and policies that the API server lacks. All reports have the same text."""
        return [*dict.fromkeys(use.unregistered for use in self.uses.values() if use.unregistered)]

    @property
    def by_model(self) -> Mapping[str, ModelCards]:
        return {each.model: each for each in self.cluster}

    @property
    def counted(self) -> Sequence[ModelCards]:
        """The GPU models that `total` adds up: those with a known number of cards, or all if no number is known."""
        return [model for model in self.cluster if model.cards is not None] or self.cluster

    @property
    def total(self) -> ModelCards:
        """The sums of cards and usage over `counted`, and of all limits. The cards may differ in speed and memory."""
        known = [model.cards for model in self.counted if model.cards is not None]
        used = rounded(model.used for model in self.counted)
        promised = rounded(model.promised for model in self.cluster)
        return ModelCards("", rounded(known) if known else None, used, promised)


class Change(msgspec.Struct, frozen=True):
    """The changes from one picture (copy of the page's data) to the next, as they are sent to browsers.

    ``version``, ``updated``: the version and the time of the new picture.
    ``rows``: the changed table rows as HTML, by namespace.
    ``parts``: the changed parts of the page as HTML, by name.
    ``touched``: the namespaces whose pods or usage have changed.
    ``refused``: the namespaces with new refusals.
    """

    version: str
    updated: str
    rows: dict[str, str]
    parts: dict[str, str]
    touched: tuple[str, ...]
    refused: tuple[str, ...]


def take(source: Source, views: Views, before: Picture | None, version: str) -> Picture:
    """Return a new picture (copy of the page's data). The HTML of unchanged rows is taken from picture ``before``."""
    uses = source.uses()
    cluster = tuple(source.cluster())
    models = {model.model for use in uses.values() for model in use.models} | {model.model for model in cluster}
    columns = tuple(sorted(models, key=lambda model: (model.casefold(), model)))
    lines = {name: _line(use, columns, views, before) for name, use in uses.items()}
    lists = (source.refusals(), source.removals(), source.certificates(), source.findings())
    return Picture(version, views.now(), uses, columns, lines, cluster, *lists)


def _line(use: NamespaceUse, columns: tuple[str, ...], views: Views, before: Picture | None) -> Line:
    row = row_of(use)
    # An unchanged row keeps its `Line`. Rendering is expensive, and `change_of` compares `Line` objects by identity.
    known = before.lines.get(use.namespace) if before and before.columns == columns else None
    if known and known.row == row:
        return known
    return Line(row, views.row(row, columns))


def same(before: Picture, after: Picture) -> bool:
    return (before.columns, before.uses) == (after.columns, after.uses) and not _other_parts(before, after)


def has_other_rows(before: Picture, after: Picture) -> bool:
    """Return True if a column or a namespace was added or removed, so that the whole table must be replaced."""
    return before.columns != after.columns or before.lines.keys() != after.lines.keys()


def change_of(before: Picture, after: Picture, views: Views) -> Change:
    """Return the changes between two pictures (copies of the page's data). `has_other_rows` must be False for them."""
    lines = {name: line for name, line in after.lines.items() if before.lines[name] is not line}
    # The page of a namespace also shows pods from its usage report. So any change of the report changes that page, even
    # if the row of the namespace in the overview stays the same.
    touched = [name for name, use in after.uses.items() if before.uses[name] != use]
    refused = {each.namespace for each in after.refusals or () if each not in (before.refusals or ())}
    rows = {name: line.html for name, line in lines.items()}
    parts = {part: render_part(part, after, views, root="") for part in _other_parts(before, after)}
    return Change(after.version, after.updated, rows, parts, tuple(touched), tuple(sorted(refused)))


def render_part(part: str, picture: Picture, views: Views, root: str) -> str:
    """Return one part of the overview as HTML. ``root``: the relative URL of the overview, for links in the part."""
    given = {"refusals": choose(picture.refusals or ()), "removals": choose(picture.removals or ())}
    return views.render(f"_{part}.html", picture=picture, full=full(picture), most=MAX_LISTED, listed=given, root=root)


def choose(entries: Sequence[ReportedObject], most: int = MAX_LISTED) -> Sequence[ReportedObject]:
    """Return at most ``most`` entries, newest first. The newest entry of each namespace has precedence."""
    # If only the age of the entries mattered, one tenant could fill the whole list by writing many Events.
    earlier: dict[str, int] = {}
    ranks = []
    for each in entries:
        rank = earlier.setdefault(each.namespace, 0)
        ranks.append(rank)
        earlier[each.namespace] = rank + 1
    chosen = sorted(range(len(entries)), key=ranks.__getitem__)[:most]
    return [entries[index] for index in sorted(chosen)]


def _other_parts(before: Picture, after: Picture) -> list[str]:
    return [part for part in PARTS if _shown(part, before) != _shown(part, after)]


def _shown(part: str, picture: Picture) -> object:
    # A part is rendered again if this data changes. The data has no ages, because the browser itself updates ages.
    match part:
        case "summary":
            return picture.cluster, len(picture.lines), full(picture), picture.unregistered
        case "free":
            return picture.cluster
    return getattr(picture, part)


def full(picture: Picture) -> list[str]:
    """Return the namespaces that have used up the limit of at least one GPU model."""
    amounts = {name: line.row.amounts.values() for name, line in picture.lines.items()}
    return sorted(name for name, each in amounts.items() if any(one.used and one.fullness >= 1 for one in each))
