"""What a namespace uses of its quota, for people and for metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from vcuda.allocations.observed_pods import StoredPod
from vcuda.ledger.ledger import NO_LIMIT, Ledger
from vcuda.placement.placement import Nodes
from vcuda.quota.charge import CORES_PER_CARD, Charge, Usage
from vcuda.quota.model import NamespaceQuota

MOST_PODS = 100
"""Pods named per model, the largest, and of those of no model: a published report stays small."""


class PodUse(msgspec.Struct, frozen=True):
    """One pod that holds cards: cores in hundredths of a card, memory in MiB."""

    name: str
    cores: int
    memory: int


class ModelUse(msgspec.Struct, frozen=True):
    """One model in one namespace. Cards are numbers such as 2.5; memory is in MiB, and None where it is not limited.

    ``used`` holds ``pending``: what was admitted and not yet seen stored. ``available`` is never below 0.
    """

    model: str
    limit: float
    used: float
    pending: float
    available: float
    memory_limit: int | None = None
    memory_used: int | None = None
    pods: tuple[PodUse, ...] = ()
    more_pods: int = 0


class NamespaceUse(msgspec.Struct, frozen=True):
    """A namespace's report. ``unpinned`` names pods that hold no model by their spec and run on no known one.

    ``more_unpinned`` counts those that a `shortened` report leaves out.
    """

    namespace: str
    mode: str
    models: tuple[ModelUse, ...]
    unpinned: tuple[str, ...] = ()
    more_unpinned: int = 0

    def shortened(self) -> NamespaceUse:
        """Return the report as it is published: with few names."""
        more = max(len(self.unpinned) - MOST_PODS, 0)
        return msgspec.structs.replace(self, unpinned=self.unpinned[:MOST_PODS], more_unpinned=more)


def report(
    namespace: str, quota: NamespaceQuota, ledger: Ledger, pods: Iterable[StoredPod], nodes: Nodes
) -> NamespaceUse:
    """Return the report of one namespace: every model of its quota, then others that it uses all the same."""
    holders: dict[str, list[StoredPod]] = {}
    unpinned = []
    for pod in pods:
        if not pod.live:
            continue
        model = pod.model_on(nodes)
        if model:
            holders.setdefault(model, []).append(pod)
        else:
            unpinned.append(pod.name)
    usages = ledger.usages()
    models = dict.fromkeys([*quota.limits, *usages])
    used = tuple(_model(model, quota, usages, holders.get(model, [])) for model in models)
    return NamespaceUse(namespace, quota.mode.value, used, tuple(sorted(unpinned)))


def _model(model: str, quota: NamespaceQuota, usages: Mapping[str, Usage], holders: list[StoredPod]) -> ModelUse:
    limit = quota.limits.get(model, NO_LIMIT)
    usage = usages.get(model, Usage(Charge(), Charge()))
    largest = sorted(holders, key=lambda pod: (-pod.charge.cores, -pod.charge.memory, pod.name))
    return ModelUse(
        model=model,
        limit=_cards(limit.cores),
        used=_cards(usage.used.cores),
        pending=_cards(usage.pending.cores),
        available=_cards(max(limit.cores - usage.used.cores, 0)),
        memory_limit=limit.memory,
        memory_used=None if limit.memory is None else usage.used.memory_under(limit),
        pods=tuple(PodUse(pod.name, pod.charge.cores, pod.charge.memory_under(limit)) for pod in largest[:MOST_PODS]),
        more_pods=max(len(largest) - MOST_PODS, 0),
    )


def _cards(cores: int) -> float:
    return cores / CORES_PER_CARD
