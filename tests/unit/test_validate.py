"""Tests of /validate. They have every kind of pod, because only /validate charges pods."""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from examples.claims import claim_policy
from tests import builders
from tests.both_calls import DEADLINE, creation
from tests.builders import MODEL, POOL, Manifest, held_to, pod_of_cores, required, requirement, term
from tests.replicas import Clock
from tests.tables import cases
from tools.reviews import mutate, validate
from vcuda.admission_review import AdmissionResponse
from vcuda.errors import Forbidden, Unavailable, VcudaError, cut
from vcuda.placement.patches import PinSettings
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota, Usage
from vcuda.quota.rejections import UNPATCHED
from vcuda.quota.shortage import Shortage
from vcuda.quota.well_known import MODEL_ANNOTATION, UNSTORED_CAUSE
from webhook.caches import MAX_KNOWN_NAMESPACES, SKIPPED_SECONDS, SkippedMutate
from webhook.ledger.charging import ChargeRequest, PutOff
from webhook.ledger.ledgers import MemoryLedgers
from webhook.review.decisions import Creation

QUOTA = NamespaceQuota({"M40": Limit(800), "P100": Limit(0), "A100": Limit(250, 1000)})
POOLED = NamespaceQuota({"M40": Limit(800)}, pools=("public", "lab"))
M40, P100, V100 = (requirement(MODEL, "In", model) for model in ("M40", "P100", "V100"))
PUBLIC, LAB = (requirement(POOL, "In", pool) for pool in ("public", "lab"))
EITHER, NO_P100 = requirement(MODEL, "In", "P100", "M40"), requirement(MODEL, "NotIn", "P100")
PREFERRED = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": term(M40)}]}


def validated(
    manifest: Manifest, ledgers: MemoryLedgers | None = None, quota: NamespaceQuota = QUOTA, **fields: Any
) -> AdmissionResponse:
    asked = creation(manifest, builders.policy_for(quota), ledgers or MemoryLedgers(), **fields)
    return asyncio.run(validate(asked))


def used(ledgers: MemoryLedgers) -> dict[str, Charge]:
    return {model: usage.used for model, usage in asyncio.run(ledgers.usage("team-a")).items()}


def rejection(answer: AdmissionResponse) -> tuple[str, HTTPStatus, str]:
    assert not answer.allowed
    assert answer.warnings == ()
    return answer.outcome, answer.status, answer.message


# Tests of pods that are charged


def short_by(**fields: Charge) -> Shortage:
    return Shortage("M40", Charge(200), Usage(Charge(800), **fields), Limit(800))


PENDING = short_by(pending=Charge(300))
RESERVED, GONE = short_by(reserved=Charge(200)), short_by(terminating=Charge(100))


@pytest.mark.parametrize(
    ("decision", "outcome", "wait", "told"),
    [
        (
            PutOff((PENDING,)),
            "over-quota-pending",
            None,
            "quota of admitted pods that were never created is being released within 75 s; if this lasts, "
            + UNSTORED_CAUSE,
        ),
        (PutOff((RESERVED,), soon=True), "over-quota-reserved", 1, "2 reserved, limited: 8"),
        (PutOff((RESERVED,)), "over-quota-reserved", None, "; reserved quota is being released"),
        (PutOff((GONE,), soon=True), "over-quota-not-recounted", 1, "; quota of deleted pods is being released"),
        (PutOff((GONE,)), "over-quota-not-recounted", None, "used: 8 (0 pending, 1 terminating)"),
        (PutOff((PENDING,), counted=False), "over-quota-uncounted", None, "could not be counted in time"),
    ],
)
def test_a_shortage_that_ends_by_itself_is_a_429_if_it_ends_soon_and_otherwise_a_403(
    decision: PutOff, outcome: str, wait: int | None, told: str
) -> None:
    """kube-controller-manager sleeps for retryAfterSeconds in one of its few workers, so long waits get a 403."""
    ledgers = mock.Mock(charge=mock.AsyncMock(return_value=decision))
    policy = replace(builders.policy_for(QUOTA), storable_seconds=75)
    answer = asyncio.run(validate(creation(pod_of_cores(200), policy, ledgers)))
    status = HTTPStatus.TOO_MANY_REQUESTS if wait else HTTPStatus.FORBIDDEN
    assert (answer.outcome, answer.status, answer.retry_after) == (outcome, status, wait)
    assert answer.message.startswith("exceeded quota: M40 in namespace team-a, requested: 2 cards, used: ")
    assert told in answer.message


