"""Checks that the objects of a file have the shape of their kind."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from vcuda import errors, k8s_types
from vcuda.claims.names import CLAIM, TEMPLATE
from vcuda.claims.objects import ResourceClaim, ResourceClaimTemplate
from vcuda.workloads import Manifest, Unread, Workload, without_nulls, workloads_in

T = TypeVar("T")

NOT_JSON = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""The exceptions of msgspec for YAML that JSON cannot hold: half a surrogate pair, an object inside itself."""

_VIEWS: Mapping[str, type[k8s_types.K8sObject]] = {
    "Pod": k8s_types.Pod,
    CLAIM: ResourceClaim,
    TEMPLATE: ResourceClaimTemplate,
}


def typed_workloads(source: str, text: str, namespace: str) -> list[Workload | Unread]:
    """Return the workloads of a text as `workloads_in` does. One whose shape is not its kind's is malformed."""
    return workloads_in(source, text, namespace, _check)


def _check(where: str, manifest: Manifest) -> Manifest:
    convert(where, manifest, _VIEWS[manifest["kind"]])
    return _plain(where, manifest)


def convert(where: str, manifest: Manifest, view: type[T]) -> T:
    """Return a typed view of a manifest. Raises BadInput where its shape is not that kind's."""
    try:
        return msgspec.convert(_plain(where, manifest), view)
    except msgspec.MsgspecError as error:
        raise errors.BadInput(f"{where}: malformed: {error}") from error


def _plain(where: str, manifest: Manifest) -> Manifest:
    # As JSON, which is what reaches the API server; null fields count as absent there.
    try:
        plain: Manifest = without_nulls(msgspec.json.decode(msgspec.json.encode(manifest, enc_hook=str)))
    except NOT_JSON as error:
        raise errors.BadInput(f"{where}: malformed: {error}") from error
    return plain
