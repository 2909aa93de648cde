"""The devices that drivers offer, and the DeviceClasses by which claims request them."""

import itertools
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from decimal import ROUND_CEILING, Decimal

import msgspec

from vcuda.claims.cel import read_device_facts
from vcuda.claims.names import PRODUCT, PROFILE, TYPE
from vcuda.claims.objects import AllocatedDevice, Device, DeviceCapacity, DeviceClass, ResourceSlice
from vcuda.k8s_types import Quantity, parse_quantity

WHOLE_TYPES = ("gpu", "hami-gpu", "vgpu")
"""The types of devices that stand for a card."""


class Capacity(msgspec.Struct, frozen=True, gc=False):
    """One capacity of a device, such as its memory. The scheduler rounds a requested amount up (KEP-5075)."""

    value: Decimal
    default: Decimal | None = None
    """The amount that a request without an amount gets; None if it gets the whole capacity."""
    least: Decimal | None = None
    step: Decimal | None = None
    """Requests are rounded up to ``least`` plus a multiple of ``step``; None if the driver sets no step."""
    valid: tuple[Decimal, ...] = ()
    """The amounts to which a request is rounded up, in ascending order; empty if the driver lists none."""

    def consumed(self, requested: Decimal | None) -> Decimal:
        """Return the amount that the scheduler counts for the requested amount ``requested`` (None: no amount)."""
        # The rules are those of `calculateConsumedCapacity` in k8s.io/dynamic-resource-allocation. A request above the
        # largest valid amount is returned unchanged, because no device can satisfy such a request.
        if requested is None:
            return self.value if self.default is None else self.default
        if self.least is not None:
            if requested < self.least:
                return self.least
            if not self.step:
                return requested
            whole, first, by = (each.to_integral_value(ROUND_CEILING) for each in (requested, self.least, self.step))
            return first + by * ((whole - first) / by).to_integral_value(ROUND_CEILING)
        return next((value for value in self.valid if requested <= value), requested)


class DeviceOffer(msgspec.Struct, frozen=True, gc=False):
    """The properties of a device that decide its charge. A property that the driver does not publish is empty."""

    driver: str
    type: str = ""
    product: str = ""
    profile: str = ""
    shared: bool = False
    """True if several claims can use the device at the same time, each with a part of the device's capacities."""
    capacities: tuple[tuple[str, Capacity], ...] = ()


class PoolSlice(msgspec.Struct, frozen=True, gc=False):
    """The content of a ResourceSlice: devices of one driver in one pool."""

    driver: str
    pool: str
    generation: int
    node: str
    """The node to which the devices belong; empty if they do not belong to one node."""
    devices: Mapping[str, DeviceOffer]
    """The devices by name."""
    offers: tuple[DeviceOffer, ...] = ()
    """The values of ``devices``. Equal devices are listed once."""
    of_slices: int = 1
    """The number of ResourceSlices that make up this generation of the pool."""


def read_slice(published: ResourceSlice, alike: dict[DeviceOffer, DeviceOffer] | None = None) -> PoolSlice:
    """Return a ResourceSlice's content. ``alike``: a cache that lets equal devices of all slices share one object.

    Raises ValueError for a malformed capacity.
    """
    spec, known = published.spec, {} if alike is None else alike
    found = ((device.name, _offer(spec.driver, device)) for device in spec.devices or ())
    devices = {name: known.setdefault(offer, offer) for name, offer in found}
    offers = tuple(dict.fromkeys(devices.values()))
    pool = spec.pool
    return PoolSlice(
        spec.driver, pool.name, pool.generation, spec.node_name or "", devices, offers, pool.resource_slice_count
    )


def _offer(driver: str, device: Device) -> DeviceOffer:
    attributes = device.attributes or {}

    def text(name: str) -> str:
        found = attributes.get(name) or attributes.get(f"{driver}/{name}")
        return (found.string if found else None) or ""

    capacities = tuple(sorted((name, _capacity(each)) for name, each in (device.capacity or {}).items()))
    return DeviceOffer(
        driver, text(TYPE), text(PRODUCT), text(PROFILE), bool(device.allow_multiple_allocations), capacities
    )


