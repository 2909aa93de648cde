"""Finds the driver and the attribute values that a CEL selector requires of every device.

Only equalities such as ``device.driver == "gpu.nvidia.com"`` that ``&&`` joins at the top level are found. All other
CEL is ignored. That is safe, because an ignored condition can only narrow the devices for a request.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

# A CEL expression that contains an escape, a triple quote or a comment is ignored.
_UNREAD = re.compile(r"""\\|'''|\"\"\"|//""")
# Possessive quantifiers never backtrack, so the time to read a text is proportional to its length.
_PIECE = r"""(?>"[^"'\n]*+"|'[^"'\n]*+'|\w++|&&|\|\||[=!<>]=|[-+*/%<>!?:.,()\[\]{}])"""
_READABLE = re.compile(rf"\s*+(?:{_PIECE}\s*+)*+")
_TOKEN = re.compile(_PIECE)
_STEPS = {**dict.fromkeys("([{", 1), **dict.fromkeys(")]}", -1)}
_JOINTS = frozenset({"&&", "||", "?"})
_QUOTES = frozenset("\"'")

_DRIVER = re.compile(r'device\.driver=="([^"]*)"')
_ATTRIBUTE = re.compile(r'device\.attributes\["([^"]*)"\]\.(\w+)(?:==("[^"]*")| in \[((?:"[^"]*",?)+)\])')
_TEXT = re.compile(r'"([^"]*)"')

Attributes = Mapping[tuple[str, str], frozenset[str]]
"""The values that the attributes of a device may have. The key is the domain and the name of the attribute."""


class Facts(msgspec.Struct, frozen=True, gc=False):
    """The properties that a device must have to match CEL expressions."""

    driver: str | None = None
    """The driver that the device must have; None if the expression requires no driver."""
    attributes: Attributes = {}

    def only(self, domain: str | None, attribute: str) -> str | None:
        """Return the value that an attribute must have; None if it may have several values, or any value."""
        found = self.attributes.get((domain or "", attribute), frozenset())
        return next(iter(found)) if len(found) == 1 else None


def read_device_facts(expressions: Iterable[str]) -> Facts:
    """Return the properties that a device must have if all CEL ``expressions`` are true for the device."""
    driver: str | None = None
    attributes: dict[tuple[str, str], frozenset[str]] = {}
    for condition in (each for expression in expressions for each in _conditions(expression)):
        if found := _DRIVER.fullmatch(condition):
            driver = found[1]
        elif found := _ATTRIBUTE.fullmatch(condition):
            texts = frozenset(_TEXT.findall(found[3] or found[4]))
            attributes[found[1], found[2]] = texts & attributes.get((found[1], found[2]), texts)
    return Facts(driver, attributes)


def _conditions(expression: str) -> Iterator[str]:
    """Yield the device conditions that ``&&`` joins, without blanks and with double quotes only."""
    if _UNREAD.search(expression) or not _READABLE.fullmatch(expression):
        return
    tokens = _TOKEN.findall(expression)
    joints = _joints(tokens)
    # If `||` or `? :` joins conditions, the device need not match each of them. `.?` selects a field and joins nothing.
    if joints is None or any(
        tokens[at] == "||" or (tokens[at] == "?" and tokens[at - 1 : at] != ["."]) for at in joints
    ):
        return
    ands = [at for at in joints if tokens[at] == "&&"]
    for before, after in itertools.pairwise([-1, *ands, len(tokens)]):
        part = tokens[before + 1 : after]
        if part and part[0] == "device":
            quoted = (f'"{token[1:-1]}"' if token[0] in _QUOTES else token for token in part)
            # All blanks are removed, except around the operator `in`. Without blanks, `in` would merge with its
            # operands.
            yield "".join(" in " if token == "in" else token for token in quoted)  # noqa: S105  # a token of CEL


def _joints(tokens: Sequence[str]) -> list[int] | None:
    """Return the positions of ``&&``, ``||`` and ``?`` outside of brackets; None if the brackets are unbalanced."""
    joints, depth = [], 0
    for at, token in enumerate(tokens):
        if token in _STEPS:
            depth += _STEPS[token]
        elif depth == 0 and token in _JOINTS:
            joints.append(at)
    return joints if depth == 0 else None
