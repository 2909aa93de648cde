"""Tests of this system together with HAMi or vgpu-manager in one cluster.

The tests apply recorded patches of these projects' webhooks before and after our patch. Our webhook also reads the
registers of these projects: annotations of nodes that list the cards.
"""

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.builders import MODEL
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import Installation, await_ready, controlling, running
from tests.e2e.json_server import answering, asks_about_pods, reviewed
from tests.integration.reviews import gpu_pod
from tests.processes import eventually

pytestmark = pytest.mark.one_version

RECORDED = {
    row["name"]: row for row in json.loads((Path(__file__).parents[1] / "data" / "peers" / "webhooks.json").read_text())
}
LABEL = "e2e.vcuda.io/peer"
"""The label of the pods that another project's webhook reviews. The label's value names the recorded patch to apply."""
USE, NOT_USE = "nvidia.com/use-gputype", "nvidia.com/nouse-gputype"
REGISTER = [
    {"id": "GPU-a10", "count": 10, "devmem": 23028, "devcore": 100, "type": "NVIDIA A10", "mode": "hami-core"},
    {"id": "GPU-a100", "count": 10, "devmem": 40960, "devcore": 100, "type": "NVIDIA A100-SXM4-40GB", "health": True},
]


@pytest.fixture(scope="module")
def unasked(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """A webhook replica that is ready but not registered. So a test can choose the order of the webhooks."""
    with running(cluster, tmp_path_factory.mktemp("peers")) as own:
        await_ready(own)
        yield own


def as_recorded(_path: str, review: Json) -> Json:
    patch = RECORDED[review["request"]["object"]["metadata"]["labels"][LABEL]]["patch"]
    encoded = base64.b64encode(json.dumps(patch).encode()).decode()
    return reviewed(review, patchType="JSONPatch", patch=encoded) if patch else reviewed(review)


@pytest.mark.parametrize("theirs_first", [True, False], ids=["theirs first", "ours first"])
def test_a_pod_is_charged_the_same_in_either_order_of_the_webhooks(
    cluster: Cluster, unasked: Installation, *, theirs_first: bool
) -> None:
    certificates = unasked.ca.parent
    ours = [{**hook, "reinvocationPolicy": "IfNeeded"} for hook in unasked.mutating()]
    with answering(as_recorded, certificates) as url:
        theirs = asks_about_pods("peer.example.com", url, certificates, LABEL)
        asked = [theirs, *ours] if theirs_first else [*ours, theirs]
        with cluster.register_webhooks(mutating=asked, validating=unasked.validating()):
            for name, row in RECORDED.items():
                own = replace(unasked, quota=replace(unasked.quota, further={"gpu_schemes": row["settings"]}))
                with own.team({"quota": {"M40": 8}}) as namespace:
                    created = cluster.try_create(gpu_pod("train", namespace, row["limits"], labels={LABEL: name}))
                    assert created.status == HTTPStatus.CREATED, created.message
                    [usage] = own.ledger(namespace).usages().values()
                    charge = usage.used
                    assert [charge.cores, charge.memory, charge.card_memory] == row["charge"], name
                    spec = cluster.pod(namespace)["spec"]
                    assert spec["schedulerName"] == (row["scheduler"] or "default-scheduler"), name


def test_a_new_register_takes_effect_and_a_pod_on_a_card_of_another_model_is_reported(
    cluster: Cluster, installation: Installation
) -> None:
    """The node has cards of two models, which HAMi's register (a node annotation) lists. Its label names one model."""
    node = "peers-a10"
    share = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000", "nvidia.com/gpucores": "10"}
    cluster.create_node(node, {MODEL: "A10"}, share)
    try:
        with installation.team({"quota": {"A10": 8}}) as namespace:

            def told() -> dict[str, str]:
                # If /mutate and /validate read different registers (node annotations that list the cards), the webhook
                # rejects the pod.
                answer = cluster.try_create(gpu_pod("next", namespace, share), dryRun="All")
                if answer.message:
                    return {"rejected": answer.message}
                annotations = answer.body["metadata"].get("annotations", {})
                return {key: annotations[key] for key in (USE, NOT_USE) if key in annotations}

            def register(text: str | None) -> None:
                change = {"metadata": {"annotations": {"hami.io/node-nvidia-register": text}}}
                cluster.rest.merge_patch(f"/api/v1/nodes/{node}", change)

            eventually(lambda: told() == {})
            register("[{")
            register(json.dumps(REGISTER))
            eventually(lambda: told() == {USE: "NVIDIA A10", NOT_USE: "NVIDIA A100-SXM4-40GB"})
            cluster.bind(gpu_pod("train", namespace, share), node)
            given = {"metadata": {"annotations": {"hami.io/vgpu-devices-allocated": "GPU-a100,NVIDIA,1000,10:;"}}}
            cluster.rest.merge_patch(f"/api/v1/namespaces/{namespace}/pods/train", given)
            with controlling(installation):
                [event] = cluster.await_events(namespace, "reason=OtherModelAllocated")
            assert event["message"].startswith(
                "the pod or claim is charged to A10, but was given card GPU-a100 of node peers-a10"
            )
            assert installation.charged(namespace) == {"A10": 10}
            register(None)
            eventually(lambda: told() == {})
    finally:
        cluster.delete_node(node)
