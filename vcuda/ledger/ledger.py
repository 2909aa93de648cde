"""The ledger of one namespace: the charges to its quota, and the decision whether one more charge fits.

Every decision is made against one version of the ledger. In this version, ``committed`` and ``pending`` contain every
pod that may be stored. ``terminating`` contains every deleted pod whose containers may still run. The decision is
written by compare-and-swap on this version. So concurrent writers can only charge too much, never too little.
"""

import itertools
from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

from vcuda.quota.model import NO_LIMIT, Charge, Limit, NamespaceQuota, Usage, fits, total
from vcuda.quota.shortage import Shortage, find_shortage

MAX_PENDING = 512
"""The most pending charges of a namespace. The limit keeps the ledger small if a controller creates pods endlessly."""

MAX_TERMINATING = 512
"""The most charges of deleted pods in ``terminating``. The charges of further deleted pods stay in ``committed``."""

RESERVATION_SECONDS = 10
"""A webhook replica may admit pods from its reservation (quota that it holds in advance) for this many seconds after it
sent its last confirmed write of the ledger."""

MARGIN_SECONDS = 2
"""Seconds that are added to each duration that another process measures, because clocks drift and round."""

LOST = "lost"
"""While ``reserved`` has an entry with this key, the ledger is closed: it may lack charges, so it admits none."""

UNSEEN_SECONDS = 30
"""If a stored object disappears and no watch has delivered the deletion, its charge stays for this many seconds. This
is the default grace period of Kubernetes. The ledger records longer grace periods."""

FULL = "@full@"
"""This text is in the keys of the terminating charges that fill the quota of a namespace. No uid and model has it."""

NO_MODEL = ""
"""The model of an empty charge, which records in ``pending`` the grace period of a pod whose claims are charged."""

MIN_TERMINATING_SECONDS = 5
"""A running pod that is deleted stays charged for at least this many seconds, even with a grace period of 0. kubelet
must first observe the deletion. It then gives each container one second to stop."""

WARN_FROM = 0.9
"""An admitted pod gets a warning if at least this fraction of the limit is used."""


class Pending(msgspec.Struct, frozen=True):
    """The charge of a pod or claim that was admitted, but that the controller has not yet observed as stored."""

    model: str
    charge: Charge
    grace: int = 0
    """The grace period of the pod in seconds; 0 if the charge stays pending for longer than the grace period."""


class Terminating(msgspec.Struct, frozen=True):
    """The charge of a deleted pod or claim. Containers may still use the GPUs for ``seconds`` after the deletion."""

    model: str
    charge: Charge
    seconds: int


class Reservation(msgspec.Struct, frozen=True, rename="camel"):
    """The quota that one webhook replica holds in advance, to admit pods without a write for each pod."""

    charges: Mapping[str, Charge]
    """The reserved quota by model."""
    counter: int
    """A number that differs in each write of the replica. It shows the replica which of its writes was stored."""
    seconds: float = RESERVATION_SECONDS
    """The seconds for which the replica may use the reservation after the write."""


