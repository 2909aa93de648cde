"""Recounts the charges of a ledger from the stored pods and claims, and removes expired charges.

docs/ledger.md has the rules. The model checker in `tests/model` explores all states that the rules can lead to.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Self

import msgspec

from vcuda.ledger.ledger import (
    MAX_TERMINATING,
    NO_MODEL,
    UNSEEN_SECONDS,
    Ledger,
    Terminating,
    charges_by_model,
    is_counted_before,
    is_older,
    long_graces,
)
from vcuda.quota.model import Charge, Usage, total


class Observed(msgspec.Struct, frozen=True):
    """The pods or the claims of one namespace, as a watch or a LIST observed them up to ``resource_version``."""

    resource_version: str
    committed: Mapping[str, Charge]
    """By model, the charges of the stored objects, without the claims that are charged to their pod."""
    seen: Collection[str]
    """The uids of all observed objects, including deleted objects. Claims with an unknown charge are left out."""
    vanished: Mapping[str, Terminating] = {}
    """By uid, the charges of bound pods that were deleted before they were observed to end. By a key for each loss: the
    charges of claims that lost their devices, while a pod may still use the devices."""
    since: str = ""
    """The resourceVersion at which the watch began, or of the LIST. Earlier deletions were not observed."""
    gone: Collection[str] = ()
    """The uids of deleted objects. ``seen`` includes them."""

    def with_deletions(self, watched: Self, counted: str) -> Self:
        """Return the objects of this LIST, together with the deletions that the watch ``watched`` has observed.

        ``counted``: the version at which the ledger was counted.
        """
        seen, since = {*self.seen, *watched.seen}, self.seen_since(watched, counted)
        return msgspec.structs.replace(self, seen=seen, vanished=watched.vanished, since=since)

    def seen_since(self, watched: Self, counted: str) -> str:
        """Return a resourceVersion. This LIST and the watch ``watched`` have observed every deletion after it."""
        # If the LIST lacks an object that the watch still counts, the watch has missed its deletion. A watch that is
        # older than the ledger may have missed deletions of objects that the ledger counts.
        missing = {*watched.seen} - {*watched.gone} - {*self.seen}
        return self.since if missing or is_older(watched.resource_version, counted) else watched.since


class ObservedClaims(Observed, frozen=True):
    """The ResourceClaims of one namespace."""

    users: Collection[str] = ()
    """The uids of the pods that use the claims."""


class ObservedPods(Observed, frozen=True):
    """The pods and claims of one namespace."""

    config_version: str = ""
    """The version of the quota ConfigMap that was used for the count."""
    claims: ObservedClaims | None = None
    """The claims of the namespace; None if they are unknown. The ledger then keeps its earlier count of claims."""
    extended: frozenset[str] = frozenset()
    """The names of claims that are not counted, because their pods are charged instead."""
    graces: Mapping[str, int] = {}
    """By model, the longest grace period of the stored pods, in seconds, if above `UNSEEN_SECONDS`."""
    claim_grace: int = 0
    """The longest grace period of the pods that use claims, in seconds; 0 if at most `UNSEEN_SECONDS`."""

    def after(self, watched: "ObservedPods", ledger: Ledger) -> "ObservedPods":
        """Return the pods and claims of this LIST, with the deletions that the watch ``watched`` has observed."""
        claims = self.claims
        if claims and watched.claims:
            claims = claims.with_deletions(watched.claims, ledger.claim_resource_version)
        return msgspec.structs.replace(self.with_deletions(watched, ledger.pod_resource_version), claims=claims)

    def is_older(self, ledger: Ledger) -> bool:
        """Return whether the ledger was last counted from newer pods or claims, or with a newer quota ConfigMap."""
        pods_older = is_older(self.resource_version, ledger.pod_resource_version)
        claims = self.claims
        claims_older = claims is not None and is_older(claims.resource_version, ledger.claim_resource_version)
        return pods_older or claims_older or is_older(self.config_version, ledger.config_version)

    def usage(self, model: str, terminating: Charge) -> Usage:
        """Return the usage of one GPU model: the charges of the stored objects, and the charge ``terminating``."""
        claimed = self.claims.committed.get(model, Charge()) if self.claims else Charge()
        return Usage(self.committed.get(model, Charge()) + claimed + terminating, terminating=terminating)

    def total_usage(self, terminating: Charge) -> Usage:
        """Return the usage of all GPU models together."""
        claimed = self.claims.committed.values() if self.claims else ()
        return Usage(total((*self.committed.values(), *claimed, terminating)), terminating=terminating)


class Expired(msgspec.Struct, frozen=True):
    """The charges and reservations of a ledger that have expired."""

    absent: Collection[str] = frozenset()
    """The uids of old pending charges. A LIST lacks their objects, and began when they could no longer be stored."""
    unsure: Mapping[str, int] = {}
    """By uid in ``absent``: for how many seconds the object's containers may still run. The value is 0 unless the
    object may have been stored, and deleted by force, while no watch ran."""
    terminating: Collection[str] = frozenset()
    """The keys of terminating charges that have expired, because the containers of the deleted pods have ended."""
    replicas: Collection[str] = frozenset()
    """The webhook replicas that have ended. Their reservations (quota held in advance) are removed. The count must come
    from a LIST that began when no pod that these replicas admitted could be stored any more."""


NOTHING_EXPIRED = Expired()


def recount(
    ledger: Ledger, observed: ObservedPods, expired: Expired = NOTHING_EXPIRED, *, counted_since: str = ""
) -> Ledger:
    """Return the ledger recounted from the observed objects. Pending charges of observed objects are removed.

    The charges of deleted pods and claims become terminating. If the count fell and no watch observed a deletion, the
    difference also becomes terminating. If no charge changed, ``ledger`` itself is returned, so that the caller skips
    the write. But a ledger that was counted before version ``counted_since`` is always replaced by the new count.
    """
    # 1. Remove the expired charges, whether or not the observation is newer than the ledger.
    left = _without_expired(ledger, expired)
    # 2. Ignore an observation that is older than the ledger, because it could lower the count wrongly. It may come from
    # a suspended leader, a cache or an older quota ConfigMap. Count pods and claims together, because a claim that is
    # charged to its pod now is charged separately after the pod is deleted.
    if observed.is_older(ledger):
        return left
    # 3. Count the observed objects. A deleted object stays charged while its containers may still run.
    claims = observed.claims or ObservedClaims(ledger.claim_resource_version, ledger.claimed, ())
    had = {*ledger.terminating, *expired.terminating}
    room = MAX_TERMINATING - len(left.terminating)
    pods = _Departed.of(observed, had, room)
    claimed = _Departed.of(claims, had, room - len(pods.held))
    unseen = {**_unseen_pods(ledger, observed, pods), **_unseen_claims(ledger, claims, claimed)}
    seen = {*observed.seen, *claims.seen}
    recounted = Ledger(
        committed=pods.committed,
        pod_resource_version=observed.resource_version,
        pending={uid: each for uid, each in left.pending.items() if uid not in seen},
        terminating={**left.terminating, **pods.held, **claimed.held, **unseen},
        config_version=observed.config_version,
        claimed=claimed.committed,
        claim_resource_version=claims.resource_version,
        reserved={replica: each for replica, each in ledger.reserved.items() if replica not in expired.replicas},
        waiting=ledger.waiting,
        graces=observed.graces,
        claim_grace=_claim_grace(ledger, observed),
        allotments=ledger.allotments,
        team_version=ledger.team_version,
    )
    # 4. If no charge changed, return the old ledger, so that it is not written. Replace an outdated count anyway.
    if _has_same_charges(recounted, ledger) and not is_counted_before(ledger, counted_since, observed.config_version):
        return ledger
    return recounted


def _without_expired(ledger: Ledger, expired: Expired) -> Ledger:
    absent = ledger.pending.keys() & expired.absent
    ended = ledger.terminating.keys() & expired.terminating
    if not (absent or ended):
        return ledger
    held = {
        uid: Terminating(ledger.pending[uid].model, ledger.pending[uid].charge, expired.unsure[uid])
        for uid in absent
        if expired.unsure.get(uid) and ledger.pending[uid].model != NO_MODEL
    }
    return msgspec.structs.replace(
        ledger,
        pending={uid: each for uid, each in ledger.pending.items() if uid not in absent},
        terminating={key: each for key, each in ledger.terminating.items() if key not in ended} | held,
    )


def _has_same_charges(recounted: Ledger, ledger: Ledger) -> bool:
    return recounted == msgspec.structs.replace(
        ledger,
        pod_resource_version=recounted.pod_resource_version,
        claim_resource_version=recounted.claim_resource_version,
        config_version=recounted.config_version,
    )


def _claim_grace(ledger: Ledger, observed: ObservedPods) -> int:
    """Return the longest grace period of the pods that use the counted claims, in seconds."""
    # If a pod that uses a claim was never observed, its grace period is unknown. So keep at least the ledger's value.
    if observed.claims and {*observed.claims.users} <= {*observed.seen}:
        return observed.claim_grace
    return max(observed.claim_grace, ledger.claim_grace)


class _Departed(msgspec.Struct, frozen=True):
    """A count of stored objects, and the charges of objects that were deleted since the last count."""

    committed: Mapping[str, Charge]
    """By model, the charges of the stored objects, and of the deleted objects that do not fit into ``held``."""
    held: Mapping[str, Terminating]
    """By key, the charges of deleted objects that become terminating, up to `MAX_TERMINATING`."""
    left: Mapping[str, Charge]
    """By model, the charges of all deleted objects."""

    @classmethod
    def of(cls, observed: Observed, known: Collection[str], room: int) -> "_Departed":
        """Return the count of the stored and the deleted objects in ``observed``.

        ``known``: the keys of deleted objects that already have a terminating charge. They are skipped. ``room``: the
        largest number of new terminating charges.
        """
        counted, new = observed.committed, {key: each for key, each in observed.vanished.items() if key not in known}
        held = dict(itertools.islice(new.items(), max(room, 0)))
        beyond = [(each.model, each.charge) for key, each in new.items() if key not in held]
        committed = charges_by_model([*counted.items(), *beyond]) if beyond else counted
        return cls(committed, held, charges_by_model((each.model, each.charge) for each in new.values()))


def _unseen_pods(ledger: Ledger, observed: ObservedPods, pods: _Departed) -> Mapping[str, Terminating]:
    """Return terminating charges for pods that are missing in the new count although no watch observed a deletion."""
    version = ledger.pod_resource_version
    stored = ((each.model, each.grace) for uid, each in ledger.pending.items() if uid in observed.seen)
    graces = long_graces([*ledger.graces.items(), *stored])
    lost = _lost(ledger, ledger.committed, version, observed, pods.left)
    return {f"{model}@{version}": _unseen(model, charge, graces.get(model, 0)) for model, charge in lost}


def _unseen_claims(ledger: Ledger, claims: ObservedClaims, claimed: _Departed) -> Mapping[str, Terminating]:
    """Return terminating charges for claims that are missing in the new count although no watch observed a deletion."""
    version, grace = ledger.claim_resource_version, ledger.longest_claim_grace
    lost = _lost(ledger, ledger.claimed, version, claims, claimed.left)
    return {f"{model}@claims@{version}": _unseen(model, charge, grace) for model, charge in lost}


def _unseen(model: str, charge: Charge, grace: int) -> Terminating:
    return Terminating(model, charge, max(UNSEEN_SECONDS, grace))


def _lost(
    ledger: Ledger, before: Mapping[str, Charge], version: str, observed: Observed, left: Mapping[str, Charge]
) -> Iterator[tuple[str, Charge]]:
    """Yield each model whose count fell from ``before``, counted at ``version``, and the charge by which it fell.

    ``left``, the charges of objects whose deletion a watch observed, is not part of the yielded charge.
    """
    if not is_older(version, observed.since):
        return
    # The charge of a new pod can hide the charge of a deleted pod in the sum. So add to ``before`` all charges that new
    # pods may have: the pending charges that are stored by now, and the reservations of the webhook replicas.
    stored = ((each.model, each.charge) for uid, each in ledger.pending.items() if uid in observed.seen)
    known = charges_by_model([*before.items(), *stored])
    for model, charge in known.items():
        there = observed.committed.get(model, Charge()) + left.get(model, Charge())
        hidden = charge + ledger.reserved_of(model)
        if (lost := (hidden.peak(there) - there).minimum(charge)) != Charge():
            yield model, lost
