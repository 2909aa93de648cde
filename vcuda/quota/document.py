"""Checks the quota document, which people write into the quota ConfigMap, and converts it to a Quota.

The document is JSON or YAML in gpu-admission's format (``pkg/predicate/gpu_predicate.go``), with extensions::

    team-a: {pool: [public], quota: {M40: 8, P100: 2.5}}   # cards, with at most two decimals
    team-b: {quota: {A100: {cards: 4, memory: 160Gi}}}     # no pool: every pool
    team-i: {quota: {A100: {memory: 160Gi}}}               # memory alone, see vcuda.quota.card_memory
    team-c: {mode: warn, quota: {M40: 8}}                  # enforce (default), warn or audit
    team-d: {allow: [privileged], quota: {M40: 8}}         # admits privileged containers, which see all cards
    team-e: {order: [A100, T4], quota: {T4: 8, A100: 2}}   # A100 first; the default is the order in `quota`
    team-g: {one_model: true, quota: {T4: 8, A100: 2}}     # pods that could get both models are rejected
    team-j: {require_nodes: true, quota: {T4: 8}}          # no model without nodes; at the top: for all entries
    team-k: {total: 8, quota: {T4: 8, A100: 4}}            # at most 8 cards of both models together
    team-h: {grants: [{T4: 8, weekly: Sat-Sun}]}           # more at certain times, see vcuda.quota.grant_entries
    "*":    {quota: {}, except: ["longhorn-*"]}            # every namespace without its own entry, but not these

As in gpu-admission, an absent or null ``quota`` allows no model. An absent, null or empty ``pool`` allows every pool.

Everything that could hide a mistake is a fault: an unknown or repeated key, a number in quotes or out of bounds, a
model or pool that is not a valid label value, and an invalid name of a namespace. An entry with an invalid name would
never apply. For example, ``A`` and ``B`` in the example of gpu-admission are invalid, because they are upper-case.
"""

import enum
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar
from zoneinfo import ZoneInfo

import pydantic
from pydantic_core import ErrorDetails

from vcuda import errors
from vcuda.quota import grant_entries
from vcuda.quota.grant_entries import MAX_RECURRING, GrantEntry, read_grants, read_zone
from vcuda.quota.model import (
    DEFAULT,
    DNS_LABEL,
    NAMESPACE_RULE,
    Allowance,
    Limit,
    Mode,
    NamespaceQuota,
    Quota,
    is_namespace_name,
)
from vcuda.quota.terms import SYSTEM_NAMESPACES, TOTAL
from vcuda.quota.times import UTC
from vcuda.quota.values import (
    LimitEntry,
    StrictModel,
    WrongValueError,
    brief,
    printable,
    raise_faults,
    read_cores,
    read_label_value,
    read_limit,
    sentence,
    suggestion,
)
from vcuda.quota.yaml import KeyPath, PlacedFault, Plain, read_content

T = TypeVar("T")

MAX_NAMESPACES = 10_000
"""The most namespaces in one document. Kubernetes itself is tested with 10,000 namespaces."""
MAX_EMPTY_LENGTH = 256
"""`is_empty` parses only texts of at most this many characters without comments. A longer text is not empty."""
MAX_EXCEPTED = 100
"""The most names in the key ``except``."""
ONLY_DEFAULT = f'must be set only in the entry "{DEFAULT}"'
REQUIRE_NODES = "require_nodes"
"""A key of an entry. At the top of the document, where no namespace can have this name, it is for all entries."""


def read_namespace_name(name: str) -> str:
    # If an invalid namespace name were accepted, its quota entry would never apply, and nobody would notice.
    if name != DEFAULT and not is_namespace_name(name):
        raise WrongValueError(f"{NAMESPACE_RULE}. The entry `*` applies to every namespace without its own entry")
    return name


_EXCEPTED = re.compile(rf"{DNS_LABEL.pattern}|[a-z0-9][-a-z0-9]{{0,61}}\*")


def _member(kind: type[enum.StrEnum]) -> pydantic.PlainValidator:
    def read(value: object) -> enum.StrEnum:
        if isinstance(value, str) and value in list(kind):
            return kind(value)
        hint = suggestion(value, kind) or f"supported values: {', '.join(kind)}"
        raise WrongValueError(f"unsupported value: {brief(value)}; {hint}")

    return pydantic.PlainValidator(read)


_REPEATED = object()
"""A marker that replaces a repeated name in a list. The marker is invalid, so pydantic reports the name's position."""

_DUPLICATE = "duplicate name; each name must be listed once"


