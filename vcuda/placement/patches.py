"""Builds the JSON Patch that limits a pod to a model, sets its scheduler, and removes forged annotations and labels."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from jsonpointer import escape

from vcuda.k8s_types import Check, Operation, Pod, PodSpec, Requirement, no_check
from vcuda.placement.affinity import NAME_FIELD, NodeLabels, matches_nothing, required_terms
from vcuda.placement.nodes import NO_NODES, CardTypes, Nodes
from vcuda.placement.placement import DEFAULT_SCHEDULER, HOSTNAME, MIG_MODE, contains_any, select, unwanted_texts
from vcuda.quota.well_known import MODEL_ANNOTATION
from vcuda.requests.schemes import ALLOCATION_LABELS, CREATION_ANNOTATIONS, Scheme

BYTES_OF_A_STEP = 1024
"""The number of bytes of a patch whose encoding takes as long as a step (see `Check`)."""

MAX_TYPES = 32
"""Maximum number of card types in an annotation of a pod. Most models have one or two types."""


class PinSettings(msgspec.Struct, frozen=True):
    """The settings for limiting pods to a GPU model. ``scheduler`` and ``avoided`` may depend on the pod."""

    labels: NodeLabels = NodeLabels()
    scheduler: str | None = None
    """The scheduler that places GPU pods; None if each pod keeps the scheduler that it names."""
    of_schemes: Mapping[str, str] = {}
    """The scheduler for the pods that request a vendor's resources, by the name of the vendor's scheme. A scheduler in
    key ``gpu_schemes`` of the quota ConfigMap takes precedence."""
    avoided: tuple[str, ...] = ()
    """The hostnames of the nodes to exclude, because the scheduler that the pod names cannot assign their cards."""

    def of(self, schemes: Collection[Scheme]) -> "PinSettings":
        """Return settings for a pod that requests resources of these vendors. A vendor's own scheduler is preferred."""
        own = (scheme.scheduler or self.of_schemes.get(scheme.name) for scheme in schemes)
        return msgspec.structs.replace(self, scheduler=next(filter(None, own), self.scheduler if schemes else None))


class _NewRequirement:
    """A requirement on the node label ``key`` to add to every term of a node affinity.

    ``operator``: ``In`` if the label must have one of ``values``, ``NotIn`` if it must have none of them.
    ``allows``: returns True for each value that the operator ``In`` may list.
    """

    def __init__(
        self, key: str, values: Iterable[str], allows: Callable[[str], bool] | None = None, operator: str = "In"
    ) -> None:
        self.key = key
        self.values = dict.fromkeys(values)
        self.allows = allows or frozenset(self.values).__contains__
        self.operator = operator
        self.plain: dict[str, Any] = {"key": key, "operator": operator, "values": list(self.values)}

    def missing_from(self, present: tuple[Requirement, ...]) -> dict[str, Any] | None:
        """Return the requirement to add to a term; None if the term's requirements, ``present``, are already enough."""
        # The API server may call /mutate again for a patched pod (reinvocationPolicy). The second patch must be empty.
        lists = [r.values for r in present if r.key == self.key and r.operator == self.operator and r.values]
        if any(map(self._is_enough, lists)):
            return None
        # The term may list other label values of the same model. The new requirement must include them, or no node
        # could match both requirements.
        more = [value for values in lists for value in values if self.allows(value) and value not in self.values]
        return {**self.plain, "values": [*self.values, *dict.fromkeys(more)]} if more else self.plain

    def _is_enough(self, values: tuple[str, ...]) -> bool:
        return set(values).issuperset(self.values) if self.operator == "NotIn" else all(map(self.allows, values))


# The patch is minimal: it keeps the requirements that a person wrote, and adds only requirements that are missing.
def patch_for(
    pod: Pod,
    model: str,
    pools: tuple[str, ...],
    types: Mapping[str, str],
    pin_settings: PinSettings,
    *,
    nodes: Nodes = NO_NODES,
    check: Check = no_check,
) -> list[Operation]:
    """Return the JSON Patch operations that limit a pod to ``model`` and ``pools``, and set the annotations ``types``,
    which choose card types. If ``pools`` is empty, every pool is allowed."""
    key, values = pin_settings.labels.model, dict.fromkeys(nodes.label_values(model))
    selected = (pod.spec.node_selector or {}).get(key)
    if selected is not None and nodes.named.model_of(selected) == model:
        values[selected] = None
    # A nodeSelector allows one value of a label, but the nodes of a model may have several. The affinity lists all.
    widened = selected is not None and nodes.stands_for_model(key, selected)
    remove = [{"op": "remove", "path": f"/spec/nodeSelector/{escape(key)}"}] if widened else []
    required = [_NewRequirement(pin_settings.labels.model, values, lambda value: nodes.named.model_of(value) == model)]
    if pools:
        required.append(_NewRequirement(pin_settings.labels.pool, pools))
    if pin_settings.avoided:
        required.append(_NewRequirement(HOSTNAME, pin_settings.avoided, operator="NotIn"))
    return [
        *remove,
        *_schedule(pod, required, pin_settings, check),
        *_annotate(pod, {**types, MODEL_ANNOTATION: model}),
    ]


def unpinned_patch(pod: Pod, pin_settings: PinSettings, check: Check = no_check) -> list[Operation]:
    """Return the JSON Patch operations for a pod that is not limited to a GPU model: they set its scheduler."""
    # The pod gets the GPU scheduler, because another scheduler could give it a card that another pod uses.
    return [*_schedule(pod, [], pin_settings, check)]


