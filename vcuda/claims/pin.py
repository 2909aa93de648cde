"""Writes and reads pins. A pin is a CEL selector that limits a request of a claim to the products of one GPU model.

A pin first tests that a device has the product attribute. Without this test, one device without the attribute would
stop the scheduling of every pod that uses the claim. ``orValue`` is no alternative: the API server could not estimate
the cost of ``matches`` on the result of ``orValue``, and would reject the claim.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vcuda.claims.names import PRODUCT, PROFILE
from vcuda.requests.folding import fold

MAX_SELECTORS = 32
"""The API server's limit on the selectors of one request (DeviceSelectorsMaxSize in k8s.io/api `resource/v1`)."""

MAX_PIN_LENGTH = 2048
"""The most characters of a pin, the CEL expression that limits a claim to one GPU model. They are enough for about
forty products of the model. The API server allows expressions of 10 KiB (CELSelectorExpressionMaxLength)."""

# The MIG profiles in a pin (a selector for one GPU model) have at most this many characters together.
_MAX_PROFILES_LENGTH = 512

# In a regular expression of RE2, the library that CEL uses, a backslash must precede each character of `_SPECIAL`.
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
# Most drivers write the vendor's name before the product. But patterns lack it after `fold`, so it is optional here.
_OPEN, _CLOSE = "(?i)^(?:nvidia[ -])*(?:", ")$"


class ClaimPin(NamedTuple):
    """The content of a pin: a DRA driver, and the products and MIG profiles that the pin allows for its devices."""

    driver: str
    patterns: tuple[str, ...]
    """Folded patterns of product names. The product of a device must match one of the patterns."""
    profiles: tuple[str, ...] = ()
    """The MIG profiles that the pin allows; empty if it allows every profile."""


def write_pin(pin: ClaimPin) -> str:
    """Return a pin as a CEL expression. Patterns and profiles that exceed `MAX_PIN_LENGTH` characters are left out."""
    # A pin without some patterns of product names is safe, because it allows fewer devices. The last patterns are the
    # least important: they are products that were found on nodes.
    profiles = ", ".join(_fitting(map(_quote, pin.profiles), _MAX_PROFILES_LENGTH))
    room = MAX_PIN_LENGTH - len(_written(pin.driver, "", profiles))
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
        room -= len(_quote(text))  # The two quotes from `_quote` are counted in place of the separator.
        if room >= 0:
            yield text


def looks_like_pin(expression: str) -> bool:
    return len(expression) <= MAX_PIN_LENGTH and expression.startswith(_BEGINNING)


def read_claim_pin(expression: str) -> ClaimPin | None:
    """Return the pin in a CEL expression; None if the expression is not exactly as `write_pin` writes it."""
    found = _FORM.fullmatch(expression) if looks_like_pin(expression) else None
    if found is None:
        return None
    driver, pattern = _unquote(found[1]), _unquote(found[3])
    profiles = tuple(map(_unquote, re.findall(_TEXT, found[5]))) if found[5] else ()
    if not (pattern.startswith(_OPEN) and pattern.endswith(_CLOSE)):
        return None
    alternatives = _read_alternatives(pattern[len(_OPEN) : -len(_CLOSE)])
    pin = ClaimPin(driver, alternatives, profiles)
    # An expression that `write_pin` would not write may allow other devices. So it does not count as a pin, which
    # limits a claim to one GPU model.
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
