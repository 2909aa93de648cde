"""A test double of a cluster with a healthy installation, for tests of the command `kubectl gpuquota doctor`."""

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import yaml

from examples.discovery import A100, hami, labelled, node
from tests.gpuquota import Cluster
from tests.quota_map import QUOTA
from tests.rbac import is_allowed, path_of_rule
from tests.rendered import MANIFESTS
from vcuda.errors import Forbidden, VcudaError
from vcuda.ledger.ledger import Ledger
from vcuda.ledger.team import TeamLedger, write_team_ledger
from vcuda.ledger.text import write_ledger
from vcuda.registration import ANNOTATION, CALLED, PROBE, RESOURCES
from vcuda.tls import OURS, WRITTEN_BY, serving_files
from vcuda.x509 import Names, make_authority, make_leaf

Json = dict[str, Any]
SYSTEM, LEDGERS = "/api/v1/namespaces/vcuda-quota", "/api/v1/namespaces/vcuda-quota-ledgers/configmaps"
DEPLOYMENTS = "/apis/apps/v1/namespaces/vcuda-quota/deployments"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/vcuda-quota/leases/vcuda-controller"
SECRET = f"{SYSTEM}/secrets/vcuda-webhook-tls"
CRON_JOBS = "/apis/batch/v1/namespaces/vcuda-quota/cronjobs"
CRON_JOB = f"{CRON_JOBS}/vcuda-certs"
NOW = datetime.now(UTC).replace(microsecond=0)
CREATED = f"{NOW - timedelta(days=1):%FT%TZ}"
READY = {"type": "Ready", "status": "True"}


ADMISSION = "/apis/admissionregistration.k8s.io/v1"
OF_MUTATING = f"{ADMISSION}/mutatingwebhookconfigurations/00-vcuda-quota"
OF_VALIDATING = f"{ADMISSION}/validatingwebhookconfigurations/vcuda-quota"
OF_POLICY = f"{ADMISSION}/validatingadmissionpolicies/ledgers.quota.vcuda.io"
OF_BINDING = f"{ADMISSION}/validatingadmissionpolicybindings/ledgers.quota.vcuda.io"
DEFAULTS = {"matchPolicy": "Equivalent", "objectSelector": {}}


def documents(name: str) -> list[Json]:
    return [*yaml.safe_load_all((MANIFESTS / "base" / name).read_text())]


def path_of(manifest: Json) -> str:
    return f"{ADMISSION}/{RESOURCES[manifest['kind']]}/{manifest['metadata']['name']}"


def with_webhooks(configuration: Json) -> Json:
    """Return the configuration with its declared webhooks, as the API server stores it after their registration."""
    webhooks = yaml.safe_load(configuration["metadata"]["annotations"][ANNOTATION])
    trusting = ({**each, "clientConfig": {**each["clientConfig"], "caBundle": "Q0E="}} for each in webhooks)
    return {**configuration, "webhooks": [{**DEFAULTS, **each} for each in trusting]}


def spec(image: str = "vcuda-quota:1") -> Json:
    ports = [{"name": "https", "containerPort": 8443}]
    return {"containers": [{"name": "main", "image": image, "ports": ports}]}


def pod(image: str = "vcuda-quota:1", **status: Any) -> Json:
    return {"spec": spec(image), "status": {"phase": "Running", "podIP": "10.0.0.7", "conditions": [READY], **status}}


