"""The cluster's nodes: their GPU models, labels and registers (lists of cards), and whether they can run a new pod now.

The rules for taints are those of Kubernetes (k8s.io/component-helpers ``scheduling/corev1/helpers``). As for the
scheduler, a cordon (``spec.unschedulable``) is a taint. A node that is not ready counts as tainted too, because the
node lifecycle controller puts the taint on the node a moment later.

The states of nodes decide only the order in which /mutate tries GPU models. /validate does not read them.
"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from vcuda.k8s_types import Check, Node, Toleration, no_check, whole_or_none
from vcuda.placement.affinity import Labels, NodeIndex, NodeLabels
from vcuda.placement.registers import Registers
from vcuda.quota.values import listed
from vcuda.requests.resources import NO_ROWS, CardModels, RegisteredCards

COUNT_LABEL = "nvidia.com/gpu.count"
"""The node label with the number of the node's cards. NVIDIA's GPU feature discovery writes this label."""

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

MAX_WORDS = 16
"""Maximum number of words of a card type or model name that `matches_model` compares, to limit its time."""
_WORD = re.compile(r"[a-z0-9]+", re.ASCII)


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
    def obstacles(self) -> list[str]:
        """The reasons for people why no new pod may run on the node."""
        return ["cordoned"] * (CORDON in self.taints) + ["not ready"] * any(map(_is_not_ready, self.taints))

    @property
    def takes_pods(self) -> str:
        """A text for people: whether new pods may run on the node."""
        if obstacles := self.obstacles:
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
        # The sets are built as bytes, which are changed in place. An integer would be copied as a whole for each node.
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
        """These states with only two kinds of taints: cordons and nodes that are not ready. The rest is left out."""
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
        """Return the nodes whose taints a pod with these tolerations tolerates, and the nodes without taints."""
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
            # An empty effect matches every effect. With the operator Exists, an empty key matches every key.
            same = ((key, value), (key, None), ("", None))
            if not any((*each, how) in tolerated for each in same for how in (effect, "")):
                found &= ~nodes
        return found

    def obstacle(
        self, nodes: int, resources: Mapping[str, int], tolerations: tuple[Toleration, ...] | None = None
    ) -> str:
        """Return why none of these nodes can take a pod now. ``nodes`` must not be empty."""
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
        """Yield the parts of a message for each obstacle to a pod.

        The parts are the set of nodes with the obstacle, the verb for one node and for several nodes, and the following
        words.
        """
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


class ListedCards(NamedTuple):
    """The cards of one vendor on the nodes of a GPU model, according to the vendor's registers (node annotations)."""

    own: tuple[str, ...] = ()
    """The card types that belong to the model."""
    foreign: tuple[str, ...] = ()
    """The card types of other models."""
    sliced: bool = False
    """True if at least one card is in MIG mode."""
    whole: bool = False
    """True if at least one card is not in MIG mode."""

    @classmethod
    def of(cls, model: str, cards: Set[tuple[str, bool]], named: CardModels) -> "ListedCards":
        """Return the cards of a model. ``cards``: for each card, its type and whether it is in MIG mode."""
        kinds, modes = {kind for kind, _ in cards}, {mig for _, mig in cards}
        own = sorted(k for k in kinds if matches_model(k, model) or named.model_of(k) == model) or sorted(kinds)
        return cls(tuple(own), tuple(sorted(kinds.difference(own))), sliced=True in modes, whole=False in modes)


class CardTypes(msgspec.Struct, frozen=True):
    """The card types on all nodes, by the name of the vendor's scheme and the GPU model.

    The types are read from registers, the node annotations in which a vendor lists the cards of a node. A type belongs
    to a model if it matches the name of the model (`matches_model`), or if ``gpu_models`` lists it. A model may have
    any name. So if no type on a model's nodes belongs to the model in this way, all types there do.
    """

    cards: Mapping[tuple[str, str], ListedCards] = {}

    @classmethod
    def of(cls, nodes: Iterable[tuple[str | None, Registers]], named: CardModels = NO_ROWS) -> "CardTypes":
        """Return the card types on ``nodes`` (pairs of model and registers). ``named``: the key ``gpu_models``."""
        found: dict[tuple[str, str], set[tuple[str, bool]]] = {}
        for model, registers in nodes:
            for scheme, register in registers.items():
                found.setdefault((scheme, model or ""), set()).update((card.type, card.mig) for card in register)
        return cls({key: ListedCards.of(key[1], each, named) for key, each in found.items()})

    def on(self, scheme: str, model: str) -> ListedCards:
        """Return the cards on the nodes of a model; empty if no node of the model has registered cards."""
        return self.cards.get((scheme, model), ListedCards())

    def other_types(self, scheme: str, model: str) -> frozenset[str]:
        every = ((*cards.own, *cards.foreign) for (each, _), cards in self.cards.items() if each == scheme)
        return frozenset(itertools.chain.from_iterable(every)).difference(self.on(scheme, model).own)

    def models_of(self, scheme: str, kind: str) -> tuple[str, ...]:
        found = (model for (each, model), cards in self.cards.items() if each == scheme and kind in cards.own)
        return tuple(sorted(filter(None, found)))


