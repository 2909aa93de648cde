"""Tests of teams: several namespaces share one quota, with two webhook replicas and a real API server."""

import json
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from http import HTTPStatus

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.installation import REPLICA, SERVED_BY, Installation, controlling, installed
from tests.e2e.rest import Answer
from tests.integration.reviews import gpu_pod
from vcuda.ledger.team import TeamLedger, read_team_ledger

REPLICAS, CALLERS, CREATES = 2, 16, 128
CARDS = 40


@pytest.fixture(scope="module")
def own(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with installed(cluster, tmp_path_factory.mktemp("teams"), replicas=REPLICAS) as own, controlling(own):
        yield own


@pytest.fixture
def members(own: Installation) -> Iterator[Sequence[str]]:
    """Create three namespaces that share 40 cards."""
    names = [f"e2e-{secrets.token_hex(4)}" for _ in range(3)]
    teams = {"vision": {"namespaces": names, "quota": {"M40": CARDS}}}
    replace(own.quota, further={"gpu_teams": json.dumps(teams)}).limit_anew()
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(own.cluster.fresh_namespace({SERVED_BY: own.label}, name))
        yield names
        own.quota.limit_anew()


def create(cluster: Cluster, namespace: str, number: int) -> Answer:
    """Create a pod through one of the replicas. Retry until it is created or rejected."""
    labels = {REPLICA: str(number % REPLICAS)}
    pod = gpu_pod(f"train-{number}", namespace, {"tencent.com/vcuda-core": 100}, labels=labels)
    return cluster.create_decided(pod)


def stored(cluster: Cluster, members: Sequence[str]) -> Counter[str]:
    return Counter({namespace: len(cluster.pods(namespace)) for namespace in members})


def team_ledger(own: Installation) -> TeamLedger:
    path = "/api/v1/namespaces/vcuda-quota-ledgers/configmaps/gpu-ledger-team.vision"
    return read_team_ledger(own.cluster.rest.send("GET", path).ok()["data"]["ledger"])


def test_concurrent_creates_in_the_namespaces_of_a_team_fill_its_quota_exactly(
    cluster: Cluster, own: Installation, members: Sequence[str]
) -> None:
    with ThreadPoolExecutor(CALLERS) as threads:
        answers = list(
            threads.map(
                lambda number: create(cluster, members[number // REPLICAS % len(members)], number), range(CREATES)
            )
        )
    rejected = [answer for answer in answers if answer.status != HTTPStatus.CREATED]
    assert {answer.status for answer in rejected} == {HTTPStatus.FORBIDDEN}
    found = stored(cluster, members)
    assert found.total() == CARDS
    assert all(found.values())
    first = members[0]
    full = f"exceeded quota: M40 in team vision, requested: 1 card, used: {CARDS} (this namespace {found[first]}, "
    assert full in create(cluster, first, CREATES).message

    # Deleted pods of one namespace leave room for pods of another namespace.
    [*doomed] = cluster.pods(members[1])[:3]
    for pod in doomed:
        cluster.delete_pod(members[1], pod["metadata"]["name"])
    created = [create(cluster, first, number).status for number in range(CREATES + 1, CREATES + 6)]
    assert created == [HTTPStatus.CREATED] * 3 + [HTTPStatus.FORBIDDEN] * 2
    assert stored(cluster, members) == found + Counter({first: 3}) - Counter({members[1]: 3})
    assert sum(each["M40"].cores for each in team_ledger(own).allotted.values()) == 100 * CARDS
