"""Installs the webhook and its controllers: certificates, registration and quota. Awaits their states."""

import base64
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from tests.builders import MODEL, POOL
from tests.e2e.cluster import TIMEOUT, Cluster, Json, webhook
from tests.e2e.quota_config import CONFIG, QuotaConfigMap
from tests.integration.reviews import gpu_pod
from tests.match_conditions import base_conditions
from tests.processes import ControllerProcess, WebhookProcess, eventually, serving
from vcuda.ledger.ledger import Ledger, charges_by_model
from vcuda.ledger.text import read_ledger
from vcuda.tls import leaf_files, serving_files, write_files
from vcuda.x509 import DEVELOPMENT, make_authority, make_client, make_leaf

SYSTEM_NAMESPACE, LEDGER_NAMESPACE = "vcuda-quota", "vcuda-quota-ledgers"
ENFORCED = "quota.vcuda.io/enforced"
NOT_EXEMPT = {"key": ENFORCED, "operator": "NotIn", "values": ["false"]}
SERVED_BY = "e2e.vcuda.io/served-by"
"""A label of namespaces and quota ConfigMaps: the installation that reviews them. It keeps tests apart."""

REPLICA = "e2e.vcuda.io/replica"
"""A label of pods: the number of the replica that reviews the pod. Without it the first replica does."""

MOST_REPLICAS = 5
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
    """Replicas of the webhook that serve the namespaces labelled with ``label``, by the quota in ``quota``.

    ``flags`` are the flags of the replicas. ``ca`` is the file of the CA of their certificates. ``patience``: seconds
    after which the API server ends a call.
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
        """Return the first replica, which is called unless a pod's label names another."""
        return self.replicas[0]

    @contextmanager
    def team(self, entry: Json) -> Iterator[str]:
        """Create a namespace whose entry is in the quota before the namespace exists. It is deleted at the end."""
        name = f"e2e-{secrets.token_hex(4)}"
        self.quota.limit(**{name: entry})
        with self.cluster.fresh_namespace({SERVED_BY: self.label}, name):
            yield name

    def free_team(self) -> AbstractContextManager[str]:
        """Create a namespace without an entry in the quota."""
        return self.cluster.fresh_namespace({SERVED_BY: self.label})

    def ledger(self, namespace: str) -> Ledger:
        """Return the stored ledger of ``namespace``, or an empty one if there is none."""
        answer = self.cluster.rest.send("GET", ledger_path(namespace))
        if answer.status == HTTPStatus.NOT_FOUND:
            return Ledger()
        return read_ledger(answer.ok()["data"]["ledger"])

    def charged(self, namespace: str) -> dict[str, int]:
        return charged(self.ledger(namespace))

    def mutating(self) -> list[Json]:
        """Return the webhooks for /mutate, one for each replica."""
        return self._ask_about_pods("mutate", "Ignore", {SERVED_BY: self.label})

    def validating(self) -> list[Json]:
        """Return the webhooks for /validate, one for each replica."""
        return self._ask_about_pods("validate", "Fail", {SERVED_BY: self.label})

    def checking_quota(self) -> Json:
        """Return the webhook that checks edits of quota ConfigMaps with the label."""
        rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"]}
        return self._webhook(
            "config.quota.vcuda.io",
            f"{self.replica.url}/quota",
            rules=[{**rule, "operations": ["CREATE", "UPDATE", "DELETE"]}],
            objectSelector={"matchLabels": {**CONFIG, SERVED_BY: self.label}},
        )

    def _ask_about_pods(self, path: str, failure_policy: str, labels: Json) -> list[Json]:
        # The first replica reviews the pods and claims whose label names no other replica.
        first = {"operator": "NotIn", "values": [str(number) for number in range(1, MOST_REPLICAS)]}
        asked = [first, *({"operator": "In", "values": [str(number)]} for number in range(1, MOST_REPLICAS))]
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


def ledger_path(namespace: str) -> str:
    return f"/api/v1/namespaces/{LEDGER_NAMESPACE}/configmaps/gpu-ledger-{namespace}"


