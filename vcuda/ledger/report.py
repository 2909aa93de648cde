"""The report of a namespace's ledger, which is published, exported as metrics, and shown."""

import datetime
import math
from collections.abc import Iterable, Mapping

import msgspec

from vcuda.allocations.stored_claims import ClaimCharge, StoredClaim
from vcuda.allocations.stored_pods import StoredPod
from vcuda.ledger.ledger import NO_LIMIT, Ledger
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import CORES_PER_CARD, Charge, Granted, NamespaceQuota, Usage

MOST_PODS = 100
"""Pods named per model, the largest, and of those of no model: a published report stays small."""


class PodUse(msgspec.Struct, frozen=True):
    """One pod that holds cards, or one ResourceClaim: cores in hundredths of a card, memory in MiB."""

    name: str
    cores: int
    memory: int
    claim: bool = False


class GrantUse(msgspec.Struct, frozen=True):
    """A part of a limit that ends."""

    cards: float | None
    """None where memory alone is limited."""
    until: str
    """RFC 3339, with the offset of the grant's time zone."""
    memory: int | None = None
    """In MiB; None where memory is not limited."""
    why: str = ""


class ModelUse(msgspec.Struct, frozen=True):
    """One model in one namespace. Cards are numbers such as 2.5; memory is in MiB, and None where it is not limited.

    ``limit`` and ``available`` are None where memory alone is limited. ``card_memory`` is then the memory of one card.

    ``used`` includes ``pending``, the charges of admitted pods that the watch has not shown yet, and ``terminating``,
    the charges of deleted pods whose containers may still run. It does not include ``reserved``, the charges that
    replicas of the webhook may grant within seconds. ``available`` is the rest of the limit, at least 0. ``grants`` are
    the parts of the limit that end.
    """

    model: str
    limit: float | None
    used: float
    pending: float
    available: float | None
    memory_limit: int | None = None
    memory_used: int | None = None
    pods: tuple[PodUse, ...] = ()
    more_pods: int = 0
    terminating: float = 0
    reserved: float = 0
    memory_reserved: int = 0
    card_memory: int = 0
    grants: tuple[GrantUse, ...] = ()

    @property
    def memory_available(self) -> int | None:
        """The free part of the limit on memory, in MiB, never below 0; None if memory is not limited."""
        if self.memory_limit is None:
            return None
        return max(self.memory_limit - (self.memory_used or 0) - self.memory_reserved, 0)

    @property
    def has_room(self) -> bool:
        cores = max((pod.cores for pod in self.pods), default=0)
        cards_left = (
            self.limit is None
            or self.available is None
            or self.available >= max(self.limit / 10, cores / CORES_PER_CARD)
        )
        if self.memory_limit is None or self.memory_available is None:
            return cards_left
        largest = max((pod.memory for pod in self.pods), default=0)
        return cards_left and self.memory_available >= max(self.memory_limit / 10, largest)


class NamespaceUse(msgspec.Struct, frozen=True):
    """A namespace's report. ``unpinned`` names pods that hold no model by their spec and run on no known one.

    ``more_unpinned`` counts those that a `shortened` report leaves out. ``taking_effect``: the API server may not ask
    about the namespace's pods yet. ``ledger_lost``: all that is not used is reserved, for nobody, as charges of pods
    that are still being stored are not known.
    """

    namespace: str
    mode: str
    models: tuple[ModelUse, ...]
    unpinned: tuple[str, ...] = ()
    more_unpinned: int = 0
    taking_effect: bool = False
    ledger_lost: bool = False
    warnings: tuple[str, ...] = ()
    """The reasons why the quota cannot be used, for example a model that no node has."""

    @property
    def has_room(self) -> bool:
        return all(model.has_room for model in self.models)

    def shortened(self) -> "NamespaceUse":
        """Return the report as it is published: with few names."""
        more = max(len(self.unpinned) - MOST_PODS, 0)
        return msgspec.structs.replace(self, unpinned=self.unpinned[:MOST_PODS], more_unpinned=more)


def report(
    namespace: str,
    quota: NamespaceQuota,
    ledger: Ledger,
    pods: Iterable[StoredPod],
    nodes: Nodes,
    *,
    claims: Iterable[tuple[StoredClaim, ClaimCharge]] = (),
) -> NamespaceUse:
    """Return the report of one namespace: every model of its quota, then others that it uses all the same.

    Of the ``claims`` those are left out that pods are charged for.
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
    usages = ledger.usages()
    models = dict.fromkeys([*quota.limits, *usages])
    used = tuple(_model(model, quota, usages, holders.get(model, [])) for model in models)
    use = NamespaceUse(namespace, quota.mode.value, used, tuple(sorted(unpinned)))
    return _closed(use) if ledger.lost else use


def _closed(use: NamespaceUse) -> NamespaceUse:
    models = tuple(
        msgspec.structs.replace(
            model,
            available=None if model.available is None else 0.0,
            reserved=model.reserved + (model.available or 0),
            memory_reserved=model.memory_reserved + (model.memory_available or 0),
        )
        for model in use.models
    )
    return msgspec.structs.replace(use, models=models, ledger_lost=True)


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
        PodUse(holder.name, charge.cores, charge.memory_under(limit), isinstance(holder, StoredClaim))
        for holder, charge in largest[:MOST_PODS]
    )
    return ModelUse(
        model=model,
        limit=_cards(limit.cores),
        used=used.cores / CORES_PER_CARD,
        pending=usage.pending.cores / CORES_PER_CARD,
        available=None if limit.cores is None else _cards(max(limit.cores - usage.used.cores, 0)),
        memory_limit=limit.memory,
        memory_used=None if limit.memory is None else memory,
        pods=tuple(named),
        more_pods=max(len(largest) - MOST_PODS, 0),
        terminating=usage.terminating.cores / CORES_PER_CARD,
        reserved=usage.reserved.cores / CORES_PER_CARD,
        # This is a difference of sums. If both were rounded up, their sum would be more than the charge.
        memory_reserved=0 if limit.memory is None else usage.used.memory_under(limit) - memory,
        card_memory=limit.card_memory,
        grants=tuple(_ending(each) for each in quota.granted if each.model == model and not math.isinf(each.until)),
    )


def _cards(cores: int | None) -> float | None:
    return None if cores is None else cores / CORES_PER_CARD


def _ending(granted: Granted) -> GrantUse:
    until = datetime.datetime.fromtimestamp(granted.until, granted.grant.times.zone).isoformat()
    return GrantUse(_cards(granted.limit.cores), until, granted.limit.memory, granted.grant.why)
