"""The command ``kubectl gpuquota refusals``: finds workloads in Events that report rejected pods or claims."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from controller import refusals
from controller.plugin.kubectl import Kubectl, segment


def read_refusals(api: Kubectl, namespace: str | None) -> Sequence[refusals.RefusedWorkload]:
    """Return workloads with refused pods or claims in a namespace (None: in all), newest first. Raises VcudaError."""
    path = "/api/v1/events" if namespace is None else f"/api/v1/namespaces/{segment(namespace)}/events"
    now = datetime.datetime.now(datetime.UTC)
    # Refusals are stored by the uid of their Event, because one Event may be on two pages if the list changes.
    found: dict[str, refusals.RefusedWorkload] = {}
    for reason in (refusals.REASON, refusals.CLAIM_REASON):
        for event in api.list_objects(path, {"fieldSelector": f"reason={reason}"}):
            if (refusal := refusals.read_refusal(_read(event), _last(event, now))) is not None:
                found[event["metadata"]["uid"]] = refusal
    return refusals.merge_by_workload(sorted(found.values(), key=lambda each: each.at, reverse=True))


def _read(event: Mapping[str, Any]) -> refusals.SeenEvent:
    about, series = event.get("involvedObject") or {}, event.get("series") or {}
    times = max(series.get("count") or 0, event.get("count") or 1)
    kind, name, namespace = (about.get(key) or "" for key in ("kind", "name", "namespace"))
    own, message = event["metadata"].get("namespace", ""), event.get("message") or ""
    return refusals.SeenEvent(own, kind, name, namespace, message, times)


def _last(event: Mapping[str, Any], now: datetime.datetime) -> str:
    # client-go writes the time of an Event to lastTimestamp in core/v1, but to eventTime and series in events.k8s.io.
    series = event.get("series") or {}
    written = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or ""
    return refusals.last_occurrence(event["metadata"].get("creationTimestamp") or "", written, now)
