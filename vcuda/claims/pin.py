"""Writes and reads pins. A pin is a selector that limits a request of a claim to the products of one GPU model.

A pin begins with a test that the attribute exists. Without this test, one device without the attribute would stop the
scheduling of every pod that uses the claim. ``orValue`` would work too, but then the API server finds no bound for the
cost of ``matches``, and rejects the claim.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vcuda.claims.names import PRODUCT, PROFILE
from vcuda.requests.folding import fold

MOST_SELECTORS = 32
"""The most selectors in one request by the API server (DeviceSelectorsMaxSize in k8s.io/api `resource/v1`)."""

LONGEST_PIN = 2048
"""The most characters of a pin that is written or read. The API server allows 10 KiB (CELSelectorExpressionMaxLength).
2 KiB have room for some forty products of one model."""

# The most characters of the MIG profiles in a pin.
_MOST_OF_PROFILES = 512

# RE2 reads a backslash and one of these characters as the character itself.
_SPECIAL = frozenset(r"\.+()|[]{}^$")
_WILD = {"*": ".*", "?": ".", "-": "[ -]"}

_TEXT = r'"((?:[^"\\]|\\["\\])*)"'
_FORM = re.compile(
    rf'"{PRODUCT}" in device\.attributes\[{_TEXT}\] && device\.attributes\[{_TEXT}\]\.{PRODUCT}\.matches\({_TEXT}\)'
    rf'(?: && device\.attributes\[{_TEXT}\]\.\?{PROFILE}\.orValue\(""\) in \[((?:{_TEXT}(?:, )?)+)\])?'
)
_BEGINNING = f'"{PRODUCT}" in device.attributes['
_PIECE = re.compile(r"\\(.)|(\[ -\]|\.\*|\.|\|)|(.)", re.DOTALL)
_MEANING = {"[ -]": "-", ".*": "*", ".": "?"}
_OPEN, _CLOSE = "(?i)^(?:", ")$"


class ClaimPin(NamedTuple):
    """The demand of a pin on the devices of a driver."""

    driver: str
    patterns: tuple[str, ...]
    """Folded patterns. The product of a device must match one of them."""
    profiles: tuple[str, ...] = ()
    """MIG profiles. A device must have one of them; empty if any profile is allowed."""


def write_pin(pin: ClaimPin) -> str:
    """Return the CEL expression of a pin, with as many patterns and profiles as `LONGEST_PIN` has room for."""
    # The last patterns are products that were only seen on nodes. To leave them out narrows the devices.
    profiles = ", ".join(_fitting(map(_quote, pin.profiles), _MOST_OF_PROFILES))
    room = LONGEST_PIN - len(_written(pin.driver, "", profiles))
    escaped = (
        "".join(_WILD.get(each) or (f"\\{each}" if each in _SPECIAL else each) for each in pattern)
        for pattern in pin.patterns
    )
    return _written(pin.driver, "|".join(_fitting(escaped, room)), profiles)


def _written(driver: str, alternatives: str, profiles: str) -> str:
    attributes = f"device.attributes[{_quote(driver)}]"
    pattern = _quote(f"{_OPEN}{alternatives}{_CLOSE}")
    products = f'"{PRODUCT}" in {attributes} && {attributes}.{PRODUCT}.matches({pattern})'
    return f'{products} && {attributes}.?{PROFILE}.orValue("") in [{profiles}]' if profiles else products


def _fitting(texts: Iterable[str], room: int) -> Iterator[str]:
    for text in texts:
        room -= len(_quote(text))  # the separator is no longer than the quotes
        if room >= 0:
            yield text


def looks_like_pin(expression: str) -> bool:
    return len(expression) <= LONGEST_PIN and expression.startswith(_BEGINNING)


def read_pin(expression: str) -> ClaimPin | None:
    """Return the pin in an expression; None if `write_pin` could not have written this expression."""
    found = _FORM.fullmatch(expression) if looks_like_pin(expression) else None
    if found is None:
        return None
    driver, pattern = _unquote(found[1]), _unquote(found[3])
    profiles = tuple(map(_unquote, re.findall(_TEXT, found[5]))) if found[5] else ()
    if not (pattern.startswith(_OPEN) and pattern.endswith(_CLOSE)):
        return None
    alternatives = _read_alternatives(pattern[len(_OPEN) : -len(_CLOSE)])
    pin = ClaimPin(driver, alternatives, profiles)
    # An expression is not a pin if `write_pin` would write it differently.
    return pin if write_pin(pin) == expression else None


def _read_alternatives(text: str) -> tuple[str, ...]:
    patterns = [""]
    for literal, special, plain in _PIECE.findall(text):
        if special == "|":
            patterns.append("")
        else:
            patterns[-1] += literal or _MEANING.get(special) or plain
    return tuple(map(fold, patterns))


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _unquote(text: str) -> str:
    return re.sub(r'\\(["\\])', r"\1", text)
