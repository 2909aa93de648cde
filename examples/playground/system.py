"""Installs vcuda quota in the playground: applies the manifests, and runs the programs as processes of this machine."""

import base64
import json
import os
import subprocess
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
import yaml

from examples.playground.cluster import START_SECONDS, Cluster, read_json
from examples.playground.programs import ROOT
from examples.playground.teams import ALL, YOURS, Team, bare_pod, malformed_quota
from tools.component import Component, Probe
from tools.control_plane import write_kubeconfig
from tools.ports import free_ports
from vcuda.errors import ApiError, VcudaError
from vcuda.quota.well_known import MODEL_ANNOTATION

Json = dict[str, Any]

OVERLAY = ROOT / "manifests" / "overlays" / "hami"
NAMESPACE = "vcuda-quota"
WEBHOOK, CONTROLLER, CERTIFICATES = "vcuda-webhook", "vcuda-controller", "vcuda-certs-first"
DECLARED = "quota.vcuda.io/webhooks"
"""An annotation of a webhook configuration. It lists the webhooks that `vcuda-certs` adds to the configuration."""

USAGE = "gpu-quota-usage"
"""The name of the ConfigMap in which the controller publishes the usage of a namespace."""

WORKLOADS = ("Deployment", "DaemonSet", "CronJob", "Job")
TOKEN_SECONDS = 7 * 24 * 3600
POLL_SECONDS = 0.2


class NotInstalled(Exception):
    """Raised if a step of the installation fails. The message has the step and the reason."""


@dataclass(frozen=True)
class System:
    """An installation of vcuda quota.

    ``cluster``: the cluster to which the manifests are applied.
    ``manifests``: all objects as kustomize renders them, including the workloads, which are not applied.
    ``directory``: the directory of kubeconfigs, certificates and logs.
    ``webhook_port``, ``page_port``: the ports of the webhook and of the usage page on 127.0.0.1.
    """

    cluster: Cluster
    manifests: Sequence[Json]
    directory: Path
    webhook_port: int
    page_port: int

    @property
    def page(self) -> str:
        """The address of the usage page."""
        return f"http://127.0.0.1:{self.page_port}/"

    @property
    def _certificates(self) -> Path:
        return self.directory / "certificates"

    def issue_certificates(self) -> None:
        """Run `vcuda-certs` as the Job in the manifests does, and write the files that a webhook replica mounts.

        The command does not wait for a replica of the webhook, because none runs yet.
        """
        self._rotate("--timeout=0s", "--ip=127.0.0.1")
        secret = read_json(self.cluster.kube, f"/api/v1/namespaces/{NAMESPACE}/secrets/vcuda-webhook-tls")
        if secret is None:
            raise NotInstalled("the command `vcuda-certs rotate` did not write the Secret of the certificate")
        self._certificates.mkdir()
        for name, text in secret["data"].items():
            (self._certificates / name).write_bytes(base64.b64decode(text))

    def register(self) -> None:
        """Run `vcuda-certs` again, which registers the webhooks after the replica of the webhook has answered."""
        self._rotate("--timeout=60s", f"--endpoint=127.0.0.1:{self.webhook_port}")

    def webhook(self) -> Component:
        flags = (
            f"--bind=127.0.0.1:{self.webhook_port}",
            f"--cert-dir={self._certificates}",
            "--drain-seconds=0",
        )
        ready = Probe(self.webhook_port, "/readyz", self._certificates / "ca.crt")
        return self._component(WEBHOOK, self._command("Deployment", WEBHOOK, *flags), ready)

    def controller(self) -> Component:
        [status_port] = free_ports(1)
        flags = (f"--status-address=127.0.0.1:{status_port}", f"--ui-address=127.0.0.1:{self.page_port}")
        command = self._command("Deployment", CONTROLLER, *flags)
        return self._component(CONTROLLER, command, Probe(status_port, "/readyz"))

    def await_admission(self) -> None:
        """Wait until the webhooks are in effect, and have read the quota and the GPU models of the nodes."""

        def checked() -> bool:
            return is_rejected(self.cluster, malformed_quota()) and is_pinned(self.cluster, YOURS)

        await_true(checked, "the webhooks are not in effect")

    def await_usage(self) -> None:
        """Wait until the controller has published the usage of every team."""

        def published() -> bool:
            paths = (f"/api/v1/namespaces/{team.namespace}/configmaps/{USAGE}" for team in ALL)
            return all(read_json(self.cluster.kube, path) for path in paths)

        await_true(published, "the controller does not publish the usage of the teams")

    def _rotate(self, *flags: str) -> None:
        command, env = self._command("Job", CERTIFICATES, *flags), own_environment(os.environ)
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
        if done.returncode:
            output = f"{done.stdout}{done.stderr}"
            raise NotInstalled(f"vcuda-certs rotate failed with exit status {done.returncode}: {output}")

    def _command(self, kind: str, name: str, *flags: str) -> tuple[str, ...]:
        """Return the command line of a workload in the manifests, with a kubeconfig for its ServiceAccount.

        ``flags``: flags that override flags of the workload.
        """
        [workload] = (each for each in self.manifests if each["kind"] == kind and each["metadata"]["name"] == name)
        spec = workload["spec"]["template"]["spec"]
        [container] = spec["containers"]
        program, *arguments = container["args"]
        kubeconfig = self._kubeconfig(spec["serviceAccountName"])
        return (sysconfig.get_path("scripts") + f"/{program}", *arguments, f"--kubeconfig={kubeconfig}", *flags)

    def _kubeconfig(self, account: str) -> Path:
        """Write a kubeconfig with a token of a ServiceAccount. Return the path of the kubeconfig."""
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": TOKEN_SECONDS},
        }
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token"
        made = msgspec.json.decode(self.cluster.kube.post(path, msgspec.json.encode(request)), type=Json)
        file = self.directory / f"{account}.kubeconfig"
        write_kubeconfig(file, self.cluster.plane.server, self.cluster.plane.ca_file, made["status"]["token"])
        return file

    def _component(self, name: str, command: tuple[str, ...], ready: Probe) -> Component:
        log = self.directory / f"{name}.log"
        return Component(name, command, log, ready, START_SECONDS, own_environment(os.environ))


