"""Computes the nodes that a pod's nodeSelector, nodeName and required node affinity allow.

The rules are those of Kubernetes (k8s.io/component-helpers ``scheduling/corev1/nodeaffinity``, apimachinery
``labels.Requirement``):

- The terms of a node affinity are ORed. The requirements of a term are ANDed. An empty term matches no node.
- A node must match the nodeSelector and at least one term.
- NotIn and DoesNotExist also match a node without the label.
"""

import bisect
import functools
import itertools
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Set

import msgspec

from vcuda.k8s_types import NodeSelector, NodeSelectorTerm, PodSpec
from vcuda.quota.well_known import MODEL_LABEL, POOL_LABEL

NAME_FIELD = "metadata.name"
_INT64_DIGITS = 19
NAME = f"/{NAME_FIELD}"
"""The key of a node's name in a `Term`. It begins with a slash, so that no label has this key."""

Labels = Mapping[str, str]


class NodeLabels(msgspec.Struct, frozen=True):
    """The keys of two node labels: ``model`` for the GPU model of a node, ``pool`` for its pool (group of nodes)."""

    model: str = MODEL_LABEL
    pool: str = POOL_LABEL


class Values(msgspec.Struct, gc=False):
    """The values that all requirements of one node selector term together allow for one node label.

    An invalid requirement, such as an unknown operator or ``In`` without values, allows no node. The API server does
    not store such a requirement, and the scheduler ignores a term that contains it.
    """

    present: bool = True
    """True if the requirements on a label allow a node that has this label."""
    absent: bool = True
    """True if the requirements on a label allow a node that lacks this label."""
    listed: set[str] | None = None
    """The only values that the label may have; None if no requirement lists values (operator ``In``)."""
    excluded: set[str] | None = None
    """The values that the label must not have; None if no value is excluded."""
    numeric: bool = False
    """True if the label's value must be an integer greater than ``above`` and less than ``below``."""
    above: int = -(2**63) - 1
    below: int = 2**63

    def require(self, operator: str, values: Collection[str]) -> None:
        """Add a requirement on the label. This takes time proportional to the number of ``values``."""
        match operator:
            case "In":
                self.absent = False
                self.listed = set(values) if self.listed is None else self.listed.intersection(values)
            case "NotIn" if values:
                self.excluded = self.excluded or set()
                self.excluded.update(values)
            case "Exists" if not values:
                self.absent = False
            case "DoesNotExist" if not values:
                self.present = False
            case "Gt" | "Lt" if len(values) == 1 and (bound := _integer(next(iter(values)))) is not None:
                self.absent, self.numeric = False, True
                self.above = max(self.above, bound) if operator == "Gt" else self.above
                self.below = min(self.below, bound) if operator == "Lt" else self.below
            case _:
                self.present = self.absent = False

    def allow(self, value: str | None) -> bool:
        """Return whether a node with this label value is allowed. ``value``: None for a node without the label."""
        if value is None:
            return self.absent
        if not self.present or (self.excluded and value in self.excluded):
            return False
        if self.listed is not None and value not in self.listed:
            return False
        return not self.numeric or self._in_bounds(value)

    def _in_bounds(self, value: str) -> bool:
        number = _integer(value)
        return number is not None and self.above < number < self.below

    def allow_any(self) -> bool:
        """Return whether a node can meet the requirements, with some value of the label or without the label."""
        if self.absent or not self.present:
            return self.absent
        if self.listed is not None:
            return any(map(self.allow, self.listed))
        # A label value is never a negative number, so the integers from 0 on are checked. ``excluded`` is ignored,
        # because every integer can be written in very many ways: 5, 05, 005.
        return not self.numeric or max(self.above, -1) + 1 < self.below

    def limit(self) -> Set[str] | None:
        """Return the set of allowed label values; None if no requirement lists values (operator ``In``)."""
        if self.listed is None or (self.present and not self.excluded and not self.numeric):
            return self.listed
        return set(filter(self.allow, self.listed))


Term = Mapping[str, Values]
"""One term of a node selection: the allowed values by the key of a label, or `NAME` for the name of the node. A node
matches the term if the node meets all requirements of the term."""


