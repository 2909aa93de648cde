"""Stale allocations on pods: looked for in the watched pods, judged and removed on the pod as it is stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec

from controller.pod_watch import PodWatch
from controller.removals import Found, Sweep, retried
from vcuda.errors import ApiError, NotFound
from vcuda.kube import Key, Kube, NodeWatch, Subject, segment
from vcuda.objects import Pod, can_be_name
from vcuda.stale import Exists, find_stale, first_stale
from vcuda.stored_pods import StoredPod, read_stored

_POD = msgspec.json.Decoder(Pod)


class PodAllocations:
    """``timeout``: seconds that the binding of a pod may take. ``wall`` tells the Unix time."""

    def __init__(
        self,
        kube: Kube,
        pods: PodWatch,
        nodes: NodeWatch,
        sweep: Sweep,
        timeout: float,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._kube = kube
        self._pods = pods
        self._nodes = nodes
        self._sweep = sweep
        self._timeout = timeout
        self._wall = wall
        self._served: dict[Key, StoredPod] = {}

    def due_all(self) -> Iterator[tuple[Key, float]]:
        """Yield every pod on which something is stale, or will be, and in how many seconds."""
        pods = self._pods.reflector.snapshot()
        self._served = {key: pod for key, pod in self._served.items() if pods.get(key) is pod}
        for key, pod in pods.items():
            delay = self.due(pod) if pod.allocation else None
            if delay is not None and self._served.get(key) is not pod:
                yield key, delay

    def due(self, pod: StoredPod) -> float | None:
        """Return in how many seconds something on a watched pod can first be stale; None: not unless it changes."""
        now = self._wall()
        since = first_stale(pod, self._is_known, now, self._timeout)
        return None if since is None else max(0.0, since - now)

    def look(self, key: Key) -> float | None:
        """Remove what is stale on a pod; return in how many seconds to look again, None: when it changes.

        The watch only says where to look. It may be behind, so nothing is removed but from the pod as it is stored.
        """
        pod = self._pods.reflector.get(key)
        if pod is None or self._served.get(key) is pod:
            return None
        delay = self.due(pod)
        if delay != 0:
            return delay
        again = retried(lambda: self._free(key))
        if again is None:
            self._served[key] = pod
        return again

    def _free(self, key: Key) -> float | None:
        path = f"/api/v1/namespaces/{segment(key.namespace)}/pods/{segment(key.name)}"
        try:
            raw = self._kube.get(path)
        except NotFound:
            return None
        stored = _POD.decode(raw)
        pod = read_stored(stored, self._pods.labels)
        if pod is None:
            return None
        now = self._wall()
        asking = _Asking(self._exists)
        removals = find_stale(pod, asking, now, self._timeout)
        if not removals:
            since = first_stale(pod, asking, now, self._timeout)
            if asking.refused:
                raise asking.refused
            return None if since is None else since - now
        subject = Subject("v1", "Pod", pod.name, pod.namespace, pod.uid, stored.metadata.resource_version)
        self._sweep.remove(Found(subject, path, removals))
        return None

    def _is_known(self, node: str) -> bool:
        return self._nodes.reflector.get(("", node)) is not None

    def _exists(self, node: str) -> bool:
        """Return whether there is such a node. That one is missing is believed of etcd alone, not of the watch."""
        if self._is_known(node):
            return True
        if not can_be_name(node):
            return False
        try:
            self._kube.get(f"/api/v1/nodes/{segment(node)}")
        except NotFound:
            return False
        return True


class _Asking:
    """Asks for nodes on behalf of one rule. An answer that is none leaves the other rules to be judged by.

    A node that the API server refuses to tell of counts as one that exists; ``refused`` is what it said.
    """

    def __init__(self, exists: Exists) -> None:
        self.refused: ApiError | None = None
        self._exists = exists

    def __call__(self, node: str) -> bool:
        """Return whether there is such a node, as far as is known."""
        try:
            return self._exists(node)
        except ApiError as error:
            self.refused = error
            return True
