"""What a claim takes from a quota, everything that is wrong with the way it asks, and what holds it to one model.

All of it is read from the claim's spec, which nobody can change once it is stored. Its constraints, and what people
write in CEL, only narrow what it may get.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import ROUND_CEILING, Decimal

import msgspec

from vcuda.claims.devices import Capacity, DeviceOffer, Devices
from vcuda.claims.drivers import CORES, MEMORY, DeviceKind, Kind, UnitWorth
from vcuda.claims.objects import ClaimSpec, DeviceEntry
from vcuda.claims.pin import ClaimPin, add_selector, write_pin
from vcuda.claims.products import Products
from vcuda.errors import Fault
from vcuda.k8s_types import Operation
from vcuda.quota.model import Charge, Quota, models_of, total
from vcuda.requests.resources import CLASS, WHOLE_CARD, GpuResources

_MIB = 1024 * 1024


class ClaimPolicy(msgspec.Struct, frozen=True):
    """What claims are read by: the devices there are, the products of each model, and the table of units."""

    devices: Devices
    products: Products
    worth_of: UnitWorth

    @classmethod
    def of(
        cls,
        devices: Devices,
        model_of_node: Callable[[str], str | None],
        quota: Quota,
        resources: GpuResources,
    ) -> "ClaimPolicy":
        """Return what claims are read by."""
        products = Products.of(models_of(quota), resources.models, devices, model_of_node)
        return cls(devices, products, lambda name: resources.unit_of(f"{CLASS}{name}"))


class ClaimEntry(msgspec.Struct, frozen=True, gc=False):
    """One entry of a request: ``path`` is its field path, ``capacities`` what it asks for of each.

    ``pins`` are its selectors of our form, ``profile`` the MIG profile that it certainly demands, or empty, and
    ``product`` those products, or None where that is not said.
    """

    path: str
    request: int
    entry: DeviceEntry
    found: DeviceKind
    count: int
    capacities: Mapping[str, Decimal]
    pins: tuple[ClaimPin, ...]
    profile: str
    products: frozenset[str] | None


class ClaimRequest(msgspec.Struct, frozen=True, gc=False):
    """What a claim asks for. With ``faults`` the rest holds what could still be read."""

    entries: tuple[ClaimEntry, ...]
    faults: tuple[Fault, ...]
    policy: ClaimPolicy

    @property
    def gpus(self) -> tuple[ClaimEntry, ...]:
        """The entries that are worth something."""
        return tuple(entry for entry in self.entries if entry.found.is_gpu)

    def by_request_name(self, spec: ClaimSpec) -> Mapping[str, ClaimEntry]:
        """Return the entries that are worth something, by the name that an allocation calls them by."""
        names = [request.name for request in spec.devices.requests or ()]
        return {"/".join(filter(None, (names[each.request], each.entry.name))): each for each in self.gpus}

    @property
    def has_share(self) -> bool:
        """Whether it may get a part of a card, of which the driver limits the use."""
        return any(entry.found.kind is Kind.SHARE for entry in self.entries)

    def charge(self, model: str) -> Charge:
        """Return what the claim takes of this model's quota; of ``firstAvailable`` the dearest entry counts."""
        dearest: dict[int, Charge] = {}
        for entry in self.gpus:
            worth = self.worth(entry, model)
            taken = Charge(*(entry.count * each for each in (worth.cores, worth.memory, worth.card_memory)))
            dearest[entry.request] = dearest.get(entry.request, Charge()).peak(taken)
        return total(dearest.values())

    def worth(self, entry: ClaimEntry, model: str) -> Charge:
        """Return what one device of this entry takes of this model's quota."""
        match entry.found.kind:
            case Kind.UNIT:
                return entry.found.worth
            case Kind.MIG:
                return _peak(map(worth_of_profile, self._profiles(entry, model)))
            case Kind.SHARE:
                return _peak(_share(entry.capacities, offer) for offer in self._offers(entry, model))
        return WHOLE_CARD

    def _offers(self, entry: ClaimEntry, model: str) -> tuple[DeviceOffer, ...]:
        """Return the devices that the entry could get on this model; of all models, where none of it is there yet."""
        kind = (entry.found.driver, entry.found.type)
        offers = [offer for offer in self.policy.devices.offers if (offer.driver, offer.type) == kind]
        own = tuple(offer for offer in offers if self._is_of(offer, model))
        return own or tuple(offers) or (_UNSEEN,)

    def _profiles(self, entry: ClaimEntry, model: str) -> tuple[str, ...]:
        if entry.profile:
            return (entry.profile,)
        # Of what is held already, its own selector tells what was charged: profiles that come later are not among it.
        # Without profiles there it could be any, which is at most a whole card.
        if entry.pins:
            return next((pin.profiles for pin in entry.pins if pin.profiles), (ANY_PROFILE,))
        return tuple(dict.fromkeys(offer.profile for offer in self._offers(entry, model)))

    def model(self, *, lenient: bool = False) -> str | None:
        """Return the one model that our selectors hold every entry to; None where they do not.

        ``lenient``: products that no model is known of any more do not matter beside others, as those of a stored
        claim whose nodes are away.
        """
        held = {self._held_to(entry, lenient=lenient) for entry in self.gpus}
        return next(iter(held)) if len(held) == 1 else None

    def _held_to(self, entry: ClaimEntry, *, lenient: bool) -> str | None:
        for pin in entry.pins:
            models = {self.policy.products.model_of_pattern(pattern) for pattern in pin.patterns}
            if lenient and len(models) > 1:
                models.discard(None)
            if len(models) == 1 and (held := next(iter(models))):
                return held
        return None

    def is_present(self, model: str) -> bool:
        """Return whether there is a device of this model of each driver that is asked for one."""
        present = {offer.driver for offer in self.policy.devices.offers if self._is_of(offer, model)}
        return present.issuperset(entry.found.driver for entry in self.gpus)

    def _is_of(self, offer: DeviceOffer, model: str) -> bool:
        return self.policy.products.model_of(offer.product) == model

    def excludes(self, model: str) -> str | None:
        """Return why the claim cannot be held to this model, or None where it can."""
        foreign = self.policy.products.foreign(model)
        if foreign is not None:
            return ambiguous(model, foreign)
        for entry in self.gpus:
            held = self._held_to(entry, lenient=False)
            if held not in (None, model):
                return f"a selector of {entry.path}, which holds it to {held}"
            known = {self.policy.products.model_of(product) for product in entry.products or ()} - {None}
            if known and model not in known:
                return f"a selector of {entry.path}, which demands another product"
        return None

    def patch(self, model: str) -> list[Operation]:
        """Return the operations that hold every entry to the products of this model."""
        patterns = self.policy.products.patterns_of(model)
        operations = []
        for entry in self.gpus:
            if self._held_to(entry, lenient=False) != model:
                by_profile = entry.found.kind is Kind.MIG and not entry.profile
                profiles = self._profiles(entry, model) if by_profile else ()
                pin = ClaimPin(entry.found.driver or "", patterns, tuple(sorted(filter(None, profiles))))
                pointer = "/" + entry.path.replace(".", "/").replace("[", "/").replace("]", "")
                operations.append(add_selector(pointer, entry.entry, write_pin(pin)))
        return operations


