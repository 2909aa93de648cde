"""Starts a node in the namespaces of `run`: containerd, kubelet, kube-proxy, and the device plugins of its GPUs."""

import hashlib
import io
import json
import os
import socket
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.cluster import Cluster, Json
from tools.component import Component, Probe
from tools.control_plane import NODE, ControlPlane, write_kubeconfig
from tools.ports import free_ports

NAME, ADDRESS, BRIDGE = "node-1", "10.88.0.1", "cni0"
KUBELET_USER, PROXY_USER = f"{NODE}{NAME}", "system:kube-proxy"
PRODUCT = "NVIDIA-H100-80GB-HBM3"
CARDS, SLICES = ("GPU-0", "GPU-1", "GPU-2", "GPU-3"), ("MIG-0", "MIG-1")
RESOURCES: Mapping[str, Sequence[str]] = {"nvidia.com/gpu": CARDS, "nvidia.com/mig-1g.10gb": SLICES}
PAUSE = "registry.local/pause:1"
START_SECONDS = 180


@dataclass(frozen=True)
class Node:
    """A running node, whose components the caller may ``kill``, ``stop`` and ``start``.

    ``plugins``: the device plugins by resource.
    """

    directory: Path
    containerd: Component
    kubelet: Component
    proxy: Component
    plugins: Mapping[str, Component]

    def allocated(self, resource: str) -> list[str]:
        """Return the ids of devices that the plugin gave to containers, one set per container, in order of time."""
        return [line.split()[-1] for line in self.plugins[resource].log.read_text().splitlines() if "allocated" in line]


@contextmanager
def running_node(
    plane: ControlPlane, cluster: Cluster, directory: Path, programs: Sequence[Path], images: Sequence[Path]
) -> Iterator[Node]:
    """Return a context in which the node runs and offers its GPUs.

    ``programs``: the directories with kubelet and kube-proxy, and with real-node. ``images``: archives of the images
    that pods use. Other images cannot be pulled.
    """
    node = prepare(plane, directory, *programs)
    pause = directory / "pause.tar"
    write_image(pause, PAUSE, programs[1] / "real-node", ["/real-node", "pause"])
    with ExitStack() as teardown:

        def start(component: Component) -> None:
            teardown.callback(component.stop)
            component.start()

        start(node.containerd)
        for image in (pause, *images):
            load(node, image)
        for component in (node.proxy, node.kubelet, *node.plugins.values()):
            start(component)
        cluster.await_object("/api/v1/nodes", NAME, offers_gpus, START_SECONDS)
        yield node


def offers_gpus(node: Json) -> bool:
    """Return whether the node is ready, has all its devices, and has no taint that keeps pods away."""
    allocatable, conditions = node["status"].get("allocatable", {}), node["status"].get("conditions", [])
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    devices = all(allocatable.get(name) == str(len(ids)) for name, ids in RESOURCES.items())
    return ready and devices and not node["spec"].get("taints")


