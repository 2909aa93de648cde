"""The ResourceClaims of the cluster, watched, and what the ledger wants to know of them."""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from controller.pods import REMEMBER_GONE_SECONDS
from vcuda.allocations.stored_claims import ClaimCharge, ClaimPrice, StoredClaim, not_charged_by_pods, read_claim
from vcuda.allocations.stored_pods import StoredPod
from vcuda.kube import CLAIMS, Key, Kube, Reflector
from vcuda.ledger.ledger import ObservedClaims, charges_by_model
from vcuda.placement.placement import Nodes


class ClaimInformer:
    """All claims. ``on_change`` is called with the namespace of each that comes or goes.

    A claim holds what it takes until it has gone from the store: its finalizer stays as long as pods use it, and when
    it goes Kubernetes itself may give its devices to others.
    """

    def __init__(
        self, kube: Kube, on_change: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._gone: dict[str, tuple[str, float]] = {}
        self._known: dict[str, ClaimCharge] = {}
        self._grouped: tuple[Mapping[Key, StoredClaim] | None, dict[str, list[StoredClaim]]] = (None, {})
        self.reflector = Reflector(kube, CLAIMS, read_claim, on_event=self._on_event, page_size=1000)

    def claims(self, namespace: str) -> list[StoredClaim]:
        """Return a namespace's claims."""
        return self._by_namespace().get(namespace, [])

    def namespaces(self) -> Iterable[str]:
        """Return the namespaces that have claims."""
        return list(self._by_namespace())

    def charges(
        self, namespace: str, pods: Iterable[StoredPod], nodes: Nodes, price: ClaimPrice
    ) -> Iterator[tuple[StoredClaim, ClaimCharge]]:
        """Yield what each of a namespace's claims takes, but for those that its pods are charged for."""
        for claim in not_charged_by_pods(self.claims(namespace), pods, nodes):
            if taken := self._charge(claim, price):
                yield claim, taken

    def observed(self, namespace: str, pods: Iterable[StoredPod], nodes: Nodes, price: ClaimPrice) -> ObservedClaims:
        """Return what has been seen of a namespace's claims beside these pods.

        Its version is never newer than what it counts.
        """
        # The version first, as with pods: what comes in between is counted by a version that does not promise it.
        version = self.reflector.resource_version
        taken = {claim.uid: each for claim, each in self.charges(namespace, pods, nodes, price)}
        with self._lock:
            gone = {uid for uid, (home, _) in self._gone.items() if home == namespace}
        committed = charges_by_model((each.model, each.charge) for each in taken.values())
        # One of which it is not known what it takes stays charged by what was decided when it was created.
        return ObservedClaims(version, committed, taken.keys() | gone)

    def _charge(self, claim: StoredClaim, price: ClaimPrice) -> ClaimCharge | None:
        """Return what a claim takes; while its devices are away, as when a driver starts anew, what it took before."""
        found = price(claim.spec)
        with self._lock:
            if found is None:
                self._known.pop(claim.uid, None)
            elif found.certain:
                self._known[claim.uid] = found
            else:
                found = self._known.get(claim.uid, found)
        return found

    def _by_namespace(self) -> dict[str, list[StoredClaim]]:
        snapshot = self.reflector.snapshot()
        with self._lock:
            known, grouped = self._grouped
            if known is not snapshot:
                grouped = {}
                for claim in snapshot.values():
                    grouped.setdefault(claim.namespace, []).append(claim)
                self._grouped = (snapshot, grouped)
            return grouped

    def _on_event(self, old: StoredClaim | None, new: StoredClaim | None) -> None:
        # Its status changes many times in its life, and counts for nothing here.
        if old == new:
            return
        if old and not new:
            with self._lock:
                self._remember_gone(old)
        if changed := new or old:
            self._on_change(changed.namespace)

    def _remember_gone(self, claim: StoredClaim) -> None:
        now = self._clock()
        # From the oldest on, in the order they went: to look through all each time would be quadratic.
        for uid in list(itertools.takewhile(lambda uid: self._gone[uid][1] <= now, self._gone)):
            del self._gone[uid]
        self._gone[claim.uid] = (claim.namespace, now + REMEMBER_GONE_SECONDS)
        self._known.pop(claim.uid, None)
