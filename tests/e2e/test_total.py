"""Tests of `total`, the limit of all GPU models together, with two webhook replicas and a real API server."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.installation import REPLICA, Installation, controlling, installed, limited_team
from tests.e2e.ledgers import await_committed, await_published
from tests.e2e.rest import Answer
from tests.integration.reviews import gpu_pod

REPLICAS, CALLERS, CREATES = 2, 16, 128
LIMITS, TOTAL = {"M40": 30, "P100": 30}, 40


@pytest.fixture(scope="module")
def own(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with installed(cluster, tmp_path_factory.mktemp("total"), replicas=REPLICAS) as own, controlling(own):
        yield own


@pytest.fixture
def namespace(own: Installation) -> Iterator[str]:
    with limited_team(own, {"quota": LIMITS, "total": TOTAL}) as namespace:
        yield namespace


def create(cluster: Cluster, namespace: str, number: int) -> Answer:
    """Create a pod of one of the models through one of the replicas. Retry until it is created or rejected."""
    annotations = {"quota.vcuda.io/models": sorted(LIMITS)[number % 2]}
    labels = {REPLICA: str(number // 2 % REPLICAS)}
    pod = gpu_pod(f"train-{number}", namespace, {"tencent.com/vcuda-core": 100}, labels=labels, annotations=annotations)
    return cluster.create_decided(pod)


def models(cluster: Cluster, namespace: str) -> Counter[str]:
    return Counter(pod["metadata"]["annotations"]["quota.vcuda.io/model"] for pod in cluster.pods(namespace))


def test_concurrent_creates_of_two_models_by_two_replicas_fill_the_total_exactly(
    cluster: Cluster, own: Installation, namespace: str
) -> None:
    with ThreadPoolExecutor(CALLERS) as threads:
        answers = list(threads.map(lambda number: create(cluster, namespace, number), range(CREATES)))
    rejected = [answer for answer in answers if answer.status != HTTPStatus.CREATED]
    assert {answer.status for answer in rejected} == {HTTPStatus.FORBIDDEN}
    stored = models(cluster, namespace)
    assert stored.total() == TOTAL
    assert all(0 < stored[model] <= limit for model, limit in LIMITS.items())
    full = f"exceeded quota: total in namespace {namespace}, requested: 1 card, used: {TOTAL} (0 pending), limited: 40"
    assert full in create(cluster, namespace, CREATES).message
    await_committed(own, namespace, **{model: 100 * number for model, number in stored.items()})
    use = await_published(cluster, namespace, lambda use: use["total"]["used"] == TOTAL)
    assert (use["total"]["limit"], use["total"]["available"]) == (TOTAL, 0)

    # Deleted pods of one model leave room for pods of the other model.
    p100 = [pod for pod in cluster.pods(namespace) if pod["metadata"]["annotations"]["quota.vcuda.io/model"] == "P100"]
    for pod in p100[:3]:
        cluster.delete_pod(namespace, pod["metadata"]["name"])
    m40 = range(CREATES + 2, CREATES + 12, 2)
    created = [create(cluster, namespace, number).status for number in m40]
    assert created == [HTTPStatus.CREATED] * 3 + [HTTPStatus.FORBIDDEN] * 2
    assert models(cluster, namespace) == Counter(M40=stored["M40"] + 3, P100=stored["P100"] - 3)
