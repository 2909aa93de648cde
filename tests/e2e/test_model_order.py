"""The GPU model of a pod follows a stated order, with the real scheduler, controller manager and audit log."""

from collections.abc import Callable
from http import HTTPStatus

import pytest

from tests.builders import MODEL, held_to
from tests.e2e.cluster import Cluster, Json, is_bound
from tests.e2e.workloads import workload
from tests.integration.reviews import card_pod

Team = Callable[[Json], str]
WISH = "quota.vcuda.io/models"


def wishing(name: str, namespace: str, wish: str) -> Json:
    made = card_pod(name, namespace)
    return {**made, "metadata": {**made["metadata"], "annotations": {WISH: wish}}}


@pytest.fixture
def nodes(create_node: Callable[..., str]) -> dict[str, str]:
    """A node of each model, by its name."""
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
def test_a_deployment_whose_pod_template_names_models_gets_only_these(
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


@pytest.mark.parametrize(
    ("wish", "status", "message"),
    [
        ("A10O", HTTPStatus.UNPROCESSABLE_ENTITY, 'names the unknown GPU model "A10O"; did you mean `A100`?'),
        ("T4", HTTPStatus.FORBIDDEN, "names T4, which the quota of namespace {} does not list; it lists A100, H100"),
        (",".join(map(str, range(10_000))), HTTPStatus.UNPROCESSABLE_ENTITY, "must not be longer than 2048 characters"),
    ],
    ids=["unknown", "not listed", "ten thousand"],
)
@pytest.mark.usefixtures("nodes")
def test_a_tenant_who_names_a_wrong_model_is_told_which_are_right(
    *, team: Team, tenant: Callable[[str], Cluster], wish: str, status: HTTPStatus, message: str
) -> None:
    namespace = team({"quota": {"A100": 4, "H100": 4}})
    answer = tenant(namespace).try_create(wishing("train", namespace, wish))
    assert answer.status == status
    assert message.format(namespace) in answer.message


@pytest.mark.usefixtures("nodes")
def test_with_one_model_a_pod_must_name_it_and_the_message_has_the_annotation_to_add(
    cluster: Cluster, team: Team
) -> None:
    namespace = team({"one_model": True, "quota": {"A100": 4, "H100": 4}})
    refused = cluster.try_create(card_pod("train", namespace))
    assert refused.status == HTTPStatus.FORBIDDEN
    assert refused.message.endswith(f"set annotation {WISH}: A100, or nodeSelector {MODEL}: A100")
    cluster.create(wishing("train", namespace, "A100"))
    assert cluster.pod(namespace)["spec"]["affinity"] == held_to("A100")


@pytest.mark.usefixtures("nodes")
def test_a_dry_run_names_the_rule_that_chose(cluster: Cluster, team: Team) -> None:
    namespace = team({"quota": {"A100": 4, "H100": 4}})
    answer = cluster.try_create(wishing("train", namespace, "H100, *"), dryRun="All")
    told = f"would be pinned to H100: the first in annotation {WISH}, 4 cards of 4 cards free"
    assert any(told in warning for warning in answer.warnings), answer
