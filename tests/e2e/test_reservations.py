"""Tests of webhook replicas that admit pods from reservations (quota that a replica holds in advance).

When a replica stops or is killed, the unused part of its reservation is released.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.crowd import REAPED, SPENT, Crowd
from tests.e2e.installation import Installation, controlling, installed
from tests.e2e.ledgers import await_ledger
from tests.e2e.steady import in_threads
from tests.processes import ControllerProcess, WebhookProcess
from vcuda.ledger.ledger import Ledger

REPLICAS, CALLERS = 3, 9
pytestmark = pytest.mark.one_version

CARDS = 400


@pytest.fixture
def own(cluster: Cluster, tmp_path: Path) -> Iterator[Installation]:
    with installed(cluster, tmp_path, replicas=REPLICAS) as own:
        yield own


@pytest.fixture
def leader(own: Installation) -> Iterator[ControllerProcess]:
    with controlling(own) as leader:
        yield leader


@pytest.fixture
def namespace(own: Installation, leader: ControllerProcess) -> Iterator[str]:
    assert leader.process.poll() is None
    with own.team({"quota": {"M40": CARDS}}) as namespace:
        yield namespace


def is_reserved(ledger: Ledger) -> bool:
    return bool(ledger.reserved)


def test_replicas_that_admit_from_reservations_fill_a_namespace_exactly(
    cluster: Cluster, own: Installation, namespace: str
) -> None:
    crowd = Crowd(cluster, namespace, range(REPLICAS))
    with in_threads([crowd.create_many] * CALLERS):
        for replica in own.replicas:
            replica.await_metric(SPENT, 5)
    assert crowd.failures == [], "rejected although there was room"
    crowd.create_until_rejected()
    assert crowd.stored_cards() == CARDS
    assert all(f"used: {CARDS}" in message for message in crowd.failures)


def reserve(cluster: Cluster, own: Installation, namespace: str, end: Callable[[WebhookProcess], int]) -> int:
    last = REPLICAS - 1
    with in_threads([Crowd(cluster, namespace, [last]).create_many] * CALLERS):
        own.replicas[last].await_metric(SPENT, 5)
        await_ledger(own, namespace, is_reserved)
        return end(own.replicas[last])


def test_the_reservation_of_a_killed_replica_can_be_used_again(
    cluster: Cluster, own: Installation, leader: ControllerProcess, namespace: str
) -> None:
    assert reserve(cluster, own, namespace, WebhookProcess.kill) != 0
    [replica] = own.ledger(namespace).reserved
    crowd = Crowd(cluster, namespace, range(REPLICAS - 1))
    crowd.create_until_rejected()
    leader.await_log(REAPED, lambda line: line["replica"] == replica and line["namespace"] == namespace)
    crowd.create_until_rejected()
    assert crowd.stored_cards() == CARDS


def test_a_replica_that_stops_releases_its_reservation(
    cluster: Cluster, own: Installation, leader: ControllerProcess, namespace: str
) -> None:
    """Before it stops, the replica writes the charges that it admitted. Other replicas can then use the free quota."""
    assert reserve(cluster, own, namespace, WebhookProcess.terminate) == 0
    assert own.ledger(namespace).reserved == {}
    crowd = Crowd(cluster, namespace, range(REPLICAS - 1))
    crowd.create_until_rejected()
    assert crowd.stored_cards() == CARDS
    assert leader.logs(REAPED) == []