def _capacity(published: DeviceCapacity) -> Capacity:
    policy, value = published.request_policy, parse_quantity(published.value)
    if policy is None:
        return Capacity(value)
    span = policy.valid_range
    least, step = (_number(span.min), _number(span.step)) if span else (None, None)
    return Capacity(value, _number(policy.default), least, step, tuple(map(parse_quantity, policy.valid_values or ())))


def _number(quantity: Quantity | None) -> Decimal | None:
    return None if quantity is None else parse_quantity(quantity)


class ClassFacts(msgspec.Struct, frozen=True, gc=False):
    """The driver, type and MIG profile that the selectors of a DeviceClass require; None if they require none."""

    driver: str | None = None
    type: str | None = None
    profile: str | None = None
    extended_resource: str = ""
    """The extended resource by which pods can request a device of the class; empty if the class has none."""


def read_class(found: DeviceClass) -> ClassFacts:
    facts = read_device_facts(each.cel.expression for each in found.spec.selectors or () if each.cel)
    own = facts.driver
    return ClassFacts(own, facts.only(own, TYPE), facts.only(own, PROFILE), found.spec.extended_resource_name or "")


PoolName = tuple[str, str]
"""The name of a pool of devices, together with the name of the pool's driver."""


class Devices(msgspec.Struct, frozen=True):
    """The devices and DeviceClasses of a cluster, as watches last delivered them."""

    offers: Mapping[DeviceOffer, frozenset[str]] = {}
    """By device properties: the names of all nodes that have a device with these properties."""
    classes: Mapping[str, ClassFacts] = {}
    slices: Mapping[PoolName, PoolSlice] = {}
    """By pool: the ResourceSlice, for pools with only one."""
    spread: Mapping[PoolName, Mapping[str, PoolSlice]] = {}
    """By pool, then by device name: the ResourceSlice of the device, for pools with several."""

    @classmethod
    def of(cls, slices: Iterable[PoolSlice], classes: Mapping[str, ClassFacts]) -> "Devices":
        """Return the devices in ``slices``. Of each pool, only the slices of the newest generation are used."""
        # This method runs after each change of a slice or DeviceClass, and a cluster may have thousands of slices. So
        # its loops are over slices and their offers (descriptions that equal devices share), not over devices.
        pools: dict[PoolName, list[PoolSlice]] = {}
        for each in slices:
            newest = pools.setdefault((each.driver, each.pool), [])
            if newest and each.generation > newest[0].generation:
                newest.clear()
            if not newest or each.generation == newest[0].generation:
                newest.append(each)
        nodes: dict[DeviceOffer, set[str]] = {}
        for each in itertools.chain.from_iterable(pools.values()):
            for offer in each.offers:
                nodes.setdefault(offer, set()).add(each.node)
        offers = {offer: frozenset(found - {""}) for offer, found in nodes.items()}
        single = {name: own[0] for name, own in pools.items() if len(own) == 1}
        several = {name: own for name, own in pools.items() if len(own) > 1}
        spread = {name: {device: each for each in own for device in each.devices} for name, own in several.items()}
        return cls(offers, classes, single, spread)

    def find(self, device: AllocatedDevice) -> tuple[DeviceOffer, str] | None:
        """Return the properties of a device, and the name of its node (may be empty); None if the device is unknown."""
        pool, name = (device.driver, device.pool), device.device
        found = self.slices.get(pool) or self.spread.get(pool, {}).get(name)
        return (found.devices[name], found.node) if found and name in found.devices else None

    def count_cards(self, drivers: Container[str]) -> Mapping[str, int]:
        """Return the number of cards that ``drivers`` publish for a node, by the node's name."""
        single = ((each, name) for each in self.slices.values() if each.of_slices == 1 for name in each.devices)
        several = ((each, name) for pool in self.spread.values() for name, each in pool.items())
        counts = Counter[tuple[str, str]]()
        for each, name in itertools.chain(single, several):
            counts[each.node, each.driver] += each.driver in drivers and each.devices[name].type in WHOLE_TYPES
        # Two drivers may publish the same cards. A driver that publishes only MIG slices does not show the cards.
        found: dict[str, int] = {}
        for (node, _), count in (+counts).items():
            found[node] = max(count, found.get(node, 0))
        return found

    @property
    def extended_resources(self) -> frozenset[str]:
        """The extended resources by which pods can request devices of a DeviceClass without a claim."""
        return frozenset(facts.extended_resource for facts in self.classes.values() if facts.extended_resource)


NO_DEVICES = Devices()
