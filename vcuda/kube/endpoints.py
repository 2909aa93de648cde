"""Reads the addresses of a Service's endpoints from EndpointSlices."""

from collections.abc import Iterable, Iterator

from vcuda import k8s_types
from vcuda.k8s_types import Decoder
from vcuda.kube.client import Kube, segment
from vcuda.kube.objects import decode_all

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
