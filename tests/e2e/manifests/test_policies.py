"""Tests which requests the ValidatingAdmissionPolicies of manifests/base reject on a real API server.

tests/integration/test_manifests_policies.py and test_manifests_own_policies.py evaluate the CEL expressions without
an API server, for every annotation.
"""

import itertools
import string
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from http import HTTPStatus

import pytest

from tests.e2e import dra
from tests.e2e.cluster import Cluster, Json
from tests.e2e.manifests.policies import CARD, PHASE, TYPE, cleared, patch, pod_path
from tests.e2e.rest import Answer
from tests.integration.reviews import with_spec
from tests.processes import eventually
from vcuda.quota.well_known import MAX_TERMINATING_SECONDS

pytestmark = pytest.mark.usefixtures("policies")

RBAC = "rbac.authorization.k8s.io"
ALLOCATIONS: list[Json] = [
    CARD,
    {"annotations": {"hami.io/vgpu-devices-allocated": "x"}},
    PHASE,
    TYPE,
    {"annotations": {"tencent.com/vcuda-core-limit": "100"}},
    {"annotations": {"GPU-Fraction": "0.5"}},
]
MANY = 20_000

Accounts = Callable[..., Cluster]


@pytest.fixture
def account(admin: Cluster, team: str) -> Iterator[Accounts]:
    """A function that creates an account with rights in all namespaces: a ClusterRole, or pairs (verbs, resources)."""
    with ExitStack() as teardown:

        def make(name: str, *rules: tuple[str, str]) -> Cluster:
            own_name = f"{team}-{name.replace(':', '-')}"
            about = {"apiVersion": f"{RBAC}/v1", "metadata": {"name": own_name}}
            role = own_name if rules else name
            admin.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"namespace": team, "name": "own"}})
            token = admin.service_account_token(team, "own")
            client = teardown.enter_context(closing(Cluster(admin.control_plane, token)))
            before = rights_of(client, team)
            if rules:
                split = [{"apiGroups": [""], "verbs": v.split(), "resources": r.split()} for v, r in rules]
                admin.create({**about, "kind": "ClusterRole", "rules": split})
                teardown.callback(admin.delete, f"/apis/{RBAC}/v1/clusterroles/{role}")
            subjects = [{"kind": "ServiceAccount", "namespace": team, "name": "own"}]
            reference = {"apiGroup": RBAC, "kind": "ClusterRole", "name": role}
            admin.create({**about, "kind": "ClusterRoleBinding", "roleRef": reference, "subjects": subjects})
            teardown.callback(admin.delete, f"/apis/{RBAC}/v1/clusterrolebindings/{own_name}")
            eventually(lambda: rights_of(client, team) != before)  # the API server's authorizer has read the binding
            return client

        yield make


def rights_of(account: Cluster, namespace: str) -> object:
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    return account.create(review)["status"]["resourceRules"]


# Allocations


def test_a_tenant_cannot_forge_change_or_remove_an_allocation(admin: Cluster, tenant: Cluster, team: str) -> None:
    for metadata in ALLOCATIONS:
        [(part, marks)] = metadata.items()
        rejected = patch(tenant, pod_path(team), {"metadata": metadata})
        assert (rejected.status, "record its cards" in rejected.message) == (HTTPStatus.FORBIDDEN, True)
        assert patch(admin, pod_path(team), {"metadata": metadata}).status == HTTPStatus.OK
        for change in (cleared(metadata), {part: dict.fromkeys(marks, "another")}):
            assert patch(tenant, pod_path(team), {"metadata": change}).status == HTTPStatus.FORBIDDEN
        assert patch(tenant, pod_path(team), {"metadata": {part: {"note": "1"}}}).status == HTTPStatus.OK
        assert patch(admin, pod_path(team), {"metadata": cleared(metadata)}).status == HTTPStatus.OK


