"""Stale locks on nodes: looked for on the watched nodes, judged and removed on the node as it is stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec

from controller.removals import Found, Sweep, retried
from vcuda.errors import NotFound
from vcuda.kube import Kube, NodeWatch, Subject, segment
from vcuda.objects import Node, can_be_name
from vcuda.stale_locks import Lock, find_stale_lock, read_locks

_NODE = msgspec.json.Decoder(Node)


class NodeLocks:
    """``timeout``: seconds that a lock may be held. ``wall`` tells the Unix time."""

    def __init__(
        self, kube: Kube, nodes: NodeWatch, sweep: Sweep, timeout: float, wall: Callable[[], float] = time.time
    ) -> None:
        self._kube = kube
        self._nodes = nodes
        self._sweep = sweep
        self._timeout = timeout
        self._wall = wall
        self._seen: dict[tuple[str, str], tuple[str, float]] = {}
        self._served: dict[str, tuple[Lock, ...]] = {}

    def locked(self) -> Iterator[str]:
        """Yield every node that is locked, and forget the others."""
        nodes = self._nodes.reflector.snapshot().values()
        names = {node.metadata.name for node in nodes if node.annotations}
        self._seen = {key: seen for key, seen in self._seen.items() if key[0] in names}
        self._served = {name: locks for name, locks in self._served.items() if name in names}
        yield from names

    def look(self, name: str) -> float | None:
        """Remove a node's locks that are stale; return in how many seconds the next can be, None: when they change."""
        watched = self._nodes.reflector.get(("", name))
        locks = tuple(read_locks(watched)) if watched else ()
        if not locks or self._served.get(name) == locks:
            return None
        again = retried(lambda: self._free(name))
        if again is None:
            self._served[name] = locks
        return again

    def _free(self, name: str) -> float | None:
        path = f"/api/v1/nodes/{segment(name)}"
        try:
            node = _NODE.decode(self._kube.get(path))
        except NotFound:
            return None
        now = self._wall()
        locks = {lock: self._expires(name, lock, now) for lock in read_locks(node)}
        found = (find_stale_lock(lock, expires, now, self._holder_exists) for lock, expires in locks.items())
        removals = tuple(removal for removal in found if removal)
        if not removals:
            return min((expires - now for expires in locks.values()), default=None)
        subject = Subject("v1", "Node", name, uid=node.metadata.uid, resource_version=node.metadata.resource_version)
        self._sweep.remove(Found(subject, path, removals))
        return None

    def _expires(self, name: str, lock: Lock, now: float) -> float:
        key = name, lock.scheme.name
        value, seen = self._seen.get(key, ("", now))
        if value != lock.value:
            seen = now
            self._seen[key] = lock.value, seen
        return lock.expires(seen, now, self._timeout)

    def _holder_exists(self, namespace: str, name: str) -> bool:
        if not (can_be_name(namespace) and can_be_name(name)):
            return False
        try:
            self._kube.get(f"/api/v1/namespaces/{segment(namespace)}/pods/{segment(name)}")
        except NotFound:
            return False
        return True
