"""Tests of `kubectl gpuquota explain` for ResourceClaims, their templates, and pods that HAMi-DRA changes."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from controller.plugin.explain import MAKES_A_CLAIM, NOT_SERVED, PROBE, TOO_LONG
from examples.claims import NVIDIA, claim, entry, spec, template
from tests.builders import Manifest, container, pod, vcuda_pod
from tests.gpuquota import Cluster, explain
from tests.tables import cases
from vcuda.claims.names import API_PATH
from vcuda.claims.pin import ClaimPin, write_pin
from vcuda.errors import ApiError, Forbidden, NotFound, Unavailable, VcudaError

OVER = "exceeded quota: M40 in namespace team-a"
CLAIMS = f"{API_PATH}/namespaces/team-a/resourceclaims"
TEMPLATES = f"{API_PATH}/namespaces/team-a/resourceclaimtemplates"
CLAIMING = pod(container(), resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "one"}])
NAMED = {**template(), "metadata": {"name": "one"}}


@pytest.fixture(autouse=True)
def _serves_claims(cluster: Cluster) -> None:
    cluster.store(API_PATH, {"kind": "APIResourceList"})


def told(manifest: Path, *documents: Manifest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(explain(manifest, *documents).stdout)
    return found


@cases(
    "warnings, model, reason",
    by_the_sentence_of_a_dry_run=(
        ("would be pinned to M40: the model with the most free quota, 2 cards of 8 cards free",),
        *("M40", "would be pinned to M40: the model with the most free quota, 2 cards of 8 cards free"),
    ),
    held_to_none=((), "", "no GPU quota applies"),
)
def test_a_claim_that_would_be_admitted_is_shown_with_its_model(
    warnings: tuple[str, ...], model: str, reason: str, cluster: Cluster, manifest: Path
) -> None:
    cluster.warnings = (*warnings, "another")
    (row,) = told(manifest, claim())
    assert row == {
        "object": "ResourceClaim/train-gpu",
        "namespace": "team-a",
        "decision": "admitted",
        "model": model,
        "reason": reason,
        "warnings": ["another"],
    }
    assert [(path, params) for path, params, _ in cluster.asked] == [(CLAIMS, {"dryRun": "All"})]


@pytest.mark.parametrize("published", [True, False])
def test_without_a_warning_the_model_is_read_from_the_selector_and_named_as_in_the_quota(
    cluster: Cluster, manifest: Path, *, published: bool
) -> None:
    if published:
        cluster.publish("team-a", {"model": "M40", "limit": 8, "used": 1, "pending": 0, "available": 7})
    model = "M40" if published else "m40"
    (row,) = told(manifest, claim(entry(NVIDIA, write_pin(ClaimPin(NVIDIA, ("m40",))))))
    assert (row["model"], row["reason"]) == (model, f"would be pinned to {model}")
    assert cluster.asked


def test_a_template_is_sent_as_a_template(cluster: Cluster, manifest: Path) -> None:
    cluster.warnings = ("its claim waits",)
    (row,) = told(manifest, NAMED)
    assert (row["object"], row["decision"], row["model"]) == ("ResourceClaimTemplate/one", "admitted", "")
    assert (row["reason"], row["warnings"]) == (
        "only this template's claims count against a GPU quota",
        ["its claim waits"],
    )
    assert [path for path, _, _ in cluster.asked] == [TEMPLATES]


@pytest.mark.parametrize("stored", [True, False], ids=["in the cluster", "in the manifest"])
def test_the_claims_of_a_pod_are_sent_after_it(cluster: Cluster, manifest: Path, *, stored: bool) -> None:
    cluster.pinned_to = None
    cluster.warnings = ("would be pinned to M40: the model with the most free quota",)
    if stored:
        cluster.store(f"{TEMPLATES}/one", NAMED)
    rows = told(manifest, CLAIMING, *([] if stored else [NAMED]))
    assert [(row["object"], row["decision"], row["model"]) for row in rows[:2]] == [
        ("Pod/train-0", "admitted", ""),
        ("ResourceClaim/train-0-gpu-*", "admitted", "M40"),
    ]
    assert rows[0]["reason"] == "only the pod's claims count against a GPU quota"
    path, _, asked = cluster.asked[1]
    assert (path, asked["spec"], asked["metadata"]["generateName"]) == (CLAIMS, spec(entry()), "train-0-gpu-")


def test_an_unreadable_template_is_reported_and_no_admission(cluster: Cluster, manifest: Path) -> None:
    result = explain(manifest, CLAIMING)
    _, row = json.loads(result.stdout)
    assert (row["decision"], result.exit_code) == ("not asked", 1)
    assert row["reason"].startswith("ResourceClaimTemplate one of this claim cannot be read: ")
    assert len(cluster.asked) == 1


def test_the_claims_of_a_rejected_pod_are_not_sent(cluster: Cluster, manifest: Path) -> None:
    cluster.rejection = ApiError(403, OVER)
    assert [row["decision"] for row in told(manifest, CLAIMING)] == ["rejected"]


@cases("served, reason", kubernetes_1_33=(False, NOT_SERVED), no_such_namespace=(True, "no namespace (HTTP 404)"))
def test_claims_are_rejected_if_the_api_server_does_not_serve_them(
    served: bool, reason: str, cluster: Cluster, manifest: Path
) -> None:
    if not served:
        cluster.remove(API_PATH)
    cluster.rejection = NotFound(404, "no namespace")
    (row,) = told(manifest, claim())
    assert (row["decision"], row["reason"]) == ("rejected", reason)


# Tests of a cluster with HAMi-DRA. HAMi-DRA's webhook creates a claim for a pod even in a dry run, and never deletes
# this claim.

HAMI_DRA = (
    'admission webhook "mutate.hami.io" denied the request: failed to create ResourceClaim team-a/team-a-'
    f'{PROBE}-main: ResourceClaim.resource.k8s.io "team-a-{PROBE}-main" is invalid'
)


@cases(
    "failure, sentence",
    as_its_chart_registers_it=(Unavailable, HAMI_DRA),
    under_another_name=(Unavailable, HAMI_DRA.replace("mutate.hami.io", "webhook.example.com")),
    another_fault_of_it=(Unavailable, 'admission webhook "mutate.hami.io" denied the request: annotation has no value'),
    with_another_status=(partial(ApiError, 403), HAMI_DRA),
)
def test_no_dry_run_of_a_pod_is_sent_if_a_webhook_would_create_a_claim(
    failure: Callable[[str], VcudaError], sentence: str, cluster: Cluster, manifest: Path
) -> None:
    cluster.webhook = failure(f"POST /api/v1/namespaces/team-a/pods: {sentence} (HTTP 500)")
    result = explain(manifest, vcuda_pod({"nvidia.com/gpu": 1}), pod(container(), metadata={"name": "plain"}))
    first, second = json.loads(result.stdout)
    assert (first["decision"], first["reason"], result.exit_code) == ("not asked", MAKES_A_CLAIM, 1)
    assert second["decision"] == "admitted"
    assert [asked["metadata"]["name"] for _, _, asked in cluster.asked] == ["plain"]
    assert [(probe["metadata"]["name"], params) for _, params, probe in cluster.probes] == [(PROBE, {"dryRun": "All"})]


def test_an_earlier_rejection_of_the_probe_is_the_answer(cluster: Cluster, manifest: Path) -> None:
    """The quota webhook is called before HAMi-DRA's. If the first dry run is rejected, no second one is sent."""
    cluster.webhook = Forbidden(403, f'admission webhook "mutate.quota.vcuda.io" denied pods "{PROBE}": {OVER}')
    (row,) = told(manifest, vcuda_pod())
    assert row["decision"] == "rejected"
    assert row["reason"] == f'admission webhook "mutate.quota.vcuda.io" denied pods "train-0": {OVER} (HTTP 403)'
    assert cluster.asked == []


def test_nothing_is_sent_if_the_name_of_the_claim_would_be_cut(cluster: Cluster, manifest: Path) -> None:
    """The first dry run relies on a claim name that is too long to be valid. HAMi-DRA shortens long names."""
    (row,) = told(manifest, vcuda_pod(metadata={"name": "a", "namespace": "n" * 51}))
    assert (row["decision"], row["reason"]) == ("not asked", TOO_LONG)
    assert (cluster.asked, cluster.probes) == ([], [])


def test_a_cluster_that_does_not_answer_the_probe_is_an_error(cluster: Cluster, manifest: Path) -> None:
    cluster.webhook = Unavailable("timed out")
    result = explain(manifest, vcuda_pod())
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "Error: timed out\n")


def test_a_claim_that_exists_is_explained_like_a_second_claim(cluster: Cluster, manifest: Path) -> None:
    cluster.store(f"{CLAIMS}/train-gpu", claim())
    cluster.warnings = ("would be pinned to M40",)
    (row,) = told(manifest, claim())
    exists = "ResourceClaim/train-gpu exists already, so the decision is about a second object like it"
    assert (row["decision"], row["model"], row["warnings"]) == ("admitted", "M40", [exists])
