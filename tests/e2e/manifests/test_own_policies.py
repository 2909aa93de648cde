"""Tests of what the ValidatingAdmissionPolicies permit our own accounts, and how they protect the quota ConfigMap."""

import json
from collections.abc import Iterator
from contextlib import closing
from http import HTTPStatus

import pytest

from controller.retry.retrier import RETRY_ANNOTATION
from tests.builders import MODEL
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import LEDGER_NAMESPACE, SYSTEM_NAMESPACE
from tests.e2e.manifests.policies import CARD, PHASE, cleared, controller_account, patch, pod_path
from tests.e2e.quota_config import QuotaConfigMap
from tests.e2e.workloads import workload
from tests.processes import eventually
from tests.rendered import BASE, rendered
from tests.tables import cases
from tools.chart.names import Names, rename
from vcuda.placement.device_plugins import DISCOVERED

pytestmark = pytest.mark.usefixtures("policies")

# The quota ConfigMap


LIMITING = '{"team-a": {"quota": {"M40": 2}}}'
MUST_NOT = "the quota ConfigMap must not be deleted while it has quota entries"


@pytest.fixture
def quota(admin: Cluster) -> Iterator[QuotaConfigMap]:
    found = QuotaConfigMap(admin.rest, "kube-system", "gpuquota", labels={})
    found.write(LIMITING).ok()
    yield found
    found.delete()


def test_a_quota_is_not_deleted_by_any_way_until_its_document_is_empty(admin: Cluster, quota: QuotaConfigMap) -> None:
    """`kubectl replace --force` would delete the unchanged quota, and then create it again."""
    before = admin.rest.get(quota.path)["metadata"]["uid"]
    forced = admin.kubectl("replace", "--force", "-f", "-", stdin=json.dumps(quota.manifest(LIMITING)), check=False)
    assert (forced.returncode, MUST_NOT in forced.stderr) == (1, True)
    assert "without --force (kubectl) and without Force=true (Argo CD)" in forced.stderr
    for path, query in ((quota.path, {}), (quota.collection, {"fieldSelector": "metadata.name=gpuquota"})):
        rejected = admin.rest.send("DELETE", path, **query)
        assert (rejected.status, MUST_NOT in rejected.message) == (HTTPStatus.FORBIDDEN, True)
    immutable = admin.rest.try_merge_patch(quota.path, {"immutable": True})
    assert "the quota ConfigMap must not be immutable" in immutable.message
    assert admin.rest.get(quota.path)["metadata"]["uid"] == before
    quota.delete()
    assert admin.rest.send("GET", quota.path).status == HTTPStatus.NOT_FOUND
    quota.write(LIMITING).ok()


TEAM = "vision: {namespaces: [team-a], quota: {M40: 2}}"


@cases(
    "data, allowed",
    a_team=({"gpu_quota": "{}", "gpu_teams": TEAM}, False),
    a_team_alone=({"gpu_teams": TEAM}, False),
    no_team=({"gpu_quota": " { } ", "gpu_teams": "{}"}, True),
    no_team_alone=({"gpu_teams": "{}"}, True),
    neither=({"other": "{}"}, False),
)
def test_a_quota_with_teams_is_not_deleted(
    admin: Cluster, quota: QuotaConfigMap, data: dict[str, str], allowed: bool
) -> None:
    kept = {key: None for key in ("gpu_quota", "gpu_teams", "other") if key not in data}
    admin.rest.merge_patch(quota.path, {"data": {**kept, **data}})
    deleted = admin.rest.send("DELETE", quota.path, dryRun="All")
    assert (deleted.status == HTTPStatus.OK, MUST_NOT in deleted.message) == (allowed, not allowed)


def test_a_renamed_quota_is_protected_too_and_is_deleted_with_its_namespace(admin: Cluster) -> None:
    with admin.fresh_namespace() as namespace:
        quota = QuotaConfigMap(admin.rest, namespace, "limits", labels={})
        objects = [each for each in rendered(BASE) if each["metadata"]["name"] == "quota-config-map.quota.vcuda.io"]
        admin.apply(*(rename(each, Names(quota_namespace=namespace, quota="limits")) for each in objects))
        quota.write(LIMITING).ok()

        def rejected() -> bool:
            deleted = admin.rest.send("DELETE", quota.path, dryRun="All")
            return deleted.status == HTTPStatus.FORBIDDEN and MUST_NOT in deleted.message

        eventually(rejected)
    admin.await_gone("/api/v1/namespaces", namespace)
    admin.apply(*objects)


