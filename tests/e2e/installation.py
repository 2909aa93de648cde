"""Installs the webhook and controllers for a test, with certificates, registration and quota.

Functions here also await states of the ledger and of the published usage.
"""

import base64
import json
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import yaml

from tests.builders import MODEL, POOL
from tests.e2e.cluster import Cluster, Json, webhook
from tests.e2e.quota_config import CONFIG, QuotaConfigMap
from tests.match_conditions import base_conditions
from tests.processes import ControllerProcess, WebhookProcess, eventually, serving
from vcuda.ledger.ledger import Ledger
from vcuda.ledger.text import read_ledger
from vcuda.tls import leaf_files, serving_files, write_files
from vcuda.x509 import DEVELOPMENT, make_authority, make_client, make_leaf

SYSTEM_NAMESPACE, LEDGER_NAMESPACE = "vcuda-quota", "vcuda-quota-ledgers"
ENFORCED = "quota.vcuda.io/enforced"
NOT_EXEMPT = {"key": ENFORCED, "operator": "NotIn", "values": ["false"]}
SERVED_BY = "e2e.vcuda.io/served-by"
"""A label of namespaces and quota ConfigMaps that names their installation, so that tests do not affect each other."""

REPLICA = "e2e.vcuda.io/replica"
"""A label of pods: the number of the replica that reviews the pod. The first replica reviews pods without the label."""

MAX_REPLICAS = 5
Flag = str | Path
CLAIM_RULE = {
    "apiGroups": ["resource.k8s.io"],
    "apiVersions": ["v1"],
    "operations": ["CREATE"],
    "scope": "Namespaced",
    "resources": ["resourceclaims", "resourceclaimtemplates"],
}
CONFIG_MAP = {"group": "", "version": "v1", "kind": "ConfigMap"}


@dataclass(frozen=True)
class Installation:
    """The replicas of a webhook, with their own namespaces and quota.

    ``label``: the label value of the namespaces that the replicas serve. ``ca``: the file of the CA of their
    certificates. ``patience``: the seconds after which the API server ends a call of a webhook.
    """

    cluster: Cluster
    label: str
    replicas: Sequence[WebhookProcess]
    quota: QuotaConfigMap
    flags: tuple[Flag, ...]
    ca: Path
    patience: int

    @property
    def replica(self) -> WebhookProcess:
        """Return the first replica, which reviews all pods without the label `REPLICA`."""
        return self.replicas[0]

    @contextmanager
    def team(self, entry: Json) -> Iterator[str]:
        """Add a quota entry, and create its namespace. At the end of the ``with`` statement, delete the namespace."""
        name = f"e2e-{secrets.token_hex(4)}"
        self.quota.limit(**{name: entry})
        with self.cluster.fresh_namespace({SERVED_BY: self.label}, name):
            yield name

    def free_team(self) -> AbstractContextManager[str]:
        return self.cluster.fresh_namespace({SERVED_BY: self.label})

    def ledger(self, namespace: str) -> Ledger:
        """Return the stored ledger of ``namespace``. Without one, return an empty ledger."""
        answer = self.cluster.rest.send("GET", ledger_path(namespace))
        if answer.status == HTTPStatus.NOT_FOUND:
            return Ledger()
        return read_ledger(answer.ok()["data"]["ledger"])

    def charged(self, namespace: str) -> dict[str, int]:
        return charged(self.ledger(namespace))

    def mutating(self) -> list[Json]:
        return self._ask_about_pods("mutate", "Ignore", {SERVED_BY: self.label})

    def validating(self) -> list[Json]:
        return self._ask_about_pods("validate", "Fail", {SERVED_BY: self.label})

    def checking_quota(self) -> Json:
        rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"]}
        return self._webhook(
            "config.quota.vcuda.io",
            f"{self.replica.url}/quota",
            rules=[{**rule, "operations": ["CREATE", "UPDATE"]}],
            objectSelector={"matchLabels": {**CONFIG, SERVED_BY: self.label}},
        )

    def _ask_about_pods(self, path: str, failure_policy: str, labels: Json) -> list[Json]:
        # The first replica reviews all objects without a label for one of the other replicas.
        first = {"operator": "NotIn", "values": [str(number) for number in range(1, MAX_REPLICAS)]}
        asked = [first, *({"operator": "In", "values": [str(number)]} for number in range(1, MAX_REPLICAS))]
        name = f"{path}.quota.vcuda.io"
        every = {"": {"matchConditions": base_conditions(name)}, "-claims": {"rules": [CLAIM_RULE]}}
        return [
            self._webhook(
                f"{path}{what}-{number}.quota.vcuda.io" if number else f"{path}{what}.quota.vcuda.io",
                f"{replica.url}/{path}",
                failurePolicy=failure_policy,
                namespaceSelector={"matchLabels": labels, "matchExpressions": [NOT_EXEMPT]},
                objectSelector={"matchExpressions": [{"key": REPLICA, **asked[number]}]},
                **fields,
            )
            for number, replica in enumerate(self.replicas)
            for what, fields in every.items()
        ]

    def _webhook(self, name: str, url: str, **fields: object) -> Json:
        ca = base64.b64encode(self.ca.read_bytes()).decode()
        return webhook(name, url, ca, timeoutSeconds=self.patience, **fields)


