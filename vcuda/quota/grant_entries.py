"""The grants of a quota entry, as people write them. A grant adds to limits at certain times::

team-a:
  quota: {A100: 4}
  time_zone: Europe/Berlin    # the default is `gpu_time_zone` of the ConfigMap, or UTC
  grants:
    - {A100: 4, until: 2026-12-01, why: "paper"}
    - {T4: 8, weekly: "Sat-Sun"}
    - {A100: 2, daily: "20:00-06:00", from: 2026-11-02T08:00}
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated
from zoneinfo import ZoneInfo

import pydantic

from vcuda.quota import times
from vcuda.quota.model import Grant, Limit
from vcuda.quota.times import LocalTime, Times
from vcuda.quota.values import (
    LimitEntry,
    StrictModel,
    WrongValueError,
    brief,
    quoted,
    read_label_value,
    read_limit,
    suggestion,
)
from vcuda.quota.well_known import TOTAL
from vcuda.quota.yaml import KeyPath

MAX_GRANTS = 100
"""The maximum number of grants (temporary additions to limits) of one namespace."""
MAX_RECURRING = 1000
"""Maximum number of different weekly or daily times in a document. All are evaluated when a grant starts or ends."""
MAX_WHY = 200
"""The maximum length of the text of ``why``, in which people write the reason for a grant."""


class _UnknownKey(str):
    """The error message for an unknown key in a grant. It replaces the key's value, so that pydantic adds the path."""

    __slots__ = ()


def _read_granted(value: object, read_long_form: pydantic.ValidatorFunctionWrapHandler) -> LimitEntry:
    if isinstance(value, _UnknownKey):
        raise WrongValueError(value)
    limit = read_limit(value, read_long_form)
    if limit.cards == 0:
        raise WrongValueError("must be above 0, because a grant adds cards to the limit")
    return limit


def _text(read: Callable[[str], object], must_be: str) -> pydantic.PlainValidator:
    """Return a validator that converts a string with ``read``. ``must_be``: the error message for an invalid string."""

    def validated(value: object) -> object:
        try:
            return read(value if isinstance(value, str) else "")
        except (ValueError, OverflowError):
            raise WrongValueError(f"{must_be}; got {brief(value)}") from None

    return pydantic.PlainValidator(validated)


def _read_why(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_WHY:
        raise WrongValueError(f"must be a text of at most {MAX_WHY} characters")
    return value


def read_zone(value: object) -> ZoneInfo:
    zone = times.zone_of(value) if isinstance(value, str) else None
    if zone is None:
        hint = suggestion(value, times.zone_names()) or "use a name of the IANA database, for example Europe/Berlin"
        raise WrongValueError(f"unknown time zone {brief(value)}; {hint}")
    return zone


_Time = Annotated[
    LocalTime | None,
    _text(times.read_local_time, "must be a day or a time that exists, for example 2026-12-01 or 2026-12-01T18:00"),
]


class GrantEntry(StrictModel):
    """One grant of the quota document. A key that is not a field here is a GPU model with an addition to its limit."""

    model_config = pydantic.ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, Annotated[LimitEntry, pydantic.WrapValidator(_read_granted)]]

    start: _Time = pydantic.Field(None, alias="from")
    until: _Time = None
    weekly: Annotated[
        frozenset[int], _text(times.read_days, "must be days of the week, for example Sat-Sun or Mon, Wed")
    ] = frozenset()
    daily: Annotated[
        tuple[int, int] | None, _text(times.read_hours, "must be hours of the day, for example 20:00-06:00")
    ] = None
    why: Annotated[str, pydantic.PlainValidator(_read_why)] = ""

    @property
    def limits(self) -> Mapping[str, Limit]:
        return {model: Limit(added.cards, added.memory) for model, added in self.__pydantic_extra__.items()}

    def in_zone(self, zone: ZoneInfo) -> Grant:
        """Return the grant with its times in ``zone``. The caller must ensure that `grant_faults` found no fault."""
        return Grant(self.limits, self.times_in(zone), self.why)

    def times_in(self, zone: ZoneInfo) -> Times:
        """Return the times at which the grant applies. ``zone``: the time zone of the days and hours in the grant."""
        given: dict[str, float] = {}
        if self.start is not None:
            given["start"] = times.moment_of(self.start, zone)
        if self.until is not None:
            given["end"] = times.end_of(self.until, zone)
        every_day = len(self.weekly) == len(times.WEEKDAYS)
        return Times(zone, days=frozenset() if every_day else self.weekly, hours=self.daily, **given)


