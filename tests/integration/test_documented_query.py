"""The PromQL queries in docs/workloads.md return the documented figures. promtool evaluates the queries."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.documented import DOCS, blocks, documented

QUOTA = '{namespace="team-a",model="A100"}'
REPLICAS = 'kube_deployment_status_replicas{namespace="team-a",deployment="inference"}'
WAITING = 'jobs_waiting{namespace="team-a"}'


def value_of(expression: str, series: dict[str, float], expected: float, directory: Path) -> str:
    """Return the error text of promtool; empty if the expression has the expected value."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool on PATH: install Debian's package prometheus")
    samples = [{"labels": "{}", "value": expected}]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": f"{value}+0x10"} for name, value in series.items()],
        "promql_expr_test": [{"expr": expression, "eval_time": "5m", "exp_samples": samples}],
    }
    (directory / "test.yaml").write_text(json.dumps({"rule_files": [], "tests": [test]}))
    done = subprocess.run(
        (program, "test", "rules", directory / "test.yaml"), capture_output=True, text=True, check=False, timeout=60
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def quota(limit: float, used: float) -> dict[str, float]:
    """Return the metric series of the leading controller, and the series that a former leader leaves for
    some minutes.
    """
    leaders = [QUOTA.replace("}", f',pod="vcuda-controller-{pod}"}}') for pod in "ab"]
    names = {"vcuda_quota_limit_cores": limit, "vcuda_quota_used_cores": used}
    return {f"{name}{leader}": value for name, value in names.items() for leader in leaders}


@pytest.mark.parametrize(("used", "free"), [(0, 8), (250, 5.5), (900, -1)])
def test_the_documented_query_gives_the_free_cards(tmp_path: Path, used: float, free: float) -> None:
    [query] = blocks(DOCS / "workloads.md", "promql")
    assert value_of(query, quota(800, used), free, tmp_path) == ""


@pytest.mark.parametrize(
    ("waiting", "running", "used", "wanted"),
    [(5, 2, 200, 5), (20, 2, 200, 8), (20, 2, 800, 2), (0, 3, 300, 0)],
    ids=["few wait", "no more than the quota", "others use the quota", "none wait"],
)
def test_the_documented_scaler_asks_for_no_more_pods_than_the_quota_admits(
    tmp_path: Path, waiting: float, running: float, used: float, wanted: float
) -> None:
    [trigger] = documented("ScaledObject")["spec"]["triggers"]
    series = {**quota(800, used), REPLICAS: running, WAITING: waiting}
    assert value_of(trigger["metadata"]["query"], series, wanted, tmp_path) == ""
