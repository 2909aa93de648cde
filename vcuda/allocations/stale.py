"""Finds stale allocations. A scheduler wrote them on a pod, and they are not used any more, or never will be.

gpu-admission never places a pod that has a stale allocation (``had been predicated!``), and counts the allocation on
its node. An allocation that is in use is never stale. This module also finds stale locks. By a lock on the node, HAMi's
scheduler and device plugin take turns.
"""

import datetime
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from jsonpointer import escape

from vcuda.allocations.stored_pods import Allocation, StoredPod
from vcuda.k8s_types import Node
from vcuda.requests.schemes import SCHEMES, Scheme

ABSURD = 86_400.0
"""A time that lies more than this many seconds in the future is ignored. vgpu-manager writes the largest 64-bit number
for "never"."""

AT_ONCE = -math.inf
_UNIX_TIME = re.compile(r"[0-9]{1,20}", re.ASCII)

Exists = Callable[[str], bool]
"""Returns whether a node with this name exists."""


class Removal(msgspec.Struct, frozen=True):
    """The annotations and labels of one scheme that must be removed from an object."""

    scheme: str
    rule: str
    why: str
    """The reason, in words for people."""
    annotations: tuple[str, ...]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """The allocation of one scheme on one pod. All times are Unix seconds."""

    pod: StoredPod
    allocation: Allocation
    scheme: Scheme
    exists: Exists
    now: float
    timeout: float
    """The seconds that binding a pod may take."""
    seen: float
    """The time when the times of the allocation were first seen. A later time in the allocation counts as this time."""

    @property
    def node(self) -> str | None:
        """The node that the scheduler chose; None if the allocation names no node."""
        return self.allocation.get(self.scheme.predicate_node)

    def is_in(self, phase: str) -> bool:
        """Return whether the allocation is in this phase. ``phase``: ``done`` or ``allocating``."""
        told = self.scheme.phase
        value = getattr(told, phase) if told else None
        return told is not None and value is not None and self.allocation.get(told.key) == value

    def allocated(self) -> float:
        """Return the newest credible time of the allocation in Unix seconds; infinity if there is none."""
        # No allocation is older than its pod. The owner of the pod can write any time. A time in the future must not
        # make the allocation last longer than the current time.
        created = parse_rfc3339(self.pod.created)
        times = [] if created is None else [created]
        for key in self.scheme.predicate_times:
            at = parse_unix(self.allocation.get(key), self.scheme.time_unit)
            if at is not None and at <= self.now + ABSURD:
                times.append(min(at, self.seen))
        return max(times, default=math.inf)


class Staleness(NamedTuple):
    """A rule by which an allocation is stale, the Unix time from which it is stale, and the reason for people."""

    rule: str
    since: float
    why: str


def _stale_by(case: Case) -> Iterator[Staleness]:
    """Yield each rule by which the allocation is stale now or later. The first rule whose time has come decides."""
    pod, node = case.pod, case.node
    if not pod.live:
        yield Staleness("finished", AT_ONCE, "the pod has ended")
        return
    if not pod.node and node and not case.exists(node):
        yield Staleness("node-gone", AT_ONCE, f"its node {node} does not exist")
    made = case.allocated()
    since = made + case.timeout
    # A bound pod keeps its allocation in four cases:
    # - The allocation is for the pod's node. gpu-manager (`Allocate`, `PreStartContainer`), HAMi and vgpu-manager read
    #   it while the containers start, and every scheduler counts it from then on.
    # - The allocation names no node.
    # - The phase is done. Only the device plugin of the pod's own node writes this phase.
    # - The timeout has not passed, so kubelet may still be reading the allocation.
    if pod.node and node and node != pod.node and not case.is_in("done"):
        yield Staleness("other-node", since, f"the allocation is for {node}, but the pod is bound to {pod.node}")
    if pod.node or math.isinf(made):
        return
    told = rfc3339(min(made, case.now))  # a later time may have a year of more than four digits
    if case.is_in("allocating"):
        yield Staleness("allocating", since, f"its binding began at {told} and never completed")
    yield Staleness("unbound", since, f"the allocation was made at {told}, and the pod was never bound")


def future_times(pod: StoredPod, now: float) -> tuple[str, ...]:
    """Return the allocation times on a pod that are in the future, as they are written."""
    if pod.allocation is None:
        return ()
    told = ((pod.allocation.get(key), scheme) for scheme in pod.allocation.schemes for key in scheme.predicate_times)
    return tuple(text for text, scheme in told if text and (parse_unix(text, scheme.time_unit) or 0) > now)


