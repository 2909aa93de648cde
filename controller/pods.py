"""The watch of the pods that use GPUs, and the data that the ledger needs of them.

Two kinds of pod are kept. Pods that request GPUs themselves are charged. Pods that use ResourceClaims are not charged;
`controller.claims` needs them to determine how long the devices of a claim may stay in use.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec
import structlog

from vcuda.allocations.stored_claims import charged_by_pods
from vcuda.allocations.stored_pods import (
    ClaimUser,
    RequestCache,
    StoredPod,
    charges_of,
    read_claim_user,
    read_stored,
)
from vcuda.k8s_types import Pod
from vcuda.kube import Kube, Reflector
from vcuda.ledger.ledger import LEAST_TERMINATING_SECONDS, Terminating, charges_by_model, long_grace, long_graces
from vcuda.ledger.settle import ObservedPods
from vcuda.placement import affinity
from vcuda.placement.nodes import Nodes
from vcuda.requests.resources import BUILT_IN, GpuResources

REMEMBER_GONE_SECONDS = 180.0
"""How long the uid of a deleted pod is remembered, so that its pending charge is known to have been stored."""

KeptPod = StoredPod | ClaimUser

PodChange = Callable[[StoredPod | None, StoredPod | None], None]
"""Called with a charged pod before and after a change: (None, new) if created, (old, None) if deleted."""

_POD = msgspec.json.Decoder(Pod)


class GoneUids:
    """The uids of recently deleted objects, by namespace."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._in_order: deque[tuple[float, str, str]] = deque()
        self._by_namespace: dict[str, set[str]] = {}

    def add(self, namespace: str, uid: str) -> None:
        """Remember a uid, and forget those that were deleted too long ago."""
        now = self._clock()
        while self._in_order and self._in_order[0][0] <= now:
            _, home, old = self._in_order.popleft()
            self._by_namespace[home].discard(old)
            if not self._by_namespace[home]:
                del self._by_namespace[home]
        self._in_order.append((now + REMEMBER_GONE_SECONDS, namespace, uid))
        self._by_namespace.setdefault(namespace, set()).add(uid)

    def within(self, namespace: str) -> set[str]:
        return set(self._by_namespace.get(namespace, ()))


class PodLives(msgspec.Struct, frozen=True):
    """The pods of one namespace that may run, as of one version of the watch.

    ``version``: the newest resourceVersion that is included.
    ``stored``: the stored pods, by uid.
    ``vanished``: the bound pods that were deleted before they had ended and may still run, by uid.
    ``gone``: the uids of all recently deleted pods.
    ``untold``: the bound pods that are deleted in the store but whose event was not handled yet, by uid.
    """

    version: str
    stored: Mapping[str, KeptPod]
    vanished: Mapping[str, KeptPod]
    gone: Collection[str]
    untold: Mapping[str, KeptPod]


