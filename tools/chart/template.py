"""Writes Helm templates from merged trees. A merged tree contains all variants of one object, with conditions.

Each condition becomes an ``if`` in the template. Some fields of the objects get their values from the chart's values.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import yaml

from tools.chart.features import COMPONENTS
from tools.chart.merge import Branch, Choice, Condition, Items, Leaf, Tree
from tools.chart.names import Names

Json = Any
_STEP = 2
_OPEN = '{{ "{{" }}'
"""The template text for two literal braces. Without this text, two braces would begin an action of the template."""
MARKS = Names("\ue000", "\ue001", "\ue002", "\ue003", "\ue004", "\ue005")
"""Placeholders for names. The template has the chart's values in their place. No manifest contains these characters."""
_VALUES = Names(
    ".Values.namespaces.system",
    ".Values.namespaces.ledgers",
    ".Values.namespaces.nodeAgent",
    ".Values.quota.namespace",
    ".Values.quota.name",
    ".Values.prometheus.runbookBase",
)


class Value(msgspec.Struct, frozen=True):
    """A field or a list item of an object that comes from the values of the Helm chart."""

    kind: str
    name: str
    path: tuple[str, ...]
    """The keys that lead to the part. The key of a list item is its name, or else ``*``. ``-`` is the end of a list."""
    lines: tuple[str, ...]
    """The lines of the template, indented relative to the part. The last key of ``path`` replaces the text ``KEY``."""
    replaces: bool = True
    """True if the template has ``lines`` instead of the part; False if it has them after the part."""


Place = tuple[str, ...]
Filled = Callable[[Place], Value | None]


def write_object(tree: Tree, condition: Condition, filled: Filled) -> Iterator[str]:
    yield from _if(condition, ["---", *_block(tree, 0, (), filled)])


def _if(condition: Condition, lines: Iterable[str]) -> Iterator[str]:
    """Yield ``lines`` of the template. If the condition is not always true, they are inside an ``if``.

    Raises KeyError if the chart has no value that enables a component of the condition.
    """
    if condition.always:
        yield from lines
        return
    values = [COMPONENTS[name] for name in condition.components]
    either = values[0] if len(values) == 1 else f"(or {' '.join(values)})"
    yield f"{{{{- if {f'not {either}' if condition.in_base else either.strip('()')} }}}}"
    yield from lines
    yield "{{- end }}"


def _block(tree: Tree, indent: int, place: Place, filled: Filled) -> Iterator[str]:
    """Yield the lines of the template for a mapping or a list, in YAML's block style."""
    match tree:
        case Branch(parts):
            for key, part, condition in parts:
                yield from _if(condition, _entry(key, part, indent, (*place, key), filled))
        case Items(parts):
            for part, condition in parts:
                yield from _if(condition, _item(part, indent, place, filled))
            if value := filled((*place, "-")):
                yield from _filling(value, "-", indent)
        case _:
            raise TypeError(f"{'.'.join(place)} must be a mapping or a list")


def _entry(key: str, tree: Tree, indent: int, place: Place, filled: Filled) -> Iterator[str]:
    begin, value = f"{' ' * indent}{_scalar(key)}:", filled(place)
    if value and value.replaces:
        yield from _filling(value, _scalar(key), indent)
        return
    match tree:
        case Leaf(found):
            yield from _leaf(begin, found, indent)
        case Choice(by_component, base):
            word = "if"
            for component, part in by_component:
                yield f"{{{{- {word} {COMPONENTS[component]} }}}}"
                yield from _entry(key, part, indent, place, filled)
                word = "else if"
            if base is not None:
                yield "{{- else }}"
                yield from _entry(key, base, indent, place, filled)
            yield "{{- end }}"
        case _:
            yield begin
            yield from _block(tree, indent if isinstance(tree, Items) else indent + _STEP, place, filled)
    if value:
        yield from _filling(value, _scalar(key), indent)


def _item(tree: Tree, indent: int, place: Place, filled: Filled) -> Iterator[str]:
    begin = f"{' ' * indent}-"
    if isinstance(tree, Leaf):
        yield from _leaf(begin, tree.value, indent)
        return
    lines = list(_block(tree, indent + _STEP, (*place, _name_of(tree)), filled))
    # If a list item begins with a condition, `{{ if }}` must be on its own line after the line with the dash.
    if lines[0].startswith("{{"):
        yield begin
        yield from lines
    else:
        yield f"{begin} {lines[0].strip()}"
        yield from lines[1:]


def _name_of(tree: Tree) -> str:
    parts = tree.parts if isinstance(tree, Branch) else ()
    return next((str(part.value) for key, part, _ in parts if key == "name" and isinstance(part, Leaf)), "*")


def _leaf(begin: str, value: Json, indent: int) -> Iterator[str]:
    if isinstance(value, str) and "\n" in value and value == value.lstrip() and "\t" not in value:
        yield f"{begin} {'|' if value.endswith(chr(10)) else '|-'}"
        for line in value.rstrip("\n").split("\n"):
            yield _escaped(f"{' ' * (indent + _STEP)}{line}" if line else "")
    else:
        yield _escaped(f"{begin} {_scalar(value)}")


def _scalar(value: Json) -> str:
    if value in ({}, []) or (isinstance(value, str) and "\n" in value):
        return json.dumps(value, ensure_ascii=False)
    text: str = yaml.safe_dump(value, width=float("inf"), allow_unicode=True, default_flow_style=True)
    return text.removesuffix("\n...\n").rstrip("\n")


def _escaped(line: str) -> str:
    line = line.replace("{{", _OPEN)
    for mark, value in zip(MARKS, _VALUES, strict=True):
        line = line.replace(mark, f"{{{{ {value} }}}}")
    return line


def _filling(value: Value, key: str, indent: int) -> Iterator[str]:
    for line in value.lines:
        yield line if line.startswith("{{-") else f"{' ' * indent}{line.replace('KEY', key)}"


def lookup(values: Sequence[Value], kind: str, name: str) -> Filled:
    """Return a function from a path of keys to the `Value` at this path of one object; None if there is no `Value`."""
    own: Mapping[Place, Value] = {each.path: each for each in values if (each.kind, each.name) == (kind, name)}
    return own.get
