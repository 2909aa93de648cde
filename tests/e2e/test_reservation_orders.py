"""Tests that run random orders of calls against reservations (quota that a replica holds in advance).

The API server and etcd are real. tests/unit does the same with a test double.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests import reservation_scenarios as scenarios
from tests.e2e.cluster import Cluster
from tests.e2e.dra import claims_path, served
from tests.e2e.served_api import ServedApi
from tests.quota_map import QUOTA
from tests.reservation_machine import ReservationMachine
from tests.reservation_subjects import TEAM
from tests.reservation_world import ReservationWorld
from vcuda.kube import Kube

LEDGERS = "vcuda-quota"
EXAMPLES = int(os.environ.get("MACHINE_EXAMPLES", "6"))

pytestmark = [pytest.mark.timeout(120 + 30 * EXAMPLES), pytest.mark.one_version]


@pytest.fixture(scope="module")
def make_world(cluster: Cluster) -> Iterator[Callable[[], ReservationWorld]]:
    claims = served(cluster)
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": LEDGERS}})
    collections = [f"/api/v1/namespaces/{TEAM}/pods", f"/api/v1/namespaces/{LEDGERS}/configmaps"]
    collections += [claims_path(TEAM)] if claims else []
    with closing(Kube.connect(cluster.kubeconfig)) as kube, cluster.fresh_namespace(name=TEAM):
        api = ServedApi(kube)

        def clear() -> None:
            for collection in collections:
                api.clear(collection)

        def make() -> ReservationWorld:
            clear()
            return ReservationWorld(ServedApi(kube), claims=claims)

        yield make
        clear()
        api.remove(QUOTA)


def test_no_order_of_calls_to_a_real_api_server_admits_more_than_the_quota(
    make_world: Callable[[], ReservationWorld],
) -> None:
    class OnThisApiServer(ReservationMachine):
        def __init__(self) -> None:
            super().__init__(make_world)

    run_state_machine_as_test(
        OnThisApiServer,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=40,
            phases=[Phase.reuse, Phase.generate],  # no Phase.shrink, because shrinking a failure takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("scenario", scenarios.ALL, ids=lambda scenario: scenario.__name__)
def test_every_scenario_of_the_reservation_rules_succeeds(
    make_world: Callable[[], ReservationWorld], scenario: scenarios.Scenario
) -> None:
    scenarios.play(scenario, make_world())