@pytest.mark.parametrize("number", [1000, MANY])
def test_kubernetes_updates_a_pod_with_any_number_of_annotations_and_its_owner_changes_a_thousand(
    admin: Cluster, tenant: Cluster, team: str, number: int
) -> None:
    """The cost of a search grows with the square of their number. Kubernetes stores up to 256 KiB of annotations."""
    names = map("".join, itertools.product(string.ascii_letters + string.digits, repeat=3))
    many = dict.fromkeys(itertools.islice(names, number - 1), "")
    path = pod_path(team)
    assert patch(admin, path, {"metadata": {"annotations": many}}).status == HTTPStatus.OK
    changed = patch(tenant, path, {"metadata": {"annotations": {"note": "1"}}})
    assert changed.status == (HTTPStatus.FORBIDDEN if number > 1000 else HTTPStatus.OK), changed.message
    assert patch(admin, f"{path}/status", {"status": {"message": "read"}}).status == HTTPStatus.OK
    assert patch(admin, path, {"metadata": CARD}).status == HTTPStatus.OK
    assert patch(tenant, path, {"metadata": {"labels": {"a": "b"}}}).status == HTTPStatus.OK


BINDS, PATCHES_PODS = ("create", "pods/binding"), ("patch", "pods pods/status")


@pytest.mark.parametrize(
    ("name", "rules", "subresource", "admitted"),
    [
        pytest.param("scheduler", [BINDS, PATCHES_PODS], "", True, id="a scheduler"),
        pytest.param("plugin", [PATCHES_PODS, ("patch", "nodes")], "", True, id="a device plugin"),
        pytest.param("system:node", [], "/status", True, id="a kubelet"),
        pytest.param("edits", [PATCHES_PODS], "", False, id="an editor of pods in all namespaces"),
        pytest.param("status", [PATCHES_PODS], "/status", False, id="a writer of pod status"),
        pytest.param("admin", [], "", False, id="an administrator of namespaces"),
    ],
)
def test_an_account_that_may_bind_pods_or_patch_nodes_may_write_allocations(
    team: str, account: Accounts, name: str, rules: list[tuple[str, str]], *, subresource: str, admitted: bool
) -> None:
    writer = account(name, *rules)
    expected = HTTPStatus.OK if admitted else HTTPStatus.FORBIDDEN
    assert patch(writer, pod_path(team, subresource), {"metadata": CARD}).status == expected
    status = {"status": {"message": "still written"}} if subresource else {"metadata": {"annotations": {"note": "1"}}}
    assert patch(writer, pod_path(team, subresource), status).status == HTTPStatus.OK


@pytest.mark.parametrize(("resource", "admitted"), [("pods/binding", True), ("bindings", False)])
def test_a_binding_may_carry_an_allocation_if_the_account_may_bind_pods(
    admin: Cluster, team: str, account: Accounts, resource: str, *, admitted: bool
) -> None:
    """A right to create the older resource `bindings`, which no scheduler uses today, is not enough."""
    binder = account("binder", ("create", resource))
    path = f"{pod_path(team)}/binding" if admitted else f"/api/v1/namespaces/{team}/bindings"
    binding = {"apiVersion": "v1", "kind": "Binding", "target": {"kind": "Node", "name": "gpu-1"}}
    answer = binder.rest.send("POST", path, {**binding, "metadata": {"name": "train", **CARD}})
    assert answer.status == (HTTPStatus.CREATED if admitted else HTTPStatus.FORBIDDEN), answer.message
    assert (CARD["annotations"].items() <= admin.pod(team)["metadata"].get("annotations", {}).items()) == admitted
    if not admitted:
        bare = binder.rest.send("POST", path, {**binding, "metadata": {"name": "train"}})
        assert bare.status == HTTPStatus.CREATED, bare.message


def test_allocations_may_be_written_in_an_exempt_namespace(admin: Cluster, tenant: Cluster, team: str) -> None:
    patch(admin, f"/api/v1/namespaces/{team}", {"metadata": {"labels": {"quota.vcuda.io/enforced": "false"}}}).ok()
    eventually(lambda: patch(tenant, pod_path(team), {"metadata": CARD}).status == HTTPStatus.OK)


# Claims


