"""The command ``kubectl gpuquota rejections``: finds workloads in Events that report rejected pods or claims."""

import datetime
from collections.abc import Sequence

from controller import seen_events
from controller.plugin.kubectl import Kubectl, in_path


def read_rejections(api: Kubectl, namespace: str | None) -> Sequence[seen_events.ReportedObject]:
    """Return workloads with rejected pods or claims in a namespace (None: in all), newest first. Raises VcudaError."""
    path = "/api/v1/events" if namespace is None else f"/api/v1/namespaces/{in_path(namespace)}/events"
    now = datetime.datetime.now(datetime.UTC)
    # Rejections are stored by the uid of their Event, because one Event may be on two pages if the list changes.
    found: dict[str, seen_events.ReportedObject] = {}
    for reason in (seen_events.REASON, seen_events.CLAIM_REASON):
        for event in api.list_objects(path, {"fieldSelector": f"reason={reason}"}):
            if (rejection := seen_events.read_rejection(seen_events.SeenEvent.of(event, now))) is not None:
                found[event["metadata"]["uid"]] = rejection
    return seen_events.merge_by_workload(sorted(found.values(), key=lambda each: each.at, reverse=True))
