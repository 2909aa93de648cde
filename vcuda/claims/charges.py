"""Computes the charge of a ResourceClaim, and writes the selectors that limit the claim to one GPU model.

Charges depend on the claim's spec, which cannot change after the claim is stored. Constraints and CEL expressions in
the spec can only narrow the devices that the claim may get. So it is safe not to read all of them.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from decimal import Decimal
from typing import NamedTuple

import msgspec

from vcuda.claims.devices import DeviceOffer, Devices
from vcuda.claims.digest import PINS_TOO_LARGE, ClaimDigest
from vcuda.claims.drivers import DeviceKind, Kind, UnitValue
from vcuda.claims.pin import ClaimPin, write_pin
from vcuda.claims.products import Products
from vcuda.claims.shares import DECISIVE, charge_of_card, charge_of_share
from vcuda.errors import Fault
from vcuda.k8s_types import Operation
from vcuda.quota.model import Charge, Quota, total
from vcuda.requests.mig import unknown_profile
from vcuda.requests.resources import BUILT_IN, CLASS, WHOLE_CARD, GpuResources


class KindOffers(msgspec.Struct, frozen=True):
    """The devices of one driver and device type. Only one of several devices with equal charges is listed."""

    all: tuple[DeviceOffer, ...] = ()
    by_model: Mapping[str, tuple[DeviceOffer, ...]] = {}

    def on(self, model: str) -> tuple[DeviceOffer, ...]:
        """Return the devices of a GPU model.

        If no device of the model is known, return the devices of all models. If no device is known, return an assumed
        one.
        """
        return self.by_model.get(model) or self.all or (_UNSEEN,)


class ClaimPolicy(msgspec.Struct, frozen=True, dict=True):
    """The data that decide a claim's charge, apart from its spec: devices, products, and charges of DeviceClasses."""

    devices: Devices
    products: Products
    value_of: UnitValue
    resources: GpuResources = BUILT_IN

    # `kinds` is cached, because a cluster can have many devices, and every device request of a claim needs `kinds`.
    @functools.cached_property
    def kinds(self) -> Mapping[tuple[str, str], KindOffers]:
        """The devices of the cluster, by driver and device type."""
        found: dict[tuple[str, str], list[DeviceOffer]] = {}
        for offer in self.devices.offers:
            found.setdefault((offer.driver, offer.type), []).append(offer)
        kinds = {}
        for kind, offers in found.items():
            by_model: dict[str, list[DeviceOffer]] = {}
            for offer in offers:
                if model := self.products.model_of(offer.product):
                    by_model.setdefault(model, []).append(offer)
            kinds[kind] = KindOffers(_different(offers), {model: _different(own) for model, own in by_model.items()})
        return kinds

    @functools.cached_property
    def profiles_on(self) -> Callable[[str, str, str], tuple[str, ...]]:
        """A function that returns the MIG profiles that the devices of one driver and type have on a GPU model."""
        return functools.cache(lambda *of: tuple(dict.fromkeys(offer.profile for offer in self.offers_on(*of))))

    @functools.cached_property
    def dearest_partition(self) -> Callable[[str, str, str], Charge]:
        """A function that returns the largest charge of a MIG device of one driver and type on a GPU model."""
        return functools.cache(lambda *of: _peak(self.partition(each, of[2]) for each in self.profiles_on(*of)))

    def partition(self, profile: str, model: str) -> Charge:
        """Return the charge of a MIG partition on a GPU model; a whole card if the profile is unknown."""
        return self.resources.value_of_profile(profile, model) or WHOLE_CARD

    def offers_on(self, driver: str, device_type: str, model: str) -> tuple[DeviceOffer, ...]:
        return self.kinds.get((driver, device_type), KindOffers()).on(model)

    @functools.cached_property
    def drivers_on(self) -> Mapping[str, Set[str]]:
        found: dict[str, set[str]] = {}
        for (driver, _), offers in self.kinds.items():
            for model in offers.by_model:
                found.setdefault(model, set()).add(driver)
        return found

    @functools.cached_property
    def capacities_of(self) -> Mapping[str, Set[str]]:
        """Maps the name of a driver to the names of all capacities (such as memory) that its devices have."""
        found: dict[str, set[str]] = {}
        for offer in self.devices.offers:
            found.setdefault(offer.driver, set()).update(name for name, _ in offer.capacities)
        return found

    @classmethod
    def of(
        cls, devices: Devices, model_of_node: Callable[[str], str | None], quota: Quota, resources: GpuResources
    ) -> "ClaimPolicy":
        products = Products.of(quota.models, resources.models, devices, model_of_node)
        return cls(devices, products, lambda name: resources.unit_of(f"{CLASS}{name}"), resources)


