"""Removes stale allocations: unused annotations and labels that a vendor's scheduler has left on a pod or node.

The watches may be behind, so they only show which objects to check. Each object is read again before the decision. A
patch removes the allocation only if the object still has the resourceVersion that was read.
"""

import contextlib
import time
from collections.abc import Callable
from http import HTTPStatus

import msgspec
import structlog

from controller.metrics import GarbageMetrics
from controller.pods import PodInformer, pod_path
from controller.workqueue import Reconciler
from vcuda import errors, k8s_types
from vcuda.allocations import stale, stored_pods
from vcuda.k8s_types import Decoder
from vcuda.kube import JSON_PATCH, Event, InvolvedObject, Kube, NodeInformer, post_event_or_log, segment

COMPONENT = "vcuda-controller"
REASON = "StaleAllocationRemoved"

MAX_ATTEMPTS = 5  # Maximum attempts to check one pod or node while other clients change the object.
PERIOD_SECONDS = 60.0
"""Seconds until all pods and nodes are checked again, in case an event was missed or a clock was wrong."""
STUCK_PERIODS = 5  # The loop counts as stuck if it has handled no queue key for this many `PERIOD_SECONDS`.
RETRY_SECONDS = 10.0
MIN_INTERVAL_SECONDS = 10.0
"""The minimum seconds between two checks of one pod or node. So a tenant that writes the same pod again and again gets
few requests of the controller, and delays the checks of other pods little."""
LOCK_GRACE_SECONDS = 10.0
"""Seconds until a new lock of a node (an annotation that a vendor's scheduler writes while it binds a pod) is checked.
Most locks are released within this time."""

MAX_KEYS_LOGGED = 20
"""The maximum number of removed annotation keys in one log line. A pod can have thousands of annotations."""

EVERYTHING = ""
"""The queue key that stands for all pods and nodes. A pod's key is NAMESPACE/NAME, and a node's key is NAME."""
_NODE = Decoder(k8s_types.Node)


class StaleObject(msgspec.Struct, frozen=True):
    """A pod or node with stale allocations. ``subject``: a reference to its checked version. ``path``: its API path."""

    subject: InvolvedObject
    path: str
    removals: tuple[stale.Removal, ...]


Remove = Callable[[StaleObject], None]
"""A function that removes stale allocations, or only logs them. Raises Conflict if the object has changed."""


class PatchRemover:
    """Removes stale GPU allocations. Each removal is logged, counted, and reported by an Event on the pod or node."""

    def __init__(self, kube: Kube, metrics: GarbageMetrics) -> None:
        self._kube = kube
        self._metrics = metrics
        self._log = structlog.get_logger()

    def remove(self, found: StaleObject) -> None:
        """Remove stale allocations by a patch, and report this. Raises Conflict or another error of `Kube.patch`."""
        body = stale.removal_patch(found.subject.resource_version, found.removals)
        try:
            self._kube.patch(found.path, body, JSON_PATCH)
        except errors.ApiError as error:
            # If the object has changed, the resourceVersion test of the patch fails, and the API server answers 422.
            if error.status == HTTPStatus.UNPROCESSABLE_ENTITY:
                raise errors.Conflict(error.status, error.message) from error
            raise
        # The Event is written after the patch, so it never reports a removal that failed. If the process crashes after
        # the patch, there is no Event.
        for removal in found.removals:
            self._metrics.removed.labels(removal.scheme, removal.rule).inc()
            self._log.info("stale allocation removed", **_fields(found, removal))
            self._post(found.subject, removal)

    def _post(self, subject: InvolvedObject, removal: stale.Removal) -> None:
        # The Event's name contains the resourceVersion of the object, so that each removal gets its own Event.
        identity = f"{removal.scheme}-{removal.rule}-{subject.resource_version}"
        keys = ", ".join((*removal.annotations, *removal.labels))
        message = f"the stale allocation of {removal.scheme} was removed: {removal.why} ({keys})"
        post_event_or_log(self._kube, Event(subject, identity, REASON, message, COMPONENT))


def report_only(found: StaleObject) -> None:
    for removal in found.removals:
        structlog.get_logger().info("stale allocation found; a dry run removes nothing", **_fields(found, removal))


