"""Settling: the ledger is recounted from the stored pods and claims, and what time has released leaves it.

docs/ledger.md has the rules, and `tests/model` explores them.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from vcuda.ledger.ledger import (
    MOST_TERMINATING,
    NO_MODEL,
    UNSEEN_SECONDS,
    Ledger,
    Pending,
    Terminating,
    charges_by_model,
    is_older,
)
from vcuda.quota.model import Charge, Usage


class ObservedClaims(msgspec.Struct, frozen=True):
    """What has been seen of one namespace's ResourceClaims, up to ``resource_version``.

    ``committed`` is what those stored then take, by model, less those that pods are charged for; ``seen`` are the uids
    of all that were stored at some time, but for those of which it is not known what they take.

    ``vanished`` holds the charges of claims that lost their devices while a pod that used them may still run. A key is
    no uid, since one claim may lose its devices more than once. No watch saw what happened before version ``since``.
    ``users`` are the uids of the pods that use them. ``gone`` are those of the ``seen`` that have been deleted.
    """

    resource_version: str
    committed: Mapping[str, Charge]
    seen: Collection[str]
    vanished: Mapping[str, Terminating] = {}
    since: str = ""
    users: Collection[str] = ()
    gone: Collection[str] = ()

    def after(self, watched: "ObservedClaims | None", ledger: Ledger) -> "ObservedClaims":
        """Return this LIST with what a watch had seen before it, to settle the ledger by."""
        if watched is None:
            return self
        seen, since = {*self.seen, *watched.seen}, _seen_since(self, watched, ledger.claim_resource_version)
        return msgspec.structs.replace(self, seen=seen, vanished=watched.vanished, since=since)


class ObservedPods(msgspec.Struct, frozen=True):
    """What a controller has seen of one namespace's pods, up to ``resource_version``, and of its claims.

    ``committed`` is what those stored then take, by model. ``seen`` are the uids of all that were stored at some time:
    those there now, and those that have gone since. ``vanished`` are the bound ones among the latter that were not seen
    to end, by uid. What has happened before version ``since`` nobody saw; for a LIST that is its own version. What a
    unit is worth was said by the ConfigMap at ``config_version``. Without ``claims`` none are known of: their count
    stays. ``extended`` are the names of those that are left out there, as these pods are charged for them.

    ``graces`` and ``claim_grace`` are as in `Ledger`. ``gone`` are those of the ``seen`` that have been deleted.
    """

    resource_version: str
    committed: Mapping[str, Charge]
    seen: Collection[str]
    vanished: Mapping[str, Terminating] = {}
    since: str = ""
    config_version: str = ""
    claims: ObservedClaims | None = None
    extended: frozenset[str] = frozenset()
    graces: Mapping[str, int] = {}
    claim_grace: int = 0
    gone: Collection[str] = ()

    def after(self, watched: "ObservedPods", ledger: Ledger) -> "ObservedPods":
        """Return this LIST of pods and claims with what a watch of each had seen before it, to settle the ledger by."""
        return msgspec.structs.replace(
            self,
            seen={*self.seen, *watched.seen},
            vanished=watched.vanished,
            since=_seen_since(self, watched, ledger.pod_resource_version),
            claims=self.claims and self.claims.after(watched.claims, ledger),
        )

    def is_older(self, ledger: Ledger) -> bool:
        """Return whether the ledger was counted by newer views, or by newer units."""
        counted_before = is_older(self.config_version, ledger.config_version)
        older = is_older(self.resource_version, ledger.pod_resource_version) or counted_before
        return older or (self.claims is not None and self.are_claims_older(ledger))

    def usage(self, model: str, terminating: Charge) -> Usage:
        """Return what is stored of one model, beside what is terminating of it."""
        claimed = self.claims.committed.get(model, Charge()) if self.claims else Charge()
        return Usage(self.committed.get(model, Charge()) + claimed + terminating, terminating=terminating)

    def are_claims_older(self, ledger: Ledger) -> bool:
        """Return whether the ledger counts claims by a newer view."""
        return is_older(self.claims.resource_version if self.claims else "", ledger.claim_resource_version)


def _seen_since(listed: ObservedPods | ObservedClaims, watched: ObservedPods | ObservedClaims, counted: str) -> str:
    """Return the version from which on every departure up to a LIST was seen.

    ``counted``: the version at which the ledger counts them.
    """
    # No watch saw how an object went that the LIST lacks and the watch has, nor one that only the ledger counts.
    missing = {*watched.seen} - {*watched.gone} - {*listed.seen}
    return listed.since if missing or is_older(watched.resource_version, counted) else watched.since


class Expired(msgspec.Struct, frozen=True):
    """What time has released from a ledger.

    ``absent``: pending uids that no pod or claim can have any more. A consistent LIST that began after
    `STORABLE_SECONDS` lacks them.
    ``unsure``: the seconds for which the containers of those absent may run that may have been stored, and deleted by
    force, while no watch saw that; 0 for the others.
    ``ended``: the terminating keys whose seconds are over.
    ``reaped``: replicas that are gone. Every charge that they granted is stored by now, or never will be. The count
    that is observed has to be of a LIST that began after that.
    """

    absent: Collection[str] = frozenset()
    unsure: Mapping[str, int] = {}
    ended: Collection[str] = frozenset()
    reaped: Collection[str] = frozenset()


NOTHING_EXPIRED = Expired()


def settle(
    ledger: Ledger, observed: ObservedPods, expired: Expired = NOTHING_EXPIRED, *, counted_since: str = ""
) -> Ledger:
    """Return the ledger recounted from what was observed, without the pending charges whose pods were seen stored.

    Pods and claims that vanished become terminating, and so does a decrease that no watch saw. Returns the same ledger
    if nothing differs, unless it was counted before version ``counted_since``.
    """
    # 1. What time has released goes, whatever was observed.
    left = _without_expired(ledger, expired)
    # 2. An older view would lower the count: of a leader that was suspended, or lists from a cache, or values units by
    #    an older quota. Pods and claims are counted together or not at all: what a claim takes may be in the count of
    #    its pod, and in its own once the pod is gone.
    if observed.is_older(ledger):
        return left
    # 3. Count. What has departed is held, as far as its containers may run.
    claims = observed.claims or ObservedClaims(ledger.claim_resource_version, ledger.claimed, ())
    had = {*ledger.terminating, *expired.ended}
    room = MOST_TERMINATING - len(left.terminating)
    pods = _Departed.of(observed.committed, observed.vanished, had, room)
    claimed = _Departed.of(claims.committed, claims.vanished, had, room - len(pods.held))
    unseen = {**_unseen_pods(ledger, observed, pods), **_unseen_claims(ledger, claims, claimed)}
    seen = {*observed.seen, *claims.seen}
    settled = Ledger(
        committed=pods.committed,
        pod_resource_version=observed.resource_version,
        pending={uid: each for uid, each in left.pending.items() if uid not in seen},
        terminating={**left.terminating, **pods.held, **claimed.held, **unseen},
        config_version=observed.config_version,
        claimed=claimed.committed,
        claim_resource_version=claims.resource_version,
        reserved={replica: each for replica, each in ledger.reserved.items() if replica not in expired.reaped},
        waiting=ledger.waiting,
        graces=observed.graces,
        claim_grace=_claim_grace(ledger, observed),
    )
    # 4. A count that says the same is not written, unless the quota was edited since the last one.
    if _says_the_same(settled, ledger) and not is_counted_before(ledger, counted_since, observed.config_version):
        return ledger
    return settled


def _without_expired(ledger: Ledger, expired: Expired) -> Ledger:
    absent = ledger.pending.keys() & expired.absent
    ended = ledger.terminating.keys() & expired.ended
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


def _says_the_same(settled: Ledger, ledger: Ledger) -> bool:
    return settled == msgspec.structs.replace(
        ledger,
        pod_resource_version=settled.pod_resource_version,
        claim_resource_version=settled.claim_resource_version,
        config_version=settled.config_version,
    )


def _claim_grace(ledger: Ledger, observed: ObservedPods) -> int:
    """Return the longest grace period of the pods that use the counted claims, in seconds."""
    # A claim may outlive a pod that was deleted before the watch began: then that pod is not known.
    if observed.claims and {*observed.claims.users} <= {*observed.seen}:
        return observed.claim_grace
    return max(observed.claim_grace, ledger.claim_grace)


class _Departed(msgspec.Struct, frozen=True):
    """A count of what is stored, with what has left it.

    ``committed``: the count, by model, and what has left but has no room among the terminating charges.
    ``held``: the charges that become terminating, by key. ``left``: by model, all that has left, held or not.
    """

    committed: Mapping[str, Charge]
    held: Mapping[str, Terminating]
    left: Mapping[str, Charge]

    @classmethod
    def of(
        cls, counted: Mapping[str, Charge], vanished: Mapping[str, Terminating], known: Collection[str], room: int
    ) -> "_Departed":
        """Return the count with at most ``room`` new terminating charges; the keys in ``known`` had theirs already."""
        new = {key: each for key, each in vanished.items() if key not in known}
        held = dict(itertools.islice(new.items(), max(room, 0)))
        beyond = [(each.model, each.charge) for key, each in new.items() if key not in held]
        committed = charges_by_model([*counted.items(), *beyond]) if beyond else counted
        return cls(committed, held, charges_by_model((each.model, each.charge) for each in new.values()))


def _unseen_pods(ledger: Ledger, observed: ObservedPods, pods: _Departed) -> Mapping[str, Terminating]:
    """Return what the count of pods has lost though the watch saw no departure of so much."""
    if not is_older(ledger.pod_resource_version, observed.since):
        return {}
    stored = [each for uid, each in ledger.pending.items() if uid in observed.seen]
    graces = dict(ledger.graces)
    for each in stored:
        graces[each.model] = max(graces.get(each.model, 0), each.grace)
    lost = _lost(ledger, ledger.committed, stored, observed.committed, pods.left)
    key = f"{{}}@{ledger.pod_resource_version}"
    return {key.format(model): _unseen(model, charge, graces.get(model, 0)) for model, charge in lost}


def _unseen_claims(ledger: Ledger, claims: ObservedClaims, claimed: _Departed) -> Mapping[str, Terminating]:
    """Return what the count of claims has lost though the watch saw no departure of so much."""
    if not is_older(ledger.claim_resource_version, claims.since):
        return {}
    stored = [each for uid, each in ledger.pending.items() if uid in claims.seen]
    grace = ledger.longest_claim_grace
    lost = _lost(ledger, ledger.claimed, stored, claims.committed, claimed.left)
    key = f"{{}}@claims@{ledger.claim_resource_version}"
    return {key.format(model): _unseen(model, charge, grace) for model, charge in lost}


def _unseen(model: str, charge: Charge, grace: int) -> Terminating:
    return Terminating(model, charge, max(UNSEEN_SECONDS, grace))


def _lost(
    ledger: Ledger,
    before: Mapping[str, Charge],
    stored: Iterable[Pending],
    after: Mapping[str, Charge],
    left: Mapping[str, Charge],
) -> Iterator[tuple[str, Charge]]:
    """Yield by model how much more was charged ``before`` than is there ``after``, beside what was seen to leave."""
    # What has come may hide what has gone: the pods that were pending, and those that a replica has granted and not
    # written yet. Of the latter there are at most as many as are reserved.
    known = charges_by_model([*before.items(), *((each.model, each.charge) for each in stored)])
    for model, charge in known.items():
        there = after.get(model, Charge()) + left.get(model, Charge())
        hidden = charge + ledger.reserved_of(model)
        if (lost := (hidden.peak(there) - there).minimum(charge)) != Charge():
            yield model, lost


def is_counted_before(ledger: Ledger, version: str, config_version: str) -> bool:
    """Return whether pods, or claims where they are counted, were before this version, or by an older ConfigMap."""
    claims = ledger.claim_resource_version
    return (
        is_older(ledger.pod_resource_version, version)
        or is_older(ledger.config_version, config_version)
        or (claims != "" and is_older(claims, version))
    )
