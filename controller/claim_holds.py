"""The devices that claims have lost while a container may still use them.

Kubernetes releases the devices of a claim as soon as the last pod that used it is deleted from the API. After a forced
deletion that is too early, because kubelet lets the containers run for their grace period. Until then the charge of the
claim stays as a terminating charge. The watches of pods and of claims must agree on that, and either may be behind.
"""

import threading
from collections.abc import Callable, Iterable, Iterator

import msgspec

from controller.pods import KeptPod, PodInformer, PodLives
from vcuda.allocations.stored_claims import ClaimCharge, ClaimPrice, StoredClaim
from vcuda.allocations.stored_pods import StoredPod
from vcuda.ledger.ledger import UNSEEN_SECONDS, Terminating, is_older

AWAIT_PODS_SECONDS = 5.0
"""Seconds for which the count of claims waits for the watch of pods after a claim has lost its devices.
Later, pods that the watch still shows are assumed to run."""

MOST_FORMER_USERS = 512
"""The number of remembered pods of one allocation above which ended pods are forgotten."""


class LostAllocation(msgspec.Struct, frozen=True):
    """An allocation that a claim has lost.

    ``claim``: the claim before the loss.
    ``charge``: the charge of the claim before the loss; None if its devices were not known.
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
        """The key of the terminating charge. It has the version because a claim can lose its devices several times."""
        return f"{self.claim.uid}@{self.version}"


class Hold(msgspec.Struct, frozen=True):
    """How long the devices of a lost allocation may stay in use.

    ``seconds``: the time since the loss after which they are free.
    ``sure``: the watch of pods is at least as new as the watch of claims, and agrees with it.
    ``runs``: the watch of pods shows a running pod that uses the devices.
    """

    seconds: int
    sure: bool = True
    runs: bool = False


class ClaimHolds:
    """The lost allocations of all namespaces. ``pods`` has the pods that used them; the clock is in seconds."""

    def __init__(self, pods: PodInformer, clock: Callable[[], float]) -> None:
        self._pods = pods
        self._clock = clock
        self._lock = threading.Lock()
        # By the uid of a claim, the pods that have used its current allocation.
        self._users: dict[str, set[str]] = {}
        # By namespace and uid, the allocated claims as of their last event.
        self._allocated: dict[str, dict[str, StoredClaim]] = {}
        # By namespace and uid, when a claim was listed without devices. It may have had devices before.
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
        """Note an event of the watch of claims.

        ``version``: the version of the watch.
        ``listed``: the event is from a list, so earlier events may have been missed.
        ``charge``: returns the charge that a claim had.
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
        """Return the uids of all pods that have used the current allocation of a claim."""
        with self._lock:
            return frozenset({*self._users.get(claim.uid, ()), *claim.users})

    def unseen_users(self, namespace: str) -> Iterable[str]:
        """Return placeholder uids: one for each claim listed without devices, whose earlier users are unknown."""
        with self._lock:
            return [_unseen_user(uid) for uid in self._listed_bare.get(namespace, ())]

    def is_behind(self, namespace: str, stored: Iterable[StoredClaim]) -> bool:
        """Return whether the stored claims are newer than the noted events. A lost allocation may be missing then."""
        with self._lock:
            told = dict(self._allocated.get(namespace, {}))
        if not told:
            return False
        found = {claim.uid: claim.allocated for claim in stored}
        return any(found.get(uid) != claim.allocated for uid, claim in told.items())

    def awaits_pods(self, namespace: str) -> bool:
        """Return whether a claim has just lost its devices and the watch of pods may not show the reason yet."""
        young = self._clock() - AWAIT_PODS_SECONDS
        recent = [each for each in self._lost_in(namespace) if each.at > young]
        if not recent:
            return False
        lives = self._pods.lives(namespace)
        return any(not _hold(each, lives, self._pods.seconds_of, 0).sure for each in recent)

    def vanished(self, namespace: str, price: ClaimPrice, grace: int) -> Iterator[tuple[str, Terminating]]:
        """Yield the terminating charges of lost devices that may still be in use, each with its key.

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
        """Remember a claim that was listed without devices; return the time if it was listed so before."""
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
        """Remember the pods that use the current allocation of a claim."""
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

    ``seconds_of``: returns the seconds for which a pod may run after its deletion.
    ``grace``: the same for a pod that no watch has seen.
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
        return Hold(0)  # the pod had ended, was never bound, or its grace period is over
    is_newer = not is_older(lives.version, lost.version)
    pod = lives.stored.get(uid)
    if pod is None:
        # If the watch of pods is new enough, the pod is missing because it was deleted before that watch began.
        return Hold(max(grace, UNSEEN_SECONDS), is_newer)
    if not pod.live or _is_charged_for(pod, lost.claim):
        return Hold(0)
    if not pod.node:
        return Hold(0 if is_newer else seconds_of(pod), is_newer)
    # Kubernetes does not take devices from a running pod, so the watch of pods is behind.
    return Hold(seconds_of(pod), sure=False, runs=is_newer)


def _is_charged_for(pod: KeptPod, claim: StoredClaim) -> bool:
    """Return whether the pod is charged for the claim, because the scheduler made it for its extended resources."""
    return isinstance(pod, StoredPod) and pod.extended_claim == claim.name
