"""Reads the usage report of a namespace, which the controller publishes in a ConfigMap."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from controller.plugin.kubectl import Kubectl, in_path, read_json
from vcuda import errors
from vcuda.ledger.report import NamespaceUse
from vcuda.quota.well_known import USAGE_KEY, USAGE_LABELS, USAGE_NAME

EVERY_REPORT: Mapping[str, str] = {
    "fieldSelector": f"metadata.name={USAGE_NAME}",
    "labelSelector": ",".join(f"{key}={value}" for key, value in USAGE_LABELS.items()),
}
"""The parameters of a LIST of ConfigMaps in all namespaces that returns only usage reports.

A policy allows only the controller to write ConfigMaps with this name, so no tenant can forge a report.
"""


class SpoiltReport(errors.VcudaError):
    """The usage report of a namespace is invalid, or describes another namespace, because somebody has edited it."""


def read_report(config_map: Mapping[str, Any]) -> NamespaceUse:
    """Return the report in a ConfigMap. Raises SpoiltReport."""
    namespace = config_map["metadata"]["namespace"]
    where = f"the usage report in ConfigMap {USAGE_NAME} of namespace {namespace}"
    try:
        use = msgspec.json.decode((config_map.get("data") or {}).get(USAGE_KEY, ""), type=NamespaceUse)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SpoiltReport(f"{where} cannot be read: {error}") from error
    if use.namespace != namespace:
        raise SpoiltReport(f"{where} is the report of another namespace")
    return use


def published_of(api: Kubectl, namespace: str) -> Iterator[NamespaceUse]:
    """Yield the report of a namespace, if there is one. Raises VcudaError."""
    with contextlib.suppress(errors.NotFound):
        yield read_report(read_json(api.get(f"/api/v1/namespaces/{in_path(namespace)}/configmaps/{USAGE_NAME}")))
