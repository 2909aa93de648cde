"""The cluster of the playground: a real control plane, a substitute for HAMi's scheduler, and simulated nodes."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from examples.discovery import A100_PRODUCT, T4, features, hami
from examples.playground.programs import Programs
from tools.component import Component, Probe
from tools.control_plane import SCHEDULER, ControlPlane, Settings, running_control_plane
from tools.ports import free_ports
from vcuda.errors import NotFound
from vcuda.kube import MERGE_PATCH, Kube
from vcuda.requests.schemes import HAMI

Json = dict[str, Any]

HAMI_SCHEDULER = "hami-scheduler"
START_SECONDS = 60.0
MACHINE = {"cpu": "64", "memory": "256Gi", "pods": "250"}
CARDS_PER_NODE = 4
SHARES_PER_CARD = 2
"""The number of pods that can share one card of a simulated node."""


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    ``programs``: the programs of the cluster.
    ``plane``: the control plane.
    ``kube``: an API client with the rights of the administrator.
    """

    programs: Programs
    plane: ControlPlane
    kube: Kube


@contextmanager
def running_cluster(programs: Programs, directory: Path) -> Iterator[Cluster]:
    """Start a control plane without nodes: etcd, kube-apiserver, kube-scheduler and kube-controller-manager.

    ``directory``: the directory of their files.

    Raises StartupError if a program does not start.
    """
    # With this flag, the API server calls the webhook's Service at its external name, which is this machine.
    flags = ("--enable-aggregator-routing=false",)
    settings = Settings(users=(), apiserver_flags=flags, startup_timeout=START_SECONDS, own_identities=True)
    with (
        running_control_plane(programs.directory, directory, settings) as plane,
        closing(Kube.connect(plane.kubeconfig)) as kube,
    ):
        yield Cluster(programs, plane, kube)


def hami_scheduler(cluster: Cluster) -> Component:
    """Return a kube-scheduler that has the name of HAMi's scheduler, and runs in place of it.

    This scheduler considers the vGPUs of a pod, but ignores their cores and memory. So a node must not offer more
    vGPUs than its cards have cores and memory for.
    """
    directory, [port] = cluster.plane.directory, free_ports(1)
    shares = {"ignoredResources": [name for name in HAMI.resources if name != HAMI.main_resource]}
    profile = {"schedulerName": HAMI_SCHEDULER, "pluginConfig": [{"name": "NodeResourcesFit", "args": shares}]}
    config = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(directory / f"{SCHEDULER}.kubeconfig")},
        "leaderElection": {"leaderElect": False},
        "profiles": [profile],
    }
    file, certificates = directory / "hami-scheduler.json", directory / "certs-hami-scheduler"
    file.write_text(json.dumps(config))
    flags = (f"--config={file}", "--bind-address=127.0.0.1", f"--secure-port={port}", f"--cert-dir={certificates}")
    command = (str(cluster.programs.path_of(SCHEDULER)), *flags)
    ready = Probe(port, "/healthz", certificates / f"{SCHEDULER}.crt")
    return Component(HAMI_SCHEDULER, command, directory / "hami-scheduler.log", ready, START_SECONDS)


def kwok(cluster: Cluster) -> Component:
    """Return the process to start for kwok, which acts as the kubelet of every node."""
    [port] = free_ports(1)
    flags = (
        f"--kubeconfig={cluster.plane.kubeconfig}",
        "--manage-all-nodes=true",
        "--cidr=10.9.0.0/16",
        "--node-ip=10.8.0.1",
        f"--server-address=127.0.0.1:{port}",
        *(f"--config={stage}" for stage in cluster.programs.stages),
    )
    command = (str(cluster.programs.path_of("kwok")), *flags)
    return Component("kwok", command, cluster.plane.directory / "kwok.log", Probe(port, "/healthz"), START_SECONDS)


def nodes() -> Iterator[Json]:
    """Yield 2 nodes with 4 A100 cards each, and 4 nodes with 4 T4 cards each. With HAMi, pods can share T4 cards."""
    cards = str(CARDS_PER_NODE)
    for number in (1, 2):
        yield _node(f"a100-{number}", features(A100_PRODUCT, cards, "40960", cards))
    for number in (1, 2, 3, 4):
        offered = str(CARDS_PER_NODE * SHARES_PER_CARD)
        yield _node(f"t4-{number}", hami(*[T4] * CARDS_PER_NODE, offered=offered, memory=15360))


def _node(name: str, described: Json) -> Json:
    quantities = {**MACHINE, **described["allocatable"]}
    labels = {"kubernetes.io/hostname": name, **described.get("labels", {})}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels, "annotations": described.get("annotations", {})},
        "status": {"capacity": quantities, "allocatable": quantities},
    }


def create_nodes(kube: Kube, manifests: Sequence[Json]) -> None:
    """Create the nodes, and remove their taints, so that the schedulers place pods on them."""
    for manifest in manifests:
        kube.post("/api/v1/nodes", msgspec.json.encode(manifest))
        # The API server adds a taint to every new node. Kubernetes' controller would remove the taint only after a
        # kubelet has created a Lease, and no kubelet runs here.
        untainted = msgspec.json.encode({"spec": {"taints": None}})
        kube.patch(f"/api/v1/nodes/{manifest['metadata']['name']}", untainted, MERGE_PATCH)


def read_json(kube: Kube, path: str) -> Json | None:
    """Return the object at this path of the API server; None if it does not exist."""
    try:
        return msgspec.json.decode(kube.get(path), type=Json)
    except NotFound:
        return None
