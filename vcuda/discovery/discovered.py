"""Compares the sources that report the GPU model of a node, and decides whether the node's model label is right.

The controller wrote the label if the annotation `DISCOVERED` records the label's value. Otherwise a person wrote it.
"""

import enum
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec

from vcuda.discovery import sources
from vcuda.discovery.sources import DriverCards, SourceCards, model_of, normalise
from vcuda.placement.device_plugins import NodeFacts, contradictions
from vcuda.placement.missing_models import MAX_NAMES
from vcuda.placement.nodes import matches_model
from vcuda.placement.registers import Registers
from vcuda.quota.model import CORES_PER_CARD, Charge, total
from vcuda.quota.values import listed
from vcuda.requests.mig import PROFILE
from vcuda.requests.resources import BUILT_IN, PLAIN_CARDS, CardModels, CardValue, GpuResources

_FROM = " from "
_DISPLAY = {
    sources.OPERATOR: "the label",
    sources.SLICES: "the DRA driver",
    sources.FEATURES: "GPU feature discovery",
    sources.CLOUD: "the cloud's label",
}


class Doubt(enum.StrEnum):
    """The reasons to doubt the GPU model of a node."""

    DISAGREE = "sources-disagree"
    SEVERAL = "several-models"
    MIG_INVALID = "invalid-mig-strategy"
    MALFORMED = "malformed-register"
    CONTRADICTED = "contradicted-register"
    NAMELESS = "no-product"
    NO_MODEL = "no-model"
    """The node offers a GPU resource, but no source names its GPU model."""
    HELD = "change-held"
    """Another model was found, but the label stays. Either pods use the node, or the source of the label is lost."""


class Record(msgspec.Struct, frozen=True):
    """The model label that the controller wrote on a node, and the source of the model."""

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
        """The position of the model's source in the order of trust; 0 is the most trusted. Unknown sources are last."""
        return sources.SOURCES.index(self.source) if self.source in sources.SOURCES else len(sources.SOURCES)


class Found(msgspec.Struct, frozen=True):
    """The GPU model of one node, according to its label and to the sources that report its cards."""

    label: str | None
    """The value of the model label; None if the node has no such label."""
    record: Record | None
    """The controller's record of the label; None if a person wrote the label, or if there is no label."""
    wanted: Record | None
    """The model that the strongest source reports, with this source; None if no source reports a model."""
    seen: tuple[SourceCards, ...] = ()
    """The cards that each source reports, the strongest source first."""
    models: tuple[str, ...] = ()
    """The models of the cards that the strongest source reports. The model with the most cards comes first."""
    doubts: Mapping[Doubt, str] = {}
    """The reasons to doubt the GPU model of the node, each with a message."""

    @property
    def source(self) -> str:
        """The source of the model label. If the node has no label: the source of the model in ``wanted``, or empty."""
        if self.label is None:
            return self.wanted.source if self.wanted else ""
        return self.record.source if self.record else sources.OPERATOR

    def model(self, named: CardModels) -> str:
        """Return the model by which the quota counts the node; empty if there is none."""
        return named.model_of(self.label) if self.label else ""

    def cards(self, facts: NodeFacts, known: GpuResources, published: DriverCards) -> float | None:
        """Return the number of the node's cards; None if it is unknown.

        A MIG slice counts as the part of a card that it is charged.
        ``published``: the devices that DRA drivers publish for the node.
        """
        for source in self.seen:
            if number := sum(source.cards.values()):
                return number
        for scheme in known.schemes:
            if cores := facts.offered.get(scheme.cores):
                return cores / CORES_PER_CARD
        # If a register (a vendor's list of the node's cards) cannot be read, the vendor may share the cards. Then the
        # amount of nvidia.com/gpu may count parts of cards.
        if facts.malformed:
            return None
        model = self.model(known.models)
        whole = facts.offered.get(PLAIN_CARDS, 0) * known.models.card_values.get(model, CardValue()).cores
        parts = total(_mig_slices(facts, known, published, model)).cores if model else 0
        return float(whole + parts) / CORES_PER_CARD if parts or PLAIN_CARDS in facts.offered else None

    def is_missing(self) -> bool:
        return self.label is None and self.wanted is not None

    def may_improve(self) -> bool:
        """Return whether a better source of the node's GPU model may still appear.

        The node then has no model label, and no source reports its model, except perhaps the label of a cloud.
        """
        by_cloud = self.wanted is not None and self.wanted.source == sources.CLOUD
        return self.label is None and (by_cloud or Doubt.NO_MODEL in self.doubts)

    def differs(self, named: CardModels) -> bool:
        """Return whether the controller wrote the label, but the strongest source now reports another model."""
        if self.record is None or self.wanted is None:
            return False
        return named.model_of(self.record.model) != named.model_of(self.wanted.model)

    @property
    def confirmed(self) -> Record | None:
        """The record with a new source if a stronger source than the recorded one reports a model; otherwise None."""
        if self.record is None or self.wanted is None or self.wanted.rank >= self.record.rank:
            return None
        return Record(self.record.model, self.wanted.source)

    def why_held(self, *, in_use: bool) -> str:
        """Return the reason why a newly found model must not be written to the label; empty if it may be written."""
        if self.record is None or self.wanted is None:
            return ""
        other = f"{display(self.wanted.source)} reports {self.wanted.model}, and label {self.record.model} stays"
        if self.wanted.rank > self.record.rank:
            lost = f"{display(self.record.source)}, the source of the label, is lost"
            return f"{other}, because {lost}. Remove the label, and the controller writes it again"
        return f"{other} while pods use GPUs of the node. Drain the node, and the label is changed" if in_use else ""


