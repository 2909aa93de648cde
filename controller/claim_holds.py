"""Tracks devices that a ResourceClaim has lost although a container may still use them.

A claim loses its devices when the last pod that used the claim is deleted from the API. After a forced deletion, the
pod's containers may continue to run for the pod's grace period. Until this period ends, the ledger keeps the claim's
charge as a terminating charge. This module combines the watch of pods and the watch of claims. Each watch may be late.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from controller.lingering import MAX_PER_NAMESPACE, Lingering
from controller.pods import KeptPod, PodInformer, PodLives
from vcuda.allocations.stored_claims import ClaimCharge, ClaimPrice, StoredClaim
from vcuda.allocations.stored_pods import StoredPod
from vcuda.claims.digest import PackedDigest
from vcuda.ledger.ledger import UNSEEN_SECONDS, Terminating, is_older
from vcuda.quota.model import Charge

AWAIT_PODS_SECONDS = 5.0
"""After a claim has lost its devices, the controller does not recount the ledger until the pod watch shows
which pods were deleted. It waits at most this many seconds. A pod that the watch still shows then counts as running."""

MAX_FORMER_USERS = 512
"""If more pods than this are remembered as users of one claim's devices, pods that have ended are forgotten."""

LOOK_SECONDS = 1.0
"""In a namespace with many lost claims, seconds between two searches for claims whose pods have ended."""

MAX_USERS_OF_LOSS = 16
"""If more pods than this used the devices that a claim has lost, their uids are not kept. The pods then count as
unknown: they may run for the longest grace period of the namespace."""


class LostAllocation(msgspec.Struct, frozen=True):
    """The devices that were allocated to a claim, and that the claim has lost.

    ``claim``: the claim before the loss.
    ``charge``: the charges of the claim before the loss, by model; None if they could not be computed.
    ``users``: the uids of all pods that used the devices. If the uids are unknown, one invented uid.
    ``version``: the resourceVersion of the watch event that showed the loss.
    ``at``: the time of the event, in seconds. If there was no event, the time of the LIST that showed no devices.
    """

    claim: StoredClaim
    charge: Mapping[str, Charge] | None
    users: frozenset[str]
    version: str
    at: float

    @property
    def key(self) -> str:
        """The terminating charge's key in the ledger. It has the version, because a claim may lose devices twice."""
        return f"{self.claim.uid}@{self.version}"


class Hold(msgspec.Struct, frozen=True):
    """States how long pods may still use devices that a claim has lost.

    ``seconds``: how many seconds after the loss the devices may still be in use.
    ``sure``: True if the pod watch is not behind the claim watch, and shows why the claim has lost the devices.
    ``runs``: True if the pod watch shows a running pod that uses the devices.
    """

    seconds: int
    sure: bool = True
    runs: bool = False


