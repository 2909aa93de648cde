"""The vcuda pods of the cluster, watched, and what the ledger wants to know of them."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator

import msgspec
import structlog

from vcuda.allocations.stored_claims import charged_by_pods
from vcuda.allocations.stored_pods import RequestCache, StoredPod, charges_of, read_stored
from vcuda.k8s_types import Pod
from vcuda.kube import Kube, Reflector
from vcuda.ledger.ledger import ObservedPods, Terminating, charges_by_model
from vcuda.placement import affinity, placement
from vcuda.requests.resources import BUILT_IN, GpuResources

REMEMBER_GONE_SECONDS = 180.0
"""For which the uid of a pod that is gone is kept, so that its pending charge is known to have been stored."""

PodChange = Callable[[StoredPod | None, StoredPod | None], None]
"""Called with a pod before and after: (None, new) is an arrival, (old, None) a departure."""

_POD = msgspec.json.Decoder(Pod)


class GoneUids:
    """The uids of what has gone lately, by namespace."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._in_order: deque[tuple[float, str, str]] = deque()
        self._by_namespace: dict[str, set[str]] = {}

    def add(self, namespace: str, uid: str) -> None:
        """Remember a uid, and forget what went too long ago."""
        now = self._clock()
        while self._in_order and self._in_order[0][0] <= now:
            _, home, old = self._in_order.popleft()
            self._by_namespace[home].discard(old)
            if not self._by_namespace[home]:
                del self._by_namespace[home]
        self._in_order.append((now + REMEMBER_GONE_SECONDS, namespace, uid))
        self._by_namespace.setdefault(namespace, set()).add(uid)

    def within(self, namespace: str) -> set[str]:
        """Return the uids of a namespace."""
        return set(self._by_namespace.get(namespace, ()))


