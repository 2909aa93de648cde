"""The devices that drivers offer, and the classes by which they are asked for, as decisions read them."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from decimal import ROUND_CEILING, Decimal

import msgspec

from vcuda.claims.cel import read_facts
from vcuda.claims.objects import Device, DeviceCapacity, DeviceClass, ResourceSlice
from vcuda.k8s_types import Quantity, parse_quantity

PRODUCT, TYPE, PROFILE = "productName", "type", "profile"
"""Attributes in a driver's own domain: the card's name as NVML gives it, what kind of device it is, its MIG profile."""


class Capacity(msgspec.Struct, frozen=True, gc=False):
    """How much of something a device has, and how requests for a part of it are rounded (KEP-5075)."""

    value: Decimal
    default: Decimal | None = None
    least: Decimal | None = None
    step: Decimal | None = None
    valid: tuple[Decimal, ...] = ()

    def consumed(self, asked: Decimal | None) -> Decimal:
        """Return what a request takes of it, as the scheduler counts; None asks for nothing by name."""
        # k8s.io/dynamic-resource-allocation `calculateConsumedCapacity`. What is over the largest valid value no device
        # gives, and is returned as it was asked for.
        if asked is None:
            return self.value if self.default is None else self.default
        if self.least is not None:
            if asked < self.least:
                return self.least
            return _stepped(asked, self.least, self.step) if self.step else asked
        return next((value for value in self.valid if asked <= value), asked)


def _stepped(asked: Decimal, least: Decimal, step: Decimal) -> Decimal:
    whole, first, by = (number.to_integral_value(ROUND_CEILING) for number in (asked, least, step))
    return first + by * ((whole - first) / by).to_integral_value(ROUND_CEILING)


class DeviceOffer(msgspec.Struct, frozen=True, gc=False):
    """What devices have in common that are alike to a quota; what a driver does not say of them is empty.

    ``shared``: it can be allocated to several claims at once, each with a part of its capacities.
    """

    driver: str
    type: str = ""
    product: str = ""
    profile: str = ""
    shared: bool = False
    capacities: tuple[tuple[str, Capacity], ...] = ()


class PoolSlice(msgspec.Struct, frozen=True, gc=False):
    """What is kept of a ResourceSlice: the devices by name, and the different ``offers`` among them.

    ``node`` is empty where they are not of one node.
    """

    name: str
    driver: str
    pool: str
    generation: int
    node: str
    devices: Mapping[str, DeviceOffer]
    offers: tuple[DeviceOffer, ...] = ()


def read_slice(published: ResourceSlice, alike: dict[DeviceOffer, DeviceOffer] | None = None) -> PoolSlice:
    """Return what is kept of a slice; raise ValueError where a capacity is no quantity.

    ``alike`` is where the offers of other slices are, so that one is kept of those that are equal.
    """
    spec, known = published.spec, {} if alike is None else alike
    devices = {}
    for device in spec.devices or ():
        offer = _offer(spec.driver, device)
        devices[device.name] = known.setdefault(offer, offer)
    offers = tuple(dict.fromkeys(devices.values()))
    pool = spec.pool
    return PoolSlice(
        published.metadata.name, spec.driver, pool.name, pool.generation, spec.node_name or "", devices, offers
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
    """What the selectors of a class certainly demand (None: not said), and its extended resource (empty: none)."""

    driver: str | None = None
    type: str | None = None
    profile: str | None = None
    extended_resource: str = ""


def read_class(found: DeviceClass) -> ClassFacts:
    """Return what is kept of a class."""
    facts = read_facts(each.cel.expression for each in found.spec.selectors or () if each.cel)
    own = facts.driver
    return ClassFacts(own, facts.only(own, TYPE), facts.only(own, PROFILE), found.spec.extended_resource_name or "")


DeviceName = tuple[str, str, str]
"""Driver, pool and device: by these three a device is known in the status of a claim."""

PoolName = tuple[str, str]
"""Driver and pool."""


class DevicesByName(msgspec.Struct, frozen=True):
    """Every single device, looked for in the one slice of its pool, or in ``spread`` where it has several."""

    slices: Mapping[PoolName, PoolSlice] = {}
    spread: Mapping[PoolName, Mapping[str, PoolSlice]] = {}

    @classmethod
    def of(cls, pools: Mapping[PoolName, Sequence[PoolSlice]]) -> "DevicesByName":
        """Return the devices of the slices of these pools."""
        several = {name: slices for name, slices in pools.items() if len(slices) > 1}
        spread = {
            name: {device: each for each in slices for device in each.devices} for name, slices in several.items()
        }
        return cls({name: slices[0] for name, slices in pools.items() if name not in several}, spread)

    def get(self, name: DeviceName) -> tuple[DeviceOffer, str] | None:
        """Return a device's offer with its node, empty where it is not of one; None where there is none of the name."""
        driver, pool, device = name
        found = self.slices.get((driver, pool)) or self.spread.get((driver, pool), {}).get(device)
        return (found.devices[device], found.node) if found and device in found.devices else None


class Devices(msgspec.Struct, frozen=True):
    """All devices and classes of a cluster, as last seen.

    ``offers`` are the different ones, each with the nodes that have such devices; ``by_name`` is every single device's,
    with its node.
    """

    offers: Mapping[DeviceOffer, frozenset[str]] = {}
    classes: Mapping[str, ClassFacts] = {}
    by_name: DevicesByName = DevicesByName()

    @classmethod
    def of(cls, slices: Iterable[PoolSlice], classes: Mapping[str, ClassFacts]) -> "Devices":
        """Return the devices of these slices; where slices of a pool contradict each other, its newest generation."""
        # This is done anew after each change, of thousands of slices: so the single devices are not gone through.
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
        return cls(offers, classes, DevicesByName.of(pools))

    @property
    def extended_resources(self) -> frozenset[str]:
        """The resources by which pods may ask for devices of a class without a claim."""
        return frozenset(facts.extended_resource for facts in self.classes.values() if facts.extended_resource)


NO_DEVICES = Devices()
