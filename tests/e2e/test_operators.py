"""Tests of other projects' operators, which create pods or nodes for pods, on a real control plane.

`make operators` builds KubeRay and Karpenter, and runs these tests. The builds take long, so `make e2e` leaves these
tests out.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.builders import MODEL
from tests.documented import documented
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import Installation
from tests.e2e.ledgers import await_committed
from tests.e2e.schemas import KARPENTER, KUBERAY, definitions_in, serving
from tests.integration.reviews import gpu_pod
from tools.component import Component
from tools.ports import free_ports

pytestmark = [pytest.mark.operators, pytest.mark.timeout(300)]

CARD = "nvidia.com/gpu"
PATIENCE = 90
"""The maximum number of seconds until an operator retries. Operators retry at growing intervals."""


@pytest.fixture
def team(led_team: Callable[[Json], str], create_node: Callable[..., str]) -> str:
    """A namespace whose quota is two A100. The node with A100 in its cluster has no free card."""
    create_node("a100-1", {MODEL: "A100"})
    return led_team({"quota": {"A100": 2}})


@contextmanager
def operator(
    cluster: Cluster, directory: Path, name: str, flags: Callable[[int, int], tuple[str, ...]], **env: str | Path
) -> Iterator[Path]:
    """Run an operator during the ``with`` statement, and yield the file of its log.

    ``flags``: returns the operator's flags for two ports: that of its metrics, and that of its health probe.
    """
    metrics, health = free_ports(2)
    program = Path(os.environ["OPERATORS"], name)
    log = directory / f"{name}.log"
    variables = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), **{key: str(value) for key, value in env.items()}}
    command = (str(program), *flags(metrics, health))
    with Component(name, command, log, lambda: is_healthy(health), 60, variables).started():
        yield log


def is_healthy(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except OSError:
        return False


def documented_in(namespace: str, kind: str) -> Json:
    found = documented(kind)
    found["metadata"]["namespace"] = namespace
    return found


def take_a_card(cluster: Cluster, installation: Installation, team: str) -> None:
    cluster.create(gpu_pod("other", team, {CARD: 1}))
    await_committed(installation, team, A100=100)


def workers(cluster: Cluster, team: str) -> list[Json]:
    return [pod for pod in cluster.pods(team) if "ownerReferences" in pod["metadata"] and has_card(pod)]


def has_card(pod: Json) -> bool:
    return any(CARD in each.get("resources", {}).get("limits", {}) for each in pod["spec"]["containers"])


def test_kuberay_reports_a_rejected_worker_and_creates_it_when_quota_is_free(
    cluster: Cluster, installation: Installation, team: str, tmp_path: Path
) -> None:
    """The RayCluster in the documentation has two workers, and each requests a card."""

    def flags(metrics: int, health: int) -> tuple[str, ...]:
        addresses = (f"--metrics-addr=127.0.0.1:{metrics}", f"--health-probe-bind-address=127.0.0.1:{health}")
        return (f"--watch-namespace={team}", "--enable-leader-election=false", *addresses)

    take_a_card(cluster, installation, team)
    definitions = definitions_in({KUBERAY: "config/crd/bases"})
    with serving(cluster, definitions), operator(cluster, tmp_path, "ray-operator", flags):
        ray = documented_in(team, "RayCluster")
        cluster.create(ray)
        [event, *_] = cluster.await_events(team, "reason=FailedToCreateWorkerPod")
        assert f"exceeded quota: A100 in namespace {team}" in event["message"]
        found = cluster.await_object(
            cluster.path_of(ray), "ray", lambda each: condition(each, "ReplicaFailure") == "True"
        )
        assert found["metadata"]["name"] == "ray"
        assert len(workers(cluster, team)) == 1
        cluster.delete_pod(team, "other")
        cluster.await_pods(team, lambda pods: sum(map(has_card, pods)) == 2, PATIENCE)
        await_committed(installation, team, A100=200)
        cluster.delete(f"{cluster.path_of(ray)}/ray")


def condition(found: Json, name: str) -> str | None:
    conditions = found.get("status", {}).get("conditions", [])
    return next((each["status"] for each in conditions if each["type"] == name), None)


A100_MACHINE = {
    "name": "p4d.24xlarge",
    "offerings": [
        {
            "Price": 32.0,
            "Available": True,
            "Requirements": [
                {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["on-demand"]},
                {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["zone-a"]},
            ],
        }
    ],
    "architecture": "amd64",
    "operatingSystems": ["linux"],
    "resources": {"cpu": "96", "memory": "1152Gi", "ephemeral-storage": "20Gi", "nvidia.com/gpu": "8"},
}
"""A type of machine with eight GPUs, in the format of Karpenter's KWOK provider."""
NODE_CLAIMS = "/apis/karpenter.sh/v1/nodeclaims"
NODE_POOLS = "/apis/karpenter.sh/v1/nodepools"
NODE_CLASSES = "/apis/karpenter.kwok.sh/v1alpha1/kwoknodeclasses"


