"""/validate: nothing else admits a pod, so every way in is tried here."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import pytest

from tests.builders import (
    MODEL,
    POOL,
    Manifest,
    container,
    facts,
    held_to,
    pod,
    pod_of_cores,
    required,
    requirement,
    review,
    sidecar,
    term,
    vcuda_pod,
)
from vcuda.errors import Unavailable
from vcuda.k8s_types import AdmissionResponse, UserInfo
from vcuda.quota.model import Charge, Limit, NamespaceQuota
from webhook.ledgers import ChargeRequest, MemoryLedgers, RecentChoices, RetryLater
from webhook.validate import validate

QUOTA = NamespaceQuota({"M40": Limit(800), "P100": Limit(0), "A100": Limit(250, 1000)})
POOLED = NamespaceQuota({"M40": Limit(800)}, pools=("public", "lab"))
DEADLINE = 5.0
M40, P100, V100 = (requirement(MODEL, "In", model) for model in ("M40", "P100", "V100"))
PUBLIC, PRIVATE = (requirement(POOL, "In", pool) for pool in ("public", "private"))


def validated(
    manifest: Manifest, ledgers: MemoryLedgers | None = None, quota: NamespaceQuota = QUOTA, **fields: Any
) -> AdmissionResponse:
    return asyncio.run(
        validate(review(manifest, **fields), facts(quota), ledgers or MemoryLedgers(), RecentChoices(), DEADLINE)
    )


def used(ledgers: MemoryLedgers) -> dict[str, Charge]:
    return {model: usage.used for model, usage in asyncio.run(ledgers.usage("team-a")).items()}


def refusal(answer: AdmissionResponse) -> tuple[str, HTTPStatus, str]:
    assert not answer.allowed
    assert answer.warnings == ()
    return answer.outcome, answer.status, answer.message


class Told(MemoryLedgers):
    """Answers every charge as it is told, and keeps the demands."""

    def __init__(self, answer: RetryLater | Unavailable) -> None:
        super().__init__()
        self.demands: list[ChargeRequest] = []
        self._answer = answer

    async def charge(self, demand: ChargeRequest) -> RetryLater:
        self.demands.append(demand)
        if isinstance(self._answer, Unavailable):
            raise self._answer
        return self._answer


# Charged


def test_a_pinned_pod_within_its_quota_is_charged() -> None:
    ledgers = MemoryLedgers()
    assert validated(pod_of_cores(200), ledgers) == AdmissionResponse("charged", model="M40", scheme="nvidia-vcuda")
    assert used(ledgers) == {"M40": Charge(200, 0, 200)}


@pytest.mark.parametrize(
    "placed",
    [
        pytest.param({"affinity": None, "nodeSelector": {MODEL: "M40"}}, id="nodeSelector"),
        pytest.param({"affinity": required(term(M40), term(M40, PUBLIC))}, id="every term"),
        pytest.param({"affinity": required(term(PUBLIC), term(PRIVATE)), "nodeSelector": {MODEL: "M40"}}, id="both"),
        pytest.param({"affinity": required(term(M40), {})}, id="a term that matches nothing"),
        pytest.param({"affinity": required(term(M40), term(M40, P100))}, id="a term that no node can match"),
        pytest.param({"affinity": required(term(requirement(MODEL, "In", "M40", "P100"), M40))}, id="an intersection"),
        pytest.param(
            {"affinity": required(term(requirement(MODEL, "In", "M40", "P100"), requirement(MODEL, "NotIn", "P100")))},
            id="all others taken away",
        ),
        pytest.param({"nodeName": "gpu-1"}, id="beside a nodeName"),
    ],
)
def test_ways_to_be_held_to_one_model(placed: dict[str, Any]) -> None:
    ledgers = MemoryLedgers()
    assert validated(pod_of_cores(100, **placed), ledgers).outcome == "charged"
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
    ledgers = Told(RetryLater("so it is told"))
    validated(pod_of_cores(100), ledgers, dry_run=True)
    assert ledgers.demands == [
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


def test_a_blocked_model() -> None:
    message = (
        "exceeded GPU quota: P100 in namespace team-a, requested: 1 card, used: 0 (0 pending), limited: 0, "
        "can never fit"
    )
    answer = validated(pod_of_cores(100, affinity=held_to("P100")))
    assert refusal(answer) == ("over-quota", HTTPStatus.FORBIDDEN, message)


# Not held to one allowed model


@pytest.mark.parametrize(
    ("placed", "allows"),
    [
        pytest.param({"affinity": None}, "any", id="nothing said"),
        pytest.param({"affinity": None, "nodeName": "m40-node"}, "any", id="nodeName alone, past the scheduler"),
        pytest.param({"affinity": {"nodeAffinity": {}}}, "any", id="no required affinity"),
        pytest.param(
            {
                "affinity": {
                    "nodeAffinity": {
                        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": term(M40)}]
                    }
                }
            },
            "any",
            id="only preferred",
        ),
        pytest.param({"affinity": required(term(M40), term(PUBLIC))}, "any", id="one term leaves it open"),
        pytest.param({"affinity": required(term(requirement(MODEL, "Exists")))}, "any", id="any model"),
        pytest.param({"affinity": required(term(requirement(MODEL, "NotIn", "P100")))}, "any", id="all but one"),
        pytest.param({"affinity": required(term(requirement(f"{MODEL}x", "In", "M40")))}, "any", id="another label"),
        pytest.param({"affinity": required(term(M40), term(P100))}, "M40, P100", id="two terms"),
        pytest.param(
            {"affinity": required(term(requirement(MODEL, "In", "P100", "M40")))}, "M40, P100", id="two values"
        ),
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


@pytest.mark.parametrize(
    "placed",
    [
        {"affinity": held_to("M40", "public")},
        {"affinity": held_to("M40", "lab", "public")},
        {"nodeSelector": {POOL: "lab"}},
        {"affinity": required(term(M40, PUBLIC), term(M40, requirement(POOL, "In", "lab")))},
    ],
)
def test_held_to_the_pools(placed: dict[str, Any]) -> None:
    assert validated(pod_of_cores(100, **placed), quota=POOLED).outcome == "charged"


# Wrong in itself


def test_a_malformed_request_is_refused_before_anything_is_charged() -> None:
    ledgers = MemoryLedgers()
    assert validated(pod_of_cores(150), ledgers).status is HTTPStatus.UNPROCESSABLE_ENTITY
    assert used(ledgers) == {}


@pytest.mark.parametrize("metadata", [{}, {"uid": ""}])
def test_a_pod_without_a_uid_cannot_be_charged(metadata: dict[str, str]) -> None:
    """So it is in a mutating webhook; admitting it uncharged would be a way in."""
    message = "the pod has no uid yet; register this path as a validating webhook"
    answer = validated(vcuda_pod(metadata=metadata, affinity=held_to("M40")))
    assert refusal(answer) == ("bad-request", HTTPStatus.BAD_REQUEST, message)


# Not the quota's business


@pytest.mark.parametrize(
    ("manifest", "fields", "outcome"),
    [
        pytest.param(pod(container()), {}, "ignored", id="no vcuda"),
        pytest.param(pod_of_cores(900, affinity=None), {"operation": "UPDATE"}, "ignored", id="an update"),
        pytest.param(pod_of_cores(900, affinity=None), {"namespace": "team-b"}, "unlimited", id="no limit"),
        pytest.param(
            pod_of_cores(900, annotations={"kubernetes.io/config.mirror": "x"}),
            {"user_info": UserInfo("system:node:a", ("system:nodes",))},
            "mirror",
            id="a static pod",
        ),
    ],
)
def test_allowed_uncharged(manifest: Manifest, fields: dict[str, Any], outcome: str) -> None:
    ledgers = MemoryLedgers()
    assert validated(manifest, ledgers, **fields) == AdmissionResponse(outcome)
    assert used(ledgers) == {}


def test_a_forged_mirror_annotation_is_charged_like_any_other_pod() -> None:
    forged = {"kubernetes.io/config.mirror": "x"}
    assert validated(pod_of_cores(900, annotations=forged)).outcome == "over-quota"


# Not decided


def test_a_busy_ledger_asks_to_come_again() -> None:
    answer = validated(pod_of_cores(100), Told(RetryLater("too many charges to this namespace at once")))
    message = "too many charges to this namespace at once; try again in 1 s"
    assert refusal(answer) == ("busy", HTTPStatus.TOO_MANY_REQUESTS, message)
    assert answer.retry_after == 1


def test_a_ledger_that_cannot_be_reached_allows_nothing() -> None:
    with pytest.raises(Unavailable):
        validated(pod_of_cores(100), Told(Unavailable("no answer")))


def test_a_refusal_carries_no_warning() -> None:
    plain = pod(
        container({"nvidia.com/gpu": 9}, securityContext={"privileged": True}),
        metadata={"uid": "pod-uid"},
        affinity=held_to("M40"),
    )
    assert refusal(validated(plain))[0] == "over-quota"
