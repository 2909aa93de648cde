"""Parses the text of a quota document, JSON or YAML, into plain mappings, lists and scalars.

Aliases and merge keys are resolved here, up to a maximal size. Duplicate keys are reported, because most YAML and JSON
parsers silently keep the last one.
"""

import functools
import json
import re
from decimal import Context, Decimal
from typing import Any, NoReturn

import yaml
from yaml.composer import Composer

from vcuda.errors import Fault, QuotaFault

MAX_TEXT = 1024 * 1024
"""The maximum number of characters of a quota document. Kubernetes limits the data of a ConfigMap to 1 MiB."""
MAX_ENTRIES = 200_000
"""The maximum number of keys and list items of a document. An alias's content counts at each use of the alias."""
MAX_DEPTH = 16
"""The maximum number of levels of nesting. A quota document has four levels, and merge keys may need more."""

Plain = None | bool | Decimal | str | list["Plain"] | dict[str, "Plain"]
KeyPath = tuple[str | int, ...]


PathFault = tuple[KeyPath, str]
"""A fault in a document: the keys and list positions that lead to the faulty value, and the message."""


def read_content(text: str) -> tuple[Plain, tuple[PathFault, ...]]:
    """Return the content of a document (None if empty) and its faults. Raises QuotaFault if it cannot be parsed."""
    if len(text) > MAX_TEXT:
        _reject(f"the document must not be longer than {MAX_TEXT} characters; got {len(text)}")
    walk = _Walk()
    try:
        tree = walk.plain(_parse(_encodable(text.removeprefix("\ufeff"))), (), 0)
    except UnreadableError as error:
        _reject(str(error))
    except RecursionError:
        _reject(f"the document must not have more than {MAX_DEPTH} levels of nesting; a quota needs four levels")
    return tree, tuple(dict.fromkeys(walk.faults))


def _reject(sentence: str) -> NoReturn:
    raise QuotaFault((Fault("", sentence),)) from None


class UnreadableError(Exception):
    """The text cannot be parsed. The message has the line and the column, both counted from 1."""

    def __init__(self, line: int, column: int, sentence: str) -> None:
        super().__init__(f"line {line}, column {column}: {sentence}")
        self.line = line


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as a list of all its keys and values in order, including duplicate keys."""


def _parse(text: str) -> Any:
    """Return the parse tree. A text that begins with a brace is first parsed as JSON, because YAML forbids tabs."""
    if not text.lstrip().startswith("{"):
        return _parse_yaml(text)
    try:
        return _parse_json(text)
    except UnreadableError as as_json:
        try:
            return _parse_yaml(text)
        except UnreadableError as as_yaml:
            # Report the JSON or YAML error that is later in the text. On the same line, the JSON error is more exact.
            raise max(as_json, as_yaml, key=lambda error: error.line) from None


def _parse_json(text: str) -> Any:
    # A number becomes a Decimal, so that 0.29 cards are exactly 29 hundredths. A number that is too large becomes NaN.
    number = functools.partial(Decimal, context=Context(traps=[]))
    try:
        return json.loads(text, object_pairs_hook=_Pairs, parse_int=Decimal, parse_float=number, parse_constant=Decimal)
    except json.JSONDecodeError as error:
        raise UnreadableError(error.lineno, error.colno, error.msg) from None


def _parse_yaml(text: str) -> yaml.Node | None:
    composer = _BoundedComposer(text)
    try:
        root = composer.get_node() if composer.check_node() else None
        if composer.check_node():
            second: Any = composer.peek_event()
            message = "a second YAML document starts here. All namespaces must be in one document"
            raise _unreadable(text, second.start_mark.index, message)
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark.index if error.problem_mark else 0
        message = f"{error.problem} {error.context or ''}".strip()
        # libyaml and kubectl reject `{quota:{A100: 8}}`. A space must follow the colon, unless the key is in quotes.
        if re.match(r":\S", text[at:]):
            message = f"{message}. A space must follow the colon"
        elif text[at : at + 1] == "\t":
            message = f"{message}. Lines must be indented with spaces, not with tabs"
        raise _unreadable(text, at, message) from None
    except yaml.reader.ReaderError as error:
        at = len(text.encode()[: error.position].decode(errors="ignore"))  # libyaml reports the position in bytes
        raise _unreadable(text, at, "YAML does not allow this character") from None
    finally:
        composer.dispose()
    return root


def _unreadable(text: str, at: int, sentence: str) -> UnreadableError:
    # The line number from libyaml is not used, because it is after the last line if the YAML text ends too early.
    before = text[:at]
    return UnreadableError(before.count("\n") + 1, len(before) - before.rfind("\n"), sentence)


class _BoundedComposer(Composer, yaml.CBaseLoader):
    """PyYAML's composer with libyaml's parser. It rejects a document that PyYAML could never finish processing.

    All wheels of PyYAML contain libyaml. Without libyaml, one document could block the interpreter for several seconds.
    """

    def __init__(self, text: str) -> None:
        yaml.CBaseLoader.__init__(self, text)
        Composer.__init__(self)
        self._text = text
        self._depth = 0
        self._nodes = 0
        self._closed: set[str] = set()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose the next node. PyYAML calls this method for every node, including nested nodes."""
        event: Any = self.peek_event()
        fault = self._fault_of(event, is_key=index is None and isinstance(parent, yaml.MappingNode))
        if fault:
            raise _unreadable(self._text, event.start_mark.index, fault)
        self._nodes += 1
        # An entry (key or list item) has at most two YAML nodes. So a document with more than twice `MAX_ENTRIES` nodes
        # has too many entries. Later, `_Walk` counts the entries exactly.
        if self._nodes > 2 * MAX_ENTRIES + 1:
            _reject(_TOO_MANY)
        if self._depth > MAX_DEPTH:
            raise RecursionError
        anchor = None if isinstance(event, yaml.AliasEvent) else event.anchor
        # YAML allows an anchor to be defined again (YAML 1.2, 3.2.2.2). PyYAML does not, so remove the earlier anchor.
        self.anchors.pop(anchor, None)
        self._closed.discard(anchor or "")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._closed.add(anchor or "")
        return node

    def _fault_of(self, event: Any, *, is_key: bool) -> str | None:
        if getattr(event, "tag", None) is not None:
            return "tags (`!`) are not supported and must be removed"
        if is_key and not isinstance(event, yaml.ScalarEvent):
            return "a key must be text, not a list, a mapping or an alias"
        # PyYAML accepts a list or mapping that contains itself. `_Walk` would never end for such a value, so reject it
        # here.
        if isinstance(event, yaml.AliasEvent) and event.anchor not in self._closed:
            return "an alias must be after its anchor, and not inside the anchored value"
        return None