def test_a_pinned_pod_within_its_quota_is_charged() -> None:
    ledgers = MemoryLedgers()
    assert validated(pod_of_cores(200), ledgers) == AdmissionResponse("charged", model="M40", scheme="nvidia-vcuda")
    assert used(ledgers) == {"M40": Charge(200, 0, 200)}


@cases(
    "quota, placed",
    nodeSelector=(QUOTA, {"affinity": None, "nodeSelector": {MODEL: "M40"}}),
    every_term=(QUOTA, {"affinity": required(term(M40), term(M40, PUBLIC))}),
    both=(QUOTA, {"affinity": required(term(LAB)), "nodeSelector": {MODEL: "M40"}}),
    a_term_that_matches_nothing=(QUOTA, {"affinity": required(term(M40), {})}),
    a_term_that_no_node_can_match=(QUOTA, {"affinity": required(term(M40), term(M40, P100))}),
    an_intersection=(QUOTA, {"affinity": required(term(EITHER, M40))}),
    every_other_model_excluded=(QUOTA, {"affinity": required(term(EITHER, NO_P100))}),
    a_pool=(POOLED, {"affinity": held_to("M40", "public")}),
    all_pools=(POOLED, {"affinity": held_to("M40", "lab", "public")}),
    a_pool_by_nodeSelector=(POOLED, {"nodeSelector": {POOL: "lab"}}),
    a_pool_in_each_term=(POOLED, {"affinity": required(term(M40, PUBLIC), term(M40, LAB))}),
)
def test_every_kind_of_pin_to_one_model_is_accepted(quota: NamespaceQuota, placed: dict[str, Any]) -> None:
    ledgers = MemoryLedgers()
    assert validated(pod_of_cores(100, **placed), ledgers, quota).outcome == "charged"
    assert list(used(ledgers)) == ["M40"]


def test_the_ledger_gets_everything_it_needs() -> None:
    ledgers = mock.Mock(charge=mock.AsyncMock(return_value=PutOff((GONE,))))
    validated(pod_of_cores(100), ledgers, dry_run=True)
    asked = ChargeRequest("team-a", "pod-uid", "M40", Charge(100, 0, 100), QUOTA, DEADLINE, "41", dry_run=True)
    ledgers.charge.assert_called_once_with(asked)


# Tests of pods that exceed the quota


def test_a_pod_over_quota_is_rejected_with_the_figures() -> None:
    ledgers = MemoryLedgers()
    assert validated(pod_of_cores(700, uid="first"), ledgers).allowed
    answer = validated(pod_of_cores(200, uid="second"), ledgers)
    figures = "requested: 2 cards, used: 7 (7 pending), limited: 8, 1 more needed"
    message = f"exceeded quota: M40 in namespace team-a, {figures}"
    assert rejection(answer) == ("over-quota", HTTPStatus.FORBIDDEN, message)
    assert (answer.model, answer.scheme) == ("M40", "nvidia-vcuda")
    assert used(ledgers) == {"M40": Charge(700, 0, 700)}


# Tests of pods that may run on nodes of several models, or of a model that the quota does not allow


@cases(
    "placed, allows",
    no_node_selection=({"affinity": None}, "any"),
    no_required_affinity=({"affinity": {"nodeAffinity": {}}}, "any"),
    only_preferred=({"affinity": {"nodeAffinity": PREFERRED}}, "any"),
    one_term_without_the_pin=({"affinity": required(term(M40), term(PUBLIC))}, "any"),
    any_model=({"affinity": required(term(requirement(MODEL, "Exists")))}, "any"),
    all_models_but_one=({"affinity": required(term(NO_P100))}, "any"),
    another_label=({"affinity": required(term(requirement(f"{MODEL}x", "In", "M40")))}, "any"),
    two_terms=({"affinity": required(term(M40), term(P100))}, "M40, P100"),
    two_values=({"affinity": required(term(EITHER))}, "M40, P100"),
    not_listed=({"affinity": held_to("V100")}, "V100"),
    another_case=({"affinity": held_to("m40")}, "m40"),
    no_term=({"affinity": required()}, "none"),
    an_empty_term=({"affinity": required({})}, "none"),
    a_contradiction=({"nodeSelector": {MODEL: "P100"}}, "none"),
    our_annotation=({"affinity": None, "annotations": {"quota.vcuda.io/model": "M40"}}, "any"),
    the_pods_own_label=({"affinity": None, "labels": {MODEL: "M40"}}, "any"),
)
def test_a_pod_that_is_not_pinned_to_one_allowed_model_is_rejected(placed: dict[str, Any], allows: str) -> None:
    ledgers = MemoryLedgers()
    models = "one GPU model of namespace team-a (M40: 8 cards, A100: 2.5 cards, 1000 MiB)"
    wanted = f"a required node affinity or nodeSelector must restrict the pod to {models}"
    message = f"{UNPATCHED}: {wanted}, but the pod allows these models: {allows}"
    assert rejection(validated(pod_of_cores(100, **placed), ledgers)) == ("not-pinned", HTTPStatus.FORBIDDEN, message)
    assert used(ledgers) == {}


