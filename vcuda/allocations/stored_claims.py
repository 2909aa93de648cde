"""Stored ResourceClaims as the ledger counts them."""

import functools
from collections.abc import Callable, Iterable, Iterator

import msgspec

from vcuda.allocations.stored_pods import StoredPod
from vcuda.claims.objects import ClaimSpec
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
    spec: ClaimSpec
    created: str = ""


class ClaimCharge(msgspec.Struct, frozen=True):
    """The model that a claim is charged to, and what it takes.

    ``certain``: classes and devices say so; else they are away just now, and it is the most that it can be.
    """

    model: str
    charge: Charge
    certain: bool = True


ClaimPrice = Callable[[ClaimSpec], ClaimCharge | None]
"""Returns None where a claim takes nothing that is counted, or is held to no model."""


class _Claim(K8sObject, frozen=True, gc=False):
    """A claim, with its spec as text."""

    spec: msgspec.Raw = msgspec.Raw(b"{}")


_CLAIM = msgspec.json.Decoder(_Claim)
_SPEC = msgspec.json.Decoder(ClaimSpec)


def read_claim(raw: bytes | msgspec.Raw) -> StoredClaim:
    """Return what is kept of a claim."""
    claim = _CLAIM.decode(raw)
    metadata = claim.metadata
    spec = _read_spec(bytes(claim.spec))
    return StoredClaim(metadata.uid, metadata.namespace, metadata.name, spec, metadata.creation_timestamp or "")


@functools.lru_cache(SPECS_REMEMBERED)
def _read_spec(raw: bytes) -> ClaimSpec:
    return _SPEC.decode(raw)


def not_charged_by_pods(
    claims: Iterable[StoredClaim], pods: Iterable[StoredPod], nodes: Nodes
) -> Iterator[StoredClaim]:
    """Yield the claims of a namespace but those that the scheduler made for a pod that is itself charged."""
    charged = {pod.extended_claim for pod in pods if pod.live and pod.extended_claim and pod.model_on(nodes)}
    return (claim for claim in claims if claim.name not in charged)
