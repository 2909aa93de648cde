"""Objects of the API that are used whole: Events, which are written, and EndpointSlices, which are read."""

import contextlib
import datetime
from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar

import msgspec
import structlog

from vcuda import errors, k8s_types
from vcuda.kube.client import Kube, segment

LONGEST_MESSAGE = 1024  # characters; the API server refuses an Event with more

# Where Events on objects without a namespace belong: the API server takes them nowhere else.
DEFAULT_NAMESPACE = "default"


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

    Raises ApiError: the API server refuses it; Unavailable: no answer.
    """
    home = event.subject.namespace or DEFAULT_NAMESPACE
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    manifest = {
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
    with contextlib.suppress(errors.Conflict):
        kube.post(f"/api/v1/namespaces/{segment(home)}/events", msgspec.json.encode(manifest))


def post_event_or_log(kube: Kube, event: Event) -> None:
    """Write an Event of something that is done all the same: where it cannot be written, the log says so."""
    try:
        post_event(kube, event)
    except errors.VcudaError as error:
        structlog.get_logger().warning("event not written", object=event.subject.name, error=str(error))


T = TypeVar("T")


def decode_each(decoder: msgspec.json.Decoder[T], items: Iterable[bytes | msgspec.Raw]) -> Iterator[T]:
    """Yield the objects of a list; one that cannot be decoded costs only itself, and is logged."""
    for raw in items:
        try:
            yield decoder.decode(raw)
        except k8s_types.UNDECODABLE as error:
            structlog.get_logger().warning("object passed over: it cannot be decoded", error=str(error))


_NAMESPACE = msgspec.json.Decoder(k8s_types.K8sObject)


def namespace_names(kube: Kube, seconds: float) -> frozenset[str]:
    """Return the names of all namespaces. Raises Unavailable, or ListOverdue after so many seconds."""
    pages = kube.list_pages("/api/v1/namespaces", timeout=seconds, seconds=seconds)
    return frozenset(each.metadata.name for page in pages for each in decode_each(_NAMESPACE, page.items))


SERVICE_NAME = "kubernetes.io/service-name"
"""The label that says which Service of its namespace a slice belongs to."""

MANAGED_BY = "endpointslice.kubernetes.io/managed-by"
"""The label that says who writes a slice; Kubernetes' own controllers leave alone what is not theirs."""

# An FQDN slice is left out: neither the API server nor kube-proxy calls one.
_DIALLED = ("IPv4", "IPv6")


class Conditions(k8s_types.K8sStruct, frozen=True):
    """The state of an endpoint; ``ready`` counts as true where it is not set."""

    ready: bool | None = None


class Endpoint(k8s_types.K8sStruct, frozen=True):
    """One endpoint. Of its addresses only the first has a meaning."""

    addresses: tuple[str, ...] = ()
    conditions: Conditions | None = None

    @property
    def is_ready(self) -> bool:
        """Whether calls are sent there."""
        return self.conditions is None or self.conditions.ready is not False


class Port(k8s_types.K8sStruct, frozen=True):
    """One port of all endpoints of a slice. Without a number any port is meant, which nobody can dial."""

    name: str | None = None
    port: int | None = None


class EndpointSlice(k8s_types.K8sStruct, frozen=True):
    """Some of a Service's endpoints: all of one address type (IPv4, IPv6 or FQDN), and with the same ports."""

    metadata: k8s_types.ObjectMeta = k8s_types.ObjectMeta()
    address_type: str = ""
    endpoints: tuple[Endpoint, ...] | None = None
    ports: tuple[Port, ...] | None = None


_SLICE = msgspec.json.Decoder(EndpointSlice)


def service_addresses(kube: Kube, namespace: str, service: str, port_name: str, timeout: float = 30) -> dict[str, bool]:
    """Return HOST:PORT of every endpoint of a Service, and whether it is ready, as `read_addresses` does.

    ``timeout`` is for all of it. Raises VcudaError.
    """
    path = f"/apis/discovery.k8s.io/v1/namespaces/{segment(namespace)}/endpointslices"
    selector = {"labelSelector": f"{SERVICE_NAME}={service}"}
    pages = kube.list_pages(path, selector, timeout=timeout, seconds=timeout)
    try:
        return read_addresses([_SLICE.decode(item) for page in pages for item in page.items], port_name)
    except k8s_types.UNDECODABLE as error:
        raise errors.Unavailable(str(error)) from error


def read_addresses(slices: Iterable[EndpointSlice], port_name: str) -> dict[str, bool]:
    """Return HOST:PORT of every endpoint in a Service's slices, each once, and whether it is ready.

    Of several ports of a slice the one named ``port_name`` counts. One that terminates is not ready, but it is there:
    kube-proxy may call it where no other is ready, so whoever wants to know what is served asks it too.
    """
    found: dict[str, bool] = {}
    # While endpoints move from one slice to another they are in both, and ready if either says so.
    for address, ready in (one for each in slices for one in _endpoints(each, port_name)):
        found[address] = found.get(address, False) or ready
    return found


def _endpoints(found: EndpointSlice, port_name: str) -> Iterator[tuple[str, bool]]:
    if found.address_type not in _DIALLED:
        return
    ports = found.ports or ()
    numbers = [each.port for each in ports if each.port and (len(ports) == 1 or each.name == port_name)]
    for endpoint in found.endpoints or ():
        # No meaning is defined for further addresses of an endpoint.
        for host in endpoint.addresses[:1]:
            bracketed = f"[{host}]" if ":" in host else host
            yield from ((f"{bracketed}:{number}", endpoint.is_ready) for number in numbers)
