"""Tests that pods with newer features of Kubernetes (sidecars, resize, scheduling gates, …) are charged correctly."""

from collections.abc import Callable
from http import HTTPStatus

import pytest

from tests.builders import MODEL, container, held_to, pod, required, requirement, sidecar, term
from tests.e2e.cluster import Cluster, Json
from tests.e2e.dra import served
from tests.e2e.installation import Installation
from tests.e2e.ledgers import await_committed, pass_by
from tests.e2e.rest import Answer
from tests.integration.reviews import card_pod, gpu_pod

CARD = "tencent.com/vcuda-core"
QUOTA = {"quota": {"M40": 8}}
HOLD = {"name": "example.com/hold"}


@pytest.fixture
def team(led_team: Callable[[Json], str]) -> str:
    return led_team(QUOTA)


def since(cluster: Cluster, minor: int, feature: str) -> None:
    """Skip the test if the API server is older than 1.``minor``, which enables the tested feature by default."""
    if cluster.control_plane.minor < minor:
        pytest.skip(f"{feature}: on from Kubernetes 1.{minor}, this is 1.{cluster.control_plane.minor}")


def patch(cluster: Cluster, namespace: str, change: Json, subresource: str = "", name: str = "train") -> Answer:
    """Send a strategic merge patch of the pod or its subresource, as kubectl does. Return the answer."""
    path = f"/api/v1/namespaces/{namespace}/pods/{name}{subresource}"
    return cluster.rest.send("PATCH", path, change, content_type="application/strategic-merge-patch+json")


def asked(installation: Installation) -> float:
    return installation.replica.metric("vcuda_admissions_total")


def cards(number: int, name: str, make: Callable[..., Json] = container) -> Json:
    return make({CARD: 100 * number}, name=name)


INIT_CONTAINERS = {
    "a sidecar adds up": ([cards(1, "s", sidecar)], 2),
    "an init container runs before the others": ([cards(3, "i")], 3),
    "a smaller init container costs nothing": ([cards(1, "i")], 1),
    "an init container runs with the sidecars before it": ([cards(1, "s", sidecar), cards(2, "i")], 3),
    "a sidecar starts after the init containers before it": ([cards(2, "i"), cards(1, "s", sidecar)], 2),
    "sidecars gather between init containers": (
        [cards(1, "s1", sidecar), cards(2, "i1"), cards(2, "s2", sidecar), cards(2, "i2")],
        5,
    ),
}
"""Init containers for a pod whose main container requests one card, and the cards that the pod is then charged."""


@pytest.mark.usefixtures("controller_manager")
@pytest.mark.parametrize(("init", "taken"), INIT_CONTAINERS.values(), ids=INIT_CONTAINERS.keys())
def test_sidecars_and_init_containers_are_charged_as_a_resource_quota_counts_them(
    cluster: Cluster, installation: Installation, team: str, init: list[Json], taken: int
) -> None:
    resource = f"requests.{CARD}"
    judge = {"metadata": {"name": "judge", "namespace": team}, "spec": {"hard": {resource: "10k"}}}
    cluster.create({"apiVersion": "v1", "kind": "ResourceQuota", **judge})
    quotas = f"/api/v1/namespaces/{team}/resourcequotas"
    cluster.await_object(quotas, "judge", lambda quota: "used" in quota.get("status", {}))
    cluster.create(pod(cards(1, "main"), init=init, metadata={"name": "train", "namespace": team}))
    cluster.await_object(quotas, "judge", lambda quota: quota["status"]["used"][resource] == str(100 * taken))
    await_committed(installation, team, M40=100 * taken)


def test_a_resize_of_cpu_and_memory_in_place_leaves_charge_and_pin_and_no_card_can_be_added(
    cluster: Cluster, installation: Installation, team: str
) -> None:
    """The API server itself rejects a resize that adds a card. It does not call the webhook for a resize."""
    since(cluster, 33, "pods/resize")
    cluster.create(gpu_pod("train", team, {CARD: "100", "cpu": "1", "memory": "1Gi"}))
    ledger = await_committed(installation, team, M40=100)
    before = asked(installation)
    amounts = {"cpu": "2", "memory": "2Gi"}
    resized = {"name": "train", "resources": {"requests": amounts, "limits": amounts}}
    patch(cluster, team, {"spec": {"containers": [resized]}}, "/resize").ok()
    more = {"name": "train", "resources": {"requests": {CARD: "200"}, "limits": {CARD: "200"}}}
    rejected = patch(cluster, team, {"spec": {"containers": [more]}}, "/resize")
    assert rejected.status == HTTPStatus.UNPROCESSABLE_ENTITY
    assert "only cpu and memory resources are mutable" in rejected.message
    assert asked(installation) == before
    spec = cluster.pod(team)["spec"]
    assert spec["containers"][0]["resources"]["limits"] == {CARD: "100", **amounts}
    assert spec["affinity"] == held_to("M40")
    pass_by(cluster, team)
    assert await_committed(installation, team, M40=100).committed == ledger.committed


