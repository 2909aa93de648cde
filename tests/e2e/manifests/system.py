"""Runs the whole system as processes: every workload of the manifests, with its flags and the token of its account."""

import base64
import json
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from pathlib import Path

import yaml

from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import LEASES, SYSTEM_NAMESPACE, drop_lease
from tests.e2e.manifests.balancer import Balancer, balancing
from tests.e2e.rest import Answer
from tests.e2e.second_scheduler import NAME as SCHEDULER, Credentials, config_file, scheduling
from tests.e2e.stage import CORE, SLICES, own_address
from tests.kubectl import kubectl
from tests.processes import SCRIPTS, ControllerProcess, NodeProcess, WebhookProcess, eventually
from tests.rendered import composed, container, label, one, pod_spec, rendered
from tools.component import Component
from tools.ports import free_ports

NODE = "gpu-1"
CERTIFICATES = "vcuda-certs-first"
EXTENDER = "vcuda-extender"
PAGE = "vcuda-page"
CONTROLLER = (SCRIPTS / "vcuda-controller",)
WEBHOOKS = "quota.vcuda.io/webhooks"
CLIENT = "vcuda-client"
FIRST_JOBS = (CERTIFICATES, *(f"{name}-certs-first" for name in (EXTENDER, SCHEDULER, CLIENT)))
"""The Jobs that issue the first certificates.

The template of a Job is immutable. So a Job of an earlier system is deleted before the manifests are applied.
"""
LEFT_BEHIND = (
    *(
        f"{CORE}/secrets/{name}-{part}"
        for name in ("vcuda-webhook", EXTENDER, SCHEDULER, CLIENT)
        for part in ("ca", "tls")
    ),
    *(f"{CORE}/configmaps/{name}-ca" for name in (SCHEDULER, CLIENT)),
    f"{SLICES}/{EXTENDER}",
    f"{SLICES}/{PAGE}",
    f"{LEASES}/{SCHEDULER}",
    *(f"/apis/batch/v1/namespaces/{SYSTEM_NAMESPACE}/jobs/{job}" for job in FIRST_JOBS),
    "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/00-vcuda-quota",
    "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/vcuda-quota",
)
"""Objects of an earlier system that would affect the next system in the same cluster, such as its certificates."""