def matches_model(kind: str, model: str) -> bool:
    """Return whether a card type matches a model's name: GeForce RTX 3090 matches RTX3090, A100 does not match A10."""
    words, wanted = _words(kind), _words(model)
    following = iter(words)
    if wanted and all(word in following for word in wanted):
        return True
    parts = itertools.combinations(range(len(words) + 1), 2)
    return bool(wanted) and any("".join(wanted) == "".join(words[first:end]) for first, end in parts)


def _words(name: str) -> list[str]:
    return _WORD.findall(name.casefold())[:MAX_WORDS]


class Nodes(msgspec.Struct, frozen=True, dict=True):
    """The nodes of the cluster at one moment."""

    keys: NodeLabels = NodeLabels()
    labels: Mapping[str, Labels] = {}
    """The labels of each node, by the node's name."""
    index: NodeIndex = msgspec.field(default_factory=NodeIndex)
    """An index of the nodes that have a model label."""
    registers: Mapping[str, Registers] = {}
    """The registers of each node, by the node's name. A register is a device plugin's list of the node's cards."""
    registered: Mapping[str, int] = {}
    """The nodes with a register that is not ``outdated``, by scheme name. Each value is a bit set of ``index``."""
    types: CardTypes = CardTypes()
    """The types of the cards in the registers, by GPU model."""
    named: CardModels = NO_ROWS
    """The entries of ``gpu_models``, which assign products to models. A product is a value of the model label."""
    seen: Mapping[str, frozenset[str]] = {}
    """For each GPU model, the values that the model label has on the nodes of this model."""
    outdated: Mapping[str, frozenset[str]] = {}
    """The schemes whose register is still on a node, although another plugin now serves it, by the node's name."""

    limited: frozenset[str] | None = None
    """The GPU models that the quota document limits; None if it is unknown. Then `knows` returns True for any model."""
    version: str = ""
    """The resourceVersion of the quota ConfigMap from which ``limited`` was read."""

    @classmethod
    def of(
        cls,
        labels: Mapping[str, Labels],
        keys: NodeLabels,
        registers: Mapping[str, Registers] = MappingProxyType({}),
        named: CardModels = NO_ROWS,
        outdated: Mapping[str, frozenset[str]] = MappingProxyType({}),
    ) -> "Nodes":
        """Return the nodes with these labels and registers. Nodes without a model label are not in ``index``."""
        index = NodeIndex({name: node for name, node in labels.items() if keys.model in node})
        seen: dict[str, frozenset[str]] = {}
        for value in index.values_of(keys.model):
            model = named.model_of(value)
            seen[model] = seen.get(model, frozenset()) | {value}
        schemes = {scheme for each in registers.values() for scheme in each}
        registered = {
            scheme: index.named(
                name for name, each in registers.items() if scheme in each and scheme not in outdated.get(name, ())
            )
            for scheme in schemes
        }
        found = cls(keys, labels, index, registers, registered, named=named, seen=seen, outdated=outdated)
        types = CardTypes.of(((found.model_of(name), each) for name, each in registers.items()), named)
        return msgspec.structs.replace(found, types=types)

    def named_by(self, named: CardModels) -> "Nodes":
        """Return these nodes, with the GPU models that ``named``, the entries of ``gpu_models``, gives to them."""
        return self if named is self.named else Nodes.of(self.labels, self.keys, self.registers, named, self.outdated)

    @property
    def models(self) -> Set[str]:
        return self.seen.keys()

    def knows(self, model: str) -> bool:
        """Return whether a node has this GPU model, or the quota document names it."""
        # Other names are not known, because tenants can invent any number of them. No quota admits a pod by such a
        # name, and no node can run it.
        return self.limited is None or model in self.limited or model in self.seen or model in self.named.rows

    def model_of(self, name: str) -> str | None:
        """Return the GPU model of a node; None if the node is unknown or has no model label."""
        value = self.labels.get(name, {}).get(self.keys.model)
        return None if value is None else self.named.model_of(value)

    def having(self, model: str) -> int:
        """Return the set of the model's nodes, as an integer with one bit for each node of ``index``."""
        return self.index.having(self.keys.model, self.label_values(model))

    @functools.cached_property
    def registered_cards(self) -> RegisteredCards:
        found: dict[tuple[str, str], set[int]] = {}
        for name, registers in self.registers.items():
            model = self.model_of(name)
            for scheme, register in registers.items():
                if model is not None:
                    listed = {card.memory for card in register if card.memory and card.healthy}
                    found.setdefault((scheme, model), set()).update(listed)
        return found

    def label_values(self, model: str) -> tuple[str, ...]:
        """Return the known values of the model label for this model, from existing nodes and from ``gpu_models``."""
        return self._label_values.get(model) or (model,)

    def stands_for_model(self, key: str, value: str) -> bool:
        """Return whether a line of a nodeSelector has the name of a model whose nodes may have other label values."""
        return key == self.keys.model and value in self.named.rows

    def selected_values(self, key: str, value: str) -> tuple[str, ...]:
        """Return the label values that a nodeSelector line with this key and value allows.

        If the value is a GPU model's name, these are all label values of the model's nodes.
        """
        return self.label_values(value) if self.stands_for_model(key, value) else (value,)

    @functools.cached_property
    def _label_values(self) -> Mapping[str, tuple[str, ...]]:
        named, seen = self.named, self.seen
        return {model: named.label_values(model, seen.get(model, ())) for model in {*named.rows, *seen}}


NO_NODES = Nodes()
