"""The ledger of one namespace: what is charged to its quota, and the decision on one more charge.

A pod that can be stored is always in ``committed`` or in ``pending`` of the version that was decided against. The
writer holds that version by compare-and-swap, so whatever runs beside it can only make the ledger count too much.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from vcuda.charge import Charge, Shortage, Usage, fits, total
from vcuda.quota import Limit, NamespaceQuota

MOST_PENDING = 512
"""Pending charges a namespace may have at once, so that a runaway owner cannot grow its ledger without end."""

WARN_FROM = 0.9
"""The part of a limit in use from which on admitted pods carry a warning."""

NO_LIMIT = Limit(cores=0)
"""What a model that is not listed is held to."""


class Pending(msgspec.Struct, frozen=True):
    """A charge whose pod has not yet been seen stored."""

    model: str
    charge: Charge


class Ledger(msgspec.Struct, frozen=True):
    """The charges of one namespace.

    ``committed`` holds per model what stored pods take, counted at ``pod_resource_version``; ``pending`` holds by pod
    uid what was admitted since.
    """

    committed: Mapping[str, Charge] = {}
    pod_resource_version: str = ""
    pending: Mapping[str, Pending] = {}

    def usage(self, model: str) -> Usage:
        """Return what is charged to one model."""
        pending = total(entry.charge for entry in self.pending.values() if entry.model == model)
        return Usage(used=self.committed.get(model, Charge()) + pending, pending=pending)

    def usages(self) -> Mapping[str, Usage]:
        """Return what is charged to every model that has a charge."""
        pending = by_model((entry.model, entry.charge) for entry in self.pending.values())
        return {
            model: Usage(
                self.committed.get(model, Charge()) + pending.get(model, Charge()), pending.get(model, Charge())
            )
            for model in sorted(self.committed.keys() | pending.keys())
        }


class Granted(msgspec.Struct, frozen=True):
    """The charge is in ``ledger``. ``shortage`` says by how much it is over a limit that only warns."""

    ledger: Ledger
    usage: Usage
    limit: Limit
    shortage: Shortage | None = None

    @property
    def nearly_full(self) -> bool:
        """Whether the model's cores or memory are used to nine tenths of the limit or more."""
        used, limit = self.usage.used, self.limit
        cores_nearly = used.cores >= limit.cores * WARN_FROM
        return cores_nearly or (limit.memory is not None and used.memory_under(limit) >= limit.memory * WARN_FROM)


class Refused(msgspec.Struct, frozen=True):
    """The charge does not fit."""

    shortage: Shortage


class Crowded(msgspec.Struct, frozen=True):
    """The namespace has as many pending charges as it may; the caller comes again."""


def admit(
    ledger: Ledger, uid: str, asked: Pending, quota: NamespaceQuota, *, enforced: bool
) -> Granted | Refused | Crowded:
    """Decide one charge against one version of the ledger.

    A uid that is charged already is granted as it stands: the API server repeats calls. Where the quota is not
    ``enforced``, what does not fit is charged all the same.
    """
    limit = quota.limits.get(asked.model, NO_LIMIT)
    usage = ledger.usage(asked.model)
    if uid in ledger.pending:
        return Granted(ledger, usage, limit)
    shortage = None
    if not fits(limit, usage.used, asked.charge):
        shortage = Shortage(asked.model, asked.charge, usage, limit)
        if enforced:
            return Refused(shortage)
    if len(ledger.pending) >= MOST_PENDING:
        return Crowded()
    charged = msgspec.structs.replace(ledger, pending={**ledger.pending, uid: asked})
    usage = Usage(usage.used + asked.charge, usage.pending + asked.charge)
    return Granted(charged, usage, limit, shortage)


def by_model(charges: Iterable[tuple[str, Charge]]) -> Mapping[str, Charge]:
    """Return the sum of the charges of each model, given as (model, charge)."""
    sums: dict[str, Charge] = {}
    for model, charge in charges:
        sums[model] = sums.get(model, Charge()) + charge
    return sums


class StoredView(msgspec.Struct, frozen=True):
    """What a controller has seen of one namespace's pods, up to ``resource_version``.

    ``committed`` is what those stored then take, by model. ``seen`` are the uids of all that were stored at some time:
    those there now, and those that have gone since.
    """

    resource_version: str
    committed: Mapping[str, Charge]
    seen: Collection[str]


def settle(ledger: Ledger, view: StoredView, absent: Collection[str] = (), counted_since: str = "") -> Ledger:
    """Return the ledger recounted from a view, with the pending charges dropped that it has seen stored.

    It is the same ledger where nothing differs, unless it was counted before ``counted_since``.

    ``absent`` are the uids that are proven never to have been stored: past every timeout of the API server, and then
    looked for by a quorum read. They go in any case. A view that is older than the last count says nothing more: with
    it a leader that has been asleep, or that lists from a cache, would lower ``committed``.
    """
    if is_older(view.resource_version, ledger.pod_resource_version):
        return _without(ledger, ledger.pending.keys() & {*absent})
    recounted = _without(ledger, ledger.pending.keys() & {*view.seen, *absent})
    same = recounted is ledger and view.committed == ledger.committed
    if same and not is_older(ledger.pod_resource_version, counted_since):
        return ledger
    return Ledger(view.committed, view.resource_version, recounted.pending)


def _without(ledger: Ledger, uids: Collection[str]) -> Ledger:
    if not uids:
        return ledger
    kept = {uid: entry for uid, entry in ledger.pending.items() if uid not in uids}
    return msgspec.structs.replace(ledger, pending=kept)


def is_older(version: str, than: str) -> bool:
    """Return whether one resourceVersion of pods is older than another.

    They are etcd's revisions, which only grow (KEP-5504 lets clients compare them). The empty one is the oldest.
    """
    return int(version or 0) < int(than or 0)
