"""The text of a quota document, JSON or YAML, read into plain mappings, lists and scalars.

Aliases and merge keys are resolved here, within a bound, and keys that are written twice are found: the usual loaders
keep the last one silently.
"""

from __future__ import annotations

import enum
import json
import re
from decimal import Context, Decimal
from typing import NamedTuple, NoReturn, Protocol

import yaml
from yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
)

from vcuda.errors import Fault, QuotaFault

MAX_TEXT = 1024 * 1024
"""Characters. Kubernetes stores at most 1 MiB in one ConfigMap (its documentation of ConfigMaps)."""
MAX_ENTRIES = 200_000
"""Keys and list items in all; those behind an alias count wherever it is used."""

Plain = None | bool | Decimal | str | list["Plain"] | dict[str, "Plain"]
Place = tuple[str | int, ...]


class Found(NamedTuple):
    """A fault with the keys and list positions that lead to it."""

    place: Place
    message: str


class Reading(NamedTuple):
    """What a text holds, and the faults of its writing that do not keep it from being read."""

    tree: Plain
    faults: tuple[Found, ...]


def read_text(text: str) -> Reading:
    """Read JSON or YAML; an empty text holds None.

    Raises QuotaFault, with one fault, where the text cannot be read: a syntax error (with line and column), too
    long, nested too deeply, too many entries.
    """
    if len(text) > MAX_TEXT:
        _refuse(f"the document is {len(text)} characters long; a ConfigMap holds at most {MAX_TEXT} bytes")
    builder = _PlainBuilder()
    try:
        tree = builder.plain(parse(_sound(text.removeprefix("\ufeff"))), (), 0)
    except UnreadableError as error:
        _refuse(str(error))
    except TooDeepError:
        _refuse(f"the document is nested more than {MAX_DEPTH} levels deep; a quota needs four")
    return Reading(tree, tuple(dict.fromkeys(builder.faults)))


def _refuse(sentence: str) -> NoReturn:
    raise QuotaFault((Fault("", sentence),)) from None


_SURROGATES = re.compile("[\ud800-\udfff]")


def _sound(text: str) -> str:
    """Replace halves of UTF-16 pairs, which no encoder takes, by a character that no name may hold either."""
    return _SURROGATES.sub("\ufffd", text)


class _PlainBuilder:
    """Turns nodes into plain values and gathers the faults on the way."""

    def __init__(self) -> None:
        self.faults: list[Found] = []
        self._entries = 0

    def plain(self, node: Node, place: Place, depth: int) -> Plain:
        """Return ``node`` without repeated and merge keys; ``depth`` counts the levels of merging too."""
        if isinstance(node, str):
            return _sound(node)
        if not isinstance(node, list):
            return node
        self._count(node, depth)
        if isinstance(node, Pairs):
            return self._mapping(node, place, depth + 1)
        return [self.plain(item, (*place, at), depth + 1) for at, item in enumerate(node)]

    def _count(self, node: list[Node] | Pairs, depth: int) -> None:
        self._entries += len(node)
        if self._entries > MAX_ENTRIES:
            _refuse(f"the document has more than {MAX_ENTRIES} entries, those behind aliases included")
        if depth >= MAX_DEPTH:
            raise TooDeepError

    def _mapping(self, pairs: Pairs, place: Place, depth: int) -> Plain:
        own: dict[str, Plain] = {}
        merged: list[Node] = []
        for key, node in pairs:
            if key is Merge.KEY:
                merged.append(node)
            elif (name := _sound(key)) in own:
                self.faults.append(Found((*place, name), "is written twice; keep one of them"))
            else:
                own[name] = self.plain(node, (*place, name), depth)
        self._merge(own, merged, place, depth)
        return own

    def _merge(self, own: dict[str, Plain], merged: list[Node], place: Place, depth: int) -> None:
        """Add what the merge keys bring: what is written out wins, then what is merged first."""
        if len(merged) > 1:
            self.faults.append(Found((*place, "<<"), "is written twice; write one with a list: <<: [*a, *b]"))
        for node in merged:
            self._count([node], depth)
            sources = node if isinstance(node, list) and not isinstance(node, Pairs) else [node]
            for source in sources:
                self._inherit(own, source, place, depth)

    def _inherit(self, own: dict[str, Plain], source: Node, place: Place, depth: int) -> None:
        inherited = self.plain(source, place, depth)
        if not isinstance(inherited, dict):
            self.faults.append(Found((*place, "<<"), "is no mapping; write an alias of one: <<: *name"))
            return
        for key, value in inherited.items():
            own.setdefault(key, value)


