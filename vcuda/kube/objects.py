"""Writes Events, and reads EndpointSlices, the names of namespaces, all pods and the registration."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import msgspec
import structlog

from vcuda import errors, k8s_types, registration
from vcuda.k8s_types import Decoder
from vcuda.kube.client import Kube, segment
from vcuda.kube.pages import Page, name_in

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


T = TypeVar("T")


def decode_each(decoder: Decoder[T], items: Iterable[bytes | msgspec.Raw]) -> Iterator[T]:
    """Yield the decoded objects of a list. An object that cannot be decoded is logged and left out."""
    for raw in items:
        try:
            yield decoder.decode(raw)
        except k8s_types.UNDECODABLE as error:
            name = str(name_in(bytes(raw)))
            structlog.get_logger().warning("object left out", object=name, error=type(error).__name__)


def decode_all(decode: Callable[[msgspec.Raw], T], pages: Iterable[Page]) -> Iterator[T]:
    """Yield the decoded objects of a LIST. Raises Unavailable with the name of an object that cannot be decoded."""
    for raw in (raw for page in pages for raw in page.items):
        try:
            yield decode(raw)
        except k8s_types.UNDECODABLE as error:
            raise errors.Unavailable(f"{name_in(bytes(raw))} cannot be decoded; it may have to be deleted") from error


_NAMESPACE = Decoder(k8s_types.K8sObject)


def namespace_names(kube: Kube, seconds: float) -> frozenset[str]:
    """Return the names of all namespaces. Raises Unavailable, or ListOverdue after ``seconds``."""
    pages = kube.list_pages("/api/v1/namespaces", timeout=seconds, seconds=seconds)
    return frozenset(each.metadata.name for page in pages for each in decode_each(_NAMESPACE, page.items))


_POD = Decoder(k8s_types.Pod)


def living_pods(kube: Kube, seconds: float) -> Iterator[k8s_types.Pod]:
    """Yield all pods that have not ended. Raises Unavailable, or ListOverdue after ``seconds``."""
    living = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}
    pages = kube.list_pages("/api/v1/pods", living, timeout=seconds, seconds=seconds, skip=lambda _too_large: None)
    return (pod for page in pages for pod in decode_each(_POD, page.items))


SERVICE_NAME = "kubernetes.io/service-name"
"""The label of an EndpointSlice that names its Service."""

MANAGED_BY = "endpointslice.kubernetes.io/managed-by"
"""The label of an EndpointSlice that names its writer. Kubernetes' controllers do not change other writers' slices."""

# EndpointSlices of type FQDN are left out, because neither the API server nor kube-proxy uses them.
_DIALLED = ("IPv4", "IPv6")


class Conditions(k8s_types.K8sStruct, frozen=True):
    """The conditions of a Service's endpoint. An endpoint without ``ready`` counts as ready."""

    ready: bool | None = None


class Endpoint(k8s_types.K8sStruct, frozen=True):
    """One endpoint of a Service. Only the first of its addresses has a defined meaning."""

    addresses: tuple[str, ...] = ()
    conditions: Conditions | None = None


class Port(k8s_types.K8sStruct, frozen=True):
    """A port of all endpoints of an EndpointSlice. A port without a number means "all ports" and is ignored."""

    name: str | None = None
    port: int | None = None


class EndpointSlice(k8s_types.K8sStruct, frozen=True):
    """Some endpoints of a Service, of one address type (IPv4, IPv6 or FQDN) and with the same ports."""

    metadata: k8s_types.ObjectMeta = k8s_types.ObjectMeta()
    address_type: str = ""
    endpoints: tuple[Endpoint, ...] | None = None
    ports: tuple[Port, ...] | None = None


_SLICE = Decoder(EndpointSlice)


def service_addresses(kube: Kube, namespace: str, service: str, port_name: str, timeout: float = 30) -> dict[str, bool]:
    """Return HOST:PORT of each endpoint of a Service, with True if it is ready. Raises VcudaError if a read fails."""
    path = f"/apis/discovery.k8s.io/v1/namespaces/{segment(namespace)}/endpointslices"
    selector = {"labelSelector": f"{SERVICE_NAME}={service}"}
    pages = kube.list_pages(path, selector, timeout=timeout, seconds=timeout)
    return read_addresses(decode_all(_SLICE.decode, pages), port_name)


def read_addresses(slices: Iterable[EndpointSlice], port_name: str) -> dict[str, bool]:
    found: dict[str, bool] = {}
    # While an endpoint moves to another EndpointSlice, it is in two slices. It is ready if either reports it ready.
    for address, ready in (one for each in slices for one in _endpoints(each, port_name)):
        found[address] = found.get(address, False) or ready
    return found


def _endpoints(found: EndpointSlice, port_name: str) -> Iterator[tuple[str, bool]]:
    if found.address_type not in _DIALLED:
        return
    ports = found.ports or ()
    numbers = [each.port for each in ports if each.port and (len(ports) == 1 or each.name == port_name)]
    for endpoint in found.endpoints or ():
        is_ready = endpoint.conditions is None or endpoint.conditions.ready is not False
        for host in endpoint.addresses[:1]:
            bracketed = f"[{host}]" if ":" in host else host
            yield from ((f"{bracketed}:{number}", is_ready) for number in numbers)


def missing_registration(kube: Kube) -> Sequence[registration.MissingObject]:
    """Return what is missing of the webhooks and policies that the manifests declare. Raises VcudaError."""

    def get(kind: str, name: str) -> dict[str, Any] | None:
        path = f"/apis/admissionregistration.k8s.io/v1/{registration.RESOURCES[kind]}/{segment(name)}"
        try:
            found: dict[str, Any] = msgspec.json.decode(kube.get(path))
        except errors.NotFound:
            return None
        return found

    return registration.find_missing(get)
