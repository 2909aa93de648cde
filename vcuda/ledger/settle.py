"""Settles a ledger: recounts it from the stored pods and claims, and removes expired charges.

docs/ledger.md has the rules. `tests/model` explores all states that the rules lead to.
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
    """The ResourceClaims of one namespace, as observed up to ``resource_version``.

    ``committed``: by model, the charges of the stored claims, except claims that are charged to their pod.
    ``seen``: the uids of all claims that were stored at some time, except claims whose charge is unknown.
    ``vanished``: the charges of claims that lost their devices while a pod that used them may still run. The keys are
    not uids, because one claim may lose its devices more than once.
    ``since``: no watch saw the events before this version.
    ``users``: the uids of the pods that use these claims. ``gone``: the uids in ``seen`` of deleted claims.
    """

    resource_version: str
    committed: Mapping[str, Charge]
    seen: Collection[str]
    vanished: Mapping[str, Terminating] = {}
    since: str = ""
    users: Collection[str] = ()
    gone: Collection[str] = ()

    def after(self, watched: "ObservedClaims | None", ledger: Ledger) -> "ObservedClaims":
        """Return this LIST, completed by the earlier observations of a watch."""
        if watched is None:
            return self
        seen, since = {*self.seen, *watched.seen}, _seen_since(self, watched, ledger.claim_resource_version)
        return msgspec.structs.replace(self, seen=seen, vanished=watched.vanished, since=since)


class ObservedPods(msgspec.Struct, frozen=True):
    """The pods and claims of one namespace, as observed up to ``resource_version``.

    ``committed``: by model, the charges of the stored pods.
    ``seen``: the uids of all pods that were stored at some time, including deleted pods.
    ``vanished``: by uid, the charges of deleted pods that were bound and were not seen to end.
    ``since``: no watch saw the events before this version. For a LIST it is the version of the LIST.
    ``config_version``: the version of the quota ConfigMap by which units were valued in the count.
    ``claims``: None if claims are unknown. Their count in the ledger then stays.
    ``extended``: the names of claims that are not counted, because these pods are charged instead.
    ``graces``, ``claim_grace``: as in `Ledger`. ``gone``: the uids in ``seen`` of deleted pods.
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
        """Return this LIST of pods and claims, completed by the earlier observations of both watches."""
        return msgspec.structs.replace(
            self,
            seen={*self.seen, *watched.seen},
            vanished=watched.vanished,
            since=_seen_since(self, watched, ledger.pod_resource_version),
            claims=self.claims and self.claims.after(watched.claims, ledger),
        )

    def is_older(self, ledger: Ledger) -> bool:
        """Return whether the ledger was counted from newer observations, or by a newer quota ConfigMap."""
        counted_before = is_older(self.config_version, ledger.config_version)
        older = is_older(self.resource_version, ledger.pod_resource_version) or counted_before
        return older or (self.claims is not None and self.are_claims_older(ledger))

    def usage(self, model: str, terminating: Charge) -> Usage:
        """Return the usage of one model: the stored objects and the ``terminating`` charge."""
        claimed = self.claims.committed.get(model, Charge()) if self.claims else Charge()
        return Usage(self.committed.get(model, Charge()) + claimed + terminating, terminating=terminating)

    def are_claims_older(self, ledger: Ledger) -> bool:
        """Return whether the ledger counts claims from a newer observation."""
        return is_older(self.claims.resource_version if self.claims else "", ledger.claim_resource_version)


def _seen_since(listed: ObservedPods | ObservedClaims, watched: ObservedPods | ObservedClaims, counted: str) -> str:
    """Return ``since`` for a LIST that a watch completes. ``counted``: the version of the count in the ledger."""
    # If the watch or the ledger has an object that the LIST lacks, no watch saw its deletion.
    missing = {*watched.seen} - {*watched.gone} - {*listed.seen}
    return listed.since if missing or is_older(watched.resource_version, counted) else watched.since


