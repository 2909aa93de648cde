"""/validate on quotas of every mode: what is admitted, what is charged, and who is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from tests.builders import Manifest, facts, held_to, pod_of_cores, review, stored_pod
from vcuda.k8s_types import AdmissionResponse
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota
from webhook.ledgers import MemoryLedgers, RecentChoices
from webhook.validate import validate

QUOTA = NamespaceQuota({"M40": Limit(800), "A100": Limit(250, 1000)})
POOLED = NamespaceQuota({"M40": Limit(800)}, pools=("public", "lab"))


def validated(manifest: Manifest, quota: NamespaceQuota, ledgers: MemoryLedgers) -> AdmissionResponse:
    return asyncio.run(validate(review(manifest), facts(quota), ledgers, RecentChoices(), 5.0))


def used(ledgers: MemoryLedgers) -> dict[str, Charge]:
    return {model: usage.used for model, usage in asyncio.run(ledgers.usage("team-a")).items()}


NOT_ENFORCED = pytest.mark.parametrize(("mode", "told"), [(Mode.WARN, True), (Mode.AUDIT, False)])


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
    answer = validated(stored_pod(limits, **placed), replace(QUOTA, mode=mode), MemoryLedgers())
    assert answer.outcome == "charged"
    assert answer.warnings == (() if mode is Mode.AUDIT else warnings)


OVER = "requested: 9 cards, used: 0 (0 pending), limited: 8, can never fit"


@NOT_ENFORCED
def test_over_a_quota_that_is_not_enforced(mode: Mode, told: bool) -> None:
    """It is charged all the same, so that the usage shows it."""
    ledgers = MemoryLedgers()
    answer = validated(pod_of_cores(900), replace(QUOTA, mode=mode), ledgers)
    sentence = f"exceeded GPU quota: M40 in namespace team-a, {OVER}; admitted, because this quota only warns"
    assert (answer.outcome, answer.allowed) == ("over-quota-allowed", True)
    assert answer.warnings == ((sentence,) if told else ())
    assert used(ledgers) == {"M40": Charge(900, 0, 900)}


@NOT_ENFORCED
@pytest.mark.parametrize(
    ("affinity", "outcome", "sentence"),
    [
        pytest.param(None, "unpinned", "it allows any", id="no model"),
        pytest.param(held_to("V100", "lab"), "over-quota-allowed", "it allows V100", id="a model that is not listed"),
        pytest.param(held_to("M40", "private"), "charged", "not held to the pools public, lab", id="another pool"),
    ],
)
def test_a_pod_that_is_not_held(affinity: Manifest | None, outcome: str, sentence: str, mode: Mode, told: bool) -> None:
    """Whatever enforcing the quota would refuse, the pod's owner hears of now."""
    ledgers = MemoryLedgers()
    answer = validated(pod_of_cores(100, affinity=affinity), replace(POOLED, mode=mode), ledgers)
    assert (answer.outcome, answer.allowed) == (outcome, True)
    assert any(sentence in warning for warning in answer.warnings) is told
    assert used(ledgers) == ({answer.model: Charge(100, 0, 100)} if affinity else {})


@NOT_ENFORCED
def test_a_malformed_request(mode: Mode, told: bool) -> None:
    answer = validated(pod_of_cores(150), replace(QUOTA, mode=mode), MemoryLedgers())
    assert answer.allowed
    told_of = [warning.partition(": ")[0] for warning in answer.warnings]
    assert told_of == (["malformed GPU request"] if told else [])
