"""Checks and converts the values in a quota document: cards, memory and names."""

import contextlib
import difflib
import re
from collections.abc import Collection, Iterable
from decimal import ROUND_UP, Context, Decimal, Inexact
from typing import Annotated

import pydantic
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError, ValidationError

from vcuda import k8s_types
from vcuda.errors import cut
from vcuda.quota.yaml import KeyPath

MAX_CARDS = 100_000
"""The most cards in one limit. Kubernetes supports at most 5,000 nodes, and a node rarely has more than 20 cards."""
MAX_MEMORY = MAX_CARDS * 1024 * 1024
"""The most MiB of GPU memory in one limit: 1 TiB for each of `MAX_CARDS` cards."""

MIB = 1024 * 1024
_MAX_SHOWN = 63
_LABEL_VALUE = re.compile(r"[A-Za-z0-9](?:[-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?")
_CARDS_AS_TEXT = re.compile(r"\s*0*([0-9]{1,6}(?:\.[0-9]{1,2})?)\s*", re.ASCII)
_MEMORY_AS_TEXT = re.compile(r"[0-9.]+ ?[KMGTPE]i?B?")


class WrongValueError(ValueError):
    """A value in the quota document is invalid. The class is a ValueError because pydantic collects ValueErrors."""


def listed(names: Collection[str], most: int) -> str:
    """Return a text with the first ``most`` names and the number of the remaining names; ``none`` for no names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(map(cut, [*names][:most]))}{more}" or "none"


def read_label_value(name: object) -> str:
    """Return the name of a model or pool. Raises WrongValueError if it is not a valid value of a node label."""
    if not isinstance(name, str):
        raise WrongValueError(f"must be a string, so the name must be in quotes; got {brief(name)}")
    # Kubernetes allows an empty label value. But a node with an empty model label has no model. So "" is rejected.
    if not _LABEL_VALUE.fullmatch(name):
        raise WrongValueError(
            "must be a valid value of a node label: at most 63 letters, digits, `-`, `_` and `.`, with a letter or "
            f"digit at both ends; got {brief(name)}"
        )
    return name


def read_cores(value: object) -> int:
    """Convert a number of cards (0 to MAX_CARDS, at most two decimals) to hundredths of a card."""
    return int(100 * read_cards(value, 2))


def read_cards(value: object, decimals: int) -> Decimal:
    """Return a number of cards from 0 to MAX_CARDS, with at most ``decimals`` decimals. Raises WrongValueError."""
    if not isinstance(value, Decimal):
        raise WrongValueError(_no_cards(value))
    if not value.is_finite() or not 0 <= value <= MAX_CARDS:
        raise WrongValueError(f"must be a number of cards between 0 and {MAX_CARDS}; got {brief(value)}")
    # Numbers are never rounded. For example, a rounded 2.555 would be more or less than the author wrote.
    step = Decimal(1).scaleb(-decimals)
    try:
        return value.quantize(step, context=Context(traps=[Inexact]))
    except Inexact:
        rounded, most = value.quantize(step, ROUND_UP).normalize(), {2: "two", 6: "six"}[decimals]
        raise WrongValueError(
            f"must have at most {most} decimals, for example {rounded:f}; got {brief(value)}"
        ) from None


def _no_cards(value: object) -> str:
    # A string is never converted to a number: YAML parsers disagree whether 010 and 1:30 are numbers or strings.
    if isinstance(value, str):
        number = _CARDS_AS_TEXT.fullmatch(value)
        if number:
            return f"must be a number without quotes, for example {number[1]}; got {brief(value)}"
        if _MEMORY_AS_TEXT.fullmatch(value):
            return f"must be a number of cards, or for example {{cards: 4, memory: 160Gi}}; got {brief(value)}"
    return f"must be a number of cards, for example 8 or 2.5; got {brief(value)}"


def read_memory(value: object) -> int:
    """Convert a Kubernetes quantity, such as 160Gi, to MiB, rounded down. It must be from 1 to MAX_MEMORY MiB."""
    return int(read_bytes(value) // MIB)


def read_bytes(value: object) -> Decimal:
    """Convert a Kubernetes quantity, such as 160Gi, to bytes. It must be from 1 to MAX_MEMORY MiB."""
    amount = value
    with contextlib.suppress(ValueError):
        amount = k8s_types.parse_quantity(value) if isinstance(value, str) else value
    if not isinstance(amount, Decimal) or not amount.is_finite():
        raise WrongValueError(f"must be an amount of memory, for example 160Gi; got {brief(value)}")
    if not 0 <= amount <= MAX_MEMORY * MIB:
        raise WrongValueError(f"must be an amount of memory between 1Mi and {MAX_MEMORY // 1024}Gi; got {brief(value)}")
    if amount == 0:
        raise WrongValueError("must not be 0. For no limit, omit `memory`. To block the model, write `cards: 0`")
    if amount < MIB:
        # An amount below 1 MiB is a mistake. For example, 160 means 160 bytes, but its author meant 160Gi.
        if re.fullmatch(r"[0-9]+(\.[0-9]+)?", str(value)):
            example = f"{value}{'Mi' if amount >= 1 else 'Gi'}, because a number without a unit is in bytes"
            raise WrongValueError(f"must have a unit, for example {example}; got {brief(value)}")
        raise WrongValueError(f"must be at least 1Mi, for example 160Gi; got {brief(value)}")
    return amount


def brief(value: object) -> str:
    """Return ``value`` as a short, printable text on one line, for a message."""
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
    """Return ``text`` with control characters escaped, cut to 63 characters, the length of the longest name."""
    cut = text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)


def suggestion(written: object, known: Iterable[str]) -> str:
    """Return "did you mean …?" with the most similar name in ``known``; an empty text if no name is similar."""
    if not isinstance(written, str) or len(written) > _MAX_SHOWN:
        return ""
    by_folded = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(written.casefold(), by_folded, n=1)
    return f"did you mean `{by_folded[near[0]]}`?" if near else ""


def raise_faults(faults: Iterable[tuple[KeyPath, str]]) -> None:
    """Raise pydantic's ValidationError with all ``faults``, pairs of path and message, if there are any."""
    lines = [
        InitErrorDetails(type=PydanticCustomError("value_error", "{error}", {"error": why}), loc=path, input=None)
        for path, why in faults
    ]
    if lines:
        raise ValidationError.from_exception_data("quota", lines)


