"""The algebra of node selection: each operator as Kubernetes defines it, and what follows for whole terms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests import strategies
from tests.builders import MODEL, Manifest, required, requirement, term, vcuda_pod, view
from tests.node_selection import line_holds, may_run_on, term_allows
from tests.strategies import MODELS, NODE_NAMES, NUMBERS, POOLS, UNKNOWN_NODE, VALUES_OF
from vcuda.k8s_types import PodSpec, Requirement
from vcuda.placement.affinity import NAME_FIELD, Term, limited_values, terms_of

ABSENT = None


def spec_of(manifest: Manifest) -> PodSpec:
    return view(manifest).spec


def one_term(manifest: Manifest) -> Term:
    """Return a nodeSelectorTerm as the code reads it."""
    expressions = strategies.decoded(manifest.get("matchExpressions") or ())
    return Term(expressions, strategies.decoded(manifest.get("matchFields") or ()))


@pytest.mark.parametrize(
    ("operator", "values", "label", "holds"),
    [
        pytest.param("In", ["a", "b"], "b", True, id="in-listed"),
        pytest.param("In", ["a", "b"], "c", False, id="in-not-listed"),
        pytest.param("In", ["a"], "A", False, id="in-other-case"),
        pytest.param("In", ["a"], ABSENT, False, id="in-absent"),
        pytest.param("In", [""], "", True, id="in-empty-value"),
        pytest.param("In", [""], ABSENT, False, id="in-empty-value-is-not-absent"),
        pytest.param("NotIn", ["a", "b"], "c", True, id="not-in-other"),
        pytest.param("NotIn", ["a", "b"], "a", False, id="not-in-listed"),
        pytest.param("NotIn", ["a"], ABSENT, True, id="not-in-absent"),
        pytest.param("Exists", [], "", True, id="exists-empty-value"),
        pytest.param("Exists", [], ABSENT, False, id="exists-absent"),
        pytest.param("DoesNotExist", [], ABSENT, True, id="does-not-exist-absent"),
        pytest.param("DoesNotExist", [], "", False, id="does-not-exist-empty-value"),
        pytest.param("Gt", ["5"], "6", True, id="gt-greater"),
        pytest.param("Gt", ["5"], "5", False, id="gt-equal"),
        pytest.param("Gt", ["5"], "10", True, id="gt-compares-numbers-not-text"),
        pytest.param("Gt", ["5"], ABSENT, False, id="gt-absent"),
        pytest.param("Gt", ["5"], "six", False, id="gt-no-number"),
        pytest.param("Gt", ["-1"], "0", True, id="gt-negative-bound"),
        pytest.param("Gt", ["5"], "0000000000000000000000006", True, id="gt-leading-zeros-of-any-length"),
        pytest.param("Lt", ["0" * 5000 + "5"], "4", True, id="lt-a-very-long-bound"),
        pytest.param("Gt", ["5"], str(2**63 - 1), True, id="gt-largest-of-64-bits"),
        pytest.param("Gt", ["5"], str(2**63), False, id="gt-more-than-64-bits"),
        pytest.param("Gt", ["5"], "6.5", False, id="gt-no-fractions"),
        pytest.param("Gt", ["5"], "1_0", False, id="gt-no-underscores"),
        pytest.param("Gt", ["5"], "٦", False, id="gt-no-other-digits"),
        pytest.param("Lt", ["5"], "4", True, id="lt-smaller"),
        pytest.param("Lt", ["5"], "5", False, id="lt-equal"),
        pytest.param("Lt", ["5"], ABSENT, False, id="lt-absent"),
        pytest.param("Lt", ["x"], "4", False, id="lt-bound-is-no-number"),
    ],
)
def test_an_operator_means_what_kubernetes_says(
    operator: str, values: list[str], label: str | None, holds: bool
) -> None:
    node = {"zone": label} if label is not None else {}
    assert Term((Requirement("zone", operator, tuple(values)),)).matches("node-a", node) is holds
    assert line_holds(requirement("zone", operator, *values), node) is holds, "the tests' own reading"


@given(strategies.odd_requirements(), strategies.label_sets())
def test_what_the_api_server_would_not_store_holds_for_nothing(line: Manifest, labels: dict[str, str]) -> None:
    """The scheduler does not either: it logs a parse error, and the term selects no node."""
    [read] = strategies.decoded([line])
    assert not Term((read,)).matches("node-a", labels)


@pytest.mark.parametrize(
    ("lines", "name", "allowed"),
    [
        pytest.param([("In", "node-a")], "node-a", True, id="in"),
        pytest.param([("In", "node-a")], "node-b", False, id="in-another"),
        pytest.param([("NotIn", "node-a")], "node-a", False, id="not-in"),
        pytest.param([("NotIn", "node-a")], "node-b", True, id="not-in-another"),
        pytest.param([("In", "node-a"), ("In", "node-b")], "node-a", False, id="two-names-at-once"),
    ],
)
def test_fields_are_read_from_the_name_and_not_from_labels(
    lines: list[tuple[str, str]], name: str, allowed: bool
) -> None:
    fields = tuple(Requirement(NAME_FIELD, operator, (value,)) for operator, value in lines)
    assert Term(fields=fields).matches(name, {NAME_FIELD: "node-a"}) is allowed


def test_any_other_field_selects_nothing() -> None:
    unknown = Term(fields=(Requirement("spec.unschedulable", "NotIn", ("true",)),))
    assert not unknown.matches("node-a", {"spec.unschedulable": "false"})
    assert not unknown.could_match({})


@given(strategies.terms(), st.sampled_from(NODE_NAMES), strategies.label_sets())
@settings(max_examples=150)
def test_a_term_agrees_with_brute_force(manifest: Manifest, name: str, labels: dict[str, str]) -> None:
    assume(bool(manifest.get("matchExpressions") or manifest.get("matchFields")))
    assert one_term(manifest).matches(name, labels) == term_allows(manifest, name, labels)


@given(strategies.pods(), st.sampled_from((*NODE_NAMES, UNKNOWN_NODE)), strategies.label_sets())
@settings(max_examples=150)
def test_a_pod_agrees_with_brute_force(pod: Manifest, name: str, labels: dict[str, str]) -> None:
    """nodeName, nodeSelector and required node affinity together, with every part of them missing in every way."""
    assert any(term.matches(name, labels) for term in terms_of(spec_of(pod))) == may_run_on(pod, name, labels)


@pytest.mark.parametrize(
    ("lines", "given", "possible"),
    [
        pytest.param([], {}, True, id="nothing-asked"),
        pytest.param([("DoesNotExist",)], {}, True, id="a-node-without-the-label"),
        pytest.param([("DoesNotExist",)], {"m": ("a",)}, False, id="without-a-label-that-is-given"),
        pytest.param([("Exists",), ("DoesNotExist",)], {}, False, id="with-and-without"),
        pytest.param([("In", "a"), ("In", "b")], {}, False, id="two-values-at-once"),
        pytest.param([("In", "a", "b"), ("NotIn", "a")], {}, True, id="one-of-two-is-left"),
        pytest.param([("In", "a", "b"), ("NotIn", "a")], {"m": ("a",)}, False, id="not-the-one-that-is-given"),
        pytest.param([("In", "a", "b"), ("NotIn", "a")], {"m": ("a", "b")}, True, id="one-of-those-that-are-given"),
        pytest.param([("Exists",), ("NotIn", "other-0", "other-1")], {}, True, id="there-is-always-another-value"),
        pytest.param([("Gt", "4"), ("Lt", "6")], {}, True, id="one-number-between"),
        pytest.param([("Gt", "4"), ("Lt", "5")], {}, False, id="no-number-between"),
        pytest.param([("Gt", "4"), ("Lt", "6"), ("NotIn", "5", "05")], {}, True, id="the-number-written-otherwise"),
        pytest.param([("Lt", "0")], {}, False, id="no-label-is-negative"),
        pytest.param([("Gt", str(2**63 - 1))], {}, False, id="nothing-is-larger-than-64-bits"),
        pytest.param([("Gt", "5")], {"m": ("M40",)}, False, id="what-is-given-is-no-number"),
    ],
)
def test_whether_some_node_could_match(
    lines: list[tuple[str, ...]], given: dict[str, tuple[str, ...]], possible: bool
) -> None:
    requirements = tuple(Requirement("m", operator, tuple(values)) for operator, *values in lines)
    assert Term(requirements).could_match(given) is possible


@given(strategies.terms(), st.sampled_from(NODE_NAMES), strategies.label_sets(), st.sets(strategies.KEYS))
@settings(max_examples=150)
def test_what_a_node_matches_could_be_matched(
    manifest: Manifest, name: str, labels: dict[str, str], known: set[str]
) -> None:
    """Soundness: for any part of the node's labels that is given, alone or among others, a match is never denied."""
    read = one_term(manifest)
    assume(read.matches(name, labels))
    assert read.could_match({key: (labels[key], "no-such-value") for key in known & labels.keys()})


