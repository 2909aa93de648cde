"""The ledger of one namespace: what is charged to its quota, and the decision on one more charge.

A pod that can be stored is always in ``committed`` or in ``pending`` of the version that was decided against, and one
that is gone in ``terminating`` for as long as its containers may run. The writer holds that version by
compare-and-swap, so whatever runs beside it can only make the ledger count too much.
"""

import itertools
from collections.abc import Iterable, Mapping

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


def is_older(version: str, than: str) -> bool:
    """Return whether one resourceVersion of pods is older than another; the empty one is the oldest."""
    # They are etcd's revisions, which only grow; KEP-5504 lets clients compare them.
    return int(version or 0) < int(than or 0)
