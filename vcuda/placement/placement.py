"""Finds the GPU models that a pod may use, the nodes of a model that can serve it, and the scheduler that places it.

The type of a card is its product name. One annotation of a pod lists wanted texts, another lists unwanted texts. HAMi
and vgpu-manager give the pod only cards whose type contains a wanted text and no unwanted text, in any letter case. The
label of a node names one GPU model, but the node may have cards of several types. On such a node, a pod without these
annotations could get a card of a model that the pod is not charged for. A wanted text that is part of two types has the
same effect.

HAMi and vgpu-manager list the cards of each of their nodes in a node annotation, the register. Their schedulers skip
nodes without a register (HAMi ``pkg/scheduler/scheduler.go``, ``getNodesUsage``: "node unregistered"). On these nodes,
``nvidia.com/gpu`` is a whole card of NVIDIA's device plugin, and the scheduler that the pod names can assign it.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Set
from typing import NamedTuple

import msgspec

from vcuda.k8s_types import Check, Pod, no_check
from vcuda.placement.affinity import NAME, LabelIndex, NodeLabels, NodeSelection, Values, limited_values, required_terms
from vcuda.placement.choice import NO_NODE, Option, Rule, ordered_models
from vcuda.placement.nodes import CardTypes, Nodes, NodeStates, amounts_of
from vcuda.quota.model import Charge, NamespaceQuota, Usage, all_models, mebibytes
from vcuda.quota.rejections import no_model_usable
from vcuda.quota.well_known import MODELS_ANNOTATION
from vcuda.requests.mig import unknown_profile
from vcuda.requests.pod_request import PodRequest
from vcuda.requests.resources import NO_ROWS, CardModels
from vcuda.requests.schemes import Scheme

HOSTNAME = "kubernetes.io/hostname"
"""The node label by which the node affinity of a pod excludes nodes."""

MAX_AVOIDED = 256
"""Maximum number of nodes that the node affinity of a pod excludes. The affinity lists the names of these nodes."""

MAX_AVOIDED_LENGTH = 2**18
"""Maximum total length of the names of excluded nodes. Each term of the node affinity repeats all names."""

DEFAULT_SCHEDULER = "default-scheduler"

MAX_CHOICE = 8192
"""Maximum length of an annotation that lists wanted or unwanted texts, because it is parsed once for each model."""

ANY_SLICE = "a share may get a MIG slice of any size; use a model whose cards are not in MIG mode"
"""The reason why a pod with a share of a card must not use a card in MIG mode. HAMi gives the share the first free MIG
slice with enough memory, or a slice that the pod prefers. So the charge is unknown when the pod is created."""

MIG_MODE = "mig"
"""The name of MIG mode in the pod annotation that lists the allowed modes of cards."""


class ServedBy(msgspec.Struct, frozen=True, gc=False):
    """The nodes of one model that can serve a pod, and the scheduler that places the pod on them."""

    nodes: int
    """The nodes that can serve the pod, as a bit set (see `Nodes.index`); empty if no existing node can."""
    scheduler: str | None = None
    """The scheduler that places the pod; None if the pod keeps the scheduler that it names."""
    avoided: tuple[str, ...] = ()
    """The hostnames of the nodes to exclude, because the scheduler that the pod names cannot assign their cards."""


def find_serving(pod: Pod, request: PodRequest, every: int, nodes: Nodes, scheduler: str | None = None) -> ServedBy:
    """Return the nodes of a model that can serve a pod, and the scheduler that places the pod there. ``every``: all
    nodes of the model. ``scheduler``: the scheduler for the vendors' resources that the pod requests."""
    if not request.schemes:
        return ServedBy(every)
    for scheme in request.registered:
        # If no node has a register (list of cards) of the scheme, its nodes are unknown. So no node is left out.
        every &= nodes.registered.get(scheme.name, every)
    if request.registered or not all(each.register for each in request.schemes):
        return ServedBy(every, scheduler)
    return _serve_whole_cards(pod, request, nodes, scheduler, every)


