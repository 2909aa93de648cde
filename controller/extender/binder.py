"""Binds pods to the nodes that they were placed on, with the cards that they were given there, or not at all.

The scheduler may ask for a pod's binding, and then have it placed anew, on another node, while that call is still on
its way: its leader changes, or it has given the call up. A binding names the uid and the resourceVersion that the
placement was read at, and the API server binds no other pod and no other version: one that is late binds nothing.

Until the pod's version has moved on, its shares are the pod's: they are written down in the journal before the binding
is sent. That also keeps a leader that was deposed, and does not know it, from sending any: it knows nothing of the
shares that others have been given since.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import structlog

from controller.extender.book import Promise
from controller.extender.deadline import Deadline
from controller.extender.desk import TIMEOUT, TRIES, Desk, path_of
from controller.extender.metrics import ExtenderMetrics
from vcuda.cards import Cards, Reason
from vcuda.demands import Wish, read_wish
from vcuda.errors import ApiError, Conflict, NotPlaced, Unreachable, VcudaError
from vcuda.extender import Binding
from vcuda.objects import Pod
from vcuda.records import Holding, read_holding


class Binder:
    """The extender's bindings. ``clock`` is in seconds, and only runs forward."""

    def __init__(self, desk: Desk, metrics: ExtenderMetrics, *, clock: Callable[[], float] = time.monotonic) -> None:
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
        except Unreachable as error:  # it may land still, at this version of the pod
            if promise:
                self._desk.book.linger(promise)
            if not self._is_bound(self._desk.read(binding, deadline.within(TIMEOUT)), binding):
                raise NotPlaced(f"whether the pod was bound is not known: {error}") from error
        return True

    def _announced(self, pod: Pod, binding: Binding, deadline: Deadline) -> Promise | None:
        """Check the placement, and write down that it may be bound; None for a pod that needs no cards.

        Raises NotPlaced where the pod is not placed on the node, or not as we know it.
        """
        wish = read_wish(pod)
        if wish is None:
            return None
        if isinstance(wish, Reason):
            raise NotPlaced(wish.text)
        holding = read_holding(pod)
        if holding is None or holding.node != binding.node:
            raise NotPlaced(f"the pod is not placed on {binding.node} any more")
        version = pod.metadata.resource_version
        promise = Promise(binding.uid, binding.namespace, binding.name, version, holding)
        with self._desk.turn():
            self._check(binding.uid, wish, holding)
            self._desk.announce(promise, deadline)
        return promise

    def _check(self, uid: str, wish: Wish, holding: Holding) -> None:
        """Raise NotPlaced unless the shares are those that were given, and nobody else has anything of them."""
        cards = self._desk.book.without_all(holding.node, (uid,))
        if not self._desk.book.holds(uid, holding) or not isinstance(cards, Cards):
            raise NotPlaced(f"the cards on the pod are not those that it was given on {holding.node}")
        wanted = sum(max(1, demand.cards) for demand in wish.demands)
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
