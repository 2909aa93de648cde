"""Which nodes a pod's nodeSelector, nodeName and required node affinity allow, and the JSON Patch that narrows that.

The rules are Kubernetes' (k8s.io/component-helpers ``scheduling/corev1/nodeaffinity``, apimachinery
``labels.Requirement``): terms are ORed, requirements ANDed, a term without any requirement matches no node,
nodeSelector holds beside every term, NotIn and DoesNotExist also match a node without the label.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from jsonpointer import escape

from vcuda.errors import Fault
from vcuda.k8s_types import NodeSelector, NodeSelectorTerm, Operation, Pod, PodSpec, Requirement
from vcuda.requests.schemes import ALLOCATION_ANNOTATIONS, ALLOCATION_LABELS, Scheme

NAME_FIELD = "metadata.name"
# At most 19 digits of them all, so that a label of a thousand digits costs no more than another.
_INTEGER = re.compile(r"([+-]?)0*([0-9]{1,19})", re.ASCII)

Labels = Mapping[str, str]


MOST_TERMS = 100
MOST_VALUES = 1000
"""What a pod's node selection may hold in all. Its owner writes it, and to look at it costs terms times nodes."""


class NodeLabels(msgspec.Struct, frozen=True):
    """The node labels that hold a node's GPU model and its pool."""

    model: str = "gaia.tencent.com/gpu-model"
    pool: str = "gaia.tencent.com/gpu-pool"


class Values:
    """What requirements on one key allow its label's value to be; they are ANDed.

    What the API server would not store (an unknown operator, ``In`` without values, ``Exists`` with some) allows
    nothing; the scheduler does not read a term with such a requirement either.
    """

    __slots__ = ("above", "absent", "below", "excluded", "listed", "numeric", "present")

    def __init__(self) -> None:
        self.present = self.absent = True
        self.listed: set[str] | None = None
        self.excluded: set[str] = set()
        self.numeric = False
        self.above, self.below = -(2**63) - 1, 2**63

    def require(self, operator: str, values: Collection[str]) -> None:
        """Allow nothing that does not meet this requirement too. It takes time in proportion to its values."""
        match operator:
            case "In":
                self.absent = False
                self.listed = set(values) if self.listed is None else self.listed.intersection(values)
            case "NotIn" if values:
                self.excluded.update(values)
            case "Exists" if not values:
                self.absent = False
            case "DoesNotExist" if not values:
                self.present = False
            case "Gt" | "Lt":
                self._compare(operator, values)
            case _:
                self.present = self.absent = False

    def _compare(self, operator: str, values: Collection[str]) -> None:
        bound = _integer(next(iter(values))) if len(values) == 1 else None
        self.absent, self.numeric = False, True
        if bound is None:
            self.present = False
        elif operator == "Gt":
            self.above = max(self.above, bound)
        else:
            self.below = min(self.below, bound)

    def allow(self, value: str | None) -> bool:
        """Return whether a label may have this value; None is an absent label."""
        if value is None:
            return self.absent
        if not self.present or value in self.excluded or (self.listed is not None and value not in self.listed):
            return False
        number = _integer(value) if self.numeric else None
        return not self.numeric or (number is not None and self.above < number < self.below)

    def allow_any(self) -> bool:
        """Return whether there is a value that a label may have, or it may be absent."""
        if self.absent or not self.present:
            return self.absent
        if self.listed is not None:
            return any(map(self.allow, self.listed))
        # No label is negative. Of texts there is always another than those excluded, and an integer has many: with
        # more and more zeros before it.
        return not self.numeric or max(self.above, -1) + 1 < self.below

    def limit(self) -> frozenset[str] | None:
        """Return the values that a label may have, or None where they are not limited to a list."""
        return None if self.listed is None else frozenset(filter(self.allow, self.listed))


class Term(msgspec.Struct, frozen=True, gc=False):
    """One way in which a pod may be placed: what it allows the labels of these keys to be, and the node's name."""

    labels: Mapping[str, Values]
    name: Values

    def matches(self, name: str, labels: Labels) -> bool:
        """Return whether a node of this name and these labels is allowed."""
        return self.name.allow(name) and all(values.allow(labels.get(key)) for key, values in self.labels.items())

    def could_match(self, given: Mapping[str, Iterable[str]]) -> bool:
        """Return whether some node could match whose labels take a ``given`` value, and are free elsewhere."""
        return self.name.allow_any() and all(
            any(map(values.allow, given[key])) if key in given else values.allow_any()
            for key, values in self.labels.items()
        )


