"""The webhook and its controllers as they are installed: certificates, registration, quota, and what is awaited."""

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
"""On a namespace and on a quota ConfigMap: the installation that is asked about it, so that tests do not meet."""

REPLICA = "e2e.vcuda.io/replica"
"""On a pod: the number of the replica that is asked about it; without it the first one is."""

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

    ``flags`` are those they were started with, ``ca`` is the file that signs their certificate. ``patience``: seconds
    that the API server gives them to answer.
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
        """The first replica, the one that is asked unless a pod's label says otherwise."""
        return self.replicas[0]

    @contextmanager
    def team(self, entry: Json) -> Iterator[str]:
        """A fresh namespace that was in the quota, with this entry, before it was made; deleted afterwards."""
        name = f"e2e-{secrets.token_hex(4)}"
        self.quota.limit(**{name: entry})
        with self.cluster.fresh_namespace({SERVED_BY: self.label}, name):
            yield name

    def free_team(self) -> AbstractContextManager[str]:
        """A fresh namespace that has no entry of its own in the quota."""
        return self.cluster.fresh_namespace({SERVED_BY: self.label})

    def ledger(self, namespace: str) -> Ledger:
        """The ledger of ``namespace`` as it is stored; an empty one where there is none yet."""
        answer = self.cluster.rest.send("GET", ledger_path(namespace))
        if answer.status == HTTPStatus.NOT_FOUND:
            return Ledger()
        return read_ledger(answer.ok()["data"]["ledger"])

    def charged(self, namespace: str) -> dict[str, int]:
        return charged(self.ledger(namespace))

    def mutating(self) -> list[Json]:
        """The webhooks that pin, one for each replica."""
        return self._ask_about_pods("mutate", "Ignore", {SERVED_BY: self.label})

    def validating(self) -> list[Json]:
        """The webhooks that charge, one for each replica."""
        return self._ask_about_pods("validate", "Fail", {SERVED_BY: self.label})

    def checking_quota(self) -> Json:
        """The webhook that checks edits of the quota: of ConfigMaps with the label that asks for it."""
        rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"]}
        return self._webhook(
            "config.quota.vcuda.io",
            f"{self.replica.url}/quota",
            rules=[{**rule, "operations": ["CREATE", "UPDATE", "DELETE"]}],
            objectSelector={"matchLabels": {**CONFIG, SERVED_BY: self.label}},
        )

    def _ask_about_pods(self, path: str, failure_policy: str, labels: Json) -> list[Json]:
        # The first replica is asked about the pods, and the claims, that no label gives to another.
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
    """An installation as `running` makes it, and all its webhooks in effect."""
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
    """Replicas that listen, that need not be ready, and that nobody asks yet.

    ``directory`` (fresh) gets their certificates. ``kubeconfig``: whose rights they have, the admin's by default.
    ``quota``: their quota ConfigMap, by default one of their own.
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
    """The installation with one new replica, ready, on the address of its first one, which has ended."""
    address = urlsplit(installation.replica.url).netloc
    with serving(*installation.flags, "--bind", address, ca=installation.ca) as replica:
        again = replace(installation, replicas=[replica], quota=replace(installation.quota, readers=[replica]))
        await_ready(again)
        yield again


def registered(installation: Installation) -> AbstractContextManager[None]:
    """`with` this, the API server asks the installation's webhooks."""
    validating = [*installation.validating(), installation.checking_quota()]
    return installation.cluster.register_webhooks(mutating=installation.mutating(), validating=validating)


CLIENT, CLIENT_NAME = "client", "vcuda-scheduler"


