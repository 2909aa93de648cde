"""Tests of how the states of nodes affect the choice of a model: a node may not be able to take the pod now."""

import itertools
import string
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.both_calls import Webhook, patched
from tests.builders import LABELS, MODEL, Manifest, container, held_to, pod, policy_for, vcuda_pod, view
from tests.tables import cases
from vcuda.k8s_types import Node, Toleration
from vcuda.placement.nodes import MAX_TAINTS, NodeAvailability, Nodes, NodeStates, Taint, read_state
from vcuda.placement.placement import find_candidates
from vcuda.quota.document import parse_quota
from vcuda.quota.model import Limit, Mode, NamespaceQuota
from vcuda.requests.pod_request import read_request

GPU, SLICE = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"
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
    quota = quota or NamespaceQuota(QUOTA)
    seen = {f"n{at}": msgspec.convert(each, Node) for at, each in enumerate(manifests)}
    nodes = Nodes.of({name: each.labels for name, each in seen.items()}, LABELS)
    states = NodeStates.of(nodes.index.names, {name: read_state(each) for name, each in seen.items()})
    return Webhook(replace(policy_for(quota, nodes), states=states))


FREE = "32 cards of 32 cards free"
QUOTA = {"A100": Limit(3200), "L4": Limit(3200)}
L4 = node("L4", allocatable={GPU: "16"})


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
    nothing_to_allocate=([node("A100", allocatable={GPU: "0"})], {}, {}, "L4", f"its node does not offer 1 {GPU}"),
    no_plugin=([node("A100", allocatable={"cpu": "8"})], {}, {}, "L4", f"its node does not offer 1 {GPU}"),
    too_few=([node("A100"), node("A100")], {GPU: 9}, {}, "L4", f"its 2 nodes do not offer 9 {GPU}"),
    enough_of_two=([node("A100"), node("A100", allocatable={GPU: "16"})], {GPU: 16}, {}, "A100", ""),
    several_reasons=(
        [node("A100", cordoned=True), node("A100", ready="False"), node("A100", allocatable={GPU: "0"})],
        *({}, {}, "L4", f"of its 3 nodes, 1 does not offer 1 {GPU}, 1 is cordoned, 1 is not ready"),
    ),
    no_node=([], {}, {}, "L4", "no node now"),
)
def test_a_model_whose_nodes_can_take_the_pod_now_is_chosen_first(
    nodes: list[Manifest], limits: dict[str, int], fields: dict[str, Any], model: str, why: str
) -> None:
    answer = webhook(*nodes, L4).mutate(vcuda_pod(limits or {GPU: 1}, **fields))
    assert answer.model == model
    assert (f"after A100 ({why})" in answer.reason) == bool(why), answer.reason


def test_a_model_of_which_a_node_offers_the_mig_profile_is_chosen_first() -> None:
    quota = NamespaceQuota({"A100": Limit(800), "H100": Limit(800)})
    answer = webhook(node("A100"), node("H100", allocatable={SLICE: "4"}), quota=quota).mutate(vcuda_pod({SLICE: 2}))
    assert answer.model == "H100"
    assert f"after A100 (its node does not offer 2 {SLICE})" in answer.reason


@cases(
    "containers, init, amount",
    sum_of_containers=([3, 5], [], 8),
    the_largest_init_container=([1, 2], [6, 4], 6),
)
def test_a_node_must_offer_what_all_containers_of_a_pod_request(
    containers: list[int], init: list[int], amount: int
) -> None:
    manifest = pod(*(container({GPU: each}) for each in containers))
    manifest["spec"]["initContainers"] = [container({GPU: each}) for each in init]
    enough, little = (webhook(node("A100", allocatable={GPU: str(each)}), L4) for each in (amount, amount - 1))
    assert (enough.mutate(manifest).model, little.mutate(manifest).model) == ("A100", "L4")


def test_a_pod_that_no_node_can_take_gets_the_first_model_and_the_reason_why_it_will_wait() -> None:
    down = [node("L4", ready="False"), node("A100", cordoned=True), node("A100", cordoned=True)]
    answer = webhook(*down).mutate(vcuda_pod({GPU: 1}))
    assert answer.model == "A100"
    assert answer.reason.endswith("; the pod must wait for a node of A100: its 2 nodes are cordoned")


@cases(
    "nodes, quota, warned",
    the_first_model=([node("A100"), L4], NamespaceQuota(QUOTA), ""),
    passed_over=(
        *([node("A100", cordoned=True), L4], NamespaceQuota(QUOTA)),
        f"pinned to L4: the next in the namespace's quota after A100 (its node is cordoned), {FREE}",
    ),
    not_preferred_anyway=(
        *([node("A100", cordoned=True), L4], NamespaceQuota(QUOTA, order=("L4", "A100"))),
        "",
    ),
    full=([node("A100", cordoned=True), L4], NamespaceQuota({"A100": Limit(0), "L4": Limit(3200)}), ""),
    must_wait=(
        *([node("A100", cordoned=True)], NamespaceQuota({"A100": Limit(3200)})),
        f"pinned to A100: the only possible model, {FREE}; the pod must wait for a node of A100: its node is cordoned",
    ),
    nodes_unknown=([], NamespaceQuota(QUOTA), ""),
    only_audited=([node("A100", cordoned=True), L4], NamespaceQuota(QUOTA, mode=Mode.AUDIT), ""),
)
def test_a_create_is_warned_if_nodes_have_changed_the_choice_or_the_pod_must_wait(
    nodes: list[Manifest], quota: NamespaceQuota, warned: str
) -> None:
    assert list(webhook(*nodes, quota=quota).mutate(vcuda_pod({GPU: 1})).warnings) == [warned] * bool(warned)


@pytest.mark.parametrize("down", [node("A100", cordoned=True), node("A100", allocatable={GPU: "0"}), node("A100", ML)])
def test_validate_does_not_depend_on_the_states_of_nodes(down: Manifest) -> None:
    pinned = vcuda_pod({GPU: 1}, affinity=held_to("A100"))
    assert webhook(down, L4).validate(pinned).allowed
    quota = NamespaceQuota(QUOTA, require_nodes=True)
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
    quota = NamespaceQuota(QUOTA, require_nodes=True)
    answer = webhook(*nodes, L4, quota=quota).mutate(pod)
    assert answer.allowed is not excluded
    told = f"A100 is excluded by `require_nodes` of the quota, because no node that the pod may use offers 1 {GPU}"
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
    states = NodeStates({Taint(f"k{number}"): 1 for number in range(MAX_TAINTS)})
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
    """Each of ten nodes has fifty taints that no other node has. Two nodes have the usual taint of GPU nodes."""
    names = [f"n{number}" for number in range(12)]
    taints = {name: frozenset(Taint(f"{name}-{number}") for number in range(50)) for name in names[:10]}
    taints |= dict.fromkeys(names[10:], frozenset([Taint(GPU)]))
    states = NodeStates.of(names, {name: NodeAvailability(each) for name, each in taints.items()})
    assert len(states.tainted) == MAX_TAINTS + 1
    assert states.take(None) & 0xFFF == 0
    assert states.take((Toleration(operator="Exists"),)) & 0xFFF == 0xFFF
    assert states.take((Toleration(GPU, "Exists"),)) & 0xFFF == 0xC00