def find_stale(
    pod: StoredPod, exists: Exists, now: float, timeout: float, seen: float = math.inf
) -> tuple[Removal, ...]:
    """Return the stale allocations of a pod, at most one for each scheme. For the parameters see `Case`."""
    found = []
    for case in _cases(pod, exists, now, timeout, seen):
        if stale := next((each for each in _stale_by(case) if each.since <= now), None):
            keys = case.allocation.keys_of(case.scheme)
            found.append(Removal(case.scheme.name, stale.rule, stale.why, keys.annotations, keys.labels))
    return tuple(found)


def first_stale(pod: StoredPod, exists: Exists, now: float, timeout: float, seen: float = math.inf) -> float | None:
    """Return the Unix time, even a past one, from which an allocation of the unchanged pod is stale; None if never."""
    every = (stale.since for case in _cases(pod, exists, now, timeout, seen) for stale in _stale_by(case))
    first = min(every, default=math.inf)
    return None if first == math.inf else first


def _cases(pod: StoredPod, exists: Exists, now: float, timeout: float, seen: float) -> Iterator[Case]:
    if pod.allocation:
        for scheme in pod.allocation.schemes:
            yield Case(pod, pod.allocation, scheme, exists, now, timeout, seen)


def removal_patch(resource_version: str, removals: Iterable[Removal]) -> bytes:
    """Return the JSON Patch with these removals. The patch fails if the object has another resourceVersion."""
    # A merge patch cannot test the version, and could remove keys that a scheduler wrote a moment ago.
    operations = [{"op": "test", "path": "/metadata/resourceVersion", "value": resource_version}]
    for removal in removals:
        for parent, keys in (("annotations", removal.annotations), ("labels", removal.labels)):
            operations += [{"op": "remove", "path": f"/metadata/{parent}/{escape(key)}"} for key in keys]
    return msgspec.json.encode(operations)


def parse_unix(text: str | None, unit: int) -> float | None:
    """Return the Unix time in ``text``, in seconds; None for other texts. For nanoseconds ``unit`` is 10**9."""
    return int(text) / unit if text and _UNIX_TIME.fullmatch(text) else None


def parse_rfc3339(text: str) -> float | None:
    """Return the time in ``text`` in Unix seconds; None if the text is not an RFC 3339 time with an offset."""
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.timestamp() if moment.tzinfo else None


def rfc3339(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


HolderExists = Callable[[str, str], bool]
"""Returns whether a pod with this namespace and name exists."""


class Lock(msgspec.Struct, frozen=True):
    """A lock of one scheme on a node."""

    scheme: Scheme
    value: str
    taken: float | None
    """The Unix time when the lock was taken; None if the lock has no time."""
    holder: tuple[str, str] | None
    """The namespace and name of the pod for which the lock was taken; None if the lock names no pod."""

    def expires(self, seen: float, now: float, timeout: float) -> float:
        """Return the Unix time when the lock expires. Without a credible time it counts as taken at ``seen``."""
        believable = self.taken is not None and self.taken <= now + ABSURD
        return (self.taken if self.taken is not None and believable else seen) + timeout


def read_locks(node: Node) -> Iterator[Lock]:
    """Yield the locks of all schemes on a node."""
    # HAMi writes "time,namespace,pod" (pkg/util/nodelock). Older releases write only the time.
    for scheme in SCHEMES:
        value = node.annotations.get(scheme.node_lock) if scheme.node_lock else None
        if value is not None:
            taken, *holder = value.split(",")
            named = (holder[0], holder[1]) if len(holder) == 2 and all(holder) else None  # noqa: PLR2004  # namespace, pod
            yield Lock(scheme, value, parse_rfc3339(taken), named)


def find_stale_lock(lock: Lock, expires: float, now: float, exists: HolderExists) -> Removal | None:
    """Return the removal of a lock that has expired, or whose pod does not exist; None if the lock is in use."""
    keys = (str(lock.scheme.node_lock),)
    if expires <= now:
        return Removal(lock.scheme.name, "lock-expired", f"the lock was never released: {lock.value}", keys)
    if lock.holder and not exists(*lock.holder):
        return Removal(lock.scheme.name, "lock-holder-gone", f"its pod {'/'.join(lock.holder)} does not exist", keys)
    return None
