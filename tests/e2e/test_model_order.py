"""Tests with a real scheduler. The webhook chooses a pod's GPU model in the order that the quota or the pod states."""

from collections.abc import Callable

import pytest

from tests.builders import MODEL
from tests.e2e.cluster import Cluster, Json, is_bound
from tests.e2e.workloads import workload

Team = Callable[[Json], str]
WISH = "quota.vcuda.io/models"


@pytest.fixture
def nodes(create_node: Callable[..., str]) -> dict[str, str]:
    capacity = {"tencent.com/vcuda-core": "1600"}
    return {create_node(f"gpu-{model}".lower(), {MODEL: model}, capacity): model for model in ("H100", "A100", "T4")}


@pytest.mark.usefixtures("scheduler", "controller_manager")
def test_the_pods_of_a_job_stay_on_one_model_until_its_quota_is_used_up(
    cluster: Cluster, team: Team, nodes: dict[str, str]
) -> None:
    namespace = team({"order": ["H100", "A100"], "quota": {"A100": 4, "H100": 4, "T4": 4}})
    job = workload("Job", namespace)
    job["spec"] |= {"parallelism": 8, "completions": 8}
    cluster.apply(job)
    bound = cluster.await_pods(namespace, lambda pods: len(pods) == 8 and all(map(is_bound, pods)))
    models = [nodes[pod["spec"]["nodeName"]] for pod in bound]
    assert sorted(models) == ["A100"] * 4 + ["H100"] * 4


@pytest.mark.usefixtures("scheduler", "controller_manager")
def test_a_deployment_gets_only_the_models_that_its_pod_template_names(
    cluster: Cluster, team: Team, nodes: dict[str, str]
) -> None:
    namespace = team({"quota": {"T4": 8, "A100": 1, "H100": 1}})
    made = workload("Deployment", namespace, replicas=3)
    made["spec"]["template"]["metadata"]["annotations"] = {WISH: "H100, A100"}
    cluster.apply(made)
    refused = "H100 in namespace {0}, requested: 1 card, used: 1 (0 pending), limited: 1, 1 more needed; A100 in"
    cluster.await_events(
        namespace,
        "reason=FailedCreate",
        lambda told: any(refused.format(namespace) in each["message"] for each in told),
    )
    bound = cluster.await_pods(namespace, lambda pods: len(pods) == 2 and all(map(is_bound, pods)))
    assert sorted(nodes[pod["spec"]["nodeName"]] for pod in bound) == ["A100", "H100"]
