"""Writes the leader's address into the EndpointSlice of a Service, so that the Service routes to the leader alone."""

import ipaddress
import threading

import msgspec
import structlog

from vcuda.errors import NotFound, VcudaError
from vcuda.k8s_types import UNDECODABLE, Decoder
from vcuda.kube import MERGE_PATCH, Kube, endpoints, segment

CHECK_INTERVAL_SECONDS = 10.0
"""Seconds between two checks of the EndpointSlice, which a former leader may overwrite."""

_OURS = {endpoints.MANAGED_BY: "vcuda-quota", "app.kubernetes.io/managed-by": "vcuda-quota"}
_SLICE = Decoder(endpoints.EndpointSlice)


class Advertiser:
    """Ensures that the EndpointSlice of a Service contains only this replica's address.

    ``address``: this replica's IP address and port.
    ``port_name``: the name of the Service's port.
    """

    # The Service has no pod selector. With a selector, Kubernetes would also route requests to the standby replicas,
    # because their pods are ready.

    def __init__(self, kube: Kube, namespace: str, service: str, address: tuple[str, int], port_name: str) -> None:
        ip, port = address
        self._kube = kube
        self._collection = f"/apis/discovery.k8s.io/v1/namespaces/{segment(namespace)}/endpointslices"
        self._path = f"{self._collection}/{service}"
        self._labels = {endpoints.SERVICE_NAME: service, **_OURS}
        self._address_type = f"IPv{ipaddress.ip_address(ip).version}"
        self._endpoints = (endpoints.Endpoint((ip,), endpoints.Conditions(ready=True)),)
        self._ports = (endpoints.Port(port_name, port),)
        self._manifest = msgspec.json.encode(
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {"name": service, "labels": self._labels},
                "addressType": self._address_type,
                "endpoints": self._endpoints,
                "ports": self._ports,
            }
        )
        self._log = structlog.get_logger().bind(service=f"{namespace}/{service}", ip=ip, port=port)

    def run(self, stopping: threading.Event) -> None:
        """Keep this replica's address in the EndpointSlice until ``stopping`` is set. Failures are retried."""
        while not stopping.is_set():
            try:
                self.advertise()
            except (VcudaError, *UNDECODABLE) as error:  # An edit by a user can make the EndpointSlice undecodable.
                self._log.warning("the EndpointSlice of the Service could not be checked", error=str(error))
            stopping.wait(CHECK_INTERVAL_SECONDS)

    def advertise(self) -> None:
        """Create or correct the EndpointSlice if it does not contain this replica's address. Raises VcudaError."""
        try:
            found = _SLICE.decode(self._kube.get(self._path))
            if self._is_correct(found):
                return
            if found.address_type == self._address_type:
                self._kube.patch(self._path, self._manifest, MERGE_PATCH)
            else:
                # The API server rejects a change of `addressType` (ValidateEndpointSliceUpdate).
                self._kube.delete(self._path)
                self._kube.post(self._collection, self._manifest)
        except NotFound:
            self._kube.post(self._collection, self._manifest)
        self._log.info("the Service routes to this replica")

    def _is_correct(self, found: endpoints.EndpointSlice) -> bool:
        # Without the labels in `_OURS`, Kubernetes' own controller would change the EndpointSlice. Further labels, for
        # example of users, are allowed.
        labels = (found.metadata.labels or {}).items()
        written = (found.address_type, found.endpoints, found.ports)
        return written == (self._address_type, self._endpoints, self._ports) and labels >= self._labels.items()
