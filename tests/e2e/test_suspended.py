"""A replica that was suspended together with its clocks gives no yes from the reservation that it had before."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from http import HTTPStatus
from itertools import count
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, Json
from tests.e2e.held_clock import SuspendedWebhook
from tests.e2e.installation import REPLICA, Installation, await_ledger, await_ready, controlling, registered, running
from tests.e2e.rest import Answer
from tests.e2e.steady import in_threads
from tests.integration.reviews import gpu_pod, pinned, with_uid
from tests.processes import eventually

pytestmark = pytest.mark.one_version

CALLERS = 4
GRANTED = "vcuda_ledger_granted_total"
CARDS = 400


@pytest.fixture
def installed(cluster: Cluster, tmp_path: Path) -> Iterator[tuple[Installation, SuspendedWebhook]]:
    """An installation with two replicas, the second of which can be suspended, and a controller."""
    with (
        running(cluster, tmp_path / "certs") as first,
        SuspendedWebhook(first.flags, first.ca, tmp_path / "held") as second,
    ):
        quota = replace(first.quota, readers=[first.replica, second])
        own = replace(first, replicas=[first.replica, second], quota=quota)
        await_ready(own)
        with registered(own), controlling(own):
            yield own, second


class Creator:
    """Creates pods of some cores in one namespace, each of a name of its own, by one replica or the other."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace, self._numbers = cluster, namespace, count()

    def pod(self, cores: int, replica: int) -> Json:
        limits = {"tencent.com/vcuda-core": cores, "tencent.com/vcuda-memory": 1}
        return gpu_pod(f"train-{next(self._numbers)}", self._namespace, limits, labels={REPLICA: str(replica)})

    def create(self, cores: int, replica: int = 0) -> Answer:
        return self._cluster.try_create(self.pod(cores, replica))

    def create_many(self, stop: threading.Event) -> None:
        """By the replica that is to have a reservation of it."""
        while not stop.is_set():
            self.create(50, 1).ok()

    def fill(self) -> None:
        """Create until not the smallest one fits, though nobody has any room reserved."""
        for cores in (90, 50, 5):
            while self._decided(cores).status == HTTPStatus.CREATED:
                pass

    def _decided(self, cores: int) -> Answer:
        def decided() -> Answer | None:
            answer = self.create(cores)
            return None if answer.status == HTTPStatus.TOO_MANY_REQUESTS else answer

        answer = eventually(decided)
        assert answer
        return answer


def test_a_replica_whose_clocks_stood_still_is_told_by_the_creation_of_an_object_alone_that_its_lease_is_over(
    cluster: Cluster, installed: tuple[Installation, SuspendedWebhook]
) -> None:
    own, replica = installed
    with own.team({"quota": {"M40": CARDS}}) as namespace:
        creator = Creator(cluster, namespace)
        with in_threads([creator.create_many] * CALLERS):
            replica.await_metric(GRANTED, CALLERS)
            replica.held.hold()
        granted, stored = replica.metric(GRANTED), {}
        while replica.metric(GRANTED) == granted:
            stored = creator.create(5, 1).ok()
        await_ledger(own, namespace, lambda ledger: bool(ledger.committed) and not ledger.reserved)
        creator.fill()

        # The room that it still knows of is another's: without the time of creation it would give it away again.
        granted = replica.metric(GRANTED)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for created, allowed in ((stored["metadata"]["creationTimestamp"], True), (now, False)):
            pod = with_uid(pinned(creator.pod(5, 1)))
            pod["metadata"]["creationTimestamp"] = created
            assert replica.review("/validate", pod)["allowed"] is allowed
        assert replica.metric(GRANTED) == granted + 1
        assert creator.create(5, 1).is_over_quota
        assert replica.metric(GRANTED) == granted + 1

        replica.held.release()
        ledger = await_ledger(own, namespace, lambda ledger: not ledger.pending)
        assert ledger.usage("M40").used.cores == CARDS * 100
