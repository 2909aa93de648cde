"""Tests of the namespace label by which the API server does not call the webhook for a namespace.

The controller sets this label, which exempts the namespace, on namespaces without a limit.
"""

import json
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http import HTTPStatus

import pytest

from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import (
    ENFORCED,
    SERVED_BY,
    USAGE,
    Installation,
    await_enforced,
    controlling,
    ledger_path,
    limited_team,
    policies,
)
from tests.e2e.ledgers import await_published
from tests.e2e.quota_config import QuotaConfigMap
from tests.integration.reviews import card_pod
from tests.processes import eventually

CARD: Json = {"quota": {"M40": 1}}
MANY, CALLERS = 250, 16
NAMESPACES = "/api/v1/namespaces"


def label_of(namespace: Json) -> str | None:
    value: str | None = namespace["metadata"].get("labels", {}).get(ENFORCED)
    return value


def labelling(value: str | None) -> Json:
    return {"metadata": {"labels": {ENFORCED: value}}}


def await_exempt(cluster: Cluster, limited: set[str]) -> None:
    def just_these(namespaces: list[Json]) -> bool:
        staying = [each for each in namespaces if each["status"]["phase"] == "Active"]
        return {each["metadata"]["name"] for each in staying if label_of(each) != "false"} == limited

    cluster.await_collection(NAMESPACES, just_these)


@contextmanager
def further(quota: QuotaConfigMap, **keys: str) -> Iterator[None]:
    """Add further keys to the quota ConfigMap. Remove them at the end."""
    assert isinstance(quota.further, dict)
    quota.further.update(keys)
    quota.limit()
    yield
    for key in keys:
        del quota.further[key]
    quota.limit()


@pytest.mark.slow
@pytest.mark.one_version
@pytest.mark.timeout(600)
def test_no_pod_of_a_new_namespace_is_stored_without_a_charge(cluster: Cluster, installation: Installation) -> None:
    """Hundreds of namespaces are used as soon as they exist. The quota's entry "*" allows each of them one card."""
    own = f"star-{secrets.token_hex(4)}"

    def use(number: int) -> tuple[int, bool, dict[str, int]]:
        name = cluster.create_namespace(f"{own}-{number}", {SERVED_BY: installation.label})
        first, second = (cluster.try_create(card_pod(pod, name)) for pod in ("first", "second"))
        return first.status, second.is_over_quota, installation.charged(name)

    def clear(number: int) -> None:
        """Delete the namespace, its ledger and its usage report, so that later controllers need not process them."""
        name = f"{own}-{number}"
        cluster.delete_namespace(name)
        cluster.rest.try_merge_patch(ledger_path(name), {"metadata": {"finalizers": None}})
        for path in (ledger_path(name), f"{NAMESPACES}/{name}/configmaps/{USAGE}"):
            cluster.delete(path)
        final = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}, "spec": {"finalizers": []}}
        cluster.rest.send("PUT", f"{NAMESPACES}/{name}/finalize", final)

    with ThreadPoolExecutor(CALLERS) as callers:
        with controlling(installation), installation.quota.limited(**{"*": CARD}):
            used = list(callers.map(use, range(MANY)))
        list(callers.map(clear, range(MANY)))
    assert [each for each in used if each != (HTTPStatus.CREATED, True, {"M40": 100})] == []


