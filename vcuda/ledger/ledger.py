"""The ledger of one namespace: what is charged to its quota, and the decision on one more charge.

A pod that can be stored is always in ``committed`` or in ``pending`` of the version that was decided against, and one
that is gone in ``terminating`` for as long as its containers may run. The writer holds that version by
compare-and-swap, so whatever runs beside it can only make the ledger count too much.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from vcuda.quota.model import Charge, Limit, NamespaceQuota, Shortage, Usage, fits, total

MOST_PENDING = 512
"""Pending charges a namespace may have at once, so that a runaway owner cannot grow its ledger without end."""

STORABLE_SECONDS = 75
"""After which a pod that was admitted is never stored any more: past the minute that the API server gives a request,
and what etcd may take of it besides."""

MOST_TERMINATING = 512
"""Pods that are gone and stay charged by their uid; with more, the others stay in the count itself."""

LEASE_SECONDS = 10
"""For how long a replica may grant from its reservation, from before it sent the last write that is confirmed."""

MARGIN_SECONDS = 2
"""What is waited beyond a time that others measure by clocks of their own: their drift, and rounding."""

LOST = "lost"
"""Who holds everything in a ledger that has just been made: nobody renews it, and nothing is admitted beside it."""

UNSEEN_SECONDS = 30
"""How long a decrease is held that no watch saw: Kubernetes' default grace period. Longer ones are recorded."""

NO_MODEL = ""
"""The model of a pending entry that charges nothing: it records the grace period of a pod that uses claims."""

LEAST_TERMINATING_SECONDS = 5
"""How long a pod stays charged at least that is gone without having ended, even with a grace period of 0. kubelet gives
every container a second to end, after it has heard of the deletion, and then has to stop it."""

WARN_FROM = 0.9
"""The part of a limit in use from which on admitted pods carry a warning."""

NO_LIMIT = Limit(cores=0)
"""What a model that is not listed is held to."""


class Pending(msgspec.Struct, frozen=True):
    """A charge whose pod has not yet been seen stored.

    ``grace``: seconds for which the pod's containers may run after its forced deletion; 0 if a charge that is pending
    outlasts them anyway.
    """

    model: str
    charge: Charge
    grace: int = 0


class Terminating(msgspec.Struct, frozen=True):
    """The charge of a pod that is gone, whose containers may run for so many ``seconds`` after that."""

    model: str
    charge: Charge
    seconds: int


class Reservation(msgspec.Struct, frozen=True, rename="camel"):
    """What one webhook replica may grant of each model without a write, for ``seconds`` after the write that says so.

    ``counter`` is another in each of the replica's writes: so it is known of each whether it has landed.
    """

    charges: Mapping[str, Charge]
    counter: int
    seconds: float = LEASE_SECONDS


class Ledger(msgspec.Struct, frozen=True):
    """The charges of one namespace.

    ``committed`` holds per model what stored pods take, counted at ``pod_resource_version``, and ``claimed`` what
    stored ResourceClaims take, counted at ``claim_resource_version``; ``pending`` holds by uid what was admitted since,
    and ``terminating`` what may still run though it is gone. There a key may be no uid: a decrease that nobody saw
    happen has no pod. ``config_version`` is that of the ConfigMap that said what a unit was worth when they were
    counted.

    ``graces`` holds per model the longest grace period, in seconds, of the pods in ``committed``; ``claim_grace`` that
    of the stored pods that use claims. Neither holds periods up to `UNSEEN_SECONDS`.
    """

    # Each count has a version of its own: two watches are never equally far, and the later of them could not be written
    # down without promising too much of the other, nor the earlier without having an older view replace a newer one.
    committed: Mapping[str, Charge] = {}
    pod_resource_version: str = ""
    pending: Mapping[str, Pending] = {}
    terminating: Mapping[str, Terminating] = {}
    config_version: str = ""
    claimed: Mapping[str, Charge] = {}
    claim_resource_version: str = ""
    reserved: Mapping[str, Reservation] = {}
    waiting: str = ""
    graces: Mapping[str, int] = {}
    claim_grace: int = 0

    @property
    def lost(self) -> Reservation | None:
        """What reserves everything, as charges may be missing here; None where everybody may charge."""
        return self.reserved.get(LOST)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is charged."""
        return not (self.committed or self.pending or self.terminating or self.claimed or self.reserved)

    def usage(self, model: str) -> Usage:
        """Return what is charged to one model."""
        pending, terminating = (
            total(entry.charge for entry in entries.values() if entry.model == model)
            for entries in (self.pending, self.terminating)
        )
        reserved = self.reserved_of(model)
        stored = self.committed.get(model, Charge()) + self.claimed.get(model, Charge())
        return Usage(stored + pending + terminating + reserved, pending, terminating, reserved)

    def usages(self) -> Mapping[str, Usage]:
        """Return what is charged to every model that has a charge."""
        entries: Iterable[Pending | Terminating] = (*self.pending.values(), *self.terminating.values())
        reserved = itertools.chain.from_iterable(each.charges for each in self.reserved.values())
        models = {*self.committed, *self.claimed, *(entry.model for entry in entries), *reserved} - {NO_MODEL}
        return {model: self.usage(model) for model in sorted(models)}

    def reserved_of(self, model: str) -> Charge:
        """Return what all replicas together reserve of one model."""
        return total(each.charges[model] for each in self.reserved.values() if model in each.charges)

    def longest_grace(self, pending: Pending) -> int:
        """Return the seconds for which the containers behind a pending charge may run after a forced deletion.

        A pending entry does not say whether it is a pod or a claim. For a claim the pods that use it count.
        """
        return max(pending.grace, self.longest_claim_grace)

    @property
    def longest_claim_grace(self) -> int:
        """The longest grace period of the pods that use claims, stored or pending, in seconds; 0 if it is short."""
        # Any pending pod may be one that uses claims.
        return max(self.claim_grace, *(each.grace for each in self.pending.values()), 0)


class Admitted(msgspec.Struct, frozen=True):
    """The charge is in ``ledger``. ``shortage`` says by how much it is over a limit that only warns."""

    ledger: Ledger
    usage: Usage
    limit: Limit
    shortage: Shortage | None = None

    @property
    def nearly_full(self) -> bool:
        """Whether the model's cores or memory are used to nine tenths of the limit or more."""
        used, limit = self.usage.in_use, self.limit
        cores_nearly = used.cores >= limit.cores * WARN_FROM
        return cores_nearly or (limit.memory is not None and used.memory_under(limit) >= limit.memory * WARN_FROM)


