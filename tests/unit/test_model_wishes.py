"""Tests of the order in which models are tried. An annotation, the namespace's quota or the quota document sets it."""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from examples.claims import claim, claim_policy, entry
from tests.both_calls import creation
from tests.builders import LABELS, MODEL, Manifest, held_to, quota_faults, review, vcuda_pod
from tests.tables import cases
from vcuda.admission_review import AdmissionResponse, GroupVersionKind
from vcuda.placement.choice import MAX_CHARACTERS, Rule, ordered_models, read_wish
from vcuda.placement.nodes import Nodes
from vcuda.quota.document import parse_quota
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota, Quota
from vcuda.quota.well_known import MODELS_ANNOTATION
from webhook.ledger.charging import ChargeRequest
from webhook.ledger.ledgers import MemoryLedgers
from webhook.review import answers
from webhook.review.context import PolicySnapshot
from webhook.review.decisions import Creation

QUOTA = NamespaceQuota({"T4": Limit(800), "A100": Limit(200), "H100": Limit(100)})
OTHERS = NamespaceQuota({"L40S": Limit(800)})


def wishing(text: str) -> Mapping[str, str]:
    return {MODELS_ANNOTATION: text}


def policy(quota: NamespaceQuota = QUOTA) -> PolicySnapshot:
    """Return a policy with two models that the pod's quota lacks: L40S is in team-b's quota, and B200 is on a node."""
    whole = Quota({"team-a": quota, "team-b": OTHERS}, version="41")
    nodes = Nodes.of({"one": {MODEL: "B200"}}, LABELS)
    return PolicySnapshot(whole, nodes, claims=claim_policy(quota=whole))


def mutated(
    manifest: Manifest, quota: NamespaceQuota = QUOTA, used: Mapping[str, int] | None = None
) -> AdmissionResponse:
    """Return the answer of /mutate for a pod while ``used`` cores of each model are in use."""
    ledgers = MemoryLedgers()
    for model, cores in (used or {}).items():
        given = ChargeRequest("team-a", f"uid-{model}", model, Charge(cores), quota, 1e9)
        asyncio.run(ledgers.charge(given))
    group, _, version = manifest["apiVersion"].rpartition("/")
    request = review(manifest, kind=GroupVersionKind(group, version, manifest["kind"]))
    return asyncio.run(answers.answer("/mutate", Creation(request, policy(quota), ledgers)))


def pod(wish: str | None = None, **fields: Any) -> Manifest:
    annotations = wishing(wish) if wish is not None else {}
    return vcuda_pod({"nvidia.com/gpu": 1}, annotations=annotations, **fields)


def wished_claim(wish: str) -> Manifest:
    made = claim(entry())
    return {**made, "metadata": {**made["metadata"], "annotations": wishing(wish)}}


@cases(
    "wish, used, model",
    none=(None, {}, "T4"),
    one_model=("A100", {}, "A100"),
    the_first_of_two=("H100, A100", {}, "H100"),
    the_second_if_the_first_is_full=("H100, A100", {"H100": 100}, "A100"),
    then_the_others=("H100,A100,*", {"H100": 100, "A100": 200}, "T4"),
    only_the_others=("*", {}, "T4"),
    blanks_do_not_matter=("  H100  ,A100 ", {}, "H100"),
)
def test_a_pod_gets_the_first_model_of_its_annotation_that_has_room(
    wish: str | None, used: Mapping[str, int], model: str
) -> None:
    answer = mutated(pod(wish), used=used)
    assert (answer.outcome, answer.model) == ("pinned", model)


@cases("wish, model", the_first=("A100, T4", "A100"), the_others=("*", "A100"), without_devices=("H100", "H100"))
def test_a_claim_gets_the_first_model_of_its_annotation_that_has_devices(wish: str, model: str) -> None:
    answer = mutated(wished_claim(wish))
    assert (answer.outcome, answer.model) == ("pinned", model)


KNOWN = "A100, B200, H100, L40S, T4"


