"""Tests that the API server accepts each pod with the patch of /mutate, if it accepts the pod without the patch.

All requests are dry runs, so nothing is stored. No webhook is registered for these pods: the tests apply the patches.
"""

import asyncio
import copy
from collections import Counter
from http import HTTPStatus
from pathlib import Path

import jsonpatch
import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings

from tests import strategies
from tests.builders import Manifest, nodes, review
from tests.e2e.cluster import Cluster
from tests.e2e.rest import Answer
from tools.reviews import mutate
from vcuda.placement.patches import PinSettings
from vcuda.quota.model import Limit, NamespaceQuota, Quota
from webhook.ledger.ledgers import MemoryLedgers
from webhook.review.context import PolicySnapshot
from webhook.review.decisions import Creation

EXAMPLES = 60
ROOMY = NamespaceQuota({model: Limit(10_000) for model in strategies.MODELS}, pools=strategies.POOLS)

CASES = Path(__file__).parent.parent / "data" / "patches"
REJECTED_AS_SENT = {"escaped-keys"}
"""The names of the test cases whose pod the API server rejects even without the patch, because of `~` in keys.

These cases are kept for `vcuda-webhook check`, and for later versions of Kubernetes that may accept such keys.
"""


def dry_run(cluster: Cluster, pod: Manifest, namespace: str) -> Answer:
    named = {**pod, "metadata": {**pod["metadata"], "namespace": namespace}}
    return cluster.try_create(named, dryRun="All")


def pinned(pod: Manifest, namespace: str) -> Manifest | None:
    """Return the pod with the patch of /mutate while every model has room. None if /mutate does not pin the pod."""
    policy = PolicySnapshot(Quota({namespace: ROOMY}), nodes(), PinSettings(scheduler="gpu-scheduler"))
    answer = asyncio.run(mutate(Creation(review(pod, namespace), policy, MemoryLedgers())))
    if answer.outcome != "pinned":
        return None
    patched: Manifest = jsonpatch.apply_patch(copy.deepcopy(pod), msgspec.json.encode(answer.patch))
    return patched


def test_a_generated_pod_that_is_accepted_is_also_accepted_when_patched(cluster: Cluster, namespace: str) -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=EXAMPLES,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.filter_too_much],
    )
    @given(strategies.storable_pods().filter(lambda pod: pinned(pod, namespace) is not None))
    def each(pod: Manifest) -> None:
        seen[judge(cluster, pod, namespace)] += 1

    each()
    print(dict(seen))  # with -rP, pytest shows how often each outcome occurred
    assert seen["accepted as sent and patched"] >= EXAMPLES / 2, f"too few pods were accepted: {seen}"


def judge(cluster: Cluster, pod: Manifest, namespace: str) -> str:
    """Return the outcome for a pod. Raises AssertionError if the API server only accepts it without the patch."""
    as_sent = dry_run(cluster, pod, namespace)
    if as_sent.status != HTTPStatus.CREATED:
        return "rejected as sent"
    patched = pinned(pod, namespace)
    assert patched is not None
    answer = dry_run(cluster, patched, namespace)
    assert answer.status == HTTPStatus.CREATED, f"{answer.message}\nsent: {pod}\npatched: {patched}"
    return "accepted as sent and patched"


@pytest.mark.parametrize("case", sorted(path.name.removesuffix(".pod.yaml") for path in CASES.glob("*.pod.yaml")))
def test_every_case_of_the_patch_tests_is_accepted_when_patched(cluster: Cluster, namespace: str, case: str) -> None:
    pod = yaml.safe_load((CASES / f"{case}.pod.yaml").read_text())
    patch = (CASES / f"{case}.patch.json").read_text()
    as_sent = dry_run(cluster, pod, namespace)
    patched = dry_run(cluster, jsonpatch.apply_patch(pod, patch), namespace)
    expected = HTTPStatus.UNPROCESSABLE_ENTITY if case in REJECTED_AS_SENT else HTTPStatus.CREATED
    assert (as_sent.status, patched.status) == (expected, expected), f"{as_sent.message}; {patched.message}"