class Refused(msgspec.Struct, frozen=True):
    """The charge does not fit."""

    shortage: Shortage


class TooManyPending(msgspec.Struct, frozen=True):
    """The namespace has as many pending charges as it may; the caller comes again."""


def admit(
    ledger: Ledger, uid: str, asked: Pending, quota: NamespaceQuota, *, enforced: bool
) -> Admitted | Refused | TooManyPending:
    """Decide one charge against one version of the ledger.

    Where the quota is not ``enforced``, what does not fit is charged all the same.
    """
    limit = quota.limits.get(asked.model, NO_LIMIT)
    usage = ledger.usage(asked.model)
    # The API server repeats calls; a pod that is charged already is not charged twice, and not refused either.
    if uid in ledger.pending:
        return Admitted(ledger, usage, limit)
    shortage = None
    if asked.model != NO_MODEL and not fits(limit, usage.used, asked.charge):
        shortage = Shortage(asked.model, asked.charge, usage, limit)
        if enforced:
            return Refused(shortage)
    # After the refusal: a namespace at its limit is told so, however many charges are pending.
    if len(ledger.pending) >= MOST_PENDING:
        return TooManyPending()
    charged = msgspec.structs.replace(ledger, pending={**ledger.pending, uid: asked})
    usage = msgspec.structs.replace(usage, used=usage.used + asked.charge, pending=usage.pending + asked.charge)
    return Admitted(charged, usage, limit, shortage)


def long_graces(graces: Iterable[tuple[str, int]]) -> Mapping[str, int]:
    """Return the longest grace period of each model in seconds, given as (model, seconds), without the short ones.

    Every unseen decrease is held for `UNSEEN_SECONDS` anyway.
    """
    longest: dict[str, int] = {}
    for model, seconds in graces:
        if seconds > longest.get(model, UNSEEN_SECONDS):
            longest[model] = seconds
    return longest


def long_grace(graces: Iterable[int]) -> int:
    """Return the longest of these grace periods in seconds; 0 if all of them are short."""
    return long_graces((NO_MODEL, seconds) for seconds in graces).get(NO_MODEL, 0)


def charges_by_model(charges: Iterable[tuple[str, Charge]]) -> Mapping[str, Charge]:
    """Return the sum of the charges of each model, given as (model, charge)."""
    sums: dict[str, Charge] = {}
    for model, charge in charges:
        sums[model] = sums.get(model, Charge()) + charge
    return sums