GIVEN = st.fixed_dictionaries(
    {}, optional={MODEL: st.lists(st.sampled_from(MODELS), min_size=1, max_size=2).map(tuple), "zone": st.just(("a",))}
)


@given(strategies.terms(), GIVEN)
@settings(max_examples=150)
@example(
    term(*(requirement("example.com/rank", op, *v) for op, v in [("Gt", ("3",)), ("Lt", ("5",)), ("NotIn", ("4",))])),
    {},
)
@example(
    term(
        requirement("example.com/rank", "Gt", str(2**63 - 2)), requirement("example.com/rank", "NotIn", str(2**63 - 1))
    ),
    {},
)
def test_what_could_be_matched_is_matched_by_some_node(manifest: Manifest, given: dict[str, tuple[str, ...]]) -> None:
    """Completeness: a witness is built, key by key, since the requirements on two keys never meet."""
    if one_term(manifest).could_match(given):
        name, labels = witness(manifest, given)
        assert not (manifest.get("matchExpressions") or manifest.get("matchFields")) or term_allows(
            manifest, name, labels
        )
        assert all(labels.get(key) in values for key, values in given.items())


def witness(manifest: Manifest, given: dict[str, tuple[str, ...]]) -> tuple[str, dict[str, str]]:
    """Return a node for the term; StopIteration where the search finds none."""
    lines = manifest.get("matchExpressions") or []
    fields = manifest.get("matchFields") or []
    name = next(n for n in (*NODE_NAMES, UNKNOWN_NODE) if all(line_holds(line, {NAME_FIELD: n}) for line in fields))
    labels: dict[str, str] = {}
    for key in given.keys() | {line["key"] for line in lines}:
        own = [line for line in lines if line["key"] == key]
        choices: Iterator[dict[str, str]] = ({key: value} for value in given.get(key, LIKELY))
        absent: list[dict[str, str]] = [] if key in given else [{}]
        labels |= next(found for found in (*absent, *choices) if all(line_holds(line, found) for line in own))
    return name, labels


