"""Tests of parts of the system that fail or are replaced while pods are created. No pod is admitted over quota.

No create ends with a 403 because of the failure. After a 429, a client repeats the create.
"""

import time

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.installation import SYSTEM_NAMESPACE
from tests.helm import CHART
from tests.processes import eventually
from tests.real.creates import CALLERS, NO_ANSWER, creating
from tests.real.node import NAME, Node, offers_gpus
from tests.real.release import CONTROLLER, PATIENCE, WEBHOOK, Release, processes
from tools.control_plane import ControlPlane

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

RETRIED, CUT_OFF, UNAVAILABLE = "429", "500", "503"
"""The answers to a create that a client repeats, to a create whose call of the webhook was cut off, and to a create for
which the API server is ending."""


def test_no_create_fails_during_a_rolling_restart(cluster: Cluster, release: Release) -> None:
    with creating(cluster) as answers:
        release.kubectl("rollout", "restart", f"deployment/{WEBHOOK}", f"deployment/{CONTROLLER}")
        release.rolled_out()
    answers.only(RETRIED)


@pytest.mark.ci
def test_no_create_fails_during_an_upgrade_and_a_rollback(cluster: Cluster, release: Release) -> None:
    with creating(cluster) as answers:
        release.helm(f"upgrade vcuda-quota {CHART}", "--set=webhook.extraArgs={--log-level=warning}")
        release.rolled_out()
        assert len(release.pods(WEBHOOK)) == 3
        release.helm("rollback vcuda-quota 1")
        release.rolled_out()
    answers.only(RETRIED)


@pytest.mark.ci
def test_a_killed_replica_causes_no_rejection(cluster: Cluster, release: Release) -> None:
    """After the process has ended, and before the Service is updated, calls may find no listener."""
    with creating(cluster) as answers:
        killed = [each for each in release.processes(WEBHOOK) if each.is_main]
        for process in killed:
            process.kill()
            answers.await_more(100)
            release.rolled_out()
    answers.only(RETRIED, CUT_OFF)
    assert answers.counts[CUT_OFF] <= len(killed) * (CALLERS + 1)


def test_a_killed_worker_causes_no_rejection(cluster: Cluster, release: Release) -> None:
    with creating(cluster) as answers:
        killed = [each for each in release.processes(WEBHOOK) if not each.is_main]
        for process in killed:
            process.kill()
            answers.await_more(50)
        release.rolled_out()
    answers.only(RETRIED, CUT_OFF)
    assert answers.counts[CUT_OFF] <= len(killed) * (CALLERS + 1)


def test_no_create_fails_while_every_replica_is_evicted(cluster: Cluster, release: Release) -> None:
    """A drain evicts the replicas, as far as their PodDisruptionBudget permits it."""
    left = {pod["metadata"]["name"] for pod in release.pods(WEBHOOK)}
    with creating(cluster) as answers:
        while left:
            left -= {name for name in left if evict(cluster, name)}
            time.sleep(1)
        release.rolled_out()
    answers.only(RETRIED)


def evict(cluster: Cluster, name: str) -> bool:
    """Evict a pod of the release, as `kubectl drain` does. Return False if a PodDisruptionBudget forbids it."""
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    answer = cluster.rest.send("POST", f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods/{name}/eviction", eviction)
    if answer.status != 429:
        answer.ok()
    return answer.status != 429


@pytest.mark.parametrize("part", ["kubelet", "containerd", "kube-proxy"])
def test_no_create_fails_while_a_part_of_the_node_restarts(
    cluster: Cluster, node: Node, release: Release, part: str
) -> None:
    component = {"kubelet": node.kubelet, "containerd": node.containerd, "kube-proxy": node.proxy}[part]
    with creating(cluster) as answers:
        component.kill()
        answers.await_more(100)
        component.start()
        answers.await_more(100)
        cluster.await_object("/api/v1/nodes", NAME, offers_gpus, PATIENCE)
    answers.only(RETRIED)
    assert len(release.processes(WEBHOOK)) > 0


def test_a_restart_of_the_api_server_cuts_off_only_calls_in_flight(
    cluster: Cluster, plane: ControlPlane, release: Release
) -> None:
    assert release.pods(WEBHOOK)
    with creating(cluster) as answers:
        with plane.apiserver.away():
            pass
        answers.await_more(100)
    answers.only(RETRIED, NO_ANSWER, UNAVAILABLE)
    cut_off = [each for each in answers.problems if NO_ANSWER in each and "Connection refused" not in each]
    assert len(cut_off) <= CALLERS + 1


def test_a_killed_leader_is_replaced_and_no_create_fails(cluster: Cluster, release: Release) -> None:
    leader = release.leader()
    [pod] = [each for each in release.pods(CONTROLLER) if each["metadata"]["name"] == release.leading_pod()]
    with creating(cluster) as answers:
        [main] = [each for each in processes(pod["metadata"]["uid"]) if each.is_main]
        main.kill()
        eventually(lambda: release.leader() not in ("", leader), release.leader)
        answers.await_more(100)
    answers.only(RETRIED)
    release.rolled_out()
