"""The ResourceClaims of the cluster, watched, and what the ledger wants to know of them."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from controller.pods import GoneUids
from vcuda.allocations.stored_claims import ClaimCharge, ClaimPrice, StoredClaim
from vcuda.kube import CLAIMS, Kube, LedgerStore, Reflector
from vcuda.ledger.ledger import Ledger, ObservedClaims, charges_by_model, is_older


class ClaimInformer:
    """All claims. ``on_change`` is called with the namespace of each that comes or goes.

    ``store`` tells what a claim takes, and counts those that etcd has.

    A claim holds what it takes until it has gone from the store: its finalizer stays as long as pods use it, and when
    it goes Kubernetes itself may give its devices to others.
    """

    def __init__(
        self,
        kube: Kube,
        store: LedgerStore,
        on_change: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._on_change = on_change
        self._lock = threading.Lock()
        self._gone = GoneUids(clock)
        self._known: dict[str, ClaimCharge] = {}
        self.reflector = Reflector(kube, CLAIMS, store.claim_reader.read, on_event=self._on_event)

    def claims(self, namespace: str) -> list[StoredClaim]:
        """Return a namespace's claims."""
        return self.reflector.within(namespace)

    def namespaces(self) -> Iterable[str]:
        """Return the namespaces that have claims."""
        return self.reflector.namespaces()

    def charges(self, namespace: str, extended: Collection[str] = ()) -> Iterator[tuple[StoredClaim, ClaimCharge]]:
        """Return what each of a namespace's claims takes, but for those of these names, which pods are charged for."""
        return self._charged(self.claims(namespace), extended)

    def _charged(
        self, claims: Iterable[StoredClaim], extended: Collection[str]
    ) -> Iterator[tuple[StoredClaim, ClaimCharge]]:
        if price := self._store.claim_price():
            for claim in claims:
                if claim.name not in extended:
                    yield claim, self._charge(claim, price)

    def observed(self, namespace: str, extended: Collection[str]) -> ObservedClaims | None:
        """Return what has been seen of a namespace's claims, but for those that pods are charged for.

        What it counts is what there was at its version. None as long as claims and devices have not been listed.
        """
        if not self.reflector.synced.is_set() or self._store.claim_price() is None:
            return None
        version, claims = self.reflector.versioned(namespace)
        taken = {claim.uid: each.charges for claim, each in self._charged(claims, extended) if each.charges}
        with self._lock:
            gone = self._gone.within(namespace)
        committed = charges_by_model(each for charges in taken.values() for each in charges.items())
        # One of which it is not known what it takes stays charged by what was decided when it was created.
        return ObservedClaims(version, committed, taken.keys() | gone)

    def as_new_as(self, ledger: Ledger, namespace: str, extended: Collection[str]) -> ObservedClaims | None:
        """Return what has been seen of a namespace's claims; where the ledger's count is newer, what etcd has.

        None where that count is to stay.
        """
        observed = self.observed(namespace, extended)
        if observed is None or not is_older(observed.resource_version, ledger.claim_resource_version):
            return observed
        # As with pods; but theirs is the watch that is quiet most often. Where it says what the ledger does, and knows
        # of nothing that is pending there, a LIST would change nothing: without one that count stays as it is.
        if observed.committed == ledger.claimed and ledger.pending.keys().isdisjoint(observed.seen):
            return None
        newest = self._store.count_claims(namespace, extended)
        return newest and newest.after(observed)

    def _charge(self, claim: StoredClaim, price: ClaimPrice) -> ClaimCharge:
        """Return what a claim takes; while its devices are away, as when a driver starts anew, what it took before."""
        found = price(claim)
        with self._lock:
            if not found.certain:
                before = self._known.get(claim.uid)
                return found.raised_by(before) if before else found
            self._known.pop(claim.uid, None)
            if found.charges:
                self._known[claim.uid] = found
        return found

    def _on_event(self, old: StoredClaim | None, new: StoredClaim | None) -> None:
        # Of its status only what was allocated is kept: by that a claim counts that nothing holds to a model.
        if old == new:
            return
        if old and not new:
            with self._lock:
                self._gone.add(old.namespace, old.uid)
                self._known.pop(old.uid, None)
        if changed := new or old:
            self._on_change(changed.namespace)
