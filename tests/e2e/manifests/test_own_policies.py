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
from tests.e2e.manifests.policies import CARD, PHASE, TYPE, cleared, controller_account, ordinary, patch, pod_path
from tests.e2e.quota_config import QuotaConfigMap
from tests.e2e.workloads import workload
from tests.processes import eventually
from tests.rendered import BASE, rendered
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


@pytest.mark.parametrize(
    ("name", "kind", "admitted"),
    [
        ("vcuda-webhook-ca", "Opaque", True),
        ("vcuda-webhook-tls", "kubernetes.io/tls", True),
        ("vcuda-webhook-ca", "kubernetes.io/service-account-token", False),
        ("another", "Opaque", False),
    ],
)
def test_the_rotation_of_certificates_creates_its_two_secrets(
    admin: Cluster, name: str, kind: str, *, admitted: bool
) -> None:
    annotations = {"kubernetes.io/service-account.name": "vcuda-controller"}
    metadata = {"namespace": SYSTEM_NAMESPACE, "name": name, "annotations": annotations}
    data = {"tls.crt": "", "tls.key": ""} if kind == "kubernetes.io/tls" else {}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": kind, "data": data}
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


def test_the_controller_may_patch_only_model_record_and_locks_of_a_node(admin: Cluster, team: str) -> None:
    name = f"{team}-discovered"
    path = f"/api/v1/nodes/{name}"
    admin.create_node(name, {"a/b": "c"})
    owner = {"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim", "name": "gpu", "uid": "u1"}
    kept = {"annotations": {"a/b": "c"}, "finalizers": ["example.com/kept"], "ownerReferences": [owner]}
    admin.rest.merge_patch(path, {"metadata": kept})
    record = {"labels": {MODEL: "A100"}, "annotations": {DISCOVERED: "A100 from hami"}}
    with closing(controller_account(admin)) as account:
        for change, admitted in (
            ({"metadata": record}, True),
            ({"metadata": {"annotations": {"hami.io/mutex.lock": None}}}, True),
            ({"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}}, False),
            ({"metadata": {"labels": {"a/b": None}}}, False),
            ({"metadata": {"annotations": {"hami.io/node-nvidia-register": "[]"}}}, False),
            ({"metadata": {"annotations": {"a/b": None}}}, False),
            ({"metadata": {"finalizers": []}}, False),
            ({"metadata": {"ownerReferences": []}}, False),
            ({"spec": {"unschedulable": True}}, False),
        ):
            answer = patch(account, path, change)
            assert answer.status == (HTTPStatus.OK if admitted else HTTPStatus.FORBIDDEN), (change, answer.message)
    admin.rest.merge_patch(path, {"metadata": {"finalizers": []}})
    admin.delete_node(name)


def test_the_controller_may_patch_no_spec_and_only_its_own_metadata(admin: Cluster, team: str) -> None:
    """The controller must not set an owner: the garbage collector deletes an object whose owner does not exist."""
    admin.create(workload("ReplicaSet", team, "set", replicas=0))
    of_team, sets = f"/api/v1/namespaces/{team}", f"/apis/apps/v1/namespaces/{team}/replicasets/set"
    privileged = {"pod-security.kubernetes.io/enforce": "privileged"}
    image = {"spec": {"containers": [{**ordinary("train", team)["spec"]["containers"][0], "image": "another"}]}}
    enforced = {"metadata": {"labels": {"quota.vcuda.io/enforced": "true"}}}
    retried, noted = ({"metadata": {"annotations": {key: "1"}}} for key in (RETRY_ANNOTATION, "example.com/note"))
    gone = {"apiVersion": "v1", "kind": "ConfigMap", "name": "gone", "uid": "00000000-0000-0000-0000-000000000000"}
    foreign: list[Json] = [noted, {"metadata": {"ownerReferences": [gone]}}, {"metadata": {"finalizers": ["a.b/c"]}}]
    admin.rest.merge_patch(pod_path(team), {"metadata": {**CARD, **PHASE}})
    with closing(controller_account(admin)) as account:
        changes: list[tuple[str, Json, bool]] = [
            (of_team, {"metadata": {"labels": privileged}}, False),
            (of_team, enforced, True),
            (of_team, retried, False),
            (sets, {"spec": {"replicas": 5}}, False),
            (sets, retried, True),
            (pod_path(team), image, False),
            (pod_path(team), {"metadata": {"labels": {"app": "another"}}}, False),
            (pod_path(team), {"metadata": TYPE}, False),
            (pod_path(team), {"metadata": {"annotations": {"tencent.com/predicate-gpu-idx-0": "1"}}}, False),
            (pod_path(team), {"metadata": cleared({**CARD, **PHASE})}, True),
            (pod_path(team), retried, True),
            *((path, change, False) for path in (of_team, sets, pod_path(team)) for change in foreign),
        ]
        for path, change, admitted in changes:
            answer = patch(account, path, change)
            assert answer.status == (HTTPStatus.OK if admitted else HTTPStatus.FORBIDDEN), (
                path,
                change,
                answer.message,
            )


def test_the_controller_may_remove_a_thousand_allocation_annotations(admin: Cluster, team: str) -> None:
    """The evaluation of the policy must not cost more than the API server permits."""
    marks = {f"nvidia.com/predicate-gpu-idx-{number}": "" for number in range(1000)}
    admin.rest.merge_patch(pod_path(team), {"metadata": {"annotations": marks}})
    with closing(controller_account(admin)) as account:
        answer = patch(account, pod_path(team), {"metadata": cleared({"annotations": marks})})
        assert (answer.status, answer.message) == (HTTPStatus.OK, "")
