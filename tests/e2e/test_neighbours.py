"""Tests of what the docs say about Kueue, autoscalers and kinds with pod templates, on a real control plane."""

from collections.abc import Callable, Iterator
from http import HTTPStatus

import pytest

from tests.builders import MODEL
from tests.documented import documented_objects
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import Installation, limited_team
from tests.e2e.ledgers import await_committed, pass_by
from tests.e2e.schemas import KARPENTER, KUBERAY, TRAINING_OPERATOR, definitions_in, serving
from tests.e2e.workloads import workload
from tests.integration.reviews import card_pod

KUEUE = {"name": "kueue.x-k8s.io/admission"}
CRDS = {
    "github.com/argoproj/argo-cd/v3@v3.5.7": "manifests/crds",
    "github.com/kedacore/keda/v2@v2.21.0": "config/crd/bases",
    "github.com/kubeflow/trainer/v2@v2.2.0": "manifests/base/crds",
    TRAINING_OPERATOR: "manifests/base/crds",
    KUBERAY: "config/crd/bases",
    KARPENTER: "pkg/apis/crds",
    "sigs.k8s.io/kueue@v0.17.0": "config/components/crd/bases",
}
"""The directories with CustomResourceDefinitions of other projects, by Go module."""
WITHOUT_SCHEMA = {"Kustomization", "HelmRelease", "Notebook"}
"""The kinds in the docs whose CustomResourceDefinition is in none of these Go modules."""


@pytest.fixture
def team(led_team: Callable[[Json], str]) -> str:
    return led_team({"quota": {"M40": 1}})


@pytest.mark.usefixtures("controller_manager")
def test_a_suspended_job_is_not_charged_until_it_resumes(
    cluster: Cluster, installation: Installation, team: str
) -> None:
    """A Job that Kueue suspends has no pods, so other pods can use the quota until it resumes."""
    waiting = workload("Job", team, "waiting")
    waiting["spec"]["suspend"] = True
    cluster.create(waiting)
    jobs = cluster.path_of(waiting)
    cluster.await_object(jobs, "waiting", lambda job: bool(job["status"].get("conditions")))
    assert installation.charged(team) == {}
    cluster.create(card_pod("other", team))
    cluster.delete_pod(team, "other")
    await_committed(installation, team)
    # Act as Kueue: write the node label of the chosen flavor into the Job, and then resume the Job.
    flavor = {"template": {"spec": {"nodeSelector": {MODEL: "M40"}}}}
    cluster.rest.merge_patch(f"{jobs}/waiting", {"spec": flavor})
    cluster.rest.merge_patch(f"{jobs}/waiting", {"spec": {"suspend": False}})
    await_committed(installation, team, M40=100)
    assert cluster.try_create(card_pod("next", team)).is_over_quota


def test_a_pod_that_kueue_gates_takes_quota_and_the_removal_of_the_gate_is_admitted(
    cluster: Cluster, installation: Installation, team: str
) -> None:
    """When Kueue removes its scheduling gate, it adds the label of the chosen flavor to the pod's node selector."""
    gated = card_pod("gated", team)
    gated["spec"]["schedulingGates"] = [KUEUE]
    cluster.create(gated)
    await_committed(installation, team, M40=100)
    assert cluster.try_create(card_pod("next", team)).is_over_quota
    change = {"spec": {"schedulingGates": None, "nodeSelector": {MODEL: "M40"}}}
    opened = cluster.rest.merge_patch(f"/api/v1/namespaces/{team}/pods/gated", change)
    assert "schedulingGates" not in opened["spec"]
    pass_by(cluster, team)
    await_committed(installation, team, M40=100)


@pytest.mark.usefixtures("controller_manager")
def test_a_deployment_that_is_scaled_beyond_its_quota_keeps_its_pods_and_says_why(
    cluster: Cluster, installation: Installation, team: str
) -> None:
    created = cluster.create(workload("Deployment", team))
    await_committed(installation, team, M40=100)
    [before] = cluster.pods(team)
    deployments = cluster.path_of(created)
    cluster.rest.merge_patch(f"{deployments}/train/scale", {"spec": {"replicas": 3}})
    found = cluster.await_object(deployments, "train", lambda each: failure_of(each) is not None)
    failure = failure_of(found)
    assert failure is not None
    assert (failure["status"], failure["reason"]) == ("True", "FailedCreate")
    assert f"exceeded quota: M40 in namespace {team}" in failure["message"]
    assert (found["spec"]["replicas"], found["status"]["replicas"]) == (3, 1)
    [after] = cluster.pods(team)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]


def failure_of(deployment: Json) -> Json | None:
    conditions = deployment.get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == "ReplicaFailure"), None)


@pytest.fixture
def served(cluster: Cluster) -> Iterator[set[str]]:
    kinds = {each["kind"] for each in documented_objects()}
    with serving(cluster, definitions_in(CRDS, lambda each: each["spec"]["names"]["kind"] in kinds)) as served:
        yield {"Deployment", "DaemonSet", *served}


@pytest.mark.one_version
@pytest.mark.timeout(240)
def test_every_documented_manifest_is_valid_for_the_schema_of_its_project(
    cluster: Cluster, installation: Installation, served: set[str]
) -> None:
    kinds = {each["kind"] for each in documented_objects()}
    assert kinds - served == WITHOUT_SCHEMA
    with limited_team(installation, {"quota": {"A100": 8}}) as team:
        for each in documented_objects():
            if each["kind"] in served:
                each["metadata"]["namespace"] = team
                answer = cluster.try_create(each, dryRun="All", fieldValidation="Strict")
                assert answer.status == HTTPStatus.CREATED, (each["kind"], answer.message)
