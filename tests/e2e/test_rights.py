"""The rights that the manifests give each part, as the API server says; that they are enough, its own tests show."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.dra import require_dra
from tests.e2e.installation import LEDGER_NAMESPACE, SYSTEM_NAMESPACE, account_of, may
from vcuda.claims.names import GROUP
from vcuda.kube import Kube, VersionCheck

NODE_NAMESPACE = "vcuda-quota-node"
PARTS = {
    "webhook": ("webhook-rbac.yaml", "vcuda-webhook", SYSTEM_NAMESPACE),
    "controller": ("controller-rbac.yaml", "vcuda-controller", SYSTEM_NAMESPACE),
    "certs": ("certs-rbac.yaml", "vcuda-certs", SYSTEM_NAMESPACE),
    "node": ("../node-agent/common/rbac.yaml", "vcuda-node", NODE_NAMESPACE),
}
"""Each with its manifest, and its ServiceAccount's name and namespace. A component adds its vendor to the agent's."""

VALIDATING = "validatingwebhookconfigurations.admissionregistration.k8s.io"
MUTATING = "mutatingwebhookconfigurations.admissionregistration.k8s.io"
SLICES = "endpointslices.discovery.k8s.io"
LEASES = "leases.coordination.k8s.io"

RIGHTS = [
    # part, resource, namespace, what it may, what it may not
    ("webhook", "configmaps/gpu-ledger-team-a", LEDGER_NAMESPACE, "get update", "delete"),
    ("webhook", "configmaps/gpu-cards", SYSTEM_NAMESPACE, "watch", ""),
    ("webhook", "configmaps", LEDGER_NAMESPACE, "create", "list"),
    ("webhook", "configmaps", SYSTEM_NAMESPACE, "", "get create update"),
    ("webhook", "secrets", SYSTEM_NAMESPACE, "", "get"),
    ("webhook", "configmaps/gpuquota", "kube-system", "watch", "update"),
    ("webhook", "configmaps", "kube-system", "", "watch"),
    ("webhook", "events", "kube-system", "create", ""),
    ("webhook", "events", "default", "", "create"),
    ("webhook", "pods", "default", "list", "create patch"),
    ("webhook", "configmaps", "default", "", "get"),
    ("webhook", "nodes", "default", "watch", "patch"),
    ("webhook", "namespaces", "default", "get list", "watch patch"),
    ("webhook", "runtimeclasses.node.k8s.io", "default", "list watch", "get update"),
    ("webhook", "resourceslices.resource.k8s.io", "default", "watch", "update"),
    ("webhook", "resourceclaims.resource.k8s.io", "default", "list", "watch update"),
    ("controller", "resourceclaims.resource.k8s.io", "default", "watch", "update patch delete"),
    ("controller", "configmaps/gpu-ledger-team-a", LEDGER_NAMESPACE, "update patch delete", ""),
    ("controller", "configmaps/another", SYSTEM_NAMESPACE, "", "get list update delete"),
    ("controller", "secrets", SYSTEM_NAMESPACE, "", "get"),
    ("controller", f"{LEASES}/vcuda-controller", SYSTEM_NAMESPACE, "update", ""),
    ("controller", f"{LEASES}/another", SYSTEM_NAMESPACE, "", "update"),
    ("controller", LEASES, "default", "", "create"),
    ("controller", SLICES, SYSTEM_NAMESPACE, "list", "create patch delete"),
    ("controller", SLICES, "default", "", "list"),
    ("controller", "services/vcuda-webhook", SYSTEM_NAMESPACE, "get", ""),
    ("controller", "services/another", SYSTEM_NAMESPACE, "", "get"),
    ("controller", "configmaps/gpuquota", "kube-system", "watch", "update"),
    ("controller", "configmaps", "kube-system", "", "watch"),
    ("controller", "configmaps/gpu-quota-usage", "default", "patch delete", ""),
    ("controller", "configmaps/another", "default", "", "get patch delete"),
    ("controller", "configmaps", "default", "", "list"),
    ("controller", "namespaces", "default", "list watch patch", "get delete"),
    ("controller", "pods", "default", "patch", "create update delete"),
    ("controller", "replicasets.apps", "default", "patch", "delete"),
    ("controller", "deployments.apps", "default", "", "patch"),
    ("controller", "nodes", "default", "get patch", "update delete"),
    ("controller", "events", "default", "create watch", "patch"),
    ("controller", "events", "kube-system", "create", ""),
    ("certs", "secrets/vcuda-webhook-ca", SYSTEM_NAMESPACE, "get", "delete"),
    ("certs", "secrets/vcuda-webhook-tls", SYSTEM_NAMESPACE, "patch", ""),
    ("certs", "secrets/another", SYSTEM_NAMESPACE, "", "get"),
    ("certs", "secrets", SYSTEM_NAMESPACE, "create", "list"),
    ("certs", "secrets/vcuda-webhook-ca", "default", "", "get"),
    ("certs", "secrets", "default", "", "create"),
    ("certs", SLICES, SYSTEM_NAMESPACE, "list", "get watch create patch delete"),
    ("certs", SLICES, "default", "", "list"),
    ("certs", VALIDATING, "default", "list", "create"),
    ("certs", f"{VALIDATING}/vcuda-quota", "default", "patch", "delete"),
    ("certs", f"{MUTATING}/vcuda-quota", "default", "patch", ""),
    ("certs", f"{MUTATING}/another", "default", "", "patch"),
    ("certs", "configmaps/gpuquota", "kube-system", "", "get"),
    ("node", "pods", "default", "list watch", "get patch delete create"),
    ("node", "pods/log", "default", "", "get"),
    ("node", "nodes", "default", "", "list"),
    ("node", "secrets", "default", "", "list"),
    ("node", "configmaps", "default", "", "list"),
    ("node", "events", "default", "", "create"),
]


@pytest.fixture(scope="module")
def account(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The API as a part's ServiceAccount."""
    manifest, name, namespace = PARTS[request.param]
    with account_of(cluster, manifest, name, namespace) as account:
        yield account


@pytest.mark.parametrize(
    ("account", "resource", "namespace", "allowed", "refused"),
    RIGHTS,
    ids=[f"{part} {resource} in {namespace}" for part, resource, namespace, *_ in RIGHTS],
    indirect=["account"],
)
def test_the_manifest_gives_what_is_needed_and_no_more(
    account: Cluster, resource: str, namespace: str, allowed: str, refused: str
) -> None:
    if GROUP in resource:  # kubectl asks the API server what it serves, and for nothing else
        require_dra(account)
    verbs = {**dict.fromkeys(allowed.split(), True), **dict.fromkeys(refused.split(), False)}
    assert {verb: may(account, verb, resource, namespace) for verb in verbs} == verbs


@pytest.mark.parametrize("account", ["webhook", "controller", "certs"], indirect=True)
def test_every_part_may_read_the_version_which_is_accepted_without_a_word(account: Cluster) -> None:
    warnings: list[str] = []
    check = VersionCheck(warnings.append, pytest.fail)
    with closing(Kube.connect(account.kubeconfig, version_check=check)) as kube:
        kube.get("/readyz")
    assert check.passed
    assert warnings == []
