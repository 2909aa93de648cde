"""Writes Events."""

import contextlib
from typing import Literal

import msgspec
import structlog

from vcuda import errors, k8s_types
from vcuda.kube.client import Kube, segment

MAX_EVENT_MESSAGE_LENGTH = 1024  # characters of an Event's message; the API server rejects longer messages

# The API server accepts Events on cluster-wide objects only in this namespace.
DEFAULT_NAMESPACE = "default"


class InvolvedObject(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The ``involvedObject`` of an Event. ``namespace`` is empty for a cluster-wide object."""

    api_version: str
    kind: str
    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""


class Event(msgspec.Struct, frozen=True):
    """A Kubernetes Event. Its name is the subject's name, a dot and ``id``. A message that is too long is truncated.

    ``subject``: the object that the Event is about. ``component``: the part of this system that writes the Event.
    """

    subject: InvolvedObject
    id: str
    reason: str
    message: str
    component: str
    type: Literal["Normal", "Warning"] = "Normal"


def post_event(kube: Kube, event: Event) -> None:
    """Write an Event, unless its name is taken. Raises ApiError for a rejection, and Unavailable for other failures."""
    home = event.subject.namespace or DEFAULT_NAMESPACE
    now = k8s_types.time_now()
    manifest = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{event.subject.name}.{event.id}", "namespace": home},
        "involvedObject": event.subject,
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:MAX_EVENT_MESSAGE_LENGTH],
        "source": {"component": event.component},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
    with contextlib.suppress(errors.Conflict):
        kube.post(f"/api/v1/namespaces/{segment(home)}/events", msgspec.json.encode(manifest))


def post_event_or_log(kube: Kube, event: Event) -> None:
    try:
        post_event(kube, event)
    except errors.VcudaError as error:
        structlog.get_logger().warning("event not written", object=event.subject.name, error=str(error))
