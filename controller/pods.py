"""The vcuda pods of the cluster, watched, and what the ledger wants to know of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from vcuda.allocations.stored_pods import StoredPod, charges_of, read_stored
from vcuda.k8s_types import Pod
from vcuda.kube import Key, Kube, Reflector
from vcuda.ledger.ledger import ObservedPods
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.placement import Nodes
from vcuda.quota.model import Charge

REMEMBER_GONE = 180.0
"""Seconds for which the uid of a pod that is gone is kept, so that its pending charge is known to have been stored."""

PodChange = Callable[[StoredPod | None, StoredPod | None], None]
"""Called with a pod before and after: (None, new) is an arrival, (old, None) a departure."""

_POD = msgspec.json.Decoder(Pod)


class PodInformer:
    """All vcuda pods. Others are decoded and forgotten. ``on_change`` is called with the namespace of each change."""

    def __init__(
        self,
        kube: Kube,
        labels: NodeLabels,
        on_change: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.labels = labels
        self._followers: list[PodChange] = []
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._gone: dict[str, tuple[str, float]] = {}
        self._grouped: tuple[Mapping[Key, StoredPod] | None, dict[str, list[StoredPod]]] = (None, {})
        self.reflector = Reflector(kube, "/api/v1/pods", self._decode, on_event=self._on_event, page_size=1000)

    def follow(self, on_change: PodChange) -> None:
        """Call back with every change of a vcuda pod; to be said before the watch starts."""
        self._followers.append(on_change)

    def view(self, namespace: str, nodes: Nodes) -> ObservedPods:
        """Return what has been seen of a namespace's pods. Its version is never newer than what it counts."""
        version = self.reflector.resource_version
        pods = self.pods(namespace)
        committed: dict[str, Charge] = {}
        for model, charge in charges_of(pods, nodes):
            committed[model] = committed.get(model, Charge()) + charge
        return ObservedPods(version, committed, {pod.uid for pod in pods} | self._gone_from(namespace))

    def pods(self, namespace: str) -> list[StoredPod]:
        """Return a namespace's vcuda pods, finished ones too."""
        return self._by_namespace().get(namespace, [])

    def namespaces(self) -> Iterable[str]:
        """Return the namespaces that have vcuda pods."""
        return list(self._by_namespace())

    def _by_namespace(self) -> dict[str, list[StoredPod]]:
        snapshot = self.reflector.snapshot()
        with self._lock:
            known, grouped = self._grouped
            if known is not snapshot:
                grouped = {}
                for pod in snapshot.values():
                    grouped.setdefault(pod.namespace, []).append(pod)
                self._grouped = (snapshot, grouped)
            return grouped

    def _decode(self, raw: bytes) -> StoredPod | None:
        return read_stored(_POD.decode(raw), self.labels)

    def _on_event(self, old: StoredPod | None, new: StoredPod | None) -> None:
        changed = new or old
        if changed is None:
            return
        if new is None:
            with self._lock:
                self._forget_old()
                self._gone[changed.uid] = (changed.namespace, self._clock() + REMEMBER_GONE)
        self._on_change(changed.namespace)
        for follower in self._followers:
            follower(old, new)

    def _gone_from(self, namespace: str) -> set[str]:
        with self._lock:
            return {uid for uid, (home, _) in self._gone.items() if home == namespace}

    def _forget_old(self) -> None:
        now = self._clock()
        while self._gone:
            uid = next(iter(self._gone))
            if self._gone[uid][1] > now:
                return
            del self._gone[uid]
