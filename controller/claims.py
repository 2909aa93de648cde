"""Watches the ResourceClaims and returns their charges, from which the controller recounts the ledgers.

A claim is charged until it is deleted. A finalizer prevents the deletion while pods use the claim. The module
`controller.claim_holds` handles devices that stay in use for some seconds after their claim has lost them.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from controller.claim_holds import ClaimHolds
from controller.pods import GoneUids, PodInformer
from vcuda.allocations.stored_claims import ClaimCharge, ClaimPrice, StoredClaim
from vcuda.kube import CLAIMS, Kube, LedgerStore, Reflector
from vcuda.ledger.ledger import Ledger, charges_by_model, is_older
from vcuda.ledger.recount import ObservedClaims


class ClaimInformer:
    """The watch of all ResourceClaims.

    ``store``: computes the charge of a claim, and lists the stored claims.
    ``pods``: the watch of the pods that use the claims.
    ``on_change``: called with the namespace of each new, changed or deleted claim.
    """

    def __init__(
        self,
        kube: Kube,
        store: LedgerStore,
        pods: PodInformer,
        on_change: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._on_change = on_change
        self._lock = threading.Lock()
        self._gone = GoneUids(clock)
        self._known: dict[str, ClaimCharge] = {}
        self._holds = ClaimHolds(pods, clock)
        self.reflector = Reflector(kube, CLAIMS, store.claim_reader.read, on_event=self._on_event)

    def claims(self, namespace: str) -> list[StoredClaim]:
        return self.reflector.within(namespace)

    def namespaces(self) -> Iterable[str]:
        return self.reflector.namespaces()

    @property
    def since(self) -> str:
        """The resourceVersion of the LIST with which the watch began. The watch has seen every later deletion."""
        return self.reflector.listed_version

    def charges(self, namespace: str, extended: Collection[str] = ()) -> Iterator[tuple[StoredClaim, ClaimCharge]]:
        # The scheduler made the claims in `extended` for pods with extended resources. Only the pods are charged then.
        return self._charged(self.claims(namespace), extended)

    def _charged(
        self, claims: Iterable[StoredClaim], extended: Collection[str]
    ) -> Iterator[tuple[StoredClaim, ClaimCharge]]:
        if price := self._store.claim_price():
            for claim in claims:
                if claim.name not in extended:
                    yield claim, self._charge(claim, price)

    def observed(self, namespace: str, extended: Collection[str], grace: int) -> ObservedClaims | None:
        """Return the charges of a namespace's claims at one resourceVersion.

        ``extended``: names of claims to leave out. ``grace``: for how many seconds a pod that the pod watch never
        showed may run after its deletion. After this time, the devices that the pod used are forgotten. Return None if
        claims or devices have not been listed yet. Raises Unavailable while a claim of the namespace cannot be decoded,
        because its charge is unknown.
        """
        self.reflector.check_read(namespace)
        price = self._store.claim_price()
        if not self.reflector.synced.is_set() or price is None:
            return None
        version, claims = self.reflector.versioned(namespace)
        taken = {claim.uid: each.charges for claim, each in self._charged(claims, extended) if each.charges}
        with self._lock:
            gone = self._gone.within(namespace)
        return ObservedClaims(
            version,
            charges_by_model(each for charges in taken.values() for each in charges.items()),
            # Claims without a known charge are not reported as stored, so that the ledger keeps their pending charges.
            taken.keys() | gone,
            dict(self._holds.vanished(namespace, price, grace)),
            self.since,
            users={*(uid for claim in claims for uid in claim.users), *self._holds.unseen_users(namespace)},
            gone=gone,
        )

    def as_new_as(self, ledger: Ledger, namespace: str, extended: Collection[str]) -> ObservedClaims | None:
        """Return the charges of a namespace's claims at a resourceVersion that is not older than the ledger's.

        If the watch is older than the ledger, list the claims. Return None if the ledger must keep its charges for now.
        """
        if self.awaits_pods(namespace):
            return None
        observed = self.observed(namespace, extended, ledger.longest_claim_grace)
        if observed is None or not is_older(observed.resource_version, ledger.claim_resource_version):
            return observed
        # Claims change rarely, so the resourceVersion of the claim watch is often older than the ledger's. If the watch
        # and the ledger have equal charges, and no claim with a pending charge is in the watch, no LIST is needed.
        if observed.committed == ledger.claimed and ledger.pending.keys().isdisjoint(observed.seen):
            return None
        newest = self._store.count_claims(namespace, extended)
        return newest and newest.with_deletions(observed, ledger.claim_resource_version)

    def awaits_pods(self, namespace: str) -> bool:
        """Return True if a claim has just lost its devices and the watches may not show the cause yet."""
        return self._holds.is_behind(namespace, self.claims(namespace)) or self._holds.awaits_pods(namespace)

    def _charge(self, claim: StoredClaim, price: ClaimPrice) -> ClaimCharge:
        """Return a claim's charge. If no ResourceSlice lists the claim's devices, return at least its last charge."""
        found = price(claim)
        with self._lock:
            if not found.certain:
                before = self._known.get(claim.uid)
                return found.raised_by(before) if before else found
            self._known.pop(claim.uid, None)
            # Do not record the charge of a claim that was deleted meanwhile, because no event would remove the record.
            if found.charges and not self._gone.has(claim.namespace, claim.uid):
                self._known[claim.uid] = found
        return found

    def _last_charge(self, claim: StoredClaim) -> ClaimCharge | None:
        price = self._store.claim_price()
        return self._charge(claim, price) if price else None

    def _on_event(self, old: StoredClaim | None, new: StoredClaim | None) -> None:
        version = self.reflector.resource_version
        listed = version == self.reflector.listed_version
        self._holds.record(old, new, version=version, listed=listed, charge=self._last_charge)
        # StoredClaim omits most fields of a ResourceClaim. Ignore an event that changes only omitted fields.
        changed = new or old
        if old == new or changed is None:
            return
        if new is None:
            with self._lock:
                self._gone.add(changed.namespace, changed.uid)
                self._known.pop(changed.uid, None)
        self._on_change(changed.namespace)