class ClaimEntry(msgspec.Struct, frozen=True, gc=False):
    """One entry of a device request in a claim: ``exactly``, or one of the alternatives in ``firstAvailable``."""

    path: str
    """The field path of the entry in the claim."""
    request: int
    """The position of the entry's device request among the device requests of the claim."""
    name: str
    """The name of the entry in the claim's status: the name of its request, or REQUEST/ENTRY for ``firstAvailable``."""
    found: DeviceKind
    count: int
    capacities: Mapping[str, Decimal]
    """The amount of each capacity that the entry requests for a device."""
    has_selectors: bool
    pins: tuple[ClaimPin, ...]
    """The entry's pins: selectors for one GPU model that the webhook added, or that a user wrote in the same form."""
    profile: str
    """The MIG profile that the entry's selectors or its DeviceClass require; empty if they require none."""
    products: frozenset[str] | None
    """The product names that the entry's selectors allow; None if they allow every product."""


class _Shape(NamedTuple):
    """The properties of a claim's entry that decide the charge of one device, and the entry's selector for a model.

    A claim may have 64 entries. Entries with equal properties are handled together, once for each GPU model.
    """

    found: DeviceKind
    profile: str = ""
    """The MIG profile that the entry requires; empty if it requires none."""
    pinned: tuple[str, ...] | None = None
    """The MIG profiles that the entry's pin allows; None if there is no pin, or ``profile`` decides."""
    capacities: tuple[tuple[str, Decimal], ...] = ()

    @classmethod
    def of(cls, entry: ClaimEntry) -> "_Shape":
        match entry.found.kind:
            case Kind.MIG if entry.pins and not entry.profile:
                # The pin of a charged entry (a selector for one GPU model) lists the MIG profiles that determine the
                # charge. So profiles that are published later do not change the charge. A pin without profiles allows
                # every profile, so the entry is charged a whole card.
                profiles = next((pin.profiles for pin in entry.pins if pin.profiles), (ANY_PROFILE,))
                return cls(entry.found, pinned=profiles)
            case Kind.MIG:
                return cls(entry.found, entry.profile)
            case Kind.SHARE | Kind.WHOLE:
                decisive = entry.capacities.keys() & DECISIVE
                return cls(entry.found, capacities=tuple((name, entry.capacities[name]) for name in sorted(decisive)))
        return cls(entry.found)


