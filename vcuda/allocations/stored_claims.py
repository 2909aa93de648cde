"""Stored ResourceClaims, and their charges."""

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
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import Charge
from vcuda.requests.resources import WHOLE_CARD

DIGESTS_BYTES, PRICES_BYTES = 4 * 2**20, 4 * 2**20
"""The most bytes of two caches. The first cache finds the digest of a claim (its packed requests) by the hash of the
spec. The second cache finds the charge of a claim by its digest."""

LONGEST_FAULT = 1024
"""The most characters that are kept of the text of a fault. The message of an Event has the same bound."""

MOST_ALLOCATED = 256
"""The most devices of one claim that are kept. The API server allows 32 (AllocationResultsMaxSize in k8s.io/api
`resource/v1`), and only the scheduler writes them."""

MOST_USERS = 256
"""The most users of one claim that are kept. The API server has the same bound (ResourceClaimReservedForMaxSize)."""


class StoredClaim(msgspec.Struct, frozen=True):
    """A stored ResourceClaim. Its spec, which cannot change, determines a charge even before devices are allocated."""

    uid: str
    namespace: str
    name: str
    digest: PackedDigest
    """The device requests in the spec, in packed form."""
    allocated: tuple[objects.AllocatedDevice, ...] = ()
    created: str = ""
    terminating: bool = False
    """True if the claim has a deletionTimestamp. It is removed when no pod uses the claim any more."""
    users: tuple[str, ...] = ()
    """The uids of the pods that may use the devices of the claim. The scheduler writes them into the claim's status."""


class ClaimCharge(msgspec.Struct, frozen=True):
    """The charge of a claim."""

    charges: Mapping[str, Charge] = {}
    """By model, the charge of the requests in the spec or of the allocated devices, whichever is larger."""
    held: str | None = None
    """The GPU model to which selectors in the spec limit the claim; None without such selectors."""
    certain: bool = True
    """True if all DeviceClasses and devices of the claim are known. Otherwise the charge may be too small."""
    fault: str = ""
    """The first fault of the claim's request; empty if there is none."""
    uncounted: bool = False
    """True if the claim seems to request GPUs, but is not charged because their model is unknown."""
    other: OtherCard | None = None
    """An allocated device whose GPU model is not ``held``, the model of the claim's pin; None if there is none."""

    def raised_by(self, before: "ClaimCharge") -> "ClaimCharge":
        """Return the larger of this charge and the charge ``before``, for each model."""
        models = dict.fromkeys([*self.charges, *before.charges])
        charges = {each: self.charges.get(each, Charge()).peak(before.charges.get(each, Charge())) for each in models}
        return msgspec.structs.replace(self, charges=charges, uncounted=self.uncounted and not charges)


ClaimPrice = Callable[[StoredClaim], ClaimCharge]


class _Claim(K8sObject, frozen=True, gc=False):
    """A claim whose spec is not decoded."""

    spec: msgspec.Raw = msgspec.Raw(b"{}")
    status: objects.ClaimStatus | None = None


_CLAIM = msgspec.json.Decoder(_Claim)


class ClaimReader:
    """Decodes stored claims. The class is thread-safe. Equal specs, for example of one template, are decoded once."""

    def __init__(self) -> None:
        self._digests: SizedCache[bytes, PackedDigest] = SizedCache(
            DIGESTS_BYTES, lambda key, packed: len(key) + len(packed)
        )

    def read(self, raw: bytes | msgspec.Raw) -> StoredClaim:
        """Return the claim in JSON text ``raw``. Raises one of ``UNDECODABLE`` if the text cannot be decoded."""
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
        """Return the digest of a claim's spec in JSON. Raises one of ``UNDECODABLE`` if the spec cannot be decoded."""
        # The key of the cache is a hash of the spec, because a spec may have megabytes.
        key = hashlib.blake2b(spec, digest_size=16).digest()
        packed = self._digests.get(key)
        if packed is None:
            packed = pack(read_spec(spec))
            self._digests.put(key, packed)
        return packed


