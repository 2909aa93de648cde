"""Converts JSON into the dataclasses of a published usage report.

Other parts of the project use msgspec for this. The plugin is shipped without binary packages such as msgspec.
"""

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def decode(kind: type[T], value: object) -> T:
    """Convert a JSON value into ``kind``: a dataclass, a tuple, a union with None, or a plain type such as int.

    Unknown keys are ignored. If a value is missing or has the wrong type, raise ValueError with the value's path.
    """
    decoded: T = _decode(kind, value, "$")
    return decoded


def _decode(kind: Any, value: object, path: str) -> Any:
    arguments = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        [other] = (each for each in arguments if each is not type(None))
        return None if value is None else _decode(other, value, path)
    if typing.get_origin(kind) is tuple:
        items = _expect(list, value, path)
        return tuple(_decode(arguments[0], each, f"{path}[{at}]") for at, each in enumerate(items))
    if dataclasses.is_dataclass(kind):
        return _decode_fields(kind, _expect(dict, value, path), path)
    if kind is float and type(value) is int:
        return float(value)
    return _expect(kind, value, path)


def _decode_fields(kind: Any, given: Mapping[str, object], path: str) -> Any:
    kinds = _kinds_of(kind)
    missing = [
        each.name for each in dataclasses.fields(kind) if each.default is dataclasses.MISSING and each.name not in given
    ]
    if missing:
        raise ValueError(f"{path}.{missing[0]} is required")
    return kind(**{name: _decode(kinds[name], given[name], f"{path}.{name}") for name in kinds if name in given})


@functools.cache
def _kinds_of(kind: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def _expect(kind: Any, value: object, path: str) -> Any:
    # The types are compared because isinstance would accept a Python bool as an int, but JSON's true is not a number.
    if type(value) is not kind:
        raise ValueError(f"{path} must be a {kind.__name__}")
    return value
