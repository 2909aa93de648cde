"""Reads the key ``gpu_schemes`` of the quota ConfigMap: settings that replace a vendor's defaults, for example::

    hami: {resources: {count: nvidia.com/vgpu}, memory_mib: 100, scheduler: hami-scheduler}

- ``resources``: the names of the resources by which pods request the vendor's cards.
- ``memory_mib``: the MiB in one unit of the memory resource (the memory factor of HAMi and vgpu-manager).
- ``default_cores``: the cores that are charged for a share with memory but without cores. ``card``, the default, means
  all cores of a card. ``memory`` means cores in proportion to the memory, rounded up. Neither HAMi nor vgpu-manager
  limits the cores of such a share.
- ``scheduler``: the scheduler of pods that request these resources. The default is ``--scheduler-name``.
- ``service_accounts``: the accounts of this scheduler, for example ``hami-system/hami-scheduler``. The ResourceClaims
  that they create for pods are admitted, like those of the users in ``--scheduler-users``.
"""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Annotated, Any

import msgspec
import pydantic
from pydantic_core import ErrorDetails

from vcuda import k8s_types
from vcuda.quota.document import check_text
from vcuda.quota.values import StrictModel, WrongValueError, brief, raise_faults, sentence, suggestion
from vcuda.quota.yaml import Plain
from vcuda.requests.mig import PROFILE
from vcuda.requests.resources import BUILT_IN_UNITS, CLASS_RESOURCE, PLAIN_CARDS, is_resource
from vcuda.requests.schemes import SCHEMES, Scheme

MAX_MEMORY_MIB = 1024 * 1024
"""The largest valid value of ``memory_mib`` in ``gpu_schemes``, which is 1 TiB."""

CARD, MEMORY = "card", "memory"

_BY_NAME = {scheme.name: scheme for scheme in SCHEMES}


def read_scheme_name(name: str) -> str:
    if name not in _BY_NAME:
        hint = suggestion(name, _BY_NAME) or f"supported schemes: {', '.join(_BY_NAME)}"
        raise WrongValueError(f"unknown scheme; {hint}")
    return name


def read_resource(value: object) -> str:
    if not isinstance(value, str) or not is_resource(value):
        raise WrongValueError(f"must be the name of a resource, for example nvidia.com/vgpu; got {brief(value)}")
    is_unit = value in BUILT_IN_UNITS and value != PLAIN_CARDS
    if is_unit or value.startswith((CLASS_RESOURCE, PROFILE)):
        raise WrongValueError("must be a resource that only this scheme has; the charge of this resource is built in")
    return value


def read_memory_mib(value: object) -> int:
    if not isinstance(value, Decimal) or value != value.to_integral_value() or not 1 <= value <= MAX_MEMORY_MIB:
        raise WrongValueError(f"must be a whole number of MiB from 1 to {MAX_MEMORY_MIB}; got {brief(value)}")
    return int(value)


def read_scheduler(value: object) -> str:
    if not isinstance(value, str) or not k8s_types.can_be_name(value):
        raise WrongValueError(f"must be the name of a scheduler, for example hami-scheduler; got {brief(value)}")
    return value


def read_service_account(value: object) -> str:
    """Return the user name of a service account. ``value`` names the account as NAMESPACE/NAME."""
    namespace, slash, name = value.partition("/") if isinstance(value, str) else ("", "", "")
    if not (slash and all(map(k8s_types.can_be_name, (namespace, name)))):
        raise WrongValueError(f"must be a service account, for example hami-system/hami-scheduler; got {brief(value)}")
    return f"system:serviceaccount:{namespace}:{name}"


def read_default_cores(value: object) -> bool:
    if value not in (CARD, MEMORY):
        raise WrongValueError(f"must be {CARD} or {MEMORY}; got {brief(value)}")
    return value == MEMORY


_Name = Annotated[str | None, pydantic.PlainValidator(read_resource)]
_ServiceAccount = Annotated[str, pydantic.PlainValidator(read_service_account)]


