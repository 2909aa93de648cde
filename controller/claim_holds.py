"""The devices that claims have lost while a container may still use them.

Kubernetes gives the devices of a claim to others as soon as the last pod that used it is gone from the API. After a
forced deletion that is too early: kubelet lets the containers run for their grace period. For so long the charge of the
claim stays, as a terminating one. Two watches have to agree on that, and each may be behind the other.
"""

import threading
from collections.abc import Callable, Iterable, Iterator

import msgspec

from controller.pods import KeptPod, PodInformer, PodLives
from vcuda.allocations.stored_claims import ClaimCharge, ClaimPrice, StoredClaim
from vcuda.allocations.stored_pods import StoredPod
from vcuda.ledger.ledger import UNSEEN_SECONDS, Terminating, is_older

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
    ``at``: when the event was handled, in seconds; for an allocation that no watch saw, when the watch began.
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


class ClaimHolds:
    """The lost allocations of all namespaces. ``pods`` knows how long their pods run; the clock is in seconds."""

    def __init__(self, pods: PodInformer, clock: Callable[[], float]) -> None:
        self._pods = pods
        self._clock = clock
        self._lock = threading.Lock()
        # By uid, the pods that have used the present allocation of a claim.
        self._users: dict[str, set[str]] = {}
        # By namespace and uid, the allocated claims as the events told them.
        self._allocated: dict[str, dict[str, StoredClaim]] = {}
        # By namespace and uid, the claims that a list brought without devices, and when. They may have had some before.
        self._listed_bare: dict[str, dict[str, float]] = {}
        self._lost: dict[str, dict[str, LostAllocation]] = {}

    def note(
        self,
        old: StoredClaim | None,
        new: StoredClaim | None,
        *,
        version: str,
        listed: bool,
        charge: Callable[[StoredClaim], ClaimCharge | None],
    ) -> None:
        """Note an event of the watch.

        ``version``: the watch's. ``listed``: the event is of a list, and nobody saw what happened before. ``charge``
        returns what a claim took.
        """
        changed = new or old
        if changed is None:
            return
        had_bare = self._follow_bare(changed, is_bare=new is not None and not new.allocated, listed=listed)
        if old and old.allocated and (new is None or new.allocated != old.allocated):
            self._lose(LostAllocation(old, charge(old), self.users_of(old), version, self._clock()))
        elif old and new is None and had_bare is not None:
            users = frozenset([_unseen_user(old.uid)])
            self._lose(LostAllocation(old, charge(old), users, version, had_bare))
        self._follow_users(changed, gone=new is None)

    def users_of(self, claim: StoredClaim) -> frozenset[str]:
        """Return the uids of all pods that have used the present allocation of a claim."""
        with self._lock:
            return frozenset({*self._users.get(claim.uid, ()), *claim.users})

    def unseen_users(self, namespace: str) -> Iterable[str]:
        """Return what stands for the pods that may have used a claim before it was listed without devices."""
        with self._lock:
            return [_unseen_user(uid) for uid in self._listed_bare.get(namespace, ())]

    def is_behind(self, namespace: str, stored: Iterable[StoredClaim]) -> bool:
        """Return whether these claims are ahead of the events that were noted: a lost allocation would be missed."""
        with self._lock:
            told = dict(self._allocated.get(namespace, {}))
        if not told:
            return False
        found = {claim.uid: claim.allocated for claim in stored}
        return any(found.get(uid) != claim.allocated for uid, claim in told.items())

    def awaits_pods(self, namespace: str) -> bool:
        """Return whether a claim has just lost its devices, and the watch of pods may not show yet why."""
        young = self._clock() - AWAIT_PODS_SECONDS
        recent = [each for each in self._lost_in(namespace) if each.at > young]
        if not recent:
            return False
        lives = self._pods.lives(namespace)
        return any(not _hold(each, lives, self._pods.seconds_of, 0).sure for each in recent)

    def vanished(self, namespace: str, price: ClaimPrice, grace: int) -> Iterator[tuple[str, Terminating]]:
        """Yield the charges of the devices that may still be in use, each with its key.

        ``grace``: the longest grace period, in seconds, of a pod that no watch saw.
        """
        lost = self._lost_in(namespace)
        if not lost:
            return
        lives, now = self._pods.lives(namespace), self._clock()
        for each in lost:
            hold = _hold(each, lives, self._pods.seconds_of, grace)
            if each.at + hold.seconds <= now and not hold.runs:
                self._forget(each)
                continue
            charge = each.charge or price(each.claim)
            for model, taken in charge.charges.items():
                yield f"{each.key}/{model}", Terminating(model, taken, hold.seconds)

    def _lose(self, lost: LostAllocation) -> None:
        with self._lock:
            self._users.pop(lost.claim.uid, None)
            if lost.users:
                self._lost.setdefault(lost.claim.namespace, {})[lost.key] = lost

    def _forget(self, lost: LostAllocation) -> None:
        with self._lock:
            of_namespace = self._lost.get(lost.claim.namespace, {})
            of_namespace.pop(lost.key, None)
            if not of_namespace:
                self._lost.pop(lost.claim.namespace, None)

    def _lost_in(self, namespace: str) -> list[LostAllocation]:
        with self._lock:
            return list(self._lost.get(namespace, {}).values())

    def _follow_bare(self, claim: StoredClaim, *, is_bare: bool, listed: bool) -> float | None:
        """Remember a claim that a list brought without devices; return when one had brought this claim, if so."""
        with self._lock:
            bare = self._listed_bare.setdefault(claim.namespace, {})
            at = bare.get(claim.uid)
            if is_bare and listed:
                bare[claim.uid] = self._clock()
            elif not is_bare:
                bare.pop(claim.uid, None)
            if not bare:
                del self._listed_bare[claim.namespace]
            return at

    def _follow_users(self, claim: StoredClaim, *, gone: bool) -> None:
        """Remember the pods that use the present allocation of a claim."""
        with self._lock:
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


def _unseen_user(claim: str) -> str:
    return f"unseen user of {claim}"


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
