"""Stored ResourceClaims as the ledger counts them."""

import hashlib
from collections.abc import Callable, Iterable, Mapping

import msgspec

from vcuda.allocations.given_cards import OtherCard
from vcuda.allocations.stored_pods import StoredPod
from vcuda.bounded import SizedCache
from vcuda.claims import charges, objects, request
from vcuda.claims.devices import DeviceOffer
from vcuda.claims.digest import PackedDigest, pack, read_spec, unpack
from vcuda.k8s_types import K8sObject
from vcuda.placement.placement import Nodes
from vcuda.quota.model import Charge
from vcuda.requests.resources import WHOLE_CARD

DIGESTS_BYTES, PRICES_BYTES = 4 * 2**20, 4 * 2**20
"""Bytes of digests that are remembered by the hash of their spec, and of charges by their digest."""

LONGEST_FAULT = 1024
"""Characters of the fault that is kept with a charge: as many as an Event has."""

MOST_ALLOCATED = 256
"""Devices of one claim that are kept. The API server allows 32 (AllocationResultsMaxSize in k8s.io/api `resource/v1`);
only the scheduler writes them."""

MOST_USERS = 256
"""Users of one claim that are kept: as many as the API server allows (ResourceClaimReservedForMaxSize)."""


class StoredClaim(msgspec.Struct, frozen=True):
    """What is kept of a claim that is stored. It counts by its spec, allocated or not, which cannot change."""

    uid: str
    namespace: str
    name: str
    digest: PackedDigest
    """What its spec asks for."""
    allocated: tuple[objects.AllocatedDevice, ...] = ()
    created: str = ""
    terminating: bool = False
    """Whether its deletion was accepted. It goes with the last pod that uses it."""
    users: tuple[str, ...] = ()
    """The uids of the pods that may use its devices, as the scheduler wrote them into the status."""


class ClaimCharge(msgspec.Struct, frozen=True):
    """What a claim takes of each model, by its spec and by the devices that it was given, whichever is more.

    ``held`` is the model that its spec holds it to. ``certain``: its classes and its devices are all known; else one of
    them is away just now, and more may be taken. ``fault``: what the quota refuses in the way it asks, or empty.
    ``uncounted``: it asks for GPUs, as far as is known, and nothing tells of which model. ``other`` is a device that it
    was given of another model than it is held to.
    """

    charges: Mapping[str, Charge] = {}
    held: str | None = None
    certain: bool = True
    fault: str = ""
    uncounted: bool = False
    other: OtherCard | None = None

    def raised_by(self, before: "ClaimCharge") -> "ClaimCharge":
        """Return this, and of each model as much as it took before."""
        models = dict.fromkeys([*self.charges, *before.charges])
        charges = {each: self.charges.get(each, Charge()).peak(before.charges.get(each, Charge())) for each in models}
        return msgspec.structs.replace(self, charges=charges, uncounted=self.uncounted and not charges)


ClaimPrice = Callable[[StoredClaim], ClaimCharge]


class _Claim(K8sObject, frozen=True, gc=False):
    """A claim, with its spec as text."""

    spec: msgspec.Raw = msgspec.Raw(b"{}")
    status: objects.ClaimStatus | None = None


_CLAIM = msgspec.json.Decoder(_Claim)


class ClaimReader:
    """Reads stored claims, in every thread. Claims made from one template are alike: their spec is read once."""

    def __init__(self) -> None:
        self._digests: SizedCache[bytes, PackedDigest] = SizedCache(
            DIGESTS_BYTES, lambda key, packed: len(key) + len(packed)
        )

    @property
    def kept_bytes(self) -> int:
        """The bytes of the digests that are remembered."""
        return self._digests.bytes

    def read(self, raw: bytes | msgspec.Raw) -> StoredClaim:
        """Return what is kept of a claim in JSON; raise one of ``UNDECODABLE`` for anything else."""
        claim = _CLAIM.decode(raw)
        metadata, status = claim.metadata, claim.status
        allocated = status.allocation.devices.results if status and status.allocation else None
        consumers = (status.reserved_for if status else None) or ()
        return StoredClaim(
            metadata.uid,
            metadata.namespace,
            metadata.name,
            self.digest(claim.spec),
            (allocated or ())[:MOST_ALLOCATED],
            metadata.creation_timestamp or "",
            metadata.deletion_timestamp is not None,
            tuple(each.uid for each in consumers[:MOST_USERS] if each.resource == "pods"),
        )

    def digest(self, spec: msgspec.Raw) -> PackedDigest:
        """Return the digest of a spec in JSON; raise one of ``UNDECODABLE`` for anything else."""
        # Not the text itself is kept: it may be megabytes long.
        key = hashlib.blake2b(spec, digest_size=16).digest()
        packed = self._digests.get(key)
        if packed is None:
            packed = pack(read_spec(spec))
            self._digests.put(key, packed)
        return packed


