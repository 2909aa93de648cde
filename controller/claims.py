"""The ResourceClaims of the cluster, watched, and what the ledger has to know about them.

A claim is charged until it is deleted. Its finalizer stays as long as pods use it, and Kubernetes may give its devices
to others when the last pod has gone. After a forced deletion that is too early: kubelet lets the containers of the pod
run on for its grace period. So the charge of a claim that loses its devices in that way becomes terminating.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator

import msgspec

from controller.pods import GoneUids, KeptPod, PodInformer, PodLives
from vcuda.allocations.stored_claims import ClaimCharge, ClaimPrice, StoredClaim, read_stored_claim
from vcuda.allocations.stored_pods import StoredPod
from vcuda.kube import CLAIMS, Kube, LedgerStore, Reflector
from vcuda.ledger.ledger import UNSEEN_SECONDS, Ledger, Terminating, charges_by_model, is_older
from vcuda.ledger.settle import ObservedClaims

AWAIT_PODS_SECONDS = 5.0
"""How long a claim that has lost its devices stays in the count while the watch of pods may be behind that of claims.
After that its pods are taken for running."""

MOST_FORMER_USERS = 512
"""Pods of one allocation that are remembered before those that have ended are forgotten."""


class LostAllocation(msgspec.Struct, frozen=True):
    """An allocation that a claim has lost.

    ``claim``: the claim as it was before.
    ``charge``: what it took then; None if its devices were not known.
    ``users``: the uids of all pods that used the allocation.
    ``version``: the resourceVersion of the event.
    ``at``: when the event was handled, on the informer's clock, in seconds.
    """

    claim: StoredClaim
    charge: ClaimCharge | None
    users: frozenset[str]
    version: str
    at: float

    @property
    def key(self) -> str:
        """The key of its terminating charge. One claim may lose its devices several times."""
        return f"{self.claim.uid}@{self.version}"


class Hold(msgspec.Struct, frozen=True):
    """How long the devices of an allocation may stay in use after it was lost.

    ``seconds``: from the loss on.
    ``sure``: the watch of pods has come as far as that of claims, and shows the same.
    ``runs``: a pod that uses the devices still runs, as far as the watch of pods shows.
    """

    seconds: int
    sure: bool = True
    runs: bool = False


class ClaimInformer:
    """All claims. ``on_change`` is called with the namespace of each that is new, changed or deleted.

    ``store`` returns what a claim takes, and counts those that etcd has. ``pods`` knows how long their pods run.
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
        self._pods = pods
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._gone = GoneUids(clock)
        self._known: dict[str, ClaimCharge] = {}
        # By uid, the pods that have used the present allocation of a claim.
        self._users: dict[str, set[str]] = {}
        # By namespace and uid, the allocated claims as the events told them.
        self._allocated: dict[str, dict[str, StoredClaim]] = {}
        self._lost: dict[str, dict[str, LostAllocation]] = {}
        self.reflector = Reflector(kube, CLAIMS, read_stored_claim, on_event=self._on_event, page_size=1000)

    def claims(self, namespace: str) -> list[StoredClaim]:
        """Return a namespace's claims."""
        return self.reflector.within(namespace)

    def namespaces(self) -> Iterable[str]:
        """Return the namespaces that have claims."""
        return self.reflector.namespaces()

    @property
    def since(self) -> str:
        """The version from which on every departure was seen."""
        return self.reflector.listed_version

    def charges(self, namespace: str, extended: Collection[str] = ()) -> Iterator[tuple[StoredClaim, ClaimCharge]]:
        """Return what each of a namespace's claims takes, except those of these names, which pods are charged for."""
        return self._charged(self.claims(namespace), extended)

    def _charged(
        self, claims: Iterable[StoredClaim], extended: Collection[str]
    ) -> Iterator[tuple[StoredClaim, ClaimCharge]]:
        if price := self._store.claim_price():
            for claim in claims:
                if claim.name not in extended:
                    yield claim, self._charge(claim, price)

    def observed(self, namespace: str, extended: Collection[str], grace: int = UNSEEN_SECONDS) -> ObservedClaims | None:
        """Return what has been seen of a namespace's claims, except those that pods are charged for.

        What it counts is what there was at its version. ``grace``: the longest grace period, in seconds, of a pod that
        this watch may not have seen. None if claims or devices have not been listed yet.
        """
        price = self._store.claim_price()
        if not self.reflector.synced.is_set() or price is None:
            return None
        version, claims = self.reflector.versioned(namespace)
        taken = {claim.uid: each.charges for claim, each in self._charged(claims, extended) if each.charges}
        with self._lock:
            gone = self._gone.within(namespace)
        committed = charges_by_model(each for charges in taken.values() for each in charges.items())
        vanished = dict(self._vanished(namespace, price, grace))
        # A claim whose charge is not known stays charged by what was decided when it was created.
        users = {uid for claim in claims for uid in claim.users}
        return ObservedClaims(version, committed, taken.keys() | gone, vanished, self.since, users, gone)

    def as_new_as(self, ledger: Ledger, namespace: str, extended: Collection[str]) -> ObservedClaims | None:
        """Return what has been seen of a namespace's claims; if the ledger's count is newer, what etcd has.

        None if the ledger's count must stay as it is.
        """
        if self.awaits_pods(namespace):
            return None
        observed = self.observed(namespace, extended, ledger.longest_claim_grace)
        if observed is None or not is_older(observed.resource_version, ledger.claim_resource_version):
            return observed
        # As with pods; but theirs is the watch that is quiet most often. Where it says what the ledger does, and knows
        # of nothing that is pending there, a LIST would change nothing: without one that count stays as it is.
        if observed.committed == ledger.claimed and ledger.pending.keys().isdisjoint(observed.seen):
            return None
        newest = self._store.count_claims(namespace, extended)
        return newest and newest.after(observed, ledger)

    def awaits_pods(self, namespace: str) -> bool:
        """Return whether a claim has just lost its devices, and the watch of pods may not show yet why."""
        if self._is_behind(namespace):
            return True
        young = self._clock() - AWAIT_PODS_SECONDS
        recent = [each for each in self._lost_now(namespace) if each.at > young]
        if not recent:
            return False
        lives = self._pods.lives(namespace)
        return any(not _hold(each, lives, self._pods.seconds_of, 0).sure for each in recent)

    def _is_behind(self, namespace: str) -> bool:
        """Return whether the store is ahead of the events that were handled: a lost allocation would be missed."""
        with self._lock:
            told = dict(self._allocated.get(namespace, {}))
        if not told:
            return False
        stored = {claim.uid: claim.allocated for claim in self.claims(namespace)}
        return any(stored.get(uid) != claim.allocated for uid, claim in told.items())

    def _vanished(self, namespace: str, price: ClaimPrice, grace: int) -> Iterator[tuple[str, Terminating]]:
        lost = self._lost_now(namespace)
        if not lost:
            return
        lives, now = self._pods.lives(namespace), self._clock()
        for each in lost:
            hold = _hold(each, lives, self._pods.seconds_of, grace)
            if each.at + hold.seconds <= now and not hold.runs:
                with self._lock:
                    self._lost.get(namespace, {}).pop(each.key, None)
                continue
            charge = each.charge or price(each.claim)
            for model, taken in charge.charges.items():
                yield f"{each.key}/{model}", Terminating(model, taken, hold.seconds)

    def _lost_now(self, namespace: str) -> list[LostAllocation]:
        with self._lock:
            lost = list(self._lost.get(namespace, {}).values())
            if not lost:
                self._lost.pop(namespace, None)
        return lost

    def _charge(self, claim: StoredClaim, price: ClaimPrice) -> ClaimCharge:
        """Return what a claim takes; while its devices are away, as when a driver restarts, what it took before."""
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
        # Of its status only the allocation and its users are kept: by the first an unpinned claim is charged.
        if old == new:
            return
        if old and old.allocated and (new is None or new.allocated != old.allocated):
            self._note_lost(old)
        with self._lock:
            if changed := new or old:
                self._follow_users(changed, gone=new is None)
            if old and not new:
                self._gone.add(old.namespace, old.uid)
                self._known.pop(old.uid, None)
        if changed:
            self._on_change(changed.namespace)

    def _note_lost(self, claim: StoredClaim) -> None:
        price = self._store.claim_price()
        charge = self._charge(claim, price) if price else None
        users = self.users_of(claim)
        lost = LostAllocation(claim, charge, users, self.reflector.resource_version, self._clock())
        with self._lock:
            self._users.pop(claim.uid, None)
            if users:
                self._lost.setdefault(claim.namespace, {})[lost.key] = lost

    def users_of(self, claim: StoredClaim) -> frozenset[str]:
        """Return the uids of all pods that have used the present allocation of a claim."""
        with self._lock:
            return frozenset({*self._users.get(claim.uid, ()), *claim.users})

    def _follow_users(self, claim: StoredClaim, *, gone: bool) -> None:
        """Remember the pods that use the present allocation of a claim."""
        allocated = self._allocated.setdefault(claim.namespace, {})
        allocated.pop(claim.uid, None)
        if claim.allocated and not gone:
            allocated[claim.uid] = claim
            users = self._users.setdefault(claim.uid, set())
            if len(users) > MOST_FORMER_USERS:
                lives = self._pods.lives(claim.namespace)
                users &= {uid for uid in users if _may_run(uid, lives)}
            users.update(claim.users)
        else:
            self._users.pop(claim.uid, None)
        if not allocated:
            del self._allocated[claim.namespace]


