"""Chooses the node and the cards of pods, and binds the pods.

The extender decides one placement (the node and the cards of a pod) at a time. It writes the placement into the journal
of the node, a ConfigMap, by compare-and-swap, and only then answers the scheduler. Before the extender binds a pod, it
also writes the pod's resourceVersion into the journal. The pod keeps its cards while the API server may still store
this binding. The binding contains the annotations for the device plugin, so the pod gets node and cards in one step.
"""

import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

import msgspec
import structlog

from controller.extender import metrics as extender_metrics, protocol, strategy
from controller.extender.cache import CardCache
from controller.extender.journal import TIMEOUT, Journal, JournalEntry, NodeJournal
from controller.extender.strategy import NodeCards, Placement
from controller.pods import pod_path
from vcuda.allocations import cards
from vcuda.allocations.cards import CardRequest, Cards, Unplaceable
from vcuda.errors import Conflict, NotFound, NotPlaced, Unavailable, UnreadableJournal, VcudaError
from vcuda.k8s_types import UNDECODABLE, Decoder, Pod
from vcuda.kube import Kube
from vcuda.ledger.ledger import is_older

MAX_ATTEMPTS = 4
"""The most attempts to place or bind one pod. An attempt fails if another process writes the same object meanwhile."""

DEADLINE_SECONDS = 12.0
"""The most seconds until the scheduler gets an answer: its httpTimeout of 15 s minus the 3 s of one API call."""

MIN_CALL_SECONDS = 0.2
"""If fewer seconds than this are left until the deadline, no API call is started, as it would probably time out."""

TURN_TIMEOUT_SECONDS = 5.0
"""The most seconds for which a request of the scheduler waits until the pods of earlier requests have nodes."""

_POD = Decoder(Pod)


