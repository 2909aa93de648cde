"""The keys of the quota entry of a namespace, and of a team, as people write them."""

import enum
import re
from collections.abc import Collection, Iterator
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import pydantic

from vcuda.quota.allowances import Allowance
from vcuda.quota.grant_entries import GrantEntry, grant_faults, read_grants, read_zone
from vcuda.quota.model import Limit, Mode, NamespaceQuota
from vcuda.quota.values import (
    LimitEntry,
    StrictModel,
    WrongValueError,
    brief,
    printable,
    read_cores,
    read_label_value,
    read_limit,
    suggestion,
)
from vcuda.quota.well_known import DNS_LABEL, TOTAL
from vcuda.quota.yaml import KeyPath

MAX_EXCEPTED = 100
"""The most names in the key ``except``."""


_ITEM = re.compile(rf"{DNS_LABEL.pattern}|[a-z0-9][-a-z0-9]{{0,61}}\*")


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


def names(example: str) -> pydantic.BeforeValidator:
    def read(value: object) -> tuple[object, ...]:
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


def namespace_items(example: str) -> Any:
    """Return the type of a name of a namespace, or of a beginning of names with ``*``. ``example``: for the message."""

    def read(value: object) -> str:
        if value is _REPEATED:
            raise WrongValueError(_DUPLICATE)
        if not isinstance(value, str) or not _ITEM.fullmatch(value):
            raise WrongValueError(
                f"must be the name of a namespace, or the beginning of names with `*`, for example {example}; "
                f"got {brief(value)}"
            )
        return value

    return Annotated[str, pydantic.PlainValidator(read)]


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
_NULLABLE = ("quota", "pool", "order", "require_nodes", "except", "namespaces")
"""The keys of an entry that may be null. A null key is treated as an absent key."""
_Name = Annotated[str, pydantic.PlainValidator(_read_name)]
_Excepted: Any = namespace_items("longhorn-*")
_Allowed = Annotated[Allowance, _member(Allowance)]


class QuotaEntry(StrictModel):
    """The keys that the entry of a namespace and a team have in common."""

    quota: _Limits = pydantic.Field(default_factory=dict)
    pool: Annotated[tuple[_Name, ...], names("public")] = ()
    mode: Annotated[Mode, _member(Mode)] = Mode.ENFORCE
    allow: Annotated[tuple[_Allowed, ...], pydantic.BeforeValidator(_read_allowances)] = ()
    order: Annotated[tuple[_Name, ...], names("M40")] = ()
    one_model: bool = False
    require_nodes: bool = False
    total: Annotated[int | None, pydantic.PlainValidator(read_cores)] = None
    time_zone: Annotated[ZoneInfo | None, pydantic.PlainValidator(read_zone)] = None
    grants: Annotated[tuple[GrantEntry, ...], pydantic.BeforeValidator(read_grants)] = ()

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        # A null key is the same as an absent key. Pydantic lists only the keys that remain in `model_fields_set`.
        if not isinstance(value, dict):
            return value
        return {key: each for key, each in value.items() if each is not None or key not in _NULLABLE}

    def as_quota(self, zone: ZoneInfo) -> NamespaceQuota:
        """Return the entry as a quota. ``zone``: the default time zone of the grants."""
        return NamespaceQuota(
            {model: Limit(limit.cards, limit.memory) for model, limit in self.quota.items()},
            pools=self.pool,
            mode=self.mode,
            allow=frozenset(self.allow),
            order=self.order,
            one_model=self.one_model,
            require_nodes=self.require_nodes,
            total=None if self.total is None else Limit(self.total),
            grants=tuple(grant.in_zone(self.time_zone or zone) for grant in self.grants),
        )

    def faults(self, zone: ZoneInfo, team_models: Collection[str] = ()) -> Iterator[tuple[KeyPath, str]]:
        """Yield the faults between values of this entry, as pairs of a path below the entry and a message.

        ``team_models``: the models of the entry's team, if the entry has no key ``quota``.
        """
        models = dict.fromkeys((*self.quota, *(model for grant in self.grants for model in grant.limits), *team_models))
        for model in self.order:
            if model not in models:
                hint = suggestion(model, models) or f"supported models: {', '.join(models) or 'none'}"
                yield (), f"`order` must list only models of `quota` or `grants`; got {brief(model)}; {hint}"
        if self.total is not None and not models:
            why = "because the namespace must not use other models"
            yield (), f"`{TOTAL}` requires models in `quota` or `grants`, {why}"
        for path, why in grant_faults(self.quota, self.grants, self.time_zone or zone):
            yield ("grants", *path), why


class NamespaceEntry(QuotaEntry):
    """The entry of one namespace, or the entry ``*``."""

    excepted: Annotated[tuple[_Excepted, ...], names("longhorn-*"), pydantic.AfterValidator(_bounded)] = pydantic.Field(
        default=(), alias="except"
    )
