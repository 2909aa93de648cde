"""EndpointSlices (discovery.k8s.io/v1): where a Service leads to, read as the API server does that calls one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vcuda.k8s_types import K8sStruct, ObjectMeta

SERVICE_NAME = "kubernetes.io/service-name"
"""The label that says which Service of its namespace a slice belongs to."""

MANAGED_BY = "endpointslice.kubernetes.io/managed-by"
"""The label that says who writes a slice; Kubernetes' own controllers leave alone what is not theirs."""

_DIALLED = ("IPv4", "IPv6")


class Conditions(K8sStruct, frozen=True):
    """The state of an endpoint; ``ready`` counts as true where it is not set."""

    ready: bool | None = None


class Endpoint(K8sStruct, frozen=True):
    """One endpoint. Of its addresses only the first has a meaning."""

    addresses: tuple[str, ...] = ()
    conditions: Conditions | None = None

    @property
    def is_ready(self) -> bool:
        """Whether calls are sent there."""
        return self.conditions is None or self.conditions.ready is not False


class Port(K8sStruct, frozen=True):
    """One port of all endpoints of a slice. Without a number any port is meant, which nobody can dial."""

    name: str | None = None
    port: int | None = None


class EndpointSlice(K8sStruct, frozen=True):
    """Some of a Service's endpoints: all of one address type (IPv4, IPv6 or FQDN), and with the same ports."""

    metadata: ObjectMeta = ObjectMeta()
    address_type: str = ""
    endpoints: tuple[Endpoint, ...] | None = None
    ports: tuple[Port, ...] | None = None


def ready_addresses(slices: Iterable[EndpointSlice], port_name: str) -> list[str]:
    """Return HOST:PORT of every ready endpoint in a Service's slices, each once.

    Of several ports of a slice the one named ``port_name`` counts. While endpoints move from one slice to another they
    are in both. An FQDN is left out: neither the API server nor kube-proxy calls one.
    """
    found = (address for each in slices if each.address_type in _DIALLED for address in _addresses(each, port_name))
    return list(dict.fromkeys(found))


def _addresses(found: EndpointSlice, port_name: str) -> Iterator[str]:
    ports = found.ports or ()
    numbers = [each.port for each in ports if each.port and (len(ports) == 1 or each.name == port_name)]
    for endpoint in found.endpoints or ():
        if endpoint.is_ready:
            yield from (_join(host, number) for host in endpoint.addresses[:1] for number in numbers)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
