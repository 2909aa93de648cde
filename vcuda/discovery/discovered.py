"""Compares the sources of one node's model, and decides about its model label.

The label is the operator's unless it has the value that the annotation `DISCOVERED` records. Pure.
"""

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from vcuda.discovery import sources
from vcuda.discovery.names import MAX_NAMES, model_of, normalise
from vcuda.discovery.sources import DriverCards, NodeFacts, SourceCards
from vcuda.placement.card_types import is_named
from vcuda.placement.registers import Registers
from vcuda.quota.values import listed
from vcuda.requests.resources import BUILT_IN, CardModels, GpuResources

_FROM = " from "
_DISPLAY = {
    sources.OPERATOR: "the label",
    sources.SLICES: "its ResourceSlices",
    sources.FEATURES: "GPU feature discovery",
}


class Doubt(enum.StrEnum):
    """Why the model of a node is in doubt."""

    DISAGREE = "sources-disagree"
    SEVERAL = "several-models"
    MIG_INVALID = "invalid-mig-strategy"
    MALFORMED = "malformed-register"
    NAMELESS = "no-product"
    HELD = "change-held"
    """Another model was found, and is not written while pods use the node or its source is lost."""


class Record(msgspec.Struct, frozen=True):
    """The model label that the controller wrote, and the source of the model."""

    model: str
    source: str

    @classmethod
    def read(cls, text: str) -> "Record | None":
        model, _, source = text.partition(_FROM)
        return cls(model, source) if model else None

    def __str__(self) -> str:
        return f"{self.model}{_FROM}{self.source}"

    @property
    def rank(self) -> int:
        """The position of the source among all sources. A record of an unknown source is the weakest."""
        return sources.SOURCES.index(self.source) if self.source in sources.SOURCES else len(sources.SOURCES)


class Found(msgspec.Struct, frozen=True):
    """The model of one node by its label and its sources."""

    label: str | None
    """The model label."""
    record: Record | None
    """The record of the label, unless the label is the operator's."""
    wanted: Record | None
    """The model by the strongest source; None if no source names one."""
    seen: tuple[SourceCards, ...] = ()
    """The cards by each source, the strongest first."""
    models: tuple[str, ...] = ()
    """The models of the cards by the strongest source, first the model with the most cards."""
    doubts: Mapping[Doubt, str] = {}
    """The doubts, with a message each."""

    @property
    def source(self) -> str:
        """The source of the label, or of the model that it would get; empty if there is neither."""
        if self.label is None:
            return self.wanted.source if self.wanted else ""
        return self.record.source if self.record else sources.OPERATOR

    def model(self, named: CardModels) -> str:
        """Return the model that counts; empty if there is none."""
        return named.model_of(self.label) if self.label else ""

    def is_missing(self) -> bool:
        return self.label is None and self.wanted is not None

    def differs(self, named: CardModels) -> bool:
        """Return whether our label is of another model than the strongest source says."""
        if self.record is None or self.wanted is None:
            return False
        return named.model_of(self.record.model) != named.model_of(self.wanted.model)

    @property
    def confirmed(self) -> Record | None:
        """The record of our label with a stronger source that says the same; None if there is no such source."""
        if self.record is None or self.wanted is None or self.wanted.rank >= self.record.rank:
            return None
        return Record(self.record.model, self.wanted.source)

    def why_held(self, *, in_use: bool) -> str:
        """Return why another found model is not written, for example while pods use the node; empty if it may be."""
        if self.record is None or self.wanted is None:
            return ""
        other = f"{display(self.wanted.source)} says {self.wanted.model}, and label {self.record.model} stays"
        if self.wanted.rank > self.record.rank:
            lost = f"{display(self.record.source)}, which the label is from, is lost"
            return f"{other}: {lost}; remove the label to have it written again"
        return f"{other} while pods use GPUs of the node; drain the node" if in_use else ""


def find_model(
    labels: Mapping[str, str],
    model_label: str,
    registers: Registers,
    facts: NodeFacts,
    *,
    published: Collection[DriverCards] = (),
    known: GpuResources = BUILT_IN,
) -> Found:
    """Return the model of a node with these labels, registers and published devices."""
    seen = tuple(sources.cards_by_source(labels, registers, facts, published, known.schemes))
    label, record, named = labels.get(model_label), Record.read(facts.record), known.models
    own = record if record and record.model == label else None
    models = _models_of(seen[0], named) if seen else {}
    # With as many cards the first by name, so that the choice does not depend on an order of writing.
    ranked = tuple(sorted(models, key=lambda model: (-models[model], model)))
    wanted = Record(ranked[0], seen[0].source) if ranked else None
    counts = label or (wanted.model if wanted and label is None else "")
    decided = f"model {counts} counts" if counts else "the node has no model"
    found = {
        **dict(_unreadable(facts, published, labels.get(sources.PRODUCT, ""))),
        **dict(_doubts(None if own else label, seen, models, named)),
    }
    return Found(label, own, wanted, seen, ranked, {doubt: f"{text}; {decided}" for doubt, text in found.items()})


def _models_of(source_cards: SourceCards, named: CardModels) -> dict[str, int]:
    found: dict[str, int] = {}
    for product, count in source_cards.cards.items():
        if model := model_of(product, named):
            found[model] = found.get(model, 0) + count
    return found


def _unreadable(facts: NodeFacts, published: Iterable[DriverCards], product: str) -> Iterator[tuple[Doubt, str]]:
    if facts.malformed:
        yield Doubt.MALFORMED, f"the register in annotation {listed(facts.malformed, MAX_NAMES)} cannot be read"
    nameless = [each.driver for each in published if not any(offer.product for offer, _ in each.offers)]
    if nameless:
        yield Doubt.NAMELESS, f"the ResourceSlices of driver {listed(nameless, MAX_NAMES)} name no product"
    if normalise(product).upper().endswith(sources.INVALID):
        why = "the MIG devices of the node do not fit the strategy `single`"
        yield Doubt.MIG_INVALID, f"label {sources.PRODUCT} is {product}, which names no product: {why}"


def _doubts(
    operators: str | None, seen: Sequence[SourceCards], models: Mapping[str, int], named: CardModels
) -> Iterator[tuple[Doubt, str]]:
    if len(models) > 1:
        cards = listed([f"{model} ({count})" for model, count in sorted(models.items())], MAX_NAMES)
        yield Doubt.SEVERAL, f"the node has cards of several GPU models by {display(seen[0].source)}: {cards}"
    others = [each for each in seen[1:] if not _agrees(each, models, named)]
    # An empty label says that the node is to have no model.
    called = not operators or not seen or _is_called(operators, seen[0], named)
    if others or not called:
        said = [] if called else [f"{display(sources.OPERATOR)} says {operators}"]
        by_source = ((each.source, [*_models_of(each, named)]) for each in (*seen[:1], *others))
        said += [f"{display(source)} says {listed(names, MAX_NAMES)}" for source, names in by_source]
        yield Doubt.DISAGREE, f"the sources of the GPU model disagree: {', '.join(said)}"


def _agrees(weaker: SourceCards, models: Mapping[str, int], named: CardModels) -> bool:
    products = {*weaker.cards, *map(sources.whole_product, weaker.cards)}
    return any(model_of(product, named) in models for product in products)


def _is_called(label: str, source_cards: SourceCards, named: CardModels) -> bool:
    model = named.model_of(label)
    return any(model_of(product, named) == model or is_named(product, label) for product in source_cards.cards)


def display(source: str) -> str:
    return _DISPLAY.get(source, f"the register of {source}")
