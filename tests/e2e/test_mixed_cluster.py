"""Tests of a cluster in which some nodes run HAMi, and the others NVIDIA's device plugin. Each pod gets a node that its
scheduler serves.

A kube-scheduler with an extender replaces HAMi's scheduler here, and does not count HAMi's resources. Like HAMi's
scheduler, the extender skips every node without HAMi's register, the annotation that lists the node's cards (HAMi 2.10
pkg/scheduler/scheduler.go, `getNodesUsage`: "node unregistered").
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.builders import MODEL, POOL
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import Installation, await_nodes, installed
from tests.e2e.manifests.operations import commands
from tests.e2e.second_scheduler import extended_scheduler
from tests.integration.reviews import gpu_pod
from tests.processes import SCRIPTS
from tools.control_plane import ControlPlane
from vcuda.requests.schemes import HAMI

NAME = "hami-scheduler"
REGISTER, HANDSHAKE = str(HAMI.register), str(HAMI.handshake)
CARD = {"id": "GPU-0055", "count": 10, "devmem": 40960, "devcore": 100, "type": "NVIDIA A100-SXM4-40GB", "health": True}

WHOLE = {"nvidia.com/gpu": "1"}
SHARE = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}
MIG = {"nvidia.com/mig-1g.10gb": "1"}
IGNORED = {"hami.io/webhook": "ignore"}

NODES = {"h1": "A100", "p1": "T4", "h2": "H100", "p2": "H100", "left": "L40S"}
"""The model of each node. HAMi runs on h1 and h2, and NVIDIA's device plugin on the others.

So there are H100 nodes of both kinds. HAMi once ran on the node ``left``, which still has HAMi's annotations. HAMi's
scheduler has marked this node as not answering.
"""
OFFERED = {"left": "1"}
"""The number of nvidia.com/gpu that a node offers, if it is not 8."""

pytestmark = [pytest.mark.usefixtures("scheduler"), pytest.mark.one_version]


def is_registered(annotations: Json) -> bool:
    """Return whether HAMi's scheduler uses a node with these annotations.

    HAMi skips a node whose device plugin no longer answers HAMi's handshake (``RegisterFromNodeAnnotations``).
    """
    return REGISTER in annotations and not annotations.get(HANDSHAKE, "").startswith("Deleted")


def decide(asked: Json) -> Json:
    """Return the nodes that HAMi would take for the pod, as an ExtenderFilterResult of ``extender/v1``."""
    nodes = asked["Nodes"]["items"]
    registered = [node for node in nodes if is_registered(node["metadata"].get("annotations", {}))]
    others = {node["metadata"]["name"]: "node unregistered" for node in nodes if node not in registered}
    return {"Nodes": {**asked["Nodes"], "items": registered}, "FailedNodes": others, "Error": ""}


def hami_scheduler(control_plane: ControlPlane, directory: Path) -> AbstractContextManager[None]:
    managed = [{"name": name, "ignoredByScheduler": True} for name in HAMI.resources]
    return extended_scheduler(control_plane, directory, NAME, decide, managedResources=managed)


@pytest.fixture(scope="module")
def mixed(
    cluster: Cluster, control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    labels = {name: {MODEL: model, POOL: "mixed-cluster"} for name, model in NODES.items()}
    for name, own in labels.items():
        cluster.create_node(name, own, {"nvidia.com/gpu": OFFERED.get(name, "8"), "nvidia.com/mig-1g.10gb": "7"})
        if not name.startswith("p"):
            handshake = {HANDSHAKE: "Deleted_2026.11.24 10:00:00"} if name in OFFERED else {}
            registers = {"metadata": {"annotations": {REGISTER: json.dumps([CARD]), **handshake}}}
            cluster.rest.merge_patch(f"/api/v1/nodes/{name}", registers)
    flags = ("--scheme-schedulers", f"hami={NAME}")
    with (
        hami_scheduler(control_plane, tmp_path_factory.mktemp("hami")),
        installed(cluster, tmp_path_factory.mktemp("mixed"), flags=flags) as installation,
    ):
        await_nodes(installation, *labels.values())
        yield installation
    for name in NODES:
        cluster.delete_node(name)


@pytest.fixture
def team(mixed: Installation) -> Iterator[str]:
    limits = {"T4": 4, "A100": 4, "H100": 4, "L40S": 4}
    with mixed.team({"pool": ["mixed-cluster"], "quota": limits}) as namespace:
        yield namespace


@pytest.mark.parametrize(
    ("limits", "labels", "selector", "node", "scheduler"),
    [
        pytest.param(WHOLE, {}, {}, "p1", "default-scheduler", id="cards, on plain nodes"),
        pytest.param(WHOLE, IGNORED, {MODEL: "T4"}, "p1", "default-scheduler", id="cards that opt out of HAMi"),
        pytest.param(WHOLE, {}, {MODEL: "A100"}, "h1", NAME, id="cards, on nodes of HAMi"),
        pytest.param(WHOLE, {}, {MODEL: "H100"}, "h2", NAME, id="cards, on a model with both kinds of nodes"),
        pytest.param(WHOLE, IGNORED, {MODEL: "H100"}, "p2", "default-scheduler", id="that opt out there"),
        pytest.param(
            WHOLE, {}, {MODEL: "L40S"}, "left", "default-scheduler", id="cards, where HAMi has left a register"
        ),
        pytest.param(SHARE, {}, {}, "h1", NAME, id="a share"),
        pytest.param(MIG, {}, {}, "h1", "default-scheduler", id="a MIG slice, on a model with MIG"),
    ],
)
def test_each_pod_is_bound_to_a_node_that_its_scheduler_serves(
    *, cluster: Cluster, team: str, limits: Json, labels: Json, selector: Json, node: str, scheduler: str
) -> None:
    manifest = gpu_pod("train", team, limits, labels=labels)
    manifest["spec"]["nodeSelector"] = selector
    cluster.create(manifest)
    spec = cluster.await_bound(team)["spec"]
    assert (spec["nodeName"], spec["schedulerName"]) == (node, scheduler)


def test_the_commands_of_the_page_show_the_models_and_the_fate_of_a_pod(
    cluster: Cluster, team: str, tmp_path: Path
) -> None:
    listed, explained = commands("Set it up")
    share = gpu_pod("train", team, SHARE)
    (tmp_path / "pod.yaml").write_text(json.dumps(share))
    told = typed(cluster, listed, tmp_path)
    models = {line.split()[0]: line.split()[-1] for line in told.splitlines()}
    assert {name: models[name] for name in NODES} == NODES
    assert "would be pinned to A100: the first in" in typed(cluster, explained, tmp_path)


def typed(cluster: Cluster, script: str, directory: Path) -> str:
    path = f"{SCRIPTS}{os.pathsep}{cluster.control_plane.assets}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "PATH": path}
    done = subprocess.run(
        ("sh", "-ec", script), cwd=directory, env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