@pytest.fixture
def karpenter(cluster: Cluster, tmp_path: Path) -> Iterator[None]:
    """Run Karpenter with its KWOK provider, whose nodes are simulated."""

    def flags(metrics: int, health: int) -> tuple[str, ...]:
        return (f"--metrics-port={metrics}", f"--health-probe-port={health}", f"--instance-types-file-path={machines}")

    machines = tmp_path / "machines.json"
    machines.write_text(json.dumps([A100_MACHINE]))
    definitions = [*definitions_in({KARPENTER: "pkg/apis/crds"}), *definitions_in({KARPENTER: "kwok/apis/crds"})]
    node_class = {"apiVersion": "karpenter.kwok.sh/v1alpha1", "kind": "KWOKNodeClass", "metadata": {"name": "default"}}
    env = {"DISABLE_LEADER_ELECTION": "true", "KARPENTER_SERVICE": "karpenter"}
    with serving(cluster, definitions), operator(cluster, tmp_path, "karpenter", flags, **env):
        cluster.rest.send("POST", NODE_CLASSES, {**node_class, "spec": {}}).ok()
        yield


def node_pool(labels: Mapping[str, str]) -> Json:
    """Return the NodePool in the documentation with these labels for its nodes, and the node class of KWOK."""
    found = documented("NodePool")
    template = found["spec"]["template"]
    template["metadata"] = {"labels": dict(labels)}
    template["spec"]["nodeClassRef"] = {"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": "default"}
    return found


@pytest.mark.usefixtures("karpenter")
def test_karpenter_adds_a_node_for_an_admitted_pod_only_if_the_nodepool_has_the_model_label(
    cluster: Cluster, led_team: Callable[[Json], str]
) -> None:
    """For a rejected pod, no node is added. An admitted pod waits, and its Event names the missing label."""
    team = led_team({"quota": {"A100": 1}})
    pool = cluster.rest.send("POST", NODE_POOLS, node_pool({})).ok()
    assert cluster.try_create(gpu_pod("rejected", team, {CARD: 2})).is_over_quota
    cluster.create(gpu_pod("admitted", team, {CARD: 1}))
    unknown = f'label "{MODEL}" does not have known values'
    cluster.await_events(
        team, "reason=FailedScheduling", lambda events: any(unknown in each["message"] for each in events)
    )
    assert cluster.rest.get(NODE_CLAIMS)["items"] == []
    labelled = {"spec": {"template": {"metadata": {"labels": {MODEL: "A100"}}}}}
    cluster.rest.merge_patch(f"{NODE_POOLS}/{pool['metadata']['name']}", labelled)
    [found] = cluster.await_collection(NODE_CLAIMS, bool, PATIENCE)
    assert found["metadata"]["labels"][MODEL] == "A100"
    # Karpenter must remove the finalizers of these objects, so delete the objects while it runs.
    cluster.delete_pod(team, "admitted")
    cluster.delete(f"{NODE_POOLS}/{pool['metadata']['name']}")
    cluster.await_collection(NODE_CLAIMS, lambda left: not left, PATIENCE)
