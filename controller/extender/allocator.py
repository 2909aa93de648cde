"""Gives pods their node and cards, and binds them.

A placement is decided alone and written into the journal of its node by compare-and-swap; only then is the scheduler
answered. A binding is written there too, with the resourceVersion of the pod that it is for, before it is sent. It
carries the annotations that the device plugin reads, so that a pod's node and its cards cannot be told apart.
"""

import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

import msgspec
import structlog

from controller.extender import protocol, publish, strategy
from controller.extender.cache import CardCache
from controller.extender.journal import TIMEOUT, Journal, JournalEntry, NodeJournal
from controller.extender.strategy import NodeCards, Placement, Strategy
from vcuda.allocations import cards
from vcuda.allocations.cards import CardRequest, Cards, Unplaceable
from vcuda.errors import Conflict, NotFound, NotPlaced, Unavailable, UnreadableJournal, VcudaError
from vcuda.k8s_types import UNDECODABLE, Pod
from vcuda.kube import Kube, segment
from vcuda.ledger.ledger import is_older

MAX_ATTEMPTS = 4
"""How often one call places or binds a pod where others write the same journal or pod meanwhile."""

DEADLINE_SECONDS = 12.0
"""For one answer, whatever fails: fewer than the scheduler's httpTimeout, 15, by more than one call takes."""

MIN_CALL_SECONDS = 0.2
"""With fewer a call is not begun: it would only be left without an answer."""

TURN_TIMEOUT_SECONDS = 5.0
"""For which a call waits for the decisions before it."""

_POD = msgspec.json.Decoder(Pod)