class PodInformer:
    """All pods that use GPUs. Other pods are decoded and dropped.

    ``on_change``: called with the namespace of each pod that has ended or was deleted, and of all pods after a list.
    ``on_growth``: called with the namespace of each pod that is new or whose charge has changed.
    ``max_terminating``: the most seconds for which a deleted pod may run.
    ``resources``: returns the GPU resources of pods. The caller must call `list_again` after they change.

    A bound pod that is deleted without having ended has *vanished*: kubelet may let its containers run for its grace
    period.
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
        # The resources by which pods are decoded now, and those by which all stored pods were decoded. Only the
        # reflector's thread sets these two.
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
        self._bound: dict[str, dict[str, KeptPod]] = {}
        self._vanished: dict[str, dict[str, tuple[KeptPod, float]]] = {}
        self.reflector: Reflector[KeptPod] = Reflector(
            kube,
            "/api/v1/pods",
            self.decode,
            on_event=self._on_event,
            on_listed=self._on_listed,
            on_listing=self._on_listing,
            page_size=1000,
        )

    def follow(self, on_change: PodChange) -> None:
        """Call ``on_change`` for every change of a charged pod. Must be called before the watch starts."""
        self._followers.append(on_change)

    def list_again(self) -> None:
        """List all pods again if the resources have changed in a way that changes charges."""
        # The store keeps neither the requests of a pod nor the pods that used no GPU by the old resources.
        if not self.counts_as_now:
            self.reflector.list_again()

    @property
    def counts_as_now(self) -> bool:
        """Whether all pods are counted as the current resources charge them."""
        return self._resources().counts_like(self._counted_by)

    @property
    def config_version(self) -> str:
        """The version of the quota ConfigMap by which all pods are counted; it may be older than the current one."""
        known, counted_by = self._resources(), self._counted_by
        return (known if known.counts_like(counted_by) else counted_by).version

    def observed(self, namespace: str, nodes: Nodes) -> ObservedPods:
        """Return the namespace's pods as the ledger needs them: the charges as they were at one version."""
        config_version = self.config_version
        lives = self.lives(namespace)
        pods = [pod for pod in lives.stored.values() if isinstance(pod, StoredPod)]
        # A pod that was deleted from the store counts as vanished even before its event is handled.
        vanished = [*lives.vanished.values(), *lives.untold.values()]
        # The claim of a vanished pod may still exist, and may be deleted while no watch is open.
        live = (pod for pod in (*lives.stored.values(), *vanished) if pod.live)
        users = (pod for pod in live if isinstance(pod, ClaimUser) or pod.uses_claims)
        return ObservedPods(
            lives.version,
            charges_by_model(charges_of(pods, nodes)),
            {*lives.stored, *lives.gone},
            dict(self._terminating(vanished, nodes)),
            self.since,
            config_version,
            extended=charged_by_pods(pods, nodes),
            graces=long_graces((pod.model_on(nodes) or "", self.seconds_of(pod)) for pod in pods if pod.live),
            claim_grace=long_grace(self.seconds_of(pod) for pod in users),
            gone=lives.gone,
        )

    def lives(self, namespace: str) -> PodLives:
        """Return the pods of a namespace that may run."""
        with self._lock:
            bound = dict(self._bound.get(namespace, {}))
        # The version and the pods are read in one step. If the version were newer, a pod created in between would never
        # be counted. If it were older, a leader whose watch is at just this version could uncount that pod.
        version, pods = self.reflector.versioned(namespace)
        stored = {pod.uid: pod for pod in pods}
        # Read these last, so that they include the events that were handled in between.
        with self._lock:
            gone = self._gone.within(namespace)
            vanished = self._vanished_now(namespace)
        untold = {uid: pod for uid, pod in bound.items() if uid not in stored and uid not in gone}
        return PodLives(version, stored, vanished, gone, untold)

    @property
    def since(self) -> str:
        """The version since which the watch has seen every deletion."""
        return self.reflector.listed_version

    def _vanished_now(self, namespace: str) -> dict[str, KeptPod]:
        now = self._clock()
        left = {uid: entry for uid, entry in self._vanished.pop(namespace, {}).items() if entry[1] > now}
        if left:
            self._vanished[namespace] = left
        return {uid: pod for uid, (pod, _) in left.items()}

    def _terminating(self, vanished: Iterable[KeptPod], nodes: Nodes) -> Iterator[tuple[str, Terminating]]:
        for pod in vanished:
            seconds, model = self.seconds_of(pod), pod.model_on(nodes) if isinstance(pod, StoredPod) else None
            if isinstance(pod, StoredPod) and model and seconds:
                yield pod.uid, Terminating(model, pod.charge_on(nodes), seconds)

    def seconds_of(self, pod: KeptPod) -> int:
        """Return the seconds for which a pod's containers may run after it was deleted."""
        return int(min(max(pod.grace_seconds, LEAST_TERMINATING_SECONDS), self._max_terminating))

    def pods(self, namespace: str) -> list[StoredPod]:
        """Return a namespace's charged pods, finished ones too."""
        return [pod for pod in self.reflector.within(namespace) if isinstance(pod, StoredPod)]

    def pod(self, namespace: str, name: str) -> StoredPod | None:
        found = self.reflector.get((namespace, name))
        return found if isinstance(found, StoredPod) else None

    def all_pods(self) -> Iterator[StoredPod]:
        """Yield the charged pods of every namespace, finished ones too."""
        return (pod for pod in self.reflector.snapshot().values() if isinstance(pod, StoredPod))

    def nodes_in_use(self) -> Collection[str]:
        """Return the nodes on which pods that use GPUs may run, also pods that were deleted a moment ago."""
        with self._lock:
            bound = [pod.node for pods in self._bound.values() for pod in pods.values()]
            gone = [pod.node for namespace in (*self._vanished,) for pod in self._vanished_now(namespace).values()]
        return {*bound, *gone}

    def extended_claims(self, namespace: str, nodes: Nodes) -> Collection[str]:
        """Return the names of the claims that the scheduler made for charged pods of a namespace."""
        return charged_by_pods(self.pods(namespace), nodes)

    def namespaces(self) -> Iterable[str]:
        return self.reflector.namespaces()

    def decode_charged(self, raw: bytes) -> StoredPod | None:
        """Return the decoded pod with all keys of its allocation; None if it is not charged."""
        return read_stored(_POD.decode(raw), self.labels, self._decoding, self._requests, whole_keys=True)

    def decode(self, raw: bytes) -> KeptPod | None:
        """Return the data that is kept of a pod; None if it uses no GPU."""
        pod = _POD.decode(raw)
        return read_stored(pod, self.labels, self._decoding, self._requests) or read_claim_user(pod)

    def _on_listing(self) -> bool:
        self._decoding = self._resources()
        self._requests = RequestCache(self._decoding, self.labels)
        return not self._decoding.counts_like(self._counted_by)

    def _on_listed(self) -> None:
        self._counted_by = self._decoding
        # Each namespace is settled once after a list, because decreases before it were not seen.
        for namespace in self.namespaces():
            self._on_change(namespace)

    def _on_event(self, old: KeptPod | None, new: KeptPod | None) -> None:
        changed = new or old
        if changed is None:
            return
        with self._lock:
            self._remember(changed, gone=new is None)
        if new is None or (old and old.live and not new.live):
            self._on_change(changed.namespace)
        elif old is None or _counted(old) != _counted(new):
            self._on_growth(changed.namespace)
        before, after = (pod if isinstance(pod, StoredPod) else None for pod in (old, new))
        if before or after:
            self._tell(before, after)

    def _tell(self, old: StoredPod | None, new: StoredPod | None) -> None:
        if new and new.is_cut and not (old and old.is_cut):
            self._log.warning(
                "allocation annotation is longer than any vendor writes; only its beginning is checked",
                namespace=new.namespace,
                pod=new.name,
                uid=new.uid,
            )
        for follower in self._followers:
            follower(old, new)

    def _remember(self, pod: KeptPod, *, gone: bool) -> None:
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
            self._vanished.setdefault(pod.namespace, {})[pod.uid] = (pod, now + self.seconds_of(pod))


def _counted(pod: KeptPod) -> tuple[object, ...]:
    # These are the fields that the ledger and `violations` use. Most events change only other parts of the status.
    lasting = pod.live, pod.node, pod.terminating, pod.grace_seconds
    return (*lasting, pod.charge, pod.model, pod.extended_claim) if isinstance(pod, StoredPod) else lasting
