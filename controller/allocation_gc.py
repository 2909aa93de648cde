"""Removes stale allocations from pods and stale locks from nodes, each when it can first be stale. The leader's alone.

What is stale, and why nothing alive can be, is said in `vcuda.stale` and `vcuda.stale_locks`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import structlog

from controller.due import DueQueue
from controller.node_locks import NodeLocks
from controller.pod_allocations import PodAllocations
from controller.pod_watch import PodWatch
from controller.removals import Sweep
from vcuda.errors import VcudaError
from vcuda.kube import Key, Kube, NodeWatch
from vcuda.objects import UNDECODABLE, Node
from vcuda.stored_pods import StoredPod

PERIOD = 60.0
"""Seconds after which everything is looked at again, to mend what events and clocks should have."""

PERIODS = 5
"""After so many periods without the end of a turn the loop counts as stuck."""

RETRY = 10.0
"""Seconds after which a look that failed is tried again."""

LOCK_GRACE = 10.0
"""Seconds after which a new lock is looked at, if not stale before: by then nearly all have been given back."""

EVERYTHING = ""


class Garbage(msgspec.Struct, frozen=True):
    """``timeout``: seconds from an allocation, or a lock, to its being stale. ``dry_run``: only the log says so."""

    timeout: float = 300.0
    dry_run: bool = False


class AllocationGc:
    """The loop. A pod waits in ``due`` as NAMESPACE/NAME, a node as NAME.

    A turn that fails is logged and tried again: the loop is only stuck when a turn does not end. There is one in every
    period, for everything that is known.
    """

    def __init__(
        self,
        kube: Kube,
        pods: PodWatch,
        nodes: NodeWatch,
        sweep: Sweep,
        timeout: float,
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.due = DueQueue(0.0, clock)
        self._pods = PodAllocations(kube, pods, nodes, sweep, timeout, wall=wall)
        self._locks = NodeLocks(kube, nodes, sweep, timeout, wall)
        self._lock_grace = min(LOCK_GRACE, timeout)
        self._clock = clock
        self._turned: float | None = None
        self._log = structlog.get_logger()
        pods.follow(self._pod_changed)
        nodes.follow(self._node_changed)

    def run(self) -> None:
        """Look at whatever falls due until ``due`` is closed."""
        self._turned = self._clock()
        self.due.add(EVERYTHING)
        while (name := self.due.next()) is not None:
            self._turn(name)
            self._turned = self._clock()

    def stuck(self) -> bool:
        """Return whether the loop runs and has not ended a turn for five periods."""
        return self._turned is not None and self._clock() - self._turned > PERIOD * PERIODS

    def look_at_all(self) -> None:
        """Let everything be due that is stale, or will be, as the watches have it."""
        for key, delay in self._pods.due_all():
            self.due.add(_name(key), delay)
        for node in self._locks.locked():
            self.due.add(node)
        self.due.add(EVERYTHING, PERIOD)

    def look(self, name: str) -> None:
        """Look at one pod or node, and remove what is stale there. Raises VcudaError, or what decoding raises."""
        namespace, slash, pod = name.partition("/")
        again = self._pods.look(Key(namespace, pod)) if slash else self._locks.look(name)
        if again is not None:
            self.due.add(name, again)

    def _turn(self, name: str) -> None:
        if name == EVERYTHING:
            self.look_at_all()
            return
        try:
            self.look(name)
        except (VcudaError, *UNDECODABLE) as error:
            self._log.warning("stale allocations not looked at", object=name, error=str(error))
            self.due.add(name, RETRY)

    def _pod_changed(self, _old: StoredPod | None, new: StoredPod | None) -> None:
        delay = self._pods.due(new) if new and new.allocation else None
        if new and delay is not None:
            self.due.add(_name(Key(new.namespace, new.name)), delay)

    def _node_changed(self, _old: Node | None, new: Node | None) -> None:
        if new and new.annotations:
            self.due.add(new.metadata.name, self._lock_grace)
        if new is None:
            self.due.add(EVERYTHING)


def _name(key: Key) -> str:
    return f"{key.namespace}/{key.name}"