@dataclass(frozen=True)
class System:
    """The system whose manifests are applied to a cluster. A test starts each of its programs separately.

    ``balancer``: acts as the webhook's Service. ``directory``: for certificates and other files of the programs.
    ``chart``: the chart, if Helm has applied the manifests. ``helm``: the name of the program helm.
    """

    cluster: Cluster
    balancer: Balancer
    kustomization: Path
    directory: Path
    chart: Path | None = None
    helm: str = "helm"

    @cached_property
    def objects(self) -> list[Json]:
        return rendered(self.kustomization)

    @cached_property
    def quota_config_map(self) -> tuple[str, str]:
        flag = "--quota-configmap="
        [value] = [each for each in container(self.workload("Deployment", "vcuda-webhook"))["args"] if flag in each]
        namespace, _, name = value.removeprefix(flag).partition("/")
        return namespace, name

    def workload(self, kind: str, name: str) -> Json:
        return one(self.objects, kind, name)

    def rotate(self, name: str = CERTIFICATES, **flags: str) -> subprocess.CompletedProcess[str]:
        job = self.workload("Job", name)
        changed: dict[str, str | Path] = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
        changed["--kubeconfig"] = account_of(self.cluster, job)
        return self._run(command_of(job, changed))

    def certs(self, command: str, **flags: str) -> subprocess.CompletedProcess[str]:
        """Run a command of vcuda-certs as an administrator, with Job `CERTIFICATES`' flags except --timeout."""
        job = self.workload("Job", CERTIFICATES)
        changed: dict[str, str | Path] = {f"--{name}": value for name, value in flags.items()}
        [program, _, *names] = command_of(job, {**changed, "--kubeconfig": self.cluster.kubeconfig})
        return self._run([program, command, *(each for each in names if not each.startswith("--timeout="))])

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (SCRIPTS / command[0], *command[1:]), capture_output=True, text=True, check=False, timeout=120
        )

    def webhook(self) -> WebhookProcess:
        """Run a replica of the webhook. The Service does not route to it yet."""
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
        process.tls.check_hostname = False  # the test calls the replica by its IP address, as kubelet does
        return process

    def controller(self, program: Sequence[str | Path] = CONTROLLER, **flags: str) -> ControllerProcess:
        """Run a controller. It becomes the leader, or a standby if another controller leads.

        ``flags`` override the flags of the Deployment.
        """
        deployment = self.workload("Deployment", "vcuda-controller")
        changed: dict[str, str | Path] = {
            "--status-address": "127.0.0.1:0",
            "--ui-address": "127.0.0.1:0",
            "--kubeconfig": account_of(self.cluster, deployment),
            **self._extender_flags(deployment),
            **{f"--{name.replace('_', '-')}": value for name, value in flags.items()},
        }
        own, command, *rest = command_of(deployment, changed, POD_IP="192.0.2.1")
        assert (own, command) == ("vcuda-controller", "run")
        return ControllerProcess(*rest, program=program)

    def _extender_flags(self, deployment: Json) -> dict[str, str | Path]:
        if "volumes" not in pod_spec(deployment):
            return {}
        address = f"{own_address()}:{free_ports(1)[0]}"
        certificates = self.mount_extender_certificates()
        where: dict[str, str | Path] = {"--extender-address": address, "--extender-advertise": address}
        client_ca = self.directory / "client-ca.crt"
        trusted = self.cluster.rest.get(f"{CORE}/configmaps/{SCHEDULER}-ca")["data"]["ca.crt"]
        client_ca.write_text(trusted)
        return {**where, "--extender-cert-dir": certificates, "--extender-client-ca": client_ca}

    def mount_extender_certificates(self) -> Path:
        certificates = self.directory / "extender-certificates"
        mount_secret(self.cluster, self.workload("Deployment", "vcuda-controller"), certificates)
        return certificates

    @contextmanager
    def scheduler(self, extender: str) -> Iterator[Component]:
        """Run the second scheduler with its own Lease. It calls the extender at this address (IP:PORT)."""
        deployment = self.workload("Deployment", SCHEDULER)
        account = account_of(self.cluster, deployment)
        mounted = self.directory / "scheduler"
        mount_secret(self.cluster, deployment, mounted)
        credentials = Credentials(*(mounted / name for name in ("ca.crt", "tls.crt", "tls.key")))
        file = config_file(self.cluster.control_plane, f"https://{extender}", credentials, mounted)
        config = json.loads(file.read_text())
        config["clientConnection"]["kubeconfig"] = str(account)
        config["leaderElection"] = self._scheduler_config()["leaderElection"]
        config["extenders"][0]["tlsConfig"]["serverName"] = f"{EXTENDER}.{SYSTEM_NAMESPACE}.svc"
        file.write_text(json.dumps(config))
        flags = ("config", file), ("authentication-kubeconfig", account), ("authorization-kubeconfig", account)
        with scheduling(self.cluster.control_plane, *(f"--{name}={value}" for name, value in flags)) as running:
            yield running

    def _scheduler_config(self) -> Json:
        [found] = [each for each in self.objects if label(each).startswith(f"ConfigMap/{SCHEDULER}-config-")]
        config: Json = yaml.safe_load(found["data"]["scheduler-config.yaml"])
        return config

    def node_agent(self) -> NodeProcess:
        """Create the node agent's pod on the node `NODE`, and run the agent with directories of this test."""
        daemon_set = self.workload("DaemonSet", "vcuda-node-gpu-manager")
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
        (kubelet_pods / pod["metadata"]["uid"]).mkdir()
        _, _, *rest = command_of(daemon_set, changed, NODE_NAME=NODE, POD_UID=pod["metadata"]["uid"])
        return NodeProcess(*rest)

    def _agents_pod(self, daemon_set: Json) -> Json:
        namespace, name = daemon_set["metadata"]["namespace"], f"vcuda-node-{uuid.uuid4().hex[:5]}"
        metadata = {"namespace": namespace, "name": name}
        spec = {"nodeName": NODE, "containers": [{"name": "node", "image": "vcuda-quota"}]}
        self.cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        return self.cluster.run_pod(namespace, name)

    @contextmanager
    def serving(self, replicas: int) -> Iterator[list[WebhookProcess]]:
        """Issue all first certificates, run replicas of the webhook, and register the webhooks.

        When the ``with`` statement begins, the replicas are ready, and the Service routes to them.
        """
        for job in (each for each in self.objects if each["kind"] == "Job"):
            name = job["metadata"]["name"]
            # No replica answers yet, so the Job `CERTIFICATES` must not wait for one. No process has loaded a CA of
            # client certificates yet, so both CAs need to be trusted for only one second.
            changed = {"overlap": "1s"} if name.startswith((SCHEDULER, CLIENT)) else {}
            done = self.rotate(name, **({"timeout": "0s"} if name == CERTIFICATES else changed))
            assert done.returncode == 0, done.stdout + done.stderr
        with ExitStack() as stack:
            processes = [stack.enter_context(self.webhook()) for _ in range(replicas)]
            for process in processes:
                process.await_ready()
                self.balancer.add(port_of(process))
                stack.callback(self.balancer.remove, port_of(process))
            self.register()
            yield processes

    def renew(self) -> subprocess.CompletedProcess[str]:
        """Run the Job `CERTIFICATES` again. The replicas may still serve the earlier certificate after that."""
        # The webhook's Service is of type ExternalName and has no endpoints, so the Job gets the balancer's address.
        done = self.rotate(timeout="60s", endpoint=f"127.0.0.1:{self.balancer.port}")
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def register(self) -> None:
        done = self.renew()
        eventually(
            lambda: self._try_wrong_quota().status == HTTPStatus.UNPROCESSABLE_ENTITY,
            lambda: done.stdout + self._try_wrong_quota().message,
        )

    def _try_wrong_quota(self) -> Answer:
        """Create a malformed quota in a dry run, and return the answer: a rejection if the webhooks are in effect."""
        namespace, name = self.quota_config_map
        metadata = {"namespace": namespace, "name": name, "labels": {"quota.vcuda.io/config": "true"}}
        wrong = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"gpu_quota": "{team-a: 8}"}}
        return self.cluster.try_create(wrong, dryRun="All")


