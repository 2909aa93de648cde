"""What decisions are made from besides the pod itself: the quota in force, the nodes, and the system's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from vcuda.kube import FreeCardsInformer, NodeInformer, QuotaInformer, Reflector
from vcuda.placement.affinity import Hints
from vcuda.placement.placement import Nodes
from vcuda.quota.model import Quota


class PolicySnapshot(msgspec.Struct, frozen=True):
    """One consistent view, taken at the start of a decision."""

    quota: Quota
    nodes: Nodes
    hints: Hints = Hints()


class PolicySource(Protocol):
    """Where the policy come from: watched in a cluster, read from files where there is none."""

    def current(self) -> PolicySnapshot | None:
        """Return the policy in force, or None until the quota has been read once."""


class FixedPolicy:
    """Policy that does not change: for the embedded mode and `check`."""

    def __init__(self, policy: PolicySnapshot) -> None:
        self._policy = policy

    def current(self) -> PolicySnapshot | None:
        """Return the policy given at the start."""
        return self._policy


class ClusterPolicy:
    """The quota and the nodes of a cluster, current to within a watch event.

    Which cards are free is published by the extender, where there is one, every few seconds; nothing waits for it.
    """

    def __init__(self, quota: QuotaInformer, nodes: NodeInformer, cards: FreeCardsInformer, hints: Hints) -> None:
        self._quota = quota
        self._nodes = nodes
        self._cards = cards
        self._hints = hints

    def current(self) -> PolicySnapshot | None:
        """Return the policy in force, or None until quota and nodes have been read once."""
        quota = self._quota.current()
        if quota is None or not self._nodes.reflector.synced.is_set():
            return None
        nodes, free = self._nodes.current(), self._cards.current()
        return PolicySnapshot(quota, msgspec.structs.replace(nodes, free=free) if free else nodes, self._hints)

    def reflectors(self) -> Mapping[str, Reflector[Any]]:
        """Return the watches by the name under which their age is exported."""
        return {"configmaps": self._quota.reflector, "nodes": self._nodes.reflector, "cards": self._cards.reflector}

    def start(self) -> None:
        """Start watching."""
        for reflector in self.reflectors().values():
            reflector.start()
