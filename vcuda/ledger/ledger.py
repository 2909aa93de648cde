"""The ledger of one namespace: the charges to its quota, and the decision on one more charge.

The version that a decision is made against has every storable pod in ``committed`` or ``pending``, and every deleted
pod in ``terminating`` for as long as its containers may run. A decision is written by compare-and-swap on that version,
so concurrent writers can only make the ledger count too much.
"""

import itertools
from collections.abc import Iterable, Mapping

import msgspec

from vcuda.quota.model import Charge, Limit, NamespaceQuota, Shortage, Usage, fits, total

MOST_PENDING = 512
"""Most pending charges of a namespace, so that a runaway owner cannot grow its ledger without bound."""

MOST_TERMINATING = 512
"""Most deleted pods that stay charged by their uid. The charges of further ones stay in the count itself."""

LEASE_SECONDS = 10
"""Seconds for which a replica may grant from its reservation, from when it sent the last confirmed write."""

MARGIN_SECONDS = 2
"""Seconds to wait beyond a time that another process measures, for the drift and the rounding of clocks."""

LOST = "lost"
"""The key of the reservation that closes a new or lost ledger. No replica renews it, and no charge is admitted."""

UNSEEN_SECONDS = 30
"""Seconds for which a decrease that no watch saw stays charged: Kubernetes' default grace period. The ledger records
longer grace periods."""

NO_MODEL = ""
"""The model of a pending entry that charges nothing: it records the grace period of a pod that uses claims."""

LEAST_TERMINATING_SECONDS = 5
"""Least seconds for which a pod that was deleted before it ended stays charged, even with a grace period of 0. kubelet
must first learn of the deletion, then gives each container a second, and then stops it."""

WARN_FROM = 0.9
"""The used part of a limit above which admitted pods get a warning."""

NO_LIMIT = Limit(cores=0)
"""The limit of a model that the quota does not list."""


class Pending(msgspec.Struct, frozen=True):
    """The charge of an admitted pod or claim that the controller has not seen stored yet.

    ``grace``: seconds for which the pod's containers may run after its forced deletion; 0 if the pending charge
    outlasts them anyway.
    """

    model: str
    charge: Charge
    grace: int = 0


class Terminating(msgspec.Struct, frozen=True):
    """The charge of a deleted pod whose containers may still run for so many ``seconds`` after its deletion."""

    model: str
    charge: Charge
    seconds: int


class Reservation(msgspec.Struct, frozen=True, rename="camel"):
    """The charges that one webhook replica may grant without a write.

    ``charges``: by model. ``counter``: differs in each write of the replica, to tell which write has landed.
    ``seconds``: how long the reservation is valid after its write.
    """

    charges: Mapping[str, Charge]
    counter: int
    seconds: float = LEASE_SECONDS


