"""The ledger of one namespace: the charges to its quota, and the decision about one more charge.

A decision is made against one version of the ledger. This version has every pod that may be stored in ``committed`` or
``pending``. It has every deleted pod in ``terminating`` for as long as its containers may run. The decision is written
by compare-and-swap on this version. So concurrent writers can only make the ledger count too much.
"""

import itertools
from collections.abc import Iterable, Mapping

import msgspec

from vcuda.quota.model import Charge, Limit, NamespaceQuota, Shortage, Usage, fits, total

MOST_PENDING = 512
"""The most pending charges of a namespace. So an owner that creates pods without end cannot grow the ledger forever."""

MOST_TERMINATING = 512
"""The most deleted pods that stay charged by their uid. The charges of further deleted pods stay in ``committed``."""

LEASE_SECONDS = 10
"""Seconds for which a replica may admit from its reservation. They begin when it sends its last confirmed write."""

MARGIN_SECONDS = 2
"""Seconds that are added to a time which another process measures, because clocks drift and round."""

LOST = "lost"
"""The key of the reservation that closes a new or lost ledger. No replica renews it. No charge is admitted then."""

UNSEEN_SECONDS = 30
"""Seconds for which a decrease of the count stays charged if no watch saw its cause. This is the default grace period
of Kubernetes. The ledger records longer grace periods."""

NO_MODEL = ""
"""The model of a pending entry without a charge. It records the grace period of a pod that uses claims."""

LEAST_TERMINATING_SECONDS = 5
"""The least seconds for which a pod that was deleted before it ended stays charged, even with a grace period of 0.
kubelet must first learn of the deletion. It then gives each container a second, and stops the container."""

WARN_FROM = 0.9
"""If more than this part of a limit is used, admitted pods get a warning."""

NO_LIMIT = Limit(cores=0)
"""The limit of a model that the quota does not list."""


class Pending(msgspec.Struct, frozen=True):
    """The charge of an admitted pod or claim that the controller has not seen stored yet.

    ``grace``: seconds for which its containers may run after a forced deletion; 0 if the pending charge lasts longer.
    """

    model: str
    charge: Charge
    grace: int = 0


class Terminating(msgspec.Struct, frozen=True):
    """The charge of a deleted pod. Its containers may still run for ``seconds`` after the deletion."""

    model: str
    charge: Charge
    seconds: int


class Reservation(msgspec.Struct, frozen=True, rename="camel"):
    """The charges that one webhook replica may admit without a write.

    ``charges``: by model. ``counter``: differs in each write of the replica, so that the replica can tell which write
    was stored. ``seconds``: the reservation is valid for so long after its write.
    """

    charges: Mapping[str, Charge]
    counter: int
    seconds: float = LEASE_SECONDS


class Ledger(msgspec.Struct, frozen=True):
    """The charges of one namespace.

    ``committed``: by model, the charges of stored pods, counted at ``pod_resource_version``.
    ``claimed``: by model, the charges of stored ResourceClaims, counted at ``claim_resource_version``.
    ``pending``: by uid, the charges of admitted pods and claims that have not been seen stored yet.
    ``terminating``: the charges of deleted pods that may still run. The key is the uid of the pod, or another text
    if no watch saw the deletion.
    ``config_version``: the version of the quota ConfigMap by which units were valued in the counts.
    ``reserved``: the reservations, by replica. ``waiting``: a mark that asks replicas to release their reservations.
    ``graces``: by model, the longest grace period of the pods in ``committed``, in seconds.
    ``claim_grace``: the longest grace period of stored pods that use claims, in seconds.
    Grace periods up to `UNSEEN_SECONDS` are left out.
    """

    # Each count has its own version, because two watches are never at the same version. The later version would promise
    # too much of the other watch. With the earlier version, an older view could replace a newer view.
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
        """Return the seconds for which the containers of a pending charge may run after a forced deletion.

        The charge may be of a claim. So the grace periods of all pods that use claims count.
        """
        return max(pending.grace, self.longest_claim_grace)

    @property
    def longest_claim_grace(self) -> int:
        """The longest grace period of stored or pending pods that use claims, in seconds; 0 if all are short."""
        # Every pending pod may use claims.
        return max(self.claim_grace, *(each.grace for each in self.pending.values()), 0)


