"""Reads Events: about rejections of pods, and about removed allocations.

The webhook does not store rejections. The owner of a rejected pod (a ReplicaSet, Job, StatefulSet ...) writes an Event
with reason FailedCreate and the rejection as its message. The API server keeps the Event for an hour (kube-apiserver
``--event-ttl``). If a user creates a pod directly, there is no Event, and only this user sees the rejection.
"""

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vcuda.quota.rejections import find_rejection

REASON, CLAIM_REASON = "FailedCreate", "FailedResourceClaimCreation"
"""The reasons of Events that report a failed creation: first of a pod, then of a ResourceClaim."""

ALLOWED_SKEW = datetime.timedelta(minutes=1)
"""The time in an Event may be this far in the future, because the clock of the Event's writer may be ahead."""

MAX_MESSAGE_LENGTH = 1024
"""Messages are cut to this number of characters, which is the API server's limit for Events of events.k8s.io."""

MAX_SEARCHED_LENGTH = 16 * 1024
"""The most characters of a message that are searched for a rejection. A core/v1 Event may have any length."""

MAX_NAME_LENGTH = 253
"""The most characters of an object's name or kind that are kept. Events may have names and kinds of any length."""


class SeenEvent(NamedTuple):
    """An Event, and the object that the Event is about.

    ``namespace``: the namespace of the Event.
    ``kind``, ``name``, ``object_namespace``: the kind, name and namespace of that object.
    ``times``, ``at``: how often the Event has occurred, and the time of the last occurrence (RFC 3339).
    """

    namespace: str
    kind: str
    name: str
    object_namespace: str
    message: str
    times: int
    at: str

    @classmethod
    def of(cls, event: Mapping[str, Any], now: datetime.datetime) -> "SeenEvent":
        metadata, series = event["metadata"], event.get("series") or {}
        # client-go writes the time of an Event to lastTimestamp in core/v1, but to eventTime and series in
        # events.k8s.io.
        written = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or ""
        # A tenant can choose the time in an Event. A time before the Event's creation or after now is ignored.
        created = metadata.get("creationTimestamp") or ""
        first, last = moment(created), moment(written)
        at = written if first and last and first <= last <= now + ALLOWED_SKEW else created
        about, times = event.get("involvedObject") or {}, max(series.get("count") or 0, event.get("count") or 1)
        kind, name, namespace = (about.get(key) or "" for key in ("kind", "name", "namespace"))
        return cls(metadata.get("namespace", ""), kind, name, namespace, event.get("message") or "", times, at)


@dataclass(frozen=True, slots=True)
class ReportedObject:
    """A workload with rejected pods, an object that lost a stale GPU allocation, or a pod or claim beyond its quota.

    ``message``, ``at``: the newest message, and its time (RFC 3339). ``count``: how often this happened.
    """

    namespace: str
    kind: str
    name: str
    message: str
    at: str
    count: int = 1


def read_rejection(event: SeenEvent) -> ReportedObject | None:
    found = find_rejection(event.message[:MAX_SEARCHED_LENGTH])
    if found is None:
        return None
    kind, name = event.kind[:MAX_NAME_LENGTH], event.name[:MAX_NAME_LENGTH]
    return ReportedObject(event.namespace, kind, name, found[:MAX_MESSAGE_LENGTH], event.at, event.times)


def merge_by_workload(rejections: Iterable[ReportedObject]) -> Sequence[ReportedObject]:
    """Return one rejection for each workload: the newest reason, and the sum of the counts. The newest comes first."""
    # A workload has one Event for each different message, and the numbers in the messages of rejections change.
    latest: dict[tuple[str, str, str], ReportedObject] = {}
    for each in rejections:
        key = (each.namespace, each.kind, each.name)
        seen = latest.setdefault(key, each)
        if seen is not each:
            latest[key] = replace(seen, count=seen.count + each.count)
    return tuple(latest.values())


def moment(text: str) -> datetime.datetime | None:
    """Return the time of an RFC 3339 text; None if the text is not a time."""
    try:
        at = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return at if at.tzinfo else None
