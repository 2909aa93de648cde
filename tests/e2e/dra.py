"""GPUs by Dynamic Resource Allocation (DRA): objects as DRA drivers publish them, and claims as users write them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from examples.claims import consumable_capacity
from tests.builders import MODEL, container, pod
from tests.e2e.cluster import Cluster, Json, administering
from tools.control_plane import Settings, running_control_plane

VERSION = "resource.k8s.io/v1"
FROM_MINOR, EXTENDED_FROM_MINOR = 34, 36
"""The first minor versions of Kubernetes with `VERSION`, and with feature gate DRAExtendedResource on by default."""

NVIDIA, HAMI, VGPU_MANAGER = "gpu.nvidia.com", "hami-core-gpu.project-hami.io", "manager.nvidia.com"
PRODUCTS = {
    "A100": "NVIDIA A100-SXM4-40GB",
    "H100": "NVIDIA H100 80GB HBM3",
    "M40": "Tesla M40 24GB",
    "P100": "Tesla P100-PCIE-16GB",
    "V100": "Tesla V100-SXM2-32GB",
}
MEMORY = {"A100": "40Gi", "H100": "80Gi", "M40": "24Gi", "P100": "16Gi", "V100": "32Gi"}
EXTENDED = "nvidia.com/gpu"

CLASSES = {
    NVIDIA: (NVIDIA, "gpu", EXTENDED),
    HAMI: (HAMI, "hami-gpu", None),
}
"""The DeviceClasses that the vendors' charts install, by name: their driver, type of device and extended resource."""