# Writes of our accounts


@pytest.mark.parametrize(("name", "admitted"), [("vcuda-webhook-ca", True), ("another", False)])
def test_the_rotation_of_certificates_creates_only_its_secrets(admin: Cluster, name: str, *, admitted: bool) -> None:
    metadata = {"namespace": SYSTEM_NAMESPACE, "name": name}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"}
    token = admin.service_account_token(SYSTEM_NAMESPACE, "vcuda-certs")
    admin.delete(f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets/{name}")
    with closing(Cluster(admin.control_plane, token)) as certs:
        answer = certs.try_create(secret, dryRun="All")
    assert answer.status == (HTTPStatus.CREATED if admitted else HTTPStatus.FORBIDDEN), answer.message


@pytest.mark.parametrize("user", ["vcuda-webhook", "vcuda-controller"])
def test_an_account_may_write_ledgers_in_their_namespace_and_nothing_else(admin: Cluster, user: str) -> None:
    other = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": LEDGER_NAMESPACE, "name": "not-ours"}}
    admin.apply(other)
    path = f"/api/v1/namespaces/{LEDGER_NAMESPACE}/configmaps"
    with closing(Cluster(admin.control_plane, admin.service_account_token(SYSTEM_NAMESPACE, user))) as account:
        changed = account.rest.send("PUT", f"{path}/not-ours", {**other, "data": {"a": "1"}})
        assert (changed.status, "this account may write no ConfigMaps" in changed.message) == (
            HTTPStatus.FORBIDDEN,
            True,
        )
        made = {**other, "metadata": {"namespace": LEDGER_NAMESPACE, "name": "gpu-ledger-nobody"}}
        assert account.try_create(made, dryRun="All").status == HTTPStatus.CREATED
        if user == "vcuda-controller":
            assert account.rest.send("DELETE", f"{path}/not-ours").status == HTTPStatus.FORBIDDEN
    admin.delete(f"{path}/not-ours")


def test_the_controller_may_patch_only_its_own_metadata_of_each_kind(admin: Cluster, team: str) -> None:
    node = f"/api/v1/nodes/{team}-discovered"
    admin.create_node(f"{team}-discovered")
    admin.create(workload("ReplicaSet", team, "set", replicas=0))
    of_team, sets = f"/api/v1/namespaces/{team}", f"/apis/apps/v1/namespaces/{team}/replicasets/set"
    admin.rest.merge_patch(pod_path(team), {"metadata": {**CARD, **PHASE}})
    retried = {"metadata": {"annotations": {RETRY_ANNOTATION: "1"}}}
    gone = {"apiVersion": "v1", "kind": "ConfigMap", "name": "gone", "uid": "00000000-0000-0000-0000-000000000000"}
    permitted: dict[str, Json] = {
        of_team: {"metadata": {"labels": {"quota.vcuda.io/enforced": "true"}}},
        sets: retried,
        pod_path(team): {"metadata": cleared({**CARD, **PHASE})},
        node: {"metadata": {"labels": {MODEL: "A100"}, "annotations": {DISCOVERED: "A100 from hami"}}},
    }
    with closing(controller_account(admin)) as account:
        for path, change in permitted.items():
            rejected = patch(account, path, {"metadata": {"ownerReferences": [gone]}})
            assert rejected.status == HTTPStatus.FORBIDDEN, (path, rejected.message)
            assert patch(account, path, change).status == HTTPStatus.OK, path
    admin.delete_node(f"{team}-discovered")


def test_the_controller_may_remove_a_thousand_allocation_annotations(admin: Cluster, team: str) -> None:
    """The evaluation of the policy must not cost more than the API server permits."""
    marks = {f"nvidia.com/predicate-gpu-idx-{number}": "" for number in range(1000)}
    admin.rest.merge_patch(pod_path(team), {"metadata": {"annotations": marks}})
    with closing(controller_account(admin)) as account:
        answer = patch(account, pod_path(team), {"metadata": cleared({"annotations": marks})})
        assert (answer.status, answer.message) == (HTTPStatus.OK, "")
