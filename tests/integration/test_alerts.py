"""Tests that each alert of the component prometheus fires on its problem's metrics, and not on similar metrics.

The PromQL queries in docs/workloads.md return the documented figures. promtool evaluates rules and queries.
"""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.documented import DOCS, blocks, documented
from tests.rendered import MANIFESTS

pytestmark = pytest.mark.slow

RULES = yaml.safe_load((MANIFESTS / "components" / "prometheus" / "rules.yaml").read_text())["spec"]
NAMES = tuple(rule["alert"] for group in RULES["groups"] for rule in group["rules"])
MINUTES = 150
"""The length of each metric series in minutes. A series has one value per minute."""


def steady(value: float) -> str:
    return f"{value}+0x{MINUTES}"


def rising(step: float) -> str:
    return f"0+{step}x{MINUTES}"


REJECTED = (
    'apiserver_admission_webhook_rejection_count{name="validate.quota.vcuda.io",error_type="calling_webhook_error"}'
)
BUSY = 'vcuda_admissions_total{outcome="busy"}'
PENDING = 'vcuda_admissions_total{path="/validate",outcome="over-quota-pending"}'
LOST = 'vcuda_admissions_total{outcome="ledger-lost"}'
_SECONDS = 'vcuda_admission_duration_seconds_bucket{path="/validate",le='
BELOW_1, BELOW_2, ALL = f'{_SECONDS}"1"}}', f'{_SECONDS}"2"}}', f'{_SECONDS}"+Inf"}}'
_MODEL = '{namespace="a",model="M40"}'
USED, LIMIT = f"vcuda_quota_used_cards{_MODEL}", f"vcuda_quota_limit_cards{_MODEL}"
MEMORY, MEMORY_LIMIT = f"vcuda_quota_used_memory_bytes{_MODEL}", f"vcuda_quota_limit_memory_bytes{_MODEL}"
TOTALS = tuple(f'vcuda_quota_total_{name}_cards{{namespace="a"}}' for name in ("used", "limit"))
DAY = 86400

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


class Case(NamedTuple):
    """An alert's metric series: sets on which it must fire, and sets on which it must not fire."""

    firing: Sequence[Series]
    silent: Sequence[Series]


def up(job: str, firing: str, silent: str) -> Case:
    name = f'up{{job="{job}",pod="{job}-1"}}'
    return Case([{name: firing}], [{name: silent}])


def threshold(series: str, beyond: str, within: str) -> Case:
    return Case([{series: beyond}], [{series: within}, {}])