LEDGERS = f"/api/v1/namespaces/{LEDGER_NAMESPACE}/configmaps"


def ledger_path(namespace: str) -> str:
    return f"{LEDGERS}/gpu-ledger-{namespace}"


@contextmanager
def installed(cluster: Cluster, directory: Path, **fields: Any) -> Iterator[Installation]:
    """Run the webhook replicas of an installation, and register all their webhooks."""
    with running(cluster, directory, **fields) as installation:
        await_ready(installation)
        with registered(installation):
            yield installation


@contextmanager
def running(
    cluster: Cluster,
    directory: Path,
    *,
    replicas: int = 1,
    kubeconfig: Path | None = None,
    quota: QuotaConfigMap | None = None,
    patience: int = 10,
    flags: Sequence[Flag] = (),
) -> Iterator[Installation]:
    """Run replicas of the webhook without registering their webhooks. They may not be ready yet.

    ``directory``: a new directory for their certificates. ``kubeconfig``: their kubeconfig, by default that of the
    admin. ``quota``: their quota ConfigMap, by default a new one.
    """
    label = f"e2e-{secrets.token_hex(4)}"
    document = quota or QuotaConfigMap(cluster.rest, "kube-system", f"gpuquota-{label}", {**CONFIG, SERVED_BY: label})
    make_certificates(directory)
    create_system_namespace(cluster)
    flags = (
        *("--cert-dir", directory, "--kubeconfig", kubeconfig or cluster.kubeconfig),
        *("--quota-configmap", f"{document.namespace}/{document.name}", "--system-namespace", SYSTEM_NAMESPACE),
        *flags,
    )
    with ExitStack() as stack:
        ca = directory / "ca.crt"
        processes = [stack.enter_context(serving(*flags, ca=ca)) for _ in range(replicas)]
        yield Installation(cluster, label, processes, replace(document, readers=processes), flags, ca, patience)


def registered(installation: Installation) -> AbstractContextManager[None]:
    validating = [*installation.validating(), installation.checking_quota()]
    return installation.cluster.register_webhooks(mutating=installation.mutating(), validating=validating)


CLIENT, CLIENT_NAME = "client", "vcuda-scheduler"


def make_certificates(directory: Path, at: datetime | None = None) -> None:
    """Write a CA and a certificate for 127.0.0.1, as `vcuda-certs issue` does.

    Subdirectory `CLIENT` gets a client certificate of the CA. All are valid from ``at``, by default from now.
    """
    at = at or datetime.now(UTC)
    authority = make_authority(at)
    write_files(directory, serving_files(authority, make_leaf(authority, DEVELOPMENT, at)))
    write_files(directory / CLIENT, leaf_files(make_client(authority, CLIENT_NAME, at), "client certificate"))


def create_system_namespace(cluster: Cluster) -> None:
    for name in (SYSTEM_NAMESPACE, LEDGER_NAMESPACE):
        answer = cluster.try_create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        if answer.status != HTTPStatus.CONFLICT:
            answer.ok()
    cluster.apply(*policies(*POLICIES))


POLICIES = ("exempt.quota.vcuda.io", "in-effect.quota.vcuda.io")
"""The names of the ValidatingAdmissionPolicies of manifests/base that every installation needs."""


def policies(*names: str) -> list[Json]:
    found = yaml.safe_load_all((MANIFESTS / "policies.yaml").read_text())
    return [each for each in found if each["metadata"]["name"] in names]


def await_ready(installation: Installation) -> None:
    for replica in installation.replicas:
        replica.await_ready()


def await_nodes(installation: Installation, *nodes: Mapping[str, str]) -> None:
    """Return when every replica has read nodes with these labels of a GPU model and a pool.

    Before, /quota would warn that no node has the models of an edited quota.
    """
    entry = {"quota": {labels[MODEL]: 1 for labels in nodes}, "pool": sorted({labels[POOL] for labels in nodes})}
    manifest = installation.quota.manifest(json.dumps({"anybody": entry}))

    def known(replica: WebhookProcess) -> bool:
        warnings = replica.review("/quota", manifest, kind=CONFIG_MAP).get("warnings", [])
        return not any("no node has" in warning for warning in warnings)

    for replica in installation.replicas:
        eventually(partial(known, replica), replica.output)


MANIFESTS = Path(__file__).parents[2] / "manifests" / "base"


