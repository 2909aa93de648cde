"""The report of a namespace's GPU usage, which is published in a ConfigMap, in metrics and on the usage page."""

from __future__ import annotations

import datetime
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vcuda.ledger.ledger import Ledger
from vcuda.quota.model import (
    CORES_PER_CARD,
    NO_LIMIT,
    Charge,
    Cores,
    Granted,
    Limit,
    NamespaceQuota,
    Team,
    Usage,
    all_models,
    total,
)
from vcuda.quota.well_known import TOTAL, UNSTORED_CAUSE

if TYPE_CHECKING:
    # These modules import the package kubernetes. The kubectl plugin reads reports without this package.
    from vcuda.allocations.stored_claims import ClaimCharge, StoredClaim
    from vcuda.allocations.stored_pods import StoredPod
    from vcuda.placement.nodes import Nodes

MAX_REPORTED_PODS = 100
"""A report names at most this many pods for each model (the largest ones), and this many pods without a model."""


@dataclass(frozen=True, slots=True)
class PodUse:
    """The charge of one pod or ResourceClaim. ``cores`` are hundredths of a card, ``memory`` is in MiB."""

    name: str
    cores: int
    memory: int
    claim: bool = False


@dataclass(frozen=True, slots=True)
class GrantUse:
    """The part of a limit that a grant (a dated addition to the limit) adds until the grant ends."""

    cards: float | None
    """The cards that the grant adds; None if only memory is limited."""
    until: str
    """The end of the grant in RFC 3339, with the offset of the grant's time zone."""
    memory: int | None = None
    """The MiB that the grant adds; None if memory is not limited."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class ModelUse:
    """The usage of one model in one namespace, in cards such as 2.5. Memory is in MiB; None if it is not limited."""

    model: str
    limit: float | None
    """The limit in cards; None if only memory is limited."""
    used: float
    """The charged cards, including ``pending`` and ``terminating``, without ``reserved``."""
    pending: float
    """The cards of admitted pods that the controller has not yet observed as stored."""
    available: float | None
    """The free part of the limit in cards, at least 0; None if only memory is limited."""
    memory_limit: int | None = None
    memory_used: int | None = None
    pods: tuple[PodUse, ...] = ()
    more_pods: int = 0
    terminating: float = 0
    """The cards of deleted pods whose containers may still run."""
    reserved: float = 0
    """The cards that webhook replicas reserve in advance, to admit pods without a write of the ledger."""
    memory_reserved: int = 0
    card_memory: int = 0
    """The memory of one card in MiB if only memory is limited; otherwise 0."""
    grants: tuple[GrantUse, ...] = ()
    """The grants that end at a known time. ``limit`` includes them."""
    unstored: float = 0
    """The part of ``pending`` that was admitted more than 5 s ago. These pods are probably never created."""

    @property
    def memory_available(self) -> int | None:
        """The free part of the memory limit in MiB, at least 0; None if memory is not limited."""
        if self.memory_limit is None:
            return None
        return max(self.memory_limit - (self.memory_used or 0) - self.memory_reserved, 0)

    @property
    def has_room(self) -> bool:
        cards = max((pod.cores for pod in self.pods), default=0) / CORES_PER_CARD
        memory = max((pod.memory for pod in self.pods), default=0)
        available = self.memory_available
        return _has_room(self.available, self.limit, cards) and _has_room(available, self.memory_limit, memory)


def _has_room(available: float | None, limit: float | None, largest: float) -> bool:
    return available is None or limit is None or available >= max(limit / 10, largest)


@dataclass(frozen=True, slots=True)
class TeamUse:
    """The usage of a team: the sum over its namespaces, by model. It names no namespace and no pod."""

    name: str
    models: tuple[ModelUse, ...]
    total: ModelUse | None = None
    """The usage of all models together, if the team's quota limits it; otherwise None."""

    @property
    def limits(self) -> tuple[ModelUse, ...]:
        return (*self.models, self.total) if self.total else self.models

    @classmethod
    def of(cls, team: Team, usages: Mapping[str, Usage]) -> TeamUse:
        """Return the usage of a team. ``usages``: the sum over its namespaces, by model."""
        models = tuple(_model(model, limit, usages.get(model, Usage())) for model, limit in team.limits.items())
        return cls(team.name, models, _model(TOTAL, team.total, all_models(usages.values())) if team.total else None)


