"""Checks the quota document, which people write into the quota ConfigMap, and turns it into a Quota.

The document is JSON or YAML in gpu-admission's format (``pkg/predicate/gpu_predicate.go``), with extensions::

    team-a: {pool: [public], quota: {M40: 8, P100: 2.5}}   # cards, with at most two decimals
    team-b: {quota: {A100: {cards: 4, memory: 160Gi}}}     # no pool: every pool
    team-i: {quota: {A100: {memory: 160Gi}}}               # memory alone, see vcuda.quota.card_memory
    team-c: {mode: warn, quota: {M40: 8}}                  # enforce (default), warn or audit
    team-d: {allow: [privileged], quota: {M40: 8}}         # admits privileged containers, which see all cards
    team-e: {order: [A100, T4], quota: {T4: 8, A100: 2}}   # A100 first; the default is the order in `quota`
    team-f: {prefer: most-free, quota: {T4: 8, A100: 2}}   # the model with the most free cards and quota first
    team-g: {one_model: true, quota: {T4: 8, A100: 2}}     # pods that could get both models are rejected
    team-h: {grants: [{T4: 8, weekly: Sat-Sun}]}           # more at certain times, see vcuda.quota.grant_entries
    "*":    {quota: {}}                                    # every namespace without its own entry

As in gpu-admission, an absent or null ``quota`` allows no model. An absent, null or empty ``pool`` allows every pool.

Everything that could hide a mistake is a fault: an unknown or repeated key, a number in quotes or out of bounds, a
model or pool that no node label can have, and a namespace name that Kubernetes does not allow. ``A`` and ``B`` in the
example of gpu-admission are such names. An entry for them would never apply.
"""

import enum
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar
from zoneinfo import ZoneInfo

import pydantic
from pydantic_core import ErrorDetails

from vcuda import errors
from vcuda.quota import grant_entries
from vcuda.quota.grant_entries import MAX_RECURRING, GrantEntry, read_grants, read_zone
from vcuda.quota.model import DEFAULT, SYSTEM_NAMESPACES, Allowance, Limit, Mode, NamespaceQuota, Quota
from vcuda.quota.terms import NO_NAMESPACE, is_namespace_name
from vcuda.quota.times import UTC
from vcuda.quota.values import (
    LimitEntry,
    StrictModel,
    WrongValueError,
    printable,
    raise_faults,
    read_label_value,
    read_limit,
    sentence,
    shown,
    suggestion,
)
from vcuda.quota.yaml import KeyPath, PlacedFault, Plain, read_text

T = TypeVar("T")

MAX_NAMESPACES = 10_000
"""The most namespaces in one document. Kubernetes itself is tested with as many."""
LONGEST_EMPTY = 256
"""A text with more characters than this, apart from comments, always has a document."""
MOST_FREE = "most-free"
"""The only value of ``prefer``."""


def read_namespace_name(name: str) -> str:
    # An entry for a name that no namespace can have would never apply, and nobody would notice.
    if name != DEFAULT and not is_namespace_name(name):
        raise WrongValueError(f"{NO_NAMESPACE}, or `*` for every namespace without its own entry")
    return name


def _member(kind: type[enum.StrEnum], other: str, advice: str) -> pydantic.PlainValidator:
    def read(value: object) -> enum.StrEnum:
        if isinstance(value, str) and value in list(kind):
            return kind(value)
        raise WrongValueError(f"{shown(value)} is {other}; {suggestion(value, kind) or advice}")

    return pydantic.PlainValidator(read)


def _read_prefer(value: object) -> str:
    if value != MOST_FREE:
        raise WrongValueError(f"{shown(value)} is not a preference; write {MOST_FREE}, or use `order`")
    return MOST_FREE


def _read_one_model(value: object) -> bool:
    if not isinstance(value, bool):
        raise WrongValueError(f"{shown(value)} is neither true nor false; write one of them")
    return value


_REPEATED = object()
"""A placeholder for a pool that is listed twice, so that pydantic reports the position of the second one."""