def find_model(
    labels: Mapping[str, str],
    model_label: str,
    registers: Registers,
    facts: NodeFacts,
    *,
    published: DriverCards = MappingProxyType({}),
    known: GpuResources = BUILT_IN,
) -> Found:
    seen = tuple(sources.cards_by_source(labels, registers, facts, published, known.schemes))
    label, record, named = labels.get(model_label), Record.read(facts.record), known.models
    own = record if record and record.model == label else None
    if not seen and (label is None or (own and own.source == sources.CLOUD)):
        seen = tuple(sources.by_cloud(labels))
    models = _models_of(seen[0], named) if seen else {}
    # Models with equal numbers of cards are sorted by name, so that the result does not depend on the order of cards.
    ranked = tuple(sorted(models, key=lambda model: (-models[model], model)))
    wanted = Record(ranked[0], seen[0].source) if ranked else None
    in_force = label or (wanted.model if wanted and label is None else "")
    contradiction = next(contradictions(known, facts, registers), "")
    decided = f"the quota uses model {in_force}" if in_force else "the node has no model"
    found = {
        **dict(_unreadable(facts, published, labels.get(sources.PRODUCT, ""))),
        **dict.fromkeys([Doubt.CONTRADICTED] if contradiction else [], contradiction),
        **dict(_doubts(None if own else label, seen, models, named)),
    }
    doubts = {doubt: f"{text}; {decided}" for doubt, text in found.items()}
    offered = sorted(name for name, count in facts.offered.items() if count)
    if offered and not in_force and label is None and not doubts:
        no_source = f"the node offers {listed(offered, MAX_NAMES)}, but no source names its GPU model"
        doubts[Doubt.NO_MODEL] = f"{no_source}. Set label {model_label} of the node to its GPU model"
    return Found(label, own, wanted, seen, ranked, doubts)


def _models_of(source_cards: SourceCards, named: CardModels) -> Mapping[str, int]:
    return sources.sums((model_of(product, named), count) for product, count in source_cards.cards.items())


def _unreadable(facts: NodeFacts, published: DriverCards, product: str) -> Iterator[tuple[Doubt, str]]:
    if facts.malformed:
        yield Doubt.MALFORMED, f"the register in annotation {listed(facts.malformed, MAX_NAMES)} cannot be read"
    nameless = [driver for driver, offers in published.items() if not any(offer.product for offer in offers)]
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
        yield Doubt.SEVERAL, f"the node has cards of several GPU models according to {display(seen[0].source)}: {cards}"
    deviating = [each for each in seen[1:] if not _agrees(each, models, named)]
    # An empty label is an administrator's decision that the node has no model. So no source disagrees with it.
    called = not operators or not seen or _is_called(operators, seen[0], named)
    if deviating or not called:
        statements = [] if called else [f"{display(sources.OPERATOR)} is {operators}"]
        by_source = ((each.source, [*_models_of(each, named)]) for each in (*seen[:1], *deviating))
        statements += [f"{display(source)} reports {listed(names, MAX_NAMES)}" for source, names in by_source]
        yield Doubt.DISAGREE, f"the sources of the GPU model disagree: {', '.join(statements)}"


def _agrees(weaker: SourceCards, models: Mapping[str, int], named: CardModels) -> bool:
    products = {*weaker.cards, *map(sources.whole_product, weaker.cards)}
    return any(model_of(product, named) in models for product in products)


def _is_called(label: str, source_cards: SourceCards, named: CardModels) -> bool:
    model = named.model_of(label)
    return any(model_of(product, named) == model or matches_model(product, label) for product in source_cards.cards)


def _mig_slices(facts: NodeFacts, known: GpuResources, published: DriverCards, model: str) -> Iterator[Charge]:
    """Yield the charge of all slices of each MIG profile that the node's device plugin or DRA driver offers."""
    profiles = [
        *((name.removeprefix(PROFILE), count) for name, count in facts.offered.items() if name.startswith(PROFILE)),
        *((offer.profile, count) for offers in published.values() for offer, count in offers.items() if offer.profile),
    ]
    for profile, count in profiles:
        if charge := known.value_of_profile(profile, model):
            yield charge * count


def display(source: str) -> str:
    return _DISPLAY.get(source, f"the register of {source}")
