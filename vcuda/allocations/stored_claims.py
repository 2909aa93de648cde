"""Stored ResourceClaims as the ledger counts them."""

import functools
from collections.abc import Callable, Iterable

import msgspec

from vcuda.allocations.stored_pods import StoredPod
from vcuda.claims import charges, objects, request
from vcuda.k8s_types import K8sObject
from vcuda.placement.placement import Nodes
from vcuda.quota.model import Charge

SPECS_REMEMBERED = 4096
"""Claims made from one template are alike: each spec is kept and decoded once."""


class StoredClaim(msgspec.Struct, frozen=True):
    """What is kept of a claim that is stored; it counts by its spec, allocated or not, which cannot change any more."""

    uid: str
    namespace: str
    name: str
    spec: objects.ClaimSpec
    allocated: tuple[objects.AllocatedDevice, ...] = ()


class ClaimCharge(msgspec.Struct, frozen=True):
    """The model that a claim is charged to, and what it takes.

    ``certain``: its classes say so; else one of them is away just now, and more may be taken.
    """

    model: str
    charge: Charge
    certain: bool = True


ClaimPrice = Callable[[StoredClaim], ClaimCharge | None]
"""Returns None where a claim takes nothing that is counted, or is held to no model."""


class _Claim(K8sObject, frozen=True, gc=False):
    """A claim, with its spec as text."""

    spec: msgspec.Raw = msgspec.Raw(b"{}")
    status: objects.ClaimStatus | None = None


_CLAIM = msgspec.json.Decoder(_Claim)
_SPEC = msgspec.json.Decoder(objects.ClaimSpec)


def read_stored_claim(raw: bytes | msgspec.Raw) -> StoredClaim:
    """Return what is kept of a claim."""
    claim = _CLAIM.decode(raw)
    metadata, status = claim.metadata, claim.status
    allocated = status.allocation.devices.results if status and status.allocation else None
    spec = _read_spec(bytes(claim.spec))
    return StoredClaim(metadata.uid, metadata.namespace, metadata.name, spec, allocated or ())


@functools.lru_cache(SPECS_REMEMBERED)
def _read_spec(raw: bytes) -> objects.ClaimSpec:
    return _SPEC.decode(raw)


class ClaimCounter:
    """What stored claims take by one policy. Claims of one spec that are held to a model are worked out once."""

    def __init__(self, policy: charges.ClaimPolicy) -> None:
        self._policy = policy
        # By identity, as a spec with capacities cannot be hashed; each is kept, so that no other takes its place.
        self._held: dict[int, tuple[objects.ClaimSpec, ClaimCharge]] = {}

    def __call__(self, claim: StoredClaim) -> ClaimCharge | None:
        """Return what a claim takes."""
        known = self._held.get(id(claim.spec))
        if known is not None:
            return known[1]
        asked = request.read_claim(claim.spec, self._policy)
        held = asked.model(lenient=True)
        model = held or self._allocated_model(claim)
        if model is None or not asked.gpus:
            return None
        charge = ClaimCharge(model, asked.charge(model), not asked.faults)
        if held:
            self._held[id(claim.spec)] = claim.spec, charge
        return charge

    def _allocated_model(self, claim: StoredClaim) -> str | None:
        # Its status is written by the scheduler alone, and so is evidence.
        names = ((each.driver, each.pool, each.device) for each in claim.allocated)
        found = (self._policy.devices.by_name.get(name) for name in names)
        models = {self._policy.products.model_of(offer.product) for offer, _ in filter(None, found)} - {None}
        return min(filter(None, models), default=None)


def charged_by_pods(pods: Iterable[StoredPod], nodes: Nodes) -> frozenset[str]:
    """Return the names of the claims that the scheduler made for pods of a namespace that are themselves charged."""
    return frozenset(pod.extended_claim for pod in pods if pod.live and pod.extended_claim and pod.model_on(nodes))
