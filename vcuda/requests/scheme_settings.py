"""Key ``gpu_schemes`` of the quota ConfigMap: what a cluster has set otherwise than its vendor's defaults::

    hami: {resources: {count: nvidia.com/vgpu}, memory_mib: 100, scheduler: hami-scheduler}

``resources`` are the names by which pods ask, ``memory_mib`` is what one of the memory's is (HAMi's and vgpu-manager's
memory factor), ``scheduler`` the scheduler of pods that ask so; without one ``--scheduler-name`` holds.
``service_accounts`` are that scheduler's own, such as ``hami-system/hami-scheduler``: the claims that it makes for pods
pass, beside those of ``--scheduler-users``.
"""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Annotated, Any

import msgspec
import pydantic
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError, ValidationError

from vcuda import k8s_types
from vcuda.quota import document
from vcuda.quota.document import WrongValueError, shown
from vcuda.quota.yaml import Plain
from vcuda.requests.resources import BUILT_IN_UNITS, CLASS_RESOURCE, PLAIN_CARDS, is_resource, worth_of_profile
from vcuda.requests.schemes import SCHEMES, Scheme

MAX_MEMORY_MIB = 1024 * 1024
"""MiB that one of a scheme's memory may be: 1 TiB."""

_TAKEN = "taken"


_BY_NAME = {scheme.name: scheme for scheme in SCHEMES}


def read_scheme_name(name: str) -> str:
    """Return the name of a scheme that there is."""
    if name not in _BY_NAME:
        hint = document.suggestion(name, _BY_NAME) or f"the schemes are {', '.join(_BY_NAME)}"
        raise WrongValueError(f"unknown scheme; {hint}")
    return name


def read_resource(value: object) -> str:
    """Return a name that an extended resource can have."""
    if not isinstance(value, str) or not is_resource(value):
        raise WrongValueError(f"{shown(value)} can be no resource; write a name such as nvidia.com/vgpu")
    if (
        value.startswith(CLASS_RESOURCE)
        or worth_of_profile(value)
        or (value in BUILT_IN_UNITS and value != PLAIN_CARDS)
    ):
        raise WrongValueError("is built in as a unit; a scheme has names of its own")
    return value


def read_memory_mib(value: object) -> int:
    """Return whole MiB."""
    if not isinstance(value, Decimal) or value != value.to_integral_value() or not 1 <= value <= MAX_MEMORY_MIB:
        raise WrongValueError(f"{shown(value)} is no number of MiB; write a whole one from 1 to {MAX_MEMORY_MIB}")
    return int(value)


def read_scheduler(value: object) -> str:
    """Return a name that spec.schedulerName can have."""
    if not isinstance(value, str) or not k8s_types.can_be_name(value):
        raise WrongValueError(f"{shown(value)} can be no scheduler's name; write one such as hami-scheduler")
    return value


def read_service_account(value: object) -> str:
    """Return the user that a service account is, which is given as NAMESPACE/NAME."""
    namespace, slash, name = value.partition("/") if isinstance(value, str) else ("", "", "")
    if not (slash and all(map(k8s_types.can_be_name, (namespace, name)))):
        raise WrongValueError(f"{shown(value)} is no service account; write one such as hami-system/hami-scheduler")
    return f"system:serviceaccount:{namespace}:{name}"


_Name = Annotated[str | None, pydantic.PlainValidator(read_resource)]
_ServiceAccount = Annotated[str, pydantic.PlainValidator(read_service_account)]


class _ResourceNames(document.StrictModel):
    count: _Name = None
    cores: _Name = None
    memory: _Name = None
    memory_percentage: _Name = None


class _SchemeEntry(document.StrictModel):
    resources: _ResourceNames = _ResourceNames()
    memory_mib: Annotated[int | None, pydantic.PlainValidator(read_memory_mib)] = None
    scheduler: Annotated[str | None, pydantic.PlainValidator(read_scheduler)] = None
    service_accounts: list[_ServiceAccount] = pydantic.Field(default_factory=list)

    @property
    def names(self) -> Mapping[str, str]:
        """The resources that are named here, by the scheme's own fields."""
        return {key: name for key, name in self.resources.model_dump().items() if name is not None}


_ENTRIES: pydantic.TypeAdapter[dict[str, _SchemeEntry]] = pydantic.TypeAdapter(
    dict[Annotated[str, pydantic.AfterValidator(read_scheme_name)], _SchemeEntry],
    config=pydantic.ConfigDict(strict=True),
)


def read_schemes(tree: Plain) -> tuple[Scheme, ...]:
    """Return all schemes as they are set here; raise pydantic's ValidationError, with every fault."""
    entries = _ENTRIES.validate_python(tree)
    schemes = tuple(_with(scheme, entries.get(scheme.name)) for scheme in SCHEMES)
    faults = [
        InitErrorDetails(type=PydanticCustomError(_TAKEN, "{why}", {"why": why}), loc=place, input=None)
        for place, why in (*_misplaced(entries), *_taken_twice(entries, schemes))
    ]
    if faults:
        raise ValidationError.from_exception_data("gpu_schemes", faults)
    return schemes


def _with(scheme: Scheme, entry: _SchemeEntry | None) -> Scheme:
    if entry is None:
        return scheme
    set_here: dict[str, Any] = dict(entry.names)
    if entry.memory_mib:
        set_here["memory_unit"] = entry.memory_mib
    # NVIDIA's own device plugin has the one name; under another a vGPU is HAMi's alone.
    plain = scheme.counts_plain_cards and entry.names.get("count", PLAIN_CARDS) == PLAIN_CARDS
    set_here["scheduler_users"] = tuple(entry.service_accounts)
    return msgspec.structs.replace(scheme, **set_here, scheduler=entry.scheduler, counts_plain_cards=plain)


def _misplaced(entries: Mapping[str, _SchemeEntry]) -> Iterator[tuple[tuple[str, ...], str]]:
    for name, entry in entries.items():
        scheme = _BY_NAME[name]
        if scheme.count is None:
            # Constants of gpu-manager's and gpu-admission's code: a cluster that has others has another scheme.
            fixed = (("resources", bool(entry.names)), ("memory_mib", entry.memory_mib is not None))
            yield from (((name, key), f"is fixed in {name} itself; leave it out") for key, given in fixed if given)
        elif scheme.memory_percentage is None and "memory_percentage" in entry.names:
            yield (name, "resources", "memory_percentage"), f"{name} has none; leave it out"


def _taken_twice(
    entries: Mapping[str, _SchemeEntry], schemes: tuple[Scheme, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    users = [(resource, scheme.name) for scheme in schemes for resource in scheme.resources]
    for name, entry in entries.items():
        for key, resource in entry.names.items():
            others = [user for taken, user in users if taken == resource]
            if len(others) > 1:
                whose = next((user for user in others if user != name), name)
                yield (name, "resources", key), f"{resource} is a resource of scheme {whose} already"


def sentence(details: ErrorDetails) -> str:
    """Return what is wrong, for people."""
    place = details["loc"]
    match details["type"]:
        case "value_error":
            return str(details["ctx"]["error"])
        case "taken":
            return str(details["ctx"]["why"])
        case "extra_forbidden":
            keys = (_ResourceNames if "resources" in place[:-1] else _SchemeEntry).model_fields
            hint = document.suggestion(place[-1], keys) or f"the keys here are {', '.join(f'`{key}`' for key in keys)}"
            return f"unknown key; {hint}"
    return f"{shown(details['input'])} stands here; write a mapping such as hami: {{scheduler: hami-scheduler}}"
