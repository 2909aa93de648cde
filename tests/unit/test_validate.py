"""/validate: nothing else admits a pod, so every way in is tried here."""

import asyncio
from http import HTTPStatus
from typing import Any

import pytest
from msgspec.structs import replace

from tests.builders import (
    MODEL,
    POOL,
    Manifest,
    container,
    held_to,
    pod,
    pod_of_cores,
    policy_for,
    required,
    requirement,
    review,
    sidecar,
    stored_pod,
    term,
)
from vcuda.k8s_types import AdmissionResponse, UserInfo
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota
from webhook.ledgers import ChargeRequest, Decision, MemoryLedgers, RecentChoices
from webhook.pod_review import validate

QUOTA = NamespaceQuota({"M40": Limit(800), "P100": Limit(0), "A100": Limit(250, 1000)})
POOLED = NamespaceQuota({"M40": Limit(800)}, pools=("public", "lab"))
DEADLINE = 5.0
M40, P100, V100 = (requirement(MODEL, "In", model) for model in ("M40", "P100", "V100"))
PUBLIC, PRIVATE, LAB = (requirement(POOL, "In", pool) for pool in ("public", "private", "lab"))
EITHER, NO_P100 = requirement(MODEL, "In", "P100", "M40"), requirement(MODEL, "NotIn", "P100")
PREFERRED = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": term(M40)}]}


def validated(
    manifest: Manifest, ledgers: MemoryLedgers | None = None, quota: NamespaceQuota = QUOTA, **fields: Any
) -> AdmissionResponse:
    return asyncio.run(
        validate(review(manifest, **fields), policy_for(quota), ledgers or MemoryLedgers(), RecentChoices(), DEADLINE)
    )


def used(ledgers: MemoryLedgers) -> dict[str, Charge]:
    return {model: usage.used for model, usage in asyncio.run(ledgers.usage("team-a")).items()}


def refusal(answer: AdmissionResponse) -> tuple[str, HTTPStatus, str]:
    assert not answer.allowed
    assert answer.warnings == ()
    return answer.outcome, answer.status, answer.message


