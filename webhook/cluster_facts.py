"""The facts as a cluster has them: the quota ConfigMap and the nodes, watched."""

from __future__ import annotations

from collections.abc import Mapping

from vcuda.kube import NodeWatch, QuotaWatch, Reflector
from vcuda.objects import ConfigMap, Node
from vcuda.patches import Hints
from webhook.facts import Facts


class ClusterFacts:
    """The quota and the nodes of a cluster, current to within a watch event."""

    def __init__(self, quota: QuotaWatch, nodes: NodeWatch, hints: Hints) -> None:
        self._quota = quota
        self._nodes = nodes
        self._hints = hints

    def current(self) -> Facts | None:
        """Return the facts in force, or None until quota and nodes have been read once."""
        quota = self._quota.current()
        if quota is None or not self._nodes.reflector.synced.is_set():
            return None
        return Facts(quota, self._nodes.current(), self._hints)

    def reflectors(self) -> Mapping[str, Reflector[ConfigMap] | Reflector[Node]]:
        """Return the watches by the name under which their age is exported."""
        return {"configmaps": self._quota.reflector, "nodes": self._nodes.reflector}

    def start(self) -> None:
        """Start watching."""
        for reflector in self.reflectors().values():
            reflector.start()
