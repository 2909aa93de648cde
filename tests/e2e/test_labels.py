"""The label quota.vcuda.io/enforced is on the namespaces whose pods are charged, on no others, and stays so."""

import pytest

from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import ENFORCED, SYSTEM_NAMESPACE, Installation, await_enforced, limited_team

pytestmark = pytest.mark.usefixtures("controller")

CARD: Json = {"quota": {"M40": 1}}
SYSTEM = {"kube-system", "kube-public", "kube-node-lease", SYSTEM_NAMESPACE}


def is_enforced(namespace: Json) -> bool:
    labels: Json = namespace["metadata"].get("labels", {})
    return labels.get(ENFORCED) == "true"


def await_exactly_enforced(cluster: Cluster, wanted: set[str]) -> None:
    """Return once, of the namespaces that are not about to go, just these are enforced."""

    def just_these(namespaces: list[Json]) -> bool:
        staying = [each for each in namespaces if each["status"]["phase"] == "Active"]
        return {each["metadata"]["name"] for each in staying if is_enforced(each)} == wanted

    cluster.await_collection("/api/v1/namespaces", just_these)


def test_just_the_listed_namespaces_are_labelled_whatever_their_mode(
    cluster: Cluster, installation: Installation
) -> None:
    audited: Json = {**CARD, "mode": "audit"}
    with installation.free_team() as first, installation.free_team() as second, installation.free_team() as unlisted:
        installation.quota.limit(**{first: CARD, second: audited})
        await_exactly_enforced(cluster, {first, second})
        installation.quota.lift(first)
        await_exactly_enforced(cluster, {second})
        installation.quota.limit(**{unlisted: {"quota": {}}})
        await_exactly_enforced(cluster, {second, unlisted})
        installation.quota.lift(second, unlisted)


def test_a_star_labels_all_namespaces_but_the_systems_own_and_new_ones_as_they_come(
    cluster: Cluster, installation: Installation
) -> None:
    with installation.quota.limited(**{"*": CARD}), installation.free_team() as late:
        await_enforced(cluster, late)
        namespaces = cluster.rest.get("/api/v1/namespaces")["items"]
        active = {each["metadata"]["name"] for each in namespaces if each["status"]["phase"] == "Active"}
        await_exactly_enforced(cluster, active - SYSTEM)
        assert active >= SYSTEM
    await_exactly_enforced(cluster, set())


def test_a_system_namespace_with_an_entry_of_its_own_is_labelled(cluster: Cluster, installation: Installation) -> None:
    with installation.quota.limited(**{"kube-public": CARD}):
        await_exactly_enforced(cluster, {"kube-public"})
    await_exactly_enforced(cluster, set())


@pytest.mark.parametrize("value", [None, "false"], ids=["removed", "set to something else"])
def test_a_label_that_somebody_changes_comes_back(
    cluster: Cluster, installation: Installation, value: str | None
) -> None:
    with limited_team(installation, CARD) as namespace:
        patch = {"metadata": {"labels": {ENFORCED: value}}}
        assert not is_enforced(cluster.rest.merge_patch(f"/api/v1/namespaces/{namespace}", patch))
        await_enforced(cluster, namespace)


def test_a_label_that_somebody_sets_where_there_is_no_quota_is_taken_away(
    cluster: Cluster, installation: Installation
) -> None:
    """Its pods would wait for /validate, which has nothing to say about them."""
    with installation.unlisted_team() as namespace:
        await_enforced(cluster, namespace, enforced=False)