def _names(example: str) -> pydantic.BeforeValidator:
    def read(value: object) -> tuple[object, ...]:
        if value is None:
            return ()
        if not isinstance(value, list):
            shortest = printable(f"[{value if isinstance(value, str) else example}]")
            raise WrongValueError(f"must be a list, for example {shortest}; got {brief(value)}")
        # Only strings are checked for repetition. An item of another type is rejected anyway, and may not be hashable.
        first = {item: at for at, item in reversed([*enumerate(value)]) if isinstance(item, str)}
        return tuple(_REPEATED if isinstance(item, str) and first[item] < at else item for at, item in enumerate(value))

    return pydantic.BeforeValidator(read)


def _read_allowances(value: object) -> tuple[object, ...]:
    if not isinstance(value, list):
        raise WrongValueError(f"must be a list, for example [{Allowance.PRIVILEGED}]; got {brief(value)}")
    return tuple(value)


def _read_name(value: object) -> str:
    if value is _REPEATED:
        raise WrongValueError(_DUPLICATE)
    return read_label_value(value)


def _read_excepted(value: object) -> str:
    if value is _REPEATED:
        raise WrongValueError(_DUPLICATE)
    if not isinstance(value, str) or not _EXCEPTED.fullmatch(value):
        raise WrongValueError(
            f"must be the name of a namespace, or the beginning of names with `*`, for example longhorn-*; "
            f"got {brief(value)}"
        )
    return value


def _bounded(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(names) > MAX_EXCEPTED:
        raise WrongValueError(f"must not have more than {MAX_EXCEPTED} names; got {len(names)}")
    return names


def _read_model(name: str) -> str:
    if name == TOTAL:
        raise WrongValueError(f"must be a key of the entry, for example {{{TOTAL}: 20, quota: {{A100: 8, T4: 16}}}}")
    return read_label_value(name)


_Model = Annotated[str, pydantic.AfterValidator(_read_model)]
_Limits = dict[_Model, Annotated[LimitEntry, pydantic.WrapValidator(read_limit)]]
_Name = Annotated[str, pydantic.PlainValidator(_read_name)]
_Excepted = Annotated[str, pydantic.PlainValidator(_read_excepted)]
_Allowed = Annotated[Allowance, _member(Allowance)]


class _NamespaceEntry(StrictModel):
    quota: Annotated[_Limits, pydantic.BeforeValidator(lambda value: {} if value is None else value)] = pydantic.Field(
        default_factory=dict
    )
    pool: Annotated[tuple[_Name, ...], _names("public")] = ()
    mode: Annotated[Mode, _member(Mode)] = Mode.ENFORCE
    allow: Annotated[tuple[_Allowed, ...], pydantic.BeforeValidator(_read_allowances)] = ()
    order: Annotated[tuple[_Name, ...], _names("M40")] = ()
    one_model: bool = False
    require_nodes: bool | None = None
    total: Annotated[int | None, pydantic.PlainValidator(read_cores)] = None
    time_zone: Annotated[ZoneInfo | None, pydantic.PlainValidator(read_zone)] = None
    grants: Annotated[tuple[GrantEntry, ...], pydantic.BeforeValidator(read_grants)] = ()
    excepted: Annotated[tuple[_Excepted, ...], _names("longhorn-*"), pydantic.AfterValidator(_bounded)] = (
        pydantic.Field(default=(), alias="except")
    )

    @pydantic.model_validator(mode="after")
    def _orders_its_models(self) -> "_NamespaceEntry":
        models = dict.fromkeys((*self.quota, *(model for grant in self.grants for model in grant.limits)))
        for model in self.order:
            if model not in models:
                hint = suggestion(model, models) or f"supported models: {', '.join(models) or 'none'}"
                raise WrongValueError(
                    f"`order` must list only models of `quota` or `grants`; got {brief(model)}; {hint}"
                )
        if self.total is not None and not models:
            raise WrongValueError(
                f"`{TOTAL}` requires models in `quota` or `grants`, because the namespace must not use other models"
            )
        return self


_DOCUMENT = pydantic.TypeAdapter(dict[Annotated[str, pydantic.AfterValidator(read_namespace_name)], _NamespaceEntry])

_KEY = "[key]"
"""The text that pydantic appends to the path of a fault if the key of a mapping is invalid."""


def check_text(text: str, read: Callable[[Plain], T], sentence_of: Callable[[ErrorDetails], str]) -> T:
    """Parse a YAML or JSON text, convert its content with the function ``read``, and return the result. ``sentence_of``
    returns the message for a fault that pydantic has found. Raises QuotaFault with all faults."""
    tree, faults = read_content(text)
    try:
        found = read({} if tree is None else tree)
    except pydantic.ValidationError as error:
        for details in error.errors(include_url=False):
            place = details["loc"]
            faults += ((place[:-1] if place[-1:] == (_KEY,) else place, sentence_of(details)),)
    if faults:
        raise errors.QuotaFault(_in_document_order(tree, faults))
    return found


def _sentence(details: ErrorDetails) -> str:
    depth = len(details["loc"])
    if depth > len(("namespace", "quota", "model")):
        return sentence(details, LimitEntry, _SHAPES[-1])
    return sentence(details, _NamespaceEntry, _SHAPES[min(depth, 3)], "GPU models must be listed in `quota`")


_SHAPES = (
    "must be a mapping with one entry per namespace, for example team-a: {quota: {A100: 8}}",
    "must be a mapping, for example {quota: {A100: 8}}",
    "must be a mapping from models to cards, for example {A100: 8, T4: 2.5}",
    "must be a mapping with models and times, for example {A100: 4, until: 2026-12-01}",
)
"""The error messages if the document, a namespace's entry, its ``quota``, or one of its grants is not a mapping."""


def _in_document_order(tree: Plain, faults: tuple[PlacedFault, ...]) -> tuple[errors.Fault, ...]:
    # The faults of the YAML parser and of pydantic are sorted together, because people correct a document from the top.
    order = {place: at for at, place in enumerate(_places(tree, ()))}
    ordered = sorted(faults, key=lambda fault: order.get(fault[0], order.get(fault[0][:-1], 0)))
    return tuple(errors.Fault(path_of(place), message) for place, message in ordered)


def _places(tree: Plain, place: KeyPath) -> Iterator[KeyPath]:
    yield place
    children: Any = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield from _places(child, (*place, key))


_SIMPLE_KEY = re.compile(r"[-_*A-Za-z0-9]+")


def path_of(place: KeyPath) -> str:
    """Return the path of a value as text, for example ``team-a.quota.V100.cards``."""
    # In the returned path, brackets enclose a position in a list, or a key with characters such as dots.
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
            (errors.Fault("", f"the document must not have more than {MAX_NAMESPACES} namespaces; got {len(tree)}"),)
        )
    required: object = False
    if isinstance(tree, dict) and REQUIRE_NODES in tree:
        required = tree[REQUIRE_NODES]
        tree = {name: entry for name, entry in tree.items() if name != REQUIRE_NODES}
        raise_faults([((REQUIRE_NODES,), "must be true or false")] if not isinstance(required, bool) else ())
    entries = _DOCUMENT.validate_python(tree)
    if required:
        without = (name for name, entry in entries.items() if entry.require_nodes is None)
        entries |= {name: entries[name].model_copy(update={REQUIRE_NODES: True}) for name in [*without]}
    misplaced = (
        ((name, "except"), ONLY_DEFAULT) for name, each in entries.items() if each.excepted and name != DEFAULT
    )
    in_grants = (
        ((name, "grants", *place), why)
        for name, entry in entries.items()
        for place, why in grant_entries.grant_faults(entry.quota, entry.grants, entry.time_zone or zone)
    )
    raise_faults(itertools.chain(misplaced, in_grants))
    return entries


