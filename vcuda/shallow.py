"""Removes from the JSON of Kubernetes objects the parts that decoders cannot read.

The API server stores any JSON up to 10,000 levels deep in some fields, for example in ``managedFields`` and in the
parameters of ResourceClaims. msgspec and Python's json fail at about 1,000 levels, even in a field that is not read.
msgspec also fails at half of a surrogate pair.
"""

import re

DEEPEST = 64
"""The most levels of a text that `shallow` keeps. The fields of objects that are read have less than 20 levels."""

_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_FLAT = rb'(?:[^"\[\]{}]++|%b)*+' % _STRING
FLAT_LEVELS = 4
"""The levels of lists and objects that one match can contain, because a step of Python for each level is slow."""
for _ in range(FLAT_LEVELS):
    _FLAT = rb'(?:[^"\[\]{}]++|%b|[\[{]%b[\]}])*+' % (_STRING, _FLAT)
_NEXT_BRACKETS = re.compile(rb"%b([\[{]++|[\]}]++)" % _FLAT, re.DOTALL)

# This matches JSON up to an escape of half a surrogate pair, which is no character. Backslashes occur only in strings.
_CHARACTERS = re.compile(rb"(?:[^\\]++|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\(?!u[dD][89a-fA-F]).)*+", re.DOTALL)
_HALF = len(rb"\ud800")


def shallow(text: bytes) -> bytes:
    """Return JSON text without the deepest values, and without halves of surrogate pairs.

    Values up to `DEEPEST` levels deep are kept. Values more than `FLAT_LEVELS` levels deeper are removed. A value
    between these depths may be kept or removed. ``null`` replaces each removed value. The time is linear in the length
    of the text, and nothing is called recursively.
    """
    kept = _without_depth(text)
    return _without_halves(kept) if rb"\ud" in kept or rb"\uD" in kept else kept


def _without_depth(text: bytes) -> bytes:
    kept: list[bytes] = []
    depth = start = end = 0
    while found := _NEXT_BRACKETS.match(text, end):
        first, end = found.span(1)
        before, depth = depth, depth + (end - first if text[first] in b"[{" else first - end)
        if before <= DEEPEST < depth:
            kept += text[start : first + DEEPEST - before], b"null"
        elif depth <= DEEPEST < before:
            start = first + before - DEEPEST
    kept.append(text[start:])
    return b"".join(kept)


def _without_halves(text: bytes) -> bytes:
    kept: list[bytes] = []
    start = 0
    while (found := _CHARACTERS.match(text, start)) and found.end() < len(text):
        kept += text[start : found.end()], rb"\ufffd"
        start = found.end() + _HALF
    kept.append(text[start:])
    return b"".join(kept)