def apply_system(cluster: Cluster, directory: Path) -> System:
    """Apply all manifests except the workloads, because their programs run on this machine.

    Raises NotInstalled if kubectl fails.
    """
    webhook_port, page_port = free_ports(2)
    manifests = list(yaml.safe_load_all(kubectl(cluster, "kustomize", str(OVERLAY))))
    items = [each for each in reachable(manifests, webhook_port) if each["kind"] not in WORKLOADS]
    apply(cluster, items)
    return System(cluster, manifests, directory, webhook_port, page_port)


def reachable(manifests: Sequence[Json], port: int) -> list[Json]:
    """Return the objects, changed so that the API server calls the webhook at this port of this machine.

    The API server connects to the external name of a Service of type ExternalName, and still expects the name of the
    Service in the certificate.
    """
    return [_reachable(each, port) for each in manifests]


def _reachable(manifest: Json, port: int) -> Json:
    if manifest["kind"] == "Service" and manifest["metadata"]["name"] == WEBHOOK:
        return {**manifest, "spec": {"type": "ExternalName", "externalName": "localhost"}}
    metadata = manifest["metadata"]
    declared = metadata.get("annotations", {}).get(DECLARED)
    if declared is None:
        return manifest
    annotations = {**metadata["annotations"], DECLARED: declared.replace("port: 443", f"port: {port}")}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def apply(cluster: Cluster, manifests: Sequence[Json]) -> None:
    """Apply the objects. Raises NotInstalled if the API server rejects an object."""
    items = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
    kubectl(cluster, "apply", "--server-side", "-f", "-", stdin=items)


def kubectl(cluster: Cluster, *arguments: str, stdin: str = "") -> str:
    """Return the output of kubectl. Raises NotInstalled with kubectl's message if the command fails."""
    cache = cluster.plane.directory / "kubectl-cache"
    options = (f"--kubeconfig={cluster.plane.kubeconfig}", f"--cache-dir={cache}")
    command = (str(cluster.programs.path_of("kubectl")), *options, *arguments)
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise NotInstalled(f"kubectl {arguments[0]} failed: {done.stderr}")
    return done.stdout


def own_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables VCUDA_…, which set flags of the programs."""
    return {name: value for name, value in env.items() if not name.startswith("VCUDA_")}


def is_rejected(cluster: Cluster, quota: Json) -> bool:
    """Return True if the webhook rejects this quota ConfigMap in a dry run."""
    try:
        cluster.kube.post("/api/v1/namespaces/kube-system/configmaps", msgspec.json.encode(quota), {"dryRun": "All"})
    except ApiError as error:
        return error.status == HTTPStatus.UNPROCESSABLE_ENTITY
    except VcudaError:
        return False
    return False


def is_pinned(cluster: Cluster, team: Team) -> bool:
    """Return True if the webhook admits a pod of the team in a dry run, and pins the pod to a GPU model."""
    path = f"/api/v1/namespaces/{team.namespace}/pods"
    try:
        made = cluster.kube.post(path, msgspec.json.encode(bare_pod(team)), {"dryRun": "All"})
    except VcudaError:
        return False
    return MODEL_ANNOTATION in msgspec.json.decode(made, type=Json)["metadata"].get("annotations", {})


def await_true(holds: Callable[[], bool], otherwise: str) -> None:
    """Poll ``holds`` until it returns True. After a timeout, raises NotInstalled with ``otherwise`` as its message."""
    # No watch can replace the polls, because the API server does not report when it begins to call a webhook.
    deadline = time.monotonic() + START_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise NotInstalled(f"{otherwise} after {START_SECONDS:g} s")
        time.sleep(POLL_SECONDS)