class PodInformer:
    """All vcuda pods. Others are decoded and forgotten.

    ``on_change`` is called with the namespace of each pod that has ended or gone, and of all after a list;
    ``on_growth``, where there is one, with that of each pod that has come or is charged otherwise than before.

    A bound pod that goes without having ended has vanished: kubelet may let its containers run for its grace period,
    here at most ``max_terminating`` seconds. ``resources`` tells what pods can ask for; who changes that says so by
    `count_anew`.
    """

    def __init__(
        self,
        kube: Kube,
        labels: affinity.NodeLabels,
        on_change: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        max_terminating: float = math.inf,
        *,
        on_growth: Callable[[str], None] | None = None,
        resources: Callable[[], GpuResources] = lambda: BUILT_IN,
    ) -> None:
        self.labels = labels
        self._resources = resources
        # By which pods are decoded now; and by which all of the store were. Only the reflector's thread sets them.
        self._decoding = self._counted_by = resources()
        self._requests = RequestCache(self._decoding, labels)
        self._max_terminating = max_terminating
        self._followers: list[PodChange] = []
        self._on_change = on_change
        self._on_growth = on_growth or on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._log = structlog.get_logger()
        self._gone = GoneUids(clock)
        self._bound: dict[str, dict[str, StoredPod]] = {}
        self._vanished: dict[str, dict[str, tuple[StoredPod, float]]] = {}
        self.reflector = Reflector(
            kube,
            "/api/v1/pods",
            self.decode,
            on_event=self._on_event,
            on_listed=self._on_listed,
            on_listing=self._on_listing,
            page_size=1000,
        )

    def follow(self, on_change: PodChange) -> None:
        """Call back with every change of a vcuda pod; to be said before the watch starts."""
        self._followers.append(on_change)

    def count_anew(self) -> None:
        """Have all pods listed again, if they would be charged otherwise than they were."""
        # What a pod asks for is not kept, nor are those that asked for nothing which counted then.
        if not self._resources().counts_like(self._counted_by):
            self.reflector.list_again()

    @property
    def config_version(self) -> str:
        """The version of the ConfigMap, or an older one, by which all pods are counted."""
        known, counted_by = self._resources(), self._counted_by
        return (known if known.counts_like(counted_by) else counted_by).version

    def observed(self, namespace: str, nodes: placement.Nodes) -> ObservedPods:
        """Return what has been seen of a namespace's pods: what it counts is what there was at its version."""
        config_version = self.config_version
        with self._lock:
            bound = dict(self._bound.get(namespace, {}))
        # In one step. If the version were newer, a pod that came in between would be left out for good. If it were
        # older, another leader that has come to just this version could take that pod out of the count again.
        version, pods = self.reflector.versioned(namespace)
        stored = {pod.uid for pod in pods}
        with self._lock:
            gone = self._gone.within(namespace)
            vanished = self._vanished_now(namespace)
        # One that is out of the store before its event is told: else it would be charged nowhere for that moment.
        vanished += [pod for uid, pod in bound.items() if uid not in stored and uid not in gone]
        committed = charges_by_model(charges_of(pods, nodes))
        # The list last: one that is made meanwhile has changed what was read.
        terminating = dict(self._terminating(vanished, nodes))
        extended = charged_by_pods(pods, nodes)
        return ObservedPods(
            version, committed, stored | gone, terminating, self.since, config_version, extended=extended
        )

    @property
    def since(self) -> str:
        """The version from which on every departure was seen."""
        return self.reflector.listed_version

    def _vanished_now(self, namespace: str) -> list[StoredPod]:
        now = self._clock()
        left = {uid: entry for uid, entry in self._vanished.pop(namespace, {}).items() if entry[1] > now}
        if left:
            self._vanished[namespace] = left
        return [pod for pod, _ in left.values()]

    def _terminating(self, vanished: Iterable[StoredPod], nodes: placement.Nodes) -> Iterator[tuple[str, Terminating]]:
        for pod in vanished:
            seconds, model = self._seconds_of(pod), pod.model_on(nodes)
            if model and seconds:
                yield pod.uid, Terminating(model, pod.charge_on(nodes), seconds)

    def _seconds_of(self, pod: StoredPod) -> int:
        return int(min(pod.grace_seconds, self._max_terminating))

    def pods(self, namespace: str) -> list[StoredPod]:
        """Return a namespace's vcuda pods, finished ones too."""
        return self.reflector.within(namespace)

    def extended_claims(self, namespace: str, nodes: placement.Nodes) -> Collection[str]:
        """Return the names of the claims that the scheduler made for charged pods of a namespace."""
        return charged_by_pods(self.pods(namespace), nodes)

    def namespaces(self) -> Iterable[str]:
        """Return the namespaces that have vcuda pods."""
        return self.reflector.namespaces()

    def decode(self, raw: bytes, *, whole_keys: bool = False) -> StoredPod | None:
        """Return what is kept of a pod; None where it asks for nothing that is charged.

        ``whole_keys``: as `vcuda.allocations.stored_pods.read_allocation` has it, and only for a pod that is not kept.
        """
        return read_stored(_POD.decode(raw), self.labels, self._decoding, self._requests, whole_keys=whole_keys)

    def _on_listing(self) -> bool:
        self._decoding = self._resources()
        self._requests = RequestCache(self._decoding, self.labels)
        return not self._decoding.counts_like(self._counted_by)

    def _on_listed(self) -> None:
        self._counted_by = self._decoding
        # A count from before the list is compared with it once; from then on each decrease is one that was seen.
        for namespace in self.namespaces():
            self._on_change(namespace)

    def _on_event(self, old: StoredPod | None, new: StoredPod | None) -> None:
        changed = new or old
        if changed is None:
            return
        with self._lock:
            self._remember(changed, gone=new is None)
        if new and new.is_cut and not (old and old.is_cut):
            self._log.warning(
                "allocation on a pod is longer than any vendor writes: only its beginning is judged",
                namespace=new.namespace,
                pod=new.name,
                uid=new.uid,
            )
        if new is None or (old and old.live and not new.live):
            self._on_change(changed.namespace)
        elif old is None or _counted(old) != _counted(new):
            self._on_growth(changed.namespace)
        for follower in self._followers:
            follower(old, new)

    def _remember(self, pod: StoredPod, *, gone: bool) -> None:
        bound, now = self._bound.setdefault(pod.namespace, {}), self._clock()
        bound.pop(pod.uid, None)
        if pod.live and pod.node and not gone:
            bound[pod.uid] = pod
        if not bound:
            del self._bound[pod.namespace]
        if not gone:
            return
        self._gone.add(pod.namespace, pod.uid)
        if pod.live and pod.node:
            self._vanished.setdefault(pod.namespace, {})[pod.uid] = (pod, now + self._seconds_of(pod))


def _counted(pod: StoredPod) -> tuple[object, ...]:
    # By what the ledger counts a pod, and violations judge it. Most events are of other parts of its status.
    return pod.live, pod.charge, pod.model, pod.node, pod.terminating, pod.extended_claim