def _serve_whole_cards(pod: Pod, request: PodRequest, nodes: Nodes, scheduler: str | None, every: int) -> ServedBy:
    # Nodes with a vendor's register and nodes without a register can both serve a request for whole
    # cards. But they need different schedulers, so the pod is limited to one of these two kinds of nodes.
    with_register = 0
    for scheme in request.schemes:
        with_register |= every & nodes.registered.get(scheme.name, 0)
    own = pod.spec.scheduler_name not in ("", DEFAULT_SCHEDULER, scheduler)
    keeps = own or any(each.opt_out and each.opt_out in pod.labels.items() for each in request.schemes)
    if not with_register:
        return ServedBy(every, None if every or keeps else scheduler)
    plain = every & ~with_register
    if keeps and plain and with_register.bit_count() <= MAX_AVOIDED:
        avoided = nodes.index.values_on(with_register, HOSTNAME)
        repeated = max(len(required_terms(pod.spec) or ()), 1)
        if None not in avoided and repeated * sum(map(len, map(str, avoided))) <= MAX_AVOIDED_LENGTH:
            return ServedBy(plain, None, tuple(sorted(map(str, avoided))))
    # A node with a register (a vendor's list of its cards) serves only pods of the vendor's scheduler. A pod cannot
    # have two schedulers.
    return ServedBy(0 if own and scheduler else with_register, scheduler)


def reaches(pod: Pod, nodes: Nodes, key: str, values: Iterable[str]) -> bool:
    """Return whether a pod may run on an existing node whose label ``key`` has one of ``values``."""
    selection = NodeSelection.of(pod.spec)
    among = nodes.index.selected(selection.selector) & nodes.index.having(key, values)
    return any(nodes.index.matching(term, among) for term in selection.terms)


def unserved(model: str, request: PodRequest, nodes: Nodes, scheduler: str | None) -> str:
    """Return the message that no existing node of a model can serve the pod.

    The cause is a missing register (a vendor's list of the node's cards), or the scheduler that the pod names.
    ``scheduler``: the scheduler that places pods on the nodes.
    """
    if not request.registered:
        other = scheduler or "another scheduler"
        return f"{model} is excluded, because only {other} places pods on its nodes that the pod may use"
    names = " and ".join(each.display_name for each in request.registered if each.name in nodes.registered)
    return f"{model} is excluded, because no node that the pod may use has a register of {names}"


ChargeOn = Callable[[str], Charge]
"""A function that returns the charge of a pod or claim if it uses the given GPU model."""


class Candidates(msgspec.Struct, frozen=True, gc=False):
    """The GPU models that a pod or claim may use."""

    models: tuple[str, ...]
    """The GPU models that the pod or claim may use, in the order in which they are tried."""
    ready: frozenset[str]
    """The models with a node that can take the pod or claim now."""
    excluded: Mapping[str, str]
    """The other models of the quota, each with the message why the pod or claim may not use the model."""
    rule: Rule = Rule.DOCUMENT
    """The rule that determines the order of ``models``."""
    why_not_ready: Callable[[str], str] | None = None
    """Returns why no node of the given model can take the pod now; None if the nodes are unknown."""

    def options(self, quota: NamespaceQuota, charge_on: ChargeOn, usage: Mapping[str, Usage]) -> list[Option]:
        found, total_usage = [], functools.partial(all_models, usage.values())
        for model in self.models:
            waits = functools.partial(self.why_not_ready, model) if self.why_not_ready else str
            used, ready = usage.get(model, Usage()), model in self.ready
            found.append(Option(model, charge_on(model), quota, used, ready, waits, total_usage))
        return found

    def sentence(self, kind: str, namespace: str, quota: NamespaceQuota) -> str:
        """Return the message for an object that may use no model of its namespace. ``kind``: ``pod`` or ``claim``."""
        if not quota.limits:
            return no_model_usable(f"namespace {namespace}", ": its quota lists none")
        return no_model_usable(f"this {kind}", f" in namespace {namespace}: {'; '.join(self.excluded.values())}")


