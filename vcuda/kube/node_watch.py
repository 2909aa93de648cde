"""The nodes' labels, locks and cards as the cluster has them, watched."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from vcuda.affinity import Labels
from vcuda.cards import INDEXED
from vcuda.kube.client import Kube
from vcuda.kube.reflector import Reflector
from vcuda.objects import Node, NodeStatus, ObjectMeta
from vcuda.placement import NodeLabels, Nodes
from vcuda.schemes import SCHEMES

NodeChange = Callable[[Node | None, Node | None], None]
"""Called with a node before and after: (None, new) is an arrival, (old, None) a departure."""

_CARDS = tuple(name for scheme in INDEXED for name in (scheme.cores, scheme.memory))
_LOCKS = tuple(scheme.node_lock for scheme in SCHEMES if scheme.node_lock)


class NodeWatch:
    """Follows the nodes' labels, indexed anew when one changes, their cards, and the locks schedulers hold on them.

    ``on_model_change`` is called after a node has got, changed or lost its model; also as one comes or goes.
    """

    def __init__(self, kube: Kube, keys: NodeLabels, on_model_change: Callable[[], None] = lambda: None) -> None:
        self.keys = keys
        self._on_model_change = on_model_change
        self._lock = threading.Lock()
        self._labels: dict[str, Labels] = {}
        self._nodes = Nodes(self.keys)
        self._stale = False
        self._followers: list[NodeChange] = []
        self.reflector = Reflector(kube, "/api/v1/nodes", _decode_node, on_event=self._on_event)

    def follow(self, on_change: NodeChange) -> None:
        """Call back after a node came or went, or these changed of it; to be said before the watch starts."""
        self._followers.append(on_change)

    def current(self) -> Nodes:
        """Return the nodes as last seen."""
        with self._lock:
            if self._stale:
                self._nodes = Nodes.of(dict(self._labels), self.keys)
                self._stale = False
            return self._nodes

    def _on_event(self, old: Node | None, new: Node | None) -> None:
        """Take over a change; heartbeats, which are most events, cost nothing more."""
        if old == new:
            return
        if not (old and new and old.labels == new.labels):
            self._take_labels(old, new)
        for on_change in self._followers:
            on_change(old, new)

    def _take_labels(self, old: Node | None, new: Node | None) -> None:
        with self._lock:
            if new:
                self._labels[new.metadata.name] = new.labels
            elif old:
                self._labels.pop(old.metadata.name, None)
            self._stale = True
        if self._model(old) != self._model(new):
            self._on_model_change()

    def _model(self, node: Node | None) -> str | None:
        return node.labels.get(self.keys.model) if node else None


_NODE = msgspec.json.Decoder(Node)


def _decode_node(raw: bytes) -> Node:
    """Keep a node's name, its labels, its locks and its cards alone."""
    node = _NODE.decode(raw)
    locks = {key: node.annotations[key] for key in _LOCKS if key in node.annotations} or None
    cards = {key: node.capacity[key] for key in _CARDS if key in node.capacity} or None
    metadata = ObjectMeta(name=node.metadata.name, labels=node.metadata.labels, annotations=locks)
    return Node(metadata, NodeStatus(cards) if cards else None)
