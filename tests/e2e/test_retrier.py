"""Tests of the controller's retry: when quota is released, it patches a rejected workload.

So the workload creates its pods at once, and not only when its back-off ends.
"""

import datetime
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest

from tests.builders import MODEL
from tests.e2e.cluster import Cluster, Json
from tests.e2e.conftest import require
from tests.e2e.installation import Installation, limited_team
from tests.e2e.ledgers import await_committed
from tests.e2e.workloads import RETRIED, was_told, workload
from tests.integration.reviews import card_pod
from tests.processes import ControllerProcess, WebhookProcess
from tools.component import Component
from tools.control_plane import ControlPlane

pytestmark = [pytest.mark.slow, pytest.mark.one_version, pytest.mark.usefixtures("controller_manager")]

NODE, NEW_NODE = "retry-m40", "retry-new"
ONE = {"quota": {"M40": 1}}
WITHIN = 14.0
"""Maximum seconds from the release of quota until the pod is stored. The pod's owner itself would retry later."""

CASES = {"Job": 5, "Deployment": 13, "Deployment, limit raised": 13, "StatefulSet": 13, "DaemonSet": 13}
"""The number of rejections of a workload after which the test releases quota, by case.

The workloads reach these numbers in this order. The owner's own next retry is then 20 s away, because its back-off
doubles from 5 ms. For a Job it is 16 s away, because the back-off doubles from 1 s.
"""

CROWD = 60
FREED = 3


@dataclass(frozen=True)
class Waiting:
    """A workload in ``namespace`` whose pod was rejected.

    ``freed``: when quota for the pod was released, in Unix seconds.
    """

    namespace: str
    kind: str
    freed: float


@pytest.fixture(scope="module")
def waiting(
    cluster: Cluster, control_plane: ControlPlane, installation: Installation, controller: ControllerProcess
) -> Iterator[dict[str, Waiting]]:
    """A rejected workload for every case in `CASES`. When its back-off is long, the test releases quota."""
    require(control_plane, "kube-controller-manager")
    assert controller.port
    with ExitStack() as stack:
        cluster.create_node(NODE, {MODEL: "M40"})
        stack.callback(cluster.delete_node, NODE)
        teams = {case: stack.enter_context(limited_team(installation, ONE)) for case in CASES}
        for namespace in teams.values():
            cluster.create(card_pod("holder", namespace))
            await_committed(installation, namespace, M40=100)
        for case, namespace in teams.items():
            cluster.create(workload(case.partition(",")[0], namespace))
        yield {case: free(installation, case, namespace) for case, namespace in teams.items()}


def free(installation: Installation, case: str, namespace: str) -> Waiting:
    await_rejections(installation.replica, namespace, CASES[case])
    installation.cluster.await_events(namespace, "reason=FailedCreate")
    freed = time.time()
    if case.endswith("limit raised"):
        installation.quota.limit(**{namespace: {"quota": {"M40": 2}}})
    else:
        installation.cluster.delete_pod(namespace, "holder")
    kind = case.partition(",")[0]
    return Waiting(namespace, "ReplicaSet" if kind == "Deployment" else kind, freed)


def await_rejections(webhook: WebhookProcess, namespace: str, count: int, outcome: str = "over-quota") -> None:
    rejected = set()

    def is_last(line: Json) -> bool:
        if line.get("namespace") == namespace and line["outcome"].startswith(outcome):
            rejected.add(line["uid"])
        return len(rejected) == count

    webhook.await_log("admission", is_last)


@pytest.mark.parametrize("case", CASES)
def test_a_rejected_workload_gets_its_pod_before_its_backoff_ends(
    cluster: Cluster, waiting: dict[str, Waiting], case: str
) -> None:
    """Some owners of pods report a rejection only by Events, where the controller must find it."""
    namespace = waiting[case].namespace
    pods = cluster.await_pods(namespace, lambda found: any(is_own(pod) for pod in found))
    [created] = [pod["metadata"]["creationTimestamp"] for pod in pods if is_own(pod)]
    seconds = datetime.datetime.fromisoformat(created).timestamp() - waiting[case].freed
    print(f"{case}: the pod was stored {seconds:.0f} s after quota was free")
    assert seconds < WITHIN
    [owner] = cluster.rest.get(cluster.path_of(workload(waiting[case].kind, namespace)))["items"]
    assert was_told(owner)


