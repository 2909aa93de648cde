"""Tests of models that the key `gpu_models` of the quota ConfigMap defines by patterns of GPU product names.

A device of a shared (time-sliced) card is charged a part of a card. A claim is limited to its model even before a node
has the model.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from tests.builders import MODEL, vcuda_pod
from tests.e2e.cluster import Cluster, Json
from tests.e2e.dra import (
    NVIDIA,
    VERSION,
    Published,
    card,
    claim,
    claiming,
    has_extended_resources,
    published,
    require_dra,
)
from tests.e2e.installation import Installation, controlling, installed, limited_team
from tests.e2e.ledgers import await_committed
from tests.processes import eventually

pytestmark = pytest.mark.one_version

SHARED = "NVIDIA-A100-SXM4-40GB-SHARED"
ROWS = (
    "{A100-shared: {products: [NVIDIA-A100-*-SHARED], cards: %s}, A100: [NVIDIA-A100-*GB], H100: [NVIDIA-H100-*], "
    "V100: [Tesla-V100-SXM2-16GB]}"
)
GPU = "nvidia.com/gpu"


@pytest.fixture(scope="module")
def own(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with installed(cluster, tmp_path_factory.mktemp("own")) as found:
        installation = with_value(found, "0.25")
        with controlling(installation):
            yield installation


def with_value(installation: Installation, cards: str) -> Installation:
    """Return the installation with another value of a shared device, in cards.

    The next write of the quota stores this value.
    """
    return replace(installation, quota=replace(installation.quota, further={"gpu_models": ROWS % cards}))


@pytest.fixture
def shared_node(create_node: Callable[..., str]) -> str:
    """A node with one card, which NVIDIA's device plugin offers as four devices (time slicing).

    The node's model label is the product name of the card.
    """
    return create_node("shared", labels={MODEL: SHARED}, capacity={GPU: "4"})


def asking(namespace: str, name: str, devices: int = 1) -> Json:
    return vcuda_pod({GPU: str(devices)}, metadata={"name": name, "namespace": namespace})


def test_a_shared_card_admits_as_many_pods_as_it_is_split_into(
    cluster: Cluster, own: Installation, shared_node: str
) -> None:
    with limited_team(own, {"quota": {"A100-shared": 1}}) as team:
        for number in range(4):
            cluster.create(asking(team, f"train-{number}"))
        rejected = cluster.try_create(asking(team, "train-4"))
        assert rejected.is_over_quota
        assert "A100-shared in namespace" in rejected.message
        assert "requested: 0.25 cards, used: 1" in rejected.message
        for number in range(4):
            assert cluster.await_bound(team, f"train-{number}")["spec"]["nodeName"] == shared_node
        await_committed(own, team, **{"A100-shared": 100})
        with_value(own, "0.5").quota.limit()
        await_committed(own, team, **{"A100-shared": 200})
        assert "requested: 0.5 cards, used: 2" in cluster.try_create(asking(team, "train-4")).message


def test_the_nodes_of_a_model_are_all_used_whatever_spelling_of_its_product_is_their_label(
    cluster: Cluster, own: Installation, create_node: Callable[..., str]
) -> None:
    """Two nodes got their labels before `gpu_models` had a row for the model. One team uses the name of the row."""
    for label in ("NVIDIA-Tesla-V100-SXM2-16GB", "Tesla-V100-SXM2-16GB", "V100"):
        create_node(label.lower(), labels={MODEL: label}, capacity={GPU: "1"})
    with limited_team(own, {"quota": {"V100": 3}}) as team:
        cluster.create(asking(team, "train-0"))
        for number in (1, 2):
            # Kueue writes the label of a ResourceFlavor into the node selector of a Job's pods.
            flavored = asking(team, f"train-{number}")
            flavored["spec"]["nodeSelector"] = {MODEL: "V100"}
            cluster.create(flavored)
        bound = [cluster.await_bound(team, f"train-{number}")["spec"]["nodeName"] for number in range(3)]
        assert sorted(bound) == ["nvidia-tesla-v100-sxm2-16gb", "tesla-v100-sxm2-16gb", "v100"]
        assert cluster.try_create(asking(team, "train-3")).is_over_quota
        await_committed(own, team, V100=300)


def test_a_resource_that_a_device_class_also_uses_is_charged_as_a_whole_card(
    cluster: Cluster, own: Installation
) -> None:
    """While the DeviceClass exists, pods that are stored already are also charged whole cards."""
    if not has_extended_resources(cluster):
        pytest.skip(f"Kubernetes 1.{cluster.control_plane.minor} creates no claims for extended resources")
    with limited_team(own, {"quota": {"A100-shared": 1}}) as team:
        cluster.create(asking(team, "train"))
        await_committed(own, team, **{"A100-shared": 25})
        with published(cluster):
            await_committed(own, team, **{"A100-shared": 100})
            told = "requested: 1 card, used: 1"
            eventually(lambda: told in cluster.try_create(asking(team, "more"), dryRun="All").message)
            edited = own.quota.write(json.dumps(own.quota.document()))
            assert "has no effect while a DeviceClass" in " ".join(edited.warnings)
        await_committed(own, team, timeout=90, **{"A100-shared": 25})


def test_a_claim_for_a_model_without_a_node_is_charged_and_allocated_when_a_node_joins(
    cluster: Cluster, own: Installation, create_node: Callable[..., str]
) -> None:
    """The webhook limits the claim to the patterns of products that `gpu_models` has for the model."""
    require_dra(cluster)
    nodes = {model: Published(NVIDIA, f"{model.lower()}-later", [card(0, model)]) for model in ("H100", "A100")}
    with published(cluster), limited_team(own, {"quota": {"A100": 1}}) as team, ExitStack() as teardown:
        created = cluster.create(claim(team, "gpu"))
        [selector] = created["spec"]["devices"]["requests"][0]["exactly"]["selectors"]
        assert '"(?i)^(?:nvidia[ -])*(?:a100|a100[ -].*gb)$"' in selector["cel"]["expression"]
        assert own.charged(team) == {"A100": 100}
        assert cluster.try_create(claim(team, "more")).is_over_quota
        cluster.create(claiming(team, "train", resourceClaimName="gpu"))
        for each in nodes.values():
            product = each.devices[0]["attributes"]["productName"]["string"]
            create_node(each.node, {MODEL: product.replace(" ", "-")})
            cluster.create(manifest := each.manifest())
            teardown.callback(cluster.delete, f"/apis/{VERSION}/resourceslices/{manifest['metadata']['name']}")
        assert cluster.await_bound(team)["spec"]["nodeName"] == nodes["A100"].node
        await_committed(own, team, A100=100)
        cluster.delete_pod(team, "train")
