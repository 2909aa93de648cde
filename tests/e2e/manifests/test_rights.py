"""Tests of the RBAC rules of the manifests: they permit all the work of every program, and each rule is needed.

The tests compare the rules with the requests in the audit log (`tests.e2e.manifests.audit`). They check three sets of
rules (`JUDGED`): those of the base, of the usage page, and of other components.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.builders import MODEL
from tests.e2e.cluster import Cluster, Json
from tests.e2e.conftest import require
from tests.e2e.dra import VERSION, require_dra
from tests.e2e.manifests import audit, scenes
from tests.e2e.manifests.system import NODE, System, applied, user_of
from tests.e2e.stage import own_address
from tests.rendered import MANIFESTS, composed, ours, rendered
from tools.control_plane import ControlPlane
from tools.ports import free_ports

# The fixture of the first test runs the whole system several times, so the tests need a long timeout.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(360), pytest.mark.one_version]

WITH_AGENT = MANIFESTS / "overlays" / "gpu-manager"
COMPONENTS = ("scheduler", "evict-violations")


def rbac_of(*components: str) -> list[Json]:
    files = (MANIFESTS / "components" / name / "rbac.yaml" for name in components)
    return [each for file in files for each in yaml.safe_load_all(file.read_text())]


ADDED, OF_THE_PAGE = rbac_of(*COMPONENTS), rbac_of("page")
# No kubelet reports here that a deleted pod has ended. With max_terminating_seconds 0, its charge is released at once.
FASTER = {"storable_seconds": "2", "resync_seconds": "4", "allocation_timeout": "1", "max_terminating_seconds": "0"}

KUBERNETES_OWN = {"system:kube-scheduler", "system:volume-scheduler", "extension-apiserver-authentication-reader"}
"""Roles that the API server itself creates, and that the second scheduler uses. Their rules are not checked."""


def the_base_lives(system: System, plane: ControlPlane) -> None:
    cluster = system.cluster
    cluster.create_node(NODE, {MODEL: "M40"}, scenes.CARDS)
    scenes.a_certificate_that_nobody_renewed_is_told(system)
    with system.serving(1) as [webhook], system.controller(**FASTER) as controller, system.node_agent() as agent:
        controller.await_synced()
        quota = scenes.quota_of(cluster, webhook)
        scenes.a_namespace_is_led_through_its_life(cluster, quota)
        scenes.two_namespaces_share_the_quota_of_a_team(cluster, quota)
        scenes.a_pod_from_before_the_quota_is_told_that_it_is_not_counted(cluster, quota)
        scenes.stale_allocations_are_removed(cluster)
        scenes.every_kind_of_workload_tries_again(cluster, plane, quota)
        scenes.a_malformed_quota_is_reported(cluster, quota)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        done = system.rotate(issued_before=now, overlap="1s", retention="1s")
        assert "IssueLeaf" in done.stdout, done.stdout + done.stderr
        assert agent.process.poll() is None
    cluster.delete_node(NODE)


def the_components_live(system: System, plane: ControlPlane) -> None:
    require(plane, "kube-scheduler")
    cluster = system.cluster
    cluster.create_node(NODE, {MODEL: "M40"}, scenes.CARDS)
    cluster.create_node(scenes.LEAVING, capacity=scenes.CARDS)
    address = f"{own_address()}:{free_ports(1)[0]}"
    with system.serving(1) as [webhook]:
        # The second address is of another IP family, so the controller must replace the EndpointSlice.
        for advertised in ("[fd00::1]:10443", "192.0.2.1:10443"):
            with system.controller(extender_advertise=advertised) as earlier:
                earlier.await_log("the Service routes to this replica")
        scenes.damage_a_journal(cluster)
        served = {"extender_address": address, "extender_advertise": address}
        with (
            system.controller(violations_period="1", **served) as controller,
            system.scheduler(address),
        ):
            controller.await_log("the Service routes to this replica")
            quota = scenes.quota_of(cluster, webhook)
            scenes.the_extenders_certificate_is_renewed(system)
            scenes.the_schedulers_certificate_is_renewed(system)
            scenes.a_damaged_journal_is_made_anew_once_it_is_deleted_and_goes_with_its_node(cluster, controller)
            scenes.a_pod_is_placed_on_a_card(cluster, quota)
            scenes.a_pod_beyond_a_lowered_quota_is_evicted(cluster, quota)
    cluster.delete_node(NODE)


def the_page_lives(system: System, _plane: ControlPlane) -> None:
    # The last address is of another IP family, so the controller must create another EndpointSlice.
    for advertised in ("192.0.2.1:8088", "192.0.2.2:8088", "[fd00::1]:8088"):
        with system.controller(ui_advertise=advertised) as controller:
            controller.await_log("the Service routes to this replica")


@dataclass(frozen=True)
class Judged:
    """A set of accounts whose RBAC rules are checked together.

    ``users``: the user name of each account, by the name of its ServiceAccount. ``all_rules``: the rules to check, and
    all other rules of these accounts. ``live``: a function that makes the system do all the work for which it needs the
    rules.
    """

    users: dict[str, str]
    rules: list[audit.Permission]
    all_rules: list[audit.Permission]
    live: Callable[[System, ControlPlane], None]
    components: tuple[str, ...] = ()


def rules_of(objects: Sequence[Json], accounts: Sequence[str]) -> list[audit.Permission]:
    return [permission for account in accounts for permission in audit.permissions(objects, account)]


def accounts_of(objects: Sequence[Json]) -> dict[str, str]:
    subjects = (subject for each in audit.bindings(objects) for subject in each["subjects"])
    return {each["name"]: f"system:serviceaccount:{each['namespace']}:{each['name']}" for each in subjects}


OURS = {user_of(each).rpartition(":")[2]: user_of(each) for each in ours(rendered(WITH_AGENT))}
GIVEN, PAGE = accounts_of(ADDED), accounts_of(OF_THE_PAGE)
OF_THE_BASE, OF_COMPONENTS = rules_of(rendered(WITH_AGENT), [*OURS]), rules_of(ADDED, [*GIVEN])
PAGE_RULES = rules_of(OF_THE_PAGE, [*PAGE])
JUDGED = {
    # The usage page is checked without the extender. The extender's rules also permit the controller to create
    # EndpointSlices, so with the extender, no test would fail without the page's own rule.
    "page": Judged(PAGE, PAGE_RULES, [*OF_THE_BASE, *PAGE_RULES], the_page_lives, ("page",)),
    "base": Judged(OURS, OF_THE_BASE, OF_THE_BASE, the_base_lives, ("node-agent-gpu-manager",)),
    "components": Judged(GIVEN, OF_COMPONENTS, [*OF_THE_BASE, *OF_COMPONENTS], the_components_live, COMPONENTS),
}
ACCOUNTS = [(name, account) for name, judged in JUDGED.items() for account in judged.users]
RULES = [(name, rule) for name, judged in JUDGED.items() for rule in judged.rules]
Requests = dict[str, dict[str, set[audit.Asked]]]
EVERY = [*OF_THE_BASE, *OF_COMPONENTS, *PAGE_RULES]


@pytest.fixture(scope="module")
def asked(
    plane: ControlPlane, admin: Cluster, audit_log: audit.AuditLog, tmp_path_factory: pytest.TempPathFactory
) -> Requests:
    require(plane, "kube-controller-manager")
    found = {}
    for name, judged in JUDGED.items():
        with applied(admin, tmp_path_factory.mktemp(name), *judged.components) as system:
            judged.live(system, plane)
        requests = {account: audit_log.requests(user) for account, user in judged.users.items()}
        found[name] = requests
    return found


@pytest.mark.parametrize(("name", "account"), ACCOUNTS)
def test_every_request_is_covered_by_the_rights(
    asked: Requests, audit_log: audit.AuditLog, name: str, account: str
) -> None:
    assert asked[name][account]
    assert audit_log.rejected(JUDGED[name].users[account]) == set()


@pytest.mark.parametrize(("name", "permission"), RULES, ids=str)
def test_every_verb_of_every_rule_is_needed_by_a_request(
    admin: Cluster, asked: Requests, name: str, permission: audit.Permission
) -> None:
    if permission.rule["apiGroups"] == [VERSION.partition("/")[0]]:
        require_dra(admin)
    assert audit.spare(permission, asked[name][permission.account], JUDGED[name].all_rules) == set()


def test_every_rule_of_the_manifests_is_checked_except_those_of_kubernetes_own_roles(tmp_path: Path) -> None:
    objects = rendered(composed(tmp_path, (*COMPONENTS, "page", "node-agent-gpu-manager")))
    accounts = [each["metadata"]["name"] for each in objects if each["kind"] == "ServiceAccount"]
    assert sorted(map(str, rules_of(objects, accounts))) == sorted(map(str, EVERY))
    made = {each["metadata"]["name"] for each in objects if each["kind"] in ("Role", "ClusterRole")}
    assert {each["roleRef"]["name"] for each in audit.bindings(objects)} - made == KUBERNETES_OWN