def is_own(pod: Json) -> bool:
    return str(pod["metadata"]["name"]).startswith("train")


def test_a_daemon_set_gets_its_pod_as_soon_as_its_node_has_a_model(
    cluster: Cluster, control_plane: ControlPlane, installation: Installation, controller: ControllerProcess
) -> None:
    """The controller manager is stopped during the change, because Kubernetes 1.37 itself retries once after it."""
    require(control_plane, "kube-controller-manager")
    manager = control_plane.controller_manager
    assert controller.port
    assert manager
    with limited_team(installation, ONE) as namespace, ExitStack() as stack:
        cluster.create_node(NEW_NODE, {"team": namespace})
        stack.callback(cluster.delete_node, NEW_NODE)
        pod = card_pod("", namespace)
        pod["spec"]["nodeSelector"] = {"team": namespace}
        cluster.create(workload("DaemonSet", namespace, pod=pod))
        await_rejections(installation.replica, namespace, CASES["DaemonSet"], outcome="not-allowed")
        cluster.await_events(namespace, "reason=FailedCreate")
        daemon_sets = cluster.path_of(workload("DaemonSet", namespace))
        with manager.away():
            labelled = datetime.datetime.now(datetime.UTC)
            cluster.rest.merge_patch(f"/api/v1/nodes/{NEW_NODE}", {"metadata": {"labels": {MODEL: "M40"}}})
            cluster.await_object(daemon_sets, "train", lambda found: retried_at(found) > labelled)
        cluster.await_pods(namespace, lambda pods: len(pods) == 1)


def retried_at(owner: Json) -> datetime.datetime:
    text = owner["metadata"].get("annotations", {}).get(RETRIED, "1970-01-01T00:00:00Z")
    return datetime.datetime.fromisoformat(text)


@pytest.fixture
def hasty(control_plane: ControlPlane) -> Iterator[Component]:
    """A controller manager without its limit of 20 requests per second, which would delay many Deployments."""
    usual = control_plane.controller_manager
    assert usual is not None
    hasty = replace(usual, command=(*usual.command, "--kube-api-qps=1000", "--kube-api-burst=2000"))
    with usual.away():
        hasty.start()
        yield hasty
        hasty.stop()


@pytest.mark.timeout(240)
def test_rejected_deployments_do_not_retry_all_at_once(
    cluster: Cluster, installation: Installation, controller: ControllerProcess, hasty: Component
) -> None:
    """The controller makes only as many owners retry as their pods fit into the released quota."""
    with limited_team(installation, {"quota": {"M40": FREED}}) as namespace:
        replica_sets = f"/apis/apps/v1/namespaces/{namespace}/replicasets"
        for number in range(FREED):
            cluster.create(card_pod(f"holder-{number}", namespace))
        await_committed(installation, namespace, M40=100 * FREED)
        for number in range(CROWD):
            cluster.create(workload("Deployment", namespace, f"train-{number}"))
        cluster.await_collection(
            replica_sets, lambda owners: len(owners) == CROWD and all(map(was_rejected, owners)), 90
        )
        # Without the controller manager, the owners cannot retry by themselves and use the released quota. So stop it.
        with hasty.away():
            for number in range(FREED):
                cluster.delete_pod(namespace, f"holder-{number}")
            owners = cluster.await_collection(replica_sets, lambda owners: sum(map(was_told, owners)) >= FREED)
            told = {owner["metadata"]["name"] for owner in owners if was_told(owner)}
            lines = [line for line in controller.logs("retry triggered") if f"/{namespace}/" in line["owner"]]
            assert len(told) == FREED
            assert len(lines) <= 2 * FREED, "each once, or twice if it was slow"
        cluster.await_pods(namespace, lambda pods: len(pods) == FREED and all(map(is_own, pods)), 60)
        await_committed(installation, namespace, M40=100 * FREED)


def was_rejected(owner: Json) -> bool:
    return "exceeded quota" in json.dumps(owner["status"].get("conditions", []))
