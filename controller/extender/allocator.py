"""Gives pods their node and cards, and binds them, for one process that leads.

A placement is decided alone, counted in the cache, written down in the journal, and only then patched onto the pod; the
scheduler is answered once the patch has landed. A binding goes the same way. Each is sent at one resourceVersion of the
pod, so whatever is late or sent twice lands once or never, and the pod's later versions tell which.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import msgspec
import structlog

from controller.extender import protocol, publish, strategy
from controller.extender.cache import AssumedPlacement, CardCache
from controller.extender.journal import TIMEOUT, Deadline, Journal
from vcuda.allocations import cards as card_annotations
from vcuda.allocations.cards import CardRequest, Cards, PodCards, Unplaceable, read_card_request, read_pod_cards
from vcuda.errors import ApiError, Conflict, Deposed, NotFound, NotPlaced, Unavailable, VcudaError
from vcuda.k8s_types import UNDECODABLE, Pod
from vcuda.kube import MERGE_PATCH, Kube, segment

MAX_ATTEMPTS = 4
"""How often one call places or binds a pod that others change meanwhile; the scheduler itself writes its conditions."""

TURN_TIMEOUT_SECONDS = 5.0
"""For which a call waits for the decisions before it."""

_POD = msgspec.json.Decoder(Pod)


class Allocator:
    """Answers what kube-scheduler asks. ``on_lost`` is called when another process leads: this one must end.

    ``now`` is Unix time in nanoseconds; ``clock`` is in seconds, and only runs forward.
    """

    def __init__(
        self,
        kube: Kube,
        cache: CardCache,
        journal: Journal,
        metrics: publish.ExtenderMetrics,
        on_lost: Callable[[], None],
        *,
        choose: strategy.Strategy = strategy.bin_pack,
        now: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube, self._cache, self._journal = kube, cache, journal
        self._metrics = metrics
        self._on_lost = on_lost
        self._strategy = choose
        self._now, self._clock = now, clock
        self._turn = threading.Lock()
        self._unshown: frozenset[AssumedPlacement] = frozenset()
        self._log = structlog.get_logger()

    def filter(self, args: protocol.ExtenderArgs) -> bytes:
        """Place the pod on one of the nodes, and return the ExtenderFilterResult that says so.

        Where nothing could be decided the answer is an error, on which the scheduler tries the pod again.
        """
        deadline = Deadline(self._clock)
        request = read_card_request(args.pod)
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
        if isinstance(placed, strategy.Placement):
            self._metrics.placements.labels("placed").inc()
            return args.passing([placed.node])
        self._metrics.placements.labels("unplaceable").inc()
        return args.failing(placed)

    def preempt(self, args: protocol.PreemptionArgs) -> Mapping[str, protocol.Victims]:
        """Return the nodes on which the pod would fit on cards once its victims are gone."""
        # The scheduler has chosen them by sums alone. Where they make no room on any one card, nobody is evicted.
        request = read_card_request(args.pod)
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
        cards = self._cache.cards()
        return {name: 0 if isinstance(cards.get(name), Cards) else 10 for name in args.names}

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

    def forget_gone(self) -> None:
        """Read the pods with assumed placements that the watch has not shown since the last call; forget the gone."""
        # One that came and went while nobody watched is never reported, and its shares would stay taken.
        assumed = frozenset(self._cache.assumed())
        for placement in assumed & self._unshown:
            try:
                self._read(placement)
            except (VcudaError, *UNDECODABLE) as error:  # no fault: it is read again at the next call
                self._log.info("promised shares to a pod that is not to be had", pod=placement.name, error=str(error))
        self._unshown = assumed

    @contextmanager
    def _alone(self) -> Iterator[None]:
        # One decision at a time: between the choice of a card and its being counted nobody else may choose.
        if not self._turn.acquire(timeout=TURN_TIMEOUT_SECONDS):
            raise NotPlaced("placements before this one take too long")
        try:
            yield
        finally:
            self._turn.release()

    def _assume(self, placement: AssumedPlacement, deadline: Deadline) -> float:
        # Counted and written down first, sent only then; returns the seconds for that. The caller decides alone.
        self._cache.assume(placement)
        try:
            self._journal.write(self._cache.assumed(), deadline)
            return deadline.timeout()
        except Deposed:
            self._on_lost()
            raise
        except VcudaError:
            self._cache.forget(placement)
            raise

    def _read(self, asked: AssumedPlacement | protocol.BindingArgs, timeout: float = TIMEOUT) -> Pod:
        # From the API server, never from the watch: a binding must name the version that is stored now.
        message = "the pod is gone"
        try:
            pod = _POD.decode(self._kube.get(_path_of(asked), timeout=timeout))
            if pod.metadata.uid == asked.uid:
                return pod
            message = "the pod is gone, and another has its name"
        except NotFound:
            pass
        # Only for a placement of ours: a caller may name any uid beside any name.
        if isinstance(asked, AssumedPlacement):
            self._cache.forget_pod(asked.uid)
        raise NotPlaced(message)

    # Placing

    def _would_fit(self, pod: Pod, request: CardRequest, node: str, victims: protocol.Victims) -> bool:
        # Without the pod itself too: an earlier call may have placed it there.
        cards = self._cache.node_without(node, (*victims.uids, pod.metadata.uid))
        if not isinstance(cards, Cards) or cards.scheme is not request.scheme:
            return False
        return not isinstance(strategy.assign(cards, request.containers), Unplaceable)

    def _place(
        self, pod: Pod, request: CardRequest, names: tuple[str, ...], deadline: Deadline
    ) -> strategy.Placement | Mapping[str, Unplaceable]:
        for _ in range(MAX_ATTEMPTS):
            if pod.spec.node_name:
                raise NotPlaced(f"the pod is bound to {pod.spec.node_name} already")
            found = self._choose(pod, request, names, self._cache.without(pod.metadata.uid))
            if not isinstance(found, strategy.Placement):
                return found
            fresh = self._write(pod, request, found, deadline)
            if fresh is None:
                return found
            pod = fresh
        raise NotPlaced("the pod changes too often")

    def _choose(
        self, pod: Pod, request: CardRequest, names: tuple[str, ...], nodes: strategy.NodeCards
    ) -> strategy.Placement | Mapping[str, Unplaceable]:
        # The node of an earlier placement comes first, if the pod still fits there. Its cards are chosen anew:
        # gpu-manager takes the fullest that fits when the container starts, and refuses a share whose annotation names
        # another.
        before = read_pod_cards(pod)
        if before is not None and before.node in names:
            found = self._strategy(request, (before.node,), nodes)
            if isinstance(found, strategy.Placement):
                return found
        return self._strategy(request, names, nodes)

    def _write(self, pod: Pod, request: CardRequest, found: strategy.Placement, deadline: Deadline) -> Pod | None:
        # Returns None once it is known to have landed, else the pod as it is now, to try again.
        cards = PodCards(found.node, found.assignment.all_shares())
        placement = _assumed(pod, cards)
        written = card_annotations.annotations_for(request.scheme, found.node, found.assignment.shares, self._now())
        timeout = self._assume(placement, deadline)
        patch = card_annotations.patch_of(written, pod.annotations, pod.metadata.uid, pod.metadata.resource_version)
        try:
            answer = self._kube.patch(_path_of(placement), patch, MERGE_PATCH, timeout=timeout)
        except Conflict:
            self._cache.forget(placement)
            return self._read(placement, deadline.timeout())
        except ApiError as error:
            self._cache.forget(placement)
            raise NotPlaced(f"the pod's annotations cannot be written: {error}") from error
        except Unavailable as error:
            return self._after_unknown(placement, written, error, deadline)
        self._cache.confirm(placement, _POD.decode(answer).metadata.resource_version)
        return None

    def _after_unknown(
        self, placement: AssumedPlacement, written: dict[str, str], error: Unavailable, deadline: Deadline
    ) -> Pod | None:
        # While the patch may land still its shares stay taken: the pod's version tells.
        pod = self._read(placement, deadline.timeout())
        if written.items() <= pod.annotations.items():
            self._cache.confirm(placement, pod.metadata.resource_version)
            return None
        if pod.metadata.resource_version == placement.base:
            raise NotPlaced(f"whether the pod's annotations were written is not known: {error}") from error
        self._cache.forget(placement)
        return pod

    # Binding

    def _binding_landed(self, pod: Pod, args: protocol.BindingArgs, deadline: Deadline) -> bool:
        # Returns False where the pod has changed since it was read, or was bound by another call.
        placement = self._assume_binding(pod, args, deadline)
        try:
            self._send_binding(pod, args, deadline.timeout())
        except Conflict:
            if placement:
                self._cache.forget(placement)
            return False
        except (ApiError, NotPlaced):
            if placement:
                self._retract(placement, deadline)
            raise
        except Unavailable as error:  # it may land still, at this version of the pod
            if placement:
                self._cache.leave_open(placement)
            if not _is_bound(self._read(args, deadline.timeout()), args.node):
                raise NotPlaced(f"whether the pod was bound is not known: {error}") from error
        return True

    def _assume_binding(self, pod: Pod, args: protocol.BindingArgs, deadline: Deadline) -> AssumedPlacement | None:
        # The scheduler has every pod bound by the extender that names the resource, one that needs no cards too.
        request = read_card_request(pod)
        if request is None:
            return None
        if isinstance(request, Unplaceable):
            raise NotPlaced(request.text)
        cards = read_pod_cards(pod)
        if cards is None or cards.node != args.node:
            raise NotPlaced(f"the pod is not placed on {args.node} any more")
        placement = _assumed(pod, cards)
        with self._alone():
            self._check(args.uid, request, cards)
            self._assume(placement, deadline)
        return placement

    def _check(self, uid: str, request: CardRequest, given: PodCards) -> None:
        # The owner of a pod can write any cards on it, so what the annotations say is held against the cache.
        cards = self._cache.node_without(given.node, (uid,))
        if not self._cache.counts(uid, given) or not isinstance(cards, Cards):
            raise NotPlaced(f"the cards on the pod are not those that it was given on {given.node}")
        wanted = sum(max(1, container.cards) for container in request.containers)
        if cards.scheme is not request.scheme or len(given.shares) != wanted or not cards.have(given.shares):
            raise NotPlaced(f"the cards on the pod are not free on {given.node}")

    def _send_binding(self, pod: Pod, args: protocol.BindingArgs, timeout: float) -> None:
        # With uid and resourceVersion the API server binds this version of this pod, or answers 409 (``BindingREST`` in
        # kube-apiserver's ``pkg/registry/core/pod/storage``).
        version = pod.metadata.resource_version
        metadata = {"name": args.name, "namespace": args.namespace, "uid": args.uid, "resourceVersion": version}
        target = {"apiVersion": "v1", "kind": "Node", "name": args.node}
        manifest = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
        self._kube.post(f"{_path_of(args)}/binding", msgspec.json.encode(manifest), timeout=timeout)

    def _retract(self, placement: AssumedPlacement, deadline: Deadline) -> None:
        # Written down if it can be: the next leader reads it, and would count what was refused.
        self._cache.forget(placement)
        try:
            with self._alone():
                self._journal.write(self._cache.assumed(), deadline)
        except Deposed:
            self._on_lost()
        except VcudaError as error:
            self._log.info("what was refused still stands in the journal", pod=placement.name, error=str(error))


def _assumed(pod: Pod, cards: PodCards) -> AssumedPlacement:
    metadata = pod.metadata
    return AssumedPlacement(metadata.uid, metadata.namespace, metadata.name, metadata.resource_version, cards)


def _is_bound(pod: Pod, node: str) -> bool:
    """Return whether the pod is bound to this node, by an earlier call; raises NotPlaced where to another."""
    if pod.spec.node_name not in ("", node):
        raise NotPlaced(f"the pod is bound to {pod.spec.node_name} already")
    return bool(pod.spec.node_name)


def _path_of(asked: AssumedPlacement | protocol.BindingArgs) -> str:
    return f"/api/v1/namespaces/{segment(asked.namespace)}/pods/{segment(asked.name)}"