class ClaimHolds:
    """The devices that claims have lost and that may be in use. ``pods``: the pod watch. ``clock``: returns seconds."""

    def __init__(self, pods: PodInformer, clock: Callable[[], float]) -> None:
        self._pods = pods
        self._clock = clock
        self._lock = threading.Lock()
        # `_users`: for the uid of each claim, the uids of all pods that have used the claim's current devices.
        self._users: dict[str, set[str]] = {}
        # `_allocated`: for each namespace, the claims with devices, by uid, as their last events showed them.
        self._allocated: dict[str, dict[str, StoredClaim]] = {}
        # `_listed_bare`: by namespace and claim uid, the time at which a LIST showed the claim without devices. The
        # claim may have lost devices before that LIST, without an event of the watch.
        self._listed_bare: dict[str, dict[str, float]] = {}
        self._lost: Lingering[LostAllocation] = Lingering(clock, pods.full)
        # `_next_look`: by namespace, the time from which `_forget_unused` may run again.
        self._next_look: dict[str, float] = {}

    def record(
        self,
        old: StoredClaim | None,
        new: StoredClaim | None,
        *,
        version: str,
        listed: bool,
        charge: Callable[[StoredClaim], ClaimCharge | None],
    ) -> None:
        """Record that the claim watch reported a change of a claim from ``old`` to ``new``.

        ``version``: the resourceVersion of the watch at this event.
        ``listed``: True if the event comes from a LIST. The watch may then have missed earlier events.
        ``charge``: returns the last charge of a claim.
        """
        changed = new or old
        if changed is None:
            return
        had_bare = self._follow_bare(changed, is_bare=new is not None and not new.allocated, listed=listed)
        if old and old.allocated and (new is None or new.allocated != old.allocated):
            self._lose(old, charge(old), self.users_of(old), version, self._clock())
        elif old and new is None and had_bare is not None:
            self._lose(old, charge(old), frozenset(), version, had_bare)
        self._follow_users(changed, gone=new is None)

    def users_of(self, claim: StoredClaim) -> frozenset[str]:
        with self._lock:
            return frozenset({*self._users.get(claim.uid, ()), *claim.users})

    def unseen_users(self, namespace: str) -> Iterable[str]:
        """For each claim that a LIST showed without devices, return an invented uid in place of its unknown users."""
        with self._lock:
            return [_unseen_user(uid) for uid in self._listed_bare.get(namespace, ())]

    def is_behind(self, namespace: str, stored: Iterable[StoredClaim]) -> bool:
        """Return True if a claim has lost or changed the devices that `record` has recorded for the claim.

        ``stored``: the claims that are stored in the namespace.
        """
        with self._lock:
            recorded = dict(self._allocated.get(namespace, {}))
        if not recorded:
            return False
        found = {claim.uid: claim.allocated for claim in stored}
        return any(found.get(uid) != claim.allocated for uid, claim in recorded.items())

    def awaits_pods(self, namespace: str) -> bool:
        """Return True if a claim has just lost its devices and the pod watch may not show the cause yet."""
        young = self._clock() - AWAIT_PODS_SECONDS
        recent = [each for each in self._lost.within(namespace).values() if each.at > young]
        if not recent:
            return False
        lives = self._pods.lives(namespace)
        return any(not _hold(each, lives, self._pods.seconds_of, 0).sure for each in recent)

    def vanished(self, namespace: str, price: ClaimPrice, grace: int) -> Iterator[tuple[str, Terminating]]:
        """Yield pairs of a key and a terminating charge for devices that claims have lost but pods may still use.

        ``grace``: the grace period, in seconds, to assume for a pod that the watch never showed.
        """
        lost = self._lost.within(namespace).values()
        if not lost:
            return
        lives, now = self._pods.lives(namespace), self._clock()
        for each in lost:
            hold = _hold(each, lives, self._pods.seconds_of, grace)
            if hold.runs:
                self._lost.add(namespace, each.key, each, now + self._pods.max_terminating_seconds)
            elif each.at + hold.seconds <= now:
                self._lost.remove(namespace, each.key)
                continue
            charges = price(each.claim).charges if each.charge is None else each.charge
            for model, taken in charges.items():
                yield f"{each.key}/{model}", Terminating(model, taken, hold.seconds)

    def _lose(
        self, claim: StoredClaim, charge: ClaimCharge | None, users: frozenset[str], version: str, at: float
    ) -> None:
        with self._lock:
            self._users.pop(claim.uid, None)
        charges = None if charge is None else charge.charges
        if charges == {}:
            return
        if not users or len(users) > MAX_USERS_OF_LOSS:
            users = frozenset([_unseen_user(claim.uid)])
        # The charge is computed from the digest of the claim's spec. If the charge is known, drop the digest.
        digest = claim.digest if charges is None else PackedDigest(b"")
        kept = msgspec.structs.replace(claim, digest=digest, allocated=(), users=())
        lost = LostAllocation(kept, charges, users, version, at)
        if self._lost.count(claim.namespace) >= MAX_PER_NAMESPACE // 2:
            self._forget_unused(claim.namespace)
        self._lost.add(claim.namespace, lost.key, lost, at + self._pods.max_terminating_seconds)

    def _forget_unused(self, namespace: str) -> None:
        """Forget lost devices that no container uses any more, so that fewer than `MAX_PER_NAMESPACE` are kept."""
        now = self._clock()
        if now < self._next_look.get(namespace, now):
            return
        self._next_look = {each: at for each, at in self._next_look.items() if at > now}
        self._next_look[namespace] = now + LOOK_SECONDS
        lives = self._pods.lives(namespace)
        for each in self._lost.within(namespace).values():
            hold = _hold(each, lives, self._pods.seconds_of, grace=sys.maxsize)
            if hold.sure and each.at + hold.seconds <= now:
                self._lost.remove(namespace, each.key)

    def _follow_bare(self, claim: StoredClaim, *, is_bare: bool, listed: bool) -> float | None:
        """Record when a LIST shows the claim without devices. Return the time of the previous such LIST, or None."""
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
        with self._lock:
            allocated = self._allocated.setdefault(claim.namespace, {})
            allocated.pop(claim.uid, None)
            if claim.allocated and not gone:
                allocated[claim.uid] = claim
                users = self._users.setdefault(claim.uid, set())
                if len(users) > MAX_FORMER_USERS:
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
    return uid in lives.vanished or uid in lives.unhandled or (stored.live if stored else uid not in lives.gone)


def _hold(lost: LostAllocation, lives: PodLives, seconds_of: Callable[[KeptPod], int], grace: int) -> Hold:
    """Return for how long pods may still use the devices that a claim has lost.

    ``seconds_of``: returns for how many seconds a pod may run after its deletion.
    ``grace``: for how many seconds a pod that the watch never showed may run.
    """
    holds = [hold_by_pod(uid, lost, lives, seconds_of, grace) for uid in lost.users]
    seconds = max(each.seconds for each in holds)
    return Hold(seconds, all(each.sure for each in holds), any(each.runs for each in holds))


def hold_by_pod(
    uid: str, lost: LostAllocation, lives: PodLives, seconds_of: Callable[[KeptPod], int], grace: int
) -> Hold:
    """Return for how long one pod may still use the devices that a claim has lost. See `_hold` for the parameters."""
    pod = lives.vanished.get(uid) or lives.unhandled.get(uid)
    if pod:
        return Hold(0 if _is_charged_for(pod, lost.claim) else seconds_of(pod))
    if uid in lives.gone:
        # No container of this deleted pod runs. The pod had ended, or was never bound, or its grace period is over.
        return Hold(0)
    is_newer = not is_older(lives.version, lost.version)
    pod = lives.stored.get(uid)
    if pod is None:
        # The watch has never shown this pod. If the watch is not behind, the pod was deleted before the watch began.
        return Hold(max(grace, UNSEEN_SECONDS), is_newer)
    if not pod.live or _is_charged_for(pod, lost.claim):
        return Hold(0)
    if not pod.node:
        return Hold(0 if is_newer else seconds_of(pod), is_newer)
    # Kubernetes takes no devices from a running pod. So the pod watch, which shows this pod running, must be behind.
    return Hold(seconds_of(pod), sure=False, runs=is_newer)


def _is_charged_for(pod: KeptPod, claim: StoredClaim) -> bool:
    """Return True if the scheduler made the claim for the pod's extended resources. Then only the pod is charged."""
    return isinstance(pod, StoredPod) and pod.extended_claim == claim.name