class NodeSelection(msgspec.Struct, frozen=True, gc=False):
    """The nodes on which a pod may run. They meet the nodeSelector ``selector``, and match at least one term."""

    selector: Mapping[str, Collection[str]]
    """By the key of a node label: the values that the nodeSelector allows."""
    terms: tuple[Term, ...]

    @classmethod
    def of(cls, spec: PodSpec, values_of: Callable[[str, str], Collection[str]] | None = None) -> "NodeSelection":
        """Return the selection of nodes by a pod's nodeSelector, nodeName and required node affinity.

        If the pod has a required node affinity, but all of its terms are empty, the selection allows no node.
        ``values_of``: returns the label values that a line of the nodeSelector (a key and a value) allows.
        """
        written = spec.node_selector or {}
        selector = {key: values_of(key, value) if values_of else (value,) for key, value in written.items()}
        required = required_terms(spec)
        held = (NodeSelectorTerm(),) if required is None else (each for each in required if not matches_nothing(each))
        return cls(selector, tuple(_read_term(each, selector, spec.node_name) for each in held))

    def values_of(self, term: Term, key: str) -> Values | None:
        """Return the values of a label that the term and the nodeSelector allow; None if they allow all values."""
        values = term.get(key)
        return _selected(self.selector[key]) if values is None and key in self.selector else values


def _read_term(term: NodeSelectorTerm, selector: Mapping[str, Collection[str]], node_name: str) -> Term:
    labels: dict[str, Values] = {}
    for line in term.match_expressions or ():
        values = labels.get(line.key)
        if values is None:
            values = labels[line.key] = _selected(selector.get(line.key))
        values.require(line.operator, line.values or ())
    if node_name or term.match_fields:
        name = labels[NAME] = _selected((node_name,) if node_name else None)
        name.absent = False
    for line in term.match_fields or ():
        # In ``matchFields``, Kubernetes supports only the name of a node. A term with another field matches no node.
        name.require(line.operator if line.key == NAME_FIELD else "", line.values or ())
    return labels


def _selected(listed: Collection[str] | None) -> Values:
    values = Values()
    if listed is not None:
        values.require("In", listed)
    return values


class LabelIndex:
    """An index of nodes by their values of one label. A set of nodes is an integer with one bit for each node.
    ``by_value``: a set of nodes for each value. No node may be in two sets."""

    def __init__(self, by_value: Mapping[str, int]) -> None:
        self.by_value = by_value
        self.having = sum(by_value.values())
        numbers = sorted((number, value) for value in by_value if (number := _integer(value)) is not None)
        self._numbers = [number for number, _ in numbers]
        self._up_to = [0, *itertools.accumulate(by_value[value] for _, value in numbers)]

    def find(self, values: Values) -> int:
        """Return the set of nodes that have the label, with a value that ``values`` allows."""
        if values.listed is not None:
            known = filter(self.by_value.__contains__, values.listed)
            return sum(self.by_value[value] for value in known if values.allow(value))
        found = self.having
        if values.numeric:
            first, end = (
                bisect.bisect_right(self._numbers, values.above),
                bisect.bisect_left(self._numbers, values.below),
            )
            found = self._up_to[end] - self._up_to[first] if first < end else 0
        if values.excluded:
            found &= ~sum(self.by_value[value] for value in self.by_value.keys() & values.excluded)
        return found if values.present else 0