def make_certificates(directory: Path, at: datetime | None = None) -> None:
    """A CA and a certificate for 127.0.0.1, as `vcuda-certs issue` writes them; made now, or ``at`` another time.

    Beside them, in a directory of its own, a client's pair of the same CA.
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
"""Those of the base that every installation goes by."""


def policies(*names: str) -> list[Json]:
    """The policies of the base of these names, and their bindings."""
    found = yaml.safe_load_all((MANIFESTS / "policies.yaml").read_text())
    return [each for each in found if each["metadata"]["name"] in names]


def await_ready(installation: Installation) -> None:
    for replica in installation.replicas:
        replica.await_ready()


def await_nodes(installation: Installation, *nodes: Mapping[str, str]) -> None:
    """Return once every replica has seen nodes with the models and pools of these labels: /quota warns until then."""
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
    """The API as the ServiceAccount of this name, with what the manifest gives it; taken away at the end."""
    path = str(MANIFESTS / manifest)
    for each in (namespace, LEDGER_NAMESPACE):
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": each}})
    cluster.kubectl("apply", "-f", path)
    with closing(Cluster(cluster.control_plane, cluster.service_account_token(namespace, name))) as account:
        yield account
    cluster.kubectl("delete", "-f", path)


@contextmanager
def tenant_of(cluster: Cluster, namespace: str) -> Iterator[Cluster]:
    """The API as somebody who has ClusterRole `edit` in this namespace, and no other right."""
    about = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "edit"}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "tenant"}
    metadata = {"namespace": namespace, "name": "tenant"}
    cluster.create({**about, "metadata": metadata, "roleRef": role, "subjects": [subject]})
    with closing(Cluster(cluster.control_plane, cluster.control_plane.tokens["tenant"])) as tenant:
        # A binding counts once the API server's own watch has brought it.
        eventually(lambda: tenant.rest.send("GET", f"/api/v1/namespaces/{namespace}/pods").status == HTTPStatus.OK)
        yield tenant


def may(account: Cluster, verb: str, resource: str, namespace: str) -> bool:
    """Whether the account may do this; ``resource`` is RESOURCE.GROUP/NAME, group and name where there are any."""
    answer = account.kubectl("auth", "can-i", verb, resource, "-n", namespace, check=False).stdout.strip()
    if answer not in ("yes", "no"):
        raise RuntimeError(f"kubectl auth can-i {verb} {resource}: {answer!r}")
    return answer == "yes"


LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM_NAMESPACE}/leases"
LEASE = "vcuda-controller"
USAGE = "gpu-quota-usage"

STORABLE = 3
"""Seconds, in these tests, after which a pod that was admitted can no longer be stored."""

PROMPTLY = 2.0
"""Seconds within which a charge is released, and who waits for a claim has it."""


def flags_of(installation: Installation, *more: Flag, kubeconfig: Path | None = None) -> list[Flag]:
    """The flags of a controller that goes by the installation's quota, with the admin's rights unless told otherwise.

    Where a flag is given twice the last one counts, so ``more`` may set these anew.
    """
    quota = f"{installation.quota.namespace}/{installation.quota.name}"
    return [
        *("--kubeconfig", kubeconfig or installation.cluster.kubeconfig, "--status-address", "127.0.0.1:0"),
        *("--quota-configmap", quota, "--system-namespace", SYSTEM_NAMESPACE),
        *("--lease-seconds", "15", "--storable-seconds", str(STORABLE)),
        *("--max-terminating-seconds", "0"),  # no kubelet runs here: a bound pod that is deleted has ended
        *more,
    ]


def candidate(installation: Installation, *more: Flag, kubeconfig: Path | None = None) -> ControllerProcess:
    """A controller that serves its status, whether it leads or not; stopped at the end of the block."""
    return ControllerProcess(*flags_of(installation, *more, kubeconfig=kubeconfig))


@contextmanager
def controlling(installation: Installation, *more: Flag, kubeconfig: Path | None = None) -> Iterator[ControllerProcess]:
    """A controller that leads and has listed everything, and needs not wait for the end of an earlier one's lease."""
    drop_lease(installation.cluster)
    with candidate(installation, *more, kubeconfig=kubeconfig) as process:
        process.await_synced()
        yield process