class _ResourceNames(StrictModel):
    count: _Name = None
    cores: _Name = None
    memory: _Name = None
    memory_percentage: _Name = None


class _SchemeEntry(StrictModel):
    resources: _ResourceNames = _ResourceNames()
    memory_mib: Annotated[int | None, pydantic.PlainValidator(read_memory_mib)] = None
    default_cores: Annotated[bool, pydantic.PlainValidator(read_default_cores)] = False
    scheduler: Annotated[str | None, pydantic.PlainValidator(read_scheduler)] = None
    service_accounts: list[_ServiceAccount] = pydantic.Field(default_factory=list)

    @property
    def names(self) -> Mapping[str, str]:
        return {key: name for key, name in self.resources.model_dump().items() if name is not None}


_ENTRIES = pydantic.TypeAdapter(dict[Annotated[str, pydantic.AfterValidator(read_scheme_name)], _SchemeEntry])


def parse_schemes(text: str) -> tuple[Scheme, ...]:
    """Return all vendors' schemes, changed by the settings in the text of ``gpu_schemes``. Raises QuotaFault."""
    return check_text(text, _read_schemes, _sentence)


def _read_schemes(tree: Plain) -> tuple[Scheme, ...]:
    entries = _ENTRIES.validate_python(tree)
    schemes = tuple(_with(scheme, entries.get(scheme.name)) for scheme in SCHEMES)
    raise_faults((*_misplaced(entries), *_taken_twice(entries, schemes)))
    return schemes


def _with(scheme: Scheme, entry: _SchemeEntry | None) -> Scheme:
    if entry is None:
        return scheme
    set_here: dict[str, Any] = dict(entry.names)
    if entry.memory_mib:
        set_here["memory_unit"] = entry.memory_mib
    # NVIDIA's own device plugin serves only nvidia.com/gpu. If the setting ``count`` names another resource, each unit
    # of it is a vGPU of this vendor, and not a whole card.
    plain = scheme.counts_plain_cards and entry.names.get("count", PLAIN_CARDS) == PLAIN_CARDS
    set_here["cores_by_memory"] = entry.default_cores
    set_here["scheduler_users"] = tuple(entry.service_accounts)
    return msgspec.structs.replace(scheme, **set_here, scheduler=entry.scheduler, counts_plain_cards=plain)


def _misplaced(entries: Mapping[str, _SchemeEntry]) -> Iterator[tuple[tuple[str, ...], str]]:
    for name, entry in entries.items():
        scheme = _BY_NAME[name]
        if scheme.count is None:
            # An operator cannot change these settings, because they are constants in gpu-manager and gpu-admission.
            fixed = (
                ("resources", bool(entry.names)),
                ("memory_mib", entry.memory_mib is not None),
                ("default_cores", entry.default_cores),
            )
            fault = f"must not be set, because this setting is fixed in {name}"
            yield from (((name, key), fault) for key, given in fixed if given)
        elif scheme.memory_percentage is None and "memory_percentage" in entry.names:
            yield (name, "resources", "memory_percentage"), f"must not be set, because {name} has no such resource"


def _taken_twice(
    entries: Mapping[str, _SchemeEntry], schemes: tuple[Scheme, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    users = [(resource, scheme.name) for scheme in schemes for resource in scheme.resources]
    for name, entry in entries.items():
        for key, resource in entry.names.items():
            rivals = [user for taken, user in users if taken == resource]
            if len(rivals) > 1:
                whose = next((user for user in rivals if user != name), name)
                yield (name, "resources", key), f"{resource} is already a resource of scheme {whose}"


def _sentence(details: ErrorDetails) -> str:
    entry = _ResourceNames if "resources" in details["loc"][:-1] else _SchemeEntry
    return sentence(details, entry, "must be a mapping, for example hami: {scheduler: hami-scheduler}")