def _names(example: str) -> pydantic.BeforeValidator:
    def read(value: object) -> tuple[object, ...]:
        if value is None:
            return ()
        if not isinstance(value, list):
            shortest = printable(f"[{value if isinstance(value, str) else example}]")
            raise WrongValueError(f"{shown(value)} is not a list; write for example {shortest}")
        # Only texts are compared. Other items are faults themselves, and some of them cannot be hashed.
        first = {item: at for at, item in reversed([*enumerate(value)]) if isinstance(item, str)}
        return tuple(_REPEATED if isinstance(item, str) and first[item] < at else item for at, item in enumerate(value))

    return pydantic.BeforeValidator(read)


def _read_allowances(value: object) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise WrongValueError(f"{shown(value)} is not a list; write for example [{Allowance.PRIVILEGED}]")
    return tuple(value)


def _read_name(value: object) -> str:
    if value is _REPEATED:
        raise WrongValueError("is listed twice; remove it here")
    return read_label_value(value)


_Model = Annotated[str, pydantic.AfterValidator(read_label_value)]
_Limits = dict[_Model, Annotated[LimitEntry, pydantic.WrapValidator(read_limit)]]
_Name = Annotated[str, pydantic.PlainValidator(_read_name)]
_Allowed = Annotated[
    Allowance, _member(Allowance, "not a setting that can be allowed", f"the settings are: {', '.join(Allowance)}")
]


class _NamespaceEntry(StrictModel):
    """The entry of one namespace."""

    quota: Annotated[_Limits, pydantic.BeforeValidator(lambda value: {} if value is None else value)] = pydantic.Field(
        default_factory=dict
    )
    pool: Annotated[tuple[_Name, ...], _names("public")] = ()
    mode: Annotated[Mode, _member(Mode, "not a mode", "write enforce, warn or audit")] = Mode.ENFORCE
    allow: Annotated[tuple[_Allowed, ...], pydantic.BeforeValidator(_read_allowances)] = ()
    order: Annotated[tuple[_Name, ...], _names("M40")] = ()
    prefer: Annotated[str, pydantic.PlainValidator(_read_prefer)] = ""
    one_model: Annotated[bool, pydantic.PlainValidator(_read_one_model)] = False
    time_zone: Annotated[ZoneInfo | None, pydantic.PlainValidator(read_zone)] = None
    grants: Annotated[tuple[GrantEntry, ...], pydantic.BeforeValidator(read_grants)] = ()

    @pydantic.model_validator(mode="after")
    def _orders_its_models(self) -> "_NamespaceEntry":
        models = dict.fromkeys((*self.quota, *(model for grant in self.grants for model in grant.limits)))
        for model in self.order:
            if model not in models:
                hint = suggestion(model, models) or f"its models are {', '.join(models) or 'none'}"
                raise WrongValueError(f"`order` names {shown(model)}, which `quota` does not list; {hint}")
        if self.order and self.prefer:
            raise WrongValueError(f"`order` and `prefer: {self.prefer}` exclude each other; remove one of them")
        return self


_DOCUMENT: pydantic.TypeAdapter[dict[str, _NamespaceEntry]] = pydantic.TypeAdapter(
    dict[Annotated[str, pydantic.AfterValidator(read_namespace_name)], _NamespaceEntry],
    config=pydantic.ConfigDict(strict=True),
)


_KEY = "[key]"
"""The last part of a fault's place in pydantic, if the key is wrong and not its value."""


def check_text(text: str, read: Callable[[Plain], T], sentence_of: Callable[[ErrorDetails], str]) -> T:
    """Return the result of ``read`` for a text. Raises QuotaFault with all faults, worded by ``sentence_of``."""
    tree, faults = read_text(text)
    try:
        found = read({} if tree is None else tree)
    except pydantic.ValidationError as error:
        for details in error.errors(include_url=False):
            place = details["loc"]
            faults += (PlacedFault(place[:-1] if place[-1:] == (_KEY,) else place, sentence_of(details)),)
    if faults:
        raise errors.QuotaFault(_in_document_order(tree, faults))
    return found


