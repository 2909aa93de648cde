"""Tests of the JSON Patch that pins a pod to a GPU model: example pods, and properties that hold for any pod."""

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, assume, event, given, settings, strategies as st

from tests import strategies
from tests.both_calls import EVERY_NODE, Webhook, patched
from tests.builders import LABELS, MODEL, POOL, Manifest, required, requirement, term, vcuda_pod, view
from tests.node_selection import may_run_on
from tests.strategies import MODELS, NODE_NAMES, POOLS
from vcuda.admission_review import AdmissionResponse
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.nodes import CardTypes, Nodes
from vcuda.placement.patches import PinSettings, patch_for, type_annotations, unpinned_patch
from vcuda.quota.model import Mode, NamespaceQuota, Quota
from vcuda.quota.well_known import MODEL_ANNOTATION
from vcuda.requests.pod_request import read_request
from webhook.review.context import PolicySnapshot

CASES = Path(__file__).parent.parent / "data" / "patches"
SCHEDULER = "gpu-scheduler"


NAMES = sorted({path.name.split(".")[0] for path in CASES.iterdir()})
"""The names of the example cases.

Each case has the manifest of a pod (``.pod.yaml``) and the expected patch (``.patch.json``).
"""


@pytest.mark.parametrize("case", NAMES)
def test_the_patch_is_the_expected_one(case: str) -> None:
    """Each pod is pinned to M40 in pools public and lab. In cases scheduler-*, a webhook flag sets the scheduler."""
    pod = view(yaml.safe_load((CASES / f"{case}.pod.yaml").read_text()))
    pin_settings = PinSettings(scheduler=SCHEDULER if case.startswith("scheduler-") else None)
    types = type_annotations(pod, read_request(pod).schemes, "M40", CardTypes(), has_share=False)
    patch = patch_for(pod, "M40", ("public", "lab"), types, pin_settings)
    assert patch == json.loads((CASES / f"{case}.patch.json").read_text())


