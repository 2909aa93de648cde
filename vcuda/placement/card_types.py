"""Finds the card types on the nodes of each GPU model, and the annotations that limit a pod to types of its model.

HAMi and vgpu-manager choose a card by its type (its registered product name). The pod's annotations list wanted and
unwanted texts. The type must contain a wanted text, and must not contain an unwanted text. Letter case does not matter.

The label of a node names one model, but the node may have cards of several types. On such a node a pod without
annotations could get a card of a model for which the pod is not charged. The same happens if a wanted text is part of
two types.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from vcuda.k8s_types import Pod
from vcuda.placement.registers import Registers
from vcuda.requests.resources import NO_ROWS, CardModels
from vcuda.requests.schemes import Scheme

MAX_TYPES = 32
"""Maximum number of card types in an annotation of a pod. Most models have one or two types."""

MAX_CHOICE = 8192
"""Maximum length of an annotation that chooses card types, because the annotation is parsed once for each model."""

MAX_WORDS = 16
"""Maximum number of words that are compared when a card type is compared with a model name."""

ANY_SLICE = "a share may get a MIG slice of any size; use a model whose cards are not in MIG mode"
"""The reason why a pod with a share must not use a card in MIG mode. HAMi takes the first free slice with enough
memory, or a slice that the pod prefers. So the charge of the share would be unknown when the pod is created."""

_MIG = "mig"
"""The name of MIG mode in the pod annotation that lists the allowed modes of cards."""

_WORD = re.compile(r"[a-z0-9]+", re.ASCII)


class CardTypes(msgspec.Struct, frozen=True):
    """The card types in the registers of all nodes, by the names of a vendor's scheme and a GPU model.

    A register is the node annotation in which a vendor lists the cards of the node. The operator chooses the name of a
    model. If the name matches some types on the nodes of this model, the other types belong to other models. If the
    name matches no type, all types belong to the model.
    """

    own: Mapping[tuple[str, str], tuple[str, ...]] = {}
    """The card types that belong to each GPU model."""
    beside: Mapping[tuple[str, str], tuple[str, ...]] = {}
    """The card types on nodes of each GPU model that belong to other models."""
    sliced: frozenset[tuple[str, str]] = frozenset()
    """Pairs of the names of a vendor's scheme and a GPU model that has cards in MIG mode."""
    whole: frozenset[tuple[str, str]] = frozenset()
    """Pairs of the names of a vendor's scheme and a GPU model that has cards that are not in MIG mode."""

    @classmethod
    def of(cls, nodes: Iterable[tuple[str | None, Registers]], named: CardModels = NO_ROWS) -> "CardTypes":
        """Return the card types on ``nodes`` (pairs of model and registers). ``named`` maps products to models."""
        found: dict[tuple[str, str], set[str]] = {}
        sliced, whole = set(), set()
        for model, registers in nodes:
            for scheme, register in registers.items():
                key = (scheme, model or "")
                found.setdefault(key, set()).update(register.types)
                if register.sliced:
                    sliced.add(key)
                if register.whole:
                    whole.add(key)
        own = {
            key: tuple(sorted(k for k in kinds if is_named(k, key[1]) or named.model_of(k) == key[1]) or sorted(kinds))
            for key, kinds in found.items()
        }
        beside = {key: tuple(sorted(kinds.difference(own[key]))) for key, kinds in found.items()}
        return cls(own, beside, frozenset(sliced), frozenset(whole))

    def of_model(self, scheme: str, model: str) -> tuple[str, ...]:
        """Return the card types of a model; empty if no node of the model has registered cards."""
        return self.own.get((scheme, model), ())

    def others(self, scheme: str, model: str) -> frozenset[str]:
        every = (kinds for part in (self.own, self.beside) for (each, _), kinds in part.items() if each == scheme)
        return frozenset(itertools.chain.from_iterable(every)).difference(self.of_model(scheme, model))

    def models_of(self, scheme: str, kind: str) -> tuple[str, ...]:
        return tuple(
            sorted(model for (each, model), own in self.own.items() if each == scheme and model and kind in own)
        )


def is_named(kind: str, model: str) -> bool:
    """Return whether a card type belongs to a GPU model. GeForce RTX 3090 belongs to RTX3090, A100 not to A10."""
    words, wanted = _words(kind), _words(model)
    following = iter(words)
    if wanted and all(word in following for word in wanted):
        return True
    parts = itertools.combinations(range(len(words) + 1), 2)
    return bool(wanted) and any("".join(wanted) == "".join(words[first:end]) for first, end in parts)


def _words(name: str) -> list[str]:
    return _WORD.findall(name.casefold())[:MAX_WORDS]


class Selection(NamedTuple):
    """The card types of a model that a pod may get; empty if they are unknown. ``exclusion``: the message why the pod
    cannot use the model; None if the pod can use it."""

    types: tuple[str, ...] = ()
    exclusion: str | None = None