def _sentence(details: ErrorDetails) -> str:
    depth = len(details["loc"])
    otherwise = f"{shown(details['input'])} is not allowed here; {_SHAPES[min(depth, 3)]}"
    if depth > len(("namespace", "quota", "model")):
        return sentence(details, LimitEntry, otherwise)
    return sentence(details, _NamespaceEntry, otherwise, "; models belong under `quota`")


_SHAPES = (
    "write one entry for each namespace, such as team-a: {quota: {M40: 8}}",
    "write a mapping such as {quota: {M40: 8}}",
    "write the cards of each model, such as {M40: 8, P100: 2.5}",
    "write the cards of each model with their times, such as {A100: 4, until: 2026-12-01}",
)
"""The advice by place: at the top, for a namespace, for its quota, and for a grant."""


def _in_document_order(tree: Plain, faults: tuple[PlacedFault, ...]) -> tuple[errors.Fault, ...]:
    # The reader and pydantic report faults each in their own order. People correct a document from top to bottom.
    order = {place: at for at, place in enumerate(_places(tree, ()))}
    ordered = sorted(faults, key=lambda fault: order.get(fault.place, order.get(fault.place[:-1], 0)))
    return tuple(errors.Fault(path_of(fault.place), fault.message) for fault in ordered)


def _places(tree: Plain, place: KeyPath) -> Iterator[KeyPath]:
    yield place
    children: Any = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield from _places(child, (*place, key))


_SIMPLE_KEY = re.compile(r"[-_*A-Za-z0-9]+")


def path_of(place: KeyPath) -> str:
    """Return a place as text, for example ``team-a.quota.V100.cards``."""
    # Positions in lists are in brackets. So are keys that would be unclear between dots.
    path = ""
    for step in place:
        if isinstance(step, str) and _SIMPLE_KEY.fullmatch(step):
            path += f".{printable(step)}" if path else printable(step)
        else:
            path += f"[{printable(str(step))}]"
    return path


def _read_entries(tree: Plain, zone: ZoneInfo) -> dict[str, _NamespaceEntry]:
    if isinstance(tree, dict) and len(tree) > MAX_NAMESPACES:
        raise errors.QuotaFault(
            (errors.Fault("", f"there are {len(tree)} namespaces; at most {MAX_NAMESPACES} are read"),)
        )
    entries = _DOCUMENT.validate_python(tree)
    raise_faults(
        ((name, "grants", *place), why)
        for name, entry in entries.items()
        for place, why in grant_entries.faults_of(entry.quota, entry.grants, entry.time_zone or zone)
    )
    return entries


def is_empty(text: str) -> bool:
    """Return whether a text has no document: it is blank, or has only comments or a null."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    # Only a short rest can be empty, so a long document is not parsed twice.
    rest = "\n".join(lines).strip()
    try:
        return len(rest) <= LONGEST_EMPTY and read_text(rest)[0] is None
    except errors.QuotaFault:
        return False


def parse_quota(text: str, system: frozenset[str] = SYSTEM_NAMESPACES, zone: ZoneInfo = UTC) -> Quota:
    """Return the quota in a text. `Quota` describes ``system``. Raises QuotaFault as `check_text` does."""
    entries = check_text(text, lambda tree: _read_entries(tree, zone), _sentence)
    namespaces = {}
    for name, entry in entries.items():
        limits = {model: Limit(limit.cards, limit.memory) for model, limit in entry.quota.items()}
        namespaces[name] = NamespaceQuota(
            *(limits, entry.pool, entry.mode, frozenset(entry.allow), entry.order),
            prefer_most_free=entry.prefer == MOST_FREE,
            one_model=entry.one_model,
            grants=tuple(grant.in_zone(entry.time_zone or zone) for grant in entry.grants),
        )
    default = namespaces.pop(DEFAULT, None)
    quota = Quota(namespaces, default, system)
    if (recurring := sum(each.recurs for each in quota.times)) > MAX_RECURRING:
        told = f"the grants have {recurring} different weekly or daily times; at most {MAX_RECURRING} are read"
        raise errors.QuotaFault((errors.Fault("", told),))
    return quota
