"""Which allocations on pods are stale: written by a scheduler, and never to be used, or used no more.

gpu-admission refuses a pod that carries one for ever (``had been predicated!``), and counts it on its node. What is
alive is never touched. The locks by which HAMi's scheduler and device plugin take turns on a node are judged here too.
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
"""Seconds: a time that is further in the future is none; vgpu-manager writes the largest 64-bit number for "never"."""

AT_ONCE = -math.inf
_UNIX_TIME = re.compile(r"[0-9]{1,20}", re.ASCII)

Exists = Callable[[str], bool]
"""Whether there is a node of this name."""


class Removal(msgspec.Struct, frozen=True):
    """What is to go from an object: one scheme's annotations and labels, by which rule, and why, for people."""

    scheme: str
    rule: str
    why: str
    annotations: tuple[str, ...]
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """One scheme's allocation on one pod, at ``now`` (Unix seconds). ``timeout``: seconds that binding may take.

    ``seen``: when its times were first seen, in Unix seconds; one that was yet to come then counts as that.
    """

    pod: StoredPod
    allocation: Allocation
    scheme: Scheme
    exists: Exists
    now: float
    timeout: float
    seen: float

    @property
    def node(self) -> str | None:
        """The node that was chosen, or None where that is not told."""
        return self.allocation.get(self.scheme.predicate_node)

    def is_in(self, phase: str) -> bool:
        """Return whether the allocation has come to ``done`` or ``allocating``."""
        told = self.scheme.phase
        value = getattr(told, phase) if told else None
        return told is not None and value is not None and self.allocation.get(told.key) == value

    def allocated(self) -> float:
        """Return when it was allocated, in Unix seconds: the newest believable time; infinity where nothing tells."""
        # No allocation comes before the pod's creation. Whoever owns the pod can write any time: none that is yet to
        # come keeps an allocation for longer than one of now would.
        created = parse_rfc3339(self.pod.created)
        times = [] if created is None else [created]
        for key in self.scheme.predicate_times:
            at = parse_unix(self.allocation.get(key), self.scheme.time_unit)
            if at is not None and at <= self.now + ABSURD:
                times.append(min(at, self.seen))
        return max(times, default=math.inf)


class Staleness(NamedTuple):
    """The rule by which an allocation is stale, from when on, in Unix seconds, and why, for people."""

    rule: str
    since: float
    why: str


def _stale_by(case: Case) -> Iterator[Staleness]:
    """Yield each rule that applies; the first that holds counts. A scheme's row says what is read for it."""
    pod, node = case.pod, case.node
    if not pod.live:
        yield Staleness("finished", AT_ONCE, "the pod has ended")
        return
    if not pod.node and node and not case.exists(node):
        yield Staleness("node-gone", AT_ONCE, f"its node {node} does not exist")
    made = case.allocated()
    since = made + case.timeout
    # Nothing is taken from a pod that is bound to the node it was allocated on: gpu-manager reads its annotations while
    # its containers start (`Allocate`, `PreStartContainer`), HAMi and vgpu-manager too, and every scheduler counts them
    # from then on. Nor where they do not name a node, or where the device plugin has written that the cards are the
    # pod's: only the plugin of the pod's own node writes that. Nor at once: kubelet may be at work on what was written.
    if pod.node and node and node != pod.node and not case.is_in("done"):
        yield Staleness("other-node", since, f"made for {node}, bound to {pod.node}")
    if pod.node or math.isinf(made):
        return
    told = rfc3339(min(made, case.now))  # no date has more than four digits for its year, and a later one is not told
    if case.is_in("allocating"):
        yield Staleness("allocating", since, f"its binding began at {told} and never came about")
    yield Staleness("unbound", since, f"made at {told}, and the pod was never bound")


def future_times(pod: StoredPod, now: float) -> tuple[str, ...]:
    """Return the times of allocation on a pod that are yet to come, as they are written."""
    if pod.allocation is None:
        return ()
    told = ((pod.allocation.get(key), scheme) for scheme in pod.allocation.schemes for key in scheme.predicate_times)
    return tuple(text for text, scheme in told if text and (parse_unix(text, scheme.time_unit) or 0) > now)


