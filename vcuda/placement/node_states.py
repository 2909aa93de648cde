"""The states of nodes that decide whether a new pod can run there now: taints, cordons, readiness, and offered GPUs.

The rules for taints are those of Kubernetes (k8s.io/component-helpers ``scheduling/corev1/helpers``). As for the
scheduler, a cordon (``spec.unschedulable``) is a taint. A node that is not ready counts as tainted too, because the
node lifecycle controller puts the taint on the node a moment later.

The states decide only the order in which /mutate tries GPU models. /validate does not read them.
"""

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

import msgspec

from vcuda.k8s_types import Check, Node, Toleration, no_check, whole_or_none
from vcuda.quota.values import listed

NOT_READY, UNREACHABLE = "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"
_EFFECTS = ("NoSchedule", "NoExecute")
_EXISTS = "Exists"
_EVERY = -1
"""The set of all nodes. In Python, all bits of the integer -1 are set."""
_MAX_SHOWN = 3
MAX_TAINTS = 256
"""The most different taints that are told apart: the most common. A node with another taint takes only pods that
tolerate everything."""
_MAX_REMEMBERED = 256
_MAX_TOLERATIONS = 32
"""The nodes that take pods with these tolerations are remembered only for at most this many tolerations."""


class Taint(NamedTuple):
    """A taint of a node that keeps away new pods."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"


CORDON = Taint("node.kubernetes.io/unschedulable")
_OTHERS = Taint("", effect="")


class NodeAvailability(NamedTuple):
    """The state of one node."""

    taints: frozenset[Taint] = frozenset()
    """The taints with the effect NoSchedule or NoExecute, with a taint for a cordon and one for a node not ready."""
    offered: frozenset[tuple[str, int]] | None = None
    """The allocatable amounts above 0 of extended resources, with their names; None if the node reports no amounts."""

    @property
    def takes_pods(self) -> str:
        """A text for people: whether new pods may run on the node."""
        obstacles = ["cordoned"] * (CORDON in self.taints)
        obstacles += ["not ready"] * any(map(_is_not_ready, self.taints))
        if obstacles:
            return f"no: {', '.join(obstacles)}"
        taints = sorted(f"{key}{value and '='}{value}:{effect}" for key, value, effect in self.taints)
        return f"if tolerated: {listed(taints, _MAX_SHOWN)}" if taints else "yes"


# Most nodes have equal states. One shared object saves memory.
_shared = functools.lru_cache(4096)(NodeAvailability)


def read_state(node: Node) -> NodeAvailability:
    spec, status = node.spec, node.status
    found = (Taint(each.key, each.value, each.effect) for each in (spec and spec.taints) or ())
    taints = {each for each in found if each.effect in _EFFECTS}
    if spec and spec.unschedulable:
        taints.add(CORDON)
    ready = next((each.status for each in (status and status.conditions) or () if each.type == "Ready"), "True")
    if ready != "True":
        taints.add(Taint(UNREACHABLE if ready == "Unknown" else NOT_READY))
    allocatable = (status and status.allocatable) or None
    # The names of all extended resources contain a slash, and the names of Kubernetes' own resources do not.
    offered = allocatable and frozenset(
        (name, amount) for name, quantity in allocatable.items() if "/" in name and (amount := whole_or_none(quantity))
    )
    return _shared(frozenset(taints), offered)


class NodeStates(msgspec.Struct, frozen=True, dict=True):
    """The states of all nodes in `Nodes.index`, as sets of nodes: integers with one bit for each node. In
    ``NodeStates()`` all states are unknown. A node whose state is unknown can take every pod."""

    tainted: Mapping[Taint, int] = {}
    offering: Mapping[str, Mapping[int, int]] = {}
    """The nodes that offer a resource, by the name of the resource and the allocatable amount."""
    unknown: int = _EVERY
    """The nodes whose offered resources are unknown."""

    @classmethod
    def of(cls, names: Collection[str], states: Mapping[str, NodeAvailability]) -> "NodeStates":
        """Return the states of the nodes ``names``, which must be in the order of `Nodes.index`."""
        # Bytes are changed in place. Changing an integer copies all of its bits, once for each node.
        by_state: dict[NodeAvailability, bytearray] = {}
        for at, name in enumerate(names):
            state = states.get(name, _UNKNOWN)
            bits = by_state.get(state)
            if bits is None:
                bits = by_state[state] = bytearray(len(names) // 8 + 1)
            bits[at >> 3] |= 1 << (at & 7)
        sets = {state: int.from_bytes(bits, "little") for state, bits in by_state.items()}
        counts: Counter[Taint] = Counter()
        for state, nodes in sets.items():
            counts.update(dict.fromkeys(state.taints, nodes.bit_count()))
        apart = {taint for taint, _ in counts.most_common(MAX_TAINTS)}
        tainted: dict[Taint, int] = {}
        offering: dict[str, dict[int, int]] = {}
        unknown = 0
        for state, nodes in sets.items():
            for taint in state.taints:
                kept = taint if taint in apart else _OTHERS
                tainted[kept] = tainted.get(kept, 0) | nodes
            for resource, amount in state.offered or ():
                amounts = offering.setdefault(resource, {})
                amounts[amount] = amounts.get(amount, 0) | nodes
            unknown |= nodes if state.offered is None else 0
        return cls(tainted, offering, unknown)

    @functools.cached_property
    def closed(self) -> "NodeStates":
        """The states without the taints that some pods may tolerate: only cordons and nodes that are not ready."""
        return NodeStates(
            {each: nodes for each, nodes in self.tainted.items() if each == CORDON or _is_not_ready(each)}
        )

    def offer(self, resources: Mapping[str, int]) -> int:
        """Return the nodes that offer at least these amounts of all these resources."""
        found = _EVERY
        for resource, amount in resources.items():
            enough = self.unknown
            for offered, nodes in self.offering.get(resource, {}).items():
                enough |= nodes if offered >= amount else 0
            found &= enough
        return found

    def take(self, tolerations: tuple[Toleration, ...] | None, check: Check = no_check) -> int:
        """Return the nodes without a taint that a pod with these tolerations does not tolerate."""
        if not self.tainted:
            return _EVERY
        check(len(tolerations or ()))
        tolerated = frozenset(
            (each.key, None if each.operator == _EXISTS else each.value, each.effect)
            for each in tolerations or ()
            if each.operator in ("", "Equal", _EXISTS)
        )
        if len(tolerated) <= _MAX_TOLERATIONS:
            return self._take(tolerated)
        return self._untainted(tolerated)

    @functools.cached_property
    def _take(self) -> Callable[[frozenset[tuple[str, str | None, str]]], int]:
        return functools.lru_cache(_MAX_REMEMBERED)(self._untainted)

    def _untainted(self, tolerated: frozenset[tuple[str, str | None, str]]) -> int:
        found = _EVERY
        for (key, value, effect), nodes in self.tainted.items():
            # An empty effect or, with the operator Exists, an empty key matches every one.
            same = ((key, value), (key, None), ("", None))
            if not any((*each, how) in tolerated for each in same for how in (effect, "")):
                found &= ~nodes
        return found

    def obstacle(
        self, nodes: int, resources: Mapping[str, int], tolerations: tuple[Toleration, ...] | None = None
    ) -> str:
        """Return why none of these nodes can take a pod now. ``nodes``: a set that is not empty."""
        left, counted = nodes, []
        for of_reason, (one, several), rest in self._obstacles(resources, tolerations):
            found = (left & of_reason).bit_count()
            if found:
                counted.append((found, f"{several if found > 1 else one} {rest}"))
            left &= ~of_reason
        every = nodes.bit_count()
        if len(counted) == 1:
            return f"its {'node' if every == 1 else f'{every} nodes'} {counted[0][1]}"
        return f"of its {every} nodes, {', '.join(f'{found} {text}' for found, text in counted)}"

    def _obstacles(
        self, resources: Mapping[str, int], tolerations: tuple[Toleration, ...] | None
    ) -> Iterator[tuple[int, tuple[str, str], str]]:
        """Yield each obstacle with the nodes that have it, the verb for one node and for several, and the rest."""
        cordons = NodeStates({CORDON: self.tainted.get(CORDON, 0)})
        not_ready = NodeStates({taint: nodes for taint, nodes in self.tainted.items() if _is_not_ready(taint)})
        yield ~self.offer(resources), ("does not offer", "do not offer"), amounts_of(resources)
        yield ~cordons.take(tolerations), ("is", "are"), "cordoned"
        yield ~not_ready.take(tolerations), ("is", "are"), "not ready"
        yield ~self.take(tolerations), ("has", "have"), "taints that the pod does not tolerate"


def amounts_of(resources: Mapping[str, int]) -> str:
    """Return a text such as ``8 nvidia.com/gpu``."""
    return listed([f"{amount} {name}" for name, amount in resources.items()], _MAX_SHOWN)


def _is_not_ready(taint: Taint) -> bool:
    return taint.key in (NOT_READY, UNREACHABLE)


_UNKNOWN = NodeAvailability()
