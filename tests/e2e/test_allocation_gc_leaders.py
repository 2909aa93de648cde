"""A controller with `--dry-run` reports stale allocations, and does not remove them."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from examples.allocations import RECORDED
from tests.e2e.cluster import Cluster
from tests.e2e.installation import Installation, controlling
from tests.e2e.stale_objects import Allocated

pytestmark = pytest.mark.one_version
CALLERS = 8


def stale_pods(cluster: Cluster, namespace: str, count: int) -> list[Allocated]:
    pods = [Allocated(f"stale-{number}", RECORDED[number % len(RECORDED)], "no-such-node") for number in range(count)]
    with ThreadPoolExecutor(CALLERS) as callers:
        list(callers.map(lambda pod: pod.create(cluster, namespace), pods))
    return pods


def test_a_dry_run_reports_and_writes_nothing(cluster: Cluster, installation: Installation, namespace: str) -> None:
    [pod] = stale_pods(cluster, namespace, 1)
    before = cluster.pods(namespace)
    with controlling(installation, "--dry-run") as controller:
        line = controller.await_log(
            "stale allocation found; a dry run removes nothing", lambda found: found["namespace"] == namespace
        )
        assert (line["name"], line["scheme"], line["rule"]) == (pod.name, pod.scheme.name, "node-gone")
        assert controller.terminate() == 0
    assert cluster.pods(namespace) == before
    assert cluster.events(namespace) == []