class Deadline:
    """The deadline of one answer to the scheduler: `DEADLINE_SECONDS` after this object is created."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock() + DEADLINE_SECONDS

    def timeout(self) -> float:
        """Return the seconds that the next API call may take. Raises NotPlaced if too few seconds are left."""
        left = self._at - self._clock()
        if left < MIN_CALL_SECONDS:
            raise NotPlaced("timed out while placing or binding the pod; the scheduler retries")
        return min(TIMEOUT, left)


class Allocator:
    """Places and binds pods on request of kube-scheduler.

    ``unbound_seconds``: a pod that is not bound yet keeps its placement for at least this many seconds.
    ``model_of``: returns the GPU model of a node, given its name.
    ``now``: returns Unix time in nanoseconds.
    ``clock``: returns monotonic time in seconds.
    """

    def __init__(
        self,
        kube: Kube,
        cache: CardCache,
        journal: Journal,
        metrics: extender_metrics.ExtenderMetrics,
        *,
        unbound_seconds: float,
        model_of: Callable[[str], str | None],
        now: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._cache = cache
        self._journal = journal
        self._metrics = metrics
        self._unbound_seconds = unbound_seconds
        self._model_of = model_of
        self._now = now
        self._clock = clock
        self._turn = threading.Lock()
        self._unshown: frozenset[str] = frozenset()
        self._log = structlog.get_logger()

    def filter(self, args: protocol.ExtenderArgs) -> bytes:
        """Place a pod on one of the nodes, and return an ExtenderFilterResult that contains only this node.

        If an API call fails, the answer is an error, and the scheduler retries the pod.
        """
        deadline = Deadline(self._clock)
        request = cards.read_card_request(args.pod)
        if request is None:
            return args.passing(args.names)
        if isinstance(request, Unplaceable):
            return args.failing(dict.fromkeys(args.names, request))
        try:
            with self._alone():
                placed = self._place(args.pod, request, args.names, deadline)
        except VcudaError as error:
            self._metrics.placements.labels("error").inc()
            pod = f"{args.pod.metadata.namespace}/{args.pod.metadata.name}"
            self._log.warning("pod not placed", pod=pod, error=str(error))
            return args.failed(str(error))
        if isinstance(placed, str):
            self._metrics.placements.labels("placed").inc()
            return args.passing([placed])
        self._metrics.placements.labels("unplaceable").inc()
        return args.failing(placed)

    def preempt(self, args: protocol.PreemptionArgs) -> Mapping[str, protocol.Victims]:
        """Return the nodes where the pod fits after the scheduler's evictions, each with the pods to evict there."""
        # The scheduler chose the pods to evict by the total free cores and memory of a node. Leave out nodes where the
        # pod would still not fit on the individual cards.
        request = cards.read_card_request(args.pod)
        if request is None:
            return args.victims
        return {
            node: victims
            for node, victims in args.victims.items()
            if isinstance(request, CardRequest) and self._would_fit(args.pod, request, node, victims)
        }

    def scores(self, args: protocol.ExtenderArgs) -> dict[str, int]:
        """Return each node's score: 10 for a node without cards and 0 for a node with cards, as in gpu-admission."""
        # The scores keep other pods off nodes with cards. They do not affect vcuda pods: `filter` leaves only one node.
        known = self._cache.cards()
        return {name: 0 if isinstance(known.get(name), Cards) else 10 for name in args.names}

    def bind(self, args: protocol.BindingArgs) -> str:
        """Bind a pod to its node. Return why this failed, or an empty text. After a failure, the scheduler retries."""
        deadline = Deadline(self._clock)
        try:
            for _ in range(MAX_ATTEMPTS):
                pod = self._read(args, deadline.timeout())
                if _is_bound(pod, args.node) or self._binding_landed(pod, args, deadline):
                    self._metrics.bindings.labels("bound").inc()
                    return ""
            raise NotPlaced("the pod was changed during every attempt to bind it")
        except VcudaError as error:
            self._metrics.bindings.labels("error").inc()
            self._log.warning("pod not bound", pod=f"{args.namespace}/{args.name}", node=args.node, error=str(error))
            return str(error)

    def load(self) -> None:
        """Read the journals of all nodes, which contain the stored placements of pods. Raises Unavailable."""
        for journal in self._journal.read_all():
            self._cache.load(journal)

    def tidy(self) -> None:
        """Create missing journals. Remove expired placements, and journals of deleted nodes. Raises VcudaError."""
        self._forget_deleted()
        self._open(self._cache.unopened(), Deadline(self._clock))
        expired: dict[str, set[str]] = {node: set() for node in self._cache.outdated()}
        for node, entry in self._cache.entries():
            if self._has_expired(entry):
                expired.setdefault(node, set()).add(entry.uid)
        for node, uids in expired.items():
            with self._alone():
                self._write(node, Deadline(self._clock), without=uids)
        for node in self._cache.abandoned():
            if journal := self._cache.journal(node):
                # If another process has changed the journal (Conflict), do not delete the journal.
                with suppress(NotFound, Conflict):
                    self._journal.delete(journal)
                self._cache.close(node)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        # Placements are decided one at a time, because one of two concurrent writes of a journal would fail.
        if not self._turn.acquire(timeout=TURN_TIMEOUT_SECONDS):
            raise NotPlaced("placing other pods took too long; the scheduler retries")
        try:
            yield
        finally:
            self._turn.release()

    def _open(self, nodes: Iterable[str], deadline: Deadline) -> None:
        """Load the nodes' journals (stored placements). Create a missing journal from the pods bound to its node."""
        for node in nodes:
            try:
                journal = self._journal.write(NodeJournal(node, "", self._bound_before(node)), deadline.timeout())
            except Conflict:
                try:
                    journal = self._journal.read(node, deadline.timeout())
                except UnreadableJournal as error:  # Skip this node, because pods can still be placed on other nodes.
                    self._log.error("placements of a node cannot be read", node=node, error=str(error))
                    continue
            self._cache.load(journal)

    def _bound_before(self, node: str) -> dict[str, JournalEntry]:
        # Leave out a pod whose spec requires another GPU model than the node's, because kubelet rejects such a pod.
        model, now = self._model_of(node), self._seconds()
        return {
            pod.uid: JournalEntry(pod.uid, pod.namespace, pod.name, {0: pod.cards.shares}, now)
            for pod in self._cache.bound_to(node)
            if pod.live and pod.cards and pod.model in (None, model)
        }

    def _write(
        self, node: str, deadline: Deadline, entry: JournalEntry | None = None, without: Container[str] = ()
    ) -> bool:
        """Write a node's journal and return True. If another process has changed it, read it and return False."""
        journal = self._cache.journal(node)
        if journal is None:
            raise NotPlaced(f"the placements on {node} are not known yet")
        entries = {uid: each for uid, each in journal.entries.items() if uid not in without}
        if entry:
            entries[entry.uid] = entry
        try:
            # If this write of the journal times out, the cache keeps the old version of the journal. If the write was
            # stored after all, the next write, with the old version, fails with a Conflict.
            changed = msgspec.structs.replace(journal, entries=entries)
            self._cache.load(self._journal.write(changed, deadline.timeout()))
        except Conflict:
            self._cache.load(self._journal.read(node, deadline.timeout()))
            return False
        return True

    def _forget_deleted(self) -> None:
        # A pod may be created and deleted while the pod watch is interrupted. So this method reads a pod from the API
        # server if a journal has the pod, and the watch has not reported it during two calls of `tidy`.
        unshown = {
            entry.uid: entry
            for _, entry in self._cache.entries()
            if entry.ends is None and self._cache.pod(entry.uid) is None
        }
        for uid in self._unshown & unshown.keys():
            entry = unshown[uid]
            try:
                self._read(entry)
            except (VcudaError, *UNDECODABLE) as error:  # The next call of `tidy` reads the pod again, so only log.
                self._log.info("pod could not be read", pod=f"{entry.namespace}/{entry.name}", error=str(error))
        self._unshown = frozenset(unshown)

    def _has_expired(self, entry: JournalEntry) -> bool:
        if entry.ends is not None:
            return self._seconds() >= entry.ends
        pod = self._cache.pod(entry.uid)
        if pod is None or pod.node or self._seconds() < entry.placed + self._unbound_seconds:
            return False
        return not entry.may_be_bound(pod.version)

    def _read(self, of: JournalEntry | protocol.BindingArgs, timeout: float = TIMEOUT) -> Pod:
        # A binding needs the newest version of the pod, so read the pod from the API server and not from the watch.
        message = "the pod was deleted"
        try:
            pod = _POD.decode(self._kube.get(pod_path(of.namespace, of.name), timeout=timeout))
            if pod.metadata.uid == of.uid:
                return pod
            message = "the pod was deleted, and another pod has its name"
        except NotFound:
            pass
        # Trust only a uid from a journal. A wrong uid in a request to bind could remove another pod's placements.
        if isinstance(of, JournalEntry):
            self._cache.forget(of.uid)
        raise NotPlaced(message)

    def _seconds(self) -> int:
        return self._now() // 10**9

    def _would_fit(self, pod: Pod, request: CardRequest, node: str, victims: protocol.Victims) -> bool:
        # Cards that an earlier call has chosen for this pod count as free.
        found = self._cache.node_without(node, (*victims.uids, pod.metadata.uid))
        if not isinstance(found, Cards) or found.scheme is not request.scheme:
            return False
        return not isinstance(strategy.assign(found, request.containers), Unplaceable)

    def _place(
        self, pod: Pod, request: CardRequest, names: tuple[str, ...], deadline: Deadline
    ) -> str | Mapping[str, Unplaceable]:
        uid, version = pod.metadata.uid, self._version_of(pod)
        self._open(self._cache.unopened().intersection(names), deadline)
        for _ in range(MAX_ATTEMPTS):
            before = self._cache.entries_of(uid)
            for node in names:
                # A binding with these cards was sent, and may still be stored. So the pod must keep this placement.
                if node in before and before[node].may_be_bound(version):
                    return node
            found = self._choose(request, names, self._cache.without(uid), before)
            if not isinstance(found, Placement):
                return found
            metadata, shares = pod.metadata, found.assignment.shares
            entry = JournalEntry(uid, metadata.namespace, metadata.name, shares, self._seconds())
            if self._write(found.node, deadline, entry):
                self._leave(uid, version, found.node, deadline)
                return found.node
        raise NotPlaced("during each attempt to place the pod, another process placed pods on the same node")

    def _version_of(self, pod: Pod) -> str:
        """Return a pod's newest known resourceVersion. Raises NotPlaced if the pod is already bound or has ended."""
        watched, version = self._cache.pod(pod.metadata.uid), pod.metadata.resource_version
        if node := pod.spec.node_name or (watched.node if watched else ""):
            raise NotPlaced(f"the pod is bound to {node} already")
        if pod.has_ended or (watched and not watched.live):
            raise NotPlaced("the pod has ended")
        return watched.version if watched and is_older(version, watched.version) else version

    def _choose(
        self, request: CardRequest, names: tuple[str, ...], nodes: NodeCards, before: Mapping[str, JournalEntry]
    ) -> Placement | Mapping[str, Unplaceable]:
        # Prefer the node where an earlier call placed the pod, but choose the pod's cards again. When a container
        # starts, gpu-manager looks for the fullest card with enough room. If the annotation of the pod names another
        # card, gpu-manager rejects the container.
        for node in sorted(before.keys() & {*names}, key=lambda node: before[node].placed, reverse=True):
            found = strategy.bin_pack(request, (node,), nodes)
            if isinstance(found, Placement):
                return found
        return strategy.bin_pack(request, names, nodes)

    def _leave(self, uid: str, version: str, node: str, deadline: Deadline) -> None:
        # Remove the pod's placements on nodes other than `node`. A placement stays if the API server may still store
        # its binding, until the watch reports the outcome or the placement expires.
        for other, entry in self._cache.entries_of(uid).items():
            if other == node or entry.may_be_bound(version):
                continue
            try:
                self._write(other, deadline, without={uid})
            except VcudaError as error:
                self._log.info("earlier placement not removed yet", pod=entry.name, node=other, error=str(error))

    def _binding_landed(self, pod: Pod, args: protocol.BindingArgs, deadline: Deadline) -> bool:
        # Return False if the pod or the node's journal has changed after this process read it. `bind` then tries again.
        request, annotations = cards.read_card_request(pod), {}
        if isinstance(request, Unplaceable):
            raise NotPlaced(request.text)
        if request:
            entry = self._promise(pod, args, deadline)
            if entry is None:
                return False
            annotations = cards.allocating(request.scheme, args.node, entry.shares, self._now())
        elif not cards.names_cards(pod):
            raise NotPlaced("the pod requests no vcuda cards, so the extender does not bind it")
        try:
            self._send_binding(pod, args, annotations, deadline.timeout())
        except Conflict:
            return False
        except Unavailable as error:  # The binding may be stored although the API server sent no answer. Read the pod.
            if not _is_bound(self._read(args, deadline.timeout()), args.node):
                raise NotPlaced(f"the outcome of the binding is unknown: {error}") from error
        return True

    def _promise(self, pod: Pod, args: protocol.BindingArgs, deadline: Deadline) -> JournalEntry | None:
        """Record in the node's journal that this version of the pod is being bound. Return None after a Conflict."""
        with self._alone():
            entry = self._cache.entries_of(args.uid).get(args.node)
            if entry is None:
                with suppress(NotFound):  # Another leader may have placed the pod, so read the stored journal.
                    self._cache.load(self._journal.read(args.node, deadline.timeout()))
                entry = self._cache.entries_of(args.uid).get(args.node)
            if entry is None:
                raise NotPlaced(f"the pod is no longer placed on {args.node}")
            promised = msgspec.structs.replace(entry, binding=pod.metadata.resource_version)
            return promised if promised == entry or self._write(args.node, deadline, promised) else None

    def _send_binding(
        self, pod: Pod, args: protocol.BindingArgs, annotations: Mapping[str, str], timeout: float
    ) -> None:
        # With uid and resourceVersion, the API server binds only this version of the pod, and answers 409 for another
        # version. It writes the annotations in the same step (``BindingREST`` in ``pkg/registry/core/pod/storage``).
        metadata = {
            "name": args.name,
            "namespace": args.namespace,
            "uid": args.uid,
            "resourceVersion": pod.metadata.resource_version,
            "annotations": annotations,
        }
        target = {"apiVersion": "v1", "kind": "Node", "name": args.node}
        manifest = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
        path = f"{pod_path(args.namespace, args.name)}/binding"
        self._kube.post(path, msgspec.json.encode(manifest), timeout=timeout)


def _is_bound(pod: Pod, node: str) -> bool:
    """Return True if the pod is already bound to this node. Raises NotPlaced if it is bound to another node."""
    if pod.spec.node_name and pod.spec.node_name != node:
        raise NotPlaced(f"the pod is bound to {pod.spec.node_name} already")
    return bool(pod.spec.node_name)
