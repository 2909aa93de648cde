"""Adds the memory of one GPU card to those limits in the quota document that limit only memory, and not cards::

    gpu_quota:   team-i: {quota: {A100: {memory: 160Gi}}}
    gpu_models:  A100: {memory: 80Gi}                       # a whole card takes 80Gi of the limit

Under such a limit, a request for whole cards is charged the memory of these cards. So the key ``gpu_models`` must state
the memory of one card. The memory of the cards on the nodes is not used, because these cards may differ or disappear.
"""

from collections.abc import Callable, Iterator, Mapping

import msgspec

from vcuda.errors import Fault, QuotaFault
from vcuda.quota.document import path_of
from vcuda.quota.model import Grant, Limit, NamespaceQuota, Quota
from vcuda.quota.yaml import KeyPath

_MemoryOf = Callable[[str], int]
"""A function that returns the memory of one card of a GPU model in MiB; 0 if ``gpu_models`` does not state it."""


def with_card_memory(quota: Quota, memory_of: _MemoryOf) -> Quota:
    """Return the quota, with the memory of one card of the model added to each limit that limits only memory.

    Raises QuotaFault if ``gpu_models`` does not state the memory of such a card.
    """
    alone = [(place, model) for place, model, limit in _limits_of(quota) if limit.cores is None]
    if not alone:
        return quota
    faults = [
        Fault(
            path_of(place),
            f"must have `cards`, because `gpu_models` does not state the memory of one {model} card. "
            f"Alternatively, add the memory to `gpu_models`, for example {model}: {{memory: 80Gi}}",
        )
        for place, model in alone
        if not memory_of(model)
    ]
    if faults:
        raise QuotaFault(tuple(faults))
    namespaces = {name: _priced(entry, memory_of) for name, entry in quota.namespaces.items()}
    default = _priced(quota.default, memory_of) if quota.default else None
    return msgspec.structs.replace(quota, namespaces=namespaces, default=default)


def _limits_of(quota: Quota) -> Iterator[tuple[KeyPath, str, Limit]]:
    for name, entry in quota.entries.items():
        for model, limit in entry.limits.items():
            yield (name, "quota", model), model, limit
        for at, grant in enumerate(entry.grants):
            for model, limit in grant.limits.items():
                yield (name, "grants", at, model), model, limit


def _priced(entry: NamespaceQuota, memory_of: _MemoryOf) -> NamespaceQuota:
    grants = tuple(Grant(_stated(grant.limits, memory_of), grant.times, grant.why) for grant in entry.grants)
    return msgspec.structs.replace(entry, limits=_stated(entry.limits, memory_of), grants=grants)


def _stated(limits: Mapping[str, Limit], memory_of: _MemoryOf) -> Mapping[str, Limit]:
    return {
        model: Limit(None, limit.memory, memory_of(model)) if limit.cores is None else limit
        for model, limit in limits.items()
    }
