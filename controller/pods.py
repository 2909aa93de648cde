"""Watches the pods that use GPUs and returns their charges, from which the controller recounts the ledgers.

Two kinds of pod are kept. Pods that request GPUs are charged. Pods that only use ResourceClaims are not charged. Module
`controller.claims` needs the second kind to determine how long the devices of a claim may stay in use.
"""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec
import structlog

from controller.lingering import FullUntil, Lingering
from vcuda.allocations.stored_claims import charged_by_pods
from vcuda.allocations.stored_pods import ClaimUser, RequestCache, StoredPod, charges_of, read_claim_user, read_stored
from vcuda.k8s_types import Decoder, Pod
from vcuda.kube import Kube, Reflector, segment
from vcuda.ledger.ledger import (
    FULL,
    MIN_TERMINATING_SECONDS,
    Terminating,
    charges_by_model,
    is_older,
    long_grace,
    long_graces,
)
from vcuda.ledger.recount import ObservedPods
from vcuda.placement import affinity
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import CORES_PER_CARD, Charge
from vcuda.quota.values import MAX_CARDS, MAX_MEMORY
from vcuda.requests.resources import BUILT_IN, GpuResources

REMEMBER_GONE_SECONDS = 180.0
"""Seconds for which a deleted pod's uid is kept. It proves that a pod with a pending charge was stored and deleted."""

MAX_GONE = 32_768
"""The most uids of deleted objects that are kept. If a uid is forgotten early, its pod's charge is released later."""

EVERY_CARD = Charge(MAX_CARDS * CORES_PER_CARD, MAX_MEMORY)
"""A charge as large as the largest possible limit."""

KeptPod = StoredPod | ClaimUser

PodChange = Callable[[StoredPod | None, StoredPod | None], None]
"""A callback for a charged pod: (old, new) after a change, (None, new) if created, (old, None) if deleted."""

_POD = Decoder(Pod)


def pod_path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{segment(namespace)}/pods/{segment(name)}"


