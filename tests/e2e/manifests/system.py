"""The whole system as processes: everything that the manifests start, with its flags and its account's token."""

from __future__ import annotations

import subprocess
import sysconfig
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from pathlib import Path

from tests.e2e.cluster import Cluster
from tests.e2e.controller_process import ControllerProcess, drop_lease
from tests.e2e.installation import SYSTEM_NAMESPACE, poll
from tests.e2e.manifests.addresses import apply, reachable
from tests.e2e.manifests.balancer import Balancer, balancing
from tests.e2e.manifests.workload import account_of, command_of, mount_secret
from tests.e2e.rest import Json
from tests.integration.webhook_process import WebhookProcess
from tests.processes import OwnProcess
from tests.rendered import one, rendered

SCRIPTS = Path(sysconfig.get_path("scripts"))
COMPONENTS = ("kubernetes-1.20",)
NODE = "gpu-1"
LEFT_BEHIND = (
    f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets/vcuda-webhook-ca",
    f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets/vcuda-webhook-tls",
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/vcuda-quota",
    "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/vcuda-quota",
)
"""What has certificates of an earlier system in it."""


class NodeAgent(OwnProcess):
    """A running node agent."""

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__((SCRIPTS / arguments[0], *arguments[1:]), {})
        with self.starting():
            self.port: int = self.await_log("serving status")["port"]


@dataclass(frozen=True)
class System:
    """The manifests, applied; their parts are started one by one. ``directory`` is for their files."""

    cluster: Cluster
    balancer: Balancer
    kustomization: Path
    directory: Path

    @cached_property
    def objects(self) -> list[Json]:
        """The manifests."""
        return rendered(self.kustomization)

    def workload(self, kind: str, name: str) -> Json:
        """One of them."""
        return one(self.objects, kind, name)

    def rotate(self, **flags: str) -> subprocess.CompletedProcess[str]:
        """Run the Job that makes the first certificates; the flags are added to its own."""
        job = self.workload("Job", "vcuda-certs-first")
        changed: dict[str, str | Path] = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
        changed["--kubeconfig"] = account_of(self.cluster, job)
        command = command_of(job, changed)
        return subprocess.run(
            (SCRIPTS / command[0], *command[1:]), capture_output=True, text=True, check=False, timeout=120
        )

    @contextmanager
    def webhook(self) -> Iterator[WebhookProcess]:
        """A replica of the webhook, which listens and is no endpoint yet."""
        process = self.start_webhook()
        try:
            yield process
        finally:
            process.kill()

    def start_webhook(self) -> WebhookProcess:
        """The same, to be ended by the caller."""
        deployment = self.workload("Deployment", "vcuda-webhook")
        certificates = self.directory / "certificates"
        mount_secret(self.cluster, deployment, certificates)
        flags: dict[str, str | Path] = {
            "--bind": "127.0.0.1:0",
            "--cert-dir": certificates,
            "--kubeconfig": account_of(self.cluster, deployment),
        }
        program, command, *rest = command_of(deployment, flags)
        assert (program, command) == ("vcuda-webhook", "serve")
        process = WebhookProcess(rest, certificates / "ca.crt", {})
        process.tls.check_hostname = False  # it is asked by its address here, as kubelet's probes do
        return process

    @contextmanager
    def controller(self, **flags: str) -> Iterator[ControllerProcess]:
        """A controller, leading or not; the flags are added to its own."""
        deployment = self.workload("Deployment", "vcuda-controller")
        changed: dict[str, str | Path] = {
            "--status-address": "127.0.0.1:0",
            "--ui-address": "127.0.0.1:0",
            "--kubeconfig": account_of(self.cluster, deployment),
            **{f"--{name.replace('_', '-')}": value for name, value in flags.items()},
        }
        program, command, *rest = command_of(deployment, changed)
        assert (program, command) == ("vcuda-controller", "run")
        process = ControllerProcess(rest)
        try:
            yield process
            if process.process.poll() is None:
                assert process.terminate() == 0, process.output()
        finally:
            process.kill()

    @contextmanager
    def node_agent(self) -> Iterator[NodeAgent]:
        """The agent of the node `NODE`, with directories of its own; its pod is one that is stored there."""
        daemon_set = self.workload("DaemonSet", "vcuda-node")
        kubelet_pods, root = self.directory / "kubelet-pods", self.directory / "vm"
        for each in (kubelet_pods, root):
            each.mkdir(exist_ok=True)
        changed: dict[str, str | Path] = {
            "--kubelet-pods": kubelet_pods,
            "--root": root,
            "--status-address": "127.0.0.1:0",
            "--kubeconfig": account_of(self.cluster, daemon_set),
        }
        pod = self._agents_pod(daemon_set)
        process = NodeAgent(command_of(daemon_set, changed, NODE_NAME=NODE, POD_UID=pod["metadata"]["uid"]))
        try:
            yield process
            assert process.terminate() == 0, process.output()
        finally:
            process.kill()

    def _agents_pod(self, daemon_set: Json) -> Json:
        """The agent's own pod, running on the node, as the DaemonSet's controller and kubelet would have it."""
        namespace, name = daemon_set["metadata"]["namespace"], f"vcuda-node-{uuid.uuid4().hex[:5]}"
        metadata = {"namespace": namespace, "name": name}
        spec = {"nodeName": NODE, "containers": [{"name": "node", "image": "vcuda-quota"}]}
        self.cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        return self.cluster.run_pod(namespace, name)

    @contextmanager
    def serving(self, replicas: int) -> Iterator[list[WebhookProcess]]:
        """Certificates, and so many replicas that are ready and endpoints of the Service."""
        done = self.rotate()
        assert done.returncode == 0, done.stdout + done.stderr
        with ExitStack() as stack:
            processes = [stack.enter_context(self.webhook()) for _ in range(replicas)]
            for process in processes:
                poll(process, lambda asked: asked.get("/readyz").status == HTTPStatus.OK)
                self.balancer.add(port_of(process))
                stack.callback(self.balancer.remove, port_of(process))
            yield processes


def port_of(process: WebhookProcess) -> int:
    """The port that a replica listens at."""
    return int(process.url.rpartition(":")[2])


@contextmanager
def applied(cluster: Cluster, directory: Path) -> Iterator[System]:
    """The base, applied for this API server, with no certificate and no lease left of an earlier one."""
    for path in LEFT_BEHIND:
        answer = cluster.rest.send("DELETE", path)
        assert answer.status in (HTTPStatus.OK, HTTPStatus.NOT_FOUND)
    with balancing() as balancer:
        kustomization = reachable(directory, COMPONENTS, balancer.port)
        apply(cluster, kustomization, "--server-side", "--force-conflicts")
        drop_lease(cluster)
        yield System(cluster, balancer, kustomization, directory)
