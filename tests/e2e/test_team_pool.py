"""Tests that thirty namespaces of a team use its quota exactly, by Deployments and by bare pods, with two replicas."""

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from http import HTTPStatus

import pytest

from tests.e2e.cluster import Cluster, Json
from tests.e2e.crowd import Crowd
from tests.e2e.installation import REPLICA, Installation
from tests.e2e.observer import TOTAL, Ghosts, Observer
from tests.e2e.steady import in_threads
from tests.e2e.team_installation import REPLICAS, Teams, create, stored, with_controller
from tests.e2e.workloads import workload
from tests.processes import eventually

CARDS, MEMBERS, CALLERS, FREED = 200, 30, 16, 50
DEPLOYED = 15
"""The number of namespaces with a Deployment. In the other namespaces, callers create bare pods."""

EACH = 20
"""The number of pods that each Deployment wants. All of them together exceed the quota."""

pytestmark = [pytest.mark.one_version, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def own(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with with_controller(cluster, tmp_path_factory.mktemp("pool")) as own:
        yield own


@pytest.mark.usefixtures("controller_manager")
def test_thirty_namespaces_use_one_quota_exactly_and_freed_quota_is_used_by_other_namespaces(
    cluster: Cluster, own: Installation
) -> None:
    with Teams(own, pool=CARDS) as teams, closing(Cluster(cluster.control_plane)) as admin:
        members = [teams.namespace() for _ in range(MEMBERS)]
        deployed, bare = members[:DEPLOYED], members[DEPLOYED:]
        teams.place(pool=members)
        crowds = [teams.crowd(namespace) for namespace in bare]
        most: dict[str, dict[str, int]] = {name: {} for name in ("pool", *members)}
        observer = Observer(most, Ghosts(0), teams=dict.fromkeys(members, "pool"))
        with in_threads([partial(observer.follow, admin.rest)]):
            with measured(f"until all {CARDS} cards were used"):
                for crowd in crowds:
                    create(crowd, FREED // len(crowds) + 1)
                for number, namespace in enumerate(deployed):
                    cluster.create(deployment(namespace, number))
                fill(crowds)
            assert stored(cluster, *members) == CARDS
            before = stored(cluster, *deployed)
            assert 0 < before < CARDS

            doomed = [pod["metadata"] for namespace in bare for pod in cluster.pods(namespace)][:FREED]
            for pod in doomed:
                cluster.delete_pod(pod["namespace"], pod["name"])
            with measured(f"until Deployments used the cards of {FREED} deleted pods"):
                eventually(lambda: stored(cluster, *deployed) == before + FREED, lambda: stored(cluster, *deployed))
            assert stored(cluster, *members) == CARDS

            for namespace in deployed:
                cluster.rest.merge_patch(f"{DEPLOYMENTS.format(namespace)}/train", {"spec": {"replicas": 0}})
            eventually(lambda: stored(cluster, *deployed) == 0, lambda: stored(cluster, *deployed))
            with measured(f"until bare pods used the {before + FREED} cards of the Deployments"):
                fill(crowds)
            assert stored(cluster, *bare) == stored(cluster, *members) == CARDS
        assert most["pool"][TOTAL] == 100 * CARDS


DEPLOYMENTS = "/apis/apps/v1/namespaces/{}/deployments"


def deployment(namespace: str, number: int) -> Json:
    """Return a Deployment. Its pods are reviewed by one of the replicas."""
    made = workload("Deployment", namespace, replicas=EACH)
    made["spec"]["template"]["metadata"]["labels"] = {"app": "train", REPLICA: str(number % REPLICAS)}
    return made


def fill(crowds: Sequence[Crowd]) -> None:
    """Create pods by concurrent callers, each in all namespaces in turn, until each caller is rejected by the quota."""

    def call(number: int) -> None:
        for crowd in itertools.islice(itertools.cycle(crowds), number, None):
            answer = crowd.create()
            if answer.status == HTTPStatus.FORBIDDEN and not answer.may_pass_soon:
                return

    with ThreadPoolExecutor(CALLERS) as threads:
        list(threads.map(call, range(CALLERS)))


@contextmanager
def measured(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"\n{time.monotonic() - began:.1f} s {what}", end="")
