"""Example ResourceClaims, and the devices and DeviceClasses of three DRA drivers."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from vcuda.claims.charges import ClaimPolicy
from vcuda.claims.devices import Devices, read_class, read_slice
from vcuda.claims.digest import ClaimDigest, digest_of
from vcuda.claims.drivers import DRIVERS
from vcuda.claims.names import API_VERSION
from vcuda.claims.objects import ClaimSpec, DeviceClass, ResourceSlice
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import Quota
from vcuda.requests.resources import BUILT_IN, CardModels, GpuResources, ProductRow

Manifest = dict[str, Any]

LABELS = NodeLabels()
NVIDIA, HAMI, VGPU_MANAGER = (driver.name for driver in DRIVERS)
M40, A100 = "Tesla M40 24GB", "NVIDIA A100-SXM4-40GB"
MEMORY = {M40: "24Gi", A100: "40Gi"}


def device(product: str, kind: str = "gpu", profile: str = "", name: str = "gpu-0", **fields: Any) -> Manifest:
    """Return a DRA device that is allocated as a whole: a card, or a MIG partition of a card."""
    texts = {"type": kind, "productName": product, **({"profile": profile} if profile else {})}
    attributes: Manifest = {key: {"string": text} for key, text in texts.items()}
    attributes["cudaComputeCapability"] = {"version": "8.0.0"}
    return {"name": name, "attributes": attributes, "capacity": {"memory": {"value": MEMORY[product]}}, **fields}


def shared(product: str, kind: str, cores: str = "100", **fields: Any) -> Manifest:
    """Return a card as a DRA device that several claims can share."""
    memory = MEMORY[product]
    capacity = {
        "cores": {
            "value": cores,
            "requestPolicy": {"default": "100", "validRange": {"min": "0", "max": cores, "step": "1"}},
        },
        "memory": {
            "value": memory,
            "requestPolicy": {"default": memory, "validRange": {"min": "1Mi", "max": memory, "step": "1Mi"}},
        },
    }
    return device(product, kind, capacity=capacity, allowMultipleAllocations=True, **fields)


def consumable(product: str, mode: str, memory: str = "", **fields: Any) -> Manifest:
    """Return a card as NVIDIA's driver publishes it with the flag --consumable-shares=``mode`` (a number of shares)."""
    capacity = consumable_capacity(mode, memory or MEMORY[product])
    return device(product, capacity=capacity, allowMultipleAllocations=True, **fields)


def consumable_capacity(mode: str, memory: str) -> Manifest:
    default, least = (memory, "1Mi") if mode == "memory" else ("0", "0")
    policy = {"default": default, "validRange": {"min": least, "max": memory, "step": "1Mi"}}
    capacity: Manifest = {"memory": {"value": memory, "requestPolicy": policy}}
    if mode.isdigit():
        span = {"min": "1", "max": mode, "step": "1"}
        capacity["shares"] = {"value": mode, "requestPolicy": {"default": "1", "validRange": span}}
    return capacity


def slice_of(driver: str, node: str, *devices: Manifest, generation: int = 1) -> ResourceSlice:
    """Return the ResourceSlice that a driver publishes for a node."""
    pool = {"name": node, "generation": generation, "resourceSliceCount": 1}
    spec = {"driver": driver, "nodeName": node, "pool": pool, "devices": list(devices)}
    return msgspec.convert({"metadata": {"name": f"{node}-{driver}-{generation}"}, "spec": spec}, ResourceSlice)


def device_class(*expressions: str, extended: str | None = None) -> DeviceClass:
    """Return a DeviceClass with these CEL selectors."""
    selectors = [{"cel": {"expression": expression}} for expression in expressions]
    return msgspec.convert({"spec": {"selectors": selectors, "extendedResourceName": extended}}, DeviceClass)


CLASSES = {
    name: device_class(f"device.driver == '{driver.name}' && device.attributes['{driver.name}'].type == '{kind}'")
    for driver in DRIVERS
    for name, kind in driver.classes.items()
}
"""The DeviceClasses that the drivers install."""