class Admitted(msgspec.Struct, frozen=True):
    """The charge is admitted, and ``ledger`` includes it. ``shortage``: the lacking quota, if the quota only warns."""

    ledger: Ledger
    usage: Usage
    limit: Limit
    shortage: Shortage | None = None

    @property
    def nearly_full(self) -> bool:
        """True if at least nine tenths of the model's limit of cores or memory are used."""
        used, limit = self.usage.in_use, self.limit
        cores_nearly = limit.cores is not None and used.cores >= limit.cores * WARN_FROM
        return cores_nearly or (limit.memory is not None and used.memory_under(limit) >= limit.memory * WARN_FROM)


class Refused(msgspec.Struct, frozen=True):
    """The charge does not fit."""

    shortage: Shortage


class TooManyPending(msgspec.Struct, frozen=True):
    """The namespace has `MOST_PENDING` pending charges. The caller should retry."""


def admit(
    ledger: Ledger, uid: str, asked: Pending, quota: NamespaceQuota, *, enforced: bool
) -> Admitted | Refused | TooManyPending:
    """Decide about one charge against one version of the ledger.

    ``enforced``: False if the quota only warns or audits. A charge that does not fit is then admitted with a shortage.
    """
    limit = quota.limits.get(asked.model, NO_LIMIT)
    usage = ledger.usage(asked.model)
    # The API server repeats calls. A pod whose charge is pending must not be charged twice, and must not be refused.
    if uid in ledger.pending:
        return Admitted(ledger, usage, limit)
    shortage = None
    if asked.model != NO_MODEL and not fits(limit, usage.used, asked.charge):
        shortage = Shortage(asked.model, asked.charge, usage, limit)
        if enforced:
            return Refused(shortage)
    # This follows the refusal, so that a namespace at its limit is refused even if many charges are pending.
    if len(ledger.pending) >= MOST_PENDING:
        return TooManyPending()
    charged = msgspec.structs.replace(ledger, pending={**ledger.pending, uid: asked})
    usage = msgspec.structs.replace(usage, used=usage.used + asked.charge, pending=usage.pending + asked.charge)
    return Admitted(charged, usage, limit, shortage)


def long_graces(graces: Iterable[tuple[str, int]]) -> Mapping[str, int]:
    """Return the longest grace period of each model in seconds. ``graces``: pairs of model and seconds.

    Periods up to `UNSEEN_SECONDS` are left out, because every unseen decrease stays charged for that time.
    """
    longest: dict[str, int] = {}
    for model, seconds in graces:
        if seconds > longest.get(model, UNSEEN_SECONDS):
            longest[model] = seconds
    return longest


def long_grace(graces: Iterable[int]) -> int:
    """Return the longest of these grace periods in seconds; 0 if no period exceeds `UNSEEN_SECONDS`."""
    return long_graces((NO_MODEL, seconds) for seconds in graces).get(NO_MODEL, 0)


def charges_by_model(charges: Iterable[tuple[str, Charge]]) -> Mapping[str, Charge]:
    """Return the sum of charges for each model. ``charges``: pairs of model and charge."""
    sums: dict[str, Charge] = {}
    for model, charge in charges:
        sums[model] = sums.get(model, Charge()) + charge
    return sums


def is_older(version: str, than: str) -> bool:
    """Return whether ``version`` is older than ``than``. Both are resourceVersions; an empty version is the oldest."""
    # resourceVersions are revisions of etcd, which only grow. KEP-5504 allows clients to compare them.
    return int(version or 0) < int(than or 0)