class GoneUids:
    """The uids of recently deleted objects, by namespace."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._in_order: deque[tuple[float, str, str]] = deque()
        # A deletion may be reported twice. So the reports of each uid are counted, and it stays until the last is old.
        self._by_namespace: dict[str, Counter[str]] = {}

    def add(self, namespace: str, uid: str) -> None:
        """Remember a uid. Forget uids that are older than REMEMBER_GONE_SECONDS, and the oldest beyond `MAX_GONE`."""
        now = self._clock()
        while self._in_order and (self._in_order[0][0] <= now or len(self._in_order) >= MAX_GONE):
            _, home, old = self._in_order.popleft()
            uids = self._by_namespace[home]
            uids[old] -= 1
            if not uids[old]:
                del uids[old]
            if not uids:
                del self._by_namespace[home]
        self._in_order.append((now + REMEMBER_GONE_SECONDS, namespace, uid))
        self._by_namespace.setdefault(namespace, Counter())[uid] += 1

    def has(self, namespace: str, uid: str) -> bool:
        return uid in self._by_namespace.get(namespace, ())

    def within(self, namespace: str) -> set[str]:
        return set(self._by_namespace.get(namespace, ()))


class PodLives(msgspec.Struct, frozen=True):
    """The pods of one namespace that may run, as the pod watch shows them at one resourceVersion.

    ``version``: the resourceVersion.
    ``stored``: the stored pods, by uid.
    ``vanished``: bound pods, by uid, that were deleted before their containers had ended and that may still run.
    ``gone``: the uids of all recently deleted pods.
    ``unhandled``: bound pods, by uid, whose deletion the watch has received but not handled yet.
    """

    version: str
    stored: Mapping[str, KeptPod]
    vanished: Mapping[str, KeptPod]
    gone: Collection[str]
    unhandled: Mapping[str, KeptPod]


class PodInformer:
    """The watch of all pods that use GPUs. Other pods are decoded and dropped.

    ``on_change``: called with the namespace of each ended or deleted pod. After a LIST, called with every namespace.
    ``on_growth``: called with the namespace of each pod that is new, or whose charge, node or grace period has changed.
    ``max_terminating_seconds``: the maximum number of seconds for which a deleted pod is assumed to run.
    ``resources``: returns the GPU resources that pods can request. After a change, the caller must call `list_again`.

    A bound pod has *vanished* if it was deleted before its containers had ended. They may run for its grace period.
    """

    def __init__(
        self,
        kube: Kube,
        labels: affinity.NodeLabels,
        on_change: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        max_terminating_seconds: float = math.inf,
        *,
        on_growth: Callable[[str], None] | None = None,
        resources: Callable[[], GpuResources] = lambda: BUILT_IN,
    ) -> None:
        self.labels = labels
        self._resources = resources
        # `_decoding`: the GPU resources that are recognized in new events. `_counted_by`: the GPU resources by which
        # all kept pods were decoded. Only the reflector's thread sets these two fields.
        self._decoding = self._counted_by = resources()
        self._requests = RequestCache(self._decoding, labels)
        self.max_terminating_seconds = max_terminating_seconds
        self._followers: list[PodChange] = []
        self._on_change = on_change
        self._on_growth = on_growth or on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._log = structlog.get_logger()
        self._gone = GoneUids(clock)
        self._bound: dict[str, dict[str, KeptPod]] = {}
        self.full = FullUntil(clock)
        self._vanished: Lingering[KeptPod] = Lingering(clock, self.full)
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
        """List all pods again if the GPU resources have changed in a way that can change the charges of pods."""
        # A new LIST is needed, because this process keeps neither the resource requests of pods nor pods without GPUs.
        if not self.counts_as_now:
            self.reflector.list_again()

    @property
    def counts_as_now(self) -> bool:
        """True if every pod's charge was computed with the current GPU resources."""
        return self._resources().counts_like(self._counted_by)

    @property
    def config_version(self) -> str:
        """The version of the quota ConfigMap by which all charges were computed. A newer version may exist."""
        known, counted_by = self._resources(), self._counted_by
        return (known if known.counts_like(counted_by) else counted_by).version

    def observed(self, namespace: str, nodes: Nodes) -> ObservedPods:
        """Return the charges of a namespace's pods at one resourceVersion, for recounting its ledger.

        Raises Unavailable while a pod of the namespace cannot be decoded, because its charge is unknown.
        """
        self.reflector.check_read(namespace)
        config_version = self.config_version
        # The caller may have read the nodes under an older quota document, which names fewer GPU models.
        if nodes.version and is_older(nodes.version, config_version):
            config_version = nodes.version
        lives = self.lives(namespace)
        pods = [pod for pod in lives.stored.values() if isinstance(pod, StoredPod)]
        # Pods that were deleted while they ran count as vanished, even if the event of the deletion is not handled yet.
        vanished = [*lives.vanished.values(), *lives.unhandled.values()]
        # The ledger stores the longest grace period of all pods that use claims. After a gap in the watch, a missing
        # claim stays charged for this time. A deleted pod still uses its claims while its
        # containers may run, so `live` includes this pod.
        live = (pod for pod in (*lives.stored.values(), *vanished) if pod.live)
        users = (pod for pod in live if isinstance(pod, ClaimUser) or pod.uses_claims)
        return ObservedPods(
            lives.version,
            charges_by_model(charges_of(pods, nodes)),
            {*lives.stored, *lives.gone},
            {**dict(self._terminating(vanished, nodes)), **self._filling(namespace, nodes)},
            self.since,
            config_version=config_version,
            extended=charged_by_pods(pods, nodes),
            graces=long_graces((pod.model_on(nodes) or "", self.seconds_of(pod)) for pod in pods if pod.live),
            claim_grace=long_grace(self.seconds_of(pod) for pod in users),
            gone=lives.gone,
        )

    def lives(self, namespace: str) -> PodLives:
        with self._lock:
            bound = dict(self._bound.get(namespace, {}))
        # The resourceVersion and the pods are read in one step, so that they agree. If the version were newer, a pod
        # created in between would never be charged. If it were older, another leader could release the pod's charge.
        version, pods = self.reflector.versioned(namespace)
        stored = {pod.uid: pod for pod in pods}
        # Read `gone` and `vanished` after the pods. Otherwise, a deletion that is handled in between would be missing.
        with self._lock:
            gone = self._gone.within(namespace)
            vanished = self._vanished.within(namespace)
        unhandled = {uid: pod for uid, pod in bound.items() if uid not in stored and uid not in gone}
        return PodLives(version, stored, vanished, gone, unhandled)

    @property
    def since(self) -> str:
        """The resourceVersion of the LIST with which the watch began. The watch has seen every later deletion."""
        return self.reflector.listed_version

    def _terminating(self, vanished: Iterable[KeptPod], nodes: Nodes) -> Iterator[tuple[str, Terminating]]:
        for pod in vanished:
            seconds, model = self.seconds_of(pod), pod.model_on(nodes) if isinstance(pod, StoredPod) else None
            if isinstance(pod, StoredPod) and model and seconds:
                yield pod.uid, Terminating(model, pod.charge_on(nodes), seconds)

    def _filling(self, namespace: str, nodes: Nodes) -> Mapping[str, Terminating]:
        """If too many pods and claims of the namespace were deleted, return charges that use up its whole quota."""
        until = self.full.of(namespace)
        if (left := until - self._clock()) <= 0:
            return {}
        # The key contains the end of the charge. If an earlier charge had the same key, the ledger would keep its end.
        filling = {model: Terminating(model, EVERY_CARD, math.ceil(left)) for model in nodes.models}
        return {f"{model}{FULL}{until:.0f}": each for model, each in filling.items()}

    def seconds_of(self, pod: KeptPod) -> int:
        """Return for how many seconds the containers of a pod may run after its deletion."""
        return int(min(max(pod.grace_seconds, MIN_TERMINATING_SECONDS), self.max_terminating_seconds))

    def pods(self, namespace: str) -> list[StoredPod]:
        """Return a namespace's pods that request GPUs, including finished pods."""
        return [pod for pod in self.reflector.within(namespace) if isinstance(pod, StoredPod)]

    def pod(self, namespace: str, name: str) -> StoredPod | None:
        found = self.reflector.get((namespace, name))
        return found if isinstance(found, StoredPod) else None

    def all_pods(self) -> Iterator[StoredPod]:
        """Yield the pods of all namespaces that request GPUs, including finished pods."""
        return (pod for pod in self.reflector.snapshot().values() if isinstance(pod, StoredPod))

    def nodes_in_use(self) -> Collection[str]:
        """Return the nodes on which pods that use GPUs may run, including recently deleted pods."""
        with self._lock:
            bound = [pod.node for pods in self._bound.values() for pod in pods.values()]
        return {*bound, *(pod.node for pod in self._vanished.all())}

    def extended_claims(self, namespace: str, nodes: Nodes) -> Collection[str]:
        return charged_by_pods(self.pods(namespace), nodes)

    def namespaces(self) -> Iterable[str]:
        return self.reflector.namespaces()

    def decode_with_allocations(self, raw: bytes) -> StoredPod | None:
        """Return the decoded pod with all keys of its allocation annotations; None if the pod requests no GPU."""
        return read_stored(_POD.decode(raw), self.labels, self._decoding, self._requests, whole_keys=True)

    def decode(self, raw: bytes) -> KeptPod | None:
        """Return the data of a pod that are kept in memory; None if the pod uses no GPU."""
        pod = _POD.decode(raw)
        return read_stored(pod, self.labels, self._decoding, self._requests) or read_claim_user(pod)

    def _on_listing(self) -> bool:
        self._decoding = self._resources()
        self._requests = RequestCache(self._decoding, self.labels)
        return not self._decoding.counts_like(self._counted_by)

    def _on_listed(self) -> None:
        self._counted_by = self._decoding
        # After a LIST, recount every ledger, because the deletion of a pod before the LIST may have caused no event.
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
            self._call_followers(before, after)

    def _call_followers(self, old: StoredPod | None, new: StoredPod | None) -> None:
        if new and new.is_cut and not (old and old.is_cut):
            self._log.warning(
                "the pod has a longer allocation annotation than vendors write. Only the beginning is checked",
                namespace=new.namespace,
                pod=new.name,
                uid=new.uid,
            )
        for follower in self._followers:
            follower(old, new)

    def _remember(self, pod: KeptPod, *, gone: bool) -> None:
        bound = self._bound.setdefault(pod.namespace, {})
        bound.pop(pod.uid, None)
        if pod.live and pod.node and not gone:
            bound[pod.uid] = pod
        if not bound:
            del self._bound[pod.namespace]
        if not gone:
            return
        self._gone.add(pod.namespace, pod.uid)
        if pod.live and pod.node:
            self._vanished.add(pod.namespace, pod.uid, _charged_part(pod), self._clock() + self.seconds_of(pod))


def _charged_part(pod: KeptPod) -> KeptPod:
    """Return a deleted pod without the texts that its charge does not need."""
    if isinstance(pod, StoredPod):
        return msgspec.structs.replace(pod, name="", allocation=None, cards=None)
    return msgspec.structs.replace(pod, name="")


def _counted(pod: KeptPod) -> tuple[object, ...]:
    # The ledger and the search for pods over quota depend only on these fields. Most events change none of them.
    lasting = pod.live, pod.node, pod.terminating, pod.grace_seconds
    return (*lasting, pod.charge, pod.model, pod.extended_claim) if isinstance(pod, StoredPod) else lasting