def ambiguous(model: str, product: str) -> str:
    """Say why nothing can be held to a model: a product of its patterns is not of it alone."""
    return f"its products: {product} counts as one of {model}, and not of that model alone"


_UNSEEN = DeviceOffer("", shared=True)
"""Stands for the devices of a driver of which none is there: what is not asked for by name is all of a card."""

ANY_PROFILE = ""
"""Stands for a MIG profile that nobody has said."""

# As NVIDIA's driver names them; what stands behind the memory are media extensions and the like.
_PROFILE = re.compile(r"([1-7])g\.([1-9][0-9]{0,3})gb(?:\+[.a-z]+)?", re.ASCII)
_MIG_SLICES = 7


def worth_of_profile(profile: str) -> Charge:
    """Return what a MIG partition is worth; a whole card where the profile is not known."""
    found = _PROFILE.fullmatch(profile)
    return Charge(WHOLE_CARD.cores * int(found[1]) // _MIG_SLICES, int(found[2]) * 1024) if found else WHOLE_CARD


def _peak(charges: Iterable[Charge]) -> Charge:
    return functools.reduce(Charge.peak, charges, Charge())


def _share(asked: Mapping[str, Decimal], offer: DeviceOffer) -> Charge:
    if not offer.shared:
        return WHOLE_CARD
    capacities = dict(offer.capacities)
    cores = _consumed(asked.get(CORES), capacities.get(CORES))
    memory = _consumed(asked.get(MEMORY), capacities.get(MEMORY))
    # By default it is all of the card's, whatever that is.
    if MEMORY not in asked and MEMORY in capacities and memory == capacities[MEMORY].value:
        memory = None
    # Of a share that asks for no cores, or for no memory, the drivers limit none: it may use all of its card.
    return Charge(
        _whole(cores) if cores else WHOLE_CARD.cores,
        _whole(memory / _MIB) if memory else 0,
        0 if memory else WHOLE_CARD.card_memory,
    )


def _consumed(asked: Decimal | None, capacity: Capacity | None) -> Decimal | None:
    return asked if capacity is None else capacity.consumed(asked)


def _whole(number: Decimal) -> int:
    return int(number.to_integral_value(ROUND_CEILING))
