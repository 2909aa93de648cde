"""Tests of `kubectl gpuquota explain`, which shows the decisions for the pods of a manifest."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builders import container, vcuda_pod
from tests.gpuquota import Cluster, explain, run
from vcuda.errors import ApiError, Unavailable, VcudaError
from vcuda.placement.choice import Choice


def test_a_pod_that_would_be_admitted_is_shown_with_its_model(cluster: Cluster, manifest: Path) -> None:
    result = explain(manifest, vcuda_pod(), output="table")
    heading = "OBJECT       NAMESPACE  DECISION  MODEL  REASON\n"
    table = f"{heading}Pod/train-0  team-a     admitted  M40    would be pinned to M40\n"
    assert (result.exit_code, result.stdout) == (0, table)
    ((path, params, pod),) = cluster.asked
    assert len(cluster.probes) == 1
    assert (path, params, pod["spec"]) == ("/api/v1/namespaces/team-a/pods", {"dryRun": "All"}, vcuda_pod()["spec"])


OVER = "exceeded quota: M40 in namespace team-a"
ROOM = "the model with the most free quota, 3 cards of 8 cards free"
NEARLY = "the GPU quota is nearly used up"
PINNED = "would be pinned to M40"


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ({"pinned_to": None}, (0, "admitted", "", "no GPU quota applies", [])),
        ({"rejection": ApiError(403, OVER)}, (1, "rejected", "", f"{OVER} (HTTP 403)", [])),
        ({"warnings": (Choice("M40", ROOM).forecast,)}, (0, "admitted", "M40", f"{PINNED}: {ROOM}", [])),
        ({"warnings": (NEARLY,)}, (0, "admitted", "M40", PINNED, [NEARLY])),
    ],
    ids=["no quota applies", "rejected", "the reason for the model", "another warning"],
)
def test_the_answer_of_the_cluster_is_in_the_data(
    cluster: Cluster, manifest: Path, answer: dict[str, Any], verdict: tuple[object, ...]
) -> None:
    for name, value in answer.items():
        setattr(cluster, name, value)
    result = explain(manifest, vcuda_pod())
    (shown,) = json.loads(result.stdout)
    fields = tuple(shown[name] for name in ("decision", "model", "reason", "warnings"))
    assert (result.exit_code, *fields, result.stderr) == (*verdict, "")


@pytest.mark.parametrize("rejection", [Unavailable("timed out"), ApiError(401, "Unauthorized")])
def test_a_cluster_without_the_webhook_is_an_error_and_no_rejection(
    cluster: Cluster, manifest: Path, rejection: VcudaError
) -> None:
    cluster.rejection = rejection
    result = explain(manifest, vcuda_pod())
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"Error: {rejection}\n")


def test_warnings_of_the_cluster_are_printed_with_the_table(cluster: Cluster, manifest: Path) -> None:
    cluster.warnings = (NEARLY, "another webhook's")
    result = explain(manifest, vcuda_pod(), output="table")
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 2)
    assert result.stderr.splitlines() == [f"Warning: Pod/train-0: {warning}" for warning in cluster.warnings]


@pytest.mark.parametrize(
    ("before", "after", "namespace"),
    [
        (["-n", "team-b", "-o", "json"], [], "team-b"),
        ([], ["-n", "team-b", "-o", "json"], "team-b"),
        (["-n", "team-b", "-o", "yaml"], ["-n", "team-c", "-o", "json"], "team-c"),
    ],
)
def test_namespace_and_output_are_taken_before_and_after_the_command(
    cluster: Cluster, manifest: Path, before: list[str], after: list[str], namespace: str
) -> None:
    """If a flag is both before and after the command, the value after the command counts."""
    manifest.write_text(yaml.safe_dump(vcuda_pod()))
    (verdict,) = json.loads(run(*before, "explain", "-f", str(manifest), *after).stdout)
    assert verdict["namespace"] == namespace
    assert [path for path, _, _ in cluster.asked] == [f"/api/v1/namespaces/{namespace}/pods"]


def test_one_pod_of_every_workload_is_sent(cluster: Cluster, manifest: Path) -> None:
    template = {"metadata": {"labels": {"app": "train"}}, "spec": {"containers": [container()]}}
    deployment = {"kind": "Deployment", "metadata": {"name": "d", "namespace": "team-b"}}
    result = explain(manifest, {**deployment, "spec": {"replicas": 5, "template": template}}, vcuda_pod())
    assert [verdict["object"] for verdict in json.loads(result.stdout)] == ["Deployment/d", "Pod/train-0"]
    assert [path.split("/")[4] for path, _, _ in cluster.asked] == ["team-b", "team-a"]
    assert cluster.asked[0][2]["metadata"]["labels"] == {"app": "train"}


@pytest.mark.usefixtures("cluster")
def test_an_annotation_with_models_outside_the_pod_template_gives_a_warning(manifest: Path) -> None:
    annotated = {"name": "web", "annotations": {"quota.vcuda.io/models": "P100"}}
    made = {"kind": "Deployment", "metadata": annotated, "spec": {"template": {"spec": vcuda_pod()["spec"]}}}
    (verdict,) = json.loads(explain(manifest, made).stdout)
    assert "write it into the annotations of its pod template" in verdict["warnings"][0]


@pytest.mark.parametrize("text", ["{", "kind: Pod\nspec: 5", "kind: Pod", "\x81"])
def test_if_one_of_several_manifests_is_malformed_nothing_is_sent(cluster: Cluster, tmp_path: Path, text: str) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text(yaml.safe_dump(vcuda_pod()))
    bad.write_bytes(text.encode("latin-1"))
    result = run("explain", "-f", str(good), "-f", str(bad))
    assert (result.exit_code, result.stdout, cluster.asked) == (2, "", [])
    assert result.stderr.startswith("Error: ")


def test_nothing_is_sent_for_a_manifest_without_pods(cluster: Cluster, manifest: Path) -> None:
    result = explain(manifest, {"apiVersion": "v1", "kind": "Service"})
    assert (result.exit_code, result.stdout, result.stderr, cluster.asked) == (0, "[]\n", "no pods found\n", [])


def test_one_pod_of_each_template_of_a_custom_object_is_sent(cluster: Cluster, manifest: Path) -> None:
    replicas = {name: {"replicas": 8, "template": {"spec": vcuda_pod()["spec"]}} for name in ("Master", "Worker")}
    metadata = {"name": "train"}
    result = explain(manifest, {"kind": "PyTorchJob", "metadata": metadata, "spec": {"pytorchReplicaSpecs": replicas}})
    titles = [f"PyTorchJob/train spec.pytorchReplicaSpecs.{name}.template" for name in ("Master", "Worker")]
    assert [verdict["object"] for verdict in json.loads(result.stdout)] == titles
    assert cluster.asked


def test_nothing_is_sent_for_a_custom_object_without_a_pod_template(cluster: Cluster, manifest: Path) -> None:
    (verdict,) = json.loads(explain(manifest, {"kind": "Trainer", "metadata": {"name": "a"}}).stdout)
    assert (verdict["decision"], cluster.asked) == ("not asked", [])


def test_every_manifest_is_sent_in_order_including_standard_input(cluster: Cluster, tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).write_text(yaml.safe_dump(vcuda_pod(metadata={"name": name})))
    files = ["-f", str(tmp_path / "b"), "-f", "-", "-f", str(tmp_path / "a")]
    result = run("-n", "team-a", "explain", *files, "-o", "yaml", input=yaml.safe_dump(vcuda_pod()))
    verdicts = [(verdict["object"], verdict["decision"]) for verdict in yaml.safe_load(result.stdout)]
    assert verdicts == [("Pod/b", "admitted"), ("Pod/train-0", "admitted"), ("Pod/a", "admitted")]
    assert (result.exit_code, len(cluster.asked)) == (0, 3)


@pytest.mark.parametrize("unstored", [0.0, 6.0])
def test_a_rejection_is_explained_by_charged_pods_that_are_not_created(
    cluster: Cluster, manifest: Path, unstored: float
) -> None:
    figures = {"model": "M40", "limit": 8, "used": 8, "pending": 6, "available": 0, "unstored": unstored}
    cluster.publish("team-a", figures)
    cluster.rejection = ApiError(403, "exceeded quota: M40 in namespace team-a, requested: 1 card")
    shown = explain(manifest, vcuda_pod(), output="table").stderr
    assert ("charged to pods that are not created (6 of M40)" in shown) is bool(unstored)


EXISTS = "Pod/train-0 exists already, so the decision is about a second object like it"


def test_a_pod_that_exists_is_explained_like_a_second_pod(cluster: Cluster, manifest: Path) -> None:
    cluster.store("/api/v1/namespaces/team-a/pods/train-0", vcuda_pod())
    (row,) = json.loads(explain(manifest, vcuda_pod()).stdout)
    assert (row["decision"], row["model"], row["reason"], row["warnings"]) == ("admitted", "M40", PINNED, [EXISTS])
    tried = cluster.asked[-1][2]["metadata"]
    assert ("name" in tried, tried["generateName"]) == (False, "train-0-")


@pytest.mark.parametrize("at_the_probe", [True, False])
def test_a_rejection_of_a_pod_that_exists_is_said_to_be_about_a_second_pod(
    cluster: Cluster, manifest: Path, *, at_the_probe: bool
) -> None:
    cluster.store("/api/v1/namespaces/team-a/pods/train-0", vcuda_pod())
    of_shares = vcuda_pod() if at_the_probe else {**vcuda_pod(), "spec": {"containers": [container()]}}
    cluster.rejection = ApiError(403, OVER)
    (row,) = json.loads(explain(manifest, of_shares).stdout)
    assert (row["decision"], OVER in row["reason"], row["warnings"]) == ("rejected", True, [EXISTS])


def test_a_rejected_pod_whose_name_is_invalid_stays_rejected(cluster: Cluster, manifest: Path) -> None:
    cluster.rejection = ApiError(422, "metadata.name: Invalid value")
    named = {**vcuda_pod(), "metadata": {**vcuda_pod()["metadata"], "name": "a/b"}}
    (row,) = json.loads(explain(manifest, named).stdout)
    assert (row["decision"], row["warnings"]) == ("rejected", [])
