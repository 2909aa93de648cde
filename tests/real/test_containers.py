"""Tests that compare a pod's charge with its containers over time. The charge must never end first."""

import json
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Cluster, has_ended
from tests.processes import eventually
from tests.real.lives import LIFE as TEAM, Lives, started
from tests.real.node import NAME, Node
from tests.real.pods import IGNORES_TERM, WAITS, container, pod, run, workload
from tests.real.release import Release, processes

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

PODS = f"/api/v1/namespaces/{TEAM}/pods"
EATS_MEMORY = "exec python3 -c 'held = bytearray(200_000_000); input()'"


@pytest.fixture(autouse=True)
def nothing_left(cluster: Cluster, release: Release) -> Iterator[None]:
    yield
    cluster.rest.send("DELETE", PODS).ok()
    cluster.await_pods(TEAM, lambda pods: not pods)
    release.await_charged(TEAM, 0)


@pytest.mark.ci
@pytest.mark.parametrize("grace", [0, 15])
def test_a_pod_deleted_by_force_is_charged_until_its_container_ends(
    cluster: Cluster, release: Release, grace: int
) -> None:
    """The API server removes the pod at once, but the kubelet gives the container at least 2 seconds more."""
    lives = started(cluster, release, pod("forced", TEAM, container(IGNORES_TERM), terminationGracePeriodSeconds=grace))
    lives.follow(lambda: cluster.delete_by_force(TEAM, "forced"))
    assert lives.container > 1


@pytest.mark.ci
def test_a_pod_with_a_long_grace_period_is_charged_until_its_container_ends(cluster: Cluster, release: Release) -> None:
    lives = started(cluster, release, pod("slow", TEAM, container(IGNORES_TERM), terminationGracePeriodSeconds=10))
    lives.follow(lambda: cluster.rest.send("DELETE", f"{PODS}/slow").ok())
    assert lives.container > 8


def test_a_container_out_of_memory_is_charged_until_it_ends(cluster: Cluster, release: Release) -> None:
    hungry = container(f"sleep 5; {EATS_MEMORY}")
    hungry["resources"]["limits"]["memory"] = "64Mi"
    lives = started(cluster, release, pod("hungry", TEAM, hungry))
    lives.follow(lambda: None)
    [status] = cluster.pod(TEAM, "hungry")["status"]["containerStatuses"]
    assert status["state"]["terminated"]["reason"] == "OOMKilled"


def test_a_container_that_restarts_after_running_out_of_memory_stays_charged(
    cluster: Cluster, release: Release
) -> None:
    hungry = container(f"sleep 3; {EATS_MEMORY}")
    hungry["resources"]["limits"]["memory"] = "64Mi"
    run(cluster, pod("again", TEAM, hungry, restartPolicy="Always"))
    cluster.wait_pod(TEAM, "again", lambda pod: pod["status"]["containerStatuses"][0]["restartCount"] > 0)
    assert release.charged(TEAM) == 1


def test_a_completed_job_is_charged_until_its_container_ends(cluster: Cluster, release: Release) -> None:
    job = workload("Job", "once", TEAM, pod("", TEAM, container("sleep 5")))
    cluster.create(job)
    [created] = cluster.await_pods(TEAM, lambda pods: bool(pods) and bool(processes(pods[0]["metadata"]["uid"])))
    release.await_charged(TEAM, 1)
    Lives(release, created["metadata"]["uid"]).follow(lambda: None)
    cluster.await_pods(TEAM, lambda pods: all(map(has_ended, pods)))
    cluster.kubectl("--namespace", TEAM, "delete", "job/once")


def test_an_init_container_keeps_its_charge_until_the_pod_ends(cluster: Cluster, release: Release) -> None:
    sidecar = {**container(IGNORES_TERM, 1, "sidecar"), "restartPolicy": "Always"}
    manifest = pod("sidecar", TEAM, container(WAITS, 0), initContainers=[sidecar], terminationGracePeriodSeconds=5)
    lives = started(cluster, release, manifest)
    lives.follow(lambda: cluster.rest.send("DELETE", f"{PODS}/sidecar").ok())
    assert lives.container > 3


def test_a_static_pod_with_a_card_is_charged_until_its_container_ends(
    cluster: Cluster, release: Release, node: Node
) -> None:
    """The webhook is not called before a static pod runs. Its mirror pod is charged like every stored pod."""
    path = node.directory / "static" / "card.json"
    path.write_text(json.dumps(pod("static", TEAM, container(WAITS))))
    mirror = cluster.wait_pod(TEAM, f"static-{NAME}", lambda pod: pod["status"].get("phase") == "Running")
    release.await_charged(TEAM, 1)
    uid = mirror["metadata"]["annotations"]["kubernetes.io/config.hash"]
    eventually(lambda: processes(uid))
    Lives(release, uid).follow(path.unlink)
