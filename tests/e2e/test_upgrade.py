"""What an earlier release has stored is read, decided by, and written anew; nobody loses a charge over it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.builders import held_to
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import (
    ENFORCED,
    SERVED_BY,
    SYSTEM_NAMESPACE,
    Installation,
    await_committed,
    controlling,
    create_system_namespace,
    installed,
    ledger_path,
)
from tests.integration.reviews import card_pod, gpu_pod
from vcuda.ledger.ledger import FORMAT, read_ledger

SAMPLE = Path(__file__).parents[1] / "data" / "ledger-format-1.json"
STORED_LATER = "5b0b9a9e-4a5e-4a38-9c63-6f3a1d1f6a10"
NEVER_STORED = "c2f7d0a4-8a5f-4f0e-b1d2-93f5c1d7e811"
QUOTA = {"quota": {"M40": 4, "P100": 2}}
HALF_A_CARD = {"tencent.com/vcuda-core": 50, "tencent.com/vcuda-memory": 1}


def on(model: str, pod: Json) -> Json:
    return {**pod, "spec": {**pod["spec"], "affinity": held_to(model)}}


def counted_in_sample(namespace: str) -> list[Json]:
    share = {"tencent.com/vcuda-core": 75, "tencent.com/vcuda-memory": 2}
    return [
        on("M40", card_pod("card", namespace)),
        on("M40", gpu_pod("share-0", namespace, share)),
        on("M40", gpu_pod("share-1", namespace, share)),
        on("P100", card_pod("other", namespace)),
    ]


@pytest.fixture
def earlier(cluster: Cluster, namespace: str) -> str:
    """The uid of the pod that was stored after its namespace was counted; the ledger is the earlier release's."""
    for pod in counted_in_sample(namespace):
        cluster.create(pod)
    version = cluster.rest.get(f"/api/v1/namespaces/{namespace}/pods")["metadata"]["resourceVersion"]
    uid = str(cluster.create(on("M40", card_pod("train-0", namespace)))["metadata"]["uid"])
    text = SAMPLE.read_text().replace(STORED_LATER, uid).replace('"48213"', json.dumps(version))
    create_system_namespace(cluster)
    metadata = {
        "name": f"gpu-ledger-{namespace}",
        "namespace": SYSTEM_NAMESPACE,
        "labels": {"quota.vcuda.io/ledger-of": namespace},
    }
    cluster.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"ledger": text}})
    return uid


@pytest.fixture
def upgraded(cluster: Cluster, namespace: str, earlier: str, tmp_path: Path) -> Iterator[Installation]:
    """This release, started on it."""
    assert earlier
    with installed(cluster, tmp_path) as installation, installation.quota.limited(**{namespace: QUOTA}):
        labels = {SERVED_BY: installation.label, ENFORCED: "true"}
        cluster.rest.merge_patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": labels}})
        yield installation


def text_of_ledger(cluster: Cluster, namespace: str) -> str:
    return str(cluster.rest.get(ledger_path(namespace))["data"]["ledger"])


def test_a_ledger_of_the_first_format_decides_and_is_rewritten_with_nothing_lost(
    cluster: Cluster, namespace: str, earlier: str, upgraded: Installation
) -> None:
    refused = cluster.try_create(card_pod("one-too-many", namespace))
    assert refused.status == HTTPStatus.FORBIDDEN
    assert "used: 3.5 (1 pending), limited: 4, 0.5 more needed" in refused.message
    old = read_ledger(text_of_ledger(cluster, namespace))

    admitted = cluster.create(gpu_pod("last", namespace, HALF_A_CARD))
    text = text_of_ledger(cluster, namespace)
    assert json.loads(text)["format"] == FORMAT
    new = read_ledger(text)
    assert new.pending.keys() - {earlier} == {NEVER_STORED, admitted["metadata"]["uid"]}
    assert new.pending[NEVER_STORED] == old.pending[NEVER_STORED]
    assert upgraded.charged(namespace) == {"M40": 400, "P100": 150}, "what is charged, whether counted or pending"
    assert cluster.try_create(card_pod("one-too-many", namespace)).status == HTTPStatus.FORBIDDEN

    with controlling(upgraded):
        ledger = await_committed(upgraded, namespace, M40=400, P100=100)
    assert json.loads(text_of_ledger(cluster, namespace))["format"] == FORMAT
    assert ledger.committed["M40"].memory == old.committed["M40"].memory + 256


def test_the_controller_alone_rewrites_it_too(
    cluster: Cluster, namespace: str, earlier: str, upgraded: Installation
) -> None:
    """Where no pod is created, so that no webhook writes: what was pending is found among the pods, or is dropped."""
    assert earlier
    assert json.loads(text_of_ledger(cluster, namespace))["format"] == 1
    with controlling(upgraded):
        await_committed(upgraded, namespace, M40=350, P100=100)
    assert json.loads(text_of_ledger(cluster, namespace))["format"] == FORMAT
