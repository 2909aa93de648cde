"""The nodes' labels as the cluster has them, watched."""

from __future__ import annotations

import threading

import msgspec

from vcuda.affinity import Labels
from vcuda.kube.client import Kube
from vcuda.kube.reflector import Reflector
from vcuda.objects import Node, ObjectMeta
from vcuda.placement import NodeLabels, Nodes


class NodeWatch:
    """Follows the nodes' labels, and indexes them anew when one changes."""

    def __init__(self, kube: Kube, keys: NodeLabels) -> None:
        self.keys = keys
        self._lock = threading.Lock()
        self._labels: dict[str, Labels] = {}
        self._nodes = Nodes(self.keys)
        self._stale = False
        self.reflector = Reflector(kube, "/api/v1/nodes", _decode_node, on_event=self._on_event)

    def current(self) -> Nodes:
        """Return the nodes as last seen."""
        with self._lock:
            if self._stale:
                self._nodes = Nodes.of(dict(self._labels), self.keys)
                self._stale = False
            return self._nodes

    def _on_event(self, old: Node | None, new: Node | None) -> None:
        """Take over a change of labels; heartbeats, which are most events, cost nothing more."""
        if old and new and old.labels == new.labels:
            return
        with self._lock:
            if new:
                self._labels[new.metadata.name] = new.labels
            elif old:
                self._labels.pop(old.metadata.name, None)
            self._stale = True


_NODE = msgspec.json.Decoder(Node)


def _decode_node(raw: bytes) -> Node:
    """Keep a node's name and labels alone."""
    node = _NODE.decode(raw)
    return Node(ObjectMeta(name=node.metadata.name, labels=node.metadata.labels))