def select(pod: Pod, scheme: Scheme, model: str, types: CardTypes, *, has_share: bool) -> tuple[str, ...] | str:
    """Return the card types of a model that the pod may get by its annotations; empty if no types are known.

    If the pod cannot use the model, return the message why.
    """
    choices = (scheme.wanted_models, scheme.unwanted_models)
    if too_long := next((key for key in choices if key and len(pod.annotations.get(key, "")) > MAX_CHOICE), None):
        return f"{model} is excluded, because annotation {too_long} is longer than {MAX_CHOICE} characters"
    cards = types.on(scheme.name, model)
    wanted, unwanted = _substrings(pod, scheme.wanted_models), _substrings(pod, scheme.unwanted_models)
    kept = [kind for kind in cards.own if contains_any(kind, wanted)] if wanted else list(cards.own)
    if wanted and not kept:
        if not contains_any(model, wanted):
            return f"{model} is excluded by annotation {scheme.wanted_models}"
        kept = list(cards.own)
    left = tuple(kind for kind in kept if not contains_any(kind, unwanted))
    if contains_any(model, unwanted) or (cards.own and not left):
        return f"{model} is excluded by annotation {scheme.unwanted_models}"
    if has_share and scheme.card_mode and cards.sliced:
        if MIG_MODE in pod.annotations.get(scheme.card_mode, ""):
            return f"{model} is excluded by annotation {scheme.card_mode}: {ANY_SLICE}"
        if not cards.whole:
            return f"{model} is excluded, because its cards are in MIG mode: {ANY_SLICE}"
    return left


def contains_any(name: str, texts: Iterable[str]) -> bool:
    """Return whether ``name`` contains one of ``texts``, in any letter case. The texts must be in lower case."""
    folded = name.casefold()
    return any(text in folded for text in texts)


def unwanted_texts(pod: Pod, scheme: Scheme) -> list[str]:
    # Card types are ASCII. Texts with other characters are ignored, because Go and Python convert their case
    # differently.
    text = pod.annotations.get(scheme.unwanted_models) if scheme.unwanted_models else None
    return [part.casefold() for part in (text or "").split(",") if part and part.isascii()]


def count_choices(pod: Pod, schemes: Iterable[Scheme]) -> int:
    """Return how many wanted and unwanted texts a pod's annotations have. Each text is compared for every GPU model."""
    keys = (key for scheme in schemes for key in (scheme.wanted_models, scheme.unwanted_models) if key)
    texts = (pod.annotations.get(key, "") for key in keys)
    return sum(text.count(",") + 1 for text in texts if 0 < len(text) <= MAX_CHOICE)


def _substrings(pod: Pod, annotation: str | None) -> tuple[str, ...]:
    return _split(pod.annotations.get(annotation, "")) if annotation else ()


@functools.lru_cache(maxsize=8)  # the texts of one pod are compared with every model
def _split(text: str) -> tuple[str, ...]:
    # Blank items of the annotation are ignored, because they name no type of card.
    return tuple(filter(None, map(str.strip, text.casefold().split(","))))


