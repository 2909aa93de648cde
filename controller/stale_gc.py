"""How something stale is taken from an object: by a patch that only the very version that was judged lets in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Protocol, TypeVar

import msgspec
import structlog

from controller.metrics import GarbageMetrics
from controller.pods import PodInformer
from controller.workqueue import WorkQueue
from vcuda.allocations.stale import (
    Exists,
    Lock,
    Removal,
    find_stale,
    find_stale_lock,
    first_stale,
    read_locks,
    removal_patch,
)
from vcuda.allocations.stored_pods import StoredPod, read_stored
from vcuda.errors import ApiError, Conflict, NotFound, VcudaError
from vcuda.k8s_types import UNDECODABLE, Node, Pod, can_be_name
from vcuda.kube import JSON_PATCH, Event, InvolvedObject, Key, Kube, NodeInformer, post_event, segment

COMPONENT = "vcuda-controller"
REASON = "StaleAllocationRemoved"

TRIES = 5
"""How often an object is judged anew when somebody else writes it first."""

T = TypeVar("T")


class Found(msgspec.Struct, frozen=True):
    """What is stale on the object at ``path``; ``subject`` has the version that was judged."""

    subject: InvolvedObject
    path: str
    removals: tuple[Removal, ...]


class Sweep(Protocol):
    """What becomes of what is found."""

    def remove(self, found: Found) -> None:
        """Take it away. Raises Conflict where the object has changed since it was judged."""


class Removing:
    """Removes what is found; each removal is a log line, a count, and an Event on the object.

    The Event comes after, so that it is never untrue; who crashes in between leaves none.
    """

    def __init__(self, kube: Kube, metrics: GarbageMetrics) -> None:
        self._kube = kube
        self._metrics = metrics
        self._log = structlog.get_logger()

    def remove(self, found: Found) -> None:
        """Patch the object, and tell; see `Sweep`. Raises what `vcuda.kube.Kube.patch` does."""
        try:
            self._kube.patch(found.path, removal_patch(found.subject.resource_version, found.removals), JSON_PATCH)
        except ApiError as error:
            if error.status == HTTPStatus.UNPROCESSABLE_ENTITY:  # the patch's own test has failed
                raise Conflict(error.status, error.message) from error
            raise
        for removal in found.removals:
            self._metrics.removed(removal.scheme, removal.rule)
            self._log.info("stale allocation removed", **_fields(found, removal))
            self._tell(found.subject, removal)

    def _tell(self, subject: InvolvedObject, removal: Removal) -> None:
        identity = f"{removal.scheme}-{removal.rule}-{subject.resource_version}"
        message = f"removed the allocation of {removal.scheme}: {removal.why} ({', '.join(_keys(removal))})"
        try:
            post_event(self._kube, Event(subject, identity, REASON, message, COMPONENT))
        except VcudaError as error:
            self._log.warning("event not written", object=subject.name, error=str(error))


class Reporting:
    """Writes nothing but the log."""

    def __init__(self) -> None:
        self._log = structlog.get_logger()

    def remove(self, found: Found) -> None:
        """Log what would be removed."""
        for removal in found.removals:
            self._log.info("stale allocation found; a dry run removes nothing", **_fields(found, removal))


def retried(attempt: Callable[[], T]) -> T:
    """Return what an attempt returns, made anew while it meets a Conflict; the last one may raise it."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(Conflict):
            return attempt()
    return attempt()


def _fields(found: Found, removal: Removal) -> dict[str, object]:
    subject = found.subject
    about = {"kind": subject.kind, "namespace": subject.namespace, "name": subject.name, "uid": subject.uid}
    return {**about, "scheme": removal.scheme, "rule": removal.rule, "why": removal.why, "keys": _keys(removal)}


def _keys(removal: Removal) -> tuple[str, ...]:
    return (*removal.annotations, *removal.labels)


_POD = msgspec.json.Decoder(Pod)