def sentence(details: ErrorDetails, entry: type[pydantic.BaseModel], must_be: str, also: str = "") -> str:
    """Return the message for a fault that pydantic has found.

    A validator of this project states its own message. The message about an unknown key suggests a similar key, or
    lists the keys of ``entry`` and adds the sentence ``also``. Every other message is ``must_be`` with the wrong value.
    """
    match details["type"]:
        case "value_error":
            return str(details["ctx"]["error"])
        case "extra_forbidden":
            keys = [field.alias or name for name, field in entry.model_fields.items()]
            supported = f"supported keys: {quoted(keys)}{also and f'. {also}'}"
            return f"unknown key; {suggestion(details['loc'][-1], keys) or supported}"
        case "bool_type":
            must_be = "must be true or false"
    return f"{must_be}; got {brief(details['input'])}"


def quoted(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


class StrictModel(pydantic.BaseModel):
    """The base class for mappings in the quota ConfigMap. Every unknown key is a fault."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True)


class LimitEntry(StrictModel):
    """A limit in its long form, for example ``{cards: 4, memory: 160Gi}``. A key that is left out sets no limit."""

    cards: Annotated[int | None, pydantic.PlainValidator(read_cores)] = None
    memory: Annotated[int | None, pydantic.PlainValidator(read_memory)] = None

    @pydantic.model_validator(mode="after")
    def _limits_something(self) -> "LimitEntry":
        if self.cards is None and self.memory is None:
            raise WrongValueError("must have `cards`, `memory`, or both, for example {cards: 4, memory: 160Gi}")
        return self


def read_limit(value: object, read_long_form: pydantic.ValidatorFunctionWrapHandler) -> LimitEntry:
    # As in gpu-admission, a bare number is the number of cards: 4 means {cards: 4}.
    if not isinstance(value, dict):
        return LimitEntry.model_construct(cards=read_cores(value))
    limit: LimitEntry = read_long_form(value)
    return limit
