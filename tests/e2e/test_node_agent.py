"""Tests of the node agent, which deletes the directories of deleted pods, with a real API server.

While a list of pods is unreliable, the agent deletes nothing. No kubelet runs here, so the tests create the kubelet's
directories and set the status of pods.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.nested import nest
from tests.integration.node.disk import Disk, snapshot, uid
from tests.integration.reviews import card_pod
from tests.processes import NodeProcess
from tools.control_plane import ControlPlane
from vcuda.kube import Kube

pytestmark = [pytest.mark.slow, pytest.mark.one_version]

PERIOD, GRACE = 0.5, 2.0


def sweeping(cluster: Cluster, disk: Disk, node: str, *more: str | Path) -> NodeProcess:
    """Run a node agent with the rights of ``cluster``'s user. ``more``: more flags, which override the usual flags."""
    return NodeProcess(
        *("--scheme", disk.scheme, "--root", disk.root, "--node", node, "--kubeconfig", cluster.kubeconfig),
        *("--kubelet-pods", disk.kubelet, "--status-address", "127.0.0.1:0"),
        *("--period", str(PERIOD), "--grace", str(GRACE)),
        *more,
    )


@pytest.fixture
def disk() -> Iterator[Disk]:
    """The disk of a node. At the end, files outside the agent's directory must be unchanged."""
    with tempfile.TemporaryDirectory(prefix="vm-directories-") as base:
        disk = Disk(Path(base))
        disk.furnish()
        with disk.untouched():
            yield disk


@pytest.fixture
def node(create_node: Callable[..., str]) -> str:
    return create_node("gpu-7")


class Pods:
    """The pods of one node, and their directories on its disk."""

    def __init__(self, cluster: Cluster, namespace: str, node: str, disk: Disk) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.node = node
        self.disk = disk

    def start(self, name: str, **metadata: object) -> str:
        pod = card_pod(name, self.namespace)
        pod = {**pod, "metadata": {**pod["metadata"], **metadata}, "spec": {**pod["spec"], "nodeName": self.node}}
        made = str(self.cluster.create(pod)["metadata"]["uid"])
        self.make(made)
        return made

    def make(self, name: str) -> str:
        os.utime(self.disk.make(name), (time.time() - 3600,) * 2)
        return name

    def delete(self, name: str) -> None:
        self.cluster.delete_pod(self.namespace, name)


@pytest.fixture
def pods(cluster: Cluster, namespace: str, node: str, disk: Disk) -> Pods:
    return Pods(cluster, namespace, node, disk)


@pytest.fixture
def own(pods: Pods, disk: Disk) -> str:
    made = pods.start("vcuda-node")
    (disk.kubelet / made).mkdir()
    return made


@pytest.fixture
def agent(cluster: Cluster, disk: Disk, node: str, own: str) -> Iterator[NodeProcess]:
    with sweeping(cluster, disk, node, "--pod-uid", own) as process:
        process.await_sweeps(1)
        yield process


def test_a_directory_stays_while_its_pod_is_in_the_api_in_any_phase(
    cluster: Cluster, pods: Pods, agent: NodeProcess, disk: Disk
) -> None:
    pending, running, done, failed = (pods.start(name) for name in ("pending", "running", "done", "failed"))
    cluster.run_pod(pods.namespace, "running")
    cluster.finish_pod(pods.namespace, "done", "Succeeded")
    cluster.finish_pod(pods.namespace, "failed", "Failed")
    terminating = pods.start("terminating")
    cluster.rest.send(
        "DELETE", f"/api/v1/namespaces/{pods.namespace}/pods/terminating", {"gracePeriodSeconds": 600}
    ).ok()
    gone = pods.make(uid(1))
    alive = {name: snapshot(disk.root / name) for name in (pending, running, done, failed, terminating)}

    agent.await_deleted(gone)
    agent.await_sweeps(5)
    assert {name: snapshot(disk.root / name) for name in alive} == alive
    for name, its in (("done", done), ("terminating", terminating), ("running", running)):
        pods.delete(name)
        agent.await_deleted(its)
    assert {pending, failed} <= disk.names()


def test_a_nested_pod_keeps_its_directory_and_stops_no_sweep(
    kube: Kube, pods: Pods, agent: NodeProcess, disk: Disk, own: str
) -> None:
    nested = pods.start("nested")
    nest(kube, f"/api/v1/namespaces/{pods.namespace}/pods/nested")
    agent.await_deleted(pods.make(uid(1)))
    agent.terminate()
    with sweeping(pods.cluster, disk, pods.node, "--pod-uid", own) as again:
        again.await_deleted(pods.make(uid(2)))
        assert nested in disk.names()
        pods.delete("nested")
        again.await_deleted(nested)


def test_nothing_is_deleted_while_the_api_server_is_down_and_a_starting_agent_waits(
    control_plane: ControlPlane, pods: Pods, cluster: Cluster, *, disk: Disk, node: str, own: str
) -> None:
    alive, gone = pods.start("alive"), pods.make(uid(1))
    with sweeping(cluster, disk, node, "--pod-uid", own) as agent:
        agent.await_sweeps(1)
        apiserver = control_plane.apiserver
        with apiserver.away(apiserver.kill), sweeping(cluster, disk, node, "--pod-uid", own) as fresh:
            fresh.await_sweeps(3, "blocked")
            agent.await_metric("vcuda_vm_directories_kept", 1, reason="pods-unknown")
            agent.await_sweeps(8, "blocked")
            assert fresh.get("/readyz").status == HTTPStatus.SERVICE_UNAVAILABLE
            assert {agent.get("/healthz").status, fresh.get("/healthz").status} == {HTTPStatus.OK}
            assert disk.names() == {own, alive, gone}
        agent.await_deleted(gone)
    assert disk.names() == {own, alive}


def test_the_agent_serves_health_and_metrics_and_stops_on_sigterm(agent: NodeProcess, pods: Pods) -> None:
    agent.await_deleted(pods.make(uid(1)))
    agent.await_sweeps(1)
    assert {agent.get(path).status for path in ("/healthz", "/readyz", "/metrics")} == {HTTPStatus.OK}
    assert agent.metric("vcuda_vm_directories_present") == 1
    assert agent.metric("vcuda_vm_directories_deleted_total") == 1
    assert agent.metric("vcuda_vm_directories_kept", reason="pod") == 1
    assert agent.metric("vcuda_vm_last_complete_sweep_timestamp_seconds") > 0
    assert agent.terminate() == 0
    assert agent.logs("stopped")
