"""What a CEL expression certainly demands of a device: the equalities that stand in it, joined by ``&&``.

CEL is not evaluated here. What is not recognized says nothing; it can only narrow what a request may get.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

# Strings with escapes, prefixes or three quotes, and comments, are not read: an expression that has any says nothing.
_UNREAD = re.compile(r"""\\|'''|\"\"\"|//""")
_TOKEN = re.compile(r"""\s*(?:("[^"'\n]*"|'[^"'\n]*')|(\w+|&&|\|\||[=!<>]=|[-+*/%<>!?:.,()\[\]{}]))\s*""")

_OPERATORS = {"in": " in "}  # the one that is a word, and must not run into another

_DRIVER = re.compile(r'device\.driver=="([^"]*)"')
_ATTRIBUTE = re.compile(r'device\.attributes\["([^"]*)"\]\.(\w+)(?:==("[^"]*")| in \[((?:"[^"]*",?)+)\])')
_TEXT = re.compile(r'"([^"]*)"')


class Facts(msgspec.Struct, frozen=True, gc=False):
    """What every device that passes has: this driver (None: not said), and by domain and attribute of these texts."""

    driver: str | None = None
    attributes: Mapping[tuple[str, str], frozenset[str]] = {}

    def only(self, domain: str | None, attribute: str) -> str | None:
        """Return the one text that an attribute must have, or None where none or more than one is said."""
        found = self.attributes.get((domain or "", attribute), frozenset())
        return next(iter(found)) if len(found) == 1 else None


def read_facts(expressions: Iterable[str]) -> Facts:
    """Return what all these expressions, which must all hold, certainly demand."""
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
    """Yield the parts that ``&&`` joins, without spaces, with double quotes; nothing where it is not sure of them."""
    parts: list[list[str]] = [[]]
    depth, before = 0, ""
    for part in _tokens(expression):
        depth += (part in "([{") - (part in ")]}")
        # An alternative at the top: then no single part has to hold. A question mark after a dot is only a safe access.
        if depth == 0 and (part == "||" or (part == "?" and before != ".")):
            return
        if depth == 0 and part == "&&":
            parts.append([])
        else:
            parts[-1].append(part)
        before = part
    if depth == 0:
        yield from ("".join(part) for part in parts)


def _tokens(expression: str) -> list[str]:
    if _UNREAD.search(expression):
        return []
    tokens, at = [], 0
    while at < len(expression):
        found = _TOKEN.match(expression, at)
        if found is None:
            return []
        tokens.append(f'"{found[1][1:-1]}"' if found[1] else _OPERATORS.get(found[2], found[2]))
        at = found.end()
    return tokens