@contextmanager
def two_candidates(installation: Installation, seconds: int) -> Iterator[tuple[ControllerProcess, ControllerProcess]]:
    """A controller that leads, identity `first`, and `second`, which waits; ``seconds``: how long a lease lasts."""
    flags = ("--lease-seconds", str(seconds), "--identity")
    with controlling(installation, *flags, "first") as first, candidate(installation, *flags, "second") as second:
        yield first, second
    drop_lease(installation.cluster)


def drop_lease(cluster: Cluster) -> None:
    """Delete the Lease that a killed controller has left; there may be none."""
    cluster.delete(f"{LEASES}/{LEASE}")


def lease_spec(cluster: Cluster) -> Json:
    return dict(cluster.rest.get(f"{LEASES}/{LEASE}")["spec"])


@contextmanager
def limited_team(installation: Installation, entry: Json) -> Iterator[str]:
    """A fresh namespace with this entry in the quota, which is taken away before it is deleted."""
    with installation.team(entry) as namespace:
        try:
            yield namespace
        finally:
            installation.quota.lift(namespace)


def await_enforced(cluster: Cluster, namespace: str, *, enforced: bool = True) -> None:
    """Return once the controller has let the namespace's pods be asked about, or has labelled it out."""

    def is_labelled(found: Json) -> bool:
        return bool(found["metadata"].get("labels", {}).get(ENFORCED) == (None if enforced else "false"))

    cluster.await_object("/api/v1/namespaces", namespace, is_labelled)


def await_ledger(
    installation: Installation, namespace: str, wanted: Callable[[Ledger], bool], timeout: float = TIMEOUT
) -> Ledger:
    """Return the ledger of ``namespace`` once it is as wanted; TimeoutError with the last one after so many seconds."""
    collection, _, name = ledger_path(namespace).rpartition("/")
    await_collection, named = installation.cluster.await_collection, {"fieldSelector": f"metadata.name={name}"}
    return ledger_in(await_collection(collection, lambda found: wanted(ledger_in(found)), timeout, **named))


def ledger_in(objects: list[Json]) -> Ledger:
    return next((read_ledger(found["data"]["ledger"]) for found in objects), Ledger())


def await_committed(installation: Installation, namespace: str, timeout: float = TIMEOUT, **cores: int) -> Ledger:
    """Return the ledger once it has these cores by model, and all of them counted from stored pods."""

    def wanted(ledger: Ledger) -> bool:
        return committed(ledger) == cores and not ledger.pending

    return await_ledger(installation, namespace, wanted, timeout)


def charged(ledger: Ledger) -> dict[str, int]:
    """All cores that nobody else may have, reserved ones too."""
    return {model: usage.used.cores for model, usage in ledger.usages().items()}


def committed(ledger: Ledger) -> dict[str, int]:
    counted = charges_by_model([*ledger.committed.items(), *ledger.claimed.items()])
    return {model: charge.cores for model, charge in counted.items()}


def await_published(cluster: Cluster, namespace: str, wanted: Callable[[Json], bool] = bool) -> Json:
    """The published usage of the namespace once it is as wanted."""
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    found = cluster.await_object(path, USAGE, lambda found: wanted(json.loads(found["data"]["usage.json"])))
    return dict(json.loads(found["data"]["usage.json"]))


def await_unpublished(cluster: Cluster, namespace: str) -> None:
    cluster.await_gone(f"/api/v1/namespaces/{namespace}/configmaps", USAGE)


def pass_by(cluster: Cluster, namespace: str) -> None:
    """Create and delete a pod without a GPU: what the controller has seen of pods is then as new as all before it."""
    cluster.create(gpu_pod("passer-by", namespace, {"cpu": "1"}))
    cluster.delete_pod(namespace, "passer-by")


def await_ledger_gone(cluster: Cluster, namespace: str) -> None:
    """Await that the ledger has been dropped, and its mark."""
    collection, _, name = ledger_path(namespace).rpartition("/")
    for each in (name, f"gpu-ledger-opened.{namespace}"):
        cluster.await_gone(collection, each)
