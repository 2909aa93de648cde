"""Tests of /mutate. It chooses the model of a pod, rejects some pods, and never writes a ledger."""

import asyncio
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import pytest
from msgspec.structs import replace

from tests.both_calls import DEADLINE, creation
from tests.builders import MODEL, Manifest, policy_for, required, requirement, vcuda_pod
from tests.tables import cases
from tools.reviews import mutate
from vcuda.admission_review import AdmissionResponse
from vcuda.placement.patches import PinSettings
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota, Usage
from vcuda.quota.shortage import Shortage
from webhook.caches import RecentChoices
from webhook.ledger.charging import ChargeRequest, RetryLater
from webhook.ledger.ledgers import MemoryLedgers

QUOTA = NamespaceQuota({"M40": Limit(800), "P100": Limit(200)})
FORGED = {"tencent.com/gpu-assigned": "true"}


class Ledgers(MemoryLedgers):
    """Ledgers with the given usage. A charge makes the test fail."""

    def __init__(self, now: Mapping[str, int], a_moment_ago: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self._now, self._before = now, now if a_moment_ago is None else a_moment_ago

    async def charge(self, demand: ChargeRequest) -> RetryLater:
        raise AssertionError(f"/mutate charged {demand.uid}")

    async def usage(self, namespace: str, *_: object) -> Mapping[str, Usage]:
        assert namespace == "team-a"
        return {model: Usage(Charge(cores)) for model, cores in self._now.items()}

    async def cached_usage(self, namespace: str, *_: object) -> Mapping[str, Usage]:
        assert namespace == "team-a"
        return {model: Usage(Charge(cores)) for model, cores in self._before.items()}


def mutated(
    manifest: Manifest,
    used: Mapping[str, int] | None = None,
    mode: Mode = Mode.ENFORCE,
    quota: NamespaceQuota = QUOTA,
    **fields: Any,
) -> AdmissionResponse:
    """Return the answer of /mutate for one pod, while ``used`` cores of each model are in use."""
    given = policy_for(replace(quota, mode=mode))
    return asyncio.run(mutate(creation(manifest, given, Ledgers(used or {}), **fields)))


# Tests of pods that are pinned (restricted to nodes of one model)


def test_a_pod_is_pinned_to_the_first_model_with_room() -> None:
    answer = mutated(vcuda_pod())
    assert (answer.outcome, answer.allowed, answer.status) == ("pinned", True, HTTPStatus.OK)
    assert (answer.model, answer.scheme, answer.warnings) == ("M40", "gpu-manager", ())
    assert answer.reason == "the first in the namespace's quota, 8 cards of 8 cards free"
    assert answer.patch[0]["path"] == "/spec/affinity"


# Tests of pods that are rejected


def rejection(answer: AdmissionResponse) -> tuple[str, HTTPStatus, str]:
    assert not answer.allowed
    assert (answer.patch, answer.warnings) == ((), ())
    return answer.outcome, answer.status, answer.message


def test_a_rejection_names_all_models_if_none_has_room() -> None:
    answer = mutated(vcuda_pod({"tencent.com/vcuda-core": 300}), {"M40": 700, "P100": 100})
    m40 = "M40 in namespace team-a, requested: 3 cards, used: 7 (0 pending), limited: 8, 2 more needed"
    p100 = "P100 in namespace team-a, requested: 3 cards, used: 1 (0 pending), limited: 2, can never fit"
    assert rejection(answer) == ("over-quota", HTTPStatus.FORBIDDEN, f"exceeded quota: {m40}; {p100}")
    assert answer.model == "M40"


class Counted(Ledgers):
    """Ledgers that also count the stored pods. If ``stored`` is None, the count misses its deadline."""

    def __init__(self, now: Mapping[str, int], stored: Mapping[str, int] | None) -> None:
        super().__init__(now)
        self._stored = stored

    async def stored_usage(
        self, namespace: str, _shortages: Sequence[Shortage], charged: Mapping[str, Usage], deadline: float
    ) -> Mapping[str, Usage] | None:
        assert (namespace, charged, deadline) == ("team-a", await self.usage(namespace), DEADLINE)
        return None if self._stored is None else {model: Usage(Charge(cores)) for model, cores in self._stored.items()}


FULL = {"M40": 800, "P100": 200}


@cases(
    "stored, outcome, status",
    stored_pods_leave_no_room=(FULL, "over-quota", 403),
    stored_pods_leave_room_for_one_model=({**FULL, "P100": 100}, "pinned", 200),
    no_stored_pod=({}, "pinned", 200),
    not_counted_in_time=(None, "over-quota-uncounted", 403),
)
def test_only_stored_objects_cause_a_rejection(stored: Mapping[str, int] | None, outcome: str, status: int) -> None:
    answer = asyncio.run(mutate(creation(vcuda_pod(), policy_for(QUOTA), Counted(FULL, stored))))
    assert (answer.outcome, answer.status, answer.retry_after) == (outcome, status, None)
    assert answer.model == ("P100" if stored == {**FULL, "P100": 100} else "M40")


def test_a_pod_that_can_never_fit_is_rejected_without_a_count() -> None:
    manifest = vcuda_pod({"tencent.com/vcuda-core": 900})
    asked = creation(manifest, policy_for(QUOTA), Counted(FULL, None))
    assert asyncio.run(mutate(asked)).outcome == "over-quota"


def test_a_quota_without_a_model_rejects_every_pod() -> None:
    message = "namespace team-a may use no GPU model: its quota lists none"
    assert rejection(mutated(vcuda_pod(), quota=NamespaceQuota({}))) == ("not-allowed", HTTPStatus.FORBIDDEN, message)


# Tests of quotas that are not enforced


@pytest.mark.parametrize("mode", [Mode.WARN, Mode.AUDIT])
def test_over_a_quota_that_does_not_enforce_a_pod_is_pinned_to_the_first_model(mode: Mode) -> None:
    answer = mutated(vcuda_pod(), {"M40": 800, "P100": 150}, mode)
    assert (answer.outcome, answer.allowed, answer.model) == ("pinned", True, "M40")
    assert answer.reason == "over quota on every model, but the quota does not enforce its limits"


@pytest.mark.parametrize("mode", [Mode.WARN, Mode.AUDIT])
def test_a_pod_without_a_model_is_still_cleaned_and_gets_the_scheduler(mode: Mode) -> None:
    """The pod uses a card even without a model, and only the GPU scheduler records which cards are in use."""
    manifest = vcuda_pod(nodeSelector={MODEL: "A100"}, nodeName="n1", annotations=FORGED)
    given = replace(policy_for(replace(QUOTA, mode=mode)), pin_settings=PinSettings(scheduler="gpu-scheduler"))
    answer = asyncio.run(mutate(creation(manifest, given, Ledgers({}))))
    assert (answer.outcome, answer.allowed) == ("unpinned", True)
    on_its_node = {"matchFields": [requirement("metadata.name", "In", "n1")]}
    assert answer.patch == [
        {"op": "add", "path": "/spec/affinity", "value": required(on_its_node)},
        {"op": "remove", "path": "/spec/nodeName"},
        {"op": "add", "path": "/spec/schedulerName", "value": "gpu-scheduler"},
        {"op": "remove", "path": "/metadata/annotations/tencent.com~1gpu-assigned"},
    ]


# Tests of the usage that /mutate reads to choose a model, and of its recent choices for other pods


def test_a_rejection_is_never_based_on_cached_usage() -> None:
    ledgers = Ledgers(now={}, a_moment_ago={"M40": 800, "P100": 200})
    assert asyncio.run(mutate(creation(vcuda_pod(), policy_for(QUOTA), ledgers))).outcome == "pinned"


def models_of_a_burst(limits: dict[str, Limit], **fields: Any) -> list[str]:
    """Create four pods of one card before any of them is charged. Return the models that /mutate chooses."""
    choices, given = RecentChoices(), policy_for(NamespaceQuota(limits))
    calls = (creation(vcuda_pod(), given, Ledgers({}), choices, **fields) for _ in range(4))
    return [asyncio.run(mutate(each)).model for each in calls]


def test_a_burst_spreads_over_the_models_that_have_room() -> None:
    models = models_of_a_burst({"M40": Limit(200), "P100": Limit(200)})
    assert sorted(models) == ["M40", "M40", "P100", "P100"]


def test_recent_choices_of_others_cause_no_rejection() -> None:
    assert models_of_a_burst({"M40": Limit(100)}) == ["M40"] * 4


def test_a_dry_run_leaves_no_choice() -> None:
    assert models_of_a_burst({"M40": Limit(200), "P100": Limit(100)}, dry_run=True) == ["M40"] * 4


FORECAST = "would be pinned to M40: the only possible model, 2 cards of 2 cards free"


@cases(
    "dry_run, mode, warnings",
    a_dry_run=(True, Mode.ENFORCE, [FORECAST]),
    a_quota_that_only_audits_sends_no_warning=(True, Mode.AUDIT, []),
    not_a_dry_run_only_in_the_audit_log=(False, Mode.ENFORCE, []),
)
def test_a_dry_run_gets_the_reason_for_its_model(dry_run: bool, mode: Mode, warnings: list[str]) -> None:
    answer = mutated(vcuda_pod(), mode=mode, quota=NamespaceQuota({"M40": Limit(200)}), dry_run=dry_run)
    assert list(answer.warnings) == warnings