def _fields(found: StaleObject, removal: stale.Removal) -> dict[str, object]:
    subject = found.subject
    about = {"kind": subject.kind, "namespace": subject.namespace, "name": subject.name, "uid": subject.uid}
    keys = (*removal.annotations, *removal.labels)
    removed = {"keys": keys[:MAX_KEYS_LOGGED], "removals": len(keys)}
    return {**about, "scheme": removal.scheme, "rule": removal.rule, "why": removal.why, **removed}


class StaleAllocationGc:
    """Checks each pod and each node as soon as an allocation on the pod, or a lock on the node, can be stale.

    ``timeout``: seconds that the binding of a pod may take, or that a lock may exist. ``wall``: returns the Unix time.
    """

    def __init__(
        self,
        kube: Kube,
        pods: PodInformer,
        nodes: NodeInformer,
        remove: Remove,
        timeout: float,
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reconciler = Reconciler(
            "garbage",
            self.reconcile,
            failure="stale allocations could not be checked",
            retry_seconds=RETRY_SECONDS,
            min_interval=MIN_INTERVAL_SECONDS,
            key_name="object",
            clock=clock,
        )
        self._queue = self.reconciler.queue
        self._kube = kube
        self._pods = pods
        self._nodes = nodes
        self._remove = remove
        self._timeout = timeout
        self._wall = wall
        # `_served`: by queue key, the pod or node at its last complete check. It is checked again after a change.
        self._served: dict[str, stored_pods.StoredPod | tuple[stale.Lock, ...]] = {}
        # `_future_seen`: by pod uid, allocation times that were in the future, and when this process first saw them.
        self._future_seen: dict[str, tuple[tuple[str, ...], float]] = {}
        # `_locks_seen`: by node and vendor, a lock and when it was first seen, because some locks contain no time.
        self._locks_seen: dict[tuple[str, str], tuple[str, float]] = {}
        pods.follow(self._pod_changed)
        nodes.follow(self._node_changed)
        # The key EVERYTHING is due now and once in each period. So a loop that handles no key for longer is stuck.
        self.add_all()

    def add_all(self) -> None:
        self._queue.add(EVERYTHING)

    def is_stuck(self) -> bool:
        return self.reconciler.is_stuck(PERIOD_SECONDS * STUCK_PERIODS)

    def look_at_all(self) -> None:
        self._served = {key: seen for key, seen in self._served.items() if self._watched(key) == seen}
        pods = list(self._pods.all_pods())
        stored = {pod.uid for pod in pods}
        self._future_seen = {uid: seen for uid, seen in self._future_seen.items() if uid in stored}
        for pod in pods:
            self._pod_changed(None, pod)
        locked = {node.metadata.name for node in self._nodes.reflector.snapshot().values() if node.annotations}
        self._locks_seen = {key: seen for key, seen in self._locks_seen.items() if key[0] in locked}
        for name in locked:
            self._queue.add(name)

    def reconcile(self, key: str) -> float | None:
        """Remove the stale allocations of a pod or node, or queue all of them. Return the seconds to the next check.

        ``key``: see `EVERYTHING`. Raises VcudaError, or an error of decoding.
        """
        if key == EVERYTHING:
            self.look_at_all()
            return PERIOD_SECONDS
        watched = self._watched(key)
        if not watched or self._served.get(key) == watched:
            return None
        if isinstance(watched, stored_pods.StoredPod) and (delay := self._delay(watched)) != 0:
            return delay
        again = self.remove_stale(key)
        if again is None:
            self._served[key] = watched
        return again

    def remove_stale(self, key: str) -> float | None:
        """Read a pod or node, and remove its stale allocations. Return the seconds until another may be stale.

        Raises Conflict if every patch conflicted with another write. Raises other VcudaErrors, and errors of decoding.
        """
        judge = self._judge_pod if "/" in key else self._judge_node
        for _ in range(MAX_ATTEMPTS - 1):
            with contextlib.suppress(errors.Conflict):
                return judge(key)
        return judge(key)

    def _judge_pod(self, key: str) -> float | None:
        namespace, _, name = key.partition("/")
        path = pod_path(namespace, name)
        try:
            pod = self._pods.decode_with_allocations(self._kube.get(path))
        except errors.NotFound:
            return None
        if pod is None:
            return None
        rejected: list[errors.ApiError] = []

        def exists(node: str) -> bool:
            # If the API server rejects to read a node, assume that the node exists, and apply the other rules.
            try:
                return self._node_exists(node)
            except errors.ApiError as error:
                rejected.append(error)
                return True

        now = self._wall()
        seen = self._times_seen(pod, now)
        removals = stale.find_stale(pod, exists, now, self._timeout, seen)
        if not removals:
            since = stale.first_stale(pod, exists, now, self._timeout, seen)
            if rejected:
                raise rejected[0]
            return None if since is None else since - now
        subject = InvolvedObject("v1", "Pod", pod.name, pod.namespace, pod.uid, pod.version)
        self._remove(StaleObject(subject, path, removals))
        return None

    def _judge_node(self, name: str) -> float | None:
        path = f"/api/v1/nodes/{segment(name)}"
        try:
            node = _NODE.decode(self._kube.get(path))
        except errors.NotFound:
            return None
        now = self._wall()
        locks = {lock: self._expires(name, lock, now) for lock in stale.read_locks(node)}
        found = [stale.find_stale_lock(lock, expires, now, self._pod_exists) for lock, expires in locks.items()]
        removals = tuple(filter(None, found))
        if not removals:
            return min((expires - now for expires in locks.values()), default=None)
        uid, version = node.metadata.uid, node.metadata.resource_version
        self._remove(StaleObject(InvolvedObject("v1", "Node", name, "", uid, version), path, removals))
        return None

    def _times_seen(self, pod: stored_pods.StoredPod, now: float) -> float:
        times = stale.future_times(pod, now)
        if not times:
            return now
        # If the time of an allocation is in the future, its age counts from when this process first saw that time. A
        # newly written time restarts the count.
        known, seen = self._future_seen.get(pod.uid, ((), now))
        if not set(times) <= set(known):
            known, seen = times, now
        self._future_seen[pod.uid] = known, seen
        return seen

    def _expires(self, name: str, lock: stale.Lock, now: float) -> float:
        key = name, lock.scheme.name
        value, seen = self._locks_seen.get(key, ("", now))
        if value != lock.value:
            seen = now
            self._locks_seen[key] = lock.value, seen
        return lock.expires(seen, now, self._timeout)

    def _watched(self, key: str) -> stored_pods.StoredPod | tuple[stale.Lock, ...] | None:
        """Return the watched pod, or the locks of the watched node, with this queue key; None if it does not exist."""
        namespace, slash, name = key.partition("/")
        if slash:
            return self._pods.pod(namespace, name)
        node = self._nodes.reflector.get(("", key))
        return tuple(stale.read_locks(node)) if node else None

    def _delay(self, pod: stored_pods.StoredPod) -> float | None:
        """Return the seconds until an allocation of the pod can be stale if the pod does not change; None for never."""
        now = self._wall()
        since = stale.first_stale(pod, self._is_watched, now, self._timeout, self._times_seen(pod, now))
        return None if since is None else max(0.0, since - now)

    def _is_watched(self, node: str) -> bool:
        return self._nodes.reflector.get(("", node)) is not None

    def _node_exists(self, node: str) -> bool:
        # If the watch does not show the node, read it from the API server, because the watch may be behind.
        if self._is_watched(node):
            return True
        return k8s_types.can_be_name(node) and self._is_stored(f"/api/v1/nodes/{segment(node)}")

    def _pod_exists(self, namespace: str, name: str) -> bool:
        return (
            k8s_types.can_be_name(namespace)
            and k8s_types.can_be_name(name)
            and self._is_stored(pod_path(namespace, name))
        )

    def _is_stored(self, path: str) -> bool:
        try:
            self._kube.get(path)
        except errors.NotFound:
            return False
        return True

    def _pod_changed(self, _old: stored_pods.StoredPod | None, new: stored_pods.StoredPod | None) -> None:
        key = f"{new.namespace}/{new.name}" if new else ""
        delay = self._delay(new) if new and new.allocation else None
        if delay is not None and self._served.get(key) != new:
            self._queue.add(key, delay)

    def _node_changed(self, _old: k8s_types.Node | None, new: k8s_types.Node | None) -> None:
        if new and new.annotations:
            self._queue.add(new.metadata.name, min(LOCK_GRACE_SECONDS, self._timeout))
        if new is None:
            self._queue.add(EVERYTHING, interval=0.0)