class Published(NamedTuple):
    """The devices of one DRA driver on one node, as the driver publishes them in a ResourceSlice."""

    driver: str
    node: str
    devices: list[Json]

    def manifest(self) -> Json:
        pool = {"name": self.node, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": self.driver, "nodeName": self.node, "pool": pool, "devices": self.devices}
        return {**about("ResourceSlice", f"{self.node}-{self.driver}"), "spec": spec}


def about(kind: str, name: str, namespace: str | None = None) -> Json:
    place = {"namespace": namespace} if namespace else {}
    return {"apiVersion": VERSION, "kind": kind, "metadata": {"name": name, **place}}


def card(number: int, model: str, kind: str = "gpu", **fields: object) -> Json:
    named = {"type": kind, "productName": PRODUCTS[model], "brand": "Nvidia", "uuid": f"GPU-{model}-{number}"}
    attributes: Json = {name: {"string": value} for name, value in named.items()}
    attributes["cudaComputeCapability"] = {"version": "8.0.0"}
    return {
        "name": f"gpu-{number}",
        "attributes": attributes,
        "capacity": {"memory": {"value": MEMORY[model]}},
        **fields,
    }


def shared_card(number: int, model: str, kind: str) -> Json:
    """Return a card that several claims may share, as DRA drivers of HAMi and vgpu-manager publish it."""
    cores = {"default": "100", "validRange": {"min": "0", "max": "100", "step": "1"}}
    memory = {"default": MEMORY[model], "validRange": {"min": "1Mi", "max": MEMORY[model], "step": "1Mi"}}
    capacity = {
        "cores": {"value": "100", "requestPolicy": cores},
        "memory": {"value": MEMORY[model], "requestPolicy": memory},
    }
    return card(number, model, kind, capacity=capacity, allowMultipleAllocations=True)


def consumable_card(number: int, model: str, mode: str) -> Json:
    """Return a card as NVIDIA's DRA driver publishes it with the flag --consumable-shares=``mode``."""
    return card(number, model, capacity=consumable_capacity(mode, MEMORY[model]), allowMultipleAllocations=True)


@contextmanager
def published(cluster: Cluster, *slices: Published) -> Iterator[None]:
    """Create the DeviceClasses of the DRA drivers, and nodes with these devices, during the ``with`` statement.

    The model label of a node names the model of its first device.
    """
    nodes: set[str] = set()
    with ExitStack() as teardown:
        for name, (driver, kind, extended) in CLASSES.items():
            expression = f'device.driver == "{driver}" && device.attributes["{driver}"].type == "{kind}"'
            spec = {"selectors": [{"cel": {"expression": expression}}]}
            resource = {"extendedResourceName": extended} if extended else {}
            cluster.create({**about("DeviceClass", name), "spec": {**spec, **resource}})
            teardown.callback(cluster.delete, f"/apis/{VERSION}/deviceclasses/{name}")
        for each in slices:
            products = {product: model for model, product in PRODUCTS.items()}
            model = products[each.devices[0]["attributes"]["productName"]["string"]]
            if each.node not in nodes:
                cluster.create_node(each.node, {MODEL: model})
                teardown.callback(cluster.delete_node, each.node)
            nodes.add(each.node)
            cluster.create(manifest := each.manifest())
            teardown.callback(cluster.delete, f"/apis/{VERSION}/resourceslices/{manifest['metadata']['name']}")
        yield


@contextmanager
def dra_cluster(assets: Path | None, directory: Path, *slices: Published) -> Iterator[Cluster]:
    """Run a control plane with these devices. Skip the test if the API server does not serve claims.

    The scheduler and the controller manager have the users and rights of a real cluster.
    """
    settings = Settings(own_identities=True)
    with (
        running_control_plane(assets, directory / "control-plane", settings) as running,
        administering(running) as admin,
    ):
        require_dra(admin)
        with published(admin, *slices):
            yield admin


def request(device_class: str = NVIDIA, name: str = "gpu", **fields: object) -> Json:
    """Return an item of a claim's requests, for one device of a DeviceClass. ``fields``: more fields of the item."""
    return {"name": name, "exactly": {"deviceClassName": device_class, **fields}}


def claim(namespace: str, name: str, *requests: Json) -> Json:
    spec = {"devices": {"requests": list(requests or [request()])}}
    return {**about("ResourceClaim", name, namespace), "spec": spec}


def template(namespace: str, name: str, *requests: Json, **metadata: object) -> Json:
    """Return a ResourceClaimTemplate. ``metadata``: the metadata of claims that Kubernetes creates by the template."""
    spec = {"metadata": metadata, "spec": claim(namespace, name, *requests)["spec"]}
    return {**about("ResourceClaimTemplate", name, namespace), "spec": spec}


def claiming(namespace: str, name: str, **source: str) -> Json:
    """Return a pod whose container uses a claim.

    ``source``: the pod's field that names the claim: resourceClaimName or resourceClaimTemplateName.
    """
    uses = container(name="main", resources={"claims": [{"name": "gpu"}]})
    claims = [{"name": "gpu", **source}]
    metadata = {"name": name, "namespace": namespace}
    return pod(uses, metadata=metadata, resourceClaims=claims, terminationGracePeriodSeconds=0)


def claims(cluster: Cluster, namespace: str) -> list[Json]:
    found: list[Json] = cluster.rest.get(claims_path(namespace))["items"]
    return found


def claims_path(namespace: str) -> str:
    return f"/apis/{VERSION}/namespaces/{namespace}/resourceclaims"


def devices_of(claim: Json) -> list[str]:
    allocation = claim.get("status", {}).get("allocation", {})
    results = allocation.get("devices", {}).get("results", [])
    return [f"{each['driver']}/{each['pool']}/{each['device']}" for each in results]


def served(cluster: Cluster) -> bool:
    return cluster.control_plane.minor >= FROM_MINOR


def has_extended_resources(cluster: Cluster) -> bool:
    """Return whether the API server's version has KEP-5004: the scheduler creates claims for extended resources."""
    return cluster.control_plane.minor >= EXTENDED_FROM_MINOR


def require_dra(cluster: Cluster) -> None:
    if not served(cluster):
        pytest.skip(f"{VERSION} is served from Kubernetes 1.{FROM_MINOR} on, this is 1.{cluster.control_plane.minor}")