@dataclass(frozen=True, slots=True)
class NamespaceUse:
    """The GPU usage of one namespace, by model."""

    namespace: str
    mode: str
    models: tuple[ModelUse, ...]
    unpinned: tuple[str, ...] = ()
    """Running or pending pods that are not charged, because neither their spec nor their node has a known GPU model."""
    more_unpinned: int = 0
    """The number of pods without a GPU model that `shortened` has left out of ``unpinned``."""
    taking_effect: bool = False
    """True if the API server may not call the webhook for the namespace's pods yet."""
    unregistered: str = ""
    """The webhooks and policies that the API server lacks, without which no quota is in effect; empty if none."""
    ledger_lost: bool = False
    """True if the ledger was lost, and charges may be missing. All unused quota is then shown as reserved."""
    warnings: tuple[str, ...] = ()
    """The reasons why the quota cannot be used, for example a model that no node has."""
    total: ModelUse | None = None
    """The usage of all models together, without pods, if the quota limits it; otherwise None."""
    team: TeamUse | None = None
    """The usage of the namespace's team, including this namespace; None if the namespace is in no team."""

    @property
    def limits(self) -> tuple[ModelUse, ...]:
        """The usage of each model and, if the quota limits it, of all models together."""
        return (*self.models, self.total) if self.total else self.models

    @property
    def unstored_warning(self) -> str:
        """A warning about charged pods that are not created, with the likely cause; empty if there are none."""
        found = ", ".join(f"{each.unstored:g} of {each.model}" for each in self.models if each.unstored)
        if not found:
            return ""
        subject = f"cards of namespace {self.namespace} are charged to pods that are not created"
        return f"{subject} ({found}): {UNSTORED_CAUSE}"

    @property
    def unpinned_warning(self) -> str:
        """A warning about pods without a known GPU model; empty if there are none."""
        if not self.unpinned:
            return ""
        subject = f"{len(self.unpinned) + self.more_unpinned} pods of namespace {self.namespace} are not counted"
        return f"{subject}, because they have no known GPU model, for example {self.unpinned[0]}"

    @property
    def has_room(self) -> bool:
        largest = max((pod.cores for model in self.models for pod in model.pods), default=0) / CORES_PER_CARD
        of_team = self.team.limits if self.team else ()
        in_shared = all(
            _has_room(each.available, each.limit, largest) for each in (*filter(None, [self.total]), *of_team)
        )
        return in_shared and all(each.has_room for each in (*self.models, *of_team))

    def used_by_others(self, shared: ModelUse) -> float:
        """Return the cards that other namespaces use of a limit of the team. ``shared``: the team's usage."""
        own = sum(each.used for each in self.models if shared.model in (each.model, TOTAL))
        return max(round(shared.used - own, 2), 0)

    def within(self, team: TeamUse) -> NamespaceUse:
        """Return the report with newer figures of the team. No more is available than the team has free."""
        free = {each.model: each.available for each in team.limits}

        def capped(use: ModelUse) -> ModelUse:
            available = [each for each in (use.available, free.get(use.model)) if each is not None]
            return use if use.available is None else replace(use, available=min(available))

        own_total = capped(self.total) if self.total else None
        return replace(self, models=tuple(map(capped, self.models)), total=own_total, team=team)

    def shortened(self) -> NamespaceUse:
        """Return the report as it is published, with at most `MAX_REPORTED_PODS` pods in ``unpinned``."""
        more = max(len(self.unpinned) - MAX_REPORTED_PODS, 0)
        return replace(self, unpinned=self.unpinned[:MAX_REPORTED_PODS], more_unpinned=more)


FULL_WARNING = "too many pods or claims were deleted by force, so no GPU pod is admitted until all of them have ended"
"""The warning about a namespace that counts as full."""


