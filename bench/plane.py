"""The control plane of the benchmarks: etcd and kube-apiserver, with some manifests of vcuda quota applied."""

from __future__ import annotations

import json
import os
import ssl
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import yaml

from tests.builders import LABELS, MODEL
from tests.e2e.cluster import Cluster, Json
from tests.processes import ControllerProcess
from tools.control_plane import Settings, running_control_plane
from vcuda.kube import QuotaSource, end_process
from vcuda.ledger.ledger import Ledger
from vcuda.ledger.text import read_ledger
from vcuda.quota.well_known import TEAMS
from vcuda.tls import serving_files, write_files
from vcuda.x509 import DEVELOPMENT, make_authority, make_leaf
from webhook.cli import serve
from webhook.server.server import MakeService, ServeOptions, cluster_service

PLACE = QuotaSource()
SYSTEM_NAMESPACE, LEDGER_NAMESPACE = "vcuda-quota", "vcuda-quota-ledgers"
THREADS = 32
READY_SECONDS = 30.0
POLL_SECONDS = 0.1

MANIFESTS = Path(__file__).parents[1] / "manifests/base"
RIGHTS = ("webhook-rbac.yaml", "controller-rbac.yaml", "flow-control.yaml")

GPU_POD: Mapping[str, str] = {"tencent.com/vcuda-core": "10", "tencent.com/vcuda-memory": "4"}


class Plane(NamedTuple):
    """A running API server, and a directory with the certificates of the webhooks."""

    cluster: Cluster
    certificates: Path

    @property
    def ca(self) -> Path:
        """The file with the CA of the webhooks' certificates."""
        return self.certificates / "ca.crt"

    @property
    def authorization(self) -> str:
        """The value of the HTTP header Authorization for requests of the user admin."""
        return f"Bearer {self.cluster.token}"

    @property
    def processes(self) -> Mapping[str, Sequence[int]]:
        """The process ids of etcd and kube-apiserver, by program."""
        plane = self.cluster.control_plane
        return {component.name: [component.pid] for component in (plane.etcd, plane.apiserver)}

    def kubeconfig(self, account: str) -> Path:
        """Return a kubeconfig for a ServiceAccount, because policies and request priorities depend on the account."""
        return self.cluster.kubeconfig_for_token(self.cluster.service_account_token(SYSTEM_NAMESPACE, account))

    def our_service(self) -> MakeService:
        """Return a function that creates an `admission.Service`, the part of the webhook that decides."""
        options = serve.make_context("serve", ["--kubeconfig", str(self.kubeconfig("vcuda-webhook"))]).params
        return partial(cluster_service, ServeOptions(**options), end_process)

    def ledger(self, namespace: str) -> tuple[Ledger, int]:
        """Return the stored ledger of the namespace, or an empty one, and the size of its ConfigMap in bytes."""
        answer = self.cluster.rest.send(
            "GET", f"/api/v1/namespaces/{LEDGER_NAMESPACE}/configmaps/gpu-ledger-{namespace}"
        )
        if answer.status == HTTPStatus.NOT_FOUND:
            return Ledger(), 0
        config_map = answer.ok()
        return read_ledger(config_map["data"]["ledger"]), len(json.dumps(config_map, separators=(",", ":")))


@contextmanager
def running_plane() -> Iterator[Plane]:
    """Run the control plane of the binaries in KUBEBUILDER_ASSETS, in a temporary directory.

    No scheduler and no controller manager run, because they would use a part of the CPU.
    """
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        control_plane = stack.enter_context(
            running_control_plane(
                Path(assets) if assets else None,
                Path(scratch, "control-plane"),
                Settings(apiserver_flags=("--delete-collection-workers=8",)),
            )
        )
        for component in (control_plane.scheduler, control_plane.controller_manager):
            if component:
                component.stop()
        certificates = Path(scratch, "certificates")
        certificates.mkdir()
        write_certificates(certificates)
        cluster = stack.enter_context(closing(Cluster(control_plane)))
        for name in ("default", "kube-system"):
            cluster.await_object("/api/v1/namespaces", name, lambda _: True)
        for name in (SYSTEM_NAMESPACE, LEDGER_NAMESPACE):
            cluster.create_namespace(name)
        for manifest in manifests(*RIGHTS):
            cluster.create(manifest)
        yield Plane(cluster, certificates)


def write_certificates(directory: Path) -> None:
    """Create a CA and a certificate for webhooks on this machine, and write their files into the directory."""
    now = datetime.now(UTC)
    authority = make_authority(now)
    write_files(directory, serving_files(authority, make_leaf(authority, DEVELOPMENT, now)))


def manifests(*files: str) -> Iterator[Json]:
    """Yield the objects in these files of manifests/base."""
    for file in files:
        yield from yaml.safe_load_all((MANIFESTS / file).read_text())


def write_quota(cluster: Cluster, quota: Mapping[str, Json], teams: Mapping[str, Json] | None = None) -> None:
    metadata = {"namespace": PLACE.namespace, "name": PLACE.name}
    data = {PLACE.key: json.dumps(quota), TEAMS: json.dumps(teams or {})}
    cluster.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})


def create_nodes(cluster: Cluster, models: Sequence[str], each: int) -> None:
    """For every GPU model, create as many nodes as ``each``."""
    for model in models:
        for number in range(each):
            cluster.create_node(f"{model.lower()}-{number}", {MODEL: model, LABELS.pool: "public"})


def running_controller(plane: Plane) -> ControllerProcess:
    """Run `vcuda-controller run`. Earlier controllers have released the Lease, so this one soon becomes the leader."""
    # A pod whose generated name is in use is charged but not stored. The controller releases this charge after
    # --storable-seconds. Here --storable-seconds is short, because the benchmark waits until all charges are released.
    return ControllerProcess(
        *("--kubeconfig", plane.kubeconfig("vcuda-controller"), "--status-address", "127.0.0.1:0"),
        *("--system-namespace", SYSTEM_NAMESPACE, "--storable-seconds", "5"),
    )


def await_ready(plane: Plane, url: str) -> None:
    """Poll the webhook at ``url`` until it is ready. Raises HTTPError if it is not ready in time."""
    context = ssl.create_default_context(cafile=str(plane.ca))
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{url}/readyz", context=context).close()  # noqa: S310  # an https URL of this bench
        except urllib.error.HTTPError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)
        else:
            return


def gpu_pod() -> Json:
    """Return a small pod that requests a tenth of a card. The API server generates its name."""
    container = {"name": "main", "image": "cuda", "resources": {"limits": dict(GPU_POD)}}
    metadata = {"generateName": "bench-"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}
