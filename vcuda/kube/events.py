"""Events: what `kubectl describe` shows of an object's history."""

from __future__ import annotations

import datetime
from typing import Literal

import msgspec

from vcuda.errors import Conflict
from vcuda.kube.client import Kube, segment

LONGEST_MESSAGE = 1024
"""Characters; the API server refuses an Event with more."""

DEFAULT_NAMESPACE = "default"
"""Where Events on objects without a namespace belong: the API server takes them nowhere else."""


class InvolvedObject(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The object that an Event is about, as its ``involvedObject``; the namespace of a cluster-wide one is empty."""

    api_version: str
    kind: str
    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""


class Event(msgspec.Struct, frozen=True):
    """One Event. ``id`` makes its name: of all that are posted with one id on one subject, the first is kept.

    ``component`` is the part of this system that saw it. A message that is too long is cut.
    """

    subject: InvolvedObject
    id: str
    reason: str
    message: str
    component: str
    type: Literal["Normal", "Warning"] = "Normal"


def post_event(kube: Kube, event: Event) -> None:
    """Write an Event; harmless where another process, or an earlier try, has written it.

    Raises:
        ApiError: the API server refuses it.
        Unreachable: no answer.

    """
    home = event.subject.namespace or DEFAULT_NAMESPACE
    try:
        kube.post(f"/api/v1/namespaces/{segment(home)}/events", msgspec.json.encode(_manifest(event, home)))
    except Conflict:
        return


def _manifest(event: Event, home: str) -> dict[str, object]:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{event.subject.name}.{event.id}", "namespace": home},
        "involvedObject": event.subject,
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:LONGEST_MESSAGE],
        "source": {"component": event.component},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
