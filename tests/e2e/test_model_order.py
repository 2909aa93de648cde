"""Tests with a real scheduler of the order in which the webhook tries GPU models. The quota or the pod states it."""

from collections.abc import Callable

import pytest

from tests.builders import MODEL
from tests.e2e.cluster import Cluster, Json, is_bound
from tests.e2e.workloads import was_told, workload
from tests.integration.reviews import gpu_pod
from tests.processes import eventually
from tools.control_plane import ControlPlane

pytestmark = pytest.mark.one_version

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
    rejected = "H100 in namespace {0}, requested: 1 card, used: 1 (0 pending), limited: 1, 1 more needed; A100 in"
    cluster.await_events(
        namespace,
        "reason=FailedCreate",
        lambda told: any(rejected.format(namespace) in each["message"] for each in told),
    )
    bound = cluster.await_pods(namespace, lambda pods: len(pods) == 2 and all(map(is_bound, pods)))
    assert sorted(nodes[pod["spec"]["nodeName"]] for pod in bound) == ["A100", "H100"]


@pytest.fixture
def h100(nodes: dict[str, str]) -> str:
    return next(name for name, model in nodes.items() if model == "H100")


STATES: dict[str, tuple[str, Json, Json, str]] = {
    "cordoned": ("", {"spec": {"unschedulable": True}}, {"spec": {"unschedulable": False}}, "is cordoned"),
    "tainted": (
        "",
        {"spec": {"taints": [{"key": "dedicated", "value": "ml", "effect": "NoSchedule"}]}},
        {"spec": {"taints": []}},
        "has taints that the pod does not tolerate",
    ),
    "without_cards": (
        "/status",
        {"status": {"allocatable": {"tencent.com/vcuda-core": "0"}}},
        {"status": {"allocatable": {"tencent.com/vcuda-core": "1600"}}},
        "does not offer 100 tencent.com/vcuda-core",
    ),
}


@pytest.mark.usefixtures("scheduler")
@pytest.mark.parametrize("state", STATES)
def test_a_model_of_which_no_node_can_take_the_pod_is_passed_over_until_one_can(
    cluster: Cluster, team: Team, nodes: dict[str, str], h100: str, state: str
) -> None:
    namespace = team({"quota": {"H100": 4, "A100": 4}})
    manifest = gpu_pod("train", namespace, {"tencent.com/vcuda-core": "100"})
    part, worse, better, why = STATES[state]

    def model_now() -> str:
        made = cluster.try_create(manifest, dryRun="All").ok()
        return str(made["metadata"]["annotations"]["quota.vcuda.io/model"])

    for change, model in ((worse, "A100"), (better, "H100")):
        cluster.rest.merge_patch(f"/api/v1/nodes/{h100}{part}", change)
        eventually(lambda model=model: model_now() == model)  # type: ignore[misc]  # mypy cannot infer the default
        name = f"on-{model.lower()}"
        created = cluster.try_create({**manifest, "metadata": {**manifest["metadata"], "name": name}})
        passed_over = f"pinned to A100: the next in the namespace's quota after H100 (its node {why})"
        assert [each.startswith(passed_over) for each in created.warnings] == [True] * (model == "A100")
        assert nodes[cluster.await_bound(namespace, name)["spec"]["nodeName"]] == model


@pytest.mark.usefixtures("controller_manager")
def test_a_workload_whose_quota_requires_nodes_is_retried_when_a_node_offers_cards(
    cluster: Cluster, control_plane: ControlPlane, led_team: Team, h100: str
) -> None:
    path, resource = f"/api/v1/nodes/{h100}/status", "tencent.com/vcuda-core"
    cluster.rest.merge_patch(path, {"status": {"allocatable": {resource: "0"}}})
    namespace = led_team({"require_nodes": True, "quota": {"H100": 4}})
    manifest = gpu_pod("train", namespace, {resource: "100"})
    eventually(lambda: "`require_nodes` of the quota" in cluster.try_create(manifest, dryRun="All").message)
    waiting = cluster.create(workload("ReplicaSet", namespace))
    replica_sets = cluster.path_of(waiting)
    cluster.await_object(replica_sets, "train", lambda found: "conditions" in found["status"])
    manager = control_plane.controller_manager
    assert manager is not None
    with manager.away():  # it would also retry after some time
        cluster.rest.merge_patch(path, {"status": {"allocatable": {resource: "1600"}}})
        cluster.await_object(replica_sets, "train", was_told)
    cluster.await_pods(namespace, bool)