CONDITIONS = ("from", "until", "weekly", "daily")
"""The keys of a grant that limit the times at which the grant applies."""
_KEYS = (*CONDITIONS, "why")


def read_grants(value: object) -> tuple[object, ...]:
    """Return the grants for `GrantEntry` to validate. The value of each unknown key is replaced by an error message."""
    if not isinstance(value, list):
        raise WrongValueError(f"must be a list, for example [{{A100: 4, until: 2026-12-01}}]; got {brief(value)}")
    if len(value) > MAX_GRANTS:
        raise WrongValueError(f"must not have more than {MAX_GRANTS} grants; got {len(value)}")
    return tuple(
        {key: _UnknownKey(fault) if (fault := _fault_of(key, grant[key])) else grant[key] for key in grant}
        if isinstance(grant, dict)
        else grant
        for grant in value
    )


def _fault_of(key: str, value: object) -> str:
    if key in _KEYS:
        return ""
    # In a grant, the value of a GPU model is never a string. So a key with a string may be a misspelt key, such as
    # `untill`.
    known = f"supported keys: {quoted(_KEYS)} and the names of GPU models"
    if isinstance(value, str) and (hint := suggestion(key, _KEYS)):
        return f"unknown key; {hint}"
    if key in GrantEntry.model_fields or key in ("time_zone", TOTAL):
        return f"unknown key; {known}"
    try:
        read_label_value(key)
    except WrongValueError as error:
        return str(error)
    return ""


def grant_faults(
    limits: Mapping[str, LimitEntry], grants: Sequence[GrantEntry], zone: ZoneInfo
) -> Iterator[tuple[KeyPath, str]]:
    """Yield faults between values, such as `until` before `from`, as pairs of a path below ``grants`` and a message."""
    # A model's limits in `quota` and in grants are added up. If one of them did not limit cards, the sum would not
    # limit cards. The same is true of memory. So all limits of a model must limit the same: cards, memory, or both.
    first = {model: limit for model, limit in limits.items() if limit.cards != 0}
    for at, grant in enumerate(grants):
        if not grant.limits:
            yield (at,), "must have a GPU model with a number of cards, for example {A100: 4, until: 2026-12-01}"
        during = grant.times_in(zone)
        if during == Times(zone):
            yield (at,), "must have `from`, `until`, `weekly` or `daily`. Cards for all times must be in `quota`"
        if during.end <= during.start:
            yield (at, "until"), "must not be before `from`"
        for model, added in grant.__pydantic_extra__.items():
            yield from _unlike((at, model), added, first.setdefault(model, added))


def _unlike(path: KeyPath, added: LimitEntry, limited: LimitEntry) -> Iterator[tuple[KeyPath, str]]:
    if limited.memory is not None and added.memory is None:
        example = "{memory: 80Gi}" if limited.cards is None else "{cards: 4, memory: 80Gi}"
        yield path, f"memory is required, because this model's memory is limited, for example {example}"
    elif limited.memory is None and added.memory is not None:
        yield (*path, "memory"), "must not be set, because this model's memory is not limited"
    if limited.cards is not None and added.cards is None:
        yield path, "cards are required, because this model's cards are limited"
    elif limited.cards is None and added.cards is not None and added.memory is not None:
        yield (*path, "cards"), "must not be set, because this model's cards are not limited"