def test_a_tenant_cannot_unprotect_a_claim_or_change_its_owners_and_kubernetes_still_can(
    admin: Cluster, tenant: Cluster, team: str
) -> None:
    """The real scheduler and the real claim controller allocate, protect and delete the claim."""
    dra.require_dra(admin)
    # No server answers the API server's calls of our webhooks for this pod, so delete the webhooks.
    for each in ("mutatingwebhookconfigurations/00-vcuda-quota", "validatingwebhookconfigurations/vcuda-quota"):
        admin.delete(f"/apis/admissionregistration.k8s.io/v1/{each}")
    claiming = dra.claiming(team, "uses", resourceClaimTemplateName="gpu")
    using = with_spec(claiming, terminationGracePeriodSeconds=30)
    with dra.published(admin, dra.Published(dra.NVIDIA, f"{team}-node", [dra.card(0, "A100")])):
        tenant.create(dra.template(team, "gpu"))
        eventually(lambda: tenant.try_create(using).status in (HTTPStatus.CREATED, HTTPStatus.CONFLICT))
        admin.await_bound(team, "uses")
        [claim] = dra.claims(admin, team)
        path = f"{dra.claims_path(team)}/{claim['metadata']['name']}"
        [owner] = claim["metadata"]["ownerReferences"]
        [kept] = admin.rest.get(f"/api/v1/namespaces/{team}/configmaps")["items"]
        second = {"apiVersion": "v1", "kind": "ConfigMap", "name": "kept", "uid": kept["metadata"]["uid"]}
        changes: list[Json] = [{"finalizers": None}, {"ownerReferences": None}]
        changes += ({"ownerReferences": owners} for owners in ([owner, second], [{**owner, "apiVersion": "v2"}]))
        for change in changes:
            rejected = patch(tenant, path, {"metadata": change})
            assert (rejected.status, "only Kubernetes itself may" in rejected.message) == (HTTPStatus.FORBIDDEN, True)
        assert patch(tenant, path, {"metadata": {"annotations": {"note": "1"}}}).status == HTTPStatus.OK
        forced = tenant.rest.send("DELETE", pod_path(team, name="uses"), {"gracePeriodSeconds": 0})
        assert (forced.status, "a pod with a ResourceClaim" in forced.message) == (HTTPStatus.FORBIDDEN, True)
        tenant.rest.send("DELETE", path).ok()
        assert dra.devices_of(admin.rest.get(path))
        admin.delete_pod(team, "uses")
        admin.await_gone(dra.claims_path(team), claim["metadata"]["name"])


# Forced deletions


@pytest.mark.parametrize("way", ["deleted", "evicted"])
def test_a_tenant_cannot_delete_a_running_pod_at_once_if_it_uses_a_claim_by_name_or_lengthen_its_end(
    admin: Cluster, tenant: Cluster, team: str, way: str
) -> None:
    """If a pod that uses a claim is deleted at once, the claim may get another pod while the containers still run."""
    dra.require_dra(admin)
    admin.create(dra.claim(team, "mine"))
    using = dra.claiming(team, "uses", resourceClaimName="mine")
    admin.bind({**using, "spec": {**using["spec"], "terminationGracePeriodSeconds": 30}}, f"{team}-node")
    path = f"/api/v1/namespaces/{team}/pods/uses"

    def end(account: Cluster, seconds: int) -> Answer:
        options = {"gracePeriodSeconds": seconds}
        if way == "deleted":
            return account.rest.send("DELETE", path, options)
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"namespace": team, "name": "uses"}}
        return account.rest.send("POST", f"{path}/eviction", {**eviction, "deleteOptions": options})

    rejected = end(tenant, 0)
    assert (rejected.status, "must not be deleted with a grace period of 0" in rejected.message) == (
        HTTPStatus.FORBIDDEN,
        True,
    )
    rejected = end(tenant, MAX_TERMINATING_SECONDS + 1)
    assert (rejected.status, "with a longer grace period" in rejected.message) == (HTTPStatus.FORBIDDEN, True)
    assert end(tenant, 1).status in (HTTPStatus.OK, HTTPStatus.CREATED)
    assert "deletionTimestamp" in admin.rest.get(path)["metadata"]
    assert end(admin, 0).status in (HTTPStatus.OK, HTTPStatus.CREATED)
    admin.await_gone(f"/api/v1/namespaces/{team}/pods", "uses")


# Tests of claims whose owner is a PodGroup, and of claims that would outlive their pod
