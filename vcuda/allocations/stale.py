"""Finds stale allocations and stale locks. An allocation is a set of annotations of a pod that names the pod's cards.

An allocation is stale if its pod no longer uses the cards, or never will. gpu-admission rejects to place a pod that has
a stale allocation (its message is ``had been predicated!``), and counts the cards as used. HAMi locks a node by an
annotation while it places a pod there. A lock is stale if it has expired, or if its pod does not exist.
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
"""A time in an annotation that is more than this many seconds in the future is ignored. vgpu-manager, for example,
writes the largest 64-bit number for "never"."""

AT_ONCE = -math.inf
"""The value of `Staleness.since` for an allocation that is stale immediately, whatever its age."""
_UNIX_TIME = re.compile(r"[0-9]{1,20}", re.ASCII)

Exists = Callable[[str], bool]
"""A function that returns whether a node with this name exists."""


class Removal(msgspec.Struct, frozen=True):
    """The annotations and labels that must be removed from a pod or node. ``scheme``: the vendor's name."""

    scheme: str
    rule: str
    why: str
    """The reason for the removal, for logs and Events."""
    annotations: tuple[str, ...]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """The data that decide whether one vendor's allocation on a pod is stale. ``now`` is a Unix time."""

    pod: StoredPod
    allocation: Allocation
    scheme: Scheme
    exists: Exists
    now: float
    timeout: float
    """The maximum number of seconds that the binding of a pod may take."""
    seen: float
    """The Unix time when this process first observed the allocation. Later times in annotations count as this time."""

    def is_in(self, phase: str) -> bool:
        """Return whether the pod's allocation of cards is in ``phase``, which is ``done`` or ``allocating``."""
        values = self.scheme.phase
        value = getattr(values, phase) if values else None
        return values is not None and value is not None and self.allocation.get(values.key) == value

    def allocated(self) -> float:
        """Return the Unix time of the allocation; infinity if neither the pod nor its annotations have a time."""
        # No allocation is older than its pod. Users can write any time into the annotations, so a time after ``seen``
        # (the first observation) counts as ``seen``. Otherwise a forged future time would keep a stale allocation.
        created = parse_rfc3339(self.pod.created)
        times = [] if created is None else [created]
        for key in self.scheme.predicate_times:
            at = parse_unix(self.allocation.get(key), self.scheme.time_unit)
            if at is not None and at <= self.now + ABSURD:
                times.append(min(at, self.seen))
        return max(times, default=math.inf)


class Staleness(NamedTuple):
    """A rule by which an allocation is stale: its name, the reason, and the Unix time from which it is stale."""

    rule: str
    since: float
    why: str


def _stale_by(case: Case) -> Iterator[Staleness]:
    """Yield each rule by which the allocation is stale now or later. The first rule that applies is reported."""
    pod, node = case.pod, case.allocation.get(case.scheme.predicate_node)
    if not pod.live:
        yield Staleness("finished", AT_ONCE, "the pod has ended")
        return
    if not pod.node and node and not case.exists(node):
        yield Staleness("node-gone", AT_ONCE, f"node {node} of the allocation does not exist")
    made = case.allocated()
    since = made + case.timeout
    # The allocation of a bound pod is not stale in four cases:
    # - The allocation is for the pod's node. gpu-manager (`Allocate`, `PreStartContainer`), HAMi and vgpu-manager read
    #   the allocation while the containers start. From then on, every scheduler counts the allocated cards as used.
    # - The allocation names no node.
    # - The phase of the allocation is ``done``. Only the device plugin of the pod's own node writes this phase.
    # - The timeout since the allocation has not passed, so kubelet may still be reading the allocation.
    if pod.node and node and node != pod.node and not case.is_in("done"):
        yield Staleness("other-node", since, f"the allocation is for {node}, but the pod is bound to {pod.node}")
    if pod.node or math.isinf(made):
        return
    shown = rfc3339(min(made, case.now))  # A future time may have a year after 9999, which datetime rejects.
    if case.is_in("allocating"):
        yield Staleness("allocating", since, f"the binding of the pod began at {shown} and never completed")
    yield Staleness("unbound", since, f"the allocation was made at {shown}, and the pod was never bound")


