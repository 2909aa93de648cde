"""The rights that components add: the parts do their work with them, and not one of them is spare."""

from collections.abc import Iterator, Sequence

import pytest
import yaml

from tests.e2e.cluster import Cluster, Json
from tests.e2e.conftest import require
from tests.e2e.control_plane import ControlPlane
from tests.e2e.manifests import scenes
from tests.e2e.manifests.audit import Asked, AuditLog, Permission, bindings, check_refused_without, permissions, spare
from tests.e2e.manifests.system import NODE, System, applied
from tests.e2e.stage import own_address
from tests.processes import free_ports
from tests.rendered import BASE, MANIFESTS, rendered

pytestmark = pytest.mark.slow

COMPONENTS = ("scheduler", "enforce-audit")
ADDED = [
    each
    for name in COMPONENTS
    for each in yaml.safe_load_all((MANIFESTS / "components" / name / "rbac.yaml").read_text())
]
USERS = {
    subject["name"]: f"system:serviceaccount:{subject['namespace']}:{subject['name']}"
    for each in bindings(ADDED)
    for subject in each["subjects"]
}
"""The full names of the accounts that they give rights, by their names."""

OF_THE_BASE = [permission for account in USERS for permission in permissions(rendered(BASE), account)]
RULES = [permission for account in USERS for permission in permissions(ADDED, account)]

KUBERNETES_OWN = {"system:kube-scheduler", "system:volume-scheduler", "extension-apiserver-authentication-reader"}
"""The roles that the API server itself makes, which a second scheduler has as the first: their rules are not judged."""


@pytest.fixture(scope="module")
def system(admin: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with applied(admin, tmp_path_factory.mktemp("rights"), *COMPONENTS) as system:
        yield system


@pytest.fixture(scope="module")
def asked(plane: ControlPlane, system: System, audit_log: AuditLog) -> dict[str, set[Asked]]:
    require(plane, "kube-scheduler")
    live(system)
    return {user: audit_log.requests(user) for user in USERS.values()}


def live(system: System) -> None:
    cluster = system.cluster
    scenes.nodes_have_models(cluster)
    address = f"{own_address()}:{free_ports(1)[0]}"
    with system.serving(1) as [webhook]:
        for advertised in ("[fd00::1]:10443", "192.0.2.1:10443"):  # of another family, so that the slice is made anew
            with system.controller(extender_advertise=advertised) as earlier:
                earlier.await_log("the Service leads here")
        served = {"extender_address": address, "extender_advertise": address}
        with system.controller(audit_period="1", **served) as controller, system.scheduler(address):
            controller.await_log("the Service leads here")
            quota = scenes.quota_of(cluster, webhook)
            scenes.the_extenders_certificate_is_renewed(system)
            scenes.a_pod_is_placed_on_a_card(cluster, quota)
            scenes.a_pod_beyond_a_lowered_quota_is_evicted(cluster, quota)
    cluster.delete_node(NODE)


def test_every_rule_of_the_manifests_is_judged_but_those_of_kubernetes_own_roles(system: System) -> None:
    """As they are rendered, with all components together; those of the base are judged by themselves."""
    rules = [each for account in accounts(system.objects) for each in permissions(system.objects, account)]
    base = [each for account in accounts(rendered(BASE)) for each in permissions(rendered(BASE), account)]
    assert sorted(map(str, rules)) == sorted(map(str, [*base, *RULES]))
    made = {each["metadata"]["name"] for each in system.objects if each["kind"] in ("Role", "ClusterRole")}
    assert {each["roleRef"]["name"] for each in bindings(system.objects)} - made == KUBERNETES_OWN


def accounts(objects: Sequence[Json]) -> list[str]:
    return [each["metadata"]["name"] for each in objects if each["kind"] == "ServiceAccount"]


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
    assert spare(permission, asked[USERS[permission.account]], [*OF_THE_BASE, *RULES]) == set()


@pytest.mark.parametrize("permission", RULES, ids=str)
def test_without_the_rule_the_api_server_refuses_what_the_part_asked_for(
    admin: Cluster, asked: dict[str, set[Asked]], permission: Permission
) -> None:
    user = USERS[permission.account]
    check_refused_without(admin, user, permission, asked[user], [*OF_THE_BASE, *RULES])