def report(
    namespace: str,
    quota: NamespaceQuota,
    ledger: Ledger,
    pods: Iterable[StoredPod],
    nodes: Nodes,
    *,
    claims: Iterable[tuple[StoredClaim, ClaimCharge]] = (),
    unstored: Collection[str] = (),
) -> NamespaceUse:
    """Return the report of one namespace. It includes all models in the quota, and all other models that are in use.

    ``claims`` must not include claims that are already charged to their pod. ``unstored``: the uids of the pending
    charges whose pods or claims should have been stored by now.
    """
    # By model: each pod and claim with its name, its charge, and whether it is a claim.
    holders: dict[str, list[tuple[str, Charge, bool]]] = {}
    unpinned = []
    for pod in pods:
        model = pod.model_on(nodes)
        if pod.live and model:
            holders.setdefault(model, []).append((pod.name, pod.charge_on(nodes), False))
        elif pod.live:
            unpinned.append(pod.name)
    for claim, taken in claims:
        for model, charge in taken.charges.items():
            holders.setdefault(model, []).append((claim.name, charge, True))
    # If too many pods were deleted for the leader to keep each, a charge larger than any cluster fills the quota. No
    # pod uses this charge, so no figure includes it.
    counted = ledger.without_fill()
    is_full, usages = counted is not ledger, counted.usages()
    models = dict.fromkeys([*quota.limits, *filter(nodes.knows, usages)])
    late = [each for uid, each in ledger.pending.items() if uid in unstored]
    used = tuple(
        replace(
            _model(
                *(model, quota.limits.get(model, NO_LIMIT), usages.get(model, Usage()), holders.get(model, [])),
                granted=[each for each in quota.granted if each.model == model],
            ),
            unstored=_shown(total(each.charge for each in late if each.model == model).cores),
        )
        for model in models
    )
    in_total = _model(TOTAL, quota.total, all_models(usages.values())) if quota.total else None
    names, lost = tuple(sorted(unpinned)), ledger.lost is not None
    use = NamespaceUse(namespace, quota.mode.value, used, names, ledger_lost=lost, total=in_total)
    use = replace(use, warnings=(FULL_WARNING,)) if is_full else use
    return _closed(use) if ledger.lost or is_full else use


def _closed(use: NamespaceUse) -> NamespaceUse:
    """Return the report of a namespace that admits no pod. All unused quota is shown as reserved."""
    closed = [
        replace(
            each,
            available=None if each.available is None else 0.0,
            reserved=each.reserved + (each.available or 0),
            memory_reserved=each.memory_reserved + (each.memory_available or 0),
        )
        for each in use.limits
    ]
    total_use = closed.pop() if use.total else None
    return replace(use, models=tuple(closed), total=total_use)


def _model(
    model: str,
    limit: Limit,
    usage: Usage,
    holders: Collection[tuple[str, Charge, bool]] = (),
    granted: Iterable[Granted] = (),
) -> ModelUse:
    used = usage.in_use
    memory = used.memory_under(limit)
    largest = sorted(holders, key=lambda each: (-each[1].cores, -each[1].memory, each[0]))
    named = (
        PodUse(name, math.ceil(charge.cores), charge.memory_under(limit), is_claim)
        for name, charge, is_claim in largest[:MAX_REPORTED_PODS]
    )
    return ModelUse(
        model=model,
        limit=_cards(limit.cores),
        used=_shown(used.cores),
        pending=_shown(usage.pending.cores),
        available=None if limit.cores is None else _cards(max(limit.cores - math.ceil(usage.used.cores), 0)),
        memory_limit=limit.memory,
        memory_used=None if limit.memory is None else memory,
        pods=tuple(named),
        more_pods=max(len(largest) - MAX_REPORTED_PODS, 0),
        terminating=_shown(usage.terminating.cores),
        # Reserved cores and memory are differences of rounded sums. If used and reserved amounts were rounded up
        # separately, they could add up to more than the total.
        reserved=(math.ceil(usage.used.cores) - math.ceil(used.cores)) / CORES_PER_CARD,
        memory_reserved=0 if limit.memory is None else usage.used.memory_under(limit) - memory,
        card_memory=limit.card_memory,
        grants=tuple(_ending(each) for each in granted if not math.isinf(each.until)),
    )


def _shown(cores: Cores) -> float:
    """Return charged cards for people, rounded up to hundredths, so that no usage looks smaller than it is."""
    return math.ceil(cores) / CORES_PER_CARD


def _cards(cores: int | None) -> float | None:
    return None if cores is None else cores / CORES_PER_CARD


def _ending(granted: Granted) -> GrantUse:
    until = datetime.datetime.fromtimestamp(granted.until, granted.grant.times.zone).isoformat()
    return GrantUse(_cards(granted.limit.cores), until, granted.limit.memory, granted.grant.why)