MAX_DEPTH = 16
"""Levels of nesting; a quota document has four, the rest is for merge keys."""


class Merge(enum.Enum):
    """The unquoted key ``<<`` of YAML: the entries of its value belong to the mapping around it."""

    KEY = "<<"


class Pairs(list[tuple[str | Merge, "Node"]]):
    """A mapping as written, its keys in their order and as often as they are there."""


Node = None | bool | Decimal | str | list["Node"] | Pairs


class UnreadableError(Exception):
    """The text makes no sense at this line and column, both counted from 1."""

    def __init__(self, line: int, column: int, sentence: str) -> None:
        super().__init__(f"line {line}, column {column}: {sentence}")
        self.line = line


class TooDeepError(Exception):
    """The text is nested too deeply to be read."""


def parse(text: str) -> Node:
    """Read as JSON what looks like it (JSON may be indented with tabs, YAML may not), everything else as YAML.

    An empty text is None. Raises UnreadableError or TooDeepError.
    """
    if not text.lstrip().startswith("{"):
        return parse_yaml(text)
    try:
        return parse_json(text)
    except UnreadableError as as_json:
        try:
            return parse_yaml(text)
        except UnreadableError as as_yaml:
            # The reading that got further was meant; on one line JSON's, whose columns are more exact.
            raise max(as_json, as_yaml, key=lambda error: error.line) from None


_JSON_PROBLEMS = (
    ("',' delimiter", "a comma or a closing bracket is missing"),
    ("':' delimiter", "a colon is missing after the key"),
    ("property name", "a key in double quotes is missing, or there is a comma too many"),
    ("trailing comma", "there is a comma too many"),
    ("Extra data", "the document has ended before this; there is a closing bracket too many"),
    ("control character", "a line break or a tab inside quotes; is the closing quote missing?"),
    ("Unterminated string", "the quote that opens here is never closed"),
    ("escape", "a backslash that starts no known escape; leave it out"),
    ("Expecting value", "a value is missing"),
)


def parse_json(text: str) -> Node:
    """Read JSON; raise UnreadableError or TooDeepError."""
    try:
        node: Node = json.loads(
            text,
            object_pairs_hook=Pairs,
            parse_int=Decimal,
            parse_float=_json_number,
            parse_constant=Decimal,
        )
    except json.JSONDecodeError as error:
        sentence = _explain(error.msg, _JSON_PROBLEMS, "this is no valid JSON")
        raise UnreadableError(error.lineno, error.colno, sentence) from None
    except RecursionError:
        raise TooDeepError from None
    return node


def _json_number(digits: str) -> Decimal:
    """Return the number; NaN for an exponent beyond what Decimal holds."""
    return Decimal(digits, Context(traps=[]))


def _explain(problem: str, known: tuple[tuple[str, str], ...], otherwise: str) -> str:
    return next((sentence for part, sentence in known if part in problem), otherwise)


_YAML_PROBLEMS = (
    (r"'\t'", "a tab character; indent with spaces"),
    ("mapping values are not allowed", "a colon that does not belong here; is a line indented wrongly?"),
    ("could not find expected ':'", "a key without a colon behind it"),
    ("expected ',' or", "a comma or a closing bracket is missing"),
    ("expected the node content", "a value or a closing bracket is missing"),
    ("expected <block end>", "the indentation does not match the lines above"),
    ("quoted scalar", "a quote is never closed, or a backslash in double quotes starts no known escape"),
    ("tag", "tags (`!`) are not read; leave them out"),
)
_YAML_OTHERWISE = "this is no valid YAML; check brackets, quotes and indentation"


def parse_yaml(text: str) -> Node:
    """Read one YAML document; raise UnreadableError or TooDeepError."""
    builder = _NodeBuilder()
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            builder.take(event)
    except yaml.MarkedYAMLError as error:
        sentence = _explain(f"{error.context} {error.problem}", _YAML_PROBLEMS, _YAML_OTHERWISE)
        raise _unreadable(error.problem_mark, sentence) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        column = len(before) - before.rfind("\n")
        raise UnreadableError(before.count("\n") + 1, column, "a character that YAML does not allow") from None
    except (ValueError, OverflowError):
        # The scanner gives the digits of "\UFFFFFFFF" to chr() and those of %YAML 1.999… to int(), unchecked.
        raise _unreadable(builder.end, "behind this, an escape or a version number is out of range") from None
    return builder.root


