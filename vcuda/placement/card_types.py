"""Finds the card types on the nodes of each GPU model, and the pod annotations that limit a pod to cards of one model.

The type of a card is its product name. One annotation of a pod lists wanted texts, another lists unwanted texts. HAMi
and vgpu-manager give the pod only cards whose type contains a wanted text and no unwanted text, in any letter case.

The label of a node names one GPU model, but the node may have cards of several types. On such a node, a pod without
these annotations could get a card of a model that the pod is not charged for. A wanted text that is part of two types
has the same effect.
"""

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import NamedTuple

import msgspec

from vcuda.k8s_types import Pod
from vcuda.placement.registers import Registers
from vcuda.requests.resources import NO_ROWS, CardModels
from vcuda.requests.schemes import Scheme

MAX_TYPES = 32
"""Maximum number of card types in an annotation of a pod. Most models have one or two types."""

MAX_CHOICE = 8192
"""Maximum length of an annotation that lists wanted or unwanted texts, because it is parsed once for each model."""

MAX_WORDS = 16
"""Maximum number of words of a card type or model name that `is_named` compares, to limit the time that it takes."""

ANY_SLICE = "a share may get a MIG slice of any size; use a model whose cards are not in MIG mode"
"""The reason why a pod with a share of a card must not use a card in MIG mode. HAMi gives the share the first free MIG
slice with enough memory, or a slice that the pod prefers. So the charge is unknown when the pod is created."""

_MIG = "mig"
"""The name of MIG mode in the pod annotation that lists the allowed modes of cards."""

_WORD = re.compile(r"[a-z0-9]+", re.ASCII)


class ListedCards(NamedTuple):
    """The cards of one vendor on the nodes of a GPU model, according to the vendor's registers (node annotations)."""

    own: tuple[str, ...] = ()
    """The card types that belong to the model."""
    foreign: tuple[str, ...] = ()
    """The card types of other models."""
    sliced: bool = False
    """True if at least one card is in MIG mode."""
    whole: bool = False
    """True if at least one card is not in MIG mode."""

    @classmethod
    def of(cls, model: str, cards: Set[tuple[str, bool]], named: CardModels) -> "ListedCards":
        """Return the cards of a model. ``cards``: for each card, its type and whether it is in MIG mode."""
        kinds, modes = {kind for kind, _ in cards}, {mig for _, mig in cards}
        own = sorted(k for k in kinds if is_named(k, model) or named.model_of(k) == model) or sorted(kinds)
        return cls(tuple(own), tuple(sorted(kinds.difference(own))), sliced=True in modes, whole=False in modes)


class CardTypes(msgspec.Struct, frozen=True):
    """The card types on all nodes, by the name of the vendor's scheme and the GPU model.

    The types are read from registers, the node annotations in which a vendor lists the cards of a node. A type belongs
    to a model if it matches the model's name (`is_named`), or if ``gpu_models`` lists the type. But the operator may
    give a model any name. So if no type on a model's nodes belongs to the model in this way, all types there do.
    """

    cards: Mapping[tuple[str, str], ListedCards] = {}

    @classmethod
    def of(cls, nodes: Iterable[tuple[str | None, Registers]], named: CardModels = NO_ROWS) -> "CardTypes":
        """Return the card types on ``nodes`` (pairs of model and registers). ``named``: the key ``gpu_models``."""
        found: dict[tuple[str, str], set[tuple[str, bool]]] = {}
        for model, registers in nodes:
            for scheme, register in registers.items():
                found.setdefault((scheme, model or ""), set()).update((card.type, card.mig) for card in register)
        return cls({key: ListedCards.of(key[1], each, named) for key, each in found.items()})

    def on(self, scheme: str, model: str) -> ListedCards:
        """Return the cards on the nodes of a model; empty if no node of the model has registered cards."""
        return self.cards.get((scheme, model), ListedCards())

    def others(self, scheme: str, model: str) -> frozenset[str]:
        every = ((*cards.own, *cards.foreign) for (each, _), cards in self.cards.items() if each == scheme)
        return frozenset(itertools.chain.from_iterable(every)).difference(self.on(scheme, model).own)

    def models_of(self, scheme: str, kind: str) -> tuple[str, ...]:
        found = (model for (each, model), cards in self.cards.items() if each == scheme and kind in cards.own)
        return tuple(sorted(filter(None, found)))


def is_named(kind: str, model: str) -> bool:
    """Return whether a card type matches a model's name: GeForce RTX 3090 matches RTX3090, A100 does not match A10."""
    words, wanted = _words(kind), _words(model)
    following = iter(words)
    if wanted and all(word in following for word in wanted):
        return True
    parts = itertools.combinations(range(len(words) + 1), 2)
    return bool(wanted) and any("".join(wanted) == "".join(words[first:end]) for first, end in parts)


def _words(name: str) -> list[str]:
    return _WORD.findall(name.casefold())[:MAX_WORDS]