class Ledger(msgspec.Struct, frozen=True):
    """The charges of one namespace.

    ``committed``: by model, the charges of stored pods, counted at ``pod_resource_version``.
    ``claimed``: by model, the charges of stored ResourceClaims, counted at ``claim_resource_version``.
    ``pending``: by uid, the charges admitted since.
    ``terminating``: the charges of deleted pods that may still run. A key is the uid of a pod, or another key for a
    decrease that no watch saw.
    ``config_version``: the version of the quota ConfigMap whose values of units the counts use.
    ``reserved``: by replica. ``waiting``: a mark that asks replicas to release their reservations.
    ``graces``: by model, the longest grace period of the pods in ``committed``, in seconds. ``claim_grace``: that of
    the stored pods that use claims. Neither has periods up to `UNSEEN_SECONDS`.
    """

    # Each count has its own version, because two watches are never at the same version. The later version would promise
    # too much of the other watch. With the earlier one an older view could replace a newer one.
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
        """The reservation that closes the ledger, because charges may be missing; None if the ledger is open."""
        return self.reserved.get(LOST)

    @property
    def is_empty(self) -> bool:
        return not (self.committed or self.pending or self.terminating or self.claimed or self.reserved)

    def usage(self, model: str) -> Usage:
        """Return the usage of one model."""
        pending, terminating = (
            total(entry.charge for entry in entries.values() if entry.model == model)
            for entries in (self.pending, self.terminating)
        )
        reserved = self.reserved_of(model)
        stored = self.committed.get(model, Charge()) + self.claimed.get(model, Charge())
        return Usage(stored + pending + terminating + reserved, pending, terminating, reserved)

    def usages(self) -> Mapping[str, Usage]:
        entries: Iterable[Pending | Terminating] = (*self.pending.values(), *self.terminating.values())
        reserved = itertools.chain.from_iterable(each.charges for each in self.reserved.values())
        models = {*self.committed, *self.claimed, *(entry.model for entry in entries), *reserved} - {NO_MODEL}
        return {model: self.usage(model) for model in sorted(models)}

    def reserved_of(self, model: str) -> Charge:
        return total(each.charges[model] for each in self.reserved.values() if model in each.charges)

    def longest_grace(self, pending: Pending) -> int:
        """Return the seconds for which containers may run after a forced deletion of the object of a pending charge.

        A pending charge may be of a pod or of a claim. For a claim the grace periods of the pods that use it count.
        """
        return max(pending.grace, self.longest_claim_grace)

    @property
    def longest_claim_grace(self) -> int:
        """The longest grace period of stored or pending pods that use claims, in seconds; 0 if it is short."""
        # Any pending pod may be one that uses claims.
        return max(self.claim_grace, *(each.grace for each in self.pending.values()), 0)


class Admitted(msgspec.Struct, frozen=True):
    """The charge is admitted, and is in ``ledger``. ``shortage``: what is missing under a quota that only warns."""

    ledger: Ledger
    usage: Usage
    limit: Limit
    shortage: Shortage | None = None

    @property
    def nearly_full(self) -> bool:
        """Whether the model's cores or memory are used to nine tenths of the limit or more."""
        used, limit = self.usage.in_use, self.limit
        cores_nearly = limit.cores is not None and used.cores >= limit.cores * WARN_FROM
        return cores_nearly or (limit.memory is not None and used.memory_under(limit) >= limit.memory * WARN_FROM)


class Refused(msgspec.Struct, frozen=True):
    """The charge does not fit."""

    shortage: Shortage


class TooManyPending(msgspec.Struct, frozen=True):
    """The namespace has the most pending charges that it may have. The caller should retry."""


def admit(
    ledger: Ledger, uid: str, asked: Pending, quota: NamespaceQuota, *, enforced: bool
) -> Admitted | Refused | TooManyPending:
    """Decide one charge against one version of the ledger.

    ``enforced``: False if the quota only warns or audits. A charge that does not fit is then admitted with a shortage.
    """
    limit = quota.limits.get(asked.model, NO_LIMIT)
    usage = ledger.usage(asked.model)
    # The API server repeats calls. A pod that is charged already must not be charged twice, nor be refused.
    if uid in ledger.pending:
        return Admitted(ledger, usage, limit)
    shortage = None
    if asked.model != NO_MODEL and not fits(limit, usage.used, asked.charge):
        shortage = Shortage(asked.model, asked.charge, usage, limit)
        if enforced:
            return Refused(shortage)
    # This comes after the refusal, so that a namespace at its limit gets a refusal however many charges are pending.
    if len(ledger.pending) >= MOST_PENDING:
        return TooManyPending()
    charged = msgspec.structs.replace(ledger, pending={**ledger.pending, uid: asked})
    usage = msgspec.structs.replace(usage, used=usage.used + asked.charge, pending=usage.pending + asked.charge)
    return Admitted(charged, usage, limit, shortage)


def long_graces(graces: Iterable[tuple[str, int]]) -> Mapping[str, int]:
    """Return the longest grace period of each model in seconds, given as (model, seconds), without the short ones.

    Every unseen decrease stays charged for `UNSEEN_SECONDS` anyway.
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
    # They are revisions of etcd, which only grow. KEP-5504 allows clients to compare them.
    return int(version or 0) < int(than or 0)
