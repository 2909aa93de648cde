"""Writes up to hundreds of thousands of objects directly into etcd, in the form in which the API server stores them.

Through the API server, each object would need a create request, and each claim also a write of its status. These writes
would take several minutes on two CPUs.
"""

from __future__ import annotations

import base64
import itertools
import json
import urllib.request
import uuid
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bench.plane import Plane
from tests.builders import LABELS, MODEL
from tests.e2e.cluster import Json
from tests.e2e.dra import HAMI, NVIDIA, PRODUCTS, VGPU_MANAGER, Published, about, card, request, shared_card
from vcuda.claims.pin import ClaimPin, write_pin
from vcuda.requests.folding import fold

A_TRANSACTION = 100
"""The number of objects in one transaction of etcd, which accepts at most 128 operations."""

SHARED = 1
"""The number of the first ResourceSlice with cards that claims can share. The number of a slice determines its
driver."""

CARDS = 8
SHARE = {"cores": "25", "memory": "1Gi"}
DRIVERS = ((NVIDIA, NVIDIA, "gpu"), (HAMI, HAMI, "hami-gpu"), (VGPU_MANAGER, "vgpu-manager", "vgpu"))
"""For each DRA driver: its name, the name of its DeviceClass, and the type of the devices in this class."""


class Offered(NamedTuple):
    """The devices of one ResourceSlice.

    ``driver``: the DRA driver that publishes them.
    ``device_class``: the DeviceClass that selects them.
    ``kind``: the value of their attribute `type`.
    ``model``: the GPU model.
    """

    driver: str
    device_class: str
    kind: str
    model: str

    @classmethod
    def by(cls, number: int) -> Offered:
        """Return the devices of the ResourceSlice with this number. Successive slices have different drivers."""
        models = tuple(PRODUCTS)
        return cls(*DRIVERS[number % len(DRIVERS)], models[number // len(DRIVERS) % len(models)])

    @property
    def cores(self) -> int:
        """The number of cores that one claim for these devices is charged. A whole card has 100 cores."""
        return 100 if self.driver == NVIDIA else int(SHARE["cores"])


def node(number: int) -> tuple[str, Json]:
    """Return the etcd key and the manifest of a node. The ResourceSlice with this number belongs to the node."""
    labels = {MODEL: Offered.by(number).model, LABELS.pool: "public"}
    metadata = {"name": f"node-{number}", "labels": labels}
    return f"minions/node-{number}", {"apiVersion": "v1", "kind": "Node", "metadata": metadata}


def resource_slice(number: int, generation: int = 1) -> tuple[str, Json]:
    """Return the etcd key and the manifest of the ResourceSlice with this number. It has eight cards."""
    offered = Offered.by(number)
    if offered.driver == NVIDIA:
        cards = [card(each, offered.model, offered.kind) for each in range(CARDS)]
    else:
        cards = [shared_card(each, offered.model, offered.kind) for each in range(CARDS)]
    manifest = Published(offered.driver, f"node-{number}", cards).manifest()
    manifest["spec"]["pool"]["generation"] = generation
    return f"resourceslices/{manifest['metadata']['name']}", manifest


def claim(number: int, namespace: str, slices: int) -> tuple[str, Json]:
    """Return the etcd key and the manifest of an allocated claim. Its CEL expression limits it to one GPU model."""
    home = number % slices
    offered, name = Offered.by(home), f"claim-{number}"
    pin = write_pin(ClaimPin(offered.driver, (fold(offered.model), fold(PRODUCTS[offered.model]))))
    share: Json = {} if offered.driver == NVIDIA else {"capacity": {"requests": SHARE}}
    asked = request(offered.device_class, selectors=[{"cel": {"expression": pin}}], count=1, **share)
    asked["exactly"]["allocationMode"] = "ExactCount"
    given: Json = {
        "request": "gpu",
        "driver": offered.driver,
        "pool": f"node-{home}",
        "device": f"gpu-{number % CARDS}",
    }
    if share:
        given["consumedCapacity"] = {"cores": SHARE["cores"], "memory": SHARE["memory"]}
        given["shareID"] = str(uuid.UUID(int=number))
    return f"resourceclaims/{namespace}/{name}", {
        **about("ResourceClaim", name, namespace),
        "spec": {"devices": {"requests": [asked]}},
        "status": {"allocation": {"devices": {"results": [given]}}},
    }


def write(plane: Plane, objects: Iterable[tuple[str, Json]]) -> None:
    """Store objects in etcd, given as pairs of key and manifest. Each key gets the prefix ``/registry/``."""
    _send(plane, ({"requestPut": {"key": _key(key), "value": _text(_stored(found))}} for key, found in objects))


def remove(plane: Plane, keys: Iterable[str]) -> None:
    _send(plane, ({"requestDeleteRange": {"key": _key(key)}} for key in keys))


def serve_classes(plane: Plane) -> None:
    """Create the DeviceClasses of all drivers."""
    for driver, name, kind in DRIVERS:
        expression = f'device.driver == "{driver}" && device.attributes["{driver}"].type == "{kind}"'
        spec = {"selectors": [{"cel": {"expression": expression}}]}
        plane.cluster.create({**about("DeviceClass", name), "spec": spec})


def _stored(manifest: Json) -> str:
    own = {"uid": str(uuid.uuid4()), "creationTimestamp": "2026-01-01T00:00:00Z"}
    return json.dumps({**manifest, "metadata": {**manifest["metadata"], **own}}, separators=(",", ":"))


def _key(end: str) -> str:
    return _text(f"/registry/{end}")


def _text(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _send(plane: Plane, operations: Iterable[Json]) -> None:
    left: Iterator[Json] = iter(operations)
    while batch := [*itertools.islice(left, A_TRANSACTION)]:
        body = json.dumps({"success": batch}).encode()
        urllib.request.urlopen(f"{plane.cluster.control_plane.etcd_url}/v3/kv/txn", body).close()  # noqa: S310  # ours