class _Mark(Protocol):
    """A place in the text, counted from 0, as both of PyYAML's parsers give it."""

    line: int
    column: int


def _unreadable(mark: _Mark | None, sentence: str) -> UnreadableError:
    return UnreadableError(mark.line + 1 if mark else 1, mark.column + 1 if mark else 1, sentence)


_YAML_CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
}
_YAML_NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)")


def _scalar(event: ScalarEvent) -> Node:
    if not _is_plain(event):
        return event.value
    if event.value in _YAML_CONSTANTS:
        return _YAML_CONSTANTS[event.value]
    return Decimal(event.value) if _YAML_NUMBER.fullmatch(event.value) else event.value


def _key(event: ScalarEvent) -> str | Merge:
    return Merge.KEY if _is_plain(event) and event.value == Merge.KEY.value else event.value


def _is_plain(event: ScalarEvent) -> bool:
    return event.implicit[0]


class _Open:
    """A list or mapping whose end is not read yet, and in a mapping the key whose value comes next."""

    def __init__(self, node: list[Node] | Pairs, anchor: str | None) -> None:
        self.node = node
        self.anchor = anchor
        self.key: str | Merge | None = None

    def awaits_key(self) -> bool:
        return isinstance(self.node, Pairs) and self.key is None

    def add(self, node: Node) -> None:
        if not isinstance(self.node, Pairs):
            self.node.append(node)
        elif self.key is not None:
            self.node.append((self.key, node))
            self.key = None


class _NodeBuilder:
    """Builds the nodes of one document from YAML's events; what is open is a stack of its own."""

    def __init__(self) -> None:
        self.root: Node = None
        self.end: _Mark | None = None
        self._documents = 0
        self._open: list[_Open] = []
        self._anchors: dict[str, Node] = {}

    def take(self, event: Event) -> None:
        """Add what ``event`` brings."""
        self.end = event.end_mark
        if isinstance(event, DocumentStartEvent):
            self._start_document(event)
        elif isinstance(event, CollectionEndEvent):
            self._close()
        elif isinstance(event, NodeEvent):
            self._take_node(event)

    def _start_document(self, event: Event) -> None:
        self._documents += 1
        if self._documents > 1:
            self._refuse(event, "a second document starts here; write all namespaces in one")

    def _take_node(self, event: NodeEvent) -> None:
        if getattr(event, "tag", None) is not None:
            self._refuse(event, "tags (`!`) are not read; leave them out")
        if self._open and self._open[-1].awaits_key():
            self._open[-1].key = self._read_key(event)
        elif isinstance(event, AliasEvent):
            self._add(self._aliased(event), None)
        elif isinstance(event, ScalarEvent):
            self._add(_scalar(event), event.anchor)
        elif isinstance(event, CollectionStartEvent):
            self._open_collection(event)

    def _read_key(self, event: NodeEvent) -> str | Merge:
        if not isinstance(event, ScalarEvent):
            self._refuse(event, "a key must be text, not a list, a mapping or an alias")
        return _key(event)

    def _aliased(self, event: AliasEvent) -> Node:
        if event.anchor not in self._anchors:
            self._refuse(event, "this alias (`*`) stands for nothing, or for something that it is itself part of")
        return self._anchors[event.anchor]

    def _open_collection(self, event: CollectionStartEvent) -> None:
        if len(self._open) >= MAX_DEPTH:
            raise TooDeepError
        self._open.append(_Open(Pairs() if isinstance(event, MappingStartEvent) else [], event.anchor))

    def _close(self) -> None:
        closed = self._open.pop()
        self._add(closed.node, closed.anchor)

    def _add(self, node: Node, anchor: str | None) -> None:
        if anchor is not None:
            self._anchors[anchor] = node
        if self._open:
            self._open[-1].add(node)
        else:
            self.root = node

    def _refuse(self, event: Event, sentence: str) -> NoReturn:
        raise _unreadable(event.start_mark, sentence)