@cases(
    "wish, sentence",
    unknown=("A10O", 'unknown GPU model "A10O"; did you mean `A100`?'),
    in_another_case=("h100", 'unknown GPU model "h100"; did you mean `H100`?'),
    like_no_other=("T4, Tahiti", 'unknown GPU model "Tahiti"; supported models: ' + KNOWN),
    empty=("", "must be GPU models separated by commas"),
    an_empty_part=("T4,,A100", "must be GPU models separated by commas"),
    a_star_in_front=("*, T4", "must be GPU models separated by commas"),
    ten_thousand=(",".join(f"M{number}" for number in range(10_000)), f"must not be longer than {MAX_CHARACTERS}"),
)
@pytest.mark.parametrize("make", [pod, wished_claim])
def test_an_annotation_that_names_no_model_is_rejected_with_422(make: Any, wish: str, sentence: str) -> None:
    answer = mutated(make(wish))
    assert (answer.outcome, answer.status) == ("malformed", HTTPStatus.UNPROCESSABLE_ENTITY)
    assert f"metadata.annotations[quota.vcuda.io/models]: {sentence}" in answer.message


@pytest.mark.parametrize("wish", ["L40S", "B200", "T4, L40S"])
@pytest.mark.parametrize("make", [pod, wished_claim])
def test_a_known_model_that_the_quota_entry_does_not_list_is_rejected_with_403(make: Any, wish: str) -> None:
    answer = mutated(make(wish))
    assert (answer.outcome, answer.status) == ("not-allowed", HTTPStatus.FORBIDDEN)
    assert answer.message == (
        f"annotation quota.vcuda.io/models names {wish.removeprefix('T4, ')}, but the quota of namespace team-a lists "
        "only T4, A100, H100"
    )


@pytest.mark.parametrize("wish", ["A10O", "L40S", ",", "*,*"])
@pytest.mark.parametrize("make", [pod, wished_claim])
def test_a_quota_that_only_warns_admits_with_the_reason(make: Any, wish: str) -> None:
    answer = mutated(make(wish), replace(QUOTA, mode=Mode.WARN))
    assert answer.allowed
    warning, by_nodes = answer.warnings
    assert "quota.vcuda.io/models" in warning
    assert by_nodes.startswith("pinned to ")  # the quota's models have no nodes
    assert warning.endswith("; the object is admitted, because this quota only warns")
    assert not mutated(make(wish), replace(QUOTA, mode=Mode.AUDIT)).warnings


def test_validate_never_reads_the_annotation() -> None:
    """A tenant may edit the annotation after /mutate. So /validate gets the model only from the node selection."""
    for wish in ("A10O", "T4", ",,,"):
        stored = pod(wish, affinity=held_to("A100"))
        stored["metadata"]["uid"] = "one"
        ledgers = MemoryLedgers()
        answer = asyncio.run(answers.answer("/validate", creation(stored, policy(), ledgers)))
        assert (answer.outcome, answer.model) == ("charged", "A100")


ORDERED = replace(QUOTA, order=("H100",))


@cases(
    "quota, wish, models, rule",
    the_document=(QUOTA, None, ("T4", "A100", "H100"), Rule.DOCUMENT),
    order_then_the_rest=(ORDERED, None, ("H100", "T4", "A100"), Rule.ORDER),
    the_annotation_before_order=(ORDERED, "A100, *", ("A100", "T4", "H100"), Rule.ANNOTATION),
    twice_is_once=(QUOTA, "T4, T4", ("T4",), Rule.ANNOTATION),
)
def test_the_order_is_that_of_the_annotation_then_the_entry_then_the_document(
    quota: NamespaceQuota, wish: str | None, models: tuple[str, ...], rule: Rule
) -> None:
    annotations = {} if wish is None else wishing(wish)
    assert ordered_models(annotations, quota) == (models, rule)