LIKELY = (
    *(value for values in VALUES_OF.values() for value in values),
    *("other-0", "other-1", "other-2", "2", "4", "04", "6", "8", "9", "11", "06", "006", "0006"),
    *(f"0{number}" for number in NUMBERS),
    str(2**63 - 2),
)
"""Values enough that one of them meets any requirements over this alphabet that can be met."""


@given(strategies.pods(), st.sampled_from((*NODE_NAMES, UNKNOWN_NODE)), strategies.label_sets(), strategies.KEYS)
@settings(max_examples=150)
def test_limited_values_leave_out_no_value_of_a_matching_node(
    pod: Manifest, name: str, labels: dict[str, str], key: str
) -> None:
    """What a pod is charged to rests on this: a node outside the limited values can never take it."""
    assume(may_run_on(pod, name, labels))
    limited = limited_values(spec_of(pod), key)
    assert limited is None or labels.get(key) in limited


NINE = "0000000000000000000000009"


def held(*lines: tuple[str, ...]) -> Manifest:
    """Return a node affinity of one term, whose lines are all about the label ``m``."""
    return required(term(*(requirement("m", operator, *values) for operator, *values in lines)))


@pytest.mark.parametrize(
    ("affinity", "limited"),
    [
        pytest.param(None, None, id="no-affinity"),
        pytest.param({"nodeAffinity": None}, None, id="no-node-affinity"),
        pytest.param(required(), frozenset(), id="no-terms-select-nothing"),
        pytest.param(required({}), frozenset(), id="an-empty-term-selects-nothing"),
        pytest.param(held(("In", "a", "b")), {"a", "b"}, id="one-list"),
        pytest.param(held(("In", "a", "b"), ("In", "b", "c")), {"b"}, id="two-lists"),
        pytest.param(held(("In", "a", "b"), ("NotIn", "a")), {"b"}, id="less-not-in"),
        pytest.param(held(("In", "a"), ("DoesNotExist",)), frozenset(), id="impossible"),
        pytest.param(
            held(("In", "7", "8", "9"), ("Gt", "5"), ("Gt", "7"), ("Gt", "6")), {"8", "9"}, id="the-largest-lower-bound"
        ),
        pytest.param(
            held(("In", "5", "6", "7"), ("Lt", "8"), ("Lt", "7"), ("Lt", "9")), {"5", "6"}, id="the-least-upper-bound"
        ),
        pytest.param(held(("In", "7"), ("Gt", "5"), ("Gt", "x")), frozenset(), id="no-bound-holds-for-nothing"),
        pytest.param(held(("In", "a"), ("Exists",), ("Exists", "a")), frozenset(), id="exists-with-values-for-nothing"),
        pytest.param(held(("In", "7", NINE), ("Gt", "5")), {"7", NINE}, id="both-numbers-are-greater"),
        pytest.param(held(("NotIn", "a")), None, id="not-in-leaves-the-rest-open"),
        pytest.param(held(("Exists",)), None, id="exists-leaves-all-open"),
        pytest.param(
            required(term(requirement("m", "In", "a")), term(requirement("m", "In", "b"))), {"a", "b"}, id="two-terms"
        ),
        pytest.param(
            required(term(requirement("m", "In", "a")), term(requirement("x", "Exists"))), None, id="one-leaves-open"
        ),
        pytest.param(required(term(requirement("m", "In", "a")), {}), {"a"}, id="beside-an-empty-term"),
    ],
)
def test_the_values_that_a_label_is_limited_to(affinity: Manifest | None, limited: object) -> None:
    assert limited_values(spec_of(vcuda_pod(affinity=affinity)), "m") == limited