class NodeIndex:
    """An index of nodes by their labels. The time to check a requirement does not depend on the number of nodes."""

    def __init__(self, nodes: Mapping[str, Labels] = types.MappingProxyType({})) -> None:
        self._nodes = nodes
        # A key is first looked up in the labels of one node, because most keys are on every node. Collecting the keys
        # of all nodes takes longer, and each change of a node would make it necessary again.
        self._usual: Labels = next(iter(nodes.values()), {})
        self._all = (1 << len(nodes)) - 1
        self._by_key: dict[str, LabelIndex] = {}

    @functools.cached_property
    def _keys(self) -> Set[str]:
        return set().union(*self._nodes.values())

    @functools.cached_property
    def _labels(self) -> tuple[Labels, ...]:
        return tuple(self._nodes.values())

    @functools.cached_property
    def _names(self) -> LabelIndex:
        return LabelIndex({name: 1 << at for at, name in enumerate(self._nodes)})

    @property
    def names(self) -> Collection[str]:
        """The names of the nodes, in the order of their bits."""
        return self._nodes.keys()

    def values_of(self, key: str) -> Set[str]:
        index = self._index(key)
        return index.by_value.keys() if index else set()

    def having(self, key: str, values: Iterable[str]) -> int:
        """Return the set of nodes on which the label ``key`` has one of ``values``."""
        index = self._index(key)
        return sum(index.by_value.get(value, 0) for value in set(values)) if index else 0

    def named(self, names: Iterable[str]) -> int:
        return sum(self._names.by_value.get(name, 0) for name in set(names))

    def values_on(self, nodes: int, key: str) -> Set[str | None]:
        """Return the values of the label ``key`` on a set of nodes. They include None if a node lacks the label."""
        found: set[str | None] = set()
        while nodes:
            lowest = nodes & -nodes
            found.add(self._labels[lowest.bit_length() - 1].get(key))
            nodes ^= lowest
        return found

    def selected(self, selector: Mapping[str, Collection[str]]) -> int:
        found = self._all
        for key, values in selector.items():
            found &= self.having(key, values)
        return found

    def matching(self, term: Term, among: int) -> int:
        found = among
        for key, values in term.items():
            index = self._index(key)
            if index:
                found &= index.find(values) | (self._all & ~index.having if values.absent else 0)
            elif not values.absent:
                return 0
            if not found:
                break
        return found

    def _index(self, key: str) -> LabelIndex | None:
        # A label key is indexed at its first use, because a node has dozens of labels, and pods select by few of them.
        index = self._names if key == NAME else self._by_key.get(key)
        if index is None and (key in self._usual or key in self._keys):
            by_value: dict[str, int] = {}
            for at, labels in enumerate(self._nodes.values()):
                if key in labels:
                    by_value[labels[key]] = by_value.get(labels[key], 0) | 1 << at
            index = self._by_key[key] = LabelIndex(by_value)
        return index


def required_terms(spec: PodSpec) -> tuple[NodeSelectorTerm, ...] | None:
    affinity = spec.affinity and spec.affinity.node_affinity
    selector: NodeSelector | None = affinity.required_during_scheduling_ignored_during_execution if affinity else None
    return None if selector is None else selector.node_selector_terms or ()


def matches_nothing(term: NodeSelectorTerm) -> bool:
    """Return whether a term is empty and so matches no node. With an added requirement, it would match nodes."""
    return not term.match_expressions and not term.match_fields


def limited_values(spec: PodSpec, key: str) -> frozenset[str] | None:
    """Return the label values that a pod's nodeSelector and required node affinity allow; None if they allow all."""
    # Only the requirements on this label are read, because a pod may have tens of thousands of terms.
    selected = (spec.node_selector or {}).get(key)
    required = required_terms(spec)
    if required is None:
        return None if selected is None else frozenset({selected})
    allowed: set[str] = set()
    for term in required:
        if matches_nothing(term):
            continue
        values = _selected(None if selected is None else (selected,))
        for line in term.match_expressions or ():
            if line.key == key:
                values.require(line.operator, line.values or ())
        limit = values.limit()
        if limit is None:
            return None
        allowed |= limit
    return frozenset(allowed)


def _integer(text: str) -> int | None:
    # The scheduler parses numbers by Go's ParseInt, which accepts 64-bit integers only.
    digits = text[1:] if text.startswith(("+", "-")) else text
    if not digits.isascii() or not digits.isdigit():
        return None
    # At most 19 digits are converted, so that a text of a thousand digits does not take longer than a short text.
    significant = digits.lstrip("0") or "0"
    number = int(text[: len(text) - len(digits)] + significant) if len(significant) <= _INT64_DIGITS else 2**63
    return number if -(2**63) <= number < 2**63 else None
