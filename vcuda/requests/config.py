"""Reads the quota ConfigMap with all its keys: the quota, and the resources by which pods request GPUs."""

import math
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, TypeVar
from zoneinfo import ZoneInfo

import msgspec
import pydantic
from pydantic_core import ErrorDetails

from vcuda import k8s_types
from vcuda.errors import Fault, QuotaFault
from vcuda.quota import document, grant_entries, times, values
from vcuda.quota.card_memory import with_card_memory
from vcuda.quota.model import CORES_PER_CARD, UNIT_DECIMALS, Charge, Cores, Quota, exact
from vcuda.quota.teams import TeamEntry
from vcuda.quota.well_known import SYSTEM_NAMESPACES, TEAMS
from vcuda.quota.yaml import Plain
from vcuda.requests import card_models, scheme_settings
from vcuda.requests.mig import PROFILE
from vcuda.requests.resources import (
    BUILT_IN,
    CLASS,
    CLASS_RESOURCE,
    NO_ROWS,
    NOT_FIXED,
    SHARED_CLASSES,
    GpuResources,
    is_resource,
)
from vcuda.requests.schemes import SCHEMES

QUOTA, UNITS, SCHEME_SETTINGS, MODELS = "gpu_quota", "gpu_units", "gpu_schemes", "gpu_models"
"""Keys of the quota ConfigMap. The operator can choose another name for the key ``gpu_quota``."""
TIME_ZONE = "gpu_time_zone"
KEYS = (TEAMS, UNITS, SCHEME_SETTINGS, MODELS, TIME_ZONE)
PREFIX = "gpu_"
"""The prefix of this project's keys in the quota ConfigMap. Keys with another prefix are ignored."""

T = TypeVar("T")


class QuotaConfig(msgspec.Struct, frozen=True):
    """The parsed content of one version of the quota ConfigMap."""

    quota: Quota = Quota()
    resources: GpuResources = BUILT_IN


def parse_config(
    data: Mapping[str, str], key: str = QUOTA, system: frozenset[str] = SYSTEM_NAMESPACES, version: str = ""
) -> QuotaConfig:
    """Parse ``data`` of the quota ConfigMap. ``key``: the key of the quota. ``version``: the resourceVersion.

    Raises QuotaFault with the faults of all keys. The path of a fault in another key than ``key`` contains that key.
    """
    faults: list[Fault] = []

    def read(name: str, parse: Callable[[str], T], otherwise: T) -> T:
        try:
            return parse(data[name]) if name in data else otherwise
        except QuotaFault as fault:
            faults.extend(fault.faults if name == key else (_below(name, each) for each in fault.faults))
            return otherwise

    faults += _key_faults(data, key)
    zone = read(TIME_ZONE, parse_zone, times.UTC)
    teams: Mapping[str, TeamEntry] | None = None if TEAMS in data else {}
    teams = read(TEAMS, lambda text: document.parse_teams(text, system, zone), teams)
    quota = read(key, lambda text: document.parse_quota(text, system, zone, teams), Quota())
    schemes = read(SCHEME_SETTINGS, scheme_settings.parse_schemes, SCHEMES)
    units = read(UNITS, lambda text: parse_units(text, GpuResources(schemes)), BUILT_IN.own_units)
    models = read(MODELS, lambda text: card_models.parse_models(text, quota.models), NO_ROWS)
    quota = read(key, lambda _: with_card_memory(quota, models.memory_of) if not faults else quota, quota)
    if faults:
        raise QuotaFault(tuple(faults))
    resources = GpuResources(schemes, own_units=units, version=version, models=models, limited=quota.models)
    return QuotaConfig(msgspec.structs.replace(quota, version=version), resources)


def _key_faults(data: Mapping[str, str], key: str) -> Iterator[Fault]:
    for name in sorted(data.keys() - {key, *KEYS}):
        if name.startswith(PREFIX):
            hint = values.suggestion(name, KEYS) or f"supported keys: {', '.join((key, *KEYS))}"
            yield Fault(f"data.{name}", f"unknown key; {hint}")
    for name, nobody in ((key, "to limit no namespace"), (TEAMS, "for no team")):
        if name in data and document.is_empty(data[name]):
            yield Fault(f"data.{name}", f"must not be empty; write {{}} {nobody}")
    # Even with teams, a missing key would lift the limits of all entries.
    if key not in data:
        yield Fault(f"data.{key}", "is required; this key must have the quota document")


