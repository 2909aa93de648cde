"""What the usage page is made of: plain values, and the one place where each comes in.

The page knows nothing of watches and loops. Whatever has something to show plugs a callable into `Source`. A callable
is called by one thread at a time, at most once a second, and only while somebody looks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from controller.ui.model import HolderRow, NamespaceRow, rounded, row_of
from controller.ui.page import Views
from vcuda.ledger.report import NamespaceUse


class ModelCards(msgspec.Struct, frozen=True):
    """One model in the whole cluster, in cards.

    ``cards`` is what the nodes have, None where they do not say. ``used`` is charged to pods and claims, limited or
    not, those not yet placed too. ``promised`` is the sum of the limits. ``fragmented`` is free, but in parts of cards
    that no pod that wants whole cards can have; None where that is not known.
    """

    model: str
    cards: float | None
    used: float
    promised: float
    fragmented: float | None = None

    @property
    def free(self) -> float | None:
        """Cards that nobody is charged for, never below 0; None where it is not known how many there are."""
        return None if self.cards is None else max(self.cards - self.used, 0.0)


class RefusedWorkload(msgspec.Struct, frozen=True):
    """A workload whose pods were refused: the newest reason, when (RFC 3339), and how often so far."""

    namespace: str
    kind: str
    name: str
    message: str
    at: str
    count: int = 1


class RemovedAllocation(msgspec.Struct, frozen=True):
    """Something stale that was removed from an object (``what`` is its kind), why it was stale, and when (RFC 3339)."""

    namespace: str
    name: str
    what: str
    why: str
    at: str


T = TypeVar("T", RefusedWorkload, RemovedAllocation)


class Certificate(msgspec.Struct, frozen=True):
    """A certificate of this system and when it ends (RFC 3339); ``problem`` is what is wrong with it, or empty."""

    name: str
    not_after: str
    problem: str = ""


class Finding(msgspec.Struct, frozen=True):
    """A pod or claim that is there although the quota does not allow it, what is wrong, and since when (RFC 3339)."""

    namespace: str
    kind: str
    name: str
    message: str
    at: str


class Source(msgspec.Struct, frozen=True):
    """Where each part of the page comes from. A callable that returns None says: not known, or not known yet.

    ``uses`` holds the report of every limited namespace; ``pods`` are a namespace's pods and claims, limited or not;
    ``cluster`` has one entry a model. ``refusals`` and ``removals`` come newest first. A part that nothing is plugged
    into (removals, certificates, findings) is not on the page.
    """

    uses: Callable[[], Mapping[str, NamespaceUse]]
    pods: Callable[[str], Sequence[HolderRow]]
    cluster: Callable[[], Sequence[ModelCards]]
    refusals: Callable[[], Sequence[RefusedWorkload] | None] = lambda: None
    removals: Callable[[], Sequence[RemovedAllocation] | None] = lambda: None
    certificates: Callable[[], Sequence[Certificate] | None] = lambda: None
    findings: Callable[[], Sequence[Finding] | None] = lambda: None


PARTS = ("summary", "cluster", "free", "refusals", "removals", "certificates", "findings")
"""The parts of the overview that are replaced whole, each with a template of its own."""

MAX_LISTED = 50
"""Entries of a list on the page: the newest."""


class Line(msgspec.Struct, frozen=True):
    """A namespace's row, and as HTML."""

    row: NamespaceRow
    html: str


class Picture(msgspec.Struct, frozen=True):
    """Everything but the pods, which are looked up for the one namespace that is looked at."""

    version: str
    uses: Mapping[str, NamespaceUse]
    columns: tuple[str, ...]
    lines: Mapping[str, Line]
    cluster: Sequence[ModelCards]
    refusals: Sequence[RefusedWorkload] | None
    removals: Sequence[RemovedAllocation] | None
    certificates: Sequence[Certificate] | None
    findings: Sequence[Finding] | None

    @property
    def by_model(self) -> Mapping[str, ModelCards]:
        """The models of the cluster by name."""
        return {each.model: each for each in self.cluster}

    @property
    def total(self) -> ModelCards:
        """The whole cluster over all models that the nodes say the number of."""
        known = [model for model in self.cluster if model.cards is not None]
        cards = rounded(model.cards or 0 for model in known) if known else None
        used = rounded(model.used for model in known or self.cluster)
        return ModelCards("", cards, used, rounded(model.promised for model in self.cluster))