def test_the_node_labels_can_be_set() -> None:
    [operation, _] = patch_for(view(vcuda_pod()), "M40", ("lab",), {}, PinSettings(NodeLabels("card", "room")))
    [only] = operation["value"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [line["key"] for line in only["matchExpressions"]] == ["card", "room"]


def test_a_pod_that_gets_no_model_is_still_cleaned() -> None:
    pod = vcuda_pod(annotations={"note": "", "hami.io/bind-phase": ""}, labels={"nvidia.com/assigned-phase": ""})
    assert unpinned_patch(view(pod), PinSettings()) == [
        {"op": "remove", "path": "/metadata/annotations/hami.io~1bind-phase"},
        {"op": "remove", "path": "/metadata/labels/nvidia.com~1assigned-phase"},
    ]


class Admitted(msgspec.Struct, frozen=True):
    """An admitted pod: the manifest before and after the patch of /mutate, the answer, the quota and the webhook."""

    sent: Manifest
    patched: Manifest
    answer: AdmissionResponse
    quota: NamespaceQuota
    webhook: Webhook


PIN_SETTINGS = st.builds(PinSettings, st.just(LABELS), st.sampled_from([None, SCHEDULER, "default-scheduler"]))


@st.composite
def admitted(draw: st.DrawFn) -> Admitted:
    """Draw a pod, a quota and a cluster for which the webhook chooses a model. The cluster may have no nodes."""
    pod, quota = draw(strategies.pods()), draw(strategies.quotas())
    quota = msgspec.structs.replace(quota, mode=draw(st.sampled_from([Mode.ENFORCE, Mode.WARN])))
    webhook = Webhook(PolicySnapshot(Quota({"team-a": quota}), draw(strategies.clusters()), draw(PIN_SETTINGS)))
    answer = webhook.mutate(pod)
    assume(answer.outcome == "pinned")
    return Admitted(pod, patched(pod, answer.patch), answer, quota, webhook)


def for_every_admitted_pod(test: Any) -> Any:
    """Return the test with random admitted pods as input. Pods for which the webhook chooses no model are skipped."""
    quiet = [HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=50, suppress_health_check=quiet)(given(admitted())(test))


@pytest.mark.slow
@for_every_admitted_pod
def test_a_patched_pod_runs_on_exactly_the_selected_nodes_of_its_model_and_pools(case: Admitted) -> None:
    for name, labels in EVERY_NODE:
        in_pools = not case.quota.pools or labels.get(POOL) in case.quota.pools
        as_pinned = labels.get(MODEL) == case.answer.model and in_pools
        assert may_run_on(case.patched, name, labels) == (as_pinned and may_run_on(case.sent, name, labels))


@pytest.mark.slow
@for_every_admitted_pod
def test_a_second_call_patches_nothing(case: Admitted) -> None:
    again = case.webhook.mutate(case.patched)
    assert again.outcome == "pinned"
    assert again.model == case.answer.model
    assert list(again.patch) == []


@pytest.mark.slow
@for_every_admitted_pod
def test_a_patched_pod_is_then_accepted_and_charged(case: Admitted) -> None:
    verdict = case.webhook.validate(case.patched)
    places, named = case.webhook.policy.pin_settings.scheduler, case.patched["spec"].get("schedulerName", "")
    if places and not counts_cards(case) and named not in ("", places) and case.quota.mode is Mode.ENFORCE:
        assert f"spec.schedulerName must be {places}" in verdict.message
        return
    assert verdict.allowed, verdict.message
    assert verdict.model == case.answer.model
    used = asyncio.run(case.webhook.ledgers.usage("team-a"))[case.answer.model].used
    assert used == read_request(view(case.sent)).charge


@pytest.mark.slow
@for_every_admitted_pod
def test_no_allocation_of_any_scheme_is_left(case: Admitted) -> None:
    annotations, labels = case.patched["metadata"]["annotations"], case.patched["metadata"].get("labels") or {}
    assert not annotations.keys() & set(strategies.ALLOCATIONS)
    assert not any(key.startswith("tencent.com/predicate-gpu-idx-") for key in annotations)
    assert "nvidia.com/assigned-phase" not in labels


@pytest.mark.slow
@for_every_admitted_pod
def test_the_users_own_fields_are_unchanged(case: Admitted) -> None:
    assert users_own(case.patched) == users_own(case.sent)


MAY_CHANGE = {
    "metadata.annotations": {
        MODEL_ANNOTATION,
        "nvidia.com/use-gputype",
        "nvidia.com/include-gpu-type",
        *strategies.ALLOCATIONS,
        "tencent.com/predicate-gpu-idx-~/0",
    },
    "metadata.labels": {"nvidia.com/assigned-phase"},
    "spec": {"nodeName", "schedulerName"},
}
"""All fields that the patch may change.

In addition, the patch may add requirements to the terms of the required node affinity.
"""


def users_own(pod: Manifest) -> Manifest:
    """Return the pod without the fields that the patch may change. Objects that are then empty are left out too."""
    own = copy.deepcopy(pod)
    for path, keys in MAY_CHANGE.items():
        part = own
        for step in path.split("."):
            part = part.get(step) or {}
        for key in keys & part.keys():
            del part[key]
    affinity = own["spec"].get("affinity") or {}
    (affinity.get("nodeAffinity") or {}).pop("requiredDuringSchedulingIgnoredDuringExecution", None)
    parents = ((own["metadata"], "annotations"), (affinity, "nodeAffinity"), (own["spec"], "affinity"))
    for parent, child in parents:
        if not parent.get(child):
            parent.pop(child, None)
    return own


@pytest.mark.slow
@for_every_admitted_pod
def test_without_a_register_no_type_of_card_is_written(case: Admitted) -> None:
    """HAMi-DRA compares the annotation for card types with product names of devices.

    Without a register (a node annotation that lists the cards), only the model's name is known, which may differ.
    """
    annotations = case.patched["metadata"]["annotations"]
    before = case.sent["metadata"].get("annotations") or {}
    for key in ("nvidia.com/use-gputype", "nvidia.com/include-gpu-type"):
        assert annotations.get(key) == before.get(key)
    assert annotations[MODEL_ANNOTATION] == case.answer.model


def counts_cards(case: Admitted) -> bool:
    """Return whether the pod requests only whole cards. On nodes without HAMi, such a pod keeps its scheduler."""
    request = read_request(view(case.sent))
    return not request.registered and all(scheme.register for scheme in request.schemes)


@for_every_admitted_pod
def test_the_scheduler_is_that_of_the_flag_unless_the_user_named_one(case: Admitted) -> None:
    has_nodes = case.webhook.policy.nodes.having(str(case.answer.model))
    check_scheduler(case, keeps=bool(has_nodes) and counts_cards(case))


def check_scheduler(case: Admitted, *, keeps: bool = False) -> None:
    assert not case.patched["spec"].get("nodeName"), "the scheduler ignores a pod that has a nodeName"
    asked, hint = case.sent["spec"].get("schedulerName", ""), case.webhook.policy.pin_settings.scheduler
    expected = hint if hint and not keeps and asked in ("", "default-scheduler") else asked
    assert case.patched["spec"].get("schedulerName", "") == expected


@st.composite
def let_pass(draw: st.DrawFn) -> Admitted:
    """Draw a pod for which no model is possible. The mode of the quota is not enforce, so the pod is admitted."""
    pod, mode = draw(strategies.pods()), draw(st.sampled_from([Mode.WARN, Mode.AUDIT]))
    webhook = Webhook(PolicySnapshot(Quota({"team-a": NamespaceQuota({}, mode=mode)}), Nodes(), draw(PIN_SETTINGS)))
    answer = webhook.mutate(pod)
    assume(answer.outcome == "unpinned")
    return Admitted(pod, patched(pod, answer.patch), answer, NamespaceQuota({}), webhook)


@given(let_pass())
@settings(max_examples=50)
def test_a_pod_admitted_without_a_model_gets_the_scheduler_and_keeps_its_node_selection(
    case: Admitted,
) -> None:
    check_scheduler(case)
    assert users_own(case.patched) == users_own(case.sent)
    assert list(case.webhook.mutate(case.patched).patch) == []
    for name, labels in EVERY_NODE:
        assert may_run_on(case.patched, name, labels) == may_run_on(case.sent, name, labels)


@st.composite
def nearly_pinned(draw: st.DrawFn) -> Manifest:
    """Draw a pod that looks pinned to one model, but some of its terms may allow other models or pools."""
    model, pool = draw(st.sampled_from(MODELS)), draw(st.sampled_from(POOLS))
    held = [requirement(MODEL, "In", model), requirement(POOL, "In", pool)]
    loose = [
        requirement(MODEL, "In", model, draw(st.sampled_from(MODELS))),
        requirement(MODEL, "NotIn", *(other for other in MODELS if other != model)),
        requirement(POOL, "Exists"),
    ]
    lines = st.lists(st.sampled_from(held + loose) | strategies.requirements(), max_size=3)
    pinned = st.lists(strategies.requirements(), max_size=2).map(lambda more: [*held, *more])
    terms = draw(st.lists((pinned | pinned | lines).map(lambda found: term(*found)), min_size=1, max_size=3))
    selector = draw(st.sampled_from([{}, {MODEL: model}, {POOL: pool}, {MODEL: model, POOL: pool}]))
    name = draw(st.sampled_from(["", *NODE_NAMES]))
    return vcuda_pod(affinity=required(*terms), nodeSelector=selector, nodeName=name)


@given(nearly_pinned() | strategies.pods(), strategies.quotas(), strategies.clusters())
@settings(max_examples=200)
def test_a_pod_that_validate_accepts_cannot_leave_its_model_and_pools(
    pod: Manifest, quota: NamespaceQuota, cluster: Nodes
) -> None:
    """/validate must not rely on /mutate: another webhook may have changed the pod, or /mutate was not called."""
    verdict = Webhook(PolicySnapshot(Quota({"team-a": quota}), cluster)).validate(pod)
    event(verdict.outcome)
    if verdict.allowed:
        assert verdict.model in quota.limits
        for name, labels in EVERY_NODE:
            if may_run_on(pod, name, labels):
                assert labels.get(MODEL) == verdict.model
                assert not quota.pools or labels.get(POOL) in quota.pools