def find_stale(
    pod: StoredPod, exists: Exists, now: float, timeout: float, seen: float = math.inf
) -> tuple[Removal, ...]:
    """Return what is stale on a pod: at most one removal for each scheme that has written on it.

    ``now`` and ``seen`` are in Unix seconds, ``timeout`` in seconds; see `Case`. ``exists`` is only asked about nodes
    that unbound pods name.
    """
    return tuple(filter(None, map(_judge, _cases(pod, exists, now, timeout, seen))))


def first_stale(pod: StoredPod, exists: Exists, now: float, timeout: float, seen: float = math.inf) -> float | None:
    """Return the Unix time from which something on a pod is stale as it stands now; it may have passed.

    None where only a change of the pod, or of the nodes, can make it so.
    """
    every = (stale.since for case in _cases(pod, exists, now, timeout, seen) for stale in _stale_by(case))
    first = min(every, default=math.inf)
    return None if first == math.inf else first


def _cases(pod: StoredPod, exists: Exists, now: float, timeout: float, seen: float) -> Iterator[Case]:
    if pod.allocation:
        for scheme in pod.allocation.schemes:
            yield Case(pod, pod.allocation, scheme, exists, now, timeout, seen)


def _judge(case: Case) -> Removal | None:
    for rule, since, why in _stale_by(case):
        if since <= case.now:
            keys = case.allocation.keys_of(case.scheme)
            return Removal(case.scheme.name, rule, why, keys.annotations, keys.labels)
    return None


def removal_patch(resource_version: str, removals: Iterable[Removal]) -> bytes:
    """Return the JSON Patch that takes all this from an object, if it is still of this version."""
    # A merge patch would do without the test, and could take what a scheduler has written a moment ago.
    operations = [{"op": "test", "path": "/metadata/resourceVersion", "value": resource_version}]
    for removal in removals:
        for parent, keys in (("annotations", removal.annotations), ("labels", removal.labels)):
            operations += [{"op": "remove", "path": f"/metadata/{parent}/{escape(key)}"} for key in keys]
    return msgspec.json.encode(operations)


def parse_unix(text: str | None, unit: int) -> float | None:
    """Return a Unix time in seconds, from one of ``unit`` in a second; None for what is no whole number."""
    return int(text) / unit if text and _UNIX_TIME.fullmatch(text) else None


def parse_rfc3339(text: str) -> float | None:
    """Return a Unix time in seconds; None for what is no RFC 3339 time with its offset."""
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.timestamp() if moment.tzinfo else None


def rfc3339(at: float) -> str:
    """Return a Unix time for people."""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


HolderExists = Callable[[str, str], bool]
"""Whether there is a pod of this namespace and name."""


class Lock(msgspec.Struct, frozen=True):
    """A lock on a node. ``taken``: Unix seconds, or None where it does not tell; ``holder``: namespace and pod."""

    scheme: Scheme
    value: str
    taken: float | None
    holder: tuple[str, str] | None

    def expires(self, seen: float, now: float, timeout: float) -> float:
        """Return when its time is over, in Unix seconds.

        ``seen`` is when it was first seen, and counts where it does not tell a time, or one that cannot be.
        """
        believable = self.taken is not None and self.taken <= now + ABSURD
        return (self.taken if self.taken is not None and believable else seen) + timeout


def read_locks(node: Node) -> Iterator[Lock]:
    """Yield every scheme's lock on a node."""
    # HAMi writes "time,namespace,pod" (pkg/util/nodelock), its older releases the time alone.
    for scheme in SCHEMES:
        value = node.annotations.get(scheme.node_lock) if scheme.node_lock else None
        if value is not None:
            taken, *holder = value.split(",")
            named = (holder[0], holder[1]) if len(holder) == 2 and all(holder) else None  # noqa: PLR2004  # namespace, pod
            yield Lock(scheme, value, parse_rfc3339(taken), named)


def find_stale_lock(lock: Lock, expires: float, now: float, exists: HolderExists) -> Removal | None:
    """Return the removal of a lock whose time is over or whose pod is gone; ``exists`` is asked in time only."""
    keys = (str(lock.scheme.node_lock),)
    if expires <= now:
        return Removal(lock.scheme.name, "lock-expired", f"never given back: {lock.value}", keys)
    if lock.holder and not exists(*lock.holder):
        return Removal(lock.scheme.name, "lock-holder-gone", f"its pod {'/'.join(lock.holder)} does not exist", keys)
    return None
