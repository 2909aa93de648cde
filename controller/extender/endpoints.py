"""Lets a Service lead to this process alone: its Endpoints are written by hand, as it has no selector."""

from __future__ import annotations

import threading

import msgspec
import structlog

from vcuda.errors import NotFound, VcudaError
from vcuda.kube import MERGE_PATCH, Kube, segment
from vcuda.objects import UNDECODABLE, View

SERVICE = "vcuda-extender"
LOOK = 10.0
"""Seconds between two looks: what an earlier leader wrote late is put right."""


class Address(View, frozen=True):
    """One address behind a Service."""

    ip: str = ""


class Port(View, frozen=True):
    """One port of it."""

    name: str = ""
    port: int = 0


class Subset(View, frozen=True):
    """Addresses that all have the same ports."""

    addresses: tuple[Address, ...] | None = None
    ports: tuple[Port, ...] | None = None


class Endpoints(View, frozen=True):
    """A v1 Endpoints, which every release of Kubernetes has; it is mirrored to EndpointSlices where there are such."""

    subsets: tuple[Subset, ...] | None = None


_ENDPOINTS = msgspec.json.Decoder(Endpoints)


class Advertiser:
    """Holds the Endpoints of Service ``vcuda-extender`` to one address (IP and port) while it runs."""

    def __init__(self, kube: Kube, namespace: str, ip: str, port: int) -> None:
        self._kube = kube
        self._collection = f"/api/v1/namespaces/{segment(namespace)}/endpoints"
        self._subsets = (Subset((Address(ip),), (Port("https", port),)),)
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
        path = f"{self._collection}/{SERVICE}"
        try:
            if _ENDPOINTS.decode(self._kube.get(path)).subsets == self._subsets:
                return
            self._kube.patch(path, msgspec.json.encode({"subsets": self._subsets}), MERGE_PATCH)
        except NotFound:
            metadata = {"name": SERVICE, "labels": {"app.kubernetes.io/managed-by": "vcuda-quota"}}
            made = {"apiVersion": "v1", "kind": "Endpoints", "metadata": metadata, "subsets": self._subsets}
            self._kube.post(self._collection, msgspec.json.encode(made))
        self._log.info("the Service leads here")
