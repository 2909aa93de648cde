"""Tests of the node agent as a DaemonSet. It removes directories of deleted pods, and keeps those of living pods."""

from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.helm import CHART
from tests.processes import eventually
from tests.real.node import NAME
from tests.real.pods import IGNORES_TERM, container, pod, run
from tests.real.release import Release, processes

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

TEAM, AGENTS, AGENT = "team-life", "vcuda-quota-node", "vcuda-node-gpu-manager"
ROOT = Path("/etc/gpu-manager/vm")
QUICKLY = [
    {"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": f"--{flag}"}
    for flag in ("grace=2", "period=0.5")
]


@pytest.fixture
def agent(cluster: Cluster, release: Release) -> None:
    cluster.kubectl("label", "node", NAME, "nvidia-device-enable=enable", "--overwrite")
    release.helm(f"upgrade vcuda-quota {CHART}", "--set=nodeAgent.gpuManager=true")
    cluster.rest.json_patch(f"/apis/apps/v1/namespaces/{AGENTS}/daemonsets/{AGENT}", QUICKLY)
    cluster.kubectl("--namespace", AGENTS, "rollout", "status", f"daemonset/{AGENT}", "--timeout=110s")


@pytest.mark.usefixtures("agent")
def test_a_directory_is_kept_while_the_container_of_its_pod_lives_and_is_removed_later(cluster: Cluster) -> None:
    """The pod is deleted by force, so the API server no longer has the pod while its container lives."""
    uids = {}
    for name in ("kept", "forced"):
        manifest = pod(name, TEAM, container(IGNORES_TERM), terminationGracePeriodSeconds=20)
        uids[name] = run(cluster, manifest)["metadata"]["uid"]
        (ROOT / uids[name]).mkdir(parents=True)
    cluster.delete_by_force(TEAM, "forced")

    def removed() -> bool:
        exists = (ROOT / uids["forced"]).exists()
        assert exists or not processes(uids["forced"]), "the directory was removed before the container ended"
        return not exists

    eventually(removed, timeout=150)
    assert (ROOT / uids["kept"]).exists()
    cluster.rest.send("DELETE", f"/api/v1/namespaces/{TEAM}/pods/kept").ok()
    eventually(lambda: not (ROOT / uids["kept"]).exists(), timeout=150)