def terms_of(spec: PodSpec) -> tuple[Term, ...]:
    """Return the ways in which a pod may be placed, with nodeSelector and nodeName folded into each. None: nowhere."""
    required = required_terms(spec)
    held = (NodeSelectorTerm(),) if required is None else (each for each in required if not _matches_nothing(each))
    return tuple(_read_term(term, spec) for term in held)


def _read_term(term: NodeSelectorTerm, spec: PodSpec) -> Term:
    labels = {key: _selected(value) for key, value in (spec.node_selector or {}).items()}
    for line in term.match_expressions or ():
        labels.setdefault(line.key, Values()).require(line.operator, line.values or ())
    name = _selected(spec.node_name or None)
    name.absent = False
    for line in term.match_fields or ():
        # Of a node's fields only its name can be selected by; another one is no way to any node.
        name.require(line.operator if line.key == NAME_FIELD else "", line.values or ())
    return Term(labels, name)


def _selected(value: str | None) -> Values:
    values = Values()
    if value is not None:
        values.require("In", (value,))
    return values


def oversized(spec: PodSpec) -> Fault | None:
    """Return what is too large to be looked at in a pod's required node affinity, or None."""
    terms = required_terms(spec) or ()
    path = "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"
    if len(terms) > MOST_TERMS:
        return Fault(path, f"{len(terms)} terms are too many for a pod that asks for GPUs; write at most {MOST_TERMS}")
    lines = (line for term in terms for line in (*(term.match_expressions or ()), *(term.match_fields or ())))
    values = sum(len(line.values or ()) + 1 for line in lines)
    many = f"{values} requirements and values are too many for a pod that asks for GPUs; write at most {MOST_VALUES}"
    return Fault(path, many) if values > MOST_VALUES else None


def required_terms(spec: PodSpec) -> tuple[NodeSelectorTerm, ...] | None:
    """Return the terms of the required node affinity, or None where there is none."""
    affinity = spec.affinity and spec.affinity.node_affinity
    selector: NodeSelector | None = affinity.required_during_scheduling_ignored_during_execution if affinity else None
    return None if selector is None else selector.node_selector_terms or ()


def _matches_nothing(term: NodeSelectorTerm) -> bool:
    # Kubernetes lets an empty term match no node, so nothing may be added to it: it would then match some.
    return not term.match_expressions and not term.match_fields


def limited_values(spec: PodSpec, key: str) -> frozenset[str] | None:
    """Return every value that a label of the pod's node may have, or None where its node selection leaves it open.

    It takes time in proportion to the size of the spec and no more.
    """
    selected = (spec.node_selector or {}).get(key)
    required = required_terms(spec)
    if required is None:
        return None if selected is None else frozenset({selected})
    allowed: set[str] = set()
    for term in required:
        if _matches_nothing(term):
            continue
        values = _selected(selected)
        for line in term.match_expressions or ():
            if line.key == key:
                values.require(line.operator, line.values or ())
        limit = values.limit()
        if limit is None:
            return None
        allowed |= limit
    return frozenset(allowed)


def _integer(text: str) -> int | None:
    # As Go's ParseInt, by which the scheduler compares: a 64-bit integer, or nothing.
    found = _INTEGER.fullmatch(text)
    if found is None:
        return None
    number = int(found[1] + found[2])
    return number if -(2**63) <= number < 2**63 else None


MODEL_ANNOTATION = "quota.vcuda.io/model"
"""The model a pod was given, for people. Nothing is decided from it: its owner can edit it."""

DEFAULT_SCHEDULER = "default-scheduler"


class Hints(msgspec.Struct, frozen=True):
    """What is set for the whole system: the node labels, and the scheduler that places vcuda pods (none: as asked)."""

    labels: NodeLabels = NodeLabels()
    scheduler: str | None = None


# Minimal: nothing is replaced that already says the same, and what a person wrote stays as it is.
def patch_for(pod: Pod, model: str, pools: tuple[str, ...], schemes: Iterable[Scheme], hints: Hints) -> list[Operation]:
    """Return the operations that pin the pod to ``model`` in ``pools`` (none: any) and let its scheduler place it."""
    required = [Requirement(hints.labels.model, "In", (model,))]
    if pools:
        required.append(Requirement(hints.labels.pool, "In", pools))
    annotations = {scheme.wanted_models: model for scheme in schemes if scheme.wanted_models}
    return [*_schedule(pod, required, hints), *_annotate(pod, {**annotations, MODEL_ANNOTATION: model})]


