"""Tests that each alert of the component prometheus fires on its problem's metrics, and not on similar metrics.

The PromQL queries in docs/workloads.md return the documented figures. promtool evaluates rules and queries.
"""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from tests.documented import DOCS, blocks, documented
from tests.rendered import MANIFESTS

pytestmark = pytest.mark.slow

RULES = yaml.safe_load((MANIFESTS / "components" / "prometheus" / "rules.yaml").read_text())["spec"]
DATA = Path(__file__).parents[1] / "data"
NAMES = tuple(rule["alert"] for group in RULES["groups"] for rule in group["rules"])
Series = Mapping[str, str]


def fault_of_value(
    directory: Path, expression: str, series: Mapping[str, str], expected: float, *, at: str, rules: object = None
) -> str:
    """Return an empty text if the expression has the expected value at time ``at``; otherwise promtool's output."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool on PATH: install Debian's package prometheus")
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": expression, "eval_time": at, "exp_samples": [{"labels": "{}", "value": expected}]}
        ],
    }
    (directory / "rules.yaml").write_text(json.dumps(rules or {"groups": []}))
    tests = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (directory / "test.yaml").write_text(json.dumps(tests))
    command = (program, "test", "rules", directory / "test.yaml")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return "" if done.returncode == 0 else done.stdout + done.stderr


CASES: Mapping[str, Mapping[str, Sequence[Series]]] = yaml.safe_load((DATA / "alerts.yaml").read_text())


def situations() -> list[object]:
    return [
        pytest.param(alert, series, fires, id=f"{alert}, {'fires' if fires else 'is silent'}, {number}")
        for alert, case in CASES.items()
        for fires, all_series in ((True, case["firing"]), (False, case["silent"]))
        for number, series in enumerate(all_series, 1)
    ]


def test_every_alert_has_its_cases() -> None:
    assert CASES.keys() == set(NAMES)


@pytest.mark.parametrize(("alert", "series", "fires"), situations())
def test_an_alert_fires_only_in_its_situation(tmp_path: Path, alert: str, series: Series, fires: bool) -> None:
    expression = f'sum(count_over_time(ALERTS{{alertname="{alert}",alertstate="firing"}}[2h])) > bool 0 or vector(0)'
    assert fault_of_value(tmp_path, expression, series, float(fires), at="145m", rules=RULES) == ""


# Tests of the queries in docs/workloads.md


QUOTA = '{namespace="team-a",model="A100"}'
REPLICAS = 'kube_deployment_status_replicas{namespace="team-a",deployment="inference"}'
WAITING = 'jobs_waiting{namespace="team-a"}'


def quota(limit: float, used: float) -> dict[str, float]:
    """Return the metrics of the leader and of a former leader, whose series Prometheus keeps for some minutes."""
    leaders = [QUOTA.replace("}", f',pod="vcuda-controller-{pod}"}}') for pod in "ab"]
    names = {"vcuda_quota_limit_cards": limit, "vcuda_quota_used_cards": used}
    return {f"{name}{leader}": value for name, value in names.items() for leader in leaders}


def constant(figures: dict[str, float]) -> dict[str, str]:
    return {name: f"{value}+0x10" for name, value in figures.items()}


@pytest.mark.parametrize(("used", "free"), [(0, 8), (2.5, 5.5), (9, -1)])
def test_the_documented_query_gives_the_free_cards(tmp_path: Path, used: float, free: float) -> None:
    [query] = blocks(DOCS / "workloads.md", "promql")
    assert fault_of_value(tmp_path, query, constant(quota(8, used)), free, at="5m") == ""


@pytest.mark.parametrize(
    ("waiting", "running", "used", "wanted"),
    [(5, 2, 2, 5), (20, 2, 2, 8), (20, 2, 8, 2), (0, 3, 3, 0)],
    ids=["few wait", "no more than the quota", "others use the quota", "none wait"],
)
def test_the_documented_scaler_asks_for_no_more_pods_than_the_quota_admits(
    tmp_path: Path, waiting: float, running: float, used: float, wanted: float
) -> None:
    [trigger] = documented("ScaledObject")["spec"]["triggers"]
    figures = {**quota(8, used), REPLICAS: running, WAITING: waiting}
    assert fault_of_value(tmp_path, trigger["metadata"]["query"], constant(figures), wanted, at="5m") == ""
