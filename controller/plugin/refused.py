"""The command ``kubectl gpuquota refusals``: the workloads whose pods or claims were rejected, from their Events."""

import datetime
from collections.abc import Sequence

import msgspec

from controller.refusals import CLAIM_REASON, REASON, RefusedWorkload, StoredEvent, merge_by_workload, read_refusal
from vcuda.kube import Kube, segment

_EVENT = msgspec.json.Decoder(StoredEvent)


def read_refusals(kube: Kube, namespace: str | None) -> Sequence[RefusedWorkload]:
    """Return the refused workloads of a namespace, or of all namespaces, newest first. Raises VcudaError."""
    path = "/api/v1/events" if namespace is None else f"/api/v1/namespaces/{segment(namespace)}/events"
    now = datetime.datetime.now(datetime.UTC)
    # By uid, since an Event may be on two pages of a list that changes.
    found: dict[str, RefusedWorkload] = {}
    for reason in (REASON, CLAIM_REASON):
        for page in kube.list_pages(path, {"fieldSelector": f"reason={reason}"}):
            for raw in page.items:
                event = _EVENT.decode(raw)
                if (refusal := read_refusal(event, event.last(now))) is not None:
                    found[event.metadata.uid] = refusal
    return merge_by_workload(sorted(found.values(), key=lambda each: each.at, reverse=True))