class Installed(Cluster):
    """A cluster with a healthy installation. ``pages``: what the replicas of the webhook serve, by pod and HTTP path.

    ``rejected``: the rejections of API requests, each by a part of the request's path.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pages: dict[str, bytes | VcudaError] = {}
        self.rejected: dict[str, VcudaError] = {}
        self.probe: VcudaError | None = Forbidden(403, f"denied the request: {CALLED}")
        self.policy: VcudaError | None = Forbidden(403, "ValidatingAdmissionPolicy 'in-effect.quota.vcuda.io' denied")
        self.store("/version", {})
        for manifest in map(with_webhooks, documents("registration.yaml")):
            self.store(path_of(manifest), manifest)
        for name in ("webhook-rbac.yaml", "controller-rbac.yaml", "certs-rbac.yaml"):
            for manifest in documents(name):
                manifest["metadata"]["creationTimestamp"] = CREATED
                self.store(path_of_rule(manifest), manifest)
        for manifest in (*documents("policies.yaml"), *documents("usage-policy.yaml")):
            self.store(path_of(manifest), manifest)
        self.issue(NOW)
        for name, replicas in (("vcuda-webhook", 2), ("vcuda-controller", 2)):
            template, metadata = {"spec": spec()}, {"name": name, "generation": 2}
            status = {"observedGeneration": 2, "updatedReplicas": replicas, "availableReplicas": replicas}
            deployment = {"metadata": metadata, "spec": {"replicas": replicas, "template": template}, "status": status}
            self.store(f"{DEPLOYMENTS}/{name}", deployment)
            for number in range(replicas):
                self.store_pod(name, f"{name}-{number}", pod())
        template = {"spec": {"template": {"spec": spec()}}}
        self.store(CRON_JOB, {"metadata": {"creationTimestamp": CREATED}, "spec": {"jobTemplate": template}})
        self.renew_lease(NOW + timedelta(hours=1))
        for name, label in (
            *(("team-a", None), ("free", "false"), ("kube-system", "false")),
            *(("vcuda-quota", "false"), ("vcuda-quota-ledgers", "false")),
        ):
            self.label(name, label)
        self.store("/api/v1/nodes/h1", node(hami(A100), labelled("A100"), name="h1"))
        self.quota("team-a: {quota: {A100: 1}}")
        self.store_ledger("team-a", Ledger())

    def store_pod(self, name: str, pod_name: str, manifest: Json) -> None:
        labels = {"app.kubernetes.io/name": name}
        metadata = {"name": pod_name, "namespace": "vcuda-quota", "labels": labels, "creationTimestamp": CREATED}
        self.store(f"{SYSTEM}/pods/{pod_name}", {**manifest, "metadata": metadata})

    def renew_lease(self, at: datetime) -> None:
        times = {"renewTime": f"{at:%FT%T.%fZ}", "leaseDurationSeconds": 30}
        self.store(LEASE, {"metadata": {}, "spec": {"holderIdentity": "vcuda-controller-0-x", **times}})

    def issue(self, at: datetime) -> None:
        """Store a certificate that was issued at this time, and let all replicas serve it."""
        authority = make_authority(at)
        leaf = make_leaf(authority, Names(("localhost",)), at)
        files = {each.name: base64.b64encode(each.content).decode() for each in serving_files(authority, leaf)}
        self.store(SECRET, {"metadata": {"name": "vcuda-webhook-tls", "labels": {WRITTEN_BY: OURS}}, "data": files})
        expiry = leaf.certificate.not_valid_after_utc.timestamp()
        for number in range(2):
            self.serve(number, vcuda_quota_config_valid=1, vcuda_serving_certificate_expiry_seconds=expiry)

    def install_part(self, name: str, at: datetime = NOW) -> None:
        """Install the certificates of an optional part, which were issued at this time.

        ``name``: ``extender``, or a client certificate, whose CA is in a ConfigMap: ``client`` or ``scheduler``.
        """
        job = f"vcuda-{name}-certs"
        self.store(f"{SYSTEM}/serviceaccounts/{job}", {"metadata": {"name": job, "creationTimestamp": CREATED}})
        metadata = {"name": job, "creationTimestamp": CREATED}
        self.store(f"{CRON_JOBS}/{job}", {"metadata": metadata, "spec": {"jobTemplate": {}}})
        authority = make_authority(at)
        leaf = make_leaf(authority, Names(("localhost",)), at)
        files = {each.name: each.content for each in serving_files(authority, leaf)}
        if name != "extender":
            data = {"ca.crt": files.pop("ca.crt").decode()}
            self.store(f"{SYSTEM}/configmaps/vcuda-{name}-ca", {"metadata": {}, "data": data})
        encoded = {key: base64.b64encode(content).decode() for key, content in files.items()}
        own = {"name": f"vcuda-{name}-tls", "labels": {WRITTEN_BY: OURS}}
        self.store(f"{SYSTEM}/secrets/vcuda-{name}-tls", {"metadata": own, "data": encoded})

    def serve(self, number: int, **metrics: float) -> None:
        text = "".join(f"{name} {value:.0f}\n" for name, value in metrics.items())
        self.pages |= {f"{number}/readyz": b"ok\n", f"{number}/metrics": text.encode()}

    def label(self, namespace: str, value: str | None, **metadata: str) -> None:
        own = {"name": namespace, "labels": {"quota.vcuda.io/enforced": value} if value else {}, **metadata}
        self.store(f"/api/v1/namespaces/{namespace}", {"metadata": own})

    def quota(self, document: str, teams: str = "{}", **metadata: Any) -> None:
        fields = [{"time": "2026-11-20T10:00:00Z", "fieldsV1": {"f:data": {}}}]
        labels = {"quota.vcuda.io/config": "true"}
        own = {"name": "gpuquota", "namespace": "kube-system", "labels": labels, "managedFields": fields, **metadata}
        self.store(QUOTA, {"metadata": own, "data": {"gpu_quota": document, "gpu_teams": teams}})

    def store_ledger(self, namespace: str, ledger: Ledger | str, team: str = "") -> None:
        text = ledger if isinstance(ledger, str) else write_ledger(ledger)
        name, labels = f"gpu-ledger-{namespace}", {"quota.vcuda.io/ledger-of": namespace}
        if team:
            labels[f"team.quota.vcuda.io/{team}"] = ""
        self.store(f"{LEDGERS}/{name}", {"metadata": {"name": name, "labels": labels}, "data": {"ledger": text}})

    def store_team_ledger(self, team: str, ledger: TeamLedger | str) -> None:
        text = ledger if isinstance(ledger, str) else write_team_ledger(ledger)
        name, labels = f"gpu-ledger-team.{team}", {"quota.vcuda.io/team-ledger-of": team}
        self.store(f"{LEDGERS}/{name}", {"metadata": {"name": name, "labels": labels}, "data": {"ledger": text}})

    def _check_rejected(self, path: str) -> None:
        for part, rejection in self.rejected.items():
            if part in path:
                raise rejection

    def get(self, path: str, _params: object = None, timeout: float = 10) -> bytes:
        self._check_rejected(path)
        if "/proxy/" not in path:
            return super().get(path, timeout=timeout)
        found = self.pages[path.removeprefix(f"{SYSTEM}/pods/https:vcuda-webhook-").replace(":8443/proxy", "")]
        if isinstance(found, VcudaError):
            raise found
        return found

    def post(self, path: str, body: bytes, params: object = None, timeout: float = 10) -> bytes:
        if path.endswith("/subjectaccessreviews"):
            self._check_rejected(path)
            return json.dumps({"status": {"allowed": is_allowed(self.objects, json.loads(body))}}).encode()
        assert (params, json.loads(body)["metadata"]["name"]) == ({"dryRun": "All"}, PROBE)
        if rejection := self.probe if path.startswith("/api/v1/namespaces/kube-system/") else self.policy:
            raise rejection
        return self.get("/version", timeout=timeout)
