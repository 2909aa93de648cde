"""Decodes the ResourceClaims that are stored in the cluster, and computes their charges."""

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping

import msgspec

from vcuda.allocations.given_cards import OtherCard
from vcuda.allocations.stored_pods import StoredPod
from vcuda.bounded import SizedCache
from vcuda.claims import charges, objects
from vcuda.claims.devices import DeviceOffer
from vcuda.claims.digest import PackedDigest, pack, read_spec, unpack
from vcuda.claims.request import read_claim
from vcuda.k8s_types import Decoder, K8sObject
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import Charge
from vcuda.requests.resources import WHOLE_CARD

DIGESTS_BYTES, PRICES_BYTES = 4 * 2**20, 4 * 2**20
"""The most bytes of two caches. The first cache maps the hash of a claim's spec to the claim's digest (the packed
device requests). The second cache maps the digest to the charge."""

MAX_STORED_FAULT_LENGTH = 1024
"""The most characters of a claim's fault that are kept in memory. The message of an Event has the same limit."""

MAX_ALLOCATED = 256
"""The most allocated devices of one claim that are kept in memory. The API server allows 32 (AllocationResultsMaxSize
in k8s.io/api `resource/v1`), and only the scheduler writes them."""

MAX_USERS = 256
"""The most users of a claim that are kept in memory. The API server's ResourceClaimReservedForMaxSize is equal."""


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
    """The uids of the pods and PodGroups that may use the devices of the claim. The scheduler writes them into the
    claim's status. The pods of a PodGroup are unknown."""


class ClaimCharge(msgspec.Struct, frozen=True):
    """The charge of a claim for each GPU model, and what makes the charge uncertain."""

    charges: Mapping[str, Charge] = {}
    """By GPU model: the charge of the requests in the spec, or of the allocated devices if their charge is larger."""
    pinned: str | None = None
    """The GPU model to which selectors in the spec limit the claim; None without such selectors."""
    certain: bool = True
    """True if the requests have no faults and all allocated devices are known. Otherwise charges may be too small."""
    fault: str = ""
    """The text of the first fault in the claim's device requests; empty if there is none."""
    uncounted: bool = False
    """True if the claim requests GPUs or has a fault, but is not charged, because its GPU model is unknown."""
    other: OtherCard | None = None
    """An allocated device whose GPU model is not ``pinned``; None if there is no such device."""

    def raised_by(self, before: "ClaimCharge") -> "ClaimCharge":
        """Return this charge, raised for each GPU model to the charge in ``before`` if that is larger."""
        models = dict.fromkeys([*self.charges, *before.charges])
        charges = {each: self.charges.get(each, Charge()).peak(before.charges.get(each, Charge())) for each in models}
        return msgspec.structs.replace(self, charges=charges, uncounted=self.uncounted and not charges)


ClaimPrice = Callable[[StoredClaim], ClaimCharge]


class _Claim(K8sObject, frozen=True, gc=False):
    """A claim whose spec stays JSON text, because `ClaimReader` decodes equal specs only once."""

    spec: msgspec.Raw = msgspec.Raw(b"{}")
    status: objects.ClaimStatus | None = None


_CLAIM = Decoder(_Claim)


class ClaimReader:
    """Decodes stored claims. The class is thread-safe. Equal specs, for example of one template, are decoded once."""

    def __init__(self) -> None:
        self._digests: SizedCache[bytes, PackedDigest] = SizedCache(
            DIGESTS_BYTES, lambda key, packed: len(key) + len(packed)
        )

    def read(self, raw: bytes | msgspec.Raw) -> StoredClaim:
        """Return the claim in JSON text ``raw``. Raises one of ``UNDECODABLE`` if the JSON cannot be decoded."""
        claim = _CLAIM.decode(raw)
        metadata, status = claim.metadata, claim.status
        allocated = status.allocation.devices.results if status and status.allocation else None
        consumers = (status.reserved_for if status else None) or ()
        return StoredClaim(
            metadata.uid,
            metadata.namespace,
            metadata.name,
            self.digest(claim.spec),
            (allocated or ())[:MAX_ALLOCATED],
            metadata.creation_timestamp or "",
            metadata.deletion_timestamp is not None,
            tuple(each.uid for each in consumers[:MAX_USERS]),
        )

    def digest(self, spec: msgspec.Raw) -> PackedDigest:
        """Return the digest of ``spec``, a claim's spec in JSON. Raises one of ``UNDECODABLE`` if it is malformed."""
        # The hash of the spec is the key of the cache, because the spec itself may have megabytes.
        key = hashlib.blake2b(spec, digest_size=16).digest()
        packed = self._digests.get(key)
        if packed is None:
            packed = pack(read_spec(spec))
            self._digests.put(key, packed)
        return packed