@given(st.text(max_size=40) | st.lists(st.sampled_from([*QUOTA.limits, "*", "L40S", ""])).map(",".join))
def test_no_annotation_leads_to_a_model_that_the_quota_does_not_list(text: str) -> None:
    models, rule = ordered_models(wishing(text), QUOTA)
    assert set(models) <= QUOTA.limits.keys()
    assert len(set(models)) == len(models)
    try:
        wish = read_wish(wishing(text))
    except ValueError:
        assert (models, rule) == ordered_models({}, QUOTA), "a malformed annotation must be ignored"
    else:
        assert wish
        named = wish.rest or not QUOTA.limits.keys().isdisjoint(wish.models)
        assert (rule is Rule.ANNOTATION) == named


# Tests of quotas that require each pod to choose one model

ONE = replace(QUOTA, one_model=True)


@cases(
    "manifest, models",
    no_wish=(pod(), "T4, A100, H100"),
    two=(pod("H100, T4"), "H100, T4"),
    all_of_them=(pod("*"), "T4, A100, H100"),
)
def test_with_one_model_the_rejection_says_how_to_name_a_model(manifest: Manifest, models: str) -> None:
    answer = mutated(manifest, ONE)
    first = models.split(",", maxsplit=1)[0]
    assert (answer.outcome, answer.status) == ("not-allowed", HTTPStatus.FORBIDDEN)
    assert answer.message == (
        f"the quota of namespace team-a requires one GPU model, but this object may use {models}; "
        f"set annotation quota.vcuda.io/models: {first}, or nodeSelector {MODEL}: {first}"
    )


@pytest.mark.parametrize("used", [{}, {"T4": 800, "A100": 200}])
def test_with_one_model_the_answer_does_not_depend_on_the_load(used: Mapping[str, int]) -> None:
    assert mutated(pod(), ONE, used).outcome == "not-allowed"
    assert mutated(pod("H100"), ONE, used).model == "H100"
    assert mutated(pod(nodeSelector={MODEL: "H100"}), ONE, used).model == "H100"


def test_with_one_model_a_claim_names_it_by_its_annotation() -> None:
    assert mutated(claim(entry()), ONE).message.endswith("; set annotation quota.vcuda.io/models: T4")
    assert mutated(wished_claim("A100"), ONE).model == "A100"


def test_with_one_model_a_quota_that_only_warns_admits_with_the_reason() -> None:
    answer = mutated(pod(), replace(ONE, mode=Mode.WARN))
    assert (answer.outcome, answer.model) == ("pinned", "T4")
    assert "requires one GPU model" in answer.warnings[0]


# Tests of the fields `order` and `one_model` in the quota document


def test_the_entry_sets_the_order_and_whether_one_model_is_required() -> None:
    quota = parse_quota("a: {order: [A100], one_model: true, quota: {T4: 8, A100: 2}}\n'*': {quota: {T4: 1}}")
    limits = {"T4": Limit(800), "A100": Limit(200)}
    assert quota.namespaces == {"a": NamespaceQuota(limits, order=("A100",), one_model=True)}
    assert quota.default == NamespaceQuota({"T4": Limit(100)})


@cases(
    "entry, fault",
    unknown_model=(
        "{order: [A10O], quota: {A100: 1}}",
        'a: `order` must list only models of `quota` or `grants`; got "A10O"; did you mean `A100`?',
    ),
    no_list=("{order: A100, quota: {A100: 1}}", 'a.order: must be a list, for example [A100]; got "A100"'),
    twice=("{order: [A100, A100], quota: {A100: 1}}", "a.order[1]: duplicate name; each name must be listed once"),
    a_preference=("{prefer: most-free}", "a.prefer: unknown key"),
    a_number=("{one_model: 1}", "a.one_model: must be true or false; got 1"),
    a_text=("{one_model: yes}", 'a.one_model: must be true or false; got "yes"'),
)
def test_a_mistake_in_these_keys_is_a_fault_at_its_place(entry: str, fault: str) -> None:
    [found] = map(str, quota_faults(f"a: {entry}"))
    assert found.startswith(fault)
