"""The rights in the base: every part does all of its work with them, and not one of them is spare.

See `tests.e2e.manifests.audit` for how that is told; the components' rights are in `test_rights_components`.
"""

import time
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Cluster, streams_lists
from tests.e2e.control_plane import ControlPlane
from tests.e2e.manifests import scenes
from tests.e2e.manifests.audit import (
    Asked,
    AuditLog,
    Permission,
    check_refused_without,
    lists_in_pages,
    permissions,
    spare,
)
from tests.e2e.manifests.system import NODE, System, applied, user_of
from tests.rendered import BASE, ours, rendered
from vcuda.kube import Kube

pytestmark = pytest.mark.slow

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
    requests = {user: audit_log.requests(user) for user in USERS.values()}
    if streams_lists(Kube.connect(system.cluster.kubeconfig)):
        requests = {user: found | lists_in_pages(found) for user, found in requests.items()}
    return requests


def live(system: System, plane: ControlPlane) -> None:
    cluster = system.cluster
    scenes.nodes_have_models(cluster)
    scenes.a_certificate_that_nobody_renewed_is_told(system)
    with system.serving(1) as [webhook], system.controller(**FASTER) as controller, system.node_agent() as agent:
        controller.await_synced()
        quota = scenes.quota_of(cluster, webhook)
        scenes.a_namespace_is_led_through_its_life(cluster, quota)
        scenes.a_pod_from_before_the_quota_is_told_that_it_is_not_counted(cluster, quota)
        scenes.stale_allocations_are_removed(cluster)
        scenes.every_kind_of_workload_tries_again(cluster, plane, quota)
        scenes.a_malformed_quota_is_reported(cluster, quota)
        done = system.rotate(issued_before=now(), overlap="1s", retention="1s")
        assert "IssueLeaf" in done.stdout, done.stdout + done.stderr
        assert agent.process.poll() is None
    cluster.delete_node(NODE)


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


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
    assert spare(permission, asked[USERS[permission.account]], RULES) == set()


@pytest.mark.parametrize("permission", RULES, ids=str)
def test_without_the_rule_the_api_server_refuses_what_the_part_asked_for(
    admin: Cluster, asked: dict[str, set[Asked]], permission: Permission
) -> None:
    user = USERS[permission.account]
    check_refused_without(admin, user, permission, asked[user], RULES)
