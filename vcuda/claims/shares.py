"""Computes the charge of a device that several claims may share, by the capacities in its ResourceSlice (KEP-5075)."""

from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal
from fractions import Fraction

from vcuda.claims.devices import DeviceOffer
from vcuda.claims.drivers import CORES, MEMORY
from vcuda.quota.model import Charge, cores_of
from vcuda.requests.resources import WHOLE_CARD

SHARES = "shares"
"""The capacity of a card that NVIDIA's driver divides into a number of equal shares."""

DECISIVE = frozenset({CORES, MEMORY, SHARES})
"""The names of all capacities that decide a charge."""

_MIB = 1024 * 1024


def charge_of_share(requested: Mapping[str, Decimal], offer: DeviceOffer) -> Charge:
    """Return the charge of a share that HAMi's or vgpu-manager's driver limits. ``requested``: the capacities."""
    if not offer.shared:
        return WHOLE_CARD
    capacities = dict(offer.capacities)
    cores, memory = (
        capacities[name].consumed(requested.get(name)) if name in capacities else requested.get(name)
        for name in (CORES, MEMORY)
    )
    # If a share gets all memory of its card by default, the charge is one card's memory and not a number of MiB,
    # because the cards of a model may have different memory.
    if MEMORY not in requested and MEMORY in capacities and memory == capacities[MEMORY].value:
        memory = None
    # The driver limits only what a share requests. So a share without cores is charged all cores of a card, and a share
    # without memory is charged all memory of a card.
    return Charge(
        _whole(cores) if cores else WHOLE_CARD.cores,
        _whole(memory / _MIB) if memory else 0,
        0 if memory else WHOLE_CARD.card_memory,
    )


def charge_of_card(requested: Mapping[str, Decimal], offer: DeviceOffer, unlimited: Charge) -> Charge:
    """Return the charge of a card that a claim may share with others if the driver's flag --consumable-shares says so.

    ``requested``: the requested capacities. ``unlimited``: the charge of a card that any number of claims may
    share. The capacities in each mode of the flag are those of `applyConsumableShares` in NVIDIA's driver.
    """
    capacities = dict(offer.capacities)
    memory, shares = capacities.get(MEMORY), capacities.get(SHARES)
    if not offer.shared or memory is None or not memory.value:
        return WHOLE_CARD
    taken = memory.consumed(requested.get(MEMORY))
    part = Fraction(taken) / Fraction(memory.value)
    if shares is not None and shares.value:
        part = max(part, Fraction(shares.consumed(requested.get(SHARES))) / Fraction(shares.value))
    elif memory.default != memory.value:
        # A claim takes no memory by default, so the driver's mode is "unlimited". In the mode "memory", a claim takes
        # all memory by default.
        return unlimited if memory.default == 0 else WHOLE_CARD
    elif MEMORY in requested:
        return Charge(cores_of(part), _whole(taken / _MIB))
    cores = cores_of(part)
    return Charge(cores, 0, cores)


def _whole(number: Decimal) -> int:
    return int(number.to_integral_value(ROUND_CEILING))