class Asked(MemoryLedgers):
    """Keeps what it is asked to charge."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[ChargeRequest] = []

    async def charge(self, request: ChargeRequest) -> Decision:
        self.requests.append(request)
        return await super().charge(request)


# Charged


def test_a_pinned_pod_within_its_quota_is_charged() -> None:
    ledgers = MemoryLedgers()
    assert validated(pod_of_cores(200), ledgers) == AdmissionResponse("charged", model="M40", scheme="nvidia-vcuda")
    assert used(ledgers) == {"M40": Charge(200, 0, 200)}


@pytest.mark.parametrize(
    ("quota", "placed"),
    [
        pytest.param(QUOTA, {"affinity": None, "nodeSelector": {MODEL: "M40"}}, id="nodeSelector"),
        pytest.param(QUOTA, {"affinity": required(term(M40), term(M40, PUBLIC))}, id="every term"),
        pytest.param(
            QUOTA, {"affinity": required(term(PUBLIC), term(PRIVATE)), "nodeSelector": {MODEL: "M40"}}, id="both"
        ),
        pytest.param(QUOTA, {"affinity": required(term(M40), {})}, id="a term that matches nothing"),
        pytest.param(QUOTA, {"affinity": required(term(M40), term(M40, P100))}, id="a term that no node can match"),
        pytest.param(QUOTA, {"affinity": required(term(EITHER, M40))}, id="an intersection"),
        pytest.param(QUOTA, {"affinity": required(term(EITHER, NO_P100))}, id="all others taken away"),
        pytest.param(QUOTA, {"nodeName": "gpu-1"}, id="beside a nodeName"),
        pytest.param(POOLED, {"affinity": held_to("M40", "public")}, id="a pool"),
        pytest.param(POOLED, {"affinity": held_to("M40", "lab", "public")}, id="all pools"),
        pytest.param(POOLED, {"nodeSelector": {POOL: "lab"}}, id="a pool by nodeSelector"),
        pytest.param(POOLED, {"affinity": required(term(M40, PUBLIC), term(M40, LAB))}, id="a pool in each term"),
    ],
)
def test_ways_to_be_held_to_one_model(quota: NamespaceQuota, placed: dict[str, Any]) -> None:
    ledgers = MemoryLedgers()
    assert validated(pod_of_cores(100, **placed), ledgers, quota).outcome == "charged"
    assert list(used(ledgers)) == ["M40"]


def test_the_whole_pod_is_charged() -> None:
    """One card each for two containers and a sidecar, and nothing for the smaller init container before them."""
    card = {"tencent.com/vcuda-core": 100}
    both = pod(
        container(card),
        container(card),
        init=[container(card), sidecar(card)],
        metadata={"uid": "pod-uid"},
        affinity=held_to("M40"),
    )
    ledgers = MemoryLedgers()
    assert validated(both, ledgers).outcome == "charged"
    assert used(ledgers) == {"M40": Charge(300, 0, 300)}


def test_the_ledger_is_asked_with_everything_it_needs() -> None:
    ledgers = Asked()
    validated(pod_of_cores(100), ledgers, dry_run=True)
    assert ledgers.requests == [
        ChargeRequest(
            namespace="team-a",
            uid="pod-uid",
            model="M40",
            charge=Charge(100, 0, 100),
            quota=QUOTA,
            deadline=5.0,
            counted_since="41",
            dry_run=True,
        )
    ]


def test_a_repeated_call_is_charged_once() -> None:
    ledgers = MemoryLedgers()
    for _ in range(3):
        assert validated(pod_of_cores(800), ledgers).allowed
    assert used(ledgers) == {"M40": Charge(800, 0, 800)}


def test_pods_of_one_name_are_told_apart_by_uid() -> None:
    ledgers = MemoryLedgers()
    assert validated(pod_of_cores(800, uid="first"), ledgers).allowed
    assert not validated(pod_of_cores(800, uid="second"), ledgers).allowed


def test_a_dry_run_is_decided_but_not_charged() -> None:
    ledgers = MemoryLedgers()
    assert validated(pod_of_cores(800), ledgers, dry_run=True).outcome == "charged"
    assert used(ledgers) == {}
    assert validated(pod_of_cores(801), ledgers, dry_run=True).allowed is False


# Over quota


def test_over_quota() -> None:
    ledgers = MemoryLedgers()
    assert validated(pod_of_cores(700, uid="first"), ledgers).allowed
    answer = validated(pod_of_cores(200, uid="second"), ledgers)
    message = (
        "exceeded GPU quota: M40 in namespace team-a, requested: 2 cards, used: 7 (7 pending), limited: 8, "
        "1 more needed"
    )
    assert refusal(answer) == ("over-quota", HTTPStatus.FORBIDDEN, message)
    assert (answer.model, answer.scheme) == ("M40", "nvidia-vcuda")
    assert used(ledgers) == {"M40": Charge(700, 0, 700)}


# Not held to one allowed model


@pytest.mark.parametrize(
    ("placed", "allows"),
    [
        pytest.param({"affinity": None}, "any", id="nothing said"),
        pytest.param({"affinity": None, "nodeName": "m40-node"}, "any", id="nodeName alone, past the scheduler"),
        pytest.param({"affinity": {"nodeAffinity": {}}}, "any", id="no required affinity"),
        pytest.param({"affinity": {"nodeAffinity": PREFERRED}}, "any", id="only preferred"),
        pytest.param({"affinity": required(term(M40), term(PUBLIC))}, "any", id="one term leaves it open"),
        pytest.param({"affinity": required(term(requirement(MODEL, "Exists")))}, "any", id="any model"),
        pytest.param({"affinity": required(term(NO_P100))}, "any", id="all but one"),
        pytest.param({"affinity": required(term(requirement(f"{MODEL}x", "In", "M40")))}, "any", id="another label"),
        pytest.param({"affinity": required(term(M40), term(P100))}, "M40, P100", id="two terms"),
        pytest.param({"affinity": required(term(EITHER))}, "M40, P100", id="two values"),
        pytest.param({"affinity": held_to("V100")}, "V100", id="not listed"),
        pytest.param({"affinity": held_to("m40")}, "m40", id="another case"),
        pytest.param({"affinity": required()}, "none", id="no term"),
        pytest.param({"affinity": required({})}, "none", id="an empty term"),
        pytest.param({"nodeSelector": {MODEL: "P100"}}, "none", id="a contradiction"),
        pytest.param(
            {"affinity": None, "annotations": {"quota.vcuda.io/model": "M40"}}, "any", id="the annotation for people"
        ),
        pytest.param({"affinity": None, "labels": {MODEL: "M40"}}, "any", id="the pod's own label"),
    ],
)
def test_not_held_to_one_allowed_model(placed: dict[str, Any], allows: str) -> None:
    ledgers = MemoryLedgers()
    message = (
        "the pod is not held to one GPU model that namespace team-a may use (M40: 8 cards, A100: 2.5 cards) "
        f"by a required node affinity or nodeSelector: it allows {allows}"
    )
    assert refusal(validated(pod_of_cores(100, **placed), ledgers)) == ("not-pinned", HTTPStatus.FORBIDDEN, message)
    assert used(ledgers) == {}


@pytest.mark.parametrize("quota", [NamespaceQuota({}), NamespaceQuota({"P100": Limit(0)})])
def test_a_namespace_that_may_use_no_model(quota: NamespaceQuota) -> None:
    answer = validated(pod_of_cores(100), quota=quota)
    assert "may use (none)" in answer.message
    assert answer.outcome == "not-pinned"


@pytest.mark.parametrize(
    "affinity",
    [
        pytest.param(held_to("M40"), id="no pool"),
        pytest.param(held_to("M40", "private"), id="another pool"),
        pytest.param(held_to("M40", "public", "private"), id="one of ours among others"),
        pytest.param(required(term(M40, PUBLIC), term(M40)), id="one term leaves it open"),
        pytest.param(required(term(M40, requirement(POOL, "Exists"))), id="any pool"),
    ],
)
def test_not_held_to_the_pools(affinity: Manifest) -> None:
    message = (
        "the pod is not held to the pools public, lab, where namespace team-a must stay, "
        "by a required node affinity or nodeSelector"
    )
    answer = validated(pod_of_cores(100, affinity=affinity), quota=POOLED)
    assert refusal(answer) == ("not-pinned", HTTPStatus.FORBIDDEN, message)


# Nobody else is exempt, and nobody else charged


def test_a_malformed_request_is_refused_before_anything_is_charged() -> None:
    ledgers = MemoryLedgers()
    assert validated(pod_of_cores(150), ledgers).status is HTTPStatus.UNPROCESSABLE_ENTITY
    assert used(ledgers) == {}


@pytest.mark.parametrize(
    ("manifest", "fields"),
    [
        pytest.param(pod(container()), {}, id="no vcuda"),
        pytest.param(pod_of_cores(900, affinity=None), {"operation": "UPDATE"}, id="an update"),
        pytest.param(pod_of_cores(900, affinity=None), {"namespace": "team-b"}, id="no limit"),
        pytest.param(
            pod_of_cores(900, annotations={"kubernetes.io/config.mirror": "x"}),
            {"user_info": UserInfo("system:node:a", ("system:nodes",))},
            id="a static pod",
        ),
    ],
)
def test_what_passes_is_charged_nothing(manifest: Manifest, fields: dict[str, Any]) -> None:
    ledgers = MemoryLedgers()
    assert validated(manifest, ledgers, **fields).allowed
    assert used(ledgers) == {}


def test_a_forged_mirror_annotation_is_charged_like_any_other_pod() -> None:
    forged = {"kubernetes.io/config.mirror": "x"}
    assert validated(pod_of_cores(900, annotations=forged)).outcome == "over-quota"


def test_a_refusal_carries_no_warning() -> None:
    plain = pod(
        container({"nvidia.com/gpu": 9}, securityContext={"privileged": True}),
        metadata={"uid": "pod-uid"},
        affinity=held_to("M40"),
    )
    assert refusal(validated(plain))[0] == "over-quota"


# Quotas of every mode


@pytest.mark.parametrize(
    ("limits", "placed", "warnings"),
    [
        pytest.param({"tencent.com/vcuda-core": 700}, {}, (), id="below nine tenths"),
        pytest.param(
            {"tencent.com/vcuda-core": 800},
            {},
            ("GPU quota nearly used up: M40 in namespace team-a, 8 cards of 8 cards",),
            id="all cards",
        ),
        pytest.param(
            {"nvidia.com/vcuda-core": 50, "nvidia.com/vcuda-memory": 900},
            {"affinity": held_to("A100")},
            ("GPU quota nearly used up: A100 in namespace team-a, 0.5 cards of 2.5 cards, 900 of 1000 MiB",),
            id="nine tenths of the memory",
        ),
    ],
)
@pytest.mark.parametrize("mode", Mode)
def test_nearly_used_up(limits: dict[str, int], placed: dict[str, Any], warnings: tuple[str, ...], mode: Mode) -> None:
    answer = validated(stored_pod(limits, **placed), quota=replace(QUOTA, mode=mode))
    assert answer.outcome == "charged"
    assert answer.warnings == (() if mode is Mode.AUDIT else warnings)


@pytest.mark.parametrize("mode", [Mode.WARN, Mode.AUDIT])
@pytest.mark.parametrize(
    ("manifest", "charged"),
    [
        pytest.param(pod_of_cores(900), {"M40": Charge(900, 0, 900)}, id="over the quota"),
        pytest.param(pod_of_cores(100, affinity=None), {}, id="held to no model"),
        pytest.param(
            pod_of_cores(100, affinity=held_to("V100")),
            {"V100": Charge(100, 0, 100)},
            id="held to one that is not listed",
        ),
        pytest.param(
            pod_of_cores(100, affinity=held_to("M40", "private")), {"M40": Charge(100, 0, 100)}, id="in another pool"
        ),
    ],
)
def test_what_a_quota_that_is_not_enforced_lets_in_is_charged(
    manifest: Manifest, charged: dict[str, Charge], mode: Mode
) -> None:
    """So that the usage shows it."""
    ledgers = MemoryLedgers()
    assert validated(manifest, ledgers, replace(POOLED, mode=mode)).allowed
    assert used(ledgers) == charged