@contextmanager
def account_of(cluster: Cluster, manifest: str, name: str, namespace: str = SYSTEM_NAMESPACE) -> Iterator[Cluster]:
    """Yield a client that acts as this ServiceAccount. Its manifest is applied before, and deleted afterwards."""
    path = str(MANIFESTS / manifest)
    for each in (namespace, LEDGER_NAMESPACE):
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": each}})
    cluster.kubectl("apply", "-f", path)
    with closing(Cluster(cluster.control_plane, cluster.service_account_token(namespace, name))) as account:
        yield account
    cluster.kubectl("delete", "-f", path)


@contextmanager
def tenant_of(cluster: Cluster, namespace: str) -> Iterator[Cluster]:
    """Yield a client whose user has ClusterRole `edit` in this namespace, and no other rights."""
    about = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "tenant"}
    metadata = {"namespace": namespace, "name": "tenant"}
    cluster.create({**about, "metadata": metadata, "roleRef": role, "subjects": [subject]})
    with closing(Cluster(cluster.control_plane, cluster.control_plane.tokens["tenant"])) as tenant:
        # A new RoleBinding takes effect only when the API server's own watch has delivered it.
        eventually(lambda: tenant.rest.send("GET", f"/api/v1/namespaces/{namespace}/pods").status == HTTPStatus.OK)
        yield tenant


def may(account: Cluster, verb: str, resource: str, namespace: str) -> bool:
    """Return whether the user of ``account`` may use the verb on the resource in the namespace.

    ``resource``: RESOURCE.GROUP/NAME, in which group and name are optional.
    """
    answer = account.kubectl("auth", "can-i", verb, resource, "-n", namespace, check=False).stdout.strip()
    if answer not in ("yes", "no"):
        raise RuntimeError(f"kubectl auth can-i {verb} {resource}: {answer!r}")
    return answer == "yes"


LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM_NAMESPACE}/leases"
LEASE = "vcuda-controller"
USAGE = "gpu-quota-usage"

STORABLE = 3
"""The flag --storable-seconds in these tests: an admitted pod is stored within this many seconds, or never."""

PROMPTLY = 5.0
"""Maximum seconds from the end of a pod or claim until its charge is released, and a waiting claim is admitted."""


def flags_of(installation: Installation, *more: Flag, kubeconfig: Path | None = None) -> list[Flag]:
    """Return flags of a controller that uses the installation's quota and, by default, the rights of the admin.

    ``more``: more flags, which may override the others.
    """
    quota = f"{installation.quota.namespace}/{installation.quota.name}"
    return [
        *("--kubeconfig", kubeconfig or installation.cluster.kubeconfig, "--status-address", "127.0.0.1:0"),
        *("--quota-configmap", quota, "--system-namespace", SYSTEM_NAMESPACE),
        *("--lease-seconds", "15", "--storable-seconds", str(STORABLE)),
        *("--max-terminating-seconds", "0"),  # no kubelet reports here that a deleted pod has ended
        *more,
    ]


def candidate(installation: Installation, *more: Flag, kubeconfig: Path | None = None) -> ControllerProcess:
    # A test registers webhooks in another way than the manifests declare, so the controller must not check them.
    flags = flags_of(installation, "--webhook-service=", *more, kubeconfig=kubeconfig)
    return ControllerProcess(*flags)


@contextmanager
def controlling(installation: Installation, *more: Flag, kubeconfig: Path | None = None) -> Iterator[ControllerProcess]:
    """Run a controller, and wait until it is the leader and has listed all objects.

    A Lease that an earlier controller left is deleted before.
    """
    drop_lease(installation.cluster)
    with candidate(installation, *more, kubeconfig=kubeconfig) as process:
        process.await_synced()
        yield process


def drop_lease(cluster: Cluster) -> None:
    """Delete the Lease of a killed controller, so that the next controller becomes the leader at once."""
    cluster.delete(f"{LEASES}/{LEASE}")


@contextmanager
def limited_team(installation: Installation, entry: Json) -> Iterator[str]:
    """Create a namespace with this quota entry. At the end, remove the entry, and then delete the namespace."""
    with installation.team(entry) as namespace:
        try:
            yield namespace
        finally:
            installation.quota.lift(namespace)


def await_enforced(cluster: Cluster, namespace: str, *, enforced: bool = True) -> None:
    """Return when the namespace has no label `ENFORCED`; if not ``enforced``, when this label is "false" (exempt)."""

    def is_labelled(found: Json) -> bool:
        return bool(found["metadata"].get("labels", {}).get(ENFORCED) == (None if enforced else "false"))

    cluster.await_object("/api/v1/namespaces", namespace, is_labelled)


def charged(ledger: Ledger) -> dict[str, int]:
    """Return the cores that the ledger charges, by model. Reservations of replicas are included."""
    return {model: math.ceil(usage.used.cores) for model, usage in ledger.usages().items()}