def future_times(pod: StoredPod, now: float) -> tuple[str, ...]:
    """Return the texts of those times in a pod's allocation that are in the future."""
    if pod.allocation is None:
        return ()
    times = ((pod.allocation.get(key), scheme) for scheme in pod.allocation.schemes for key in scheme.predicate_times)
    return tuple(text for text, scheme in times if text and (parse_unix(text, scheme.time_unit) or 0) > now)


def find_stale(
    pod: StoredPod, exists: Exists, now: float, timeout: float, seen: float = math.inf
) -> tuple[Removal, ...]:
    """Return the annotations and labels to remove from the pod, for each vendor whose allocation on the pod is stale.

    `Case` describes the parameters.
    """
    found = []
    for case in _cases(pod, exists, now, timeout, seen):
        if stale := next((each for each in _stale_by(case) if each.since <= now), None):
            keys = case.allocation.keys_of(case.scheme)
            found.append(Removal(case.scheme.name, stale.rule, stale.why, *keys))
    return tuple(found)


def first_stale(pod: StoredPod, exists: Exists, now: float, timeout: float, seen: float = math.inf) -> float | None:
    """Return the first Unix time at which an allocation is stale if the pod does not change; None if never."""
    every = (stale.since for case in _cases(pod, exists, now, timeout, seen) for stale in _stale_by(case))
    first = min(every, default=math.inf)
    return None if first == math.inf else first


def _cases(pod: StoredPod, exists: Exists, now: float, timeout: float, seen: float) -> Iterator[Case]:
    if pod.allocation:
        for scheme in pod.allocation.schemes:
            yield Case(pod, pod.allocation, scheme, exists, now, timeout, seen)


def removal_patch(resource_version: str, removals: Iterable[Removal]) -> bytes:
    """Return a JSON Patch that removes annotations and labels. It fails if the object's resourceVersion has changed."""
    # The operation ``test`` makes the patch fail if a scheduler has changed the object since the object was read.
    operations = [{"op": "test", "path": "/metadata/resourceVersion", "value": resource_version}]
    for removal in removals:
        for parent, keys in (("annotations", removal.annotations), ("labels", removal.labels)):
            operations += [{"op": "remove", "path": f"/metadata/{parent}/{escape(key)}"} for key in keys]
    return msgspec.json.encode(operations)


def parse_unix(text: str | None, unit: int) -> float | None:
    """Return a Unix time in seconds; None if ``text`` is no Unix time. ``unit``: the units in a second."""
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
"""A function that returns whether a pod with this namespace and name exists."""


class Lock(msgspec.Struct, frozen=True):
    """A lock by which a vendor's scheduler makes sure that it places only one pod at a time on a node."""

    scheme: Scheme
    value: str
    taken: float | None
    """The Unix time when the lock was taken; None if the lock has no time."""
    holder: tuple[str, str] | None
    """The namespace and name of the pod for which the lock was taken; None if the lock names no pod."""

    def expires(self, seen: float, now: float, timeout: float) -> float:
        """Return the Unix time at which the lock expires.

        If the lock's time is missing or far in the future, ``seen``, the time of the first observation, counts instead.
        """
        taken = seen if self.taken is None or self.taken > now + ABSURD else self.taken
        return taken + timeout


def read_locks(node: Node) -> Iterator[Lock]:
    # The text of HAMi's node lock is "time,namespace,pod" (pkg/util/nodelock). In older releases it is only the time.
    for scheme in SCHEMES:
        value = node.annotations.get(scheme.node_lock) if scheme.node_lock else None
        if value is not None:
            taken, *holder = value.split(",")
            named = (holder[0], holder[1]) if len(holder) == 2 and all(holder) else None  # noqa: PLR2004  # a namespace and a pod
            yield Lock(scheme, value, parse_rfc3339(taken), named)


def find_stale_lock(lock: Lock, expires: float, now: float, exists: HolderExists) -> Removal | None:
    """Return the annotation to remove if the lock has expired or its pod does not exist; None if the lock is in use."""
    keys = (str(lock.scheme.node_lock),)
    if expires <= now:
        return Removal(lock.scheme.name, "lock-expired", f"the lock was never released: {lock.value}", keys)
    if lock.holder and not exists(*lock.holder):
        why = f"pod {'/'.join(lock.holder)} of the lock does not exist"
        return Removal(lock.scheme.name, "lock-holder-gone", why, keys)
    return None