def _below(name: str, fault: Fault) -> Fault:
    if not fault.path:
        return Fault(f"data.{name}", fault.message)
    return Fault(f"{name}{'' if fault.path.startswith('[') else '.'}{fault.path}", fault.message)


def parse_zone(text: str) -> ZoneInfo:
    try:
        return grant_entries.read_zone(text.strip())
    except values.WrongValueError as error:
        raise QuotaFault((Fault("", str(error)),)) from None


def read_unit_name(name: str, info: pydantic.ValidationInfo) -> str:
    domain, slash, rest = name.partition("/")
    if name.startswith(CLASS_RESOURCE):
        raise values.WrongValueError(f"must be written as {CLASS}{values.printable(rest)}, for both claims and pods")
    if not (k8s_types.can_be_name(rest) if domain + slash == CLASS else is_resource(name)):
        raise values.WrongValueError(
            "must be the name of a resource, for example nvidia.com/gpu.shared, or of a DeviceClass, for example "
            f"{CLASS}gpu.example.com; got {values.brief(name)}"
        )
    # A resource that is built in, or belongs to a vendor's scheme, already has a charge. It must not get a second one.
    taken: GpuResources = info.context or BUILT_IN
    if scheme := taken.scheme_of.get(name):
        raise values.WrongValueError(f"must not be listed, because this resource belongs to scheme {scheme.name}")
    built_in = BUILT_IN.unit_of(name) is not None and not name.startswith(PROFILE) and name not in SHARED_CLASSES
    if name in NOT_FIXED or built_in:
        raise values.WrongValueError("must not be listed, because the charge of this resource is built in")
    return name


def read_cards_of_unit(value: object) -> Cores:
    if isinstance(value, Decimal) and value.is_finite() and value <= 0:
        raise values.WrongValueError("must be above 0. For a resource that is not a GPU, write {}")
    # One unit of a resource may be 1 MiB, which is much less than a hundredth of a card. So many decimals are allowed.
    return exact(CORES_PER_CARD * Fraction(values.read_cards(value, UNIT_DECIMALS)))


def read_memory_of_unit(value: object) -> int:
    """Return an amount of memory in MiB. It is rounded up, so that a pod is never charged less memory than it gets."""
    return math.ceil(values.read_bytes(value) / values.MIB)


class _UnitEntry(values.StrictModel):
    """An entry of ``gpu_units``: the charge of one unit of a resource. It is empty for a resource that is not a GPU."""

    cards: Annotated[Cores, pydantic.PlainValidator(read_cards_of_unit)] = 0
    memory: Annotated[int, pydantic.PlainValidator(read_memory_of_unit)] = 0

    @pydantic.model_validator(mode="after")
    def _has_cards(self) -> "_UnitEntry":
        if self.memory and not self.cards:
            raise values.WrongValueError("`cards` is required with `memory`, for example {cards: 0.25, memory: 10Gi}")
        return self

    @property
    def value(self) -> Charge:
        # If an entry states no memory, one unit is charged the same fraction of a card's memory as of its cores.
        return Charge(self.cards, self.memory, 0 if self.memory else self.cards)


_UNITS = pydantic.TypeAdapter(dict[Annotated[str, pydantic.AfterValidator(read_unit_name)], _UnitEntry])


def parse_units(text: str, taken: GpuResources) -> Mapping[str, Charge]:
    """Parse ``gpu_units``, and return the charge of one unit of each resource. Raises QuotaFault.

    ``taken``: the resources that already have a charge, so that ``gpu_units`` must not set one.
    """

    def sentence(details: ErrorDetails) -> str:
        return values.sentence(details, _UnitEntry, "must be a mapping, for example amd.com/gpu: {cards: 1}")

    def read(tree: Plain) -> Mapping[str, _UnitEntry]:
        entries = _UNITS.validate_python(tree, context=taken)
        gpus = (name for name in entries if name.startswith(PROFILE) or name in SHARED_CLASSES)
        free = (name for name in gpus if not entries[name].cards)
        values.raise_faults(((name,), "must have `cards`, because this resource is a GPU") for name in free)
        return entries

    entries = document.check_text(text, read, sentence)
    return {name: entry.value for name, entry in entries.items()}
