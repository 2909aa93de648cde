"""Runs the webhook as in a real installation.

The API server calls it by its Service, and a failed call rejects the pod. The certificate is a mounted Secret.
"""

import base64
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from tests.e2e.cluster import GROUP, RESOURCES, TIMEOUT, Cluster, Json, await_effect, sentinel, webhook
from tests.e2e.conftest import require
from tests.e2e.installation import SERVED_BY, SYSTEM_NAMESPACE, create_system_namespace
from tests.e2e.quota_config import QuotaConfigMap
from tests.e2e.rest import Rest
from tests.e2e.steady import Outcomes, connecting, creating, plain
from tests.processes import SCRIPTS, WebhookProcess, eventually, serving
from vcuda.kube.endpoints import SERVICE_NAME, EndpointSlice, read_addresses
from vcuda.tls import File, write_files

SERVICE = "vcuda-webhook"
SERVER_NAME = f"{SERVICE}.{SYSTEM_NAMESPACE}.svc"
CONFIGURATION = "vcuda-quota"
LABELS = {"app.kubernetes.io/part-of": "vcuda-quota"}
CORE = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}"
CA_SECRET = f"{CORE}/secrets/vcuda-webhook-ca"
SERVING_SECRET = f"{CORE}/secrets/vcuda-webhook-tls"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{SYSTEM_NAMESPACE}/endpointslices"
OF_THE_SERVICE = f"{SERVICE_NAME}={SERVICE}"
PODS = {"app.kubernetes.io/name": SERVICE}
NODE = "e2e-stage"
PAGE = 500
Delay = Callable[[], float]
PATHS = {kind: f"{GROUP}/{resource}/{CONFIGURATION}" for kind, resource in RESOURCES.items()}


@dataclass
class Stage:
    """A webhook that is installed as in a cluster.

    ``label``: the webhook serves only namespaces whose label `SERVED_BY` has this value. ``flags``: more flags for each
    run of `vcuda-certs rotate`.
    """

    cluster: Cluster
    label: str
    host: str
    flags: tuple[str, ...]
    kubeconfig: Path
    replicas: Sequence[WebhookProcess] = ()

    def command(self, *arguments: str, kubeconfig: Path | None = None) -> list[str]:
        """Return a command line of `vcuda-certs`. The stage's flags follow the name of the subcommand."""
        name, *rest = arguments
        own = ("--kubeconfig", str(kubeconfig or self.kubeconfig), "--ip", self.host, *self.flags)
        return [str(SCRIPTS / "vcuda-certs"), name, *(own if name == "rotate" else own[:4]), *rest]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*arguments), capture_output=True, text=True, check=False, timeout=240)

    def rotate(self, *arguments: str) -> str:
        done = self.run("rotate", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def addresses(self) -> list[str]:
        return [urlsplit(replica.url).netloc for replica in self.replicas]

    def set_endpoints(self, *, ready: bool = True) -> None:
        """Set all replicas' pods to ready, or all to not ready. Return when the Service's EndpointSlices show this.

        The controller manager writes the endpoints, because the Service's selector matches the pods. To call a webhook,
        Kubernetes 1.30 reads the Endpoints of its Service, and Kubernetes 1.36 reads the EndpointSlices.
        """
        conditions = [{"type": "Ready", "status": str(ready)}]
        status = {"phase": "Running", "podIP": self.host, "podIPs": [{"ip": self.host}], "conditions": conditions}
        for number in range(len(self.replicas)):
            self.cluster.set_pod_status(SYSTEM_NAMESPACE, f"{SERVICE}-{number}", status)
        wanted = dict.fromkeys(self.addresses(), ready)

        def are_told(found: list[Json]) -> bool:
            return read_addresses(msgspec.convert(found, list[EndpointSlice]), "https") == wanted

        self.cluster.await_collection(SLICES, are_told, labelSelector=OF_THE_SERVICE)

    def await_answered(self, namespace: str) -> None:
        """Wait until a pod can be created in ``namespace``.

        Then the API server knows the webhook's endpoints and trusts their certificate. This polls, because the API
        server does not report what its own watches have delivered.
        """

        def rejection() -> str:
            return self.cluster.try_create(plain(time.monotonic_ns(), namespace), dryRun="All").message

        eventually(lambda: not rejection(), rejection)

    def bundles(self) -> list[str]:
        found = [hook for path in PATHS.values() for hook in self.cluster.rest.get(path)["webhooks"]]
        return [hook["clientConfig"].get("caBundle", "") for hook in found if "service" in hook["clientConfig"]]

    def register(self) -> None:
        """Store both webhook configurations, to which a rotation adds the caBundles. Return when they are in effect."""
        for kind, name in (("MutatingWebhookConfiguration", "mutate"), ("ValidatingWebhookConfiguration", "validate")):
            guard = f"{self.label}-{name}-{secrets.token_hex(3)}"
            metadata = {"name": CONFIGURATION, "labels": LABELS}
            webhooks = [sentinel(guard), self._webhook(name)]
            about = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind}
            self.cluster.create({**about, "metadata": metadata, "webhooks": webhooks})
            await_effect(self.cluster.rest, guard, TIMEOUT, wanted=True)

    def unregister(self) -> None:
        for path in PATHS.values():
            self.cluster.delete(path)

    def _webhook(self, path: str) -> Json:
        return webhook(
            f"{path}.quota.vcuda.io",
            clientConfig={"service": {"name": SERVICE, "namespace": SYSTEM_NAMESPACE, "path": f"/{path}"}},
            namespaceSelector={"matchLabels": {SERVED_BY: self.label}},
            timeoutSeconds=10,
        )

    @contextmanager
    def team(self, quota: QuotaConfigMap) -> Iterator[str]:
        """Create a namespace with a large quota. Yield it once the webhook reviews its pods. Delete it at the end."""
        name = self.cluster.create_namespace(labels={SERVED_BY: self.label})
        try:
            with quota.limited(**{name: {"quota": {"M40": 10_000}}}):
                self.await_answered(name)
                yield name
        finally:
            delete_pods(self.cluster, name)
            self.cluster.delete_namespace(name)