def select(pod: Pod, scheme: Scheme, model: str, types: CardTypes, *, has_share: bool) -> tuple[str, ...] | str:
    """Return the card types of a model that the pod may get by its annotations; empty if no types are known.

    If the pod cannot use the model, return the message why.
    """
    choices = (scheme.wanted_models, scheme.unwanted_models)
    if too_long := next((key for key in choices if key and len(pod.annotations.get(key, "")) > MAX_CHOICE), None):
        return f"{model} is excluded, because annotation {too_long} is longer than {MAX_CHOICE} characters"
    cards = types.on(scheme.name, model)
    wanted, unwanted = _substrings(pod, scheme.wanted_models), _substrings(pod, scheme.unwanted_models)
    kept = [kind for kind in cards.own if contains_any(kind, wanted)] if wanted else list(cards.own)
    if wanted and not kept:
        if not contains_any(model, wanted):
            return f"{model} is excluded by annotation {scheme.wanted_models}"
        kept = list(cards.own)
    left = tuple(kind for kind in kept if not contains_any(kind, unwanted))
    if contains_any(model, unwanted) or (cards.own and not left):
        return f"{model} is excluded by annotation {scheme.unwanted_models}"
    if has_share and scheme.card_mode and cards.sliced:
        if _MIG in pod.annotations.get(scheme.card_mode, ""):
            return f"{model} is excluded by annotation {scheme.card_mode}: {ANY_SLICE}"
        if not cards.whole:
            return f"{model} is excluded, because its cards are in MIG mode: {ANY_SLICE}"
    return left


def annotations_for(
    pod: Pod, schemes: Iterable[Scheme], model: str, types: CardTypes, *, has_share: bool
) -> Mapping[str, str]:
    """Return the pod annotations that make the schedulers of ``schemes`` give the pod only cards of this model."""
    found: dict[str, str] = {}
    for scheme in schemes:
        if not scheme.wanted_models:
            continue
        selected, cards = select(pod, scheme, model, types, has_share=has_share), types.on(scheme.name, model)
        usable = () if isinstance(selected, str) else selected
        if has_share and scheme.card_mode and cards.sliced:
            found[scheme.card_mode] = pod.annotations.get(scheme.card_mode) or scheme.shared_mode
        others = types.others(scheme.name, model)
        similar = (kind for kind in others if contains_any(kind, map(str.casefold, usable)))
        avoided = sorted(similar, key=lambda kind: (kind not in cards.foreign, kind))[:MAX_TYPES]
        if avoided and scheme.unwanted_models:
            present = _excluding(pod, scheme)
            own = [text] if (text := pod.annotations.get(scheme.unwanted_models, "").strip()) else []
            missing = [kind for kind in avoided if kind.casefold() not in present]
            found[scheme.unwanted_models] = ",".join([*own, *missing])
        usable = tuple(kind for kind in usable if not contains_any(kind, map(str.casefold, avoided)))
        # Two schemes may share this annotation. A scheme without known types must not replace the other scheme's types.
        if usable:
            found[scheme.wanted_models] = ",".join(usable[:MAX_TYPES])
    return found


def reachable_others(
    pod: Pod, schemes: Iterable[Scheme], model: str, types: CardTypes, *, has_share: bool
) -> Iterator[str]:
    """Yield a description of the cards that a pod, limited to ``model``, could get without a charge for them."""
    # Schedulers do not strip the blanks around an unwanted text. An empty wanted text matches every type.
    for scheme in schemes:
        wanted, unwanted = _texts(pod, scheme.wanted_models), _excluding(pod, scheme)
        cards = types.on(scheme.name, model)
        for kind in cards.foreign:
            chosen = not wanted or contains_any(kind, map(str.strip, wanted))
            if chosen and not contains_any(kind, unwanted):
                yield f"a card of type {kind}, which is not of model {model}"
        if has_share and scheme.card_mode and cards.sliced and _MIG in pod.annotations.get(scheme.card_mode, _MIG):
            yield f"a MIG slice of {model} of any size"


def contains_any(name: str, texts: Iterable[str]) -> bool:
    """Return whether ``name`` contains one of ``texts``, in any letter case. The texts must be in lower case."""
    folded = name.casefold()
    return any(text in folded for text in texts)


def _excluding(pod: Pod, scheme: Scheme) -> list[str]:
    # Card types are ASCII. Texts with other characters are ignored, because Go and Python convert their case
    # differently.
    text = pod.annotations.get(scheme.unwanted_models) if scheme.unwanted_models else None
    return [part.casefold() for part in (text or "").split(",") if part and part.isascii()]


def count_choices(pod: Pod, schemes: Iterable[Scheme]) -> int:
    """Return the number of wanted and unwanted texts in a pod's annotations. Each is compared with every model."""
    keys = (key for scheme in schemes for key in (scheme.wanted_models, scheme.unwanted_models) if key)
    texts = (pod.annotations.get(key, "") for key in keys)
    return sum(text.count(",") + 1 for text in texts if 0 < len(text) <= MAX_CHOICE)


def _texts(pod: Pod, annotation: str | None) -> list[str]:
    text = pod.annotations.get(annotation) if annotation else None
    return text.casefold().split(",") if text else []


def _substrings(pod: Pod, annotation: str | None) -> tuple[str, ...]:
    return _split(pod.annotations.get(annotation, "")) if annotation else ()


@functools.lru_cache(maxsize=8)  # the texts of one pod are compared with every model
def _split(text: str) -> tuple[str, ...]:
    # Blank items of the annotation are ignored, because they name no type of card.
    return tuple(filter(None, map(str.strip, text.casefold().split(","))))
