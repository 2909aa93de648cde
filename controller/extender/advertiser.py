"""Lets a Service lead to this process alone: it has no selector, and its EndpointSlice is written by hand."""

from __future__ import annotations

import ipaddress
import threading

import msgspec
import structlog

from vcuda.errors import NotFound, VcudaError
from vcuda.k8s_types import UNDECODABLE
from vcuda.kube import MERGE_PATCH, Kube, segment
from vcuda.kube.objects import MANAGED_BY, SERVICE_NAME, Conditions, Endpoint, EndpointSlice, Port

SERVICE = "vcuda-extender"
LOOK = 10.0
"""Seconds between two looks: what an earlier leader wrote late is put right."""

_LABELS = {SERVICE_NAME: SERVICE, MANAGED_BY: "vcuda-quota", "app.kubernetes.io/managed-by": "vcuda-quota"}
_SLICE = msgspec.json.Decoder(EndpointSlice)


class Advertiser:
    """Holds the one EndpointSlice of Service ``vcuda-extender`` to one address (IP and port) while it runs.

    Raises ValueError where ``ip`` is no IP address.
    """

    def __init__(self, kube: Kube, namespace: str, ip: str, port: int) -> None:
        self._kube = kube
        self._collection = f"/apis/discovery.k8s.io/v1/namespaces/{segment(namespace)}/endpointslices"
        self._path = f"{self._collection}/{SERVICE}"
        self._address_type = f"IPv{ipaddress.ip_address(ip).version}"
        self._endpoints = (Endpoint((ip,), Conditions(ready=True)),)
        self._ports = (Port("https", port),)
        self._log = structlog.get_logger().bind(service=f"{namespace}/{SERVICE}", ip=ip, port=port)

    def run(self, stopping: threading.Event) -> None:
        """Look, and put right, until told to stop."""
        while not stopping.is_set():
            try:
                self.hold()
            except (VcudaError, *UNDECODABLE) as error:
                self._log.warning("whether the Service leads here is not known", error=str(error))
            stopping.wait(LOOK)

    def hold(self) -> None:
        """Write the address, unless it stands there; raises VcudaError where that fails."""
        try:
            found = _SLICE.decode(self._kube.get(self._path))
            if self._leads_here(found):
                return
            self._correct(found)
        except NotFound:
            self._create()
        self._log.info("the Service leads here")

    def _leads_here(self, found: EndpointSlice) -> bool:
        labels = (found.metadata.labels or {}).items()
        stands = (found.address_type, found.endpoints, found.ports)
        return stands == (self._address_type, self._endpoints, self._ports) and labels >= _LABELS.items()

    def _correct(self, found: EndpointSlice) -> None:
        if found.address_type != self._address_type:  # cannot be changed: the API server refuses the patch
            self._kube.delete(self._path)
            self._create()
            return
        patch = {"metadata": {"labels": _LABELS}, "endpoints": self._endpoints, "ports": self._ports}
        self._kube.patch(self._path, msgspec.json.encode(patch), MERGE_PATCH)

    def _create(self) -> None:
        made = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": SERVICE, "labels": _LABELS},
            "addressType": self._address_type,
            "endpoints": self._endpoints,
            "ports": self._ports,
        }
        self._kube.post(self._collection, msgspec.json.encode(made))