@pytest.mark.parametrize("quota", [NamespaceQuota({}), NamespaceQuota({"P100": Limit(0)})])
def test_a_pod_of_a_namespace_without_models_is_rejected(quota: NamespaceQuota) -> None:
    answer = validated(pod_of_cores(100), quota=quota)
    assert "of namespace team-a (none)" in answer.message
    assert answer.outcome == "not-pinned"


@cases(
    "affinity",
    no_pool=held_to("M40"),
    another_pool=held_to("M40", "private"),
    an_allowed_pool_among_others=held_to("M40", "public", "private"),
    one_term_without_the_pin=required(term(M40, PUBLIC), term(M40)),
    any_pool=required(term(M40, requirement(POOL, "Exists"))),
)
def test_a_pod_that_is_not_restricted_to_the_pools_is_rejected(affinity: Manifest) -> None:
    where = "the pools of namespace team-a: public, lab"
    message = f"{UNPATCHED}: a required node affinity or nodeSelector must restrict the pod to {where}"
    answer = validated(pod_of_cores(100, affinity=affinity), quota=POOLED)
    assert rejection(answer) == ("not-pinned", HTTPStatus.FORBIDDEN, message)


# Tests of pods for which the API server has skipped /mutate


@pytest.mark.parametrize(
    ("fields", "quota", "waits"),
    [
        pytest.param({"affinity": None}, QUOTA, True, id="without a trace"),
        pytest.param({"affinity": None, "annotations": {MODEL_ANNOTATION: "M40"}}, QUOTA, False, id="annotated"),
        pytest.param({"affinity": held_to("M40"), "nodeName": "gpu-1"}, QUOTA, True, id="pinned by its owner"),
        pytest.param({"affinity": held_to("M40")}, POOLED, True, id="outside the pools"),
        pytest.param({"affinity": held_to("M40"), "schedulerName": "volcano"}, QUOTA, False, id="another scheduler"),
    ],
)
def test_a_pod_without_a_trace_of_mutate_is_retried_for_30_s_and_then_rejected(
    clock: Clock, fields: Manifest, quota: NamespaceQuota, *, waits: bool
) -> None:
    skipped, ledgers = SkippedMutate(clock.monotonic), MemoryLedgers()
    policy = replace(builders.policy_for(quota), pin_settings=PinSettings(scheduler="gpu-scheduler"))

    def answered() -> AdmissionResponse:
        manifest = pod_of_cores(100, **{"schedulerName": "gpu-scheduler", **fields})
        return asyncio.run(validate(replace(creation(manifest, policy, ledgers), skipped=skipped)))

    retried = ("not-mutated", HTTPStatus.TOO_MANY_REQUESTS, 1)
    final = ("not-pinned", HTTPStatus.FORBIDDEN, None)
    for seconds, expected in (
        (0, retried),
        (SKIPPED_SECONDS - 1, retried),
        (1, final),
        (SKIPPED_SECONDS, final),
        (SKIPPED_SECONDS + 1, retried),
    ):
        clock.now += seconds
        answer = answered()
        assert (answer.outcome, answer.status, answer.retry_after) == (expected if waits else final)
        assert ("registration is probably missing" in answer.message) is (waits and expected == final)
    assert used(ledgers) == {}


def test_a_pod_with_claims_that_mutate_has_not_restricted_to_the_pools_is_retried(clock: Clock) -> None:
    manifest = builders.pod(builders.container(), resourceClaims=[{"name": "gpu", "resourceClaimName": "mine"}])
    policy = replace(builders.policy_for(POOLED), claims=claim_policy())
    asked = replace(creation(manifest, policy, MemoryLedgers()), skipped=SkippedMutate(clock.monotonic))
    answer = asyncio.run(validate(asked))
    assert (answer.outcome, answer.status) == ("not-mutated", HTTPStatus.TOO_MANY_REQUESTS)


