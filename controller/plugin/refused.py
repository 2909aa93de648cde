"""The command ``kubectl gpuquota refusals``: finds workloads in Events that report rejected pods or claims."""

import datetime
from collections.abc import Sequence

from controller import refusals
from controller.plugin.kubectl import Kubectl, segment


def read_refusals(api: Kubectl, namespace: str | None) -> Sequence[refusals.ReportedObject]:
    """Return workloads with refused pods or claims in a namespace (None: in all), newest first. Raises VcudaError."""
    path = "/api/v1/events" if namespace is None else f"/api/v1/namespaces/{segment(namespace)}/events"
    now = datetime.datetime.now(datetime.UTC)
    # Refusals are stored by the uid of their Event, because one Event may be on two pages if the list changes.
    found: dict[str, refusals.ReportedObject] = {}
    for reason in (refusals.REASON, refusals.CLAIM_REASON):
        for event in api.list_objects(path, {"fieldSelector": f"reason={reason}"}):
            if (refusal := refusals.read_refusal(refusals.SeenEvent.of(event, now))) is not None:
                found[event["metadata"]["uid"]] = refusal
    return refusals.merge_by_workload(sorted(found.values(), key=lambda each: each.at, reverse=True))
