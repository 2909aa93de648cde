"""The facts as a cluster has them: the quota ConfigMap, the nodes and their free cards, watched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from vcuda.kube import CardsWatch, NodeWatch, QuotaWatch, Reflector
from vcuda.patches import Hints
from webhook.facts import Facts


class ClusterFacts:
    """The quota and the nodes of a cluster, current to within a watch event.

    Which cards are free is published by the extender, where there is one, every few seconds; nothing waits for it.
    """

    def __init__(self, quota: QuotaWatch, nodes: NodeWatch, cards: CardsWatch, hints: Hints) -> None:
        self._quota = quota
        self._nodes = nodes
        self._cards = cards
        self._hints = hints

    def current(self) -> Facts | None:
        """Return the facts in force, or None until quota and nodes have been read once."""
        quota = self._quota.current()
        if quota is None or not self._nodes.reflector.synced.is_set():
            return None
        nodes, free = self._nodes.current(), self._cards.current()
        return Facts(quota, msgspec.structs.replace(nodes, free=free) if free else nodes, self._hints)

    def reflectors(self) -> Mapping[str, Reflector[Any]]:
        """Return the watches by the name under which their age is exported."""
        return {"configmaps": self._quota.reflector, "nodes": self._nodes.reflector, "cards": self._cards.reflector}

    def start(self) -> None:
        """Start watching."""
        for reflector in self.reflectors().values():
            reflector.start()
