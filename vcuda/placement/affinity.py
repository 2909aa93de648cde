"""Which nodes a pod's nodeSelector, nodeName and required node affinity allow, and the JSON Patch that narrows that.

The rules are Kubernetes' (k8s.io/component-helpers ``scheduling/corev1/nodeaffinity``, apimachinery
``labels.Requirement``): terms are ORed, requirements ANDed, a term without any requirement matches no node,
nodeSelector holds beside every term, NotIn and DoesNotExist also match a node without the label.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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


class Term(msgspec.Struct, frozen=True, gc=False):
    """One way in which a pod may be placed: all of these must hold. ``fields`` are over metadata.name."""

    labels: tuple[Requirement, ...] = ()
    fields: tuple[Requirement, ...] = ()

    def matches(self, name: str, labels: Labels) -> bool:
        """Return whether a node of this name and these labels is allowed."""
        return all(holds(r, labels.get(r.key)) for r in self.labels) and all(
            r.key == NAME_FIELD and holds(r, name) for r in self.fields
        )

    def could_match(self, given: Mapping[str, Iterable[str]]) -> bool:
        """Return whether some node could match whose labels take a ``given`` value, and are free elsewhere."""
        return all(_satisfiable(requirements, given.get(key)) for key, requirements in _by_key(self.labels)) and all(
            key == NAME_FIELD and _satisfiable(rs, None) for key, rs in _by_key(self.fields)
        )

    def names(self) -> frozenset[str] | None:
        """Return the node names allowed here, or None where they are not limited to a list."""
        return _listed([requirement for requirement in self.fields if requirement.key == NAME_FIELD])


def terms_of(spec: PodSpec) -> tuple[Term, ...]:
    """Return the ways in which a pod may be placed, with nodeSelector and nodeName folded into each. None: nowhere."""
    everywhere = Term(
        labels=tuple(Requirement(key, "In", (value,)) for key, value in (spec.node_selector or {}).items()),
        fields=(Requirement(NAME_FIELD, "In", (spec.node_name,)),) if spec.node_name else (),
    )
    required = required_terms(spec)
    if required is None:
        return (everywhere,)
    return tuple(
        Term(everywhere.labels + (term.match_expressions or ()), everywhere.fields + (term.match_fields or ()))
        for term in required
        if not _matches_nothing(term)
    )


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
    # Not by `terms_of` and `Term`, which cost more: whoever may change a pod that a scheduling gate holds back may add
    # requirements without end (KEP-3838), past MOST_VALUES, and what it is held to still has to be read.
    selected = (spec.node_selector or {}).get(key)
    everywhere = [] if selected is None else [Requirement(key, "In", (selected,))]
    required = required_terms(spec)
    if required is None:
        return _listed(everywhere)
    allowed: set[str] = set()
    for term in required:
        if _matches_nothing(term):
            continue
        values = _listed(everywhere + [each for each in term.match_expressions or () if each.key == key])
        if values is None:
            return None
        allowed |= values
    return frozenset(allowed)


def _listed(requirements: Sequence[Requirement]) -> frozenset[str] | None:
    """Return the values that meet all requirements on one key, or None where they are not limited to a list."""
    lists = [requirement.values or () for requirement in requirements if requirement.operator == "In"]
    if not lists:
        return None
    excluded = (requirement.values or () for requirement in requirements if requirement.operator == "NotIn")
    values = frozenset(lists[0]).intersection(*lists[1:]).difference(*excluded)
    decisive = _decisive(requirements)
    return frozenset(value for value in values if all(holds(requirement, value) for requirement in decisive))


def _decisive(requirements: Iterable[Requirement]) -> Collection[Requirement]:
    # The strictest of each operator, as the others follow from it; `In` and `NotIn` with values are dealt with already.
    strictest: dict[str, Requirement] = {}
    for requirement in requirements:
        if requirement.operator in ("In", "NotIn") and requirement.values:
            continue
        before = strictest.get(requirement.operator)
        if before is None or _strictness(requirement) > _strictness(before):
            strictest[requirement.operator] = requirement
    return strictest.values()


def _strictness(requirement: Requirement) -> float:
    # The larger, the fewer values meet the requirement, among those of one operator.
    values = requirement.values or ()
    if requirement.operator not in ("Gt", "Lt"):
        return len(values)  # none meets Exists or DoesNotExist with values
    bound = _integer(values[0]) if len(values) == 1 else None
    if bound is None:
        return math.inf
    return bound if requirement.operator == "Gt" else -bound


def holds(requirement: Requirement, value: str | None) -> bool:
    """Return whether one requirement holds for a label's value; None is an absent label.

    What the API server would not store (an unknown operator, ``In`` without values, ``Exists`` with some) holds for
    nothing; the scheduler does not read a term with such a requirement either.
    """
    values = requirement.values or ()
    match requirement.operator:
        case "In":
            return value is not None and value in values
        case "NotIn":
            return bool(values) and value not in values
        case "Exists":
            return not values and value is not None
        case "DoesNotExist":
            return not values and value is None
        case "Gt" | "Lt":
            return _compares(requirement.operator, value, values)
    return False


def _compares(operator: str, value: str | None, values: tuple[str, ...]) -> bool:
    bound = _integer(values[0]) if len(values) == 1 else None
    number = _integer(value)
    if bound is None or number is None:
        return False
    return number > bound if operator == "Gt" else number < bound


def _integer(text: str | None) -> int | None:
    # As Go's ParseInt, by which the scheduler compares: a 64-bit integer, or nothing.
    found = _INTEGER.fullmatch(text) if text is not None else None
    if found is None:
        return None
    number = int(found[1] + found[2])
    return number if -(2**63) <= number < 2**63 else None


def _by_key(requirements: tuple[Requirement, ...]) -> Iterable[tuple[str, list[Requirement]]]:
    grouped: dict[str, list[Requirement]] = {}
    for requirement in requirements:
        grouped.setdefault(requirement.key, []).append(requirement)
    return grouped.items()


def _satisfiable(requirements: list[Requirement], given: Iterable[str] | None) -> bool:
    candidates: Iterable[str | None] = _witnesses(requirements) if given is None else given
    return any(all(holds(r, candidate) for r in requirements) for candidate in candidates)


def _witnesses(requirements: list[Requirement]) -> Iterator[str | None]:
    # If any value at all meets the requirements, one of these does. An integer is written with leading zeros as often
    # as there are excluded values: as text these differ.
    yield None
    mentioned = {value for r in requirements for value in r.values or ()}
    yield from mentioned
    yield from (f"other-{number}" for number in range(len(mentioned) + 1))
    bounds = [_integer(v) for r in requirements if r.operator in ("Gt", "Lt") for v in r.values or ()]
    for bound in {0, *(bound for bound in bounds if bound is not None)}:
        for number in {max(bound - 1, 0), max(bound + 1, 0)}:
            yield from (str(number).zfill(width) for width in range(1, len(mentioned) + len(str(number)) + 2))


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
