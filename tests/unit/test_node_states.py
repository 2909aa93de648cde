"""Tests of the choice of a model by the states of its nodes: whether a node can take the pod now."""

import itertools
import string
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.both_calls import Webhook, patched
from tests.builders import LABELS, MODEL, Manifest, held_to, policy_for, vcuda_pod, view
from tests.tables import cases
from vcuda.k8s_types import Node, Toleration
from vcuda.placement.node_states import MOST_TAINTS, NodeAvailability, NodeStates, Taint, read_state
from vcuda.placement.nodes import Nodes
from vcuda.placement.placement import find_candidates
from vcuda.quota.document import parse_quota
from vcuda.quota.model import Limit, NamespaceQuota
from vcuda.requests.pod_request import read_request

GPU, SLICE = "nvidia.com/gpu", "nvidia.com/mig-1g.6gb"
CORDON = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
ML = {"key": "dedicated", "value": "ml", "effect": "NoSchedule"}
DRAIN = {"key": "drain", "effect": "NoExecute"}


def node(
    model: str, *taints: Manifest, cordoned: bool = False, ready: str = "True", **offered: str | Mapping[str, str]
) -> Manifest:
    allocatable = offered.get("allocatable", {GPU: "8"})
    spec = {"taints": list(taints), **({"unschedulable": True} if cordoned else {})}
    status = {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": ready}]}
    return {"metadata": {"labels": {MODEL: model}}, "spec": spec, "status": status}


def webhook(*manifests: Manifest, quota: NamespaceQuota | None = None) -> Webhook:
    quota = quota or NamespaceQuota({model: Limit(800) for model in ("A100", "L4")})
    seen = {f"n{at}": msgspec.convert(each, Node) for at, each in enumerate(manifests)}
    nodes = Nodes.of({name: each.labels for name, each in seen.items()}, LABELS)
    states = NodeStates.of(nodes.index.names, {name: read_state(each) for name, each in seen.items()})
    return Webhook(replace(policy_for(quota, nodes), states=states))


L4 = node("L4")


@cases(
    "nodes, limits, fields, model, why",
    cordoned=([node("A100", cordoned=True)], {}, {}, "L4", "its node is cordoned"),
    all_cordoned=([node("A100", cordoned=True), node("A100", CORDON)], {}, {}, "L4", "its 2 nodes are cordoned"),
    one_of_two_cordoned=([node("A100", cordoned=True), node("A100")], {}, {}, "A100", ""),
    not_ready=([node("A100", ready="False")], {}, {}, "L4", "its node is not ready"),
    unreachable=([node("A100", ready="Unknown")], {}, {}, "L4", "its node is not ready"),
    tainted=([node("A100", ML)], {}, {}, "L4", "its node has taints that the pod does not tolerate"),
    no_execute=([node("A100", DRAIN)], {}, {}, "L4", "its node has taints that the pod does not tolerate"),
    only_preferred=([node("A100", {**ML, "effect": "PreferNoSchedule"})], {}, {}, "A100", ""),
    fifty_taints=(
        [node("A100", *({**ML, "key": f"k{number}"} for number in range(50)))],
        *({}, {}, "L4", "its node has taints that the pod does not tolerate"),
    ),
    tolerated=([node("A100", ML)], {}, {"tolerations": [{**ML, "operator": "Equal"}]}, "A100", ""),
    tolerates_everything=([node("A100", ML, cordoned=True)], {}, {"tolerations": [{"operator": "Exists"}]}, "A100", ""),
    tolerates_the_cordon=(
        *([node("A100", ML, cordoned=True)], {}, {"tolerations": [{"key": CORDON["key"], "operator": "Exists"}]}),
        *("L4", "its node has taints that the pod does not tolerate"),
    ),
    nothing_to_allocate=([node("A100", allocatable={GPU: "0"})], {}, {}, "L4", f"its node does not offer {GPU}"),
    no_plugin=([node("A100", allocatable={"cpu": "8"})], {}, {}, "L4", f"its node does not offer {GPU}"),
    another_profile=(
        *([node("A100"), node("L4", allocatable={SLICE: "4"})], {SLICE: 1}, {}),
        *("L4", f"its node does not offer {SLICE}"),
    ),
    several_reasons=(
        [node("A100", cordoned=True), node("A100", ready="False"), node("A100", allocatable={GPU: "0"})],
        *({}, {}, "L4", f"of its 3 nodes, 1 does not offer {GPU}, 1 is cordoned, 1 is not ready"),
    ),
    no_node=([], {}, {}, "L4", "no node now"),
)
def test_a_model_whose_nodes_can_take_the_pod_now_is_chosen_first(
    nodes: list[Manifest], limits: dict[str, int], fields: dict[str, Any], model: str, why: str
) -> None:
    answer = webhook(*nodes, L4).mutate(vcuda_pod(limits or {GPU: 1}, **fields))
    assert answer.model == model
    assert (f"after A100 ({why})" in answer.reason) == bool(why), answer.reason


def test_a_pod_that_no_node_can_take_gets_the_first_model_and_the_reason_why_it_will_wait() -> None:
    down = [node("L4", ready="False"), node("A100", cordoned=True), node("A100", cordoned=True)]
    answer = webhook(*down).mutate(vcuda_pod({GPU: 1}))
    assert answer.model == "A100"
    assert answer.reason.endswith("; the pod must wait for a node of A100: its 2 nodes are cordoned")


@pytest.mark.parametrize("down", [node("A100", cordoned=True), node("A100", allocatable={GPU: "0"}), node("A100", ML)])
def test_validate_does_not_depend_on_the_states_of_nodes(down: Manifest) -> None:
    pinned = vcuda_pod({GPU: 1}, affinity=held_to("A100"))
    assert webhook(down, L4).validate(pinned).allowed
    quota = NamespaceQuota({"A100": Limit(800), "L4": Limit(800)}, require_nodes=True)
    assert webhook(down, L4, quota=quota).validate(pinned).allowed


def test_a_pod_that_was_pinned_keeps_its_model_when_the_states_of_nodes_change() -> None:
    manifest = vcuda_pod({GPU: 1})
    stored = patched(manifest, webhook(node("A100"), L4).mutate(manifest).patch)
    assert list(webhook(node("A100", cordoned=True), L4).mutate(stored).patch) == []


@cases(
    "nodes, excluded",
    offers_nothing=([node("A100", allocatable={GPU: "0"})], True),
    no_node=([], True),
    cordoned=([node("A100", cordoned=True)], False),
    not_ready=([node("A100", ready="False")], False),
)
def test_with_require_nodes_a_model_of_which_no_node_offers_the_resource_is_excluded(
    nodes: list[Manifest], excluded: bool
) -> None:
    pod = vcuda_pod({GPU: 1}, nodeSelector={MODEL: "A100"})
    quota = NamespaceQuota({"A100": Limit(800), "L4": Limit(800)}, require_nodes=True)
    answer = webhook(*nodes, L4, quota=quota).mutate(pod)
    assert answer.allowed is not excluded
    told = f"A100 is excluded by `require_nodes` of the quota, because no node that the pod may use offers {GPU}"
    assert (told in answer.message) is excluded
    assert webhook(*nodes, L4).mutate(pod).allowed


@cases(
    "text, required",
    default=("a: {quota: {}}", [False]),
    in_an_entry=("a: {require_nodes: true}", [True]),
    at_the_top=("{require_nodes: true, a: {}, b: {require_nodes: false}}", [True, False]),
    switched_off_at_the_top=("{require_nodes: false, a: {require_nodes: true}, b: {}}", [True, False]),
)
def test_require_nodes_is_set_in_an_entry_or_at_the_top_for_all(text: str, required: list[bool]) -> None:
    assert [each.require_nodes for each in parse_quota(text).namespaces.values()] == required


OPERATORS: Mapping[str, Callable[[Toleration, Taint], bool]] = {
    "": lambda toleration, taint: toleration.value == taint.value,
    "Equal": lambda toleration, taint: toleration.value == taint.value,
    "Exists": lambda *_: True,
    "Unknown": lambda *_: False,
}


def test_taints_are_tolerated_by_the_rules_of_kubernetes() -> None:
    """The rules are those of ``ToleratesTaint`` in ``staging/src/k8s.io/api/core/v1/toleration.go``."""
    taint = Taint("k", "v", "NoSchedule")
    states = NodeStates({taint: 1})
    for key, operator, value, effect in itertools.product(
        ("", "k", "other"), OPERATORS, ("", "v", "w"), ("", "NoSchedule", "NoExecute")
    ):
        if key or operator == "Exists":  # the API server rejects other tolerations without a key
            one = Toleration(key, operator, value, effect)
            same = key in ("", taint.key) and effect in ("", taint.effect) and OPERATORS[operator](one, taint)
            assert bool(states.take((one,)) & 1) is same, one


def test_a_pod_with_many_tolerations_is_judged_by_a_number_of_steps_that_is_counted_first() -> None:
    counted: list[int] = []
    states = NodeStates({Taint(f"k{number}"): 1 for number in range(MOST_TAINTS)})
    tolerations = [{"key": f"k{number}", "operator": "Exists"} for number in range(1000)]
    pod = view(vcuda_pod({GPU: 1}, tolerations=tolerations))
    nodes = Nodes.of({"n": {MODEL: "A100"}}, LABELS)
    quota = NamespaceQuota({"A100": Limit(800)})
    found = find_candidates(
        pod, read_request(pod), quota, nodes, states=states, check=lambda steps=0: counted.append(steps)
    )
    assert found.ready == {"A100"}
    assert sum(counted) >= len(tolerations)


def test_the_reason_for_a_choice_names_few_of_the_resources_that_a_pod_requests() -> None:
    limits = {f"nvidia.com/mig-1g.5gb.{letter * 9}": 1 for letter in string.ascii_lowercase}
    assert len(webhook(node("A100"), L4).mutate(vcuda_pod(limits)).reason) < 300


def test_the_number_of_different_taints_is_bounded() -> None:
    names = [f"n{number}" for number in range(10)]
    taints = {name: frozenset(Taint(f"{name}-{number}") for number in range(50)) for name in names}
    states = NodeStates.of(names, {name: NodeAvailability(each) for name, each in taints.items()})
    assert len(states.tainted) == MOST_TAINTS + 1
    assert states.take(None) & 0x3FF == 0
    assert states.take((Toleration(operator="Exists"),)) & 0x3FF == 0x3FF
    first, last = (tuple(Toleration(key, "Exists") for key, *_ in taints[name]) for name in (names[0], names[-1]))
    assert (states.take(first) & 1, states.take(last) & 0x200) == (1, 0)