class Allotment(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The part of a team's quota that one namespace may use. `vcuda.ledger.team` has the rules."""

    charges: Mapping[str, Charge] = {}
    """The allotted quota by model. The ledger of the team allots at least as much to this namespace."""
    terms: str = ""
    """A text that names the limits by which ``charges`` was checked; empty if it was not checked."""
    counter: int = 0
    """A number that grows with each write that takes quota back, or that opens the ledger of the team."""


class Ledger(msgspec.Struct, frozen=True):
    """The charges of one namespace."""

    # Pods and claims are counted at different versions, because they come from different watches.
    committed: Mapping[str, Charge] = {}
    """The charges of the stored pods by model, counted at ``pod_resource_version``."""
    pod_resource_version: str = ""
    pending: Mapping[str, Pending] = {}
    """The charges of admitted pods and claims that no watch has delivered yet, by uid."""
    terminating: Mapping[str, Terminating] = {}
    """By key (for most pods, the uid): the charges of deleted pods and claims whose GPUs may still be in use."""
    config_version: str = ""
    """The version of the quota ConfigMap that was used for the counts."""
    claimed: Mapping[str, Charge] = {}
    """The charges of the stored ResourceClaims by model, counted at ``claim_resource_version``."""
    claim_resource_version: str = ""
    reserved: Mapping[str, Reservation] = {}
    """By webhook replica: the quota that the replica holds in advance, to admit pods without a write for each pod."""
    waiting: str = ""
    """A replica without free quota writes a new text here, so that the other replicas release their reservations."""
    graces: Mapping[str, int] = {}
    """By model, the longest grace period of the pods in ``committed``, in seconds, if above `UNSEEN_SECONDS`."""
    claim_grace: int = 0
    """The longest grace period of stored pods that use claims, in seconds; 0 if at most `UNSEEN_SECONDS`."""
    allotments: Mapping[str, Allotment] = {}
    """By team: the part of the team's quota that this namespace may use. There are two only while it changes teams."""
    team_version: str = ""
    """The version of the quota ConfigMap that last put the namespace into a team, or took it out of a team."""

    @property
    def lost(self) -> Reservation | None:
        """The entry in ``reserved`` that closes the ledger, as charges may be missing; None if the ledger is open."""
        return self.reserved.get(LOST)

    @property
    def is_empty(self) -> bool:
        return not (self.committed or self.pending or self.terminating or self.claimed or self.reserved)

    def without_fill(self) -> "Ledger":
        """Return the ledger without the charges that only fill the quota of the namespace."""
        terminating = {key: each for key, each in self.terminating.items() if FULL not in key}
        return self if len(terminating) == len(self.terminating) else replace(self, terminating=terminating)

    def usage(self, model: str) -> Usage:
        pending, terminating = (
            total(entry.charge for entry in entries.values() if entry.model == model)
            for entries in (self.pending, self.terminating)
        )
        reserved = self.reserved_of(model)
        stored = self.committed.get(model, Charge()) + self.claimed.get(model, Charge())
        return Usage(stored + pending + terminating + reserved, pending, terminating, reserved)

    def total_usage(self) -> Usage:
        """Return the usage of all models together, also of models that the quota does not list."""
        pending, terminating = (
            total(entry.charge for entry in entries.values()) for entries in (self.pending, self.terminating)
        )
        reserved = total(charge for each in self.reserved.values() for charge in each.charges.values())
        stored = total((*self.committed.values(), *self.claimed.values()))
        return Usage(stored + pending + terminating + reserved, pending, terminating, reserved)

    def usages(self) -> Mapping[str, Usage]:
        entries: Iterable[Pending | Terminating] = (*self.pending.values(), *self.terminating.values())
        reserved = itertools.chain.from_iterable(each.charges for each in self.reserved.values())
        models = {*self.committed, *self.claimed, *(entry.model for entry in entries), *reserved} - {NO_MODEL}
        return {model: self.usage(model) for model in sorted(models)}

    def reserved_of(self, model: str) -> Charge:
        return total(each.charges[model] for each in self.reserved.values() if model in each.charges)

    @property
    def longest_claim_grace(self) -> int:
        """The longest grace period of stored or pending pods that use claims, in seconds; 0 if it is not recorded."""
        # The ledger does not record whether a pending pod uses claims, so assume that every pending pod does.
        return max(self.claim_grace, *(each.grace for each in self.pending.values()), 0)


class Admitted(msgspec.Struct, frozen=True):
    """The charge is admitted, and ``ledger`` includes it. If the charge exceeds a limit that is not enforced,
    ``shortage`` is set."""

    ledger: Ledger
    usage: Usage
    limit: Limit
    shortage: Shortage | None = None
    total_usage: Usage | None = None
    """The usage of all models together, with the charge; None if the quota has no limit for them and no team."""


class Rejected(msgspec.Struct, frozen=True):
    """The charge does not fit the limit, and the limit is enforced."""

    shortage: Shortage


class TooManyPending(msgspec.Struct, frozen=True):
    """The charge is not decided, because the namespace has `MAX_PENDING` pending charges. The caller should retry."""


def admit(
    ledger: Ledger,
    uid: str,
    entry: Pending,
    quota: NamespaceQuota,
    *,
    enforced: bool,
    others: Mapping[str, Charge] | None = None,
) -> Admitted | Rejected | TooManyPending:
    """Decide by one version of the ledger whether one more charge fits. ``uid``: the pod or claim that is charged.

    ``enforced``: False if the quota only warns or audits. A charge that does not fit is then admitted with a shortage.
    ``others``: by model, what the other namespaces of the team may use; None to leave out the limits of the team.
    """
    limit, used_by_others = quota.limits.get(entry.model, NO_LIMIT), others or {}
    usage = replace(ledger.usage(entry.model), others=used_by_others.get(entry.model, Charge()))

    def total_usage(of: Ledger) -> Usage:
        return replace(of.total_usage(), others=total(used_by_others.values()))

    # The API server may call the webhook twice for a pod. A pod whose uid has a pending charge is not charged again.
    if uid in ledger.pending:
        return Admitted(ledger, usage, limit)
    team = None if others is None else quota.team
    shortage = None
    if entry.model != NO_MODEL and (quota.total or team or not fits(limit, usage.used, entry.charge)):
        of_model = Shortage(entry.model, entry.charge, usage, limit)
        shortage = find_shortage(of_model, quota.total, lambda: total_usage(ledger), team)
        if shortage and enforced:
            return Rejected(shortage)
    # `MAX_PENDING` is checked after the limit, so that a pod over the limit is rejected even with many pending charges.
    if len(ledger.pending) >= MAX_PENDING:
        return TooManyPending()
    charged = replace(ledger, pending={**ledger.pending, uid: entry})
    usage = replace(usage, used=usage.used + entry.charge, pending=usage.pending + entry.charge)
    return Admitted(charged, usage, limit, shortage, total_usage(charged) if quota.total or quota.team else None)


def is_nearly_full(used: Charge, limit: Limit) -> bool:
    """Return whether at least nine tenths of a limit of cores or memory are used."""
    cores_nearly = limit.cores is not None and used.cores >= limit.cores * WARN_FROM
    return cores_nearly or (limit.memory is not None and used.memory_under(limit) >= limit.memory * WARN_FROM)


def long_graces(graces: Iterable[tuple[str, int]]) -> Mapping[str, int]:
    """Return the longest grace period of each model in seconds. ``graces``: pairs of model and seconds.

    Periods up to `UNSEEN_SECONDS` are left out, because that is the minimum for which deleted pods stay charged anyway.
    """
    longest: dict[str, int] = {}
    for model, seconds in graces:
        if seconds > longest.get(model, UNSEEN_SECONDS):
            longest[model] = seconds
    return longest


def long_grace(graces: Iterable[int]) -> int:
    """Return the longest grace period in seconds; 0 if no period exceeds `UNSEEN_SECONDS`."""
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


def is_counted_before(ledger: Ledger, version: str, config_version: str) -> bool:
    """Return whether the ledger was counted before ``version``, or with an older quota ConfigMap."""
    claims = ledger.claim_resource_version
    return (
        is_older(ledger.pod_resource_version, version)
        or is_older(ledger.config_version, config_version)
        or (claims != "" and is_older(claims, version))
    )
