"""The text of a quota document, JSON or YAML, read into plain mappings, lists and scalars.

Aliases and merge keys are resolved here, within a bound, and keys that are written twice are found: the usual loaders
keep the last one silently.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import NamedTuple, NoReturn

from vcuda.errors import Fault, QuotaFault
from vcuda.quota_syntax import MAX_DEPTH, Merge, Node, Pairs, TooDeepError, UnreadableError, parse

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
    builder = _Builder()
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


class _Builder:
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