_TOO_MANY = f"the document must not have more than {MAX_ENTRIES} entries, including those that aliases repeat"


class _Walk:
    """Converts nodes of YAML or JSON to plain values, and collects the faults."""

    def __init__(self) -> None:
        self.faults: list[PathFault] = []
        self._entries = 0

    def plain(self, node: Any, path: KeyPath, depth: int) -> Plain:
        """Return ``node`` as a plain value, without merge keys and duplicate keys. ``depth``: its level of nesting."""
        children = node.value if isinstance(node, yaml.CollectionNode) else node
        if not isinstance(children, list):
            return _scalar(node)
        self._count(len(children), depth)
        if isinstance(node, yaml.MappingNode | _Pairs):
            return self._mapping(children, path, depth + 1)
        return [self.plain(item, (*path, at), depth + 1) for at, item in enumerate(children)]

    def _count(self, entries: int, depth: int) -> None:
        # Each use of a YAML alias counts as a full copy: ten lines with ten aliases each can make 10^10 entries.
        self._entries += entries
        if self._entries > MAX_ENTRIES:
            _reject(_TOO_MANY)
        if depth >= MAX_DEPTH:
            raise RecursionError

    def _mapping(self, pairs: list[tuple[Any, Any]], path: KeyPath, depth: int) -> Plain:
        own: dict[str, Plain] = {}
        merged: list[Any] = []
        for key, node in pairs:
            if isinstance(key, yaml.ScalarNode) and key.value == "<<" and not key.style:
                merged.append(node)
                continue
            name = _encodable(key.value if isinstance(key, yaml.ScalarNode) else key)
            if name in own:
                self.faults.append(((*path, name), "duplicate key; each key must be written once"))
            else:
                own[name] = self.plain(node, (*path, name), depth)
        if len(merged) > 1:
            fault = "duplicate key; write one key `<<` with a list, for example <<: [*a, *b]"
            self.faults.append(((*path, "<<"), fault))
        for node in merged:
            self._merge(own, node, path, depth)
        return own

    def _merge(self, own: dict[str, Plain], node: yaml.Node, path: KeyPath, depth: int) -> None:
        """Add the content of a merge key (``<<``) to ``own``. As YAML specifies, existing keys are not replaced."""
        self._count(1, depth)
        for source in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            inherited = self.plain(source, path, depth)
            if not isinstance(inherited, dict):
                self.faults.append(((*path, "<<"), "must be an alias of a mapping, for example <<: *name"))
                continue
            for key, value in inherited.items():
                own.setdefault(key, value)


_YAML_CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
}
_YAML_NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)")
_SURROGATES = re.compile("[\ud800-\udfff]")


def _scalar(node: Any) -> Plain:
    # YAML 1.1 reads `010` as 8, `1_000` as 1000 and `no` as false, which would hide mistakes. So they stay strings.
    if not isinstance(node, yaml.ScalarNode):
        return _encodable(node) if isinstance(node, str) else node
    text: str = node.value
    if node.style:
        return _encodable(text)
    if text in _YAML_CONSTANTS:
        return _YAML_CONSTANTS[text]
    return Decimal(text) if _YAML_NUMBER.fullmatch(text) else text


def _encodable(text: str) -> str:
    """Replace each unpaired UTF-16 surrogate, which cannot be encoded, by a character that no name may contain."""
    return _SURROGATES.sub("\ufffd", text)