@pytest.mark.usefixtures("controller")
class TestLabelled:
    """Tests with a leading controller, which labels namespaces."""

    def test_exactly_the_namespaces_without_a_limit_are_labelled_exempt(
        self, cluster: Cluster, installation: Installation
    ) -> None:
        audited: Json = {**CARD, "mode": "audit"}
        with installation.free_team() as first, installation.free_team() as second:
            installation.quota.limit(**{first: CARD, second: audited})
            await_exempt(cluster, {first, second})
            installation.quota.lift(first)
            await_exempt(cluster, {second})
            installation.quota.limit(**{first: {"quota": {}}, "kube-public": CARD})
            await_exempt(cluster, {first, second, "kube-public"})
            installation.quota.lift(first, second, "kube-public")

    def test_members_of_a_team_are_limited_from_the_first_pod_of_a_new_namespace_on(
        self, cluster: Cluster, installation: Installation
    ) -> None:
        """Only a beginning of names lists the members, so the team names them before they exist."""
        own, quota = f"vision-{secrets.token_hex(4)}", installation.quota
        team = {"namespaces": [f"{own}-*"], "quota": {"M40": 1}}
        labels = {SERVED_BY: installation.label}
        with installation.free_team() as other:
            with (
                further(quota, gpu_teams=json.dumps({"vision": team})),
                cluster.fresh_namespace(labels, f"{own}-1") as first,
                cluster.fresh_namespace(labels, f"{own}-2") as second,
            ):
                cluster.create(card_pod("first", first))
                for namespace in (first, second):
                    assert cluster.try_create(card_pod("more", namespace)).is_over_quota
                await_exempt(cluster, {first, second})
            await_enforced(cluster, other, enforced=False)

    def test_an_edit_of_the_label_by_hand_is_reverted(self, cluster: Cluster, installation: Installation) -> None:
        with limited_team(installation, CARD) as limited, installation.free_team() as free:
            await_enforced(cluster, free, enforced=False)
            assert label_of(cluster.rest.merge_patch(f"{NAMESPACES}/{limited}", labelling("false"))) == "false"
            cluster.rest.merge_patch(f"{NAMESPACES}/{free}", labelling("true"))
            await_enforced(cluster, limited)
            await_enforced(cluster, free, enforced=False)

    def test_usage_shows_a_quota_in_effect_only_after_the_label_is_set(
        self, cluster: Cluster, installation: Installation
    ) -> None:
        """While a policy of this project is not in effect, the published usage says that the quota is taking effect."""
        [policy, binding] = policies("in-effect.quota.vcuda.io")
        with installation.free_team() as namespace, limited_team(installation, CARD) as asked, ExitStack() as stack:
            await_enforced(cluster, namespace, enforced=False)
            stack.callback(cluster.apply, policy, binding)
            cluster.delete(f"{cluster.path_of(binding)}/{binding['metadata']['name']}")
            metadata = {"name": "gpu-quota-probe", "namespace": asked}
            probe = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
            eventually(lambda: cluster.try_create(probe, dryRun="All").status == HTTPStatus.CREATED)
            with installation.quota.limited(**{namespace: CARD}):
                await_published(cluster, namespace, lambda use: use["taking_effect"])
                cluster.await_object(NAMESPACES, namespace, lambda found: label_of(found) == "taking-effect")
                cluster.apply(policy, binding)
                await_published(cluster, namespace, lambda use: not use["taking_effect"])
                await_enforced(cluster, namespace)
                cluster.create(card_pod("first", namespace))
                assert cluster.try_create(card_pod("second", namespace)).is_over_quota


@pytest.fixture
def namespace(installation: Installation) -> Iterator[str]:
    """A namespace with a limit. No controller runs that could give it the exempting label."""
    with limited_team(installation, CARD) as limited:
        yield limited


@pytest.fixture
def owner(cluster: Cluster, namespace: str, tenant: Callable[[str], Cluster]) -> Iterator[Cluster]:
    """A client of a tenant who may edit the tenant's Namespace object and create other namespaces."""
    named = f"owner-of-{namespace}"
    verbs = "--verb=get,create,update,patch"
    cluster.kubectl("create", "clusterrole", named, verbs, "--resource=namespaces,namespaces/status")
    cluster.kubectl("create", "clusterrolebinding", named, f"--clusterrole={named}", "--user=tenant")
    owner = tenant(namespace)
    eventually(lambda: owner.rest.send("GET", f"{NAMESPACES}/{namespace}").status == HTTPStatus.OK)
    yield owner
    cluster.kubectl("delete", "clusterrole,clusterrolebinding", named)


def test_only_the_controller_and_editors_of_webhooks_can_exempt_a_namespace(
    cluster: Cluster, namespace: str, owner: Cluster, account: Cluster
) -> None:
    """A user who may edit the namespace may remove the exempting label, and may change other labels."""
    path = f"{NAMESPACES}/{namespace}"

    def status_of_labelling(subresource: str = "") -> int:
        return owner.rest.try_merge_patch(path + subresource, labelling("false"), dryRun="All").status

    eventually(lambda: status_of_labelling() == HTTPStatus.FORBIDDEN, lambda: "the policy is not in effect")
    assert status_of_labelling("/status") == HTTPStatus.FORBIDDEN
    metadata = {"generateName": "e2e-", "labels": {ENFORCED: "false"}}
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
    assert owner.try_create(made, dryRun="All").status == HTTPStatus.FORBIDDEN
    for allowed in (account, cluster):
        allowed.rest.merge_patch(path, labelling("false"))
        owner.rest.merge_patch(path, {"metadata": {"labels": {"team": "a"}}})
        assert label_of(owner.rest.merge_patch(path, labelling(None))) is None
