"""Tests of claims that bypassed the webhook, and of devices of another model than charged.

The controller reports and charges them. The real scheduler allocates the devices. Most tests have no webhook.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, Json
from tests.e2e.dra import (
    NVIDIA,
    PRODUCTS,
    VERSION,
    Published,
    card,
    claim,
    claiming,
    claims,
    devices_of,
    dra_cluster,
    request,
    template,
)
from tests.e2e.installation import Installation, await_ready, controlling, limited_team, registered, running
from tests.e2e.ledgers import await_committed, await_published
from tests.e2e.quota_config import named_quota
from tests.processes import ControllerProcess, eventually

A100 = Published(NVIDIA, "a100-1", [card(number, "A100") for number in range(3)])
H100 = Published(NVIDIA, "h100-1", [card(number, "H100") for number in range(2)])


@pytest.fixture(scope="module")
def cluster(assets: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with dra_cluster(assets, tmp_path_factory.mktemp("claims-audit"), A100, H100) as found:
        yield found


@pytest.fixture(scope="module")
def installation(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with running(cluster, tmp_path_factory.mktemp("installation"), quota=named_quota(cluster)) as found:
        await_ready(found)
        yield found


@pytest.fixture(scope="module")
def controller(installation: Installation, account: Cluster) -> Iterator[ControllerProcess]:
    with controlling(installation, "--violations-period", "2", kubeconfig=account.kubeconfig) as found:
        yield found


def of(model: str, **fields: str) -> Json:
    """Return a claim's request for cards of this model, with a CEL selector as users write it."""
    expression = f'device.attributes["{NVIDIA}"].productName == "{PRODUCTS[model]}"'
    found = request(NVIDIA, selectors=[{"cel": {"expression": expression}}])
    return {**found, "exactly": {**found["exactly"], **fields}}


def told(cluster: Cluster, team: str, reason: str, name: str = "") -> Json:
    """Wait for an Event with this reason about a claim whose name begins with ``name``, and return it."""

    def about(event: Json) -> bool:
        return bool(event["involvedObject"]["name"].startswith(name))

    selector = f"reason={reason},involvedObject.kind=ResourceClaim"
    return next(filter(about, cluster.await_events(team, selector, lambda found: any(map(about, found)))))


def test_a_claim_that_bypassed_the_webhook_is_reported_and_charged_when_it_is_allocated(
    cluster: Cluster, installation: Installation, controller: ControllerProcess
) -> None:
    with limited_team(installation, {"quota": {"A100": 1}}) as team:
        cluster.create(claim(team, "waiting", of("A100")))
        event = told(cluster, team, "NotCounted")
        [stored] = claims(cluster, team)
        assert event["involvedObject"]["uid"] == stored["metadata"]["uid"]
        controller.await_metric("vcuda_violations_claims", 1, namespace=team, finding="unpinned")
        cluster.create(claiming(team, "train", resourceClaimName="waiting"))
        cluster.await_bound(team)
        await_committed(installation, team, A100=100)
        eventually(lambda: not controller.samples("vcuda_violations_claims", namespace=team))
        report = await_published(cluster, team, lambda found: bool(found["models"][0]["pods"]))
        assert [(each["name"], each["claim"]) for each in report["models"][0]["pods"]] == [("waiting", True)]


def test_claims_of_a_template_and_for_all_devices_that_bypassed_the_webhook_exceed_the_quota(
    cluster: Cluster, installation: Installation, controller: ControllerProcess
) -> None:
    """Each claim is charged for the devices that the scheduler has allocated to it."""
    with limited_team(installation, {"quota": {"A100": 1}}) as team:
        cluster.create(template(team, "gpu", of("H100")))
        cluster.create(claiming(team, "train", resourceClaimTemplateName="gpu"))
        assert "may not use GPU model H100" in told(cluster, team, "BeyondQuota", "train-gpu")["message"]
        cluster.create(claim(team, "every", of("A100", allocationMode="All")))
        assert "must be ExactCount, with a count; got All" in told(cluster, team, "NotCounted", "every")["message"]
        cluster.create(claiming(team, "greedy", resourceClaimName="every"))
        assert "this claim takes 3 cards" in told(cluster, team, "BeyondQuota", "every")["message"]
        await_committed(installation, team, A100=300, H100=100)
        for finding in ("not-allowed", "over-quota"):
            assert controller.metric("vcuda_violations_claims", namespace=team, finding=finding) == 1


def test_a_device_of_another_model_than_was_charged_is_reported_and_charged(
    cluster: Cluster, installation: Installation, controller: ControllerProcess
) -> None:
    """After the allocation, the driver publishes another model for the card that the claim got."""
    with limited_team(installation, {"quota": {"A100": 2, "H100": 1}}) as team:
        with registered(installation):
            cluster.create(claim(team, "gpu", of("A100")))
        cluster.create(claiming(team, "train", resourceClaimName="gpu"))
        cluster.await_bound(team)
        [device] = devices_of(claims(cluster, team)[0])
        await_committed(installation, team, A100=100)
        exchange(cluster, A100, [called("H100", each) for each in A100.devices])
        event = told(cluster, team, "OtherModelAllocated")
        card_name = device.rpartition("/")[2]
        card = f"card {card_name} of node a100-1, a H100, of model H100"
        said = f"the pod or claim is charged to A100, but was given {card}; the claim is charged for"
        assert said in event["message"]
        await_committed(installation, team, A100=100, H100=100)
        assert controller.metric("vcuda_violations_claims", namespace=team, finding="other-model") == 1
        exchange(cluster, A100, A100.devices)
        await_committed(installation, team, A100=100)


def called(product: str, device: Json) -> Json:
    return {**device, "attributes": {**device["attributes"], "productName": {"string": product}}}


def exchange(cluster: Cluster, published: Published, devices: list[Json]) -> None:
    manifest = published._replace(devices=devices).manifest()
    path = f"/apis/{VERSION}/resourceslices/{manifest['metadata']['name']}"
    pool = cluster.rest.get(path)["spec"]["pool"]
    cluster.rest.merge_patch(path, {"spec": {"devices": devices, "pool": {"generation": pool["generation"] + 1}}})