@contextmanager
def installed(cluster: Cluster, directory: Path, **fields: Any) -> Iterator[Installation]:
    """Run an installation as `running` does, with all its webhooks in effect."""
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
    """Run replicas that listen. They may not be ready, and no webhook is registered yet.

    ``directory`` (fresh) gets their certificates. ``kubeconfig``: their rights, by default the admin's. ``quota``:
    their quota ConfigMap, by default a new one.
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


@contextmanager
def started_again(installation: Installation) -> Iterator[Installation]:
    """Start a new replica at the address of the first one, which has ended. Yield the installation with only that
    replica, when it is ready.
    """
    address = urlsplit(installation.replica.url).netloc
    with serving(*installation.flags, "--bind", address, ca=installation.ca) as replica:
        again = replace(installation, replicas=[replica], quota=replace(installation.quota, readers=[replica]))
        await_ready(again)
        yield again


def registered(installation: Installation) -> AbstractContextManager[None]:
    """Register the webhooks of the installation during the ``with`` statement."""
    validating = [*installation.validating(), installation.checking_quota()]
    return installation.cluster.register_webhooks(mutating=installation.mutating(), validating=validating)


CLIENT, CLIENT_NAME = "client", "vcuda-scheduler"


def make_certificates(directory: Path, at: datetime | None = None) -> None:
    """Write a CA and a certificate for 127.0.0.1 as `vcuda-certs issue` does; issued now, or ``at`` another time.

    A separate directory gets a client certificate of the same CA.
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
"""The policies of the base that every installation needs."""


def policies(*names: str) -> list[Json]:
    """Return the policies of the base with these names, and their bindings."""
    found = yaml.safe_load_all((MANIFESTS / "policies.yaml").read_text())
    return [each for each in found if each["metadata"]["name"] in names]


def await_ready(installation: Installation) -> None:
    for replica in installation.replicas:
        replica.await_ready()


def await_nodes(installation: Installation, *nodes: Mapping[str, str]) -> None:
    """Return when every replica has seen nodes with these models and pools. Until then /quota warns."""
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
    """Connect to the API as this ServiceAccount, with the rights of the manifest. They are removed at the end."""
    path = str(MANIFESTS / manifest)
    for each in (namespace, LEDGER_NAMESPACE):
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": each}})
    cluster.kubectl("apply", "-f", path)
    with closing(Cluster(cluster.control_plane, cluster.service_account_token(namespace, name))) as account:
        yield account
    cluster.kubectl("delete", "-f", path)


@contextmanager
def tenant_of(cluster: Cluster, namespace: str) -> Iterator[Cluster]:
    """Connect to the API as a user with only ClusterRole `edit` in this namespace."""
    about = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "tenant"}
    metadata = {"namespace": namespace, "name": "tenant"}
    cluster.create({**about, "metadata": metadata, "roleRef": role, "subjects": [subject]})
    with closing(Cluster(cluster.control_plane, cluster.control_plane.tokens["tenant"])) as tenant:
        # A binding takes effect when the API server's own watch has delivered it.
        eventually(lambda: tenant.rest.send("GET", f"/api/v1/namespaces/{namespace}/pods").status == HTTPStatus.OK)
        yield tenant


def may(account: Cluster, verb: str, resource: str, namespace: str) -> bool:
    """Return whether the account may do this. ``resource`` is RESOURCE.GROUP/NAME; group and name are optional."""
    answer = account.kubectl("auth", "can-i", verb, resource, "-n", namespace, check=False).stdout.strip()
    if answer not in ("yes", "no"):
        raise RuntimeError(f"kubectl auth can-i {verb} {resource}: {answer!r}")
    return answer == "yes"


LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM_NAMESPACE}/leases"
LEASE = "vcuda-controller"
USAGE = "gpu-quota-usage"

STORABLE = 3
"""Seconds, in these tests, within which an admitted pod can be stored."""

PROMPTLY = 2.0
"""Seconds within which a charge is released, and a waiting claim is admitted."""


def flags_of(installation: Installation, *more: Flag, kubeconfig: Path | None = None) -> list[Flag]:
    """Return the flags of a controller that uses the installation's quota, by default with the admin's rights.

    The last occurrence of a flag counts, so ``more`` may override these.
    """
    quota = f"{installation.quota.namespace}/{installation.quota.name}"
    return [
        *("--kubeconfig", kubeconfig or installation.cluster.kubeconfig, "--status-address", "127.0.0.1:0"),
        *("--quota-configmap", quota, "--system-namespace", SYSTEM_NAMESPACE),
        *("--lease-seconds", "15", "--storable-seconds", str(STORABLE)),
        *("--max-terminating-seconds", "0"),  # no kubelet runs here, so a bound pod has ended when it is deleted
        *more,
    ]


def candidate(installation: Installation, *more: Flag, kubeconfig: Path | None = None) -> ControllerProcess:
    """Return a controller that serves its status, as leader or standby. It is stopped at the end of the block."""
    return ControllerProcess(*flags_of(installation, *more, kubeconfig=kubeconfig))


