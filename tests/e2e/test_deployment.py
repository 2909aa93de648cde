"""A Deployment larger than its quota: what fits runs, its owner reads why the rest does not, and can mend it."""

from collections.abc import Callable

import pytest

from tests.builders import MODEL
from tests.e2e.cluster import Cluster, Json, is_bound
from tests.e2e.installation import Installation
from tests.e2e.workloads import workload


def await_bound(cluster: Cluster, namespace: str, count: int) -> list[Json]:
    return cluster.await_pods(namespace, lambda pods: len(pods) == count and all(map(is_bound, pods)))


@pytest.mark.usefixtures("scheduler", "controller_manager")
def test_as_many_replicas_run_as_the_quota_has_cards_and_the_rest_follow_when_it_is_raised(
    cluster: Cluster, installation: Installation, team: Callable[[Json], str], create_node: Callable[..., str]
) -> None:
    capacity = {"tencent.com/vcuda-core": "1600"}
    nodes = {create_node(f"gpu-{model}".lower(), {MODEL: model}, capacity): model for model in ("M40", "P100")}
    namespace = team({"quota": {"M40": 4, "P100": 3}})
    cluster.apply(workload("Deployment", namespace, replicas=10))
    message = (
        'Error creating: admission webhook "mutate.quota.vcuda.io" denied the request: exceeded GPU quota: '
        f"M40 in namespace {namespace}, requested: 1 card, used: 4 (0 pending), limited: 4, 1 more needed; "
        f"P100 in namespace {namespace}, requested: 1 card, used: 3 (0 pending), limited: 3, 1 more needed"
    )
    cluster.await_events(namespace, "reason=FailedCreate", lambda told: message in {each["message"] for each in told})
    models = [nodes[pod["spec"]["nodeName"]] for pod in await_bound(cluster, namespace, 7)]
    assert (models.count("M40"), models.count("P100")) == (4, 3)
    assert installation.charged(namespace) == {"M40": 400, "P100": 300}

    pid = installation.replica.process.pid
    installation.quota.limit(**{namespace: {"quota": {"M40": 6, "P100": 4}}})
    # The ReplicaSet controller backs off for minutes by now; any change of the ReplicaSet has it try at once.
    cluster.kubectl("annotate", "deployment", "train", "-n", namespace, "example.com/quota=raised")
    models = [nodes[pod["spec"]["nodeName"]] for pod in await_bound(cluster, namespace, 10)]
    assert (models.count("M40"), models.count("P100")) == (6, 4)
    assert installation.replica.process.pid == pid