class Change(msgspec.Struct, frozen=True):
    """What a browser has to replace: rows and parts as HTML, by name; ``touched`` namespaces have other pods.

    ``version`` is that of the picture afterwards. ``refused`` names those that were refused since.
    """

    version: str
    rows: dict[str, str]
    parts: dict[str, str]
    touched: tuple[str, ...]
    refused: tuple[str, ...]


def take(source: Source, views: Views, before: Picture | None, version: str) -> Picture:
    """Ask every source once. Rows that are as they were before are not rendered again."""
    uses = source.uses()
    cluster = tuple(source.cluster())
    # Every model that some namespace may use, or that some node has: one without a node still has its quota.
    models = {model.model for use in uses.values() for model in use.models} | {model.model for model in cluster}
    columns = tuple(sorted(models, key=lambda model: (model.casefold(), model)))
    lines = {name: _line(use, columns, views, before) for name, use in uses.items()}
    lists = (source.refusals(), source.removals(), source.certificates(), source.findings())
    return Picture(version, uses, columns, lines, cluster, *lists)


def _line(use: NamespaceUse, columns: tuple[str, ...], views: Views, before: Picture | None) -> Line:
    row = row_of(use)
    # Rendering is most of what a picture costs; and a change names the lines that are not the very same.
    known = before.lines.get(use.namespace) if before and before.columns == columns else None
    if known and known.row == row:
        return known
    return Line(row, views.row(row, columns))


def same(before: Picture, after: Picture) -> bool:
    """Return whether two pictures show the same."""
    return (before.columns, before.uses) == (after.columns, after.uses) and not _other_parts(before, after)


def has_other_rows(before: Picture, after: Picture) -> bool:
    """Return whether a column or a namespace has come or gone: then the whole table is another."""
    return before.columns != after.columns or before.lines.keys() != after.lines.keys()


def change_of(before: Picture, after: Picture, views: Views) -> Change:
    """Return what to replace, where neither a column nor a namespace has come or gone."""
    lines = {name: line for name, line in after.lines.items() if before.lines[name] is not line}
    # The use of a namespace holds its pods, so its own page is told though its row is the same.
    touched = [name for name, use in after.uses.items() if before.uses[name] != use]
    refused = {each.namespace for each in after.refusals or () if each not in (before.refusals or ())}
    rows = {name: line.html for name, line in lines.items()}
    parts = {part: render_part(part, after, views, root="") for part in _other_parts(before, after)}
    return Change(after.version, rows, parts, tuple(touched), tuple(sorted(refused)))


def render_part(part: str, picture: Picture, views: Views, root: str) -> str:
    """Return one part as HTML; ``root`` is the way from the page's address to the overview's."""
    given = {"refusals": choose(picture.refusals or ()), "removals": choose(picture.removals or ())}
    return views.render(f"_{part}.html", picture=picture, full=full(picture), most=MAX_LISTED, listed=given, root=root)


def choose(told: Sequence[T], most: int = MAX_LISTED) -> Sequence[T]:
    """Return so many of what is told, newest first: the newest of each namespace before a second one of any."""
    # By age alone a tenant who writes Events all the time would have the page to himself.
    earlier: dict[str, int] = {}
    ranks = []
    for each in told:
        rank = earlier.setdefault(each.namespace, 0)
        ranks.append(rank)
        earlier[each.namespace] = rank + 1
    chosen = sorted(range(len(told)), key=ranks.__getitem__)[:most]
    return [told[index] for index in sorted(chosen)]


def _other_parts(before: Picture, after: Picture) -> list[str]:
    return [part for part in PARTS if _shown(part, before) != _shown(part, after)]


def _shown(part: str, picture: Picture) -> object:
    # What a part is made of. Ages are not in it: the browser lets them grow by itself.
    match part:
        case "summary":
            return picture.cluster, len(picture.lines), full(picture)
        case "free":
            return picture.cluster
    return getattr(picture, part)


def full(picture: Picture) -> list[str]:
    """Return the namespaces that have used up a model."""
    amounts = {name: line.row.amounts.values() for name, line in picture.lines.items()}
    return sorted(name for name, each in amounts.items() if any(one.used and one.fullness >= 1 for one in each))
