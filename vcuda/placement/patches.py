"""The JSON Patch (RFC 6902) that turns a pod into one that lands on the model it was given.

Minimal: nothing is replaced that already says the same, so a second call on the result patches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from vcuda.k8s_types import NodeSelectorTerm, Pod, PodSpec, Requirement
from vcuda.placement.affinity import NAME_FIELD, matches_nothing, required_terms
from vcuda.placement.placement import NodeLabels
from vcuda.requests.schemes import SCHEMES, Scheme, is_named

MODEL_ANNOTATION = "quota.vcuda.io/model"
"""The model a pod was given, for people. Nothing is decided from it: its owner can edit it."""

DEFAULT_SCHEDULER = "default-scheduler"

_ALLOCATION_ANNOTATIONS = tuple(name for scheme in SCHEMES for name in scheme.allocation_annotations)
_ALLOCATION_LABELS = tuple(name for scheme in SCHEMES for name in scheme.allocation_labels)

Operation = dict[str, Any]


class Hints(msgspec.Struct, frozen=True):
    """What is set for the whole system: the node labels, and the scheduler that places vcuda pods (none: as asked)."""

    labels: NodeLabels = NodeLabels()
    scheduler: str | None = None


def patch_for(pod: Pod, model: str, pools: tuple[str, ...], schemes: Iterable[Scheme], hints: Hints) -> list[Operation]:
    """Return the operations that pin the pod to ``model`` in ``pools`` (none: any) and let its scheduler place it."""
    required = [Requirement(hints.labels.model, "In", (model,))]
    if pools:
        required.append(Requirement(hints.labels.pool, "In", pools))
    annotations = {scheme.wanted_models: model for scheme in schemes if scheme.wanted_models}
    return [*_schedule(pod, required, hints), *_annotate(pod, {**annotations, MODEL_ANNOTATION: model})]


def unpinned_patch(pod: Pod, hints: Hints) -> list[Operation]:
    """Return the operations that let a pod's scheduler place it where it gets no model, and is let pass all the same.

    Without them it would take a card that its scheduler knows nothing of, and gives to others.
    """
    return _schedule(pod, [], hints)


def escape(key: str) -> str:
    """Return a key as one segment of a JSON Pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def _schedule(pod: Pod, required: list[Requirement], hints: Hints) -> list[Operation]:
    return [
        *_require(pod.spec, required, _name_requirements(pod.spec)),
        *_unset_node_name(pod.spec),
        *_set_scheduler(pod.spec, hints.scheduler),
        *_clean(pod),
    ]


def _clean(pod: Pod) -> list[Operation]:
    """Return the removal of every allocation annotation and label of every scheme.

    A manifest copied from a live pod carries them, or a forged one, and gpu-admission then refuses the pod for ever.
    """
    return [
        *_remove("/metadata/annotations", pod.annotations, _ALLOCATION_ANNOTATIONS),
        *_remove("/metadata/labels", pod.metadata.labels or {}, _ALLOCATION_LABELS),
    ]


def _add(path: str, value: Any) -> Operation:
    return {"op": "add", "path": path, "value": value}


def _remove(parent: str, present: Mapping[str, str], names: tuple[str, ...]) -> Iterator[Operation]:
    for key in present:
        if is_named(key, names):
            yield {"op": "remove", "path": f"{parent}/{escape(key)}"}


def _annotate(pod: Pod, wanted: Mapping[str, str]) -> Iterator[Operation]:
    missing = {key: value for key, value in wanted.items() if pod.annotations.get(key) != value}
    if missing and pod.metadata.annotations is None:
        yield _add("/metadata/annotations", missing)
        return
    for key, value in missing.items():
        yield _add(f"/metadata/annotations/{escape(key)}", value)


def _set_scheduler(spec: PodSpec, scheduler: str | None) -> Iterator[Operation]:
    if scheduler and spec.scheduler_name in ("", DEFAULT_SCHEDULER) and spec.scheduler_name != scheduler:
        yield _add("/spec/schedulerName", scheduler)


def _unset_node_name(spec: PodSpec) -> Iterator[Operation]:
    if spec.node_name:
        yield {"op": "remove", "path": "/spec/nodeName"}


def _name_requirements(spec: PodSpec) -> list[Requirement]:
    """Return a preset nodeName as a requirement, so that the scheduler runs and still picks that node."""
    return [Requirement(NAME_FIELD, "In", (spec.node_name,))] if spec.node_name else []


def _require(spec: PodSpec, labels: list[Requirement], fields: list[Requirement]) -> Iterator[Operation]:
    """Add the requirements to every term; where there is no term yet, make one, with whatever holds it."""
    terms = required_terms(spec)
    if terms is not None:
        base = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms"
        for index, term in enumerate(terms):
            if not matches_nothing(term):
                yield from _require_in_term(f"{base}/{index}", term, labels, fields)
        return
    parts = {"matchExpressions": labels, "matchFields": fields}
    term_value = {part: [_plain(requirement) for requirement in lines] for part, lines in parts.items() if lines}
    if not term_value:
        return
    required = {"nodeSelectorTerms": [term_value]}
    if spec.affinity is None:
        value = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
        yield _add("/spec/affinity", value)
    elif spec.affinity.node_affinity is None:
        yield _add("/spec/affinity/nodeAffinity", {"requiredDuringSchedulingIgnoredDuringExecution": required})
    else:
        yield _add("/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution", required)


def _require_in_term(
    path: str, term: NodeSelectorTerm, labels: list[Requirement], fields: list[Requirement]
) -> Iterator[Operation]:
    yield from _append(f"{path}/matchExpressions", term.match_expressions, labels)
    yield from _append(f"{path}/matchFields", term.match_fields, fields)


def _append(path: str, present: tuple[Requirement, ...] | None, wanted: list[Requirement]) -> Iterator[Operation]:
    missing = [_plain(requirement) for requirement in wanted if not _implied(requirement, present or ())]
    if missing and not present:
        yield _add(path, missing)
        return
    for requirement in missing:
        yield _add(f"{path}/-", requirement)


def _implied(wanted: Requirement, present: tuple[Requirement, ...]) -> bool:
    """Return whether one of the requirements already holds the key to the wanted values or fewer."""
    allowed = set(wanted.values or ())
    return any(
        r.key == wanted.key and r.operator == "In" and r.values and allowed.issuperset(r.values) for r in present
    )


def _plain(requirement: Requirement) -> dict[str, object]:
    return {"key": requirement.key, "operator": requirement.operator, "values": list(requirement.values or ())}
