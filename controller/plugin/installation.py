"""Reads the objects of an installation for ``kubectl gpuquota doctor``, and asks each replica at its own address.

The API server forwards a request to one pod (subresource ``pods/proxy``), so no port forwarding is needed.
"""

import datetime
import enum
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from controller.elector import Lease
from controller.plugin import nodes
from controller.recount import labels
from vcuda import errors, k8s_types
from vcuda.k8s_types import Decoder
from vcuda.kube import Kube, segment
from vcuda.kube.ledger_marks import MARK
from vcuda.kube.ledger_store import KEY, NAMESPACE_LABEL, TEAM_PREFIX
from vcuda.kube.team_store import TEAM_LABEL
from vcuda.quota.well_known import SYSTEM_NAMESPACES
from vcuda.requests.config import QuotaConfig, parse_config

WEBHOOK, CONTROLLER, SCHEDULER = "vcuda-webhook", "vcuda-controller", "vcuda-scheduler"
CERTIFICATES, SECRET = "vcuda-certs", "vcuda-webhook-tls"
CLIENT_CERTIFICATES = "vcuda-client-certs"
BROKEN = (*k8s_types.UNDECODABLE, KeyError, TypeError, AttributeError, ValueError)
"""The errors that reading an object may raise if somebody has edited the object."""

_LEASE, _NAMESPACE = Decoder(Lease), Decoder(k8s_types.K8sObject)
_NEVER = datetime.datetime.min.replace(tzinfo=datetime.UTC)

Json = dict[str, Any]


class Place(NamedTuple):
    """The names of an installation. ``quota``: the namespace, the name and the key of the quota ConfigMap."""

    quota: tuple[str, str, str]
    system_namespace: str
    ledger_namespace: str
    node_namespace: str
    model_label: str


class NamespaceFault(enum.StrEnum):
    """The reasons why nothing can be created in a namespace. In messages, each reason follows the namespace's name."""

    MISSING = "does not exist"
    TERMINATING = "is being deleted"


class Replica(NamedTuple):
    """A replica of the webhook. ``fault``: why the replica does not answer; empty if it is ready.

    ``metrics``: the replica's metrics without labels, by name; empty if they cannot be read.
    ``forbidden``: True if the user lacks the right to call the replica. The replica may then be ready.
    """

    pod: str
    fault: str = ""
    metrics: Mapping[str, float] = MappingProxyType({})
    forbidden: bool = False


class LeaseState(NamedTuple):
    """The Lease of the controller's leader. ``now``: the API server's time when the Lease was read."""

    holder: str
    renewed: datetime.datetime
    expires: datetime.datetime
    now: datetime.datetime


class LedgerTexts(NamedTuple):
    """The texts of the ledgers. ``texts``: by namespace. ``teams``: by team.

    ``marked``: the namespaces whose mark says that they had a ledger. ``members``: the namespaces whose ledgers have an
    allotment of a team, by team.
    """

    texts: dict[str, str]
    marked: set[str]
    teams: dict[str, str]
    members: dict[str, set[str]]