class ClaimCounter:
    """Computes the charges of stored claims under one `ClaimPolicy`. A charge is cached by the claim's spec."""

    def __init__(self, policy: charges.ClaimPolicy) -> None:
        self.policy = policy
        self._by_digest: SizedCache[PackedDigest, ClaimCharge] = SizedCache(
            PRICES_BYTES, lambda packed, found: len(packed) + len(found.fault)
        )
        self._model_of_product = functools.cache(policy.products.model_of)

    def __call__(self, claim: StoredClaim) -> ClaimCharge:
        known = self._by_digest.get(claim.digest)
        if known and not claim.allocated:
            return known
        if known and known.certain and known.pinned and {*map(self._model_of, claim.allocated)} == {known.pinned}:
            return known
        request = read_claim(unpack(claim.digest), self.policy)
        pinned = request.model(lenient=True) if request.entries else None
        taken = {pinned: request.charge(pinned)} if pinned else {}
        fault = str(request.faults[0])[:MAX_STORED_FAULT_LENGTH] if request.faults else ""
        uncounted = not pinned and bool(request.entries or request.faults)
        found = ClaimCharge(taken, pinned, certain=not request.faults, fault=fault, uncounted=uncounted)
        self._by_digest.put(claim.digest, found)
        return self._with_devices(claim, request, found) if claim.allocated else found

    def _with_devices(self, claim: StoredClaim, request: charges.ClaimRequest, found: ClaimCharge) -> ClaimCharge:
        """Return the charge of a claim with allocated devices. ``found``: the charge by the claim's spec.

        For each GPU model, the charge is raised to the charge of the allocated devices if that is larger.
        """
        given = self._given(claim, request, found.pinned)
        if not found.pinned and len(given) == 1:
            # If the spec does not limit the claim to one GPU model, but all allocated devices have the same model,
            # charge all requests to this model.
            given = {model: charge.peak(request.charge(model)) for model, charge in given.items()}
        return msgspec.structs.replace(
            found.raised_by(ClaimCharge(given)),
            certain=found.certain and all(map(self._offer, claim.allocated)),
            other=self._other_card(claim, found.pinned) if found.pinned else None,
        )

    def _given(self, claim: StoredClaim, request: charges.ClaimRequest, pinned: str | None) -> Mapping[str, Charge]:
        # The claim's status can be trusted here, because only the scheduler writes the allocated devices there.
        models = [self._model_of(each) for each in claim.allocated]
        main = pinned or min(filter(None, models), default=None)
        entries = {entry.name: entry for entry in request.entries}
        given: dict[str, Charge] = {}
        for device, own in zip(claim.allocated, models, strict=True):
            entry, model = entries.get(device.request), own or main
            # If a claim has no faults, all its requests for GPUs are charged, so a device of another request is no GPU.
            # If the claim has faults, that request may be for a GPU. So a device of a known model is charged a card.
            unlisted = WHOLE_CARD if own and request.faults else Charge()
            value = request.value(entry, model) if entry and model else unlisted
            if model and value != Charge():
                given[model] = given.get(model, Charge()) + value
        return given

    def _other_card(self, claim: StoredClaim, pin: str) -> OtherCard | None:
        """Return the first allocated device that is not of ``pin``, the claim's GPU model; None if all are of it."""
        for device in claim.allocated:
            model, known = self._model_of(device), self._offer(device)
            if known is None or not known[0].product or model == pin:
                continue
            # If a product belongs to no model or to several, the device is accepted if the claim's selector allows the
            # product.
            if model or not self.policy.products.among(self.policy.products.of_model(pin).patterns)(known[0].product):
                models = (model,) if model else ()
                return OtherCard(pin, known[1] or device.pool, device.device, known[0].product, models)
        return None

    def _offer(self, device: objects.AllocatedDevice) -> tuple[DeviceOffer, str] | None:
        return self.policy.devices.find(device)

    def _model_of(self, device: objects.AllocatedDevice) -> str | None:
        known = self._offer(device)
        return self._model_of_product(known[0].product) if known and known[0].product else None


def charged_by_pods(pods: Iterable[StoredPod], nodes: Nodes) -> frozenset[str]:
    """Return the names of the claims that the scheduler created for charged pods. Only the pods are charged."""
    return frozenset(pod.extended_claim for pod in pods if pod.live and pod.extended_claim and pod.model_on(nodes))