CASES: Mapping[str, Case] = {
    "VcudaWebhookDown": Case(
        [{}, {'up{job="vcuda-webhook",pod="a"}': steady(0)}],
        [{'up{job="vcuda-webhook",pod="a"}': steady(0), 'up{job="vcuda-webhook",pod="b"}': steady(1)}],
    ),
    "VcudaWebhookNotReached": threshold(REJECTED, rising(1), steady(7)),
    "VcudaWebhookReplicaDown": up("vcuda-webhook", steady(0), steady(1)),
    "VcudaAdmissionSlow": Case(
        [{BELOW_1: rising(90), BELOW_2: rising(100), ALL: rising(100)}],
        [{BELOW_1: rising(100), BELOW_2: rising(100), ALL: rising(100)}, {}],
    ),
    "VcudaAdmissionsPutOff": threshold(BUSY, rising(120), rising(30)),
    "VcudaLedgerLost": Case(
        [{'vcuda_quota_ledger_lost{namespace="a"}': steady(1)}, {LOST: rising(1)}],
        [{'vcuda_quota_ledger_lost{namespace="a"}': steady(0), LOST: steady(3)}, {}],
    ),
    "VcudaRejectedByPending": threshold(PENDING, rising(2), rising(0.5)),
    "VcudaReservedUnused": Case(
        [
            {'vcuda_quota_reservation_age_seconds{namespace="a"}': steady(301)},
            {
                'vcuda_quota_reserved_cards{namespace="a"}': steady(0.5),
                "vcuda_ledger_spent_total": steady(5),
            },
        ],
        [
            {'vcuda_quota_reservation_age_seconds{namespace="a"}': steady(87)},
            {
                'vcuda_quota_reserved_cards{namespace="a"}': steady(0.5),
                "vcuda_ledger_spent_total": rising(5),
            },
            {},
        ],
    ),
    "VcudaLedgerWritesUnsure": threshold("vcuda_ledger_unsure_total", rising(1), rising(0.5)),
    "VcudaWatchSilent": threshold('vcuda_watch_last_event_age_seconds{pod="a"}', steady(121), steady(119)),
    "VcudaQuotaMalformed": threshold("vcuda_quota_config_valid", steady(0), steady(1)),
    "VcudaCertificateExpires": threshold(
        "vcuda_serving_certificate_expiry_seconds", steady(13 * DAY), steady(15 * DAY)
    ),
    "VcudaClientCertificateExpires": threshold(
        "vcuda_client_certificate_expiry_seconds", steady(13 * DAY), steady(15 * DAY)
    ),
    "VcudaCertificateNotRead": threshold("vcuda_serving_certificate_reload_failures_total", rising(1), steady(4)),
    "VcudaControllerDown": Case(
        [{}, {'up{job="vcuda-controller",pod="a"}': steady(0)}], [{'up{job="vcuda-controller",pod="a"}': steady(1)}]
    ),
    "VcudaNoControllerLeads": Case(
        [
            {},
            {'vcuda_controller_leading{pod="a"}': steady(0), 'vcuda_controller_leading{pod="b"}': steady(0)},
            {'vcuda_controller_leading{pod="a"}': steady(1), 'vcuda_controller_leading{pod="b"}': steady(1)},
        ],
        [{'vcuda_controller_leading{pod="a"}': steady(1), 'vcuda_controller_leading{pod="b"}': steady(0)}],
    ),
    "VcudaRecountLags": threshold("vcuda_recount_lag_seconds", steady(31), steady(29)),
    "VcudaLedgerDrift": threshold("vcuda_recount_drifts_total", rising(0.1), steady(1)),
    "VcudaRegistrationMissing": threshold(
        'vcuda_registration_missing{kind="ValidatingWebhookConfiguration",name="vcuda-quota"}', steady(1), steady(0)
    ),
    "VcudaModelWithoutNodes": threshold('vcuda_quota_model_nodes{model="A1O0"}', steady(0), steady(1)),
    "VcudaQuotaNotInEffect": threshold('vcuda_quota_taking_effect{namespace="a"}', steady(1), steady(0)),
    "VcudaQuotaExceeded": Case(
        [
            {USED: steady(4.01), LIMIT: steady(4)},
            {MEMORY: steady(2), MEMORY_LIMIT: steady(1)},
            {USED: steady(4), LIMIT: steady(4), **dict(zip(TOTALS, (steady(6), steady(5)), strict=True))},
        ],
        [
            {USED: steady(4), LIMIT: steady(4), MEMORY: steady(1), MEMORY_LIMIT: steady(1)},
            dict.fromkeys(TOTALS, steady(5)),
            {},
        ],
    ),
    "VcudaTerminatingStays": threshold('vcuda_quota_terminating_cards{namespace="a"}', steady(100), "100 0x149"),
    "VcudaPodsUnpinned": threshold('vcuda_quota_unpinned_pods{namespace="a"}', steady(1), steady(0)),
    "VcudaClaimsUnpinned": threshold('vcuda_violations_claims{namespace="a",finding="unpinned"}', steady(1), steady(0)),
    "VcudaOtherModelAllocated": Case(
        [
            {'vcuda_violations_pods{namespace="a",finding="other-model"}': steady(1)},
            {'vcuda_violations_claims{namespace="a",finding="other-model"}': steady(1)},
        ],
        [{'vcuda_violations_pods{namespace="a",finding="other-model"}': steady(0)}, {}],
    ),
    "VcudaNoModelNodes": threshold("vcuda_model_nodes", steady(0), steady(1)),
    "VcudaModelInDoubt": Case(
        [{'vcuda_model_doubts{doubt="mixed"}': steady(1)}, {'vcuda_model_doubts{doubt="no-model"}': steady(1)}],
        [{'vcuda_model_doubts{doubt="no-model"}': steady(0)}, {}],
    ),
    "VcudaNodeAgentDown": up("vcuda-node", steady(0), steady(1)),
    "VcudaNodeSweepsFail": Case(
        [{'vcuda_vm_last_complete_sweep_timestamp_seconds{pod="a"}': steady(0)}],
        [{'vcuda_vm_last_complete_sweep_timestamp_seconds{pod="a"}': f"0+60x{MINUTES}"}, {}],
    ),
}


def situations() -> list[object]:
    return [
        pytest.param(alert, series, fires, id=f"{alert}, {'fires' if fires else 'is silent'}, {number}")
        for alert, case in CASES.items()
        for fires, all_series in ((True, case.firing), (False, case.silent))
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