class Deadline:
    """When an answer is due, ``DEADLINE_SECONDS`` from now. ``clock`` only runs forward, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock() + DEADLINE_SECONDS

    def timeout(self) -> float:
        """Return the seconds that the next call may take; raises NotPlaced where too few are left."""
        left = self._at - self._clock()
        if left < MIN_CALL_SECONDS:
            raise NotPlaced("there was no time left to place the pod")
        return min(TIMEOUT, left)


class Allocator:
    """Answers what kube-scheduler asks.

    ``unbound_seconds``: for which a pod that is not bound keeps what it was given, at least. ``model_of`` is the model
    of a node. ``now`` is Unix time in nanoseconds; ``clock`` is in seconds, and only runs forward.
    """

    def __init__(
        self,
        kube: Kube,
        cache: CardCache,
        journal: Journal,
        metrics: publish.ExtenderMetrics,
        *,
        unbound_seconds: float,
        model_of: Callable[[str], str | None],
        choose: Strategy = strategy.bin_pack,
        now: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._cache = cache
        self._journal = journal
        self._metrics = metrics
        self._unbound_seconds = unbound_seconds
        self._model_of = model_of
        self._strategy = choose
        self._now = now
        self._clock = clock
        self._turn = threading.Lock()
        self._unshown: frozenset[str] = frozenset()
        self._log = structlog.get_logger()

    def filter(self, args: protocol.ExtenderArgs) -> bytes:
        """Place the pod on one of the nodes, and return the ExtenderFilterResult that says so.

        Where nothing could be decided the answer is an error, on which the scheduler tries the pod again.
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
            self._log.warning("not placed", pod=pod, error=str(error))
            return args.failed(str(error))
        if isinstance(placed, str):
            self._metrics.placements.labels("placed").inc()
            return args.passing([placed])
        self._metrics.placements.labels("unplaceable").inc()
        return args.failing(placed)

    def preempt(self, args: protocol.PreemptionArgs) -> Mapping[str, protocol.Victims]:
        """Return the nodes on which the pod would fit on cards once its victims are gone."""
        # The scheduler has chosen them by sums alone. Where they make no room on any one card, nobody is evicted.
        request = cards.read_card_request(args.pod)
        if request is None:
            return args.victims
        return {
            node: victims
            for node, victims in args.victims.items()
            if isinstance(request, CardRequest) and self._would_fit(args.pod, request, node, victims)
        }

    def scores(self, args: protocol.ExtenderArgs) -> dict[str, int]:
        """Return 10 for a node without cards and 0 for one with, as gpu-admission."""
        # So other pods leave the nodes with cards to those that need them; a vcuda pod has one node left by now.
        known = self._cache.cards()
        return {name: 0 if isinstance(known.get(name), Cards) else 10 for name in args.names}

    def bind(self, args: protocol.BindingArgs) -> str:
        """Bind the pod; return why that was not done, and nothing where it was: then the scheduler tries it again."""
        deadline = Deadline(self._clock)
        try:
            for _ in range(MAX_ATTEMPTS):
                pod = self._read(args, deadline.timeout())
                if _is_bound(pod, args.node) or self._binding_landed(pod, args, deadline):
                    self._metrics.bindings.labels("bound").inc()
                    return ""
            raise NotPlaced("the pod changes too often")
        except VcudaError as error:
            self._metrics.bindings.labels("error").inc()
            self._log.warning("not bound", pod=f"{args.namespace}/{args.name}", node=args.node, error=str(error))
            return str(error)

    def load(self) -> None:
        """Read the journals of all nodes. Raises Unavailable."""
        for journal in self._journal.read_all():
            self._cache.load(journal)

    def tidy(self) -> None:
        """Make the journals that are missing, and take from the others what counts no more. Raises VcudaError."""
        self._forget_gone()
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
                with suppress(NotFound, Conflict):  # who has written it meanwhile knows the node
                    self._journal.delete(journal)
                self._cache.close(node)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        # One decision at a time: else two would decide on one version, and one of them in vain.
        if not self._turn.acquire(timeout=TURN_TIMEOUT_SECONDS):
            raise NotPlaced("placements before this one take too long")
        try:
            yield
        finally:
            self._turn.release()

    # The journals

    def _open(self, nodes: Iterable[str], deadline: Deadline) -> None:
        """Make the journals of nodes that have none, with what is bound there; read those that others have made."""
        for node in nodes:
            try:
                journal = self._journal.write(NodeJournal(node, "", self._bound_before(node)), deadline.timeout())
            except Conflict:
                try:
                    journal = self._journal.read(node, deadline.timeout())
                except UnreadableJournal as error:  # costs its node alone
                    self._log.error("what is placed on a node is not known", node=node, error=str(error))
                    continue
            self._cache.load(journal)

    def _bound_before(self, node: str) -> dict[str, JournalEntry]:
        # Bound to a node outside of its pin a pod is refused by kubelet, and has nothing there.
        model, now = self._model_of(node), self._seconds()
        return {
            pod.uid: JournalEntry(pod.uid, pod.namespace, pod.name, {0: pod.cards.shares}, now)
            for pod in self._cache.bound_to(node)
            if pod.live and pod.cards and pod.model in (None, model)
        }

    def _write(
        self, node: str, deadline: Deadline, entry: JournalEntry | None = None, without: Container[str] = ()
    ) -> bool:
        """Change a node's journal; False where another process has written it, which is known then."""
        journal = self._cache.journal(node)
        if journal is None:
            raise NotPlaced(f"what is placed on {node} is not known yet")
        entries = {uid: each for uid, each in journal.entries.items() if uid not in without}
        if entry:
            entries[entry.uid] = entry
        try:
            # Where it is not known what comes of it, the next write goes by the version before, and tells.
            changed = msgspec.structs.replace(journal, entries=entries)
            self._cache.load(self._journal.write(changed, deadline.timeout()))
        except Conflict:
            self._cache.load(self._journal.read(node, deadline.timeout()))
            return False
        return True

    def _forget_gone(self) -> None:
        # A pod that came and went while nobody watched is never reported. Those that the watch did not show at the last
        # call either are read.
        unshown = {
            entry.uid: entry
            for _, entry in self._cache.entries()
            if entry.ends is None and self._cache.pod(entry.uid) is None
        }
        for uid in self._unshown & unshown.keys():
            entry = unshown[uid]
            try:
                self._read(entry)
            except (VcudaError, *UNDECODABLE) as error:  # no fault: it is read again at the next call
                self._log.info("placed, and not to be had", pod=f"{entry.namespace}/{entry.name}", error=str(error))
        self._unshown = frozenset(unshown)

    def _has_expired(self, entry: JournalEntry) -> bool:
        if entry.ends is not None:
            return self._seconds() >= entry.ends
        pod = self._cache.pod(entry.uid)
        if pod is None or pod.node or self._seconds() < entry.placed + self._unbound_seconds:
            return False
        return not entry.may_be_bound(pod.version)

    def _read(self, asked: JournalEntry | protocol.BindingArgs, timeout: float = TIMEOUT) -> Pod:
        # From the API server, never from the watch: a binding must name the version that is stored now.
        message = "the pod is gone"
        try:
            pod = _POD.decode(self._kube.get(_path_of(asked), timeout=timeout))
            if pod.metadata.uid == asked.uid:
                return pod
            message = "the pod is gone, and another has its name"
        except NotFound:
            pass
        # Only for an entry of ours: a caller may name any uid beside any name.
        if isinstance(asked, JournalEntry):
            self._cache.forget(asked.uid)
        raise NotPlaced(message)

    def _seconds(self) -> int:
        return self._now() // 10**9

    # Placing

    def _would_fit(self, pod: Pod, request: CardRequest, node: str, victims: protocol.Victims) -> bool:
        # Without the pod itself too: an earlier call may have placed it there.
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
                # Its annotations are on their way: other cards there would not be those that the device plugin reads.
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
        raise NotPlaced("others place pods on the same nodes all the time")

    def _version_of(self, pod: Pod) -> str:
        """Return the newest resourceVersion known of a pod; raises NotPlaced where it is bound, or has ended."""
        watched, version = self._cache.pod(pod.metadata.uid), pod.metadata.resource_version
        if node := pod.spec.node_name or (watched.node if watched else ""):
            raise NotPlaced(f"the pod is bound to {node} already")
        if pod.has_ended or (watched and not watched.live):
            raise NotPlaced("the pod has ended")
        return watched.version if watched and is_older(version, watched.version) else version

    def _choose(
        self, request: CardRequest, names: tuple[str, ...], nodes: NodeCards, before: Mapping[str, JournalEntry]
    ) -> Placement | Mapping[str, Unplaceable]:
        # The node of an earlier placement comes first, if the pod still fits there. Its cards are chosen anew:
        # gpu-manager takes the fullest that fits when the container starts, and refuses a share whose annotation names
        # another.
        for node in sorted(before.keys() & {*names}, key=lambda node: before[node].placed, reverse=True):
            found = self._strategy(request, (node,), nodes)
            if isinstance(found, Placement):
                return found
        return self._strategy(request, names, nodes)

    def _leave(self, uid: str, version: str, node: str, deadline: Deadline) -> None:
        # What the pod was given elsewhere, unless a binding there may land still: then the watch tells, or time.
        for other, entry in self._cache.entries_of(uid).items():
            if other == node or entry.may_be_bound(version):
                continue
            try:
                self._write(other, deadline, without={uid})
            except VcudaError as error:
                self._log.info("an earlier placement still counts", pod=entry.name, node=other, error=str(error))

    # Binding

    def _binding_landed(self, pod: Pod, args: protocol.BindingArgs, deadline: Deadline) -> bool:
        # Returns False where the pod or the journal has changed since it was read.
        request, annotations = cards.read_card_request(pod), {}
        if isinstance(request, Unplaceable):
            raise NotPlaced(request.text)
        if request:
            entry = self._promise(pod, args, deadline)
            if entry is None:
                return False
            annotations = cards.annotations_for(request.scheme, args.node, entry.shares, self._now())
        elif not cards.names_cards(pod):
            raise NotPlaced("the pod asks for no vcuda cards, and is not the extender's to bind")
        try:
            self._send_binding(pod, args, annotations, deadline.timeout())
        except Conflict:
            return False
        except Unavailable as error:  # it may land still, at this version of the pod
            if not _is_bound(self._read(args, deadline.timeout()), args.node):
                raise NotPlaced(f"whether the pod was bound is not known: {error}") from error
        return True

    def _promise(self, pod: Pod, args: protocol.BindingArgs, deadline: Deadline) -> JournalEntry | None:
        """Write down that a binding of the pod as it is now is sent; None where another process writes the journal."""
        with self._alone():
            entry = self._cache.entries_of(args.uid).get(args.node)
            if entry is None:
                with suppress(NotFound):  # another leader may have placed it
                    self._cache.load(self._journal.read(args.node, deadline.timeout()))
                entry = self._cache.entries_of(args.uid).get(args.node)
            if entry is None:
                raise NotPlaced(f"the pod is not placed on {args.node} any more")
            promised = msgspec.structs.replace(entry, binding=pod.metadata.resource_version)
            return promised if promised == entry or self._write(args.node, deadline, promised) else None

    def _send_binding(
        self, pod: Pod, args: protocol.BindingArgs, annotations: Mapping[str, str], timeout: float
    ) -> None:
        # With uid and resourceVersion the API server binds this version of this pod, or answers 409, and writes the
        # annotations in the same step (``BindingREST`` in kube-apiserver's ``pkg/registry/core/pod/storage``).
        metadata = {
            "name": args.name,
            "namespace": args.namespace,
            "uid": args.uid,
            "resourceVersion": pod.metadata.resource_version,
            "annotations": annotations,
        }
        target = {"apiVersion": "v1", "kind": "Node", "name": args.node}
        manifest = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
        self._kube.post(f"{_path_of(args)}/binding", msgspec.json.encode(manifest), timeout=timeout)


def _is_bound(pod: Pod, node: str) -> bool:
    """Return whether the pod is bound to this node, by an earlier call; raises NotPlaced where to another."""
    if pod.spec.node_name and pod.spec.node_name != node:
        raise NotPlaced(f"the pod is bound to {pod.spec.node_name} already")
    return bool(pod.spec.node_name)


def _path_of(asked: JournalEntry | protocol.BindingArgs) -> str:
    return f"/api/v1/namespaces/{segment(asked.namespace)}/pods/{segment(asked.name)}"
