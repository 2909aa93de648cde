"""The devices that drivers offer, and the DeviceClasses by which claims request them."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from decimal import ROUND_CEILING, Decimal

import msgspec

from vcuda.claims.cel import read_facts
from vcuda.claims.names import PRODUCT, PROFILE, TYPE
from vcuda.claims.objects import Device, DeviceCapacity, DeviceClass, ResourceSlice
from vcuda.k8s_types import Quantity, parse_quantity


class Capacity(msgspec.Struct, frozen=True, gc=False):
    """One capacity of a device, and the rules that round a request for a part of the capacity up (KEP-5075).

    ``default``: the amount of a request that states none. ``least``, ``step``: a request is rounded up to ``least``
    plus a multiple of ``step``. ``valid``: the valid amounts, in ascending order.
    """

    value: Decimal
    default: Decimal | None = None
    least: Decimal | None = None
    step: Decimal | None = None
    valid: tuple[Decimal, ...] = ()

    def consumed(self, asked: Decimal | None) -> Decimal:
        """Return the amount that the scheduler counts for a request. ``asked`` is None if no amount is requested."""
        # As k8s.io/dynamic-resource-allocation `calculateConsumedCapacity` does. A request above the largest valid
        # value is returned unchanged, because no device has more than this value.
        if asked is None:
            return self.value if self.default is None else self.default
        if self.least is not None:
            if asked < self.least:
                return self.least
            if not self.step:
                return asked
            whole, first, by = (each.to_integral_value(ROUND_CEILING) for each in (asked, self.least, self.step))
            return first + by * ((whole - first) / by).to_integral_value(ROUND_CEILING)
        return next((value for value in self.valid if asked <= value), asked)


class DeviceOffer(msgspec.Struct, frozen=True, gc=False):
    """The properties of a device that matter to a quota. A property that the driver does not publish is empty."""

    driver: str
    type: str = ""
    product: str = ""
    profile: str = ""
    shared: bool = False
    """True if several claims can use the device at once, each with a part of its capacities."""
    capacities: tuple[tuple[str, Capacity], ...] = ()


class PoolSlice(msgspec.Struct, frozen=True, gc=False):
    """A ResourceSlice: devices of one driver in one pool."""

    name: str
    driver: str
    pool: str
    generation: int
    node: str
    """The node of the devices; empty if they are not on one node."""
    devices: Mapping[str, DeviceOffer]
    """The devices by name."""
    offers: tuple[DeviceOffer, ...] = ()
    """The different offers in ``devices``."""
    of_slices: int = 1
    """The number of slices in this generation of the pool."""


def read_slice(published: ResourceSlice, alike: dict[DeviceOffer, DeviceOffer] | None = None) -> PoolSlice:
    """Return a slice. Equal offers are shared through ``alike``. Raises ValueError if a capacity is malformed."""
    spec, known = published.spec, {} if alike is None else alike
    devices = {}
    for device in spec.devices or ():
        offer = _offer(spec.driver, device)
        devices[device.name] = known.setdefault(offer, offer)
    offers = tuple(dict.fromkeys(devices.values()))
    pool = spec.pool
    return PoolSlice(
        published.metadata.name,
        spec.driver,
        pool.name,
        pool.generation,
        spec.node_name or "",
        devices,
        offers,
        pool.resource_slice_count,
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
    """The facts about the devices of a DeviceClass."""

    driver: str | None = None
    """The driver that the selectors certainly demand; None if they demand none."""
    type: str | None = None
    """The device type that the selectors certainly demand; None if they demand none."""
    profile: str | None = None
    """The MIG profile that the selectors certainly demand; None if they demand none."""
    extended_resource: str = ""
    """The extended resource by which pods request these devices; empty if there is none."""


def read_class(found: DeviceClass) -> ClassFacts:
    facts = read_facts(each.cel.expression for each in found.spec.selectors or () if each.cel)
    own = facts.driver
    return ClassFacts(own, facts.only(own, TYPE), facts.only(own, PROFILE), found.spec.extended_resource_name or "")


DeviceName = tuple[str, str, str]
"""The name of a device in the status of a claim: driver, pool and device."""

PoolName = tuple[str, str]
"""The name of a pool: driver and pool."""


class DevicesByName(msgspec.Struct, frozen=True):
    """An index of all devices. ``slices``: pools with one slice. ``spread``: by device, pools with several slices."""

    slices: Mapping[PoolName, PoolSlice] = {}
    spread: Mapping[PoolName, Mapping[str, PoolSlice]] = {}

    @classmethod
    def of(cls, pools: Mapping[PoolName, Sequence[PoolSlice]]) -> "DevicesByName":
        several = {name: slices for name, slices in pools.items() if len(slices) > 1}
        spread = {
            name: {device: each for each in slices for device in each.devices} for name, slices in several.items()
        }
        return cls({name: slices[0] for name, slices in pools.items() if name not in several}, spread)

    def get(self, name: DeviceName) -> tuple[DeviceOffer, str] | None:
        """Return the offer of a device and its node; None if there is no such device. The node is empty if the device
        is not on one node."""
        driver, pool, device = name
        found = self.slices.get((driver, pool)) or self.spread.get((driver, pool), {}).get(device)
        return (found.devices[device], found.node) if found and device in found.devices else None


class Devices(msgspec.Struct, frozen=True):
    """The devices and DeviceClasses of a cluster, as the watches delivered them last."""

    offers: Mapping[DeviceOffer, frozenset[str]] = {}
    """The different offers, each with the nodes that have such devices."""
    classes: Mapping[str, ClassFacts] = {}
    by_name: DevicesByName = DevicesByName()

    @classmethod
    def of(cls, slices: Iterable[PoolSlice], classes: Mapping[str, ClassFacts]) -> "Devices":
        """Return the devices of these slices. Of each pool only the newest generation counts."""
        # This runs after each change with thousands of slices, so there is no loop over single devices.
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
        """The resources by which pods may request the devices of a class without a claim."""
        return frozenset(facts.extended_resource for facts in self.classes.values() if facts.extended_resource)


NO_DEVICES = Devices()
