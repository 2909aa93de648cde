"""Whole numbers written as Kubernetes quantities."""

from __future__ import annotations

import functools
import re
from decimal import Decimal

from kubernetes.utils.quantity import parse_quantity

_NUMBER = r"[+-]?(?=\.?[0-9])[0-9]{0,30}(\.[0-9]{0,30})?"
_GRAMMAR = re.compile(rf"{_NUMBER}([eE][+-]?[0-9]{{1,2}}|[numkMGTPE]|[KMGTPE]i)?", re.ASCII)

LONGEST = 40
"""Characters of a wrong quantity that its error shows."""


def parse(quantity: str | float) -> Decimal:
    """Return a quantity as an exact number.

    The grammar is apimachinery's (``pkg/api/resource/quantity.go``); it is held here too, because Python's numbers also
    take ``NaN``, ``1_000`` and other alphabets' digits.

    Raises:
        ValueError: it is no quantity.

    """
    text = str(quantity)
    if isinstance(quantity, bool) or not _GRAMMAR.fullmatch(text):
        shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
        raise ValueError(f"{shown!r} is no quantity")
    number: Decimal = parse_quantity(text)  # type: ignore[no-untyped-call]  # the client has no types here
    return number


@functools.lru_cache(maxsize=4096, typed=True)
def parse_whole(quantity: str | float) -> int:
    """Return a quantity that counts something: a whole number from 0 up to 2^53.

    Raises:
        ValueError: it is no quantity, negative, fractional or absurdly large; the message says which.

    """
    number = parse(quantity)
    if number < 0:
        raise ValueError(f"{quantity} is negative")
    if number != number.to_integral_value():
        raise ValueError(f"{quantity} is not a whole number")
    if number > 2**53:
        raise ValueError(f"{quantity} is larger than any cluster")
    return int(number)