@contextmanager
def controlling(installation: Installation, *more: Flag, kubeconfig: Path | None = None) -> Iterator[ControllerProcess]:
    """Run a controller that leads and has listed everything. It does not wait for the lease of an earlier one."""
    drop_lease(installation.cluster)
    with candidate(installation, *more, kubeconfig=kubeconfig) as process:
        process.await_synced()
        yield process


@contextmanager
def two_candidates(installation: Installation, seconds: int) -> Iterator[tuple[ControllerProcess, ControllerProcess]]:
    """Run a controller `first`, which leads, and a standby `second`. ``seconds``: the length of the lease."""
    flags = ("--lease-seconds", str(seconds), "--identity")
    with controlling(installation, *flags, "first") as first, candidate(installation, *flags, "second") as second:
        yield first, second
    drop_lease(installation.cluster)


def drop_lease(cluster: Cluster) -> None:
    """Delete the Lease of a killed controller, if there is one."""
    cluster.delete(f"{LEASES}/{LEASE}")


def lease_spec(cluster: Cluster) -> Json:
    return dict(cluster.rest.get(f"{LEASES}/{LEASE}")["spec"])


@contextmanager
def limited_team(installation: Installation, entry: Json) -> Iterator[str]:
    """Create a namespace with this entry in the quota. The entry is removed before the namespace is deleted."""
    with installation.team(entry) as namespace:
        try:
            yield namespace
        finally:
            installation.quota.lift(namespace)


def await_enforced(cluster: Cluster, namespace: str, *, enforced: bool = True) -> None:
    """Return when the controller has labelled the namespace as enforced, or as not enforced."""

    def is_labelled(found: Json) -> bool:
        return bool(found["metadata"].get("labels", {}).get(ENFORCED) == (None if enforced else "false"))

    cluster.await_object("/api/v1/namespaces", namespace, is_labelled)


def await_ledger(
    installation: Installation, namespace: str, wanted: Callable[[Ledger], bool], timeout: float = TIMEOUT
) -> Ledger:
    """Return the ledger of ``namespace`` when ``wanted`` holds for it. Raises TimeoutError with the last ledger."""
    collection, _, name = ledger_path(namespace).rpartition("/")
    await_collection, named = installation.cluster.await_collection, {"fieldSelector": f"metadata.name={name}"}
    return ledger_in(await_collection(collection, lambda found: wanted(ledger_in(found)), timeout, **named))


def ledger_in(objects: list[Json]) -> Ledger:
    return next((read_ledger(found["data"]["ledger"]) for found in objects), Ledger())


def await_committed(installation: Installation, namespace: str, timeout: float = TIMEOUT, **cores: int) -> Ledger:
    """Return the ledger when it has these cores by model, all of them committed."""

    def wanted(ledger: Ledger) -> bool:
        return committed(ledger) == cores and not ledger.pending

    return await_ledger(installation, namespace, wanted, timeout)


def charged(ledger: Ledger) -> dict[str, int]:
    """Return all charged cores by model, including reserved ones."""
    return {model: usage.used.cores for model, usage in ledger.usages().items()}


def committed(ledger: Ledger) -> dict[str, int]:
    counted = charges_by_model([*ledger.committed.items(), *ledger.claimed.items()])
    return {model: charge.cores for model, charge in counted.items()}


def await_published(cluster: Cluster, namespace: str, wanted: Callable[[Json], bool] = bool) -> Json:
    """Return the published usage of the namespace when ``wanted`` holds for it."""
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    found = cluster.await_object(path, USAGE, lambda found: wanted(json.loads(found["data"]["usage.json"])))
    return dict(json.loads(found["data"]["usage.json"]))


def await_unpublished(cluster: Cluster, namespace: str) -> None:
    cluster.await_gone(f"/api/v1/namespaces/{namespace}/configmaps", USAGE)


def pass_by(cluster: Cluster, namespace: str) -> None:
    """Create and delete a pod without a GPU, so that the controller's view of pods is newer than all earlier
    changes.
    """
    cluster.create(gpu_pod("passer-by", namespace, {"cpu": "1"}))
    cluster.delete_pod(namespace, "passer-by")


def await_ledger_gone(cluster: Cluster, namespace: str) -> None:
    """Return when the ledger and its mark have been deleted."""
    collection, _, name = ledger_path(namespace).rpartition("/")
    for each in (name, f"gpu-ledger-opened.{namespace}"):
        cluster.await_gone(collection, each)
