"""The PromQL queries in docs/workloads.md return the documented figures. promtool evaluates the queries."""

from pathlib import Path

import pytest

from tests.documented import DOCS, blocks, documented
from tests.integration.promtool import fault_of_value

QUOTA = '{namespace="team-a",model="A100"}'
REPLICAS = 'kube_deployment_status_replicas{namespace="team-a",deployment="inference"}'
WAITING = 'jobs_waiting{namespace="team-a"}'


def quota(limit: float, used: float) -> dict[str, float]:
    """Return the metrics of the leader, and of a former leader, whose series remain in Prometheus for some minutes."""
    leaders = [QUOTA.replace("}", f',pod="vcuda-controller-{pod}"}}') for pod in "ab"]
    names = {"vcuda_quota_limit_cores": limit, "vcuda_quota_used_cores": used}
    return {f"{name}{leader}": value for name, value in names.items() for leader in leaders}


def constant(figures: dict[str, float]) -> dict[str, str]:
    return {name: f"{value}+0x10" for name, value in figures.items()}


@pytest.mark.parametrize(("used", "free"), [(0, 8), (250, 5.5), (900, -1)])
def test_the_documented_query_gives_the_free_cards(tmp_path: Path, used: float, free: float) -> None:
    [query] = blocks(DOCS / "workloads.md", "promql")
    assert fault_of_value(tmp_path, query, constant(quota(800, used)), free, at="5m") == ""


@pytest.mark.parametrize(
    ("waiting", "running", "used", "wanted"),
    [(5, 2, 200, 5), (20, 2, 200, 8), (20, 2, 800, 2), (0, 3, 300, 0)],
    ids=["few wait", "no more than the quota", "others use the quota", "none wait"],
)
def test_the_documented_scaler_asks_for_no_more_pods_than_the_quota_admits(
    tmp_path: Path, waiting: float, running: float, used: float, wanted: float
) -> None:
    [trigger] = documented("ScaledObject")["spec"]["triggers"]
    figures = {**quota(800, used), REPLICAS: running, WAITING: waiting}
    assert fault_of_value(tmp_path, trigger["metadata"]["query"], constant(figures), wanted, at="5m") == ""
