"""Watches the ResourceSlices and DeviceClasses of Dynamic Resource Allocation (DRA)."""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import structlog

from vcuda import errors
from vcuda.allocations.stored_claims import ClaimCounter
from vcuda.claims import charges, devices, objects
from vcuda.claims.names import API_PATH
from vcuda.k8s_types import Decoder
from vcuda.kube import client, informers, reflector
from vcuda.placement.nodes import Nodes
from vcuda.requests.resources import GpuResources

SLICES, CLASSES, CLAIMS = (f"{API_PATH}/{name}" for name in ("resourceslices", "deviceclasses", "resourceclaims"))

ASK_AGAIN_SECONDS = 60.0
"""Seconds between two checks whether the API server serves resource.k8s.io/v1. An upgrade may add this API."""

_SLICE = Decoder(objects.ResourceSlice)
_CLASS = Decoder(objects.DeviceClass)


def is_served(kube: client.Kube) -> bool:
    """Return whether the API server serves resource.k8s.io/v1. Kubernetes has this API since version 1.34."""
    try:
        kube.get(API_PATH)
    except errors.NotFound:
        return False
    return True


@dataclass(eq=False)
class ServedWatches:
    """The watches of resource.k8s.io/v1. They start as soon as the API server serves this API. ``wait`` sleeps between
    two checks for the API, and returns True if the checks must stop."""

    kube: client.Kube
    reflectors: Mapping[str, reflector.Reflector[Any]]
    wait: Callable[[float], bool] | None = None
    served: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._once_unserved = False
        self._started: Mapping[str, reflector.Reflector[Any]] = {}
        self._stopping = threading.Event()
        self._backoff = reflector.Backoff()
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self.run, name="resource.k8s.io", daemon=True)

    @property
    def is_ready(self) -> bool:
        """True if all watches have listed their objects, or if resource.k8s.io/v1 was missing at an earlier check."""
        # If an upgrade adds resource.k8s.io to the API server, the watches start later, but `is_ready` stays True.
        return self._once_unserved or self.synced

    @property
    def synced(self) -> bool:
        return bool(self._started) and all(each.synced.is_set() for each in self._started.values())

    def running(self) -> Mapping[str, reflector.Reflector[Any]]:
        return self._started

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for each in self._started.values():
            each.stop()

    def run(self) -> None:
        while not self._stopping.is_set() and not self.served:
            try:
                self.served = is_served(self.kube)
                self._once_unserved = self._once_unserved or not self.served
                delay = ASK_AGAIN_SECONDS
            except errors.VcudaError as error:
                delay = self._backoff.next()
                self._log.warning("could not check whether resource.k8s.io/v1 is served", error=str(error))
            if not self.served and (self.wait or self._stopping.wait)(delay):
                return
        self._log.info("resource.k8s.io/v1 is served")
        for each in self.reflectors.values():
            each.start()
        self._started = self.reflectors


class DeviceInformer:
    """Watches the ResourceSlices and DeviceClasses. After a change, `current` builds a new index of the devices."""

    def __init__(self, kube: client.Kube, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._lock = threading.Lock()
        self._stale = True
        self._devices = devices.NO_DEVICES
        # Equal device descriptions share one object. This saves memory, because thousands of cards may be equal.
        self._alike: dict[devices.DeviceOffer, devices.DeviceOffer] = {}
        self._slices: reflector.Reflector[devices.PoolSlice] = reflector.Reflector(
            kube, SLICES, lambda raw: devices.read_slice(_SLICE.decode(raw), self._alike), on_event=self._on_event
        )
        self._classes: reflector.Reflector[devices.ClassFacts] = reflector.Reflector(
            kube, CLASSES, lambda raw: devices.read_class(_CLASS.decode(raw)), on_event=self._on_event
        )

    def reflectors(self) -> Mapping[str, reflector.Reflector[Any]]:
        return {"resourceslices": self._slices, "deviceclasses": self._classes}

    def slices(self) -> Iterable[devices.PoolSlice]:
        return self._slices.snapshot().values()

    def current(self) -> devices.Devices | None:
        """Return the devices and classes that the watches delivered; None until both watches have made a first list."""
        if not all(each.synced.is_set() for each in self.reflectors().values()):
            return None
        with self._lock:
            if self._stale:
                self._stale = False
                classes = {key.name: found for key, found in self._classes.snapshot().items()}
                self._devices = devices.Devices.of(self._slices.snapshot().values(), classes)
            return self._devices

    def _on_event(self, old: object, new: object) -> None:
        # A restarted driver publishes its ResourceSlices again without changes. Then no new index is needed.
        if old != new:
            with self._lock:
                self._stale = True
            self._on_change()


class _Made(NamedTuple):
    sources: tuple[object, ...]
    counter: ClaimCounter


class _ChargedBy(NamedTuple):
    known: GpuResources
    devices: devices.Devices | None
    nodes: Nodes
    charged: GpuResources


class ClaimPolicies:
    """Builds the rules by which pods and claims are charged, from the quota, the nodes and the devices."""

    def __init__(self, quota: informers.QuotaInformer, nodes: informers.NodeInformer, informer: DeviceInformer) -> None:
        self._quota = quota
        self._nodes = nodes
        self._informer = informer
        self._made: _Made | None = None
        self._charged: _ChargedBy | None = None

    def resources(self) -> GpuResources:
        """Return the GPU resources that pods can request, with charges by the DeviceClasses and nodes read so far."""
        return self.charged(self._quota.resources())

    def charged(self, known: GpuResources) -> GpuResources:
        """Return ``known`` (a quota ConfigMap's GPU resources) with charges adapted to the DeviceClasses and nodes."""
        found, nodes, made = self._informer.current(), self._nodes.current(), self._charged
        # The resources are cached, because every pod of the cluster is checked against them.
        if made and made.known is known and made.devices is found and made.nodes is nodes:
            return made.charged
        charged = known.with_claimed(found.extended_resources if found else ()).with_registered(nodes.registered_cards)
        # If no charge has changed, return the same object as before. After a new object, callers decode all pods again.
        charged = made.charged if made and made.known is known and charged.counts_like(made.charged) else charged
        self._charged = _ChargedBy(known, found, nodes, charged)
        return charged

    def current(self) -> charges.ClaimPolicy | None:
        """Return the rules by which claims are charged; None until the quota and the devices have been read."""
        counter = self.price()
        return counter.policy if counter else None

    def price(self) -> ClaimCounter | None:
        """Return the function that computes a claim's charge; None until the quota and the devices have been read."""
        found, read, nodes = self._informer.current(), self._quota.in_force(), self._nodes.current()
        if found is None or read is None:
            return None
        made = self._made
        if made is None or any(a is not b for a, b in zip(made.sources, (found, read, nodes), strict=True)):
            policy = charges.ClaimPolicy.of(found, nodes.model_of, read.quota, read.resources)
            # No lock is needed: if two threads build the policy at the same time, the two policies are equal.
            self._made = made = _Made((found, read, nodes), ClaimCounter(policy))
        return made.counter