def find_candidates(
    pod: Pod,
    request: PodRequest,
    quota: NamespaceQuota,
    nodes: Nodes,
    scheduler: str | None = None,
    *,
    states: NodeStates = NodeStates(),  # noqa: B008  # it is immutable
    check: Check = no_check,
) -> Candidates:
    """Return the models of the quota that a pod may use. ``scheduler``: the scheduler for the pod's GPU resources.

    ``states``: the states of ``nodes``. They decide for which models a node can take the pod now. If the quota requires
    nodes, they also exclude models.
    """
    check(count_choices(pod, request.schemes) * len(quota.limits))
    selected = {
        model: [select(pod, scheme, model, nodes.types, has_share=request.has_share) for scheme in request.schemes]
        for model in quota.limits
    }
    unwanted = {model: next((why for why in each if isinstance(why, str)), None) for model, each in selected.items()}
    # Each MIG profile is looked up twice: here, and again for the charge.
    check(2 * len(quota.limits) * len(request.on_models.profiles) if request.on_models else 0)
    unwanted |= {model: why for model in quota.limits if (why := _without_card(model, request, nodes))}
    ordered, rule = ordered_models(pod.annotations, quota)
    for model in quota.limits.keys() - set(ordered):
        unwanted[model] = f"{model} is excluded by annotation {MODELS_ANNOTATION}"
    selection = NodeSelection.of(pod.spec, nodes.selected_values)
    check()
    having = {model: nodes.having(model) for model in quota.limits}
    reach = _reach_of(selection, quota, nodes, having=having, check=check)
    on = {model: every & reach.nodes for model, every in having.items()}
    serving = {model: find_serving(pod, request, having[model], nodes, scheduler).nodes & on[model] for model in on}
    taking, offering = states.take(pod.spec.tolerations, check), states.offer(request.resources)

    def exclusion(model: str) -> str | None:
        if excluded := unwanted[model] or reach.exclusion(model, quota):
            return excluded
        if on[model] and not serving[model]:
            return unserved(model, request, nodes, scheduler)
        required = quota.require_nodes and nodes.labels and not serving[model] & offering
        return _not_offered(model, request) if required else None

    excluded = {model: why for model in quota.limits if (why := exclusion(model))}
    models = tuple(model for model in ordered if model not in excluded)
    ready = frozenset(model for model in models if serving[model] & taking & offering)

    def why_not_ready(model: str) -> str:
        if not serving[model]:
            return NO_NODE
        return states.obstacle(serving[model], request.resources, pod.spec.tolerations)

    return Candidates(models, ready, excluded, rule, why_not_ready if nodes.labels else None)


def _not_offered(model: str, request: PodRequest) -> str:
    offered = f"offers {amounts_of(request.resources)}" if request.resources else "exists now"
    return f"{model} is excluded by `require_nodes` of the quota, because no node that the pod may use {offered}"


def _without_card(model: str, request: PodRequest, nodes: Nodes) -> str | None:
    if request.on_models and (profile := request.on_models.unknown_profile(model)):
        return f"{model} is excluded: {unknown_profile(profile, model)}"
    if not request.share_memory:
        return None
    row = nodes.named.rows.get(model)
    registered = (nodes.registered_cards.get((scheme.name, model), ()) for scheme in request.schemes)
    memory = row.memory if row and row.memory else max(itertools.chain(*registered), default=0)
    if not memory or request.share_memory <= memory:
        return None
    needed = f"a container requests {mebibytes(request.share_memory)} of one card"
    return f"{model} is excluded, because its cards have {mebibytes(memory)} and {needed}"


class Pin(msgspec.Struct, frozen=True, gc=False):
    """The GPU models and the pools of nodes to which the nodeSelector and required node affinity limit a pod."""

    models: frozenset[str] | None
    """The GPU models of the nodes that the spec allows; None if the spec does not limit the model."""
    pools: frozenset[str] | None
    """The pools of the nodes that the spec allows; None if the spec does not limit the pool."""

    @property
    def model(self) -> str | None:
        return next(iter(self.models)) if self.models is not None and len(self.models) == 1 else None

    def within(self, quota: NamespaceQuota) -> bool:
        return self.model in quota.limits and self.in_pools(quota)

    def in_pools(self, quota: NamespaceQuota) -> bool:
        return not quota.pools or (self.pools is not None and self.pools <= set(quota.pools))


def read_pod_pin(pod: Pod, labels: NodeLabels, named: CardModels = NO_ROWS, check: Check = no_check) -> Pin:
    # Annotations are not read, because users can edit them. The nodeSelector and node affinity are fixed. While the pod
    # has a scheduling gate, users can add requirements (KEP-3838), but these cannot allow nodes of another model.
    values = limited_values(pod.spec, labels.model)
    check(named.steps(len(values or ())))
    models = None if values is None else frozenset(map(named.model_of, values))
    return Pin(models, limited_values(pod.spec, labels.pool))