def pools_patch(
    pod: Pod, pools: tuple[str, ...], pin_settings: PinSettings, check: Check = no_check
) -> list[Operation]:
    """Return the patch operations that limit a pod with ResourceClaims to ``pools``; none if ``pools`` is empty."""
    return [*_require(pod.spec, [_NewRequirement(pin_settings.labels.pool, pools)] if pools else [], [], check)]


def unrecorded_patch(pod: Pod) -> list[Operation]:
    """Return the patch operations that remove the allocation records of a new pod."""
    # A scheduler's annotations and labels on a new pod are copied or forged. gpu-admission places no pod with them.
    # HAMi counts the cards of each pod that has them, even if the pod requests no GPU.
    return [
        *_remove("/metadata/annotations", pod.annotations, CREATION_ANNOTATIONS),
        *_remove("/metadata/labels", pod.labels, ALLOCATION_LABELS),
    ]


def _schedule(
    pod: Pod, required: list[_NewRequirement], pin_settings: PinSettings, check: Check = no_check
) -> Iterator[Operation]:
    spec = pod.spec
    # A pod with a nodeName bypasses the scheduler. So the nodeName is replaced by a requirement of the node affinity.
    # Then the scheduler places the pod on the same node.
    fields = [_NewRequirement(NAME_FIELD, (spec.node_name,))] if spec.node_name else []
    yield from _require(spec, required, fields, check)
    if spec.node_name:
        yield {"op": "remove", "path": "/spec/nodeName"}
    # If a person chose no scheduler, Kubernetes has set its default scheduler. Any other scheduler is kept.
    if (
        pin_settings.scheduler
        and spec.scheduler_name in ("", DEFAULT_SCHEDULER)
        and spec.scheduler_name != pin_settings.scheduler
    ):
        yield _add("/spec/schedulerName", pin_settings.scheduler)
    yield from unrecorded_patch(pod)


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
    spec: PodSpec, labels: list[_NewRequirement], fields: list[_NewRequirement], check: Check = no_check
) -> Iterator[Operation]:
    # Affinity terms are ORed, so every term gets the requirements. A pod without required node affinity gets one.
    terms = required_terms(spec)
    if terms is not None:
        repeated = sum(len(value) for each in (*labels, *fields) for value in each.values)
        check(len(terms) * repeated // BYTES_OF_A_STEP)
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


def _append(path: str, present: tuple[Requirement, ...] | None, wanted: list[_NewRequirement]) -> Iterator[Operation]:
    if not present:
        if wanted:
            yield _add(path, [requirement.plain for requirement in wanted])
        return
    for requirement in wanted:
        if (missing := requirement.missing_from(present)) is not None:
            yield _add(f"{path}/-", missing)


def type_annotations(
    pod: Pod, schemes: Iterable[Scheme], model: str, types: CardTypes, *, has_share: bool
) -> Mapping[str, str]:
    """Return the pod annotations that make the schedulers of ``schemes`` give the pod only cards of this model."""
    found: dict[str, str] = {}
    for scheme in schemes:
        if not scheme.wanted_models:
            continue
        selected, cards = select(pod, scheme, model, types, has_share=has_share), types.on(scheme.name, model)
        usable = () if isinstance(selected, str) else selected
        if has_share and scheme.card_mode and cards.sliced:
            found[scheme.card_mode] = pod.annotations.get(scheme.card_mode) or scheme.shared_mode
        more = types.other_types(scheme.name, model)
        similar = (kind for kind in more if contains_any(kind, map(str.casefold, usable)))
        avoided = sorted(similar, key=lambda kind: (kind not in cards.foreign, kind))[:MAX_TYPES]
        if avoided and scheme.unwanted_models:
            present = unwanted_texts(pod, scheme)
            own = [text] if (text := pod.annotations.get(scheme.unwanted_models, "").strip()) else []
            missing = [kind for kind in avoided if kind.casefold() not in present]
            found[scheme.unwanted_models] = ",".join([*own, *missing])
        usable = tuple(kind for kind in usable if not contains_any(kind, map(str.casefold, avoided)))
        # Two vendors' schemes may use the same annotation. A scheme without known card types must not replace the types
        # that the other scheme has written.
        if usable:
            found[scheme.wanted_models] = ",".join(usable[:MAX_TYPES])
    return found


def reachable_others(
    pod: Pod, schemes: Iterable[Scheme], model: str, types: CardTypes, *, has_share: bool
) -> Iterator[str]:
    """Yield a description of the cards that a pod, limited to ``model``, could get without a charge for them."""
    # Schedulers do not strip the blanks around an unwanted text for the card type. An empty wanted text matches every
    # type.
    for scheme in schemes:
        wanted, unwanted = _texts(pod, scheme.wanted_models), unwanted_texts(pod, scheme)
        cards = types.on(scheme.name, model)
        for kind in cards.foreign:
            chosen = not wanted or contains_any(kind, map(str.strip, wanted))
            if chosen and not contains_any(kind, unwanted):
                yield f"a card of type {kind}, which is not of model {model}"
        if (
            has_share
            and scheme.card_mode
            and cards.sliced
            and MIG_MODE in pod.annotations.get(scheme.card_mode, MIG_MODE)
        ):
            yield f"a MIG slice of {model} of any size"


def _texts(pod: Pod, annotation: str | None) -> list[str]:
    text = pod.annotations.get(annotation) if annotation else None
    return text.casefold().split(",") if text else []
