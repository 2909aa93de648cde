"""What placing and binding share: the book, the journal, and the turn in which one of them decides at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec
import structlog

from controller.extender.cache import AssumedPlacement, CardCache
from controller.extender.journal import Deadline, Journal
from controller.extender.metrics import ExtenderMetrics
from controller.extender.protocol import Binding, Candidates, Preemption, Victims
from controller.extender.strategy import Choice, NodeCards, Order, Placement, allot, packed
from vcuda.allocations.cards import (
    CardRequest,
    Cards,
    PodCards,
    Unplaceable,
    annotations_for,
    patch_of,
    read_card_request,
    read_pod_cards,
)
from vcuda.errors import ApiError, Conflict, Deposed, NotFound, NotPlaced, Unavailable, VcudaError
from vcuda.k8s_types import UNDECODABLE, Pod
from vcuda.kube import MERGE_PATCH, Kube, segment

TRIES = 4
"""How often one call places or binds a pod that others change meanwhile; the scheduler itself writes its conditions."""

TIMEOUT = 3.0
"""Seconds for one call to the API server."""

PATIENCE = 5.0
"""Seconds that a call waits for those before it."""

_POD = msgspec.json.Decoder(Pod)


class Named(Protocol):
    """What tells one pod from all others that ever were."""

    @property
    def uid(self) -> str:
        """Its uid."""

    @property
    def namespace(self) -> str:
        """Its namespace."""

    @property
    def name(self) -> str:
        """Its name."""


class Allocator:
    """One for each process that leads. ``on_lost`` is called when another process leads: this one must end."""

    def __init__(self, kube: Kube, book: CardCache, journal: Journal, on_lost: Callable[[], None]) -> None:
        self.kube = kube
        self.book = book
        self._journal = journal
        self._on_lost = on_lost
        self._turn = threading.Lock()
        self._log = structlog.get_logger()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Decide alone; raises NotPlaced where those before take too long."""
        if not self._turn.acquire(timeout=PATIENCE):
            raise NotPlaced("placements before this one take too long")
        try:
            yield
        finally:
            self._turn.release()

    def announce(self, promise: AssumedPlacement, deadline: Deadline) -> float:
        """Count what is to be sent, and write down that it may be; return the seconds for that. Only then may it be.

        The caller has the turn.
        """
        self.book.promise(promise)
        try:
            self._journal.write(self.book.promises(), deadline)
            return deadline.within(TIMEOUT)
        except Deposed:
            self._on_lost()
            raise
        except VcudaError:
            self.book.withdraw(promise)
            raise

    def retract(self, promise: AssumedPlacement, deadline: Deadline) -> None:
        """Count no more what was refused for certain, and write that down if it can be: the next leader reads it."""
        self.book.withdraw(promise)
        try:
            with self.turn():
                self._journal.write(self.book.promises(), deadline)
        except Deposed:
            self._on_lost()
        except VcudaError as error:
            self._log.info("what was refused still stands in the journal", pod=promise.name, error=str(error))

    def read(self, named: Named, timeout: float = TIMEOUT) -> Pod:
        """Return the pod as it is stored; raises NotPlaced where it is gone, or another has its name."""
        try:
            pod = _POD.decode(self.kube.get(path_of(named), timeout=timeout))
        except NotFound as error:
            raise self._gone(named, "the pod is gone") from error
        if pod.metadata.uid != named.uid:
            raise self._gone(named, "the pod is gone, and another has its name")
        return pod

    def _gone(self, named: Named, message: str) -> NotPlaced:
        """Count nothing more for a pod of ours; a caller may name any uid beside any name."""
        if isinstance(named, AssumedPlacement):
            self.book.forget(named.uid)
        return NotPlaced(message)


def path_of(named: Named) -> str:
    """Return where a pod is stored."""
    return f"/api/v1/namespaces/{segment(named.namespace)}/pods/{segment(named.name)}"


