"""The vcuda pods of the cluster, watched, and what the ledger wants to know of them."""

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from vcuda.allocations.stored_pods import StoredPod, charges_of, read_stored
from vcuda.k8s_types import Pod
from vcuda.kube import Key, Kube, Reflector
from vcuda.ledger.ledger import ObservedPods, charges_by_model
from vcuda.placement import affinity, placement

REMEMBER_GONE_SECONDS = 180.0
"""For which the uid of a pod that is gone is kept, so that its pending charge is known to have been stored."""

PodChange = Callable[[StoredPod | None, StoredPod | None], None]
"""Called with a pod before and after: (None, new) is an arrival, (old, None) a departure."""

_POD = msgspec.json.Decoder(Pod)


class PodInformer:
    """All vcuda pods. Others are decoded and forgotten. ``on_change`` is called with the namespace of each change."""

    def __init__(
        self,
        kube: Kube,
        labels: affinity.NodeLabels,
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

    def observed(self, namespace: str, nodes: placement.Nodes) -> ObservedPods:
        """Return what has been seen of a namespace's pods. Its version is never newer than what it counts."""
        # The version first: a pod that comes in between is then counted by a version that does not promise it, while
        # the other way round its charge would be left out for good.
        version = self.reflector.resource_version
        pods = self.pods(namespace)
        with self._lock:
            gone = {uid for uid, (home, _) in self._gone.items() if home == namespace}
        return ObservedPods(version, charges_by_model(charges_of(pods, nodes)), {pod.uid for pod in pods} | gone)

    def pods(self, namespace: str) -> list[StoredPod]:
        """Return a namespace's vcuda pods, finished ones too."""
        return self._by_namespace().get(namespace, [])

    def namespaces(self) -> Iterable[str]:
        """Return the namespaces that have vcuda pods."""
        return list(self._by_namespace())

    def _by_namespace(self) -> dict[str, list[StoredPod]]:
        # The reflector's snapshot is the same object until something changes: then it is grouped anew, once.
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
                now = self._clock()
                # From the oldest on, in the order they went: to look through all each time would be quadratic.
                for uid in list(itertools.takewhile(lambda uid: self._gone[uid][1] <= now, self._gone)):
                    del self._gone[uid]
                self._gone[changed.uid] = (changed.namespace, now + REMEMBER_GONE_SECONDS)
        self._on_change(changed.namespace)
        for follower in self._followers:
            follower(old, new)