class Expired(msgspec.Struct, frozen=True):
    """The charges and reservations of a ledger that have expired.

    ``absent``: pending uids whose pod or claim can no longer be stored. A consistent LIST that began after
    `STORABLE_SECONDS` does not have them.
    ``unsure``: by absent uid, the seconds for which its containers may still run. They are 0 unless the object may have
    been stored, and deleted by force, while no watch ran.
    ``ended``: the keys of terminating charges whose seconds have passed.
    ``reaped``: replicas that are gone. Every charge that they admitted is stored by now, or never will be. The observed
    count must be of a LIST that began after that time.
    """

    absent: Collection[str] = frozenset()
    unsure: Mapping[str, int] = {}
    ended: Collection[str] = frozenset()
    reaped: Collection[str] = frozenset()


NOTHING_EXPIRED = Expired()


def settle(
    ledger: Ledger, observed: ObservedPods, expired: Expired = NOTHING_EXPIRED, *, counted_since: str = ""
) -> Ledger:
    """Return the ledger, recounted from the observed objects. Pending charges of stored objects are removed.

    Vanished pods and claims become terminating, and so does a decrease that no watch saw. If nothing differs, the same
    ledger is returned, unless it was counted before version ``counted_since``.
    """
    # 1. Remove the expired charges. This does not depend on the observation.
    left = _without_expired(ledger, expired)
    # 2. Ignore an older observation, because it could lower the count. It may come from a suspended leader, from a
    # cache, or from an older quota ConfigMap. Pods and claims are counted together or not at all. The reason is that a
    # claim may be charged with its pod, and separately after the pod is deleted.
    if observed.is_older(ledger):
        return left
    # 3. Count. The charge of a deleted object stays while its containers may run.
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
    # 4. Skip the write if the count is equal, unless the quota was edited since the last count.
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
    # A claim may outlive a pod that was deleted before the watch began. The grace period of this pod is unknown.
    if observed.claims and {*observed.claims.users} <= {*observed.seen}:
        return observed.claim_grace
    return max(observed.claim_grace, ledger.claim_grace)


class _Departed(msgspec.Struct, frozen=True):
    """A count of stored objects, and the charges of objects that were deleted since the last count.

    ``committed``: by model, the charges of stored objects, and of deleted objects that exceed the room in `Ledger`.
    ``held``: by key, the charges of the other deleted objects. They become terminating.
    ``left``: by model, the charges of all deleted objects.
    """

    committed: Mapping[str, Charge]
    held: Mapping[str, Terminating]
    left: Mapping[str, Charge]

    @classmethod
    def of(
        cls, counted: Mapping[str, Charge], vanished: Mapping[str, Terminating], known: Collection[str], room: int
    ) -> "_Departed":
        """Return the count. At most ``room`` charges become terminating. Keys in ``known`` were terminating before."""
        new = {key: each for key, each in vanished.items() if key not in known}
        held = dict(itertools.islice(new.items(), max(room, 0)))
        beyond = [(each.model, each.charge) for key, each in new.items() if key not in held]
        committed = charges_by_model([*counted.items(), *beyond]) if beyond else counted
        return cls(committed, held, charges_by_model((each.model, each.charge) for each in new.values()))


def _unseen_pods(ledger: Ledger, observed: ObservedPods, pods: _Departed) -> Mapping[str, Terminating]:
    """Return terminating charges for a decrease in the count of pods that no watched deletion explains."""
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
    """Return terminating charges for a decrease in the count of claims that no watched deletion explains."""
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
    """Yield, for each model, the part of ``before`` that is neither in ``after`` nor in ``left``."""
    # New pods may hide deleted pods in the count. They were pending, or a replica admitted them from its reservation
    # and has not written them yet. The reservations bound the second kind.
    known = charges_by_model([*before.items(), *((each.model, each.charge) for each in stored)])
    for model, charge in known.items():
        there = after.get(model, Charge()) + left.get(model, Charge())
        hidden = charge + ledger.reserved_of(model)
        if (lost := (hidden.peak(there) - there).minimum(charge)) != Charge():
            yield model, lost


def is_counted_before(ledger: Ledger, version: str, config_version: str) -> bool:
    """Return whether the ledger was counted before this version, or by an older quota ConfigMap."""
    claims = ledger.claim_resource_version
    return (
        is_older(ledger.pod_resource_version, version)
        or is_older(ledger.config_version, config_version)
        or (claims != "" and is_older(claims, version))
    )