FORGED = {"annotations": {"hami.io/vgpu-node": "gpu-1", "note": "x"}, "labels": {"hami.io/vgpu-node": "gpu-1"}}


@pytest.mark.parametrize(
    ("resources", "fields"),
    [
        ({}, {}),
        ({"rdma/hca": 1}, {}),
        ({}, {"resourceClaims": [{"name": "gpu", "resourceClaimName": "mine"}]}),
    ],
    ids=["no GPU", "another device", "claims"],
)
@pytest.mark.parametrize("mode", Mode)
def test_a_new_pod_that_requests_no_gpu_itself_keeps_no_allocation_records(
    resources: Manifest, fields: Manifest, mode: Mode
) -> None:
    """HAMi counts the cards in the records of every pod."""
    policy = replace(builders.policy_for(replace(QUOTA, mode=mode)), claims=claim_policy())

    def answers(metadata: Manifest) -> tuple[AdmissionResponse, AdmissionResponse]:
        manifest = builders.pod(builders.container(resources), metadata=metadata, **fields)
        asked = creation(manifest, policy, MemoryLedgers())
        return asyncio.run(mutate(asked)), asyncio.run(validate(asked))

    mutated, validated = answers(FORGED)
    assert [(each["op"], each["path"]) for each in mutated.patch] == [
        ("remove", "/metadata/annotations/hami.io~1vgpu-node"),
        ("remove", "/metadata/labels/hami.io~1vgpu-node"),
    ]
    assert validated.allowed is (mode is not Mode.ENFORCE)
    assert ("the pod has allocation records: hami.io/vgpu-node" in validated.message) is (mode is Mode.ENFORCE)
    mutated, validated = answers({"annotations": {"note": "x"}})
    assert (mutated.patch, validated.allowed) == ([] if fields else (), True)


FORBIDDEN = Forbidden(403, 'configmaps "gpu-ledger-team-a" is forbidden: User "vcuda-webhook" cannot get it')


class Failing(MemoryLedgers):
    """Ledgers that /mutate cannot read."""

    async def cached_usage(self, _namespace: str, *_: object) -> Mapping[str, Usage]:
        raise FORBIDDEN


@pytest.mark.parametrize("error", [FORBIDDEN, Unavailable("the ledger could not be read"), Unavailable("x" * 9999)])
def test_a_pod_without_a_trace_of_mutate_is_rejected_with_the_reason_why_mutate_failed(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, error: VcudaError
) -> None:
    monkeypatch.setattr("tests.unit.test_validate.FORBIDDEN", error)
    skipped, policy = SkippedMutate(clock.monotonic), builders.policy_for(QUOTA)

    def asked(**metadata: Any) -> Creation:
        manifest = pod_of_cores(100, affinity=None, **metadata)
        return replace(creation(manifest, policy, Failing()), skipped=skipped)

    with pytest.raises(type(error)):
        asyncio.run(mutate(asked()))
    reason = f"/mutate failed: {cut(str(error), 500)}; a required node affinity"
    for seconds, status in ((0, HTTPStatus.TOO_MANY_REQUESTS), (SKIPPED_SECONDS - 1, HTTPStatus.TOO_MANY_REQUESTS)):
        clock.now += seconds
        answer = asyncio.run(validate(asked()))
        assert (answer.outcome, answer.status, answer.retry_after) == ("not-mutated", status, 1)
        assert answer.message.startswith(reason)
        annotated = asyncio.run(validate(asked(annotations={MODEL_ANNOTATION: "M40"})))
        assert annotated.message.startswith(f"{UNPATCHED}: ")
    with pytest.raises(type(error)):
        asyncio.run(mutate(asked()))
    clock.now += 1
    final = asyncio.run(validate(asked()))
    assert (final.outcome, final.status) == ("not-pinned", HTTPStatus.FORBIDDEN)
    assert final.message.startswith(reason)
    assert "registration" not in final.message
    clock.now += SKIPPED_SECONDS
    assert asyncio.run(validate(asked())).message.startswith(f"{UNPATCHED}: ")


def test_failures_of_mutate_are_remembered_within_a_bound(clock: Clock) -> None:
    skipped = SkippedMutate(clock.monotonic)
    for number in range(MAX_KNOWN_NAMESPACES + 1):
        skipped.add_failure(f"team-{number}", FORBIDDEN)
    assert [skipped.failure(f"team-{number}") for number in (MAX_KNOWN_NAMESPACES, 0)] == [str(FORBIDDEN), ""]