def _may_run(uid: str, lives: PodLives) -> bool:
    stored = lives.stored.get(uid)
    return uid in lives.vanished or uid in lives.untold or (stored.live if stored else uid not in lives.gone)


def _hold(lost: LostAllocation, lives: PodLives, seconds_of: Callable[[KeptPod], int], grace: int) -> Hold:
    """Return for how long the pods that used an allocation may still run.

    ``seconds_of`` returns the seconds that one pod may run after its deletion, and ``grace`` those of a pod that no
    watch has seen.
    """
    holds = [hold_by_pod(uid, lost, lives, seconds_of, grace) for uid in lost.users]
    seconds = max(each.seconds for each in holds)
    return Hold(seconds, all(each.sure for each in holds), any(each.runs for each in holds))


def hold_by_pod(
    uid: str, lost: LostAllocation, lives: PodLives, seconds_of: Callable[[KeptPod], int], grace: int
) -> Hold:
    """Return for how long one pod that used an allocation may still run; the parameters are as in `_hold`."""
    pod = lives.vanished.get(uid) or lives.untold.get(uid)
    if pod:
        return Hold(0 if _is_charged_for(pod, lost.claim) else seconds_of(pod))
    if uid in lives.gone:
        return Hold(0)  # it had ended, was never bound, or its grace period is over
    is_newer = not is_older(lives.version, lost.version)
    pod = lives.stored.get(uid)
    if pod is None:
        # In a view that is new enough it is missing because it was deleted before the watch of pods began.
        return Hold(max(grace, UNSEEN_SECONDS), is_newer)
    if not pod.live or _is_charged_for(pod, lost.claim):
        return Hold(0)
    if not pod.node:
        return Hold(0 if is_newer else seconds_of(pod), is_newer)
    # Kubernetes takes no devices from a pod that runs: the watch of pods is behind.
    return Hold(seconds_of(pod), sure=False, runs=is_newer)


def _is_charged_for(pod: KeptPod, claim: StoredClaim) -> bool:
    """Return whether the pod itself is charged for the claim, which the scheduler made for its extended resources."""
    return isinstance(pod, StoredPod) and pod.extended_claim == claim.name
