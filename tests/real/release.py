"""Installs the chart as docs/install.md says, and finds the pods and processes of the release."""

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.builders import MODEL
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import LEDGERS, SYSTEM_NAMESPACE, await_enforced
from tests.e2e.ledgers import ledger_in
from tests.helm import CHART, program
from tests.processes import eventually
from tests.real.node import NAME, PRODUCT

MODEL_NAME = "H100"
TEAMS = {
    "team-cards": 4,
    "team-full": 4,
    "team-job": 2,
    "team-life": 4,
    "team-load": 10_000,
    "team-tight": 3,
    "team-many": 100_000,
}
"""The quota of each namespace, in cards. The node has four cards. Pods with a scheduling gate need no card."""

MEMBERS, POOL_LIMIT = ("pool-one", "pool-two", "pool-three"), 3
"""The namespaces of the team `pool`, which have no quota of their own, and the limit of the team in cards."""

QUOTA = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "gpuquota", "namespace": "kube-system", "labels": {"quota.vcuda.io/config": "true"}},
    "data": {
        "gpu_quota": json.dumps({name: {"quota": {MODEL_NAME: cards}} for name, cards in TEAMS.items()}),
        "gpu_teams": json.dumps({"pool": {"namespaces": MEMBERS, "quota": {MODEL_NAME: POOL_LIMIT}}}),
        "gpu_models": yaml.safe_dump({MODEL_NAME: [PRODUCT]}),
    },
}
REGISTRATION = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{SYSTEM_NAMESPACE}/deployments"
WEBHOOK, CONTROLLER = "vcuda-webhook", "vcuda-controller"
PATIENCE = 300.0


@dataclass(frozen=True)
class Process:
    """A process of a container. It has the process id in the namespace of the tests."""

    pid: int
    command: str
    is_main: bool
    """True for the first process of its container."""

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class Release:
    """The Helm release of our chart in ``cluster``. ``directory``: the home directory of helm."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster = cluster
        self._directory = directory
        self.seconds_to_register = 0.0

    def helm(self, command: str, *options: str) -> str:
        done = subprocess.run(
            (program(), *command.split(), "--namespace=kube-system", *options),
            env={**os.environ, "KUBECONFIG": str(self.cluster.kubeconfig), "HOME": str(self._directory)},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self) -> None:
        """Install the chart. Return when the webhooks are registered and the node has a model."""
        began = time.monotonic()
        self.helm(f"install vcuda-quota {CHART}")
        self.cluster.await_object(REGISTRATION, "vcuda-quota", is_registered, PATIENCE)
        self.seconds_to_register = time.monotonic() - began
        self.rolled_out()

    def rolled_out(self) -> None:
        """Return when every pod of the release is available and has the present template."""
        for name in (WEBHOOK, CONTROLLER):
            self.cluster.await_object(DEPLOYMENTS, name, is_rolled_out, PATIENCE)

    def kubectl(self, *arguments: str) -> str:
        return self.cluster.kubectl("--namespace", SYSTEM_NAMESPACE, *arguments).stdout

    def await_enforced(self) -> None:
        """Return when every namespace is limited, and the controller has written the model label of the node."""
        for namespace in (*TEAMS, *MEMBERS):
            await_enforced(self.cluster, namespace)
        self.cluster.await_object("/api/v1/nodes", NAME, lambda node: MODEL in node["metadata"]["labels"])

    def charged(self, namespace: str) -> float:
        """Return the cards that the ledger charges for pods. Reservations of replicas are left out."""
        found = self.cluster.rest.get(LEDGERS, fieldSelector=f"metadata.name=gpu-ledger-{namespace}")["items"]
        ledger = ledger_in(found)
        usage = ledger.usages().get(MODEL_NAME)
        return float(usage.used.cores - ledger.reserved_of(MODEL_NAME).cores) / 100 if usage else 0

    def await_charged(self, namespace: str, cards: float) -> None:
        eventually(lambda: self.charged(namespace) == cards, lambda: self.charged(namespace))

    def pods(self, name: str) -> list[Json]:
        """Return the running pods of one Deployment of the release."""
        path = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods"
        selector = f"app.kubernetes.io/name={name}"
        items: list[Json] = self.cluster.rest.get(path, labelSelector=selector)["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def processes(self, name: str) -> list[Process]:
        """Return the processes in the containers of one Deployment."""
        return [process for pod in self.pods(name) for process in processes(pod["metadata"]["uid"])]

    def leader(self) -> str:
        return self.kubectl("get", "lease", CONTROLLER, "-o", "jsonpath={.spec.holderIdentity}")

    def leading_pod(self) -> str:
        return self.leader().rpartition("-")[0]


def is_registered(configuration: Json) -> bool:
    return len(configuration.get("webhooks", ())) == 3


def is_rolled_out(deployment: Json) -> bool:
    status, wanted = deployment["status"], deployment["spec"]["replicas"]
    counts = (status.get(name) for name in ("replicas", "updatedReplicas", "availableReplicas"))
    return status.get("observedGeneration") == deployment["metadata"]["generation"] and set(counts) == {wanted}


def processes(uid: str) -> list[Process]:
    """Return the processes in the containers of the pod. The process of the pod's sandbox is left out."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            cgroup, status = (path / "cgroup").read_text(), (path / "status").read_text()
            command = (path / "cmdline").read_text().replace("\0", " ")
        except OSError:  # The process has ended.
            continue
        if f"pod{uid}" in cgroup and not command.startswith("/real-node"):
            inner = next(line.split()[-1] for line in status.splitlines() if line.startswith("NSpid:"))
            found.append(Process(int(path.name), command, inner == "1"))
    return found
