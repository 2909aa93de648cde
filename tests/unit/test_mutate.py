"""/mutate: which model a pod is given, whom it refuses, and that it writes nothing."""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
import pytest

from tests.builders import (
    MODEL,
    Manifest,
    container,
    held_to,
    pod,
    policy_for,
    required,
    requirement,
    review,
    vcuda_pod,
)
from vcuda.k8s_types import AdmissionResponse
from vcuda.placement.affinity import Hints
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota, Usage
from webhook.ledgers import ChargeRequest, MemoryLedgers, RecentChoices, RetryLater
from webhook.pod_review import mutate

QUOTA = NamespaceQuota({"M40": Limit(800), "P100": Limit(200)})
FORGED = {"tencent.com/gpu-assigned": "true"}


class Ledgers(MemoryLedgers):
    """Says what it is told to; a charge would be a mistake."""

    def __init__(self, now: Mapping[str, int], a_moment_ago: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self._now = now
        self._before = now if a_moment_ago is None else a_moment_ago

    async def charge(self, demand: ChargeRequest) -> RetryLater:
        raise AssertionError(f"/mutate charged {demand.uid}")

    async def usage(self, namespace: str) -> Mapping[str, Usage]:
        assert namespace == "team-a"
        return {model: Usage(Charge(cores)) for model, cores in self._now.items()}

    async def cached_usage(self, namespace: str) -> Mapping[str, Usage]:
        assert namespace == "team-a"
        return {model: Usage(Charge(cores)) for model, cores in self._before.items()}


def mutated(
    manifest: Manifest,
    used: Mapping[str, int] | None = None,
    mode: Mode = Mode.ENFORCE,
    quota: NamespaceQuota = QUOTA,
    **fields: Any,
) -> AdmissionResponse:
    """Return the answer to one pod, where so many cores of each model are in use."""
    given = policy_for(msgspec.structs.replace(quota, mode=mode))
    return asyncio.run(mutate(review(manifest, **fields), given, Ledgers(used or {}), RecentChoices()))


# Pinned


def test_a_pod_is_pinned_to_the_model_with_most_room() -> None:
    answer = mutated(vcuda_pod())
    assert (answer.outcome, answer.allowed, answer.status) == ("pinned", True, HTTPStatus.OK)
    assert (answer.model, answer.scheme, answer.warnings) == ("M40", "gpu-manager", ())
    assert answer.reason == "most room, 8 cards of 8 cards free"
    assert answer.patch[0]["path"] == "/spec/affinity"


def test_the_last_model_with_room_is_taken() -> None:
    answer = mutated(vcuda_pod(), {"M40": 701})
    assert (answer.model, answer.reason) == ("P100", "the only model with room, 2 cards of 2 cards free")


def test_what_the_pod_excludes_is_not_taken() -> None:
    answer = mutated(vcuda_pod(nodeSelector={MODEL: "P100"}))
    assert (answer.model, answer.reason) == ("P100", "the only model it may use, 2 cards of 2 cards free")


def test_pools_are_required_too() -> None:
    answer = mutated(vcuda_pod(), quota=NamespaceQuota({"M40": Limit(800)}, pools=("public", "lab")))
    assert answer.patch[0] == {"op": "add", "path": "/spec/affinity", "value": held_to("M40", "public", "lab")}


def test_warnings_of_the_request_are_passed_on() -> None:
    answer = mutated(pod(container({"nvidia.com/gpu": 1}, securityContext={"privileged": True})))
    assert answer.outcome == "pinned"
    assert [warning.partition(":")[0] for warning in answer.warnings] == [
        "spec.containers[0].securityContext.privileged"
    ]


# Refused


def refusal(answer: AdmissionResponse) -> tuple[str, HTTPStatus, str]:
    assert not answer.allowed
    assert (answer.patch, answer.warnings) == ((), ())
    return answer.outcome, answer.status, answer.message


def test_no_room_in_any_model_names_them_all() -> None:
    answer = mutated(vcuda_pod({"tencent.com/vcuda-core": 300}), {"M40": 700, "P100": 100})
    message = (
        "exceeded GPU quota: "
        "M40 in namespace team-a, requested: 3 cards, used: 7 (0 pending), limited: 8, 2 more needed; "
        "P100 in namespace team-a, requested: 3 cards, used: 1 (0 pending), limited: 2, can never fit"
    )
    assert refusal(answer) == ("over-quota", HTTPStatus.FORBIDDEN, message)
    assert answer.model == "M40"


@pytest.mark.parametrize(
    ("quota", "manifest", "message"),
    [
        pytest.param(
            NamespaceQuota({}),
            vcuda_pod(),
            "namespace team-a may use no GPU model: its quota lists none",
            id="a quota without a model",
        ),
        pytest.param(
            QUOTA,
            vcuda_pod(nodeSelector={MODEL: "A100"}),
            "no GPU model that this pod may use in namespace team-a: "
            "M40 is excluded by the pod's nodeName, nodeSelector or required node affinity; "
            "P100 is excluded by the pod's nodeName, nodeSelector or required node affinity",
            id="a model that is not listed",
        ),
        pytest.param(
            QUOTA,
            vcuda_pod({"nvidia.com/gpu": 1}, annotations={"nvidia.com/use-gputype": "A100"}),
            "no GPU model that this pod may use in namespace team-a: "
            "M40 is excluded by annotation nvidia.com/use-gputype; "
            "P100 is excluded by annotation nvidia.com/use-gputype",
            id="a wanted model that is not listed",
        ),
    ],
)
def test_no_model_that_it_may_use(quota: NamespaceQuota, manifest: Manifest, message: str) -> None:
    assert refusal(mutated(manifest, quota=quota)) == ("not-allowed", HTTPStatus.FORBIDDEN, message)


# Quotas that are not enforced


@pytest.mark.parametrize("mode", [Mode.WARN, Mode.AUDIT])
def test_over_a_quota_that_does_not_enforce_a_pod_is_pinned_all_the_same(mode: Mode) -> None:
    answer = mutated(vcuda_pod(), {"M40": 800, "P100": 150}, mode)
    assert (answer.outcome, answer.allowed, answer.model) == ("pinned", True, "P100")
    assert answer.reason == "over quota on every model, and this quota does not enforce"


@pytest.mark.parametrize("mode", [Mode.WARN, Mode.AUDIT])
def test_without_a_model_a_pod_is_cleaned_and_goes_to_the_scheduler_all_the_same(mode: Mode) -> None:
    """It takes a card like any other: past the scheduler, that card would be given to another pod too."""
    manifest = vcuda_pod(nodeSelector={MODEL: "A100"}, nodeName="n1", annotations=FORGED)
    given = msgspec.structs.replace(
        policy_for(msgspec.structs.replace(QUOTA, mode=mode)), hints=Hints(scheduler="gpu-scheduler")
    )
    answer = asyncio.run(mutate(review(manifest), given, Ledgers({}), RecentChoices()))
    assert (answer.outcome, answer.allowed) == ("unpinned", True)
    on_its_node = {"matchFields": [requirement("metadata.name", "In", "n1")]}
    assert answer.patch == [
        {"op": "add", "path": "/spec/affinity", "value": required(on_its_node)},
        {"op": "remove", "path": "/spec/nodeName"},
        {"op": "add", "path": "/spec/schedulerName", "value": "gpu-scheduler"},
        {"op": "remove", "path": "/metadata/annotations/tencent.com~1gpu-assigned"},
    ]


# What the choice is made from


def test_a_refusal_is_never_taken_from_what_was_known_a_moment_ago() -> None:
    ledgers = Ledgers(now={}, a_moment_ago={"M40": 800, "P100": 200})
    assert asyncio.run(mutate(review(vcuda_pod()), policy_for(QUOTA), ledgers, RecentChoices())).outcome == "pinned"


def test_a_burst_spreads_over_the_models_that_have_room() -> None:
    """Each of four pods of one card sees what was promised to those before it, though nothing is charged yet."""
    choices, given = RecentChoices(), policy_for(NamespaceQuota({"M40": Limit(200), "P100": Limit(200)}))
    models = [asyncio.run(mutate(review(vcuda_pod()), given, Ledgers({}), choices)).model for _ in range(4)]
    assert sorted(models) == ["M40", "M40", "P100", "P100"]


def test_what_was_promised_to_others_refuses_nobody() -> None:
    choices, given = RecentChoices(), policy_for(NamespaceQuota({"M40": Limit(100)}))
    answers = [asyncio.run(mutate(review(vcuda_pod()), given, Ledgers({}), choices)).outcome for _ in range(3)]
    assert answers == ["pinned"] * 3


def test_a_dry_run_is_promised_nothing() -> None:
    choices, given = RecentChoices(), policy_for(NamespaceQuota({"M40": Limit(200), "P100": Limit(100)}))
    models = [
        asyncio.run(mutate(review(vcuda_pod(), dry_run=True), given, Ledgers({}), choices)).model for _ in range(3)
    ]
    assert models == ["M40"] * 3


@pytest.mark.parametrize(
    ("dry_run", "mode", "warnings"),
    [
        pytest.param(
            True,
            Mode.ENFORCE,
            ["would be pinned to M40: the only model it may use, 2 cards of 2 cards free"],
            id="a dry run",
        ),
        pytest.param(True, Mode.AUDIT, [], id="a quota that only audits tells nobody"),
        pytest.param(False, Mode.ENFORCE, [], id="no dry run: it is in the audit log"),
    ],
)
def test_whoever_only_asks_is_told_why_the_pod_would_get_its_model(
    dry_run: bool, mode: Mode, warnings: list[str]
) -> None:
    given = policy_for(NamespaceQuota({"M40": Limit(200)}, mode=mode))
    answer = asyncio.run(mutate(review(vcuda_pod(), dry_run=dry_run), given, Ledgers({}), RecentChoices()))
    assert list(answer.warnings) == warnings