@contextmanager
def staged(
    cluster: Cluster, directory: Path, delays: Sequence[Delay], kubeconfig: Path, *flags: str
) -> Iterator[tuple[Stage, QuotaConfigMap]]:
    """Install a webhook with one replica for each of ``delays``. Yield the stage and its quota ConfigMap.

    ``delays``: each returns the seconds from a change of the Secret until the replica's mounted files change.
    ``kubeconfig``: the kubeconfig of `vcuda-certs`.
    """
    stage = Stage(cluster, f"e2e-{secrets.token_hex(4)}", own_address(), flags, kubeconfig)
    quota = QuotaConfigMap(cluster.rest, "kube-system", f"gpuquota-{stage.label}", {})
    create_system_namespace(cluster)
    require(cluster.control_plane, "kube-controller-manager")
    with ExitStack() as stack:
        stack.callback(clear, stage)
        clear(stage)
        cluster.create(node())
        cluster.create(service())
        stage.register()
        stage.rotate()
        stage.replicas = [
            stack.enter_context(replica(stage, directory / str(number), delay, quota))
            for number, delay in enumerate(delays)
        ]
        for number, address in enumerate(stage.addresses()):
            cluster.create(pod_of(number, address))
        stage.set_endpoints()
        for each in stage.replicas:
            each.await_ready()
        yield stage, QuotaConfigMap(quota.rest, quota.namespace, quota.name, {}, stage.replicas)


@contextmanager
def unnoticed(stage: Stage, namespace: str) -> Iterator[Outcomes]:
    """During the ``with`` statement, create pods in ``namespace`` and open connections to the webhook all the time.

    At the end, assert that no create and no connection has failed.
    """
    path = PATHS["ValidatingWebhookConfiguration"]
    connects = connecting(stage.cluster, path, stage.addresses, SERVER_NAME)
    with creating(stage.cluster, namespace) as creates, connects as handshakes:
        yield creates
    assert (creates.failures, handshakes.failures) == ([], [])


@contextmanager
def replica(stage: Stage, directory: Path, delay: Delay, quota: QuotaConfigMap) -> Iterator[WebhookProcess]:
    """Run one webhook replica. The directory of its certificate follows the Secret, like a mounted volume."""
    directory.mkdir(parents=True)
    flags = (
        *("--cert-dir", directory, "--kubeconfig", stage.cluster.kubeconfig, "--bind", f"{stage.host}:0"),
        *("--quota-configmap", f"{quota.namespace}/{quota.name}", "--system-namespace", SYSTEM_NAMESPACE),
    )
    volume = Volume(stage.cluster.rest, SERVING_SECRET, directory, delay)
    with volume.following(), serving(*flags, ca=directory / "ca.crt") as process:
        yield process


