"""Tests of claims that Kubernetes creates for a PodGroup, and reserves for it instead of its pods (KEP-5729)."""

from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.e2e import dra
from tests.e2e.cluster import Cluster, Json, administering
from tests.e2e.installation import Installation, controlling, installed, limited_team, tenant_of
from tests.e2e.ledgers import await_ledger
from tests.e2e.rest import Answer
from tests.e2e.test_terminating_claims import BOUND, GRACE, ONE, held, is_rejected, start, training
from tests.processes import eventually
from tests.rendered import BASE, rendered
from tools.control_plane import Settings, minor_version, running_control_plane
from vcuda.ledger.ledger import Terminating

API = "scheduling.k8s.io/v1beta1"
FROM_MINOR = 37
GATES = ("GenericWorkload", "DRAWorkloadResourceClaims")
POLICIES = ("claims.quota.vcuda.io", "forced-deletions.quota.vcuda.io")


@pytest.fixture(scope="module")
def cluster(assets: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane that serves PodGroups with claims. The two feature gates for this are off by default."""
    if assets and (minor := minor_version(assets / "kube-apiserver")) < FROM_MINOR:
        pytest.skip(f"{API} is served from Kubernetes 1.{FROM_MINOR} on, this is 1.{minor}")
    flags = (f"--runtime-config={API}=true",)
    settings = Settings(own_identities=True, feature_gates=GATES, apiserver_flags=flags)
    cards = dra.Published(dra.NVIDIA, "a100-1", [dra.card(number, "A100") for number in range(4)])
    with (
        running_control_plane(assets, tmp_path_factory.mktemp("groups") / "control-plane", settings) as running,
        administering(running) as admin,
        dra.published(admin, cards),
    ):
        yield admin


@pytest.fixture(scope="module")
def installation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with installed(cluster, tmp_path_factory.mktemp("installation")) as running:
        yield running


@pytest.fixture
def team(installation: Installation) -> Iterator[str]:
    with limited_team(installation, {"quota": {"A100": 1}}) as name:
        yield name


@pytest.fixture
def tenant(cluster: Cluster, team: str) -> Iterator[Cluster]:
    with tenant_of(cluster, team) as account:
        yield account


def start_group(cluster: Cluster, installation: Installation, tenant: Cluster, team: str) -> None:
    """Let the tenant create a PodGroup with a claim, and one running pod of the group."""
    tenant.create(dra.template(team, "gpu"))
    claims = [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]
    spec = {"schedulingPolicy": {"basic": {}}, "resourceClaims": claims}
    about: Json = {"apiVersion": API, "kind": "PodGroup", "metadata": {"name": "group", "namespace": team}}
    tenant.create({**about, "spec": spec})
    pod = training(team, "one")
    start(cluster, installation, {**pod, "spec": {**pod["spec"], "schedulingGroup": {"podGroupName": "group"}}})
    [claim] = dra.claims(cluster, team)
    assert [each["resource"] for each in claim["status"]["reservedFor"]] == ["podgroups"]
    assert [each["kind"] for each in claim["metadata"]["ownerReferences"]] == ["PodGroup"]


def group_path(team: str) -> str:
    return f"/apis/{API}/namespaces/{team}/podgroups/group"


def test_the_claim_of_a_group_stays_charged_after_a_forced_deletion_of_its_pod(
    cluster: Cluster, installation: Installation, tenant: Cluster, team: str
) -> None:
    with controlling(installation, *BOUND):
        start_group(cluster, installation, tenant, team)
        [claim] = dra.claims(cluster, team)
        cluster.delete_by_force(team, "one")
        tenant.rest.send("DELETE", group_path(team)).ok()
        cluster.await_gone(dra.claims_path(team), claim["metadata"]["name"])
        ledger = await_ledger(installation, team, lambda ledger: bool(ledger.terminating))
        assert (held(ledger), ledger.claimed) == ([Terminating("A100", ONE, GRACE)], {})
        assert is_rejected(tenant, team)


def test_a_tenant_cannot_have_the_devices_of_a_group_released_while_its_pod_runs(
    cluster: Cluster, installation: Installation, tenant: Cluster, team: str
) -> None:
    with controlling(installation, *BOUND):
        start_group(cluster, installation, tenant, team)
    for each in rendered(BASE):
        if each["metadata"]["name"] in POLICIES:
            cluster.create(each)
    unprotected: Json = {"metadata": {"finalizers": None}}

    def unprotect() -> Answer:
        return tenant.rest.try_merge_patch(group_path(team), unprotected, dryRun="All")

    eventually(lambda: unprotect().status == HTTPStatus.FORBIDDEN)
    rejected = unprotect()
    assert "finalizer scheduling.k8s.io/podgroup-protection" in rejected.message
    forced = tenant.rest.send("DELETE", f"/api/v1/namespaces/{team}/pods/one", {"gracePeriodSeconds": 0})
    assert (forced.status, "a pod with a ResourceClaim must not be deleted" in forced.message) == (
        HTTPStatus.FORBIDDEN,
        True,
    )
    cluster.delete_pod(team, "one")
    tenant.rest.send("DELETE", group_path(team)).ok()
    cluster.await_gone(f"/apis/{API}/namespaces/{team}/podgroups", "group")