def port_of(process: WebhookProcess) -> int:
    return int(process.url.rpartition(":")[2])


@contextmanager
def applied(cluster: Cluster, directory: Path, *components: str) -> Iterator[System]:
    """Delete the objects of an earlier system, and apply manifests/base with these components."""
    remove_left_behind(cluster)
    with balancing() as balancer:
        kustomization = reachable(directory, components, balancer.port)
        apply(cluster, kustomization, "--server-side", "--force-conflicts")
        drop_lease(cluster)
        yield System(cluster, balancer, kustomization, directory)


def remove_left_behind(cluster: Cluster) -> None:
    for path in LEFT_BEHIND:
        answer = cluster.rest.send("DELETE", path)
        assert answer.status in (HTTPStatus.OK, HTTPStatus.NOT_FOUND)


TIMEOUT = 120


def reachable(directory: Path, components: Sequence[str], port: int) -> Path:
    """Write a kustomization of the base and these components. The API server calls its webhooks at a ``port`` of this
    machine.

    For this, the webhook's Service is of type ExternalName. The API server still expects a certificate for
    NAME.NAMESPACE.svc.
    """
    target = composed(directory, components)
    spec = {"type": "ExternalName", "externalName": "localhost"}
    service = [{"op": "replace", "path": "/spec", "value": spec}]
    patches = [{"target": {"kind": "Service", "name": "vcuda-webhook"}, "patch": json.dumps(service)}]
    for registration in (each for each in rendered(target) if each["kind"].endswith("WebhookConfiguration")):
        text = registration["metadata"]["annotations"][WEBHOOKS].replace("port: 443", f"port: {port}")
        declare = [{"op": "replace", "path": f"/metadata/annotations/{WEBHOOKS.replace('/', '~1')}", "value": text}]
        patches.append({"target": {"kind": registration["kind"]}, "patch": json.dumps(declare)})
    file = target / "kustomization.yaml"
    file.write_text(json.dumps({**json.loads(file.read_text()), "patches": patches}))
    return target


def kubectl_k(cluster: Cluster, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    cache = cluster.control_plane.directory / "kubectl-k-cache"
    command = (kubectl(), f"--kubeconfig={cluster.kubeconfig}", f"--cache-dir={cache}", *map(str, arguments))
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)


def apply(cluster: Cluster, directory: Path, *flags: str) -> str:
    done = kubectl_k(cluster, "apply", *flags, "-k", directory)
    assert done.returncode == 0, done.stderr
    return done.stdout


def command_of(workload: Json, changed: Mapping[str, str | Path], **fields: str) -> list[str]:
    """Return the command line of a workload.

    ``changed``: flags with new values. A flag of the manifest is replaced, and any other flag is added at the end.
    ``fields``: values of environment variables that the downward API sets.
    """
    given = container(workload)["args"]
    left = dict(changed)
    arguments = []
    for each in given:
        flag, equals, value = expanded(each, fields).partition("=")
        if flag in left:
            arguments.append(f"{flag}={left.pop(flag)}")
        else:
            arguments.append(flag + equals + value)
    return [*arguments, *(f"{flag}={value}" for flag, value in left.items())]


def expanded(argument: str, fields: Mapping[str, str]) -> str:
    for name, value in fields.items():
        argument = argument.replace(f"$({name})", value)
    return argument


def account_of(cluster: Cluster, workload: Json) -> Path:
    name = pod_spec(workload)["serviceAccountName"]
    return cluster.kubeconfig_for_token(cluster.service_account_token(workload["metadata"]["namespace"], name))


def user_of(workload: Json) -> str:
    return f"system:serviceaccount:{workload['metadata']['namespace']}:{pod_spec(workload)['serviceAccountName']}"


def mount_secret(cluster: Cluster, workload: Json, directory: Path) -> None:
    """Write the workload's Secrets to files, as the kubelet does. If a volume lists keys, write only these."""
    directory.mkdir(exist_ok=True)
    for secret in (volume["secret"] for volume in pod_spec(workload)["volumes"] if "secret" in volume):
        path = f"/api/v1/namespaces/{workload['metadata']['namespace']}/secrets/{secret['secretName']}"
        data = cluster.rest.get(path)["data"]
        for item in secret.get("items", [{"key": key, "path": key} for key in data]):
            new = directory / f".{item['path']}"
            new.write_bytes(base64.b64decode(data[item["key"]]))
            new.replace(directory / item["path"])
