"""Checks that the objects in a file have the fields and types of their kind."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from vcuda import errors, k8s_types
from vcuda.claims.names import CLAIM, TEMPLATE
from vcuda.claims.objects import ResourceClaim, ResourceClaimTemplate
from vcuda.workloads import Manifest, Unread, Workload, without_nulls, workloads_in

T = TypeVar("T")

NOT_JSON = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""Exceptions that msgspec raises for YAML that JSON cannot express, for example half of a surrogate pair, or an object
that contains itself."""

_VIEWS: Mapping[str, type[k8s_types.K8sObject]] = {
    "Pod": k8s_types.Pod,
    CLAIM: ResourceClaim,
    TEMPLATE: ResourceClaimTemplate,
}


def typed_workloads(source: str, text: str, namespace: str) -> list[Workload | Unread]:
    """Return the workloads in a text. An object is malformed if one of its fields has a wrong type."""
    return workloads_in(source, text, namespace, _check)


def _check(where: str, manifest: Manifest) -> Manifest:
    convert(where, manifest, _VIEWS[manifest["kind"]])
    return _plain(where, manifest)


def convert(where: str, manifest: Manifest, view: type[T]) -> T:
    """Return a manifest as an object of class ``view``. Raises BadInput if a field is missing or has a wrong type."""
    try:
        return msgspec.convert(_plain(where, manifest), view)
    except msgspec.MsgspecError as error:
        raise errors.BadInput(f"{where}: the object is malformed: {error}") from error


def _plain(where: str, manifest: Manifest) -> Manifest:
    # Like kubectl, convert YAML to JSON. Null fields are removed, because the API server treats them as absent.
    try:
        plain: Manifest = without_nulls(msgspec.json.decode(msgspec.json.encode(manifest, enc_hook=str)))
    except NOT_JSON as error:
        raise errors.BadInput(f"{where}: the object is malformed: {error}") from error
    return plain