def test_many_thousand_requirements_are_read_in_time_in_proportion_to_them() -> None:
    """Who may change a gated pod writes them, and the leader reads each pod that is stored: squared, for minutes."""
    many = range(20_000)
    listed = requirement("m", "In", *(f"{number}" for number in many))
    bounds = (requirement("m", "Gt", f"{number}") for number in many)
    there = (requirement("m", "Exists") for _ in many)
    terms = (term(requirement(f"x{number}", "Exists")) for number in many)
    selector = {f"x{number}": "" for number in many} | {"m": "19999"}
    alone = vcuda_pod(affinity=required(term(listed, *there, *bounds)))
    beside = vcuda_pod(affinity=required(*terms), nodeSelector=selector)
    assert limited_values(spec_of(alone), "m") == frozenset()
    assert limited_values(spec_of(beside), "m") == frozenset({"19999"})


@pytest.mark.parametrize(
    ("affinity", "limited"),
    [
        pytest.param(None, {"a"}, id="alone"),
        pytest.param(required(term(requirement("x", "Exists"))), {"a"}, id="beside-a-term-that-leaves-it-open"),
        pytest.param(required(term(requirement("m", "In", "b"))), frozenset(), id="against-a-term"),
        pytest.param(required({}), frozenset(), id="an-empty-term-still-selects-nothing"),
    ],
)
def test_the_node_selector_holds_beside_every_term(affinity: Manifest | None, limited: object) -> None:
    pod = vcuda_pod(affinity=affinity, nodeSelector={"m": "a"})
    assert limited_values(spec_of(pod), "m") == limited


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        pytest.param([], None, id="open"),
        pytest.param([("In", "node-a")], {"node-a"}, id="one"),
        pytest.param([("In", "node-a"), ("NotIn", "node-a")], frozenset(), id="impossible"),
        pytest.param([("NotIn", "node-a")], None, id="all-but-one"),
    ],
)
def test_the_names_that_a_term_is_limited_to(fields: list[tuple[str, str]], names: object) -> None:
    lines = tuple(Requirement(NAME_FIELD, operator, (value,)) for operator, value in fields)
    assert Term(labels=(Requirement(NAME_FIELD, "In", ("a-label",)),), fields=lines).names() == names


def test_a_preset_node_name_is_the_one_name() -> None:
    pod = vcuda_pod(nodeName="node-a", affinity=required(term(requirement(POOLS[0], "Exists")), {}))
    assert [term.names() for term in terms_of(spec_of(pod))] == [frozenset({"node-a"})]
