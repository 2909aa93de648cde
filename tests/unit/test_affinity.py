"""Tests of node selection: each operator as Kubernetes defines it, and whole node selector terms."""

from collections.abc import Mapping

import pytest
from hypothesis import assume, example, given, settings, strategies as st

from tests import strategies
from tests.builders import LABELS, MODEL, POOL, Manifest, required, requirement, term, vcuda_pod, view
from tests.node_selection import line_holds, may_run_on, term_allows
from tests.strategies import MODELS, NODE_NAMES, NUMBERS, UNKNOWN_NODE, VALUES_OF
from tests.tables import cases
from vcuda.k8s_types import PodSpec
from vcuda.placement.affinity import NAME_FIELD, NodeIndex, NodeLabels, NodeSelection, limited_values
from vcuda.placement.nodes import Nodes
from vcuda.placement.placement import find_candidates
from vcuda.quota.model import Charge, Limit, NamespaceQuota
from vcuda.requests.pod_request import PodRequest

ABSENT = None


def spec_of(manifest: Manifest) -> PodSpec:
    return view(manifest).spec


def allows(pod: Manifest, name: str, labels: Mapping[str, str]) -> bool:
    """Return whether a pod's node selection permits a node. The node index that placement uses computes it."""
    index, selection = NodeIndex({"another": {}, name: labels}), NodeSelection.of(spec_of(pod))
    selected = index.selected(selection.selector)
    return bool(sum(index.matching(term, selected) & NAMED for term in selection.terms))


NAMED = 2
"""The bit of the second node in the bit masks of a node index."""


@cases(
    "operator, values, label, holds",
    in_listed=("In", ["a", "b"], "b", True),
    in_not_listed=("In", ["a", "b"], "c", False),
    in_other_case=("In", ["a"], "A", False),
    in_absent=("In", ["a"], ABSENT, False),
    in_empty_value=("In", [""], "", True),
    in_empty_value_is_not_absent=("In", [""], ABSENT, False),
    not_in_other=("NotIn", ["a", "b"], "c", True),
    not_in_listed=("NotIn", ["a", "b"], "a", False),
    not_in_absent=("NotIn", ["a"], ABSENT, True),
    exists_empty_value=("Exists", [], "", True),
    exists_absent=("Exists", [], ABSENT, False),
    does_not_exist_absent=("DoesNotExist", [], ABSENT, True),
    does_not_exist_empty_value=("DoesNotExist", [], "", False),
    gt_greater=("Gt", ["5"], "6", True),
    gt_equal=("Gt", ["5"], "5", False),
    gt_compares_numbers_not_text=("Gt", ["5"], "10", True),
    gt_absent=("Gt", ["5"], ABSENT, False),
    gt_no_number=("Gt", ["5"], "six", False),
    gt_negative_bound=("Gt", ["-1"], "0", True),
    gt_leading_zeros_of_any_length=("Gt", ["5"], "0000000000000000000000006", True),
    lt_a_very_long_bound=("Lt", ["0" * 5000 + "5"], "4", True),
    gt_largest_of_64_bits=("Gt", ["5"], str(2**63 - 1), True),
    gt_more_than_64_bits=("Gt", ["5"], str(2**63), False),
    gt_no_fractions=("Gt", ["5"], "6.5", False),
    gt_no_underscores=("Gt", ["5"], "1_0", False),
    gt_no_other_digits=("Gt", ["5"], "٦", False),
    lt_smaller=("Lt", ["5"], "4", True),
    lt_equal=("Lt", ["5"], "5", False),
    lt_absent=("Lt", ["5"], ABSENT, False),
    lt_bound_is_no_number=("Lt", ["x"], "4", False),
)
def test_an_operator_has_the_meaning_that_kubernetes_defines(
    operator: str, values: list[str], label: str | None, holds: bool
) -> None:
    node = {"zone": label} if label is not None else {}
    line = requirement("zone", operator, *values)
    assert allows(vcuda_pod(affinity=required(term(line))), "node-a", node) is holds
    assert line_holds(line, node) is holds, "the reference implementation of the tests"


@given(strategies.odd_requirements(), strategies.label_sets())
def test_a_requirement_that_the_api_server_rejects_selects_no_node(line: Manifest, labels: dict[str, str]) -> None:
    """For a requirement that the API server rejects, the scheduler only logs an error. Its term selects no node."""
    assert not allows(vcuda_pod(affinity=required(term(line))), "node-a", labels)