@dataclass(eq=False)
class Installation:
    """The objects of an installation. Each property is read once, and raises VcudaError if it cannot be read."""

    kube: Kube
    place: Place

    @property
    def system(self) -> str:
        """The namespace of the webhook and the controller."""
        return self.place.system_namespace

    def run(self, job: str) -> str:
        """Return the command that runs a CronJob now. `CERTIFICATES` repairs the certificates and the registration."""
        return self.kubectl(f"create job --from=cronjob/{job} {job.removeprefix('vcuda-')}-now")

    @property
    def apply(self) -> str:
        return "Apply the manifests of this release again, by kubectl apply or helm upgrade"

    def describe(self, name: str) -> str:
        return self.kubectl(f"describe pods -l app.kubernetes.io/name={name}")

    def kubectl(self, command: str) -> str:
        return f"kubectl -n {self.system} {command}"

    @functools.cached_property
    def quota_map(self) -> Json | None:
        namespace, name, _ = self.place.quota
        return self._get(f"/api/v1/namespaces/{segment(namespace)}/configmaps/{segment(name)}")

    @functools.cached_property
    def config(self) -> QuotaConfig:
        """The content of the quota ConfigMap. Raises QuotaFault if it is malformed."""
        if self.quota_map is None:
            return QuotaConfig()
        own = {self.system, self.place.ledger_namespace, self.place.node_namespace}
        version = self.quota_map["metadata"]["resourceVersion"]
        return parse_config(self.quota_map.get("data") or {}, self.place.quota[2], SYSTEM_NAMESPACES | own, version)

    def limits(self, namespace: str) -> bool:
        try:
            return self.config.quota.for_namespace(namespace) is not None
        except errors.QuotaFault as fault:
            raise errors.BadInput(f"the quota is malformed: {fault}") from fault

    def quota_changed(self) -> str:
        """Return the time of the last change of the quota ConfigMap's data, in RFC 3339."""
        metadata = self.quota_map["metadata"] if self.quota_map else {}
        changes = [
            each.get("time", "") for each in metadata.get("managedFields") or () if "f:data" in each.get("fieldsV1", {})
        ]
        return max(changes, default="") or str(metadata.get("creationTimestamp", "an unknown time"))

    @functools.cached_property
    def namespaces(self) -> Mapping[str, str | None]:
        """The values of the label `ENFORCED_LABEL` of all namespaces that are not being deleted, by namespace."""
        found = (_NAMESPACE.decode(raw) for page in self.kube.list_pages("/api/v1/namespaces") for raw in page.items)
        living = (each for each in found if not each.metadata.deletion_timestamp)
        return {each.metadata.name: each.labels.get(labels.ENFORCED_LABEL) for each in living}

    @functools.lru_cache(maxsize=8)  # noqa: B019  # a process has one installation
    def fault_of_namespace(self, name: str) -> NamespaceFault | None:
        """Return why nothing can be created in a namespace; None if it is active."""
        found = self._get(f"/api/v1/namespaces/{segment(name)}")
        if found is None:
            return NamespaceFault.MISSING
        return NamespaceFault.TERMINATING if found["metadata"].get("deletionTimestamp") else None

    @functools.cached_property
    def nodes(self) -> nodes.ClusterNodes:
        return nodes.read_nodes(self.kube, self.place.model_label, self.place.quota)

    def deployment(self, name: str) -> Json | None:
        """Return a Deployment; None if it does not exist."""
        return self._get(f"/apis/apps/v1/namespaces/{segment(self.system)}/deployments/{segment(name)}")

    def arguments(self, name: str) -> Collection[str]:
        """Return the arguments of a Deployment's first container; none if the Deployment does not exist."""
        deployment = self.deployment(name)
        return deployment["spec"]["template"]["spec"]["containers"][0].get("args") or () if deployment else ()

    def account(self, name: str) -> Json | None:
        """Return a ServiceAccount; None if it does not exist."""
        return self._get(f"/api/v1/namespaces/{segment(self.system)}/serviceaccounts/{segment(name)}")

    @functools.cached_property
    def other_quotas(self) -> Mapping[str, str]:
        """The quota ConfigMaps, as NAMESPACE/NAME, of the Deployments that use another one than `place`."""
        found = dict[str, str]()
        for name in (WEBHOOK, CONTROLLER):
            pairs = (each.partition("=") for each in self.arguments(name))
            found.update((name, value) for flag, _, value in pairs if flag == "--quota-configmap")
        return {name: other for name, other in found.items() if other != "/".join(self.place.quota[:2])}

    @functools.lru_cache(maxsize=8)  # noqa: B019  # a process has one installation
    def cron_job(self, name: str) -> Json | None:
        """Return a CronJob; None if it does not exist."""
        return self._get(f"/apis/batch/v1/namespaces/{segment(self.system)}/cronjobs/{segment(name)}")

    @functools.lru_cache(maxsize=8)  # noqa: B019  # a process has one installation
    def pods(self, name: str) -> Mapping[str, Json]:
        """Return the pods of a Deployment that are not being deleted and have not ended, by name."""
        path = f"/api/v1/namespaces/{segment(self.system)}/pods"
        found = self._list(path, {"labelSelector": f"app.kubernetes.io/name={name}"})
        return {
            each["metadata"]["name"]: each
            for each in found
            if not each["metadata"].get("deletionTimestamp")
            and (each.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
        }

    @functools.cached_property
    def replicas(self) -> tuple[Replica, ...]:
        return tuple(self._ask(name, pod) for name, pod in self.pods(WEBHOOK).items())

    def fault_of(self, pod: Json) -> str:
        """Return why a pod is not ready, as its status says; empty if it is ready."""
        status = pod.get("status") or {}
        conditions = {each["type"]: each for each in status.get("conditions") or ()}
        if conditions.get("Ready", {}).get("status") == "True":
            return ""
        waiting = [(each.get("state") or {}).get("waiting") for each in status.get("containerStatuses") or ()]
        reasons = [f"{each.get('reason', '')} {each.get('message', '')}".strip() for each in waiting if each]
        reasons += [conditions[name].get("message", "") for name in ("PodScheduled", "Ready") if name in conditions]
        reason = next(filter(None, reasons), "")
        return f"is not ready, in phase {status.get('phase', 'Pending')}{reason and f': {reason}'}"

    @property
    def images(self) -> Mapping[str, str]:
        pods = {**self.pods(WEBHOOK), **self.pods(CONTROLLER)}
        return {f"pod {name}": pod["spec"]["containers"][0]["image"] for name, pod in pods.items()}

    def template_images(self) -> Mapping[str, str]:
        found = dict[str, str]()
        for name in (WEBHOOK, CONTROLLER):
            if deployment := self.deployment(name):
                found[f"Deployment {name}"] = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
        if job := self.cron_job(CERTIFICATES):
            template = job["spec"]["jobTemplate"]["spec"]["template"]
            found[f"CronJob {CERTIFICATES}"] = template["spec"]["containers"][0]["image"]
        return found

    def lease(self) -> LeaseState:
        path = f"/apis/coordination.k8s.io/v1/namespaces/{segment(self.system)}/leases/{CONTROLLER}"
        try:
            heard = self.kube.get_heard(path)
        except errors.NotFound:
            return LeaseState("", _NEVER, _NEVER, datetime.datetime.now(datetime.UTC))
        spec = _LEASE.decode(heard.body).spec
        renewed = datetime.datetime.fromisoformat(spec.renew_time) if spec.renew_time else _NEVER
        expires = renewed + datetime.timedelta(seconds=spec.lease_duration_seconds or 0)
        return LeaseState(
            spec.holder_identity or "", renewed, expires, heard.date or datetime.datetime.now(datetime.UTC)
        )

    @functools.lru_cache(maxsize=8)  # noqa: B019  # a process has one installation
    def secret(self, name: str) -> Json | None:
        """Return a Secret; None if it does not exist."""
        return self._get(f"/api/v1/namespaces/{segment(self.system)}/secrets/{segment(name)}")

    def config_map(self, name: str) -> Json | None:
        """Return a ConfigMap; None if it does not exist."""
        return self._get(f"/api/v1/namespaces/{segment(self.system)}/configmaps/{segment(name)}")

    def renewal(self, job: str = CERTIFICATES) -> str:
        """Return the command that renews the certificate of a CronJob, and for `CERTIFICATES` also the caBundles. If
        cert-manager writes the webhook's certificate, the command shows the state of cert-manager."""
        renew = f"Renew the certificate: {self.run(job)}"
        if job == CLIENT_CERTIFICATES:
            return f"{renew}. Then copy it to each API server: vcuda-certs client files --write"
        if job != CERTIFICATES:
            return renew
        configuration = self._get("/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/vcuda-quota")
        annotations = [each["metadata"].get("annotations", {}) for each in (self.secret(SECRET), configuration) if each]
        if any(key.startswith("cert-manager.io/") for key in itertools.chain(*annotations)):
            certificates = self.kubectl("describe certificates,certificaterequests")
            return f"See why cert-manager does not renew it: {certificates}, and kubectl -n cert-manager get pods"
        return renew

    @functools.cached_property
    def ledgers(self) -> LedgerTexts:
        found = LedgerTexts({}, set(), {}, {})
        for each in self._list(f"/api/v1/namespaces/{segment(self.place.ledger_namespace)}/configmaps"):
            metadata, text = each["metadata"], (each.get("data") or {}).get(KEY, "")
            own: Mapping[str, str] = metadata.get("labels") or {}
            if namespace := own.get(NAMESPACE_LABEL):
                found.texts[namespace] = text
                for key in own:
                    if key.startswith(TEAM_PREFIX):
                        found.members.setdefault(key.removeprefix(TEAM_PREFIX), set()).add(namespace)
            elif team := own.get(TEAM_LABEL):
                found.teams[team] = text
            elif metadata["name"].startswith(MARK):
                found.marked.add(metadata["name"].removeprefix(MARK))
        return found

    def _ask(self, name: str, pod: Json) -> Replica:
        if (pod.get("status") or {}).get("phase") != "Running" or not pod["status"].get("podIP"):
            return Replica(name, self.fault_of(pod))
        port = next(each["containerPort"] for each in pod["spec"]["containers"][0]["ports"] if each["name"] == "https")
        path = f"/api/v1/namespaces/{segment(self.system)}/pods/https:{segment(name)}:{port}/proxy"
        try:
            self.kube.get(f"{path}/readyz")
        except errors.VcudaError as error:
            forbidden = isinstance(error, errors.Forbidden)
            return Replica(
                name, f"cannot be asked: {error}" if forbidden else f"does not answer: {error}", {}, forbidden
            )
        try:
            return Replica(name, "", dict(_unlabelled(self.kube.get(f"{path}/metrics").decode(errors="replace"))))
        except errors.VcudaError:  # the webhook may serve its metrics only to clients with a certificate
            return Replica(name)

    def _get(self, path: str) -> Json | None:
        try:
            found: Json = msgspec.json.decode(self.kube.get(path))
        except errors.NotFound:
            return None
        return found

    def _list(self, path: str, params: Mapping[str, str] | None = None) -> Iterator[Json]:
        for page in self.kube.list_pages(path, params):
            yield from (msgspec.json.decode(raw) for raw in page.items)


def _unlabelled(text: str) -> Iterator[tuple[str, float]]:
    for family in text_string_to_metric_families(text):
        yield from ((each.name, each.value) for each in family.samples if not each.labels)
