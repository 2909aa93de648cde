"""The JSON Patch that pins a pod to a model, gives it to its scheduler, and takes from it what may be forged."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from jsonpointer import escape

from vcuda.k8s_types import Check, Operation, Pod, PodSpec, Requirement, no_check
from vcuda.placement.affinity import NAME_FIELD, NodeLabels, matches_nothing, required_terms
from vcuda.placement.placement import NO_NODES, Nodes
from vcuda.requests.schemes import ALLOCATION_LABELS, CREATION_ANNOTATIONS, Scheme

MODEL_ANNOTATION = "quota.vcuda.io/model"
"""The model a pod was given, for people. Nothing is decided from it: its owner can edit it."""

DEFAULT_SCHEDULER = "default-scheduler"


class Hints(msgspec.Struct, frozen=True):
    """What is set for the whole system: the node labels, and the scheduler that places vcuda pods (none: as asked)."""

    labels: NodeLabels = NodeLabels()
    scheduler: str | None = None

    def of(self, schemes: Iterable[Scheme]) -> "Hints":
        """Return the hints for a pod that asks by these schemes: the scheduler of one goes before that for all."""
        own = next((scheme.scheduler for scheme in schemes if scheme.scheduler), None)
        return msgspec.structs.replace(self, scheduler=own) if own else self


class _Wanted:
    """A requirement that every term is to have; made once, as there may be thousands of them.

    ``allows`` tells of a value whether it says the same as those that are wanted.
    """

    def __init__(self, key: str, values: Iterable[str], allows: Callable[[str], bool] | None = None) -> None:
        self.key = key
        self.values = tuple(values)
        self.allows = allows or frozenset(self.values).__contains__
        self.plain = {"key": key, "operator": "In", "values": list(self.values)}

    def beside(self, present: tuple[Requirement, ...]) -> dict[str, Any] | None:
        """Return what is to be added to a term; None where what is ``present`` there already says so."""
        # A second call on the patched pod has to patch nothing: the API server may call again (reinvocationPolicy).
        lists = [r.values for r in present if r.key == self.key and r.operator == "In" and r.values]
        if any(all(map(self.allows, values)) for values in lists):
            return None
        # Beside a list that names other values of the model, those known now would leave the pod no node.
        others = [value for values in lists for value in values if self.allows(value) and value not in self.values]
        return {**self.plain, "values": [*self.values, *dict.fromkeys(others)]} if others else self.plain


# Minimal: nothing is replaced that already says the same, and what a person wrote stays as it is.
def patch_for(
    pod: Pod,
    model: str,
    pools: tuple[str, ...],
    types: Mapping[str, str],
    hints: Hints,
    *,
    nodes: Nodes = NO_NODES,
    check: Check = no_check,
) -> list[Operation]:
    """Return the operations that pin the pod to ``model`` in ``pools`` (none: any) and let its scheduler place it.

    ``types`` are the annotations by which its scheduler chooses among the cards of a node. ``check`` is called for each
    term of its node selection.
    """
    selected = (pod.spec.node_selector or {}).get(hints.labels.model)
    values = dict.fromkeys(nodes.label_values(model))
    if selected is not None and nodes.named.model_of(selected) == model:
        values[selected] = None
    required = [_Wanted(hints.labels.model, values, lambda value: nodes.named.model_of(value) == model)]
    if pools:
        required.append(_Wanted(hints.labels.pool, pools))
    return [*_schedule(pod, required, hints, check), *_annotate(pod, {**types, MODEL_ANNOTATION: model})]


def unpinned_patch(pod: Pod, hints: Hints) -> list[Operation]:
    """Return the operations that let a pod's scheduler place it where it gets no model, and passes all the same."""
    # Without them it would take a card that its scheduler knows nothing of, and gives to others.
    return [*_schedule(pod, [], hints)]


def pools_patch(pod: Pod, pools: tuple[str, ...], hints: Hints) -> list[Operation]:
    """Return the operations that hold a pod to ``pools`` (none: any) whose cards are claimed apart from it."""
    return [*_require(pod.spec, [_Wanted(hints.labels.pool, pools)] if pools else [], [])]


def _schedule(pod: Pod, required: list[_Wanted], hints: Hints, check: Check = no_check) -> Iterator[Operation]:
    spec = pod.spec
    # A preset nodeName passes the scheduler by. It becomes a requirement, so that it runs and still picks that node.
    fields = [_Wanted(NAME_FIELD, (spec.node_name,))] if spec.node_name else []
    yield from _require(spec, required, fields, check)
    if spec.node_name:
        yield {"op": "remove", "path": "/spec/nodeName"}
    # Who names a scheduler wants that one; Kubernetes writes its own where none is named.
    if hints.scheduler and spec.scheduler_name in ("", DEFAULT_SCHEDULER) and spec.scheduler_name != hints.scheduler:
        yield _add("/spec/schedulerName", hints.scheduler)
    # A manifest copied from a live pod carries these, or a forged one, and gpu-admission then refuses it for ever.
    yield from _remove("/metadata/annotations", pod.annotations, CREATION_ANNOTATIONS)
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


def _require(
    spec: PodSpec, labels: list[_Wanted], fields: list[_Wanted], check: Check = no_check
) -> Iterator[Operation]:
    # To every term, since they are ORed; where there is none yet it is made, with whatever holds it.
    terms = required_terms(spec)
    if terms is not None:
        base = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms"
        for index, term in enumerate(terms):
            check()
            if not matches_nothing(term):
                yield from _append(f"{base}/{index}/matchExpressions", term.match_expressions, labels)
                if fields:
                    yield from _append(f"{base}/{index}/matchFields", term.match_fields, fields)
        return
    parts = {"matchExpressions": labels, "matchFields": fields}
    term_value = {part: [requirement.plain for requirement in lines] for part, lines in parts.items() if lines}
    if not term_value:
        return
    required = {"nodeSelectorTerms": [term_value]}
    if spec.affinity is None:
        yield _add("/spec/affinity", {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}})
    elif spec.affinity.node_affinity is None:
        yield _add("/spec/affinity/nodeAffinity", {"requiredDuringSchedulingIgnoredDuringExecution": required})
    else:
        yield _add("/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution", required)


def _append(path: str, present: tuple[Requirement, ...] | None, wanted: list[_Wanted]) -> Iterator[Operation]:
    if not present:
        if wanted:
            yield _add(path, [requirement.plain for requirement in wanted])
        return
    for requirement in wanted:
        if (missing := requirement.beside(present)) is not None:
            yield _add(f"{path}/-", missing)
