"""Stored claims as the ledger counts them: from their spec, and from what the scheduler has allocated for them."""

import msgspec

from vcuda.claims.charges import ClaimPolicy
from vcuda.claims.objects import ResourceClaim
from vcuda.claims.request import read_claim
from vcuda.quota.model import Charge


class CountedClaim(msgspec.Struct, frozen=True, gc=False):
    """What a stored claim takes. ``model`` is what its charge counts for; None where that is not known.

    ``held_to`` is the model of its own selectors, ``allocated`` those of the devices that it was given.
    """

    model: str | None
    charge: Charge
    held_to: str | None = None
    allocated: frozenset[str] = frozenset()


def count_claim(claim: ResourceClaim, policy: ClaimPolicy) -> CountedClaim | None:
    """Return what a stored claim takes, or None where it asks for nothing that is worth anything."""
    request = read_claim(claim.spec, policy)
    if not request.gpus and not request.faults:
        return None
    held = request.model(lenient=True)
    # Its status is written by the scheduler alone, and so is evidence.
    names = ((each.driver, each.pool, each.device) for each in claim.allocated)
    found = (policy.devices.by_name.get(name) for name in names)
    models = (policy.products.model_of(offer.product) for offer, _ in filter(None, found))
    allocated = frozenset(model for model in models if model)
    model = held or (min(allocated) if allocated else None)
    return CountedClaim(model, request.charge(model or ""), held, allocated)
