"""Tests that replace webhook replicas by replicas of another release, while pods are created.

If both releases use the same ledger format, no create fails.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e import other_release
from tests.e2e.cluster import Cluster
from tests.e2e.crowd import SPENT, Crowd
from tests.e2e.installation import Installation, await_ready, controlling, ledger_path, registered, running
from tests.e2e.steady import in_threads
from tests.processes import WebhookProcess
from vcuda.ledger.text import FORMAT

pytestmark = pytest.mark.one_version

REPLICAS, CALLERS = 3, 3
CARDS = 4000
ROOM_FOR = (500, 50, 5, 1)
"""The sizes, in cards, of the pods that use up the rest of the quota at the end."""


@pytest.fixture
def own(cluster: Cluster, tmp_path: Path) -> Iterator[Installation]:
    """Webhook replicas that answer for a second after SIGTERM, because a cluster removes their endpoints late."""
    with running(cluster, tmp_path, replicas=REPLICAS, flags=("--drain-seconds", "1")) as own:
        await_ready(own)
        with registered(own), controlling(own):
            yield own


def in_place_of(replica: WebhookProcess, own: Installation, ledger_format: int = FORMAT) -> WebhookProcess:
    flags = (*own.flags, "--bind", urlsplit(replica.url).netloc)
    return WebhookProcess(flags, own.ca, {other_release.FORMAT: str(ledger_format)}, other_release.COMMAND)


def test_no_create_fails_while_one_release_replaces_another(cluster: Cluster, own: Installation) -> None:
    with own.team({"quota": {"M40": CARDS}}) as namespace, ExitStack() as stack:
        crowd = Crowd(cluster, namespace, range(REPLICAS))
        with in_threads([crowd.create_many] * CALLERS):
            for number, replica in enumerate(own.replicas):
                replica.await_metric(SPENT, 5)
                crowd.in_service = [each for each in range(REPLICAS) if each != number]
                assert replica.terminate() == 0
                new = stack.enter_context(in_place_of(replica, own))
                new.await_ready()
                crowd.in_service = list(range(REPLICAS))
                new.await_metric(SPENT, 5)
        assert crowd.failures == []
        assert crowd.answers.keys() == {HTTPStatus.CREATED}
        for cards in ROOM_FOR:
            crowd.create_until_rejected(cards)
        assert crowd.stored_cards() == CARDS


def test_a_release_with_another_ledger_format_rejects_and_does_not_write_the_ledger(
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
            assert f"another release wrote the ledger in format {FORMAT}. Update all components" in answer.message
            assert cluster.rest.get(ledger_path(namespace))["data"] == before
            crowd.in_service = [0]
            crowd.create().ok()