def unpinned_patch(pod: Pod, hints: Hints) -> list[Operation]:
    """Return the operations that let a pod's scheduler place it where it gets no model, and passes all the same."""
    # Without them it would take a card that its scheduler knows nothing of, and gives to others.
    return [*_schedule(pod, [], hints)]


def _schedule(pod: Pod, required: list[Requirement], hints: Hints) -> Iterator[Operation]:
    spec = pod.spec
    # A preset nodeName passes the scheduler by. It becomes a requirement, so that it runs and still picks that node.
    fields = [Requirement(NAME_FIELD, "In", (spec.node_name,))] if spec.node_name else []
    yield from _require(spec, required, fields)
    if spec.node_name:
        yield {"op": "remove", "path": "/spec/nodeName"}
    # Who names a scheduler wants that one; Kubernetes writes its own where none is named.
    if hints.scheduler and spec.scheduler_name in ("", DEFAULT_SCHEDULER) and spec.scheduler_name != hints.scheduler:
        yield _add("/spec/schedulerName", hints.scheduler)
    # A manifest copied from a live pod carries these, or a forged one, and gpu-admission then refuses it for ever.
    yield from _remove("/metadata/annotations", pod.annotations, ALLOCATION_ANNOTATIONS)
    yield from _remove("/metadata/labels", pod.labels, ALLOCATION_LABELS)


def _add(path: str, value: Any) -> Operation:
    return {"op": "add", "path": path, "value": value}


def _remove(parent: str, present: Iterable[str], keys: re.Pattern[str]) -> Iterator[Operation]:
    for key in present:
        if keys.fullmatch(key):
            yield {"op": "remove", "path": f"{parent}/{escape(key)}"}


def _annotate(pod: Pod, wanted: Mapping[str, str]) -> Iterator[Operation]:
    missing = {key: value for key, value in wanted.items() if pod.annotations.get(key) != value}
    if missing and pod.metadata.annotations is None:
        yield _add("/metadata/annotations", missing)
        return
    for key, value in missing.items():
        yield _add(f"/metadata/annotations/{escape(key)}", value)


def _require(spec: PodSpec, labels: list[Requirement], fields: list[Requirement]) -> Iterator[Operation]:
    # To every term, since they are ORed; where there is none yet it is made, with whatever holds it.
    terms = required_terms(spec)
    if terms is not None:
        base = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms"
        for index, term in enumerate(terms):
            if not _matches_nothing(term):
                yield from _append(f"{base}/{index}/matchExpressions", term.match_expressions, labels)
                yield from _append(f"{base}/{index}/matchFields", term.match_fields, fields)
        return
    parts = {"matchExpressions": labels, "matchFields": fields}
    term_value = {part: [_plain(requirement) for requirement in lines] for part, lines in parts.items() if lines}
    if not term_value:
        return
    required = {"nodeSelectorTerms": [term_value]}
    if spec.affinity is None:
        yield _add("/spec/affinity", {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}})
    elif spec.affinity.node_affinity is None:
        yield _add("/spec/affinity/nodeAffinity", {"requiredDuringSchedulingIgnoredDuringExecution": required})
    else:
        yield _add("/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution", required)


def _append(path: str, present: tuple[Requirement, ...] | None, wanted: list[Requirement]) -> Iterator[Operation]:
    missing = [_plain(requirement) for requirement in wanted if not _implied(requirement, present or ())]
    if missing and not present:
        yield _add(path, missing)
        return
    for requirement in missing:
        yield _add(f"{path}/-", requirement)


def _implied(wanted: Requirement, present: tuple[Requirement, ...]) -> bool:
    # A second call on the patched pod has to patch nothing: the API server may call again (reinvocationPolicy).
    allowed = set(wanted.values or ())
    return any(
        r.key == wanted.key and r.operator == "In" and r.values and allowed.issuperset(r.values) for r in present
    )


def _plain(requirement: Requirement) -> dict[str, object]:
    return {"key": requirement.key, "operator": requirement.operator, "values": list(requirement.values or ())}
