"""The fixtures of the tests that apply the manifests: a control plane that only these tests use.

The webhooks in the manifests are called for the whole cluster, so they would affect other tests.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, Json, administering
from tests.e2e.installation import tenant_of
from tests.e2e.manifests.audit import AuditLog
from tests.e2e.manifests.operations import REGISTERED
from tests.e2e.manifests.policies import ordinary
from tests.e2e.manifests.system import apply
from tests.processes import eventually
from tests.rendered import BASE
from tools.control_plane import ControlPlane, Settings, running_control_plane

POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {
            "level": "Metadata",
            "userGroups": ["system:serviceaccounts:vcuda-quota", "system:serviceaccounts:vcuda-quota-node"],
        },
        {"level": "None"},
    ],
}


@pytest.fixture(scope="session")
def audit_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "log"


@pytest.fixture(scope="module", autouse=True)
def audit_log(audit_file: Path) -> AuditLog:
    """The part of the API server's audit log from the tests of this module.

    Other modules use the same accounts, and some cause rejected requests: they remove roles while the programs run.
    """
    return AuditLog(audit_file, start=audit_file.stat().st_size if audit_file.exists() else 0)


@pytest.fixture(scope="session")
def plane(assets: Path | None, audit_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    directory = tmp_path_factory.mktemp("manifests")
    policy = directory / "policy.json"
    policy.write_text(json.dumps(POLICY))
    flags = (
        *(f"--audit-policy-file={policy}", f"--audit-log-path={audit_file}", "--audit-log-mode=blocking"),
        # With this flag, the API server calls a Service by its DNS name, which can resolve to this machine.
        "--enable-aggregator-routing=false",
    )
    settings = Settings(apiserver_flags=flags, own_identities=True)
    with running_control_plane(assets, directory / "control-plane", settings) as running:
        yield running


@pytest.fixture(scope="session")
def admin(plane: ControlPlane) -> Iterator[Cluster]:
    with administering(plane) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def policies(admin: Cluster) -> None:
    """Apply the policies, and wait until they are in effect.

    The API server reads all stored policies together, about once a second. So a policy that is stored after all others
    shows when they are in effect.
    """
    # An apply would keep the webhooks of an earlier test, which no server answers any more.
    admin.kubectl("delete", REGISTERED, "-l", "app.kubernetes.io/part-of=vcuda-quota")
    apply(admin, BASE, "--server-side", "--force-conflicts")
    with admin.fresh_namespace() as namespace:
        last = rejecting_config_maps(namespace)
        admin.apply(*last)
        config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": namespace, "name": "probe"}}
        eventually(lambda: "the last policy" in admin.try_create(config_map, dryRun="All").message)
        for each in last:
            admin.delete(f"{admin.path_of(each)}/{each['metadata']['name']}")


def rejecting_config_maps(namespace: str) -> tuple[Json, Json]:
    """Return a policy that rejects every ConfigMap in the namespace, and the binding of this policy."""
    name = f"{namespace}.example.com"
    about = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}
    within = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}, "resourceRules": [rule]}
    validations = [{"expression": "false", "message": "the last policy"}]
    policy = {**about, "kind": "ValidatingAdmissionPolicy"}
    binding = {**about, "kind": "ValidatingAdmissionPolicyBinding"}
    bound = {"policyName": name, "validationActions": ["Deny"]}
    return {**policy, "spec": {"matchConstraints": within, "validations": validations}}, {**binding, "spec": bound}


@pytest.fixture
def team(admin: Cluster) -> Iterator[str]:
    with admin.fresh_namespace() as namespace:
        admin.create(ordinary("train", namespace))
        yield namespace


@pytest.fixture
def tenant(admin: Cluster, team: str) -> Iterator[Cluster]:
    with tenant_of(admin, team) as account:
        yield account
