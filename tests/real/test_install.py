"""Tests of the chart on a real node. Pods with GPUs run there, and pods over quota are rejected."""

import subprocess
import urllib.request
from http import HTTPStatus

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.installation import SYSTEM_NAMESPACE
from tests.processes import eventually
from tests.real.node import CARDS, SLICES, Node
from tests.real.pods import (
    GPU,
    IMAGE,
    SHOWS_CARDS,
    WAITS,
    container,
    gated,
    is_running,
    pod,
    remove,
    run,
    shown_cards,
    workload,
)
from tests.real.release import CONTROLLER, WEBHOOK, Release
from tools.ports import free_ports

pytestmark = [pytest.mark.real, pytest.mark.ci, pytest.mark.timeout(600)]

SLICE = "nvidia.com/mig-1g.10gb"


def test_the_chart_registers_its_webhooks_and_the_first_pod_over_quota_is_rejected(
    cluster: Cluster, release: Release
) -> None:
    print(f"\nregistered {release.seconds_to_register:.0f} s after helm install")
    cluster.create(gated("fits", "team-cards", 4))
    answer = cluster.try_create(gated("rejected", "team-cards", 1))
    assert answer.status == HTTPStatus.FORBIDDEN
    assert "exceeded quota: H100 in namespace team-cards, requested: 1 card, used: 4" in answer.message
    remove(cluster, "team-cards")
    release.await_charged("team-cards", 0)


def test_each_program_runs_as_the_user_65532_and_its_log_can_be_read(release: Release) -> None:
    for name in (WEBHOOK, CONTROLLER):
        assert release.kubectl("exec", f"deployment/{name}", "--", "id", "-u").strip() == "65532"
        assert release.kubectl("logs", f"deployment/{name}")


def test_pods_run_with_the_cards_that_the_device_plugin_names(cluster: Cluster, node: Node, release: Release) -> None:
    before = len(node.allocated(GPU))
    for name in ("first", "second"):
        run(cluster, pod(name, "team-cards", container(SHOWS_CARDS, 2)))
    first, second = (shown_cards(cluster, "team-cards", name) for name in ("first", "second"))
    assert sorted(first + second) == sorted(CARDS)
    assert [sorted(ids.split(",")) for ids in node.allocated(GPU)[before:]] == [sorted(first), sorted(second)]
    release.await_charged("team-cards", 4)
    remove(cluster, "team-cards")


def test_a_pod_runs_with_the_mig_slice_that_the_device_plugin_names(cluster: Cluster, release: Release) -> None:
    run(cluster, pod("sliced", "team-cards", container(SHOWS_CARDS, 1, resource=SLICE)))
    [shown] = shown_cards(cluster, "team-cards", "sliced")
    assert shown in SLICES
    assert 0 < release.charged("team-cards") < 1
    remove(cluster, "team-cards")


def test_an_init_container_and_a_sidecar_with_cards_are_charged_as_the_kubelet_gives_cards(
    cluster: Cluster, release: Release
) -> None:
    sidecar = {**container(WAITS, 1, "sidecar"), "restartPolicy": "Always"}
    inits = [container("exit 0", 2, "setup"), sidecar]
    run(cluster, pod("three", "team-cards", container(SHOWS_CARDS, 2), initContainers=inits))
    assert len(shown_cards(cluster, "team-cards", "three")) == 2
    release.await_charged("team-cards", 3)
    remove(cluster, "team-cards")


def test_a_deployment_at_full_quota_runs_and_rolls_over(cluster: Cluster, release: Release) -> None:
    strategy = {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    template = pod("", "team-full", container(WAITS), restartPolicy="Always")
    cluster.create(workload("Deployment", "serve", "team-full", template, replicas=4, strategy=strategy))
    rollout = ("--namespace", "team-full", "rollout")
    cluster.kubectl(*rollout, "status", "deployment/serve", "--timeout=110s")
    cluster.kubectl(*rollout, "restart", "deployment/serve")
    cluster.kubectl(*rollout, "status", "deployment/serve", "--timeout=110s")
    pods = cluster.await_pods("team-full", lambda pods: len(pods) == 4 and all(map(is_running, pods)))
    assert {each["spec"]["containers"][0]["image"] for each in pods} == {IMAGE}
    release.await_charged("team-full", 4)
    cluster.kubectl("--namespace", "team-full", "delete", "deployment/serve")
    cluster.await_pods("team-full", lambda pods: not pods)


def test_a_job_of_twenty_pods_completes_on_two_cards(cluster: Cluster, release: Release) -> None:
    template = pod("", "team-job", container("exit 0"))
    cluster.create(workload("Job", "batch", "team-job", template, completions=20, parallelism=20, backoffLimit=0))
    jobs = "/apis/batch/v1/namespaces/team-job/jobs"
    cluster.await_object(jobs, "batch", lambda job: job["status"].get("succeeded") == 20, 400)
    release.await_charged("team-job", 0)


def test_the_usage_page_is_served_through_port_forward(cluster: Cluster, release: Release) -> None:
    [port] = free_ports(1)
    forward = (cluster.kubectl_program, f"--kubeconfig={cluster.kubeconfig}", "--namespace", SYSTEM_NAMESPACE)
    with subprocess.Popen((*forward, "port-forward", f"pod/{release.leading_pod()}", f"{port}:8088")) as forwarding:
        try:
            eventually(lambda: b"team-cards" in page(port), "the page does not name team-cards".__str__)
        finally:
            forwarding.terminate()


def page(port: int) -> bytes:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/usage.json", timeout=5) as answer:
            return bytes(answer.read())
    except OSError:
        return b""