class _Reach(NamedTuple):
    """The GPU models of the nodes that a pod's nodeName, nodeSelector and required node affinity allow."""

    in_pools: frozenset[str]
    """The models of the allowed nodes in the quota's pools, including nodes that may be added later."""
    anywhere: frozenset[str]
    """The models of the allowed nodes in any pool, including nodes that may be added later."""
    nodes: int
    """The existing allowed nodes in the quota's pools."""

    def exclusion(self, model: str, quota: NamespaceQuota) -> str | None:
        if model in self.in_pools:
            return None
        if model in self.anywhere:
            pools = f"the namespace's pools {', '.join(quota.pools)}"
            return f"{model} is excluded by the pod's node selection, which leaves no node in {pools}"
        return f"{model} is excluded by the pod's nodeName, nodeSelector or required node affinity"


class _ReachedModels:
    """Collects the GPU models that the terms of a node selection allow. The models of all terms are found together,
    because there may be thousands of terms and a hundred models."""

    def __init__(self, nodes: Nodes, models: Set[str]) -> None:
        self.every = False
        self._nodes, self._models = nodes, models
        self._listed: set[str] = set()
        self._found = 0

    @functools.cached_property
    def _values(self) -> LabelIndex:
        """The known values of the model label, with one bit for each value."""
        values = itertools.chain.from_iterable(map(self._nodes.label_values, self._models))
        return LabelIndex({value: 1 << at for at, value in enumerate(dict.fromkeys(values))})

    def add(self, values: Values | None, check: Check) -> None:
        """Add the models of the nodes whose model label has one of ``values``; None stands for every value."""
        if values is None:
            self.every = True
        elif (listed := values.limit()) is None:
            self._found |= self._values.find(values)
        else:
            # Every listed value counts, even if no node has it now, because a node with the value may be added later.
            check(self._nodes.named.steps(len(listed)))
            self._listed.update(map(self._nodes.named.model_of, listed))

    def models(self) -> frozenset[str]:
        if self.every or not self._found:
            return frozenset(self._models if self.every else self._models & self._listed)
        found = {value for value, bit in self._values.by_value.items() if bit & self._found}
        allowed = (model for model in self._models if not found.isdisjoint(self._nodes.label_values(model)))
        return frozenset((*allowed, *(self._models & self._listed)))


def _reach_of(
    selection: NodeSelection, quota: NamespaceQuota, nodes: Nodes, *, having: Mapping[str, int], check: Check
) -> _Reach:
    keys, index, models = nodes.keys, nodes.index, quota.limits.keys()
    in_pools, anywhere = _ReachedModels(nodes, models), _ReachedModels(nodes, models)
    selected = index.selected(selection.selector)
    matching = named = 0
    for term in selection.terms:
        check()
        found = index.matching(term, selected)
        matching |= found
        if in_pools.every:
            continue  # skip the slow part below, because thousands of terms may follow
        names = term[NAME].limit() if NAME in term else None
        if names is not None and names <= nodes.labels.keys():
            # If all nodes that the term names exist, their labels decide. A node that does not exist yet may get any
            # labels.
            named |= found
        # Requirements on the model label and the pool label are checked below.
        elif all(values.allow_any() or key in (keys.model, keys.pool) for key, values in term.items()):
            model, pool = selection.values_of(term, keys.model), selection.values_of(term, keys.pool)
            if pool is None or any(map(pool.allow, quota.pools)) or (not quota.pools and pool.allow_any()):
                in_pools.add(model, check)
            elif pool.allow_any():
                anywhere.add(model, check)
    found_in_pools = in_pools.models()
    found_anywhere = found_in_pools | anywhere.models()
    pools = index.having(keys.pool, quota.pools) if quota.pools else matching
    found_in_pools |= {model for model in models if having[model] & named & pools}
    found_anywhere |= {model for model in models if having[model] & named}
    return _Reach(found_in_pools, found_anywhere, matching & pools)