def service() -> Json:
    spec = {"selector": PODS, "ports": [{"name": "https", "port": 443, "targetPort": "https"}]}
    metadata = {"name": SERVICE, "namespace": SYSTEM_NAMESPACE}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def node() -> Json:
    """Return the node of the webhook replicas' pods. It is unschedulable, so that it gets no other pods."""
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}, "spec": {"unschedulable": True}}


def pod_of(number: int, address: str) -> Json:
    ports = [{"name": "https", "containerPort": int(address.rpartition(":")[2])}]
    spec = {"nodeName": NODE, "containers": [{"name": "webhook", "image": "vcuda-quota", "ports": ports}]}
    metadata = {"name": f"{SERVICE}-{number}", "namespace": SYSTEM_NAMESPACE, "labels": PODS}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def clear(stage: Stage) -> None:
    """Delete the objects of a stage. All stages use the same names, so this includes objects of an earlier stage.

    Return when Kubernetes has also deleted the EndpointSlices of the Service.
    """
    stage.unregister()
    selector = ",".join(f"{key}={value}" for key, value in PODS.items())
    delete_pods(stage.cluster, SYSTEM_NAMESPACE, labelSelector=selector)
    for path in (CA_SECRET, SERVING_SECRET, f"{CORE}/services/{SERVICE}", f"/api/v1/nodes/{NODE}"):
        stage.cluster.delete(path)
    stage.cluster.await_collection(SLICES, lambda found: not found, labelSelector=OF_THE_SERVICE)


def delete_pods(cluster: Cluster, namespace: str, **selector: str) -> None:
    """Delete the pods with a grace period of 0, at most `PAGE` of them per request.

    A request for thousands of pods would exceed the request timeout.
    """
    deleted = PAGE
    while deleted == PAGE:
        path, now = f"/api/v1/namespaces/{namespace}/pods", {"gracePeriodSeconds": 0}
        answer = cluster.rest.send("DELETE", path, now, limit=str(PAGE), **selector).ok()
        deleted = len(answer["items"])


def own_address() -> str:
    """Return an IPv4 address of this machine other than the loopback address, which cannot be an endpoint."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # connecting a UDP socket sends nothing, but selects a source address
            address = str(probe.getsockname()[0])
        except OSError:
            address = "127.0.0.1"
    if address.startswith("127."):
        pytest.skip("this machine has only loopback addresses, which the API server rejects as endpoints")
    return address


def utc_now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


POLL_SECONDS = 0.1
MODES = {"tls.key": 0o600}


class Volume:
    """A directory with the files of the Secret at ``path``, like a Secret volume that the kubelet mounts.

    The files follow a change of the Secret after ``delay()`` seconds, all in one step. They stay after the Secret is
    deleted.
    """

    def __init__(self, rest: Rest, path: str, directory: Path, delay: Delay) -> None:
        self.directory = directory
        self._rest = rest
        self._path = path
        self._delay = delay
        self._seen = ""
        self._coming: list[tuple[float, Json]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow)

    @contextmanager
    def following(self) -> Iterator[None]:
        self._read(0)
        self._swap()
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join()

    def _follow(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            self._read(self._delay())
            self._swap()

    def _read(self, delay: float) -> None:
        answer = self._rest.send("GET", self._path)
        if answer.status == HTTPStatus.NOT_FOUND:
            return
        secret = answer.ok()
        if (version := secret["metadata"]["resourceVersion"]) != self._seen:
            self._seen = version
            self._coming.append((time.monotonic() + delay, secret.get("data") or {}))

    def _swap(self) -> None:
        due = [data for moment, data in self._coming if moment <= time.monotonic()]
        if due:
            data = {name: base64.b64decode(text) for name, text in due[-1].items()}
            files = [File(name, name, held, MODES.get(name, 0o644), None) for name, held in data.items()]
            write_files(self.directory, files)
            self._coming = [(moment, data) for moment, data in self._coming if moment > time.monotonic()]