def test_any_other_field_selects_nothing() -> None:
    pod = vcuda_pod(affinity=required(term(fields=[requirement("spec.unschedulable", "NotIn", "true")])))
    assert not allows(pod, "node-a", {"spec.unschedulable": "false"})
    assert not reached(pod, "M40")


@pytest.mark.slow
@given(strategies.pods(), strategies.clusters())
@settings(max_examples=300)
def test_the_node_index_agrees_with_a_check_of_every_node(pod: Manifest, cluster: Nodes) -> None:
    index, selection = NodeIndex(cluster.labels), NodeSelection.of(spec_of(pod))
    matching = [index.matching(term, index.selected(selection.selector)) for term in selection.terms]
    for bit, (name, labels) in enumerate(cluster.labels.items()):
        assert any(found >> bit & 1 for found in matching) == may_run_on(pod, name, labels)


@cases(
    "lines, given, possible",
    a_node_without_the_label=([("DoesNotExist",)], {}, True),
    without_a_label_that_is_given=([("DoesNotExist",)], {"m": ("a",)}, False),
    with_and_without=([("Exists",), ("DoesNotExist",)], {}, False),
    two_values_at_once=([("In", "a"), ("In", "b")], {}, False),
    one_of_two_is_left=([("In", "a", "b"), ("NotIn", "a")], {}, True),
    not_the_one_that_is_given=([("In", "a", "b"), ("NotIn", "a")], {"m": ("a",)}, False),
    one_of_those_that_are_given=([("In", "a", "b"), ("NotIn", "a")], {"m": ("a", "b")}, True),
    there_is_always_another_value=([("Exists",), ("NotIn", "other-0", "other-1")], {}, True),
    one_number_between=([("Gt", "4"), ("Lt", "6")], {}, True),
    no_number_between=([("Gt", "4"), ("Lt", "5")], {}, False),
    the_number_written_otherwise=([("Gt", "4"), ("Lt", "6"), ("NotIn", "5", "05")], {}, True),
    no_label_is_negative=([("Lt", "0")], {}, False),
    nothing_is_larger_than_64_bits=([("Gt", str(2**63 - 1))], {}, False),
    what_is_given_is_no_number=([("Gt", "5")], {"m": ("M40",)}, False),
)
def test_a_term_is_reachable_only_if_some_node_could_match(
    lines: list[tuple[str, ...]], given: dict[str, tuple[str, ...]], possible: bool
) -> None:
    keys, models = NodeLabels("m" if given else "model", "pool"), given.get("m", ("M40",))
    pod = vcuda_pod(affinity=required(term(*(requirement("m", operator, *values) for operator, *values in lines))))
    assert bool(reached(pod, *models, keys=keys)) is possible


def reached(pod: Manifest, *models: str, pools: tuple[str, ...] = (), keys: NodeLabels = LABELS) -> tuple[str, ...]:
    """Return the models that the pod could get. The cluster has no nodes yet, so nodes of any model may come."""
    quota = NamespaceQuota({model: Limit(800) for model in models}, pools)
    return find_candidates(view(pod), PodRequest(Charge(), ()), quota, Nodes(keys)).models


RANK = "example.com/rank"


@pytest.mark.slow
@given(strategies.terms(), st.sampled_from([(), ("public",), ("lab", "3")]))
@settings(max_examples=300)
@example(term(requirement(RANK, "Gt", "3"), requirement(RANK, "Lt", "5"), requirement(RANK, "NotIn", "4")), ())
@example(term(requirement(RANK, "Gt", str(2**63 - 2)), requirement(RANK, "NotIn", str(2**63 - 1))), ())
def test_a_model_is_reached_exactly_if_there_could_be_a_node_for_it(manifest: Manifest, pools: tuple[str, ...]) -> None:
    """Requirements on different labels are independent. So the test finds a value for each label separately."""
    found = reached(vcuda_pod(affinity=required(manifest)), *MODELS, pools=pools)
    for model in MODELS:
        node = witness(manifest, {MODEL: (model,), **({POOL: pools} if pools else {})})
        assert (model in found) == (node is not None and term_allows(manifest, *node))