class ClaimRequest(msgspec.Struct, frozen=True, dict=True):
    """The GPUs that a ResourceClaim requests. If there are ``faults``, ``entries`` may be incomplete."""

    entries: tuple[ClaimEntry, ...]
    faults: tuple[Fault, ...]
    policy: ClaimPolicy
    digest: ClaimDigest = ClaimDigest()

    # Many entries of a claim can have equal products, or equal pins (selectors for one GPU model). So the GPU model is
    # looked up once for each pin and product.
    @functools.cached_property
    def _models_of_pin(self) -> Mapping[ClaimPin, frozenset[str | None]]:
        model_of = self.policy.products.model_of_pattern
        return {pin: frozenset(map(model_of, pin.patterns)) for pin in self.digest.pins}

    @functools.cached_property
    def _models_of_products(self) -> Mapping[frozenset[str] | None, frozenset[str]]:
        different = {entry.products for entry in self.entries}
        return {each: frozenset(filter(None, map(self.policy.products.model_of, each or ()))) for each in different}

    @property
    def has_share(self) -> bool:
        """True if the claim may get a share of a card. The DRA driver limits what the containers use of the card."""
        return any(entry.found.kind is Kind.SHARE for entry in self.entries)

    @functools.cached_property
    def _charges(self) -> dict[str, Charge]:
        return {}

    def charge(self, model: str) -> Charge:
        """Return the claim's charge for a GPU model. Of the alternatives in ``firstAvailable``, the largest counts."""
        if model not in self._charges:
            self._charges[model] = self._charge(model)
        return self._charges[model]

    @functools.cached_property
    def _shapes(self) -> Mapping[_Shape, None]:
        return dict.fromkeys(map(_Shape.of, self.entries))

    @functools.cached_property
    def _counts(self) -> Mapping[frozenset[tuple[_Shape, int]], int]:
        """Groups of equal device requests: their entries' properties and counts, with the number of such requests.

        If several entries of a request have equal properties, the largest count is kept.
        """
        counts: dict[int, dict[_Shape, int]] = {}
        for entry in self.entries:
            of_request, shape = counts.setdefault(entry.request, {}), _Shape.of(entry)
            of_request[shape] = max(entry.count, of_request.get(shape, 0))
        return Counter(frozenset(each.items()) for each in counts.values())

    @property
    def steps(self) -> int:
        """The number of computations for each GPU model: of charges, and of pins (selectors for one GPU model)."""
        return len(self._shapes) + sum(map(len, self._counts))

    def _charge(self, model: str) -> Charge:
        values = {shape: self._value(shape, model) for shape in self._shapes}
        dearest = ((_peak(values[shape] * count for shape, count in each), n) for each, n in self._counts.items())
        return total(charge * requests for charge, requests in dearest)

    def value(self, entry: ClaimEntry, model: str) -> Charge:
        """Return the charge for one device of ``entry``, if the claim gets devices of GPU model ``model``."""
        return self._value(_Shape.of(entry), model)

    def _value(self, shape: _Shape, model: str) -> Charge:
        found = shape.found
        match found.kind:
            case Kind.UNIT:
                return found.value
            case Kind.MIG if shape.profile:
                return self.policy.partition(shape.profile, model)
            case Kind.MIG if shape.pinned is not None:
                return _peak(self.policy.partition(each, model) for each in shape.pinned)
            case Kind.MIG:
                return self.policy.dearest_partition(found.driver or "", found.type, model)
        capacities = dict(shape.capacities)
        offers = self.policy.offers_on(found.driver or "", found.type, model)
        if found.kind is Kind.SHARE:
            return _peak(charge_of_share(capacities, offer) for offer in offers)
        return _peak(charge_of_card(capacities, offer, found.value) for offer in offers)

    def model(self, *, lenient: bool = False) -> str | None:
        """Return the GPU model to which the claim's selectors (pins) limit it; None if they allow several models.

        ``lenient``: ignore unknown products.
        """
        pinned = {self._pinned_to(entry, lenient=lenient) for entry in self.entries}
        return next(iter(pinned)) if len(pinned) == 1 else None

    def _pinned_to(self, entry: ClaimEntry, *, lenient: bool) -> str | None:
        for pin in entry.pins:
            models = self._models_of_pin[pin]
            if lenient and len(models) > 1:
                models -= {None}
            if len(models) == 1 and (pinned := next(iter(models))):
                return pinned
        return None

    def is_present(self, model: str) -> bool:
        return self._drivers <= self.policy.drivers_on.get(model, frozenset())

    @functools.cached_property
    def _drivers(self) -> Set[str | None]:
        return {entry.found.driver for entry in self.entries}

    @functools.cached_property
    def _exclusions(self) -> dict[str, str | None]:
        return {}

    def excludes(self, model: str) -> str | None:
        """Return why the claim cannot be limited to this GPU model; None if the claim can be limited to this model."""
        if model not in self._exclusions:
            self._exclusions[model] = self._excluded_from(model)
        return self._exclusions[model]

    @functools.cached_property
    def _pinned(self) -> tuple[str | None, ...]:
        """For each entry, the GPU model to which its selectors (pins) limit it; None if they allow several models."""
        return tuple(self._pinned_to(entry, lenient=False) for entry in self.entries)

    @functools.cached_property
    def _constraints(self) -> Mapping[tuple[str | None, frozenset[str] | None, str], str]:
        """The GPU models, product names and MIG profiles that entries of the claim require, without repetitions.

        Each has the field path of the first entry that requires it.
        """
        found: dict[tuple[str | None, frozenset[str] | None, str], str] = {}
        for entry, pinned in zip(self.entries, self._pinned, strict=True):
            found.setdefault((pinned, entry.products, _Shape.of(entry).profile), entry.path)
        return found

    def _excluded_from(self, model: str) -> str | None:
        if (foreign := self.policy.products.of_model(model).foreign) is not None:
            return f"its products: {ambiguous(model, foreign)}"
        for (pinned, products, profile), path in self._constraints.items():
            if pinned not in (None, model):
                return f"a selector of {path}, which pins the request to {pinned}"
            if profile and self.policy.resources.value_of_profile(profile, model) is None:
                return f"{path}: {unknown_profile(profile, model)}"
            known = self._models_of_products[products]
            if known and model not in known:
                return f"a selector of {path}, which requires a product of another model"
        # If the pins (selectors for one GPU model) of a claim exceeded `MAX_PIN_BYTES`, they would not be read. The
        # claim would then count as not limited to a model.
        pins = {*map(self._pins(model).__getitem__, self._unpinned)}
        return None if self.digest.has_room(pins, self._unpinned.total()) else PINS_TOO_LARGE

    @functools.cached_property
    def _unpinned(self) -> Counter[_Shape]:
        """The properties (`_Shape`) of the entries that are not limited to one GPU model, with the number of such
        entries."""
        return Counter(_Shape.of(entry) for entry, pin in zip(self.entries, self._pinned, strict=True) if pin is None)

    def _pins(self, model: str) -> Mapping[_Shape, ClaimPin]:
        """Return the selectors that limit the entries to a GPU model, one for the entries of each `_Shape`."""
        patterns, pins = self.policy.products.of_model(model).patterns, {}
        for shape in self._unpinned:
            driver, profiles = shape.found.driver or "", shape.pinned or ()
            if shape.found.kind is Kind.MIG and not shape.profile and shape.pinned is None:
                profiles = self.policy.profiles_on(driver, shape.found.type, model)
            pins[shape] = ClaimPin(driver, patterns, tuple(sorted(filter(None, profiles))))
        return pins

    def patch(self, model: str) -> list[Operation]:
        """Return the JSON Patch that limits each charged request to a GPU model.

        The caller must ensure that `excludes` returns None for this model.
        """
        selectors = {shape: {"cel": {"expression": write_pin(pin)}} for shape, pin in self._pins(model).items()}
        operations: list[Operation] = []
        for entry in (entry for entry, pinned in zip(self.entries, self._pinned, strict=True) if pinned is None):
            pointer = "/" + entry.path.replace(".", "/").replace("[", "/").replace("]", "")
            selector = selectors[_Shape.of(entry)]
            if entry.has_selectors:
                operations.append({"op": "add", "path": f"{pointer}/selectors/-", "value": selector})
            else:
                operations.append({"op": "add", "path": f"{pointer}/selectors", "value": [selector]})
        return operations


def ambiguous(model: str, product: str) -> str:
    """Return the message that no claim can be limited to ``model``.

    The cause: ``product`` matches the patterns of ``model``, but may belong to another model.
    """
    return f"product {product} matches the products of {model}, but may belong to another model"


def _different(offers: Iterable[DeviceOffer]) -> tuple[DeviceOffer, ...]:
    """Return one of the devices that differ only in their product, because the product does not affect the charge."""
    return tuple({(each.profile, each.shared, each.capacities): each for each in offers}.values())


_UNSEEN = DeviceOffer("", shared=True)
"""The device that is assumed while a driver has published no devices. A share that requests no cores is charged all
cores of a card. A share that requests no memory is charged all memory."""

ANY_PROFILE = ""
"""The value for an unknown MIG profile. A partition with an unknown profile is charged as a whole card."""


def _peak(charges: Iterable[Charge]) -> Charge:
    return functools.reduce(Charge.peak, charges, Charge())