class ObservedClaims(msgspec.Struct, frozen=True):
    """What has been seen of one namespace's ResourceClaims, up to ``resource_version``.

    ``committed`` is what those stored then take, by model, less those that pods are charged for; ``seen`` are the uids
    of all that were stored at some time, but for those of which it is not known what they take.

    ``vanished`` holds the charges of claims that lost their devices while a pod that used them may still run. A key is
    no uid, since one claim may lose its devices more than once. No watch saw what happened before version ``since``.
    ``gone`` are those of the ``seen`` that have been deleted. ``users`` are the uids of the pods that use them.
    """

    resource_version: str
    committed: Mapping[str, Charge]
    seen: Collection[str]
    vanished: Mapping[str, Terminating] = {}
    since: str = ""
    gone: Collection[str] = ()
    users: Collection[str] = ()

    def after(self, watched: "ObservedClaims | None", ledger: "Ledger") -> "ObservedClaims":
        """Return this LIST with what a watch had seen before it, to settle the ledger by."""
        if watched is None:
            return self
        since = _seen_since(self, watched, ledger.claim_resource_version)
        return msgspec.structs.replace(self, seen={*self.seen, *watched.seen}, vanished=watched.vanished, since=since)


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

    def after(self, watched: "ObservedPods", ledger: "Ledger") -> "ObservedPods":
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
    """Return the version from which on every departure was seen, by a watch and by a LIST after it.

    ``counted``: the version at which the ledger counts them.
    """
    # Nobody saw how an object went that the watch has and the LIST has not, nor one that only the ledger counts.
    missing = {*watched.seen} - {*watched.gone} - {*listed.seen}
    return listed.since if missing or is_older(watched.resource_version, counted) else watched.since


def settle(
    ledger: Ledger,
    observed: ObservedPods,
    absent: Collection[str] = (),
    counted_since: str = "",
    ended: Collection[str] = (),
    *,
    reaped: Collection[str] = (),
) -> Ledger:
    """Return the ledger recounted from what was observed, without the pending charges whose pods were seen stored.

    What vanished becomes terminating, and so does a decrease that nobody saw happen. It is the same ledger where
    nothing differs, unless it was counted before ``counted_since``. ``absent`` are the pending uids that are proven
    never to have been stored: past every timeout of the API server, and then looked for by a quorum read. ``ended`` are
    the terminating keys whose time is over. Both go in any case. ``reaped`` are the replicas whose reservation nobody
    grants from any more, and so long ago that what was granted is stored or never will be: they go with this count of
    what is stored, which has to be of a LIST begun after that, or later.
    """
    # A leader that has been asleep, or that lists from a cache, would lower `committed` with an older count. So would
    # one by units that were worth less. Both counts or none: what a claim takes may be in that of its pod, and in its
    # own once this has gone.
    if observed.is_older(ledger):
        return _without(ledger, absent, ended)
    claims = observed.claims or ObservedClaims(ledger.claim_resource_version, ledger.claimed, ())
    kept = _without(ledger, {*observed.seen, *claims.seen, *absent}, ended)
    known = {*ledger.terminating, *ended}
    pods = _Departed.of(observed.committed, observed.vanished, known, room=MOST_TERMINATING - len(kept.terminating))
    room = MOST_TERMINATING - len(kept.terminating) - len(pods.held)
    claimed = _Departed.of(claims.committed, claims.vanished, known, room=room)
    held = {
        **pods.held,
        **claimed.held,
        **_unseen_pods(ledger, observed, pods),
        **_unseen_claims(ledger, claims, claimed),
    }
    settled = Ledger(
        committed=pods.committed,
        pod_resource_version=observed.resource_version,
        pending=kept.pending,
        terminating={**kept.terminating, **held},
        config_version=observed.config_version,
        claimed=claimed.committed,
        claim_resource_version=claims.resource_version,
        reserved={holder: each for holder, each in ledger.reserved.items() if holder not in reaped},
        waiting=ledger.waiting,
        graces=observed.graces,
        claim_grace=_claim_grace(ledger, observed),
    )
    versions = {
        "pod_resource_version": ledger.pod_resource_version,
        "config_version": ledger.config_version,
        "claim_resource_version": ledger.claim_resource_version,
    }
    same = msgspec.structs.replace(settled, **versions) == ledger
    return ledger if same and not is_counted_before(ledger, counted_since, observed.config_version) else settled


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


def _without(ledger: Ledger, pending: Collection[str], terminating: Collection[str]) -> Ledger:
    if ledger.pending.keys().isdisjoint(pending) and ledger.terminating.keys().isdisjoint(terminating):
        return ledger
    return msgspec.structs.replace(
        ledger,
        pending={uid: entry for uid, entry in ledger.pending.items() if uid not in pending},
        terminating={uid: entry for uid, entry in ledger.terminating.items() if uid not in terminating},
    )


def is_counted_before(ledger: Ledger, version: str, config_version: str) -> bool:
    """Return whether pods, or claims where they are counted, were before this version, or by an older ConfigMap."""
    claims = ledger.claim_resource_version
    return (
        is_older(ledger.pod_resource_version, version)
        or is_older(ledger.config_version, config_version)
        or (claims != "" and is_older(claims, version))
    )


def is_older(version: str, than: str) -> bool:
    """Return whether one resourceVersion of pods is older than another; the empty one is the oldest."""
    # They are etcd's revisions, which only grow; KEP-5504 lets clients compare them.
    return int(version or 0) < int(than or 0)
