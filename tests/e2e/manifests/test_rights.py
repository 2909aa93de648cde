"""The rights in the manifests: every part does all of its work with them, and not one of them is spare.

The API server's audit log tells what each account asked for. A right is needed if one of these requests is covered by
that rule alone; each rule is then really taken away, and the API server asked whether the request may still be made.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.e2e.cluster import TIMEOUT, Cluster
from tests.e2e.control_plane import ControlPlane
from tests.e2e.manifests import scenes
from tests.e2e.manifests.audit import Asked, AuditLog, Permission, permissions
from tests.e2e.manifests.system import NODE, System, applied
from tests.e2e.manifests.workload import user_of
from tests.e2e.rest import Json
from tests.rendered import BASE, ours, rendered

RBAC = "/apis/rbac.authorization.k8s.io/v1"
REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
USERS = {user_of(each).rpartition(":")[2]: user_of(each) for each in ours(rendered(BASE))}
"""The accounts' full names, by their names."""

RULES = [permission for account in USERS for permission in permissions(rendered(BASE), account)]
FASTER = {"storable_seconds": "2", "full_pass_seconds": "4", "allocation_timeout": "1"}


@pytest.fixture(scope="module")
def system(admin: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with applied(admin, tmp_path_factory.mktemp("rights")) as system:
        yield system


@pytest.fixture(scope="module")
def asked(plane: ControlPlane, system: System, audit_log: AuditLog) -> dict[str, set[Asked]]:
    """What every account has asked for in a whole life, by the account's full name."""
    if plane.controller_manager is None:
        pytest.skip(f"no kube-controller-manager in {plane.assets}")
    live(system, plane)
    return {user: audit_log.requests(user) for user in USERS.values()}


def live(system: System, plane: ControlPlane) -> None:
    """Run all parts, and have everything happen that they are for."""
    cluster = system.cluster
    scenes.nodes_have_models(cluster)
    scenes.a_certificate_that_nobody_renewed_is_told(system)
    with system.serving(1) as [webhook], system.controller(**FASTER) as controller, system.node_agent() as agent:
        controller.await_synced()
        quota = scenes.quota_of(cluster, webhook)
        scenes.a_namespace_is_led_through_its_life(cluster, quota)
        scenes.a_pod_from_before_the_quota_is_told_that_it_is_not_counted(cluster, quota)
        scenes.stale_allocations_are_removed(cluster)
        scenes.every_kind_of_workload_is_nudged(cluster, plane, quota)
        scenes.a_malformed_quota_is_reported(cluster, quota)
        done = system.rotate(issued_before=now(), overlap="1s", retention="1s")
        assert "IssueLeaf" in done.stdout, done.stdout + done.stderr
        assert agent.process.poll() is None
    cluster.delete_node(NODE)


def now() -> str:
    """The time, as the rotation's flags have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def needing(
    permission: Permission, verb: str, resource: str, requests: set[Asked], held: Sequence[Permission]
) -> set[Asked]:
    """The requests with this verb and resource that the rule covers, and no other that the account has."""
    others = [each for each in held if each != permission]
    return {
        each
        for each in requests
        if (each.verb, each.resource) == (verb, resource)
        and permission.allows(each)
        and not any(other.allows(each) for other in others)
    }


@pytest.mark.parametrize("account", USERS)
def test_nothing_is_asked_for_that_the_rights_do_not_cover(
    asked: dict[str, set[Asked]], audit_log: AuditLog, account: str
) -> None:
    assert asked[USERS[account]]
    assert audit_log.refused(USERS[account]) == set()


@pytest.mark.parametrize("permission", RULES, ids=str)
def test_every_verb_of_every_rule_is_used_for_what_no_other_rule_covers(
    asked: dict[str, set[Asked]], permission: Permission
) -> None:
    account = permission.role
    held = [each for each in RULES if each.role == account]
    spare = [
        (verb, resource)
        for verb in permission.rule["verbs"]
        for resource in permission.rule["resources"]
        if not needing(permission, verb, resource, asked[USERS[account]], held)
    ]
    assert spare == []


@pytest.mark.parametrize("permission", RULES, ids=str)
def test_without_the_rule_the_api_server_refuses_what_the_part_asked_for(
    admin: Cluster, asked: dict[str, set[Asked]], permission: Permission
) -> None:
    user = USERS[permission.role]
    held = [each for each in RULES if each.role == permission.role]
    needed = {
        each
        for verb in permission.rule["verbs"]
        for resource in permission.rule["resources"]
        for each in needing(permission, verb, resource, asked[user], held)
    }
    request = min(needed, key=str)
    await_answer(admin, user, request, allowed=True)
    with without(admin, permission):
        await_answer(admin, user, request, allowed=False)


@contextmanager
def without(cluster: Cluster, permission: Permission) -> Iterator[None]:
    """`with` this, the role lacks the rule."""
    where = f"/namespaces/{permission.namespace}" if permission.namespace else ""
    path = f"{RBAC}{where}/{permission.kind.lower()}s/{permission.role}"
    role = cluster.rest.get(path)
    rules = [each for index, each in enumerate(role["rules"]) if index != permission.index]
    cluster.rest.merge_patch(path, {"rules": rules})
    try:
        yield
    finally:
        cluster.rest.merge_patch(path, {"rules": role["rules"]})


def await_answer(cluster: Cluster, user: str, request: Asked, *, allowed: bool) -> None:
    """Return once the API server's authorizer, which follows the roles by a watch, decides so."""
    deadline = time.monotonic() + TIMEOUT
    while (status := decision(cluster, user, request))["allowed"] is not allowed:
        assert time.monotonic() < deadline, (request, status)
        time.sleep(0.02)


def decision(cluster: Cluster, user: str, request: Asked) -> Json:
    """What a SubjectAccessReview says."""
    status: Json = cluster.rest.send("POST", REVIEWS, request.review(user)).ok()["status"]
    return status
