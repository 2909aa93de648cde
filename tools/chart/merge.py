"""Merges the variants of an object into one tree with conditions, from which a Helm template is written.

One variant is the object in the kustomize base. Each kustomize component that changes the object makes another variant.
If a part of the object (a field or a list item) is not in every variant, the part has a condition in the tree. The
condition names the components that add or remove the part.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

Json = Any

ABSENT = object()
"""Used in place of the value of a part (a field or a list item) if a variant of an object lacks this part."""


class Condition(NamedTuple):
    """The condition under which the template renders a part of an object."""

    in_base: bool = True
    """True if any of ``components`` removes the part; False if any of them adds it."""
    components: tuple[str, ...] = ()

    @property
    def always(self) -> bool:
        return self.in_base and not self.components


ALWAYS = Condition()


class Leaf(msgspec.Struct, frozen=True):
    """A scalar, or an empty list or mapping, in the merged tree."""

    value: Json


class Choice(msgspec.Struct, frozen=True):
    """A field in the merged tree whose value depends on the enabled kustomize component.

    ``by_component``: each component that changes the value, with the changed value.
    ``base``: the value if none of these components is enabled; None if the field is then absent.
    """

    by_component: tuple[tuple[str, "Tree"], ...]
    base: "Tree | None"


class Branch(msgspec.Struct, frozen=True):
    """A mapping in the merged tree: its keys, with their values and conditions."""

    parts: tuple[tuple[str, "Tree", Condition], ...]


class Items(msgspec.Struct, frozen=True):
    """A list in the merged tree: its items, with their conditions."""

    parts: tuple[tuple["Tree", Condition], ...]


Tree = Leaf | Choice | Branch | Items


def merge(base: Json, variants: Mapping[str, Json]) -> Tree:
    """Return the merged tree for a value of an object.

    ``base``: the value in the kustomize base.
    ``variants``: the value with each kustomize component enabled.

    A value is `ABSENT` if the object does not have the value.
    """
    others = {name: value for name, value in variants.items() if value is not ABSENT and value != base}
    present = [*others.values()] if base is ABSENT else [base, *others.values()]
    if all(value == present[0] for value in present) and (base is not ABSENT or len(variants) == len(others)):
        return _whole(present[0])
    if all(isinstance(value, dict) for value in present):
        return _mapping(base, others)
    if all(isinstance(value, list) for value in present):
        return _list(base, others)
    choices = tuple((name, _whole(value)) for name, value in others.items())
    return Choice(choices, None if base is ABSENT else _whole(base))


def condition_of(base: Json, variants: Mapping[str, Json]) -> Condition:
    """Return the condition under which an object has a value. The parameters have the same meaning as in `merge`."""
    if base is ABSENT:
        return Condition(False, tuple(name for name, value in variants.items() if value is not ABSENT))
    return Condition(True, tuple(name for name, value in variants.items() if value is ABSENT))


def _whole(value: Json) -> Tree:
    if isinstance(value, dict) and value:
        return Branch(tuple((key, _whole(each), ALWAYS) for key, each in value.items()))
    if isinstance(value, list) and value:
        return Items(tuple((_whole(each), ALWAYS) for each in value))
    return Leaf(value)


def _mapping(base: Json, variants: Mapping[str, Json]) -> Branch:
    whole: Mapping[str, Json] = {} if base is ABSENT else base
    keys = dict.fromkeys((*whole, *(key for value in variants.values() for key in value)))
    parts = []
    for key in keys:
        by_component = {name: value.get(key, ABSENT) for name, value in variants.items()}
        own = whole.get(key, ABSENT)
        condition = condition_of(own, by_component)
        # If a mapping is not in the base, the whole mapping has a condition, which names the components that add it.
        # A key that all these components add needs no separate condition.
        if base is ABSENT and len(condition.components) == len(variants):
            condition = ALWAYS
        parts.append((key, merge(own, by_component), condition))
    return Branch(tuple(parts))


def _list(base: Json, variants: Mapping[str, Json]) -> Items:
    whole: Sequence[Json] = [] if base is ABSENT else base
    names = [_name(item) for item in whole]
    removed: dict[int, list[str]] = {}
    changed: dict[int, dict[str, Json]] = {}
    added: dict[int, dict[str, list[Json]]] = {}
    for component, value in variants.items():
        theirs = [_name(item) for item in value]
        for tag, start, end, other, to in difflib.SequenceMatcher(None, names, theirs, autojunk=False).get_opcodes():
            if tag == "equal":
                changed |= {
                    at: {**changed.get(at, {}), component: value[other + at - start]} for at in range(start, end)
                }
                continue
            for at in range(start, end):
                removed.setdefault(at, []).append(component)
            if other < to:
                added.setdefault(end, {})[component] = value[other:to]
    parts: list[tuple[Tree, Condition]] = []
    for at in range(len(whole) + 1):
        parts += _additions(added.get(at, {}), tuple(variants) if base is ABSENT else ())
        if at < len(whole):
            parts.append((merge(whole[at], changed.get(at, {})), Condition(True, tuple(removed.get(at, ())))))
    return Items(tuple(parts))


def _additions(found: Mapping[str, Sequence[Json]], everywhere: tuple[str, ...]) -> list[tuple[Tree, Condition]]:
    """Return the items that components add at a position of a list. Equal items of several components appear once."""
    by_text: dict[str, tuple[Sequence[Json], list[str]]] = {}
    for component, items in found.items():
        by_text.setdefault(json.dumps(items, sort_keys=True), (items, []))[1].append(component)
    return [
        (_whole(item), ALWAYS if everywhere == tuple(components) else Condition(False, tuple(components)))
        for items, components in by_text.values()
        for item in items
    ]


def _name(item: Json) -> str:
    """Return the text that identifies a list item in all variants: its name, or its content if it has no name."""
    if isinstance(item, dict) and "name" in item:
        return f"name: {item['name']}"
    return json.dumps(item, sort_keys=True)
