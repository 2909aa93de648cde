"""The selector that holds a claim's request to the products of one GPU model: how it is written, and read again.

It is guarded: without a guard one device that lacks the attribute stops the scheduling of every pod with the claim.
``orValue`` would do too, but the API server then finds no bound to the cost of ``matches``, and refuses the claim.
"""

import re
from collections.abc import Iterable, Iterator

import msgspec

from vcuda.claims.devices import PRODUCT, PROFILE
from vcuda.claims.objects import DeviceEntry
from vcuda.k8s_types import Operation
from vcuda.requests.resources import fold

MOST_SELECTORS = 32
"""As many a request may have (DeviceSelectorsMaxSize in k8s.io/api `resource/v1`)."""

# Characters of an expression, less what the rest of ours takes (CELSelectorExpressionMaxLength is 10 KiB).
MOST_CHARACTERS = 9 * 1024

# RE2 takes a backslash before any of these as the character itself.
_SPECIAL = frozenset(r"\.+()|[]{}^$")
_WILD = {"*": ".*", "?": ".", "-": "[ -]"}

_TEXT = r'"((?:[^"\\]|\\["\\])*)"'
_FORM = re.compile(
    rf'"{PRODUCT}" in device\.attributes\[{_TEXT}\] && device\.attributes\[{_TEXT}\]\.{PRODUCT}\.matches\({_TEXT}\)'
    rf'(?: && device\.attributes\[{_TEXT}\]\.\?{PROFILE}\.orValue\(""\) in \[((?:{_TEXT}(?:, )?)+)\])?'
)
_PIECE = re.compile(r"\\(.)|(\[ -\]|\.\*|\.|\|)|(.)", re.DOTALL)
_MEANING = {"[ -]": "-", ".*": "*", ".": "?"}
_OPEN, _CLOSE = "(?i)^(?:", ")$"


class ClaimPin(msgspec.Struct, frozen=True, gc=False):
    """What our selector demands of a driver's devices: a product of these patterns, and one of these MIG profiles.

    The patterns are folded. Without ``profiles`` any will do.
    """

    driver: str
    patterns: tuple[str, ...]
    profiles: tuple[str, ...] = ()


def write_pin(pin: ClaimPin) -> str:
    """Return the CEL expression; of patterns beyond what an expression may have, as many as there is room for."""
    # Left out are the last, which were only seen: to leave one out narrows.
    driver = _quote(pin.driver)
    attributes = f"device.attributes[{driver}]"
    pattern = _quote(f"{_OPEN}{'|'.join(_fitting(pin.patterns))}{_CLOSE}")
    products = f'"{PRODUCT}" in {attributes} && {attributes}.{PRODUCT}.matches({pattern})'
    if not pin.profiles:
        return products
    return f'{products} && {attributes}.?{PROFILE}.orValue("") in [{", ".join(map(_quote, pin.profiles))}]'


def _fitting(patterns: Iterable[str]) -> Iterator[str]:
    room = MOST_CHARACTERS
    for pattern in patterns:
        written = "".join(_WILD.get(each) or (f"\\{each}" if each in _SPECIAL else each) for each in pattern)
        room -= len(_quote(written))
        if room >= 0:
            yield written


def read_pin(expression: str) -> ClaimPin | None:
    """Return what an expression demands that is exactly as we write it; None for every other."""
    found = _FORM.fullmatch(expression)
    if found is None:
        return None
    driver, pattern = _unquote(found[1]), _unquote(found[3])
    profiles = tuple(map(_unquote, re.findall(_TEXT, found[5]))) if found[5] else ()
    if not (pattern.startswith(_OPEN) and pattern.endswith(_CLOSE)):
        return None
    alternatives = _read_alternatives(pattern[len(_OPEN) : -len(_CLOSE)])
    pin = ClaimPin(driver, alternatives, profiles)
    # Whatever could be read in another way than it is written is none of ours.
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


def pins_of(entry: DeviceEntry, driver: str) -> tuple[ClaimPin, ...]:
    """Return every selector of this form that a request has for the devices of a driver; all of them hold."""
    return tuple(pin for each in entry.expressions if (pin := read_pin(each)) and pin.driver == driver)


def add_selector(path: str, entry: DeviceEntry, expression: str) -> Operation:
    """Return the operation that adds a selector to the entry at this JSON Pointer."""
    selector = {"cel": {"expression": expression}}
    if entry.selectors:
        return {"op": "add", "path": f"{path}/selectors/-", "value": selector}
    return {"op": "add", "path": f"{path}/selectors", "value": [selector]}
