"""A replica of another release, which knows another format of ledgers, leaves them alone."""

from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.crowd import Crowd
from tests.e2e.installation import Installation, await_ready, controlling, ledger_path, registered, running
from tests.e2e.other_release import of_release
from tests.processes import WebhookProcess
from vcuda.ledger.text import FORMAT

REPLICAS = 3
CARDS = 4000


@pytest.fixture
def own(cluster: Cluster, tmp_path: Path) -> Iterator[Installation]:
    """Replicas that work on for a while when they are told to stop, as in a cluster, where endpoints take that long."""
    with running(cluster, tmp_path, replicas=REPLICAS, flags=("--drain-seconds", "1")) as own:
        await_ready(own)
        with registered(own), controlling(own):
            yield own


def in_place_of(replica: WebhookProcess, own: Installation, **fields: int) -> WebhookProcess:
    """A replica of the other release at the address of one that has ended."""
    return of_release([*own.flags, "--bind", urlsplit(replica.url).netloc], own.ca, **fields)


def test_a_release_that_knows_another_format_refuses_and_leaves_the_ledger_as_it_is(
    cluster: Cluster, own: Installation
) -> None:
    with own.team({"quota": {"M40": CARDS}}) as namespace:
        crowd = Crowd(cluster, namespace, [0])
        crowd.create().ok()
        assert own.replicas[1].terminate() == 0
        with in_place_of(own.replicas[1], own, ledger_format=FORMAT + 1) as other:
            other.await_ready()
            before = cluster.rest.get(ledger_path(namespace))["data"]
            crowd.in_service = [1]
            answer = crowd.create()
            assert answer.status != HTTPStatus.CREATED
            assert f"format {FORMAT} is of another release" in answer.message
            assert cluster.rest.get(ledger_path(namespace))["data"] == before
            crowd.in_service = [0]
            crowd.create().ok()
