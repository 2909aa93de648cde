"""The single values of a quota document, each checked: names, modes, numbers of cards, amounts of memory.

Each check raises WrongValueError with a sentence that is read behind the value's path and says what to write instead.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from decimal import ROUND_DOWN, Context, Decimal, Inexact

from vcuda import quantities
from vcuda.quota.model import Mode

MAX_CARDS = 100_000
"""Cards in one limit: 5,000 nodes, the most that Kubernetes supports, with 20 cards each."""
MAX_MEMORY = MAX_CARDS * 1024 * 1024
"""MiB in one limit: 1 TiB for each of MAX_CARDS."""
DEFAULT = "*"
"""The key of the entry for namespaces without their own."""

_MIB = 1024 * 1024
_MAX_SHOWN = 63
_DNS_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9](?:[-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?")
_CARDS_AS_TEXT = re.compile(r"\s*0*([0-9]{1,6}(?:\.[0-9]{1,2})?)\s*", re.ASCII)
_MEMORY_AS_TEXT = re.compile(r"[0-9.]+ ?[KMGTPE]i?B?")


class WrongValueError(ValueError):
    """This cannot stand here; a ValueError, because those are what pydantic gathers."""


NO_NAMESPACE = (
    "can never be a namespace; write at most 63 lower-case letters, digits and `-`, with a letter or digit at both ends"
)
"""What is said of a name that no namespace can have."""


def is_namespace_name(name: object) -> bool:
    """Return whether it is a DNS label of RFC 1123, as the name of every namespace is (Kubernetes documentation)."""
    return isinstance(name, str) and _DNS_LABEL.fullmatch(name) is not None


def namespace_name(name: str) -> str:
    """Return ``name`` if it is ``*`` or can be a namespace's.

    The entry of any other would silently never apply.
    """
    if name != DEFAULT and not is_namespace_name(name):
        raise WrongValueError(f"{NO_NAMESPACE}, or `*` for every namespace without its own entry")
    return name


def label_value(name: object) -> str:
    """Return the name of a model or pool if it can be the value of a node's label, which it is; empty it cannot be."""
    if not isinstance(name, str):
        raise WrongValueError(f"{shown(name)} is no text; write a name, in quotes")
    if not _LABEL_VALUE.fullmatch(name):
        raise WrongValueError(
            f"{shown(name)} can never be a node label's value; write at most 63 letters, digits, `-`, `_` and `.`, "
            "with a letter or digit at both ends"
        )
    return name


def mode(value: object) -> Mode:
    """Return the mode of this name."""
    if isinstance(value, str) and value in list(Mode):
        return Mode(value)
    raise WrongValueError(f"{shown(value)} is no mode; {suggestion(value, Mode) or 'write enforce, warn or audit'}")


def cores(value: object) -> int:
    """Return the hundredths of a card that a number of cards makes: from 0 to MAX_CARDS, two decimals at most."""
    if not isinstance(value, Decimal):
        raise WrongValueError(_no_cards(value))
    if not value.is_finite() or not 0 <= value <= MAX_CARDS:
        raise WrongValueError(f"{shown(value)} is no possible number of cards; write one from 0 to {MAX_CARDS}")
    try:
        hundredths = value.quantize(Decimal("0.01"), context=Context(traps=[Inexact]))
    except Inexact:
        rounded = value.quantize(Decimal("0.01"), ROUND_DOWN).normalize()
        raise WrongValueError(f"{shown(value)} has more than two decimals; write {rounded:f}") from None
    return int(hundredths * 100)


def _no_cards(value: object) -> str:
    """Return what to write instead of this, which is no number."""
    if isinstance(value, str):
        number = _CARDS_AS_TEXT.fullmatch(value)
        if number:
            return f"{shown(value)} is text; write {number[1]} without quotes"
        if _MEMORY_AS_TEXT.fullmatch(value):
            return f"{shown(value)} is no number of cards; write memory beside it: {{cards: 4, memory: 160Gi}}"
    return f"{shown(value)} is no number of cards; write one such as 8 or 2.5"


def memory(value: object) -> int:
    """Return the whole MiB, rounded down, of a Kubernetes quantity in bytes: from 1 to MAX_MEMORY."""
    amount = _bytes(value)
    if amount is None:
        raise WrongValueError(f"{shown(value)} is no amount of memory; write one such as 160Gi")
    if not 0 <= amount <= MAX_MEMORY * _MIB:
        raise WrongValueError(f"{shown(value)} is no possible amount of memory; write one up to {MAX_MEMORY // 1024}Gi")
    if amount == 0:
        raise WrongValueError(
            "0 leaves no memory; leave `memory` out for no limit, or write 0 cards to block the model"
        )
    if amount < _MIB:
        raise WrongValueError(f"{shown(value)} is less than 1 MiB; {_with_unit(value)}")
    return int(amount // _MIB)


def _bytes(value: object) -> Decimal | None:
    """Return the bytes, None for what is no quantity."""
    if isinstance(value, Decimal):
        return value if value.is_finite() else None
    try:
        return quantities.parse(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _with_unit(value: object) -> str:
    bare = re.fullmatch(r"[0-9]+(\.[0-9]+)?", str(value))
    return f"a number without a unit is bytes: write {value}Gi" if bare else "write one such as 160Gi"


def shown(value: object) -> str:
    """Return ``value`` in a form that fits into a sentence: short, on one line, printable."""
    match value:
        case None:
            return "an empty value"
        case bool():
            return str(value).lower()
        case str():
            return f'"{printable(value)}"'
        case Decimal():
            return printable(str(value))
        case list():
            return "a list"
    return "a mapping"


def printable(text: str) -> str:
    """Return ``text`` cut to the length of the longest possible name, control characters escaped."""
    cut = text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)


def suggestion(written: object, known: Iterable[str]) -> str:
    """Return a question that names the one of ``known`` that resembles ``written``; empty if none does."""
    if not isinstance(written, str) or len(written) > _MAX_SHOWN:
        return ""
    near = difflib.get_close_matches(written.lower(), known, n=1)
    return f"did you mean `{near[0]}`?" if near else ""