SLICES = (
    slice_of(NVIDIA, "old", device(M40)),
    slice_of(NVIDIA, "new", device(A100), *(device(A100, "mig", each, each) for each in ("1g.5gb", "3g.20gb"))),
    slice_of(HAMI, "old", shared(M40, "hami-gpu")),
    slice_of(HAMI, "new", shared(A100, "hami-gpu")),
    slice_of(VGPU_MANAGER, "new", device(A100), shared(A100, "vgpu", cores="200", name="vgpu-0")),
)
NO_QUOTA = Quota()
NODES = Nodes.of({"old": {LABELS.model: "M40"}, "new": {LABELS.model: "A100"}}, LABELS)


def claim_policy(
    slices: Iterable[ResourceSlice] = SLICES,
    *,
    classes: Mapping[str, DeviceClass] = CLASSES,
    quota: Quota = NO_QUOTA,
    resources: GpuResources = BUILT_IN,
    nodes: Nodes = NODES,
    rows: Mapping[str, tuple[str, ...]] = {},
) -> ClaimPolicy:
    """Return all that the webhook needs to decide about ResourceClaims: devices, DeviceClasses, nodes and quota."""
    facts = {name: read_class(each) for name, each in classes.items()}
    models = CardModels({model: ProductRow(products) for model, products in rows.items()})
    known = msgspec.structs.replace(resources, models=models) if rows else resources
    return ClaimPolicy.of(Devices.of(map(read_slice, slices), facts), nodes.model_of, quota, known)


def selector(expression: str) -> Manifest:
    """Return an item of the field ``selectors`` of a claim's request. ``expression``: its CEL expression."""
    return {"cel": {"expression": expression}}


def entry(device_class: str = NVIDIA, *expressions: str, **fields: Any) -> Manifest:
    """Return the value of a claim request's field ``exactly``, or one item of its field ``firstAvailable``."""
    selectors = {"selectors": [selector(each) for each in expressions]} if expressions else {}
    return {"deviceClassName": device_class, **selectors, **fields}


def share(device_class: str = HAMI, **amounts: str) -> Manifest:
    """Return a claim's request for a share of a card. ``amounts``: the requested capacity, such as cores and memory."""
    return entry(device_class, **({"capacity": {"requests": amounts}} if amounts else {}))


def first_of(*entries: Manifest) -> Manifest:
    """Return a claim's request with these alternatives (``firstAvailable``), in the order of preference."""
    return {"firstAvailable": [{"name": f"way-{index}", **each} for index, each in enumerate(entries)]}


def spec(*requests: Manifest) -> Manifest:
    """Return the spec of a claim. A request without ``firstAvailable`` becomes a request with ``exactly``."""
    listed = [each if "firstAvailable" in each else {"exactly": each} for each in requests]
    return {"devices": {"requests": [{"name": f"r{index}", **each} for index, each in enumerate(listed)]}}


def claim(*requests: Manifest, **metadata: Any) -> Manifest:
    about = {"name": "train-gpu", **metadata}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": about,
        "spec": spec(*(requests or (entry(),))),
    }


def template(*requests: Manifest) -> Manifest:
    return {**claim(), "kind": "ResourceClaimTemplate", "spec": {"spec": spec(*(requests or (entry(),)))}}


def view(manifest: Manifest) -> ClaimDigest:
    """Return a claim's digest: the part of its spec on which the charge depends."""
    return digest_of(msgspec.convert(manifest["spec"], ClaimSpec))


def published(*more: Manifest) -> Manifest:
    """Return the example nodes, slices, classes and further objects in a List, as kubectl prints it."""
    labelled = [
        {"kind": "Node", "metadata": {"name": name, "labels": dict(found)}} for name, found in NODES.labels.items()
    ]
    slices = [{"apiVersion": API_VERSION, "kind": "ResourceSlice", **msgspec.to_builtins(each)} for each in SLICES]
    classes = [
        {
            "apiVersion": API_VERSION,
            "kind": "DeviceClass",
            "metadata": {"name": name},
            "spec": msgspec.to_builtins(each.spec),
        }
        for name, each in CLASSES.items()
    ]
    return {"apiVersion": "v1", "kind": "List", "items": [*labelled, *slices, *classes, *more]}