class ClaimCounter:
    """What stored claims take by one policy. Of claims that ask alike the charge is worked out once."""

    def __init__(self, policy: charges.ClaimPolicy) -> None:
        self._policy = policy
        self._by_digest: SizedCache[PackedDigest, ClaimCharge] = SizedCache(
            PRICES_BYTES, lambda packed, found: len(packed) + len(found.fault)
        )
        self._models: dict[str, str | None] = {}

    def __call__(self, claim: StoredClaim) -> ClaimCharge:
        """Return what a claim takes."""
        known = self._by_digest.get(claim.digest)
        if known is not None and self._gives_as_asked(claim, known):
            return known
        asked = request.read_claim(unpack(claim.digest), self._policy)
        held = asked.model(lenient=True) if asked.gpus else None
        taken = {held: asked.charge(held)} if held else {}
        fault = str(asked.faults[0])[:LONGEST_FAULT] if asked.faults else ""
        uncounted = not held and bool(asked.gpus or asked.faults)
        found = ClaimCharge(taken, held, certain=not asked.faults, fault=fault, uncounted=uncounted)
        self._by_digest.put(claim.digest, found)
        return self._with_devices(claim, asked, found) if claim.allocated else found

    def _gives_as_asked(self, claim: StoredClaim, known: ClaimCharge) -> bool:
        """Return whether the devices of a claim, if it has any, are all of the one model that it is held to."""
        if not claim.allocated:
            return True
        return known.certain and known.held is not None and {*map(self._model_of, claim.allocated)} == {known.held}

    def _with_devices(self, claim: StoredClaim, asked: charges.ClaimRequest, found: ClaimCharge) -> ClaimCharge:
        """Return what a claim takes by its spec, raised to what it was given."""
        given = self._given(claim, asked, found.held)
        if not found.held and len(given) == 1:
            # What else it asks for, of which nobody knows a model, counts for the one that is known.
            given = {model: charge.peak(asked.charge(model)) for model, charge in given.items()}
        return msgspec.structs.replace(
            found.raised_by(ClaimCharge(given)),
            certain=found.certain and all(map(self._offer, claim.allocated)),
            other=self._other_card(claim, found.held) if found.held else None,
        )

    def _given(self, claim: StoredClaim, asked: charges.ClaimRequest, held: str | None) -> Mapping[str, Charge]:
        """Return what the allocated devices are worth, by model."""
        # Its status is written by the scheduler alone, and so is evidence.
        models = [self._model_of(each) for each in claim.allocated]
        main = held or min(filter(None, models), default=None)
        entries = asked.by_name()
        given: dict[str, Charge] = {}
        for device, own in zip(claim.allocated, models, strict=True):
            entry, model = entries.get(device.request), own or main
            # Of a class in no table it is a whole card, if it is one; a class of the table without an entry is no GPU.
            unlisted = WHOLE_CARD if own and asked.faults else Charge()
            worth = asked.worth(entry, model) if entry and model else unlisted
            if model and worth != Charge():
                given[model] = given.get(model, Charge()) + worth
        return given

    def _other_card(self, claim: StoredClaim, held: str) -> OtherCard | None:
        """Return the first device that is of another model than the one that the claim is held to."""
        for device in claim.allocated:
            model, known = self._model_of(device), self._offer(device)
            if known is None or not known[0].product or model == held:
                continue
            # A product that is of no model, or of two, may still be one that it was held to.
            if model or not self._policy.products.among(self._policy.products.patterns_of(held))(known[0].product):
                models = (model,) if model else ()
                return OtherCard(held, known[1] or device.pool, device.device, known[0].product, models)
        return None

    def _offer(self, device: objects.AllocatedDevice) -> tuple[DeviceOffer, str] | None:
        return self._policy.devices.by_name.get((device.driver, device.pool, device.device))

    def _model_of(self, device: objects.AllocatedDevice) -> str | None:
        known = self._offer(device)
        if known is None:
            return None
        product = known[0].product
        if product not in self._models:
            self._models[product] = self._policy.products.model_of(product) if product else None
        return self._models[product]


def charged_by_pods(pods: Iterable[StoredPod], nodes: Nodes) -> frozenset[str]:
    """Return the names of the claims that the scheduler made for pods of a namespace that are themselves charged."""
    return frozenset(pod.extended_claim for pod in pods if pod.live and pod.extended_claim and pod.model_on(nodes))
