"""The webhook behind its Service, as it is installed: called through endpoints, its Secret mounted, failing closed."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e.cluster import TIMEOUT, Cluster
from tests.e2e.installation import ENFORCED, SERVED_BY, SYSTEM_NAMESPACE, create_system_namespace, poll
from tests.e2e.mounted import Volume
from tests.e2e.quota_config_map import QuotaConfigMap
from tests.e2e.rest import Json
from tests.e2e.webhooks import GROUP, RESOURCES, await_effect, sentinel
from tests.integration.webhook_process import WebhookProcess, serving

PROGRAM = Path(sysconfig.get_path("scripts"), "vcuda-certs")
SERVICE = "vcuda-webhook"
SERVER_NAME = f"{SERVICE}.{SYSTEM_NAMESPACE}.svc"
CONFIGURATION = "vcuda-quota"
LABELS = {"app.kubernetes.io/part-of": "vcuda-quota"}
CORE = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}"
CA_SECRET = f"{CORE}/secrets/vcuda-webhook-ca"
SERVING_SECRET = f"{CORE}/secrets/vcuda-webhook-tls"
ENDPOINTS = f"{CORE}/endpoints/{SERVICE}"
PATHS = {kind: f"{GROUP}/{resource}/{CONFIGURATION}" for kind, resource in RESOURCES.items()}


@dataclass
class Stage:
    """``label`` is on the namespaces that are served. ``flags`` go before those of each `vcuda-certs` command."""

    cluster: Cluster
    label: str
    host: str
    flags: tuple[str, ...]
    kubeconfig: Path
    replicas: Sequence[WebhookProcess] = ()

    def command(self, *arguments: str, kubeconfig: Path | None = None) -> list[str]:
        """The command line of `vcuda-certs`, with this stage's flags after the first argument."""
        name, *rest = arguments
        own = ("--kubeconfig", str(kubeconfig or self.kubeconfig), "--ip", self.host, *self.flags)
        return [str(PROGRAM), name, *(own if name == "rotate" else own[:4]), *rest]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `vcuda-certs`, whatever its exit status."""
        return subprocess.run(self.command(*arguments), capture_output=True, text=True, check=False, timeout=240)

    def rotate(self, *arguments: str) -> str:
        """Rotate, which has to succeed; what it said."""
        done = self.run("rotate", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def addresses(self) -> list[str]:
        """HOST:PORT of each replica."""
        return [urlsplit(replica.url).netloc for replica in self.replicas]

    def set_endpoints(self, *, ready: bool = True) -> None:
        """Let the Service have the replicas as endpoints, all ready or none."""
        ports = [(int(address.rpartition(":")[2])) for address in self.addresses()]
        field = "addresses" if ready else "notReadyAddresses"
        subsets = [{field: [{"ip": self.host}], "ports": [{"name": "https", "port": port}]} for port in ports]
        metadata = {"name": SERVICE, "namespace": SYSTEM_NAMESPACE}
        body = {"apiVersion": "v1", "kind": "Endpoints", "metadata": metadata, "subsets": subsets}
        if self.cluster.rest.send("PUT", ENDPOINTS, body).status == HTTPStatus.NOT_FOUND:
            self.cluster.create(body)

    def bundles(self) -> list[str]:
        """The caBundles of the webhooks that call the Service, in base64."""
        found = [hook for path in PATHS.values() for hook in self.cluster.rest.get(path)["webhooks"]]
        return [hook["clientConfig"].get("caBundle", "") for hook in found if "service" in hook["clientConfig"]]

    def register(self) -> None:
        """Store both configurations, without caBundles, and return once they are in effect."""
        for kind, name in (("MutatingWebhookConfiguration", "mutate"), ("ValidatingWebhookConfiguration", "validate")):
            guard = f"{self.label}-{name}-{secrets.token_hex(3)}"
            manifest = {
                "apiVersion": "admissionregistration.k8s.io/v1",
                "kind": kind,
                "metadata": {"name": CONFIGURATION, "labels": LABELS},
                "webhooks": [sentinel(guard), self._webhook(name)],
            }
            self.cluster.rest.send("POST", f"{GROUP}/{RESOURCES[kind]}", manifest).ok()
            await_effect(self.cluster.rest, guard, TIMEOUT, wanted=True)

    def unregister(self) -> None:
        """Delete both configurations."""
        for path in PATHS.values():
            delete(self.cluster, path)

    def _webhook(self, path: str) -> Json:
        return {
            "name": f"{path}.quota.vcuda.io",
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
            "clientConfig": {"service": {"name": SERVICE, "namespace": SYSTEM_NAMESPACE, "path": f"/{path}"}},
            "namespaceSelector": {"matchLabels": {SERVED_BY: self.label}},
            "failurePolicy": "Fail",
            "sideEffects": "NoneOnDryRun",
            "admissionReviewVersions": ["v1"],
            "timeoutSeconds": 10,
        }

    @contextmanager
    def team(self, quota: QuotaConfigMap) -> Iterator[str]:
        """A served namespace that may use cards without end; deleted afterwards."""
        name = self.cluster.create_namespace(labels={SERVED_BY: self.label, ENFORCED: "true"})
        try:
            with quota.limited(**{name: {"quota": {"M40": 10_000}}}):
                yield name
        finally:
            self.cluster.delete_namespace(name)


@contextmanager
def staged(
    cluster: Cluster, directory: Path, delays: Sequence[Callable[[], float]], kubeconfig: Path, *flags: str
) -> Iterator[tuple[Stage, QuotaConfigMap]]:
    """A stage with one replica a delay: so many seconds later its volume follows the Secret. All of it is in effect.

    ``kubeconfig``: the rights with which certificates are rotated.
    """
    stage = Stage(cluster, f"e2e-{secrets.token_hex(4)}", own_address(), flags, kubeconfig)
    quota = QuotaConfigMap(cluster.rest, "kube-system", f"gpuquota-{stage.label}", {})
    create_system_namespace(cluster)
    with ExitStack() as stack:
        stack.callback(clear, stage)
        clear(stage)
        cluster.create(service())
        stage.register()
        stage.rotate()
        stage.replicas = [
            stack.enter_context(replica(stage, directory / str(number), delay, quota))
            for number, delay in enumerate(delays)
        ]
        stage.set_endpoints()
        for each in stage.replicas:
            poll(each, lambda asked: asked.get("/readyz").status == HTTPStatus.OK)
        yield stage, QuotaConfigMap(quota.rest, quota.namespace, quota.name, {}, stage.replicas)


@contextmanager
def replica(
    stage: Stage, directory: Path, delay: Callable[[], float], quota: QuotaConfigMap
) -> Iterator[WebhookProcess]:
    """One webhook, whose certificate directory is a volume of the serving Secret."""
    directory.mkdir(parents=True)
    flags = (
        *("--cert-dir", directory, "--kubeconfig", stage.cluster.kubeconfig, "--bind", f"{stage.host}:0"),
        *("--quota-configmap", f"{quota.namespace}/{quota.name}", "--system-namespace", SYSTEM_NAMESPACE),
    )
    volume = Volume(stage.cluster.rest, SERVING_SECRET, directory, delay)
    with volume.following(), serving(*flags, ca=directory / "ca.crt") as process:
        yield process


def service() -> Json:
    """The Service, without a selector: its endpoints are written by hand."""
    ports = [{"name": "https", "port": 443, "targetPort": 8443}]
    metadata = {"name": SERVICE, "namespace": SYSTEM_NAMESPACE}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": ports}}


def clear(stage: Stage) -> None:
    """Remove what a stage stores under the names of a real installation."""
    stage.unregister()
    for path in (CA_SECRET, SERVING_SECRET, ENDPOINTS, f"{CORE}/services/{SERVICE}"):
        delete(stage.cluster, path)


def delete(cluster: Cluster, path: str) -> None:
    """Delete what may be there."""
    answer = cluster.rest.send("DELETE", path)
    if answer.status != HTTPStatus.NOT_FOUND:
        answer.ok()


def own_address() -> str:
    """An IPv4 address of this machine that is not a loopback one, which the API server takes for no endpoint."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a datagram socket sends nothing by this, it only chooses its address
            address = str(probe.getsockname()[0])
        except OSError:
            address = "127.0.0.1"
    if address.startswith("127."):
        pytest.skip("this machine has no address but loopback, and the API server takes none of those as an endpoint")
    return address


def utc_now() -> str:
    """The time, as --issued-before takes it."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
