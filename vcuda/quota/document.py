"""The quota document: what people write into the quota ConfigMap, checked and turned into a Quota.

JSON, or YAML, in gpu-admission's format (``pkg/predicate/gpu_predicate.go``) and its extensions::

    team-a: {pool: [public], quota: {M40: 8, P100: 2.5}}   # cards; hundredths of a card are the finest share
    team-b: {quota: {A100: {cards: 4, memory: 160Gi}}}     # no pool: every pool
    team-c: {mode: warn, quota: {M40: 8}}                  # enforce (default), warn or audit
    "*":    {quota: {}}                                    # every namespace without its own entry

As in gpu-admission, an absent or null ``quota`` allows no model, and an absent, null or empty ``pool`` every pool.

Whatever hides a mistake is a fault: an unknown or repeated key, a number in quotes or out of bounds, a model or pool
that no node label can hold, a namespace name that Kubernetes does not allow. The ``A`` and ``B`` of gpu-admission's own
example are such names: an entry for them would never apply to anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import ErrorDetails

from vcuda.errors import Fault, QuotaFault
from vcuda.quota import values
from vcuda.quota.model import SYSTEM_NAMESPACES, Limit, Mode, NamespaceQuota, Quota
from vcuda.quota.yaml import Found, Place, Plain, read_text

MAX_NAMESPACES = 10_000
"""Namespaces in one document: as many as Kubernetes itself is tested with."""


def parse_quota(text: str, system: frozenset[str] = SYSTEM_NAMESPACES) -> Quota:
    """Return the quota that ``text`` says; an empty text limits nobody.

    The ``*`` entry never applies to the namespaces in ``system``.

    Raises QuotaFault with every fault, each with its path, in the order of the document. A text that cannot be read
    at all (its syntax, size, nesting or number of entries) has that one fault.
    """
    tree, faults = read_text(text)
    if isinstance(tree, dict) and len(tree) > MAX_NAMESPACES:
        raise QuotaFault((Fault("", f"there are {len(tree)} namespaces; at most {MAX_NAMESPACES} are read"),))
    try:
        entries = _DOCUMENT.validate_python({} if tree is None else tree)
    except ValidationError as error:
        faults += tuple(_found(details) for details in error.errors(include_url=False))
    if faults:
        raise QuotaFault(_in_document_order(tree, faults))
    namespaces = {name: _namespace_quota(entry) for name, entry in entries.items()}
    default = namespaces.pop(values.DEFAULT, None)
    return Quota(namespaces, default, system)


class _Entry(BaseModel):
    """A mapping with these keys and no others."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _LimitEntry(_Entry):
    """A limit in its long form."""

    cards: Annotated[int, PlainValidator(values.cores)]
    memory: Annotated[int | None, PlainValidator(values.memory)] = None


def _read_limit(value: object, read_long_form: ValidatorFunctionWrapHandler) -> _LimitEntry:
    """Take a bare number of cards for the long form with nothing else in it."""
    if not isinstance(value, dict):
        return _LimitEntry.model_construct(cards=values.cores(value))
    limit: _LimitEntry = read_long_form(value)
    return limit


class _Repeated:
    """Stands in for a pool that is listed a second time, so that the fault is found at its position."""


def _read_pools(value: object) -> tuple[object, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        example = f"[{value}]" if isinstance(value, str) else "[public]"
        raise values.WrongValueError(f"{values.shown(value)} is no list; write one such as {values.printable(example)}")
    seen: set[object] = set()
    marked: list[object] = []
    for item in value:
        repeated = isinstance(item, str) and item in seen
        marked.append(_Repeated() if repeated else item)
        if isinstance(item, str):
            seen.add(item)
    return tuple(marked)


def _read_pool(value: object) -> str:
    if isinstance(value, _Repeated):
        raise values.WrongValueError("is listed twice; leave it out here")
    return values.label_value(value)


def _nothing_for_null(value: object) -> object:
    return {} if value is None else value


_Model = Annotated[str, AfterValidator(values.label_value)]
_Limits = dict[_Model, Annotated[_LimitEntry, WrapValidator(_read_limit)]]


class _NamespaceEntry(_Entry):
    """What is written for one namespace."""

    quota: Annotated[_Limits, BeforeValidator(_nothing_for_null)] = {}
    pool: Annotated[tuple[Annotated[str, PlainValidator(_read_pool)], ...], BeforeValidator(_read_pools)] = ()
    mode: Annotated[Mode, PlainValidator(values.mode)] = Mode.ENFORCE


_DOCUMENT: TypeAdapter[dict[str, _NamespaceEntry]] = TypeAdapter(
    dict[Annotated[str, AfterValidator(values.namespace_name)], _NamespaceEntry], config=ConfigDict(strict=True)
)


def _namespace_quota(entry: _NamespaceEntry) -> NamespaceQuota:
    limits = {model: Limit(limit.cards, limit.memory) for model, limit in entry.quota.items()}
    return NamespaceQuota(limits, entry.pool, entry.mode)


_KEY = "[key]"
"""What pydantic adds to a place when it is the key that is wrong, not what stands behind it."""


def _found(details: ErrorDetails) -> Found:
    place = details["loc"]
    return Found(place[:-1] if place[-1:] == (_KEY,) else place, _sentence(details))


def _sentence(details: ErrorDetails) -> str:
    """Return the fault in our words; of pydantic's own faults only these can occur."""
    place = details["loc"]
    match details["type"]:
        case "value_error":
            return str(details["ctx"]["error"])
        case "extra_forbidden":
            return _unknown_key(place)
        case "missing":
            return "is missing; write a number such as 8 or 2.5"
    return f"{values.shown(details['input'])} stands here; {_SHAPES[len(place)]}"


_SHAPES = (
    "write one entry for each namespace, such as team-a: {quota: {M40: 8}}",
    "write a mapping such as {quota: {M40: 8}}",
    "write the cards of each model, such as {M40: 8, P100: 2.5}",
)
"""What to write at the top, for a namespace and for its quota."""


def _unknown_key(place: Place) -> str:
    is_limit = len(place) > len(("namespace", "quota", "model"))
    keys = tuple((_LimitEntry if is_limit else _NamespaceEntry).model_fields)
    known = f"the keys here are {', '.join(f'`{key}`' for key in keys)}"
    hint = known if is_limit else f"{known}; models belong under `quota`"
    return f"unknown key; {values.suggestion(place[-1], keys) or hint}"


def _in_document_order(tree: Plain, faults: tuple[Found, ...]) -> tuple[Fault, ...]:
    order = {place: at for at, place in enumerate(_places(tree, ()))}
    ordered = sorted(faults, key=lambda fault: order.get(fault.place, order.get(fault.place[:-1], 0)))
    return tuple(Fault(_path(fault.place), fault.message) for fault in ordered)


def _places(tree: Plain, place: Place) -> Iterator[Place]:
    yield place
    children: Any = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield from _places(child, (*place, key))


_SIMPLE_KEY = re.compile(r"[-_*A-Za-z0-9]+")


def _path(place: Place) -> str:
    """Return ``team-a.quota.V100.cards``; in brackets list positions and keys that would not be clear between dots."""
    path = ""
    for step in place:
        if isinstance(step, str) and _SIMPLE_KEY.fullmatch(step):
            path += f".{values.printable(step)}" if path else values.printable(step)
        else:
            path += f"[{values.printable(str(step))}]"
    return path
