"""Tests of a team whose namespaces share the cards of a real node, by Deployments and by bare pods."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from threading import Event

import pytest

from tests.e2e.cluster import Cluster, Json
from tests.e2e.steady import in_threads
from tests.processes import eventually
from tests.real.pods import WAITS, container, is_running, pod, remove, run, workload
from tests.real.release import MEMBERS, POOL_LIMIT, Release

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


class Cards:
    """The largest number of pods of the team that had not ended at a time. Each pod has one card."""

    def __init__(self, cluster: Cluster) -> None:
        self.most = self.looks = 0
        self._cluster = cluster

    def observe(self, stop: Event) -> None:
        while not stop.wait(0.05):
            # One LIST has all namespaces, because lists of several namespaces could count a replaced pod twice.
            pods = self._cluster.rest.get("/api/v1/pods")["items"]
            self.most = max(self.most, sum(map(has_card, pods)))
            self.looks += 1


def has_card(found: Json) -> bool:
    has_ended = found["status"].get("phase") in ("Succeeded", "Failed")
    return found["metadata"]["namespace"] in MEMBERS and not has_ended


def running(pods: list[Json], number: int) -> bool:
    return sum(map(is_running, pods)) == number


@contextmanager
def measured(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"\n{what}: {time.monotonic() - began:.1f} s", end="")


def test_the_namespaces_of_a_team_use_its_cards_in_turn_and_never_more_than_its_limit(
    cluster: Cluster, release: Release
) -> None:
    first, second, third = MEMBERS
    template = pod("", "", container(WAITS), restartPolicy="Always")
    cards = Cards(cluster)
    with in_threads([cards.observe]):
        cluster.create(workload("Deployment", "serve", first, template, replicas=2))
        cluster.await_pods(first, lambda pods: running(pods, 2))
        run(cluster, pod("bare", second, container(WAITS)))
        answer = cluster.create_decided(pod("rejected", second, container(WAITS)))
        assert answer.status == HTTPStatus.FORBIDDEN
        assert f"exceeded quota: H100 in team pool, requested: 1 card, used: {POOL_LIMIT}" in answer.message
        cluster.create(workload("Deployment", "serve", third, template, replicas=3))
        cluster.await_events(third, "reason=FailedCreate")
        assert not cluster.pods(third)

        cluster.rest.send("DELETE", f"/api/v1/namespaces/{second}/pods/bare").ok()
        with measured("the card of a deleted pod was used by a Deployment of another namespace"):
            cluster.await_pods(third, lambda pods: running(pods, 1))
        cluster.kubectl("--namespace", first, "scale", "deployment/serve", "--replicas=0")
        with measured("the cards of a Deployment were used by another namespace"):
            cluster.await_pods(third, lambda pods: running(pods, 3))
        cluster.kubectl("--namespace", third, "delete", "deployment/serve")
        with measured("the cards of a deleted Deployment were used by a bare pod"):
            later = pod("later", second, container(WAITS))
            eventually(lambda: cluster.try_create(later).status == HTTPStatus.CREATED)
            cluster.wait_pod(second, "later", is_running)
        cluster.kubectl("--namespace", first, "delete", "deployment/serve")
        remove(cluster, second)
        cluster.await_pods(third, lambda pods: not pods)
    print(f"\nat most {cards.most} of {POOL_LIMIT} cards in {cards.looks} LISTs")
    assert cards.most == POOL_LIMIT
    for namespace in MEMBERS:
        release.await_charged(namespace, 0)