def test_namespaces_with_skipped_pods_are_remembered_within_a_bound(clock: Clock) -> None:
    skipped = SkippedMutate(clock.monotonic)
    for number in range(MAX_KNOWN_NAMESPACES):
        assert skipped.may_pass(f"team-{number}")
    clock.now += SKIPPED_SECONDS
    assert not skipped.may_pass("team-0")
    assert skipped.may_pass("one-more")
    assert (skipped.may_pass("team-1"), skipped.may_pass("team-0")) == (True, False)


# Tests of pods that are pinned to a model, but lack another change of /mutate


def of_indices(count: int) -> dict[str, str]:
    return {f"tencent.com/predicate-gpu-idx-{number}": "0" for number in range(count)}


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"nodeName": "gpu-1"}, "spec.nodeName is set, which bypasses the scheduler"),
        ({"annotations": {"tencent.com/gpu-assigned": ""}}, "the pod has allocation records: tencent.com/gpu-assigned"),
        ({"labels": {"nvidia.com/assigned-phase": "x"}}, "the pod has allocation records: nvidia.com/assigned-phase"),
        ({"annotations": of_indices(20_000)}, f"records: {', '.join(of_indices(10))} and 19990 more"),
        ({"schedulerName": "default-scheduler"}, "spec.schedulerName is not the scheduler of vcuda pods"),
        (
            {"schedulerName": "volcano"},
            "must be gpu-scheduler or empty, because volcano may",
        ),
    ],
    ids=["nodeName", "an annotation", "a label", "20,000 annotations", "the default scheduler", "another scheduler"],
)
@pytest.mark.parametrize("mode", Mode)
def test_a_pod_that_mutate_would_still_change_is_rejected_or_gets_a_warning(
    fields: Manifest, what: str, mode: Mode
) -> None:
    """/mutate has failurePolicy Ignore. So a tenant who makes /mutate time out could create an unchanged pod."""
    pin_settings = PinSettings(scheduler="gpu-scheduler")
    policy = replace(builders.policy_for(replace(QUOTA, mode=mode)), pin_settings=pin_settings)
    ledgers, manifest = MemoryLedgers(), pod_of_cores(100, **{"schedulerName": "gpu-scheduler", **fields})
    answer = asyncio.run(validate(creation(manifest, policy, ledgers)))
    told = answer.message if mode is Mode.ENFORCE else "".join(answer.warnings)
    assert (answer.allowed, bool(used(ledgers))) == (mode is not Mode.ENFORCE,) * 2
    assert told.startswith((f"{UNPATCHED}: ", "spec.schedulerName must")) is (mode is not Mode.AUDIT)
    assert what in told or mode is Mode.AUDIT


# Tests of quotas in each mode (enforce, warn and audit)


@cases(
    "asked, model, warning",
    below_nine_tenths=((700, 0), "M40", ""),
    all_cards=((800, 0), "M40", "M40 in namespace team-a, 8 cards of 8 cards"),
    most_memory=((50, 900), "A100", "A100 in namespace team-a, 0.5 cards of 2.5 cards, 900 of 1000 MiB"),
)
@pytest.mark.parametrize("mode", Mode)
def test_a_quota_that_is_nearly_used_up_gives_a_warning(
    asked: tuple[int, int], model: str, warning: str, mode: Mode
) -> None:
    limits = dict(zip(("nvidia.com/vcuda-core", "nvidia.com/vcuda-memory"), asked, strict=True))
    answer = validated(builders.stored_pod(limits, affinity=held_to(model)), quota=replace(QUOTA, mode=mode))
    assert answer.outcome == "charged"
    told = warning and mode is not Mode.AUDIT
    assert answer.warnings == ((f"the GPU quota is nearly used up: {warning}",) if told else ())


@pytest.mark.parametrize("mode", [Mode.WARN, Mode.AUDIT])
@cases(
    "cores, affinity, models",
    over_the_quota=(900, held_to("M40"), ["M40"]),
    pinned_to_no_model=(100, None, []),
    pinned_to_a_model_that_is_not_listed=(100, held_to("V100"), ["V100"]),
    in_another_pool=(100, held_to("M40", "private"), ["M40"]),
)
def test_pods_that_a_quota_without_enforcement_admits_are_charged(
    cores: int, affinity: Manifest | None, models: list[str], mode: Mode
) -> None:
    """The reported usage must include these pods."""
    ledgers = MemoryLedgers()
    assert validated(pod_of_cores(cores, affinity=affinity), ledgers, replace(POOLED, mode=mode)).allowed
    assert used(ledgers) == {model: Charge(cores, 0, cores) for model in models}
