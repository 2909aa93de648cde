"""Creates the report of a namespace's GPU usage from its ledger, its pods and its claims."""

import datetime
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import msgspec

from vcuda.allocations.stored_claims import ClaimCharge, StoredClaim
from vcuda.allocations.stored_pods import StoredPod
from vcuda.ledger.ledger import FULL, NO_LIMIT, Ledger
from vcuda.ledger.report import MAX_REPORTED_PODS, GrantUse, ModelUse, NamespaceUse, PodUse
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import CORES_PER_CARD, Charge, Cores, Granted, NamespaceQuota, Usage, total

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
    holders: dict[str, list[tuple[StoredPod | StoredClaim, Charge]]] = {}
    unpinned = []
    for pod in pods:
        model = pod.model_on(nodes)
        if pod.live and model:
            holders.setdefault(model, []).append((pod, pod.charge_on(nodes)))
        elif pod.live:
            unpinned.append(pod.name)
    for claim, taken in claims:
        for model, charge in taken.charges.items():
            holders.setdefault(model, []).append((claim, charge))
    # The charges that fill a quota are larger than every cluster, and no pod uses them. So no figure includes them.
    terminating = {key: each for key, each in ledger.terminating.items() if FULL not in key}
    is_full = len(terminating) < len(ledger.terminating)
    usages = msgspec.structs.replace(ledger, terminating=terminating).usages()
    models = dict.fromkeys([*quota.limits, *filter(nodes.knows, usages)])
    late = [each for uid, each in ledger.pending.items() if uid in unstored]
    used = tuple(
        replace(
            _model(model, quota, usages, holders.get(model, [])),
            unstored=_shown(total(each.charge for each in late if each.model == model).cores),
        )
        for model in models
    )
    use = NamespaceUse(namespace, quota.mode.value, used, tuple(sorted(unpinned)), ledger_lost=ledger.lost is not None)
    use = replace(use, warnings=(FULL_WARNING,)) if is_full else use
    return _closed(use) if ledger.lost or is_full else use


def _closed(use: NamespaceUse) -> NamespaceUse:
    """Return the report of a namespace that admits no pod. All unused quota is shown as reserved."""
    models = tuple(
        replace(
            model,
            available=None if model.available is None else 0.0,
            reserved=model.reserved + (model.available or 0),
            memory_reserved=model.memory_reserved + (model.memory_available or 0),
        )
        for model in use.models
    )
    return replace(use, models=models)


def _model(
    model: str,
    quota: NamespaceQuota,
    usages: Mapping[str, Usage],
    holders: list[tuple[StoredPod | StoredClaim, Charge]],
) -> ModelUse:
    limit = quota.limits.get(model, NO_LIMIT)
    usage = usages.get(model, Usage())
    used = usage.in_use
    memory = used.memory_under(limit)
    largest = sorted(holders, key=lambda each: (-each[1].cores, -each[1].memory, each[0].name))
    named = (
        PodUse(holder.name, math.ceil(charge.cores), charge.memory_under(limit), isinstance(holder, StoredClaim))
        for holder, charge in largest[:MAX_REPORTED_PODS]
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
        grants=tuple(_ending(each) for each in quota.granted if each.model == model and not math.isinf(each.until)),
    )


def _shown(cores: Cores) -> float:
    """Return charged cards for people, rounded up to hundredths, so that no usage looks smaller than it is."""
    return math.ceil(cores) / CORES_PER_CARD


def _cards(cores: int | None) -> float | None:
    return None if cores is None else cores / CORES_PER_CARD


def _ending(granted: Granted) -> GrantUse:
    until = datetime.datetime.fromtimestamp(granted.until, granted.grant.times.zone).isoformat()
    return GrantUse(_cards(granted.limit.cores), until, granted.limit.memory, granted.grant.why)