def is_empty(text: str) -> bool:
    """Return whether a YAML text is blank, or has only comments or a null."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    # A long text is treated as not empty without parsing it here, because the caller parses the text anyway.
    rest = "\n".join(lines).strip()
    try:
        return len(rest) <= MAX_EMPTY_LENGTH and read_content(rest)[0] is None
    except errors.QuotaFault:
        return False


def parse_quota(text: str, system: frozenset[str] = SYSTEM_NAMESPACES, zone: ZoneInfo = UTC) -> Quota:
    """Parse a quota document. ``system``: the namespaces to which the entry ``*`` never applies.
    ``zone``: the default time zone of grants. Raises QuotaFault."""
    entries = check_text(text, lambda tree: _read_entries(tree, zone), _sentence)
    namespaces = {}
    for name, entry in entries.items():
        limits = {model: Limit(limit.cards, limit.memory) for model, limit in entry.quota.items()}
        namespaces[name] = NamespaceQuota(
            *(limits, entry.pool, entry.mode, frozenset(entry.allow), entry.order),
            one_model=entry.one_model,
            require_nodes=bool(entry.require_nodes),
            total=None if entry.total is None else Limit(entry.total),
            grants=tuple(grant.in_zone(entry.time_zone or zone) for grant in entry.grants),
            excepted=frozenset(entry.excepted),
        )
    default = namespaces.pop(DEFAULT, None)
    quota = Quota(namespaces, default, system)
    if (recurring := sum(each.recurs for each in quota.times)) > MAX_RECURRING:
        message = f"the grants must not have more than {MAX_RECURRING} different weekly or daily times; got {recurring}"
        raise errors.QuotaFault((errors.Fault("", message),))
    return quota