class PodAllocations:
    """``timeout``: seconds that the binding of a pod may take. ``wall`` tells the Unix time."""

    def __init__(
        self,
        kube: Kube,
        pods: PodInformer,
        nodes: NodeInformer,
        sweep: Sweep,
        timeout: float,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._kube = kube
        self._pods = pods
        self._nodes = nodes
        self._sweep = sweep
        self._timeout = timeout
        self._wall = wall
        self._served: dict[Key, StoredPod] = {}

    def due_all(self) -> Iterator[tuple[Key, float]]:
        """Yield every pod on which something is stale, or will be, and in how many seconds."""
        pods = self._pods.reflector.snapshot()
        self._served = {key: pod for key, pod in self._served.items() if pods.get(key) is pod}
        for key, pod in pods.items():
            delay = self.due(pod) if pod.allocation else None
            if delay is not None and self._served.get(key) is not pod:
                yield key, delay

    def due(self, pod: StoredPod) -> float | None:
        """Return in how many seconds something on a watched pod can first be stale; None: not unless it changes."""
        now = self._wall()
        since = first_stale(pod, self._is_known, now, self._timeout)
        return None if since is None else max(0.0, since - now)

    def look(self, key: Key) -> float | None:
        """Remove what is stale on a pod; return in how many seconds to look again, None: when it changes.

        The watch only says where to look. It may be behind, so nothing is removed but from the pod as it is stored.
        """
        pod = self._pods.reflector.get(key)
        if pod is None or self._served.get(key) is pod:
            return None
        delay = self.due(pod)
        if delay != 0:
            return delay
        again = retried(lambda: self._free(key))
        if again is None:
            self._served[key] = pod
        return again

    def _free(self, key: Key) -> float | None:
        path = f"/api/v1/namespaces/{segment(key.namespace)}/pods/{segment(key.name)}"
        try:
            raw = self._kube.get(path)
        except NotFound:
            return None
        stored = _POD.decode(raw)
        pod = read_stored(stored, self._pods.labels)
        if pod is None:
            return None
        now = self._wall()
        asking = _Asking(self._exists)
        removals = find_stale(pod, asking, now, self._timeout)
        if not removals:
            since = first_stale(pod, asking, now, self._timeout)
            if asking.refused:
                raise asking.refused
            return None if since is None else since - now
        subject = InvolvedObject("v1", "Pod", pod.name, pod.namespace, pod.uid, stored.metadata.resource_version)
        self._sweep.remove(Found(subject, path, removals))
        return None

    def _is_known(self, node: str) -> bool:
        return self._nodes.reflector.get(("", node)) is not None

    def _exists(self, node: str) -> bool:
        """Return whether there is such a node. That one is missing is believed of etcd alone, not of the watch."""
        if self._is_known(node):
            return True
        if not can_be_name(node):
            return False
        try:
            self._kube.get(f"/api/v1/nodes/{segment(node)}")
        except NotFound:
            return False
        return True


class _Asking:
    """Asks for nodes on behalf of one rule. An answer that is none leaves the other rules to be judged by.

    A node that the API server refuses to tell of counts as one that exists; ``refused`` is what it said.
    """

    def __init__(self, exists: Exists) -> None:
        self.refused: ApiError | None = None
        self._exists = exists

    def __call__(self, node: str) -> bool:
        """Return whether there is such a node, as far as is known."""
        try:
            return self._exists(node)
        except ApiError as error:
            self.refused = error
            return True


_NODE = msgspec.json.Decoder(Node)


class NodeLocks:
    """``timeout``: seconds that a lock may be held. ``wall`` tells the Unix time."""

    def __init__(
        self, kube: Kube, nodes: NodeInformer, sweep: Sweep, timeout: float, wall: Callable[[], float] = time.time
    ) -> None:
        self._kube = kube
        self._nodes = nodes
        self._sweep = sweep
        self._timeout = timeout
        self._wall = wall
        self._seen: dict[tuple[str, str], tuple[str, float]] = {}
        self._served: dict[str, tuple[Lock, ...]] = {}

    def locked(self) -> Iterator[str]:
        """Yield every node that is locked, and forget the others."""
        nodes = self._nodes.reflector.snapshot().values()
        names = {node.metadata.name for node in nodes if node.annotations}
        self._seen = {key: seen for key, seen in self._seen.items() if key[0] in names}
        self._served = {name: locks for name, locks in self._served.items() if name in names}
        yield from names

    def look(self, name: str) -> float | None:
        """Remove a node's locks that are stale; return in how many seconds the next can be, None: when they change."""
        watched = self._nodes.reflector.get(("", name))
        locks = tuple(read_locks(watched)) if watched else ()
        if not locks or self._served.get(name) == locks:
            return None
        again = retried(lambda: self._free(name))
        if again is None:
            self._served[name] = locks
        return again

    def _free(self, name: str) -> float | None:
        path = f"/api/v1/nodes/{segment(name)}"
        try:
            node = _NODE.decode(self._kube.get(path))
        except NotFound:
            return None
        now = self._wall()
        locks = {lock: self._expires(name, lock, now) for lock in read_locks(node)}
        found = (find_stale_lock(lock, expires, now, self._holder_exists) for lock, expires in locks.items())
        removals = tuple(removal for removal in found if removal)
        if not removals:
            return min((expires - now for expires in locks.values()), default=None)
        subject = InvolvedObject(
            "v1", "Node", name, uid=node.metadata.uid, resource_version=node.metadata.resource_version
        )
        self._sweep.remove(Found(subject, path, removals))
        return None

    def _expires(self, name: str, lock: Lock, now: float) -> float:
        key = name, lock.scheme.name
        value, seen = self._seen.get(key, ("", now))
        if value != lock.value:
            seen = now
            self._seen[key] = lock.value, seen
        return lock.expires(seen, now, self._timeout)

    def _holder_exists(self, namespace: str, name: str) -> bool:
        if not (can_be_name(namespace) and can_be_name(name)):
            return False
        try:
            self._kube.get(f"/api/v1/namespaces/{segment(namespace)}/pods/{segment(name)}")
        except NotFound:
            return False
        return True


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
        pods: PodInformer,
        nodes: NodeInformer,
        sweep: Sweep,
        timeout: float,
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.due = WorkQueue(0.0, clock)
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