def prepare(plane: ControlPlane, directory: Path, kubernetes: Path, tools: Path) -> Node:
    """Write the files that the node's programs read. Return the programs, which are not started yet."""
    state = Path(os.environ["REAL_STATE"])
    ports = _, health, proxy_health, metrics = free_ports(4)
    for user in (KUBELET_USER, PROXY_USER):
        write_kubeconfig(directory / f"{user}.kubeconfig", plane.server, plane.ca_file, plane.tokens[user])
    (directory / "cni").mkdir()
    (directory / "cni" / "10-bridge.conflist").write_text(json.dumps(network(state)))
    address = state / "containerd.sock"
    (directory / "containerd.toml").write_text(containerd_settings(directory, state, address))
    (directory / "static").mkdir()
    settings = kubelet_settings(directory, f"unix://{address}", ports)
    (directory / "kubelet.yaml").write_text(json.dumps(settings))

    def component(name: str, ready: object, *command: str | Path) -> Component:
        assert callable(ready)
        return Component(name, tuple(map(str, command)), directory / f"{name}.log", ready, START_SECONDS)

    kubelet = component(
        "kubelet",
        Probe(health, "/healthz"),
        kubernetes / "kubelet",
        f"--config={directory / 'kubelet.yaml'}",
        f"--kubeconfig={directory / f'{KUBELET_USER}.kubeconfig'}",
        f"--hostname-override={NAME}",
        f"--node-ip={ADDRESS}",
        f"--node-labels=nvidia.com/gpu.product={PRODUCT}",
        f"--cert-dir={state / 'kubelet-certificates'}",
    )
    proxy = component(
        "kube-proxy",
        Probe(proxy_health, "/livez"),
        kubernetes / "kube-proxy",
        f"--kubeconfig={directory / f'{PROXY_USER}.kubeconfig'}",
        "--proxy-mode=iptables",
        f"--hostname-override={NAME}",
        f"--healthz-bind-address=127.0.0.1:{proxy_health}",
        f"--metrics-bind-address=127.0.0.1:{metrics}",
        # The limits of connection tracking cannot be changed in a network namespace.
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0s",
        "--conntrack-tcp-timeout-close-wait=0s",
    )
    return Node(
        directory,
        component("containerd", Listens(address), "containerd", f"--config={directory / 'containerd.toml'}"),
        kubelet,
        proxy,
        {
            name: component(name.replace("/", "-"), Registered(name), tools / "real-node", "cards", name, *ids)
            for name, ids in RESOURCES.items()
        },
    )


@dataclass(frozen=True)
class Listens:
    """A condition that is true if a server listens on the Unix socket ``path``."""

    path: Path

    def __call__(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(self.path)) == 0


@dataclass(frozen=True)
class Registered:
    """A condition that is true if the device plugin of ``resource`` has its socket in the kubelet's directory."""

    resource: str

    def __call__(self) -> bool:
        return (Path("/var/lib/kubelet/device-plugins") / f"{self.resource.replace('/', '-')}.sock").exists()


def network(state: Path) -> Json:
    """Return the configuration of the pod network, which is a bridge with the address ``ADDRESS``."""
    addresses = {"subnet": "10.88.0.0/16", "rangeStart": "10.88.1.1"}
    ipam = {"type": "host-local", "ranges": [[addresses]], "routes": [{"dst": "0.0.0.0/0"}], "dataDir": f"{state}/cni"}
    bridge = {"type": "bridge", "bridge": BRIDGE, "isGateway": True, "ipMasq": True, "hairpinMode": True, "ipam": ipam}
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}],
    }


def containerd_settings(directory: Path, state: Path, address: Path) -> str:
    return f"""version = 2
root = "{state}/containerd"
state = "/run/containerd"
[grpc]
address = "{address}"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
# Some machines do not permit a lower value than that of the parent process.
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{directory}/cni"
"""


def kubelet_settings(directory: Path, runtime: str, ports: Sequence[int]) -> Json:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        # Only programs in the node's network namespace can reach the kubelet.
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "address": ADDRESS,
        "port": ports[0],
        "healthzPort": ports[1],
        "readOnlyPort": 0,
        "containerRuntimeEndpoint": runtime,
        "staticPodPath": f"{directory}/static",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{os.environ['REAL_CGROUP']}",
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "localStorageCapacityIsolation": False,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "fileCheckFrequency": "1s",
        "maxPods": 250,
    }


def load(node: Node, archive: Path) -> None:
    """Load the images of a docker archive into containerd, from which the kubelet takes them."""
    address = f"--address={os.environ['REAL_STATE']}/containerd.sock"
    command = ("ctr", address, "--namespace=k8s.io", "images", "import", str(archive))
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, node.containerd.failure(done.stderr)


def write_image(archive: Path, name: str, program: Path, command: Sequence[str]) -> None:
    """Write a docker archive of an image that runs ``command``. The image's only file is ``program``."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as files:
        files.add(program, program.name)
    content = layer.getvalue()
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": command},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(content).hexdigest()}"]},
        }
    ).encode()
    index = json.dumps([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    with tarfile.open(archive, "w") as files:
        for path, data in (("layer.tar", content), ("config.json", config), ("manifest.json", index)):
            about = tarfile.TarInfo(path)
            about.size = len(data)
            files.addfile(about, io.BytesIO(data))