def select(pod: Pod, scheme: Scheme, model: str, types: CardTypes, *, has_share: bool) -> Selection:
    """Return the types of a model that contain a wanted text of the pod's annotations, and no unwanted text."""
    choices = (scheme.wanted_models, scheme.unwanted_models)
    if too_long := next((key for key in choices if key and len(pod.annotations.get(key, "")) > MAX_CHOICE), None):
        return Selection(
            exclusion=f"{model} is excluded, because annotation {too_long} is longer than {MAX_CHOICE} characters"
        )
    known = types.of_model(scheme.name, model)
    wanted, unwanted = _substrings(pod, scheme.wanted_models), _substrings(pod, scheme.unwanted_models)
    kept = [kind for kind in known if contains_any(kind, wanted)] if wanted else list(known)
    if wanted and not kept:
        if not contains_any(model, wanted):
            return Selection(exclusion=f"{model} is excluded by annotation {scheme.wanted_models}")
        kept = list(known)
    left = tuple(kind for kind in kept if not contains_any(kind, unwanted))
    if contains_any(model, unwanted) or (known and not left):
        return Selection(exclusion=f"{model} is excluded by annotation {scheme.unwanted_models}")
    if has_share and _sliced(scheme, model, types):
        if _MIG in pod.annotations.get(str(scheme.card_mode), ""):
            return Selection(exclusion=f"{model} is excluded by annotation {scheme.card_mode}: {ANY_SLICE}")
        if (scheme.name, model) not in types.whole:
            return Selection(exclusion=f"{model} is excluded, because its cards are in MIG mode: {ANY_SLICE}")
    return Selection(left)


def _sliced(scheme: Scheme, model: str, types: CardTypes) -> bool:
    return scheme.card_mode is not None and (scheme.name, model) in types.sliced


def annotations_for(
    pod: Pod, schemes: Iterable[Scheme], model: str, types: CardTypes, *, has_share: bool
) -> Mapping[str, str]:
    """Return the annotations that make the schedulers of ``schemes`` give a pod only card types of this model."""
    found: dict[str, str] = {}
    for scheme in schemes:
        if not scheme.wanted_models:
            continue
        usable = select(pod, scheme, model, types, has_share=has_share).types
        if has_share and scheme.card_mode and _sliced(scheme, model, types):
            found[scheme.card_mode] = pod.annotations.get(scheme.card_mode) or scheme.shared_mode
        others = types.others(scheme.name, model)
        beside = types.beside.get((scheme.name, model), ())
        similar = (kind for kind in others if contains_any(kind, map(str.casefold, usable)))
        avoided = sorted(similar, key=lambda kind: (kind not in beside, kind))[:MAX_TYPES]
        if avoided and scheme.unwanted_models:
            present = _excluding(pod, scheme)
            own = [text] if (text := pod.annotations.get(scheme.unwanted_models, "").strip()) else []
            missing = [kind for kind in avoided if kind.casefold() not in present]
            found[scheme.unwanted_models] = ",".join([*own, *missing])
        usable = tuple(kind for kind in usable if not contains_any(kind, map(str.casefold, avoided)))
        # Two vendors' schemes may use the same annotation. So it is set only for a scheme with registered card types.
        if usable:
            found[scheme.wanted_models] = ",".join(usable[:MAX_TYPES])
    return found


def reachable_others(
    pod: Pod, schemes: Iterable[Scheme], model: str, types: CardTypes, *, has_share: bool
) -> Iterator[str]:
    """Describe cards that a pod pinned to ``model`` could get on the model's nodes, but is not charged for."""
    # Schedulers do not strip blanks in an annotation that chooses card types. An empty item matches every type.
    for scheme in schemes:
        wanted, unwanted = _texts(pod, scheme.wanted_models), _excluding(pod, scheme)
        for kind in types.beside.get((scheme.name, model), ()):
            chosen = not wanted or contains_any(kind, map(str.strip, wanted))
            if chosen and not contains_any(kind, unwanted):
                yield f"a card of type {kind}, which is not of model {model}"
        if has_share and _sliced(scheme, model, types) and _MIG in pod.annotations.get(str(scheme.card_mode), _MIG):
            yield f"a MIG slice of {model} of any size"


def contains_any(name: str, texts: Iterable[str]) -> bool:
    """Return whether one of ``texts`` is part of a name. The texts must be in lower case."""
    folded = name.casefold()
    return any(text in folded for text in texts)


def _excluding(pod: Pod, scheme: Scheme) -> list[str]:
    # Card types are ASCII. Texts with other characters are ignored, because Go and Python convert their case
    # differently.
    text = pod.annotations.get(scheme.unwanted_models) if scheme.unwanted_models else None
    return [part.casefold() for part in (text or "").split(",") if part and part.isascii()]


def _texts(pod: Pod, annotation: str | None) -> list[str]:
    text = pod.annotations.get(annotation) if annotation else None
    return text.casefold().split(",") if text else []


def _substrings(pod: Pod, annotation: str | None) -> list[str]:
    # Blank items of the annotation are ignored, because they name no type of card.
    return [text.strip() for text in _texts(pod, annotation) if text.strip()]