class Placer:
    """The extender's decisions. ``now`` is Unix time in nanoseconds; ``clock`` is in seconds, and only runs forward."""

    def __init__(
        self,
        desk: Allocator,
        metrics: ExtenderMetrics,
        *,
        order: Order = packed,
        now: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._desk = desk
        self._book = desk.book
        self._metrics = metrics
        self._order = order
        self._now = now
        self._clock = clock
        self._unshown: frozenset[AssumedPlacement] = frozenset()
        self._log = structlog.get_logger()

    def filter(self, candidates: Candidates) -> bytes:
        """Place the pod on one of the nodes, and return the ExtenderFilterResult that says so.

        A pod that wants no card by number passes everywhere. Where nothing could be decided the answer is an error, on
        which the scheduler tries the pod again.
        """
        deadline = Deadline(self._clock)
        wish = read_card_request(candidates.pod)
        if wish is None:
            return candidates.passing(candidates.names)
        if isinstance(wish, Unplaceable):
            return candidates.failing(dict.fromkeys(candidates.names, wish))
        try:
            with self._desk.turn():
                choice = self._place(candidates.pod, wish, candidates.names, deadline)
        except VcudaError as error:
            self._metrics.count("error")
            self._log.warning("not placed", pod=_name(candidates.pod), error=str(error))
            return candidates.failed(str(error))
        if isinstance(choice, Placement):
            self._metrics.count("placed")
            return candidates.passing([choice.node])
        self._metrics.count("unplaceable")
        return candidates.failing(choice)

    def preempt(self, preemption: Preemption) -> dict[str, Victims]:
        """Return the nodes on which the pod would fit on cards once its victims are gone.

        The scheduler has chosen them by sums alone. Where they do not make room on any one card, nobody is evicted.
        """
        wish = read_card_request(preemption.pod)
        if wish is None:
            return dict(preemption.victims)
        return {
            node: victims
            for node, victims in preemption.victims.items()
            if isinstance(wish, CardRequest) and self._would_fit(preemption.pod, wish, node, victims)
        }

    def scores(self, candidates: Candidates) -> dict[str, int]:
        """Return 10 for a node without cards and 0 for one with, as gpu-admission: other pods leave cards to those.

        A vcuda pod has one node left when it gets here.
        """
        cards = self._book.cards()
        return {name: 0 if isinstance(cards.get(name), Cards) else 10 for name in candidates.names}

    def look_for_the_gone(self) -> None:
        """Read the pods that were promised shares, and that the watch has not shown since the last look.

        One that came and went while nobody watched is never reported: its shares would be nobody's. That a pod cannot
        be read now is no fault; there will be another look.
        """
        promises = frozenset(self._book.promises())
        for promise in promises & self._unshown:
            try:
                self._desk.read(promise)
            except (VcudaError, *UNDECODABLE) as error:
                self._log.info("promised shares to a pod that is not to be had", pod=promise.name, error=str(error))
        self._unshown = promises

    def _would_fit(self, pod: Pod, wish: CardRequest, node: str, victims: Victims) -> bool:
        cards = self._book.without_all(node, (*victims.uids, pod.metadata.uid))
        return (
            isinstance(cards, Cards)
            and cards.scheme is wish.scheme
            and not isinstance(allot(cards, wish.containers), Unplaceable)
        )

    def _place(self, pod: Pod, wish: CardRequest, names: Iterable[str], deadline: Deadline) -> Choice:
        for _ in range(TRIES):
            if pod.spec.node_name:
                raise NotPlaced(f"the pod is bound to {pod.spec.node_name} already")
            known = self._book.without(pod.metadata.uid)
            choice = self._choose(pod, wish, names, known)
            if not isinstance(choice, Placement):
                return choice
            fresh = self._write(pod, wish, choice, deadline)
            if fresh is None:
                return choice
            pod = fresh
        raise NotPlaced("the pod changes too often")

    def _choose(self, pod: Pod, wish: CardRequest, names: Iterable[str], known: NodeCards) -> Choice:
        """Choose the node of an earlier placement, if there is one and the pod still fits there, else any.

        On that node the cards are chosen anew: gpu-manager takes the fullest that fits when the container starts, and
        refuses a share whose annotation names another.
        """
        names = tuple(names)
        before = read_pod_cards(pod)
        if before is not None and before.node in names:
            choice = self._order(wish, (before.node,), known)
            if isinstance(choice, Placement):
                return choice
        return self._order(wish, names, known)

    def _write(self, pod: Pod, wish: CardRequest, choice: Placement, deadline: Deadline) -> Pod | None:
        """Write the placement; return None once it is known to have landed, else the pod as it is now, to try again."""
        metadata = pod.metadata
        holding = PodCards(choice.node, choice.allotment.all_shares())
        promise = AssumedPlacement(metadata.uid, metadata.namespace, metadata.name, metadata.resource_version, holding)
        written = annotations_for(wish.scheme, choice.node, choice.allotment.shares, self._now())
        timeout = self._desk.announce(promise, deadline)
        patch = patch_of(written, pod.annotations, metadata.uid, metadata.resource_version)
        try:
            answer = self._desk.kube.patch(path_of(promise), patch, MERGE_PATCH, timeout=timeout)
        except Conflict:
            self._book.withdraw(promise)
            return self._desk.read(promise, deadline.within(TIMEOUT))
        except ApiError as error:
            self._book.withdraw(promise)
            raise NotPlaced(f"the pod's annotations cannot be written: {error}") from error
        except Unavailable as error:
            return self._after_unknown(promise, written, error, deadline)
        self._book.keep(promise, _POD.decode(answer).metadata.resource_version)
        return None

    def _after_unknown(
        self, promise: AssumedPlacement, written: dict[str, str], error: Unavailable, deadline: Deadline
    ) -> Pod | None:
        """Find out what came of a patch that was not answered. While it may land still its shares stay taken."""
        pod = self._desk.read(promise, deadline.within(TIMEOUT))
        if written.items() <= pod.annotations.items():
            self._book.keep(promise, pod.metadata.resource_version)
            return None
        if pod.metadata.resource_version == promise.base:
            raise NotPlaced(f"whether the pod's annotations were written is not known: {error}") from error
        self._book.withdraw(promise)
        return pod


def _name(pod: Pod) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"


class Binder:
    """The extender's bindings. ``clock`` is in seconds, and only runs forward."""

    def __init__(
        self, desk: Allocator, metrics: ExtenderMetrics, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._desk = desk
        self._metrics = metrics
        self._clock = clock
        self._log = structlog.get_logger()

    def bind(self, binding: Binding) -> str:
        """Bind the pod; return why that was not done, and nothing where it was: then the scheduler tries it again."""
        deadline = Deadline(self._clock)
        try:
            self._bind(binding, deadline)
        except VcudaError as error:
            self._metrics.count_binding("error")
            pod = f"{binding.namespace}/{binding.name}"
            self._log.warning("not bound", pod=pod, node=binding.node, error=str(error))
            return str(error)
        self._metrics.count_binding("bound")
        return ""

    def _bind(self, binding: Binding, deadline: Deadline) -> None:
        for _ in range(TRIES):
            pod = self._desk.read(binding, deadline.within(TIMEOUT))
            if self._is_bound(pod, binding) or self._landed(pod, binding, deadline):
                return
        raise NotPlaced("the pod changes too often")

    def _is_bound(self, pod: Pod, binding: Binding) -> bool:
        """Return whether the pod is bound to this node, by an earlier call; raises NotPlaced where to another."""
        if pod.spec.node_name and pod.spec.node_name != binding.node:
            raise NotPlaced(f"the pod is bound to {pod.spec.node_name} already")
        return bool(pod.spec.node_name)

    def _landed(self, pod: Pod, binding: Binding, deadline: Deadline) -> bool:
        """Bind the pod; return False where it has changed since it was read, or was bound by another call."""
        promise = self._announced(pod, binding, deadline)
        try:
            self._send(pod, binding, deadline.within(TIMEOUT))
        except Conflict:
            if promise:
                self._desk.book.withdraw(promise)
            return False
        except (ApiError, NotPlaced):
            if promise:
                self._desk.retract(promise, deadline)
            raise
        except Unavailable as error:  # it may land still, at this version of the pod
            if promise:
                self._desk.book.linger(promise)
            if not self._is_bound(self._desk.read(binding, deadline.within(TIMEOUT)), binding):
                raise NotPlaced(f"whether the pod was bound is not known: {error}") from error
        return True

    def _announced(self, pod: Pod, binding: Binding, deadline: Deadline) -> AssumedPlacement | None:
        """Check the placement, and write down that it may be bound; None for a pod that needs no cards.

        Raises NotPlaced where the pod is not placed on the node, or not as we know it.
        """
        wish = read_card_request(pod)
        if wish is None:
            return None
        if isinstance(wish, Unplaceable):
            raise NotPlaced(wish.text)
        holding = read_pod_cards(pod)
        if holding is None or holding.node != binding.node:
            raise NotPlaced(f"the pod is not placed on {binding.node} any more")
        version = pod.metadata.resource_version
        promise = AssumedPlacement(binding.uid, binding.namespace, binding.name, version, holding)
        with self._desk.turn():
            self._check(binding.uid, wish, holding)
            self._desk.announce(promise, deadline)
        return promise

    def _check(self, uid: str, wish: CardRequest, holding: PodCards) -> None:
        """Raise NotPlaced unless the shares are those that were given, and nobody else has anything of them."""
        cards = self._desk.book.without_all(holding.node, (uid,))
        if not self._desk.book.holds(uid, holding) or not isinstance(cards, Cards):
            raise NotPlaced(f"the cards on the pod are not those that it was given on {holding.node}")
        wanted = sum(max(1, demand.cards) for demand in wish.containers)
        if cards.scheme is not wish.scheme or len(holding.shares) != wanted or not cards.have(holding.shares):
            raise NotPlaced(f"the cards on the pod are not free on {holding.node}")

    def _send(self, pod: Pod, binding: Binding, timeout: float) -> None:
        metadata = {
            "name": binding.name,
            "namespace": binding.namespace,
            "uid": binding.uid,
            "resourceVersion": pod.metadata.resource_version,
        }
        target = {"apiVersion": "v1", "kind": "Node", "name": binding.node}
        manifest = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
        self._desk.kube.post(f"{path_of(binding)}/binding", msgspec.json.encode(manifest), timeout=timeout)