def witness(manifest: Manifest, given: Mapping[str, tuple[str, ...]]) -> tuple[str, dict[str, str]] | None:
    """Return a node (its name and labels) that matches the term, with values from ``given``. None if there is none."""
    lines = manifest.get("matchExpressions") or []
    fields = manifest.get("matchFields") or []
    names = [n for n in (*NODE_NAMES, UNKNOWN_NODE) if all(line_holds(line, {NAME_FIELD: n}) for line in fields)]
    labels: dict[str, str] = {}
    for key in given.keys() | {line["key"] for line in lines}:
        own = [line for line in lines if line["key"] == key]
        choices: list[dict[str, str]] = [{key: value} for value in given.get(key, LIKELY)]
        absent: list[dict[str, str]] = [] if key in given else [{}]
        fitting = [found for found in (*absent, *choices) if all(line_holds(line, found) for line in own)]
        if not fitting:
            return None
        labels |= fitting[0]
    return (names[0], labels) if names else None


LIKELY = (
    *(value for values in VALUES_OF.values() for value in values),
    *("other-0", "other-1", "other-2", "2", "4", "04", "6", "8", "9", "11", "06", "006", "0006"),
    *(f"0{number}" for number in NUMBERS),
    str(2**63 - 2),
)
"""The label values that `witness` tries. If any value meets all requirements on a label, one of these values does."""


@pytest.mark.slow
@given(strategies.pods(), st.sampled_from((*NODE_NAMES, UNKNOWN_NODE)), strategies.label_sets(), strategies.KEYS)
@settings(max_examples=150)
def test_limited_values_leave_out_no_value_of_a_matching_node(
    pod: Manifest, name: str, labels: dict[str, str], key: str
) -> None:
    """A pod's charge depends on the label values of the nodes on which it may run, so no value may be left out."""
    assume(may_run_on(pod, name, labels))
    limited = limited_values(spec_of(pod), key)
    assert limited is None or labels.get(key) in limited


NINE = "0000000000000000000000009"


def held(*lines: tuple[str, ...]) -> Manifest:
    return required(term(*(requirement("m", operator, *values) for operator, *values in lines)))


@cases(
    "affinity, limited",
    no_affinity=(None, None),
    no_node_affinity=({"nodeAffinity": None}, None),
    no_terms_select_nothing=(required(), frozenset()),
    an_empty_term_selects_nothing=(required({}), frozenset()),
    one_list=(held(("In", "a", "b")), {"a", "b"}),
    two_lists=(held(("In", "a", "b"), ("In", "b", "c")), {"b"}),
    less_not_in=(held(("In", "a", "b"), ("NotIn", "a")), {"b"}),
    impossible=(held(("In", "a"), ("DoesNotExist",)), frozenset()),
    the_largest_lower_bound=(held(("In", "7", "8", "9"), ("Gt", "5"), ("Gt", "7"), ("Gt", "6")), {"8", "9"}),
    the_least_upper_bound=(held(("In", "5", "6", "7"), ("Lt", "8"), ("Lt", "7"), ("Lt", "9")), {"5", "6"}),
    no_bound_holds_for_nothing=(held(("In", "7"), ("Gt", "5"), ("Gt", "x")), frozenset()),
    exists_with_values_for_nothing=(held(("In", "a"), ("Exists",), ("Exists", "a")), frozenset()),
    both_numbers_are_greater=(held(("In", "7", NINE), ("Gt", "5")), {"7", NINE}),
    not_in_leaves_the_rest_open=(held(("NotIn", "a")), None),
    exists_leaves_all_open=(held(("Exists",)), None),
    two_terms=(required(term(requirement("m", "In", "a")), term(requirement("m", "In", "b"))), {"a", "b"}),
    one_leaves_open=(required(term(requirement("m", "In", "a")), term(requirement("x", "Exists"))), None),
    beside_an_empty_term=(required(term(requirement("m", "In", "a")), {}), {"a"}),
)
def test_a_node_selection_limits_a_label_to_these_values(affinity: Manifest | None, limited: object) -> None:
    assert limited_values(spec_of(vcuda_pod(affinity=affinity)), "m") == limited


@cases(
    "affinity, limited",
    alone=(None, {"a"}),
    beside_a_term_that_leaves_it_open=(required(term(requirement("x", "Exists"))), {"a"}),
    against_a_term=(required(term(requirement("m", "In", "b"))), frozenset()),
    an_empty_term_still_selects_nothing=(required({}), frozenset()),
)
def test_the_node_selector_applies_in_addition_to_every_term(affinity: Manifest | None, limited: object) -> None:
    pod = vcuda_pod(affinity=affinity, nodeSelector={"m": "a"})
    assert limited_values(spec_of(pod), "m") == limited