class ClaimCounter:
    """Computes the charges of stored claims by one `ClaimPolicy`. The charge of equal requests is computed once."""

    def __init__(self, policy: charges.ClaimPolicy) -> None:
        self.policy = policy
        self._by_digest: SizedCache[PackedDigest, ClaimCharge] = SizedCache(
            PRICES_BYTES, lambda packed, found: len(packed) + len(found.fault)
        )
        self._models: dict[str, str | None] = {}

    def __call__(self, claim: StoredClaim) -> ClaimCharge:
        known = self._by_digest.get(claim.digest)
        if known and not claim.allocated:
            return known
        if known and known.certain and known.held and {*map(self._model_of, claim.allocated)} == {known.held}:
            return known
        asked = request.read_claim(unpack(claim.digest), self.policy)
        held = asked.model(lenient=True) if asked.gpus else None
        taken = {held: asked.charge(held)} if held else {}
        fault = str(asked.faults[0])[:LONGEST_FAULT] if asked.faults else ""
        uncounted = not held and bool(asked.gpus or asked.faults)
        found = ClaimCharge(taken, held, certain=not asked.faults, fault=fault, uncounted=uncounted)
        self._by_digest.put(claim.digest, found)
        return self._with_devices(claim, asked, found) if claim.allocated else found

    def _with_devices(self, claim: StoredClaim, asked: charges.ClaimRequest, found: ClaimCharge) -> ClaimCharge:
        """Return the larger of the charge by the spec and the charge by the allocated devices, for each model."""
        given = self._given(claim, asked, found.held)
        if not found.held and len(given) == 1:
            # If the spec has no pin, and all allocated devices have one model, charge the whole request to that model.
            given = {model: charge.peak(asked.charge(model)) for model, charge in given.items()}
        return msgspec.structs.replace(
            found.raised_by(ClaimCharge(given)),
            certain=found.certain and all(map(self._offer, claim.allocated)),
            other=self._other_card(claim, found.held) if found.held else None,
        )

    def _given(self, claim: StoredClaim, asked: charges.ClaimRequest, held: str | None) -> Mapping[str, Charge]:
        """Return the charge of the allocated devices, by model."""
        # The charge can depend on the claim's status, because only the scheduler writes the allocated devices there.
        models = [self._model_of(each) for each in claim.allocated]
        main = held or min(filter(None, models), default=None)
        entries = asked.by_name()
        given: dict[str, Charge] = {}
        for device, own in zip(claim.allocated, models, strict=True):
            entry, model = entries.get(device.request), own or main
            # An allocated device that no charged entry of the claim requested is not a GPU. But a claim with faults may
            # lack entries. In such a claim, a device of a known model without an entry is charged as a whole card.
            unlisted = WHOLE_CARD if own and asked.faults else Charge()
            worth = asked.worth(entry, model) if entry and model else unlisted
            if model and worth != Charge():
                given[model] = given.get(model, Charge()) + worth
        return given

    def _other_card(self, claim: StoredClaim, held: str) -> OtherCard | None:
        """Return the first allocated device of another model than ``held`` (the model of the claim's pin), or None."""
        for device in claim.allocated:
            model, known = self._model_of(device), self._offer(device)
            if known is None or not known[0].product or model == held:
                continue
            # A product without a model, or of several models, is accepted if the pin of the claim allows the product.
            if model or not self.policy.products.among(self.policy.products.patterns_of(held))(known[0].product):
                models = (model,) if model else ()
                return OtherCard(held, known[1] or device.pool, device.device, known[0].product, models)
        return None

    def _offer(self, device: objects.AllocatedDevice) -> tuple[DeviceOffer, str] | None:
        return self.policy.devices.by_name.get((device.driver, device.pool, device.device))

    def _model_of(self, device: objects.AllocatedDevice) -> str | None:
        known = self._offer(device)
        if known is None:
            return None
        product = known[0].product
        if product not in self._models:
            self._models[product] = self.policy.products.model_of(product) if product else None
        return self._models[product]


def charged_by_pods(pods: Iterable[StoredPod], nodes: Nodes) -> frozenset[str]:
    """Return the names of the claims that the scheduler created for charged pods. Such claims are not charged."""
    return frozenset(pod.extended_claim for pod in pods if pod.live and pod.extended_claim and pod.model_on(nodes))