def test_pod_level_resources_do_not_change_the_charge(cluster: Cluster, installation: Installation, team: str) -> None:
    since(cluster, 34, "spec.resources")
    pod_of_two = card_pod("train", team, cards=2)
    pod_of_two["spec"]["resources"] = {"requests": {"cpu": "2"}, "limits": {"cpu": "4", "memory": "8Gi"}}
    created = cluster.create(pod_of_two)
    assert created["spec"]["resources"]["limits"] == {"cpu": "4", "memory": "8Gi"}
    assert created["spec"]["affinity"] == held_to("M40")
    await_committed(installation, team, M40=200)


def test_pod_level_resources_cannot_request_a_card(cluster: Cluster, installation: Installation, team: str) -> None:
    """Kubernetes before 1.34 drops the pod's field `spec.resources`. Later versions reject cards in this field."""
    asking = gpu_pod("train", team, {"cpu": "1"})
    asking["spec"]["resources"] = {"limits": {CARD: "100"}, "requests": {CARD: "100"}}
    answer = cluster.try_create(asking)
    if cluster.control_plane.minor < 34:
        assert "resources" not in answer.ok()["spec"]
    else:
        assert answer.status == HTTPStatus.UNPROCESSABLE_ENTITY
        assert f"spec.resources.limits[{CARD}]" in answer.message
    assert installation.charged(team) == {}


def test_an_ephemeral_container_is_admitted_and_cannot_request_a_card(
    cluster: Cluster, installation: Installation, team: str
) -> None:
    cluster.create(card_pod("train", team))
    await_committed(installation, team, M40=100)
    before = asked(installation)
    plain = {"name": "debug", "image": "busybox", "targetContainerName": "train"}
    asking = {**plain, "name": "greedy", "resources": {"limits": {CARD: "100"}}}
    patch(cluster, team, {"spec": {"ephemeralContainers": [plain]}}, "/ephemeralcontainers").ok()
    rejected = patch(cluster, team, {"spec": {"ephemeralContainers": [asking]}}, "/ephemeralcontainers")
    assert rejected.status == HTTPStatus.UNPROCESSABLE_ENTITY
    assert asked(installation) == before
    [attached] = cluster.pod(team)["spec"]["ephemeralContainers"]
    assert attached["name"] == "debug"
    pass_by(cluster, team)
    await_committed(installation, team, M40=100)


def test_a_pod_with_a_claim_is_rejected_if_claims_are_not_counted(
    cluster: Cluster, installation: Installation, team: str
) -> None:
    """An API server with claims admits the pod, because it charges the claim. An older one may drop the field."""
    claims = [{"name": "gpu", "resourceClaimName": "mine"}]
    answer = cluster.try_create(pod(container(), resourceClaims=claims, metadata={"name": "train", "namespace": team}))
    dropped = answer.status == HTTPStatus.CREATED and "resourceClaims" not in answer.body["spec"]
    assert served(cluster) or dropped or answer.status == HTTPStatus.UNPROCESSABLE_ENTITY
    assert installation.charged(team) == {}


WIDER = {
    "without the affinity": None,
    "to another model": held_to("P100"),
    "to another model in addition to the first": required(
        term(requirement(MODEL, "In", "M40")), term(requirement(MODEL, "In", "P100"))
    ),
    "to two models": required(term(requirement(MODEL, "In", "M40", "P100"))),
}


@pytest.mark.parametrize("affinity", WIDER.values(), ids=WIDER.keys())
def test_the_pin_of_a_gated_pod_can_be_narrowed_but_not_widened(
    cluster: Cluster, installation: Installation, team: str, affinity: Json | None
) -> None:
    """The API server rejects a change of a gated pod's node selection by which the pod could run on other nodes."""
    gated = card_pod("train", team)
    gated["spec"]["schedulingGates"] = [HOLD]
    cluster.create(gated)
    path = f"/api/v1/namespaces/{team}/pods/train"
    rejected = cluster.rest.try_merge_patch(path, {"spec": {"affinity": affinity}})
    assert rejected.status == HTTPStatus.UNPROCESSABLE_ENTITY
    cluster.rest.merge_patch(path, {"spec": {"nodeSelector": {"example.com/zone": "a"}}})
    cluster.rest.merge_patch(path, {"spec": {"affinity": held_to("M40")}})
    assert cluster.pod(team)["spec"]["affinity"] == held_to("M40")
    await_committed(installation, team, M40=100)
