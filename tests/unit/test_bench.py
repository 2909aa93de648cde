"""What the benches decide: which arrangements, in which order, what is registered, and what their rounds come to."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec
import pytest

from bench import arrangements, creates, hooks
from bench.cpu import TICKS_A_SECOND, seconds_of
from bench.figures import PROCESSES, Case, Figures, as_json, as_table, figures_of, medians
from bench.load import Result
from bench.plane import gpu_pod
from bench.rounds import orders
from bench.servers import PIN
from tests.builders import policy_for, review
from tests.rendered import BASE, rendered
from vcuda.quota.model import Limit, NamespaceQuota
from webhook.ledger.ledgers import MemoryLedgers, RecentChoices, ReviewDeadline
from webhook.review.pod_review import mutate

CASES = [Case(name, spread) for name in arrangements.EVERY for spread in creates.SPREADS]

STAT = "{} S 1 41 41 0 -1 4194560 9 8 7 6 {} {} {} {} 20 0 9 0 5301 1 1"
"""A line of /proc/PID/stat, shortened at its end: pid and name, and the four times in ticks."""


def figures(cpu: float, refused: int = 0) -> Figures:
    """Return figures of which each is told from the others."""
    return Figures(cpu, cpu + 100, cpu + 200, cpu + 300, refused, dict.fromkeys(PROCESSES, cpu / 4), refused // 2)


def test_every_round_has_all_cases_in_another_order() -> None:
    every = orders(CASES, 9, seed=7)
    assert [sorted(order) for order in every] == [sorted(CASES)] * 9
    assert len({tuple(order) for order in every}) == 9
    assert orders(CASES, 3, seed=7) == orders(CASES, 3, seed=7) != orders(CASES, 3, seed=8), "had again by the seed"


@pytest.mark.parametrize(
    "name",
    ["(etcd)", "(kube-apiserver)", "(gunicorn: worker [vcuda])", "(a) S 1 2 3)", "(())", "( 9 9 9 9 9 9 9 9 9 9 9)"],
)
def test_cpu_is_user_and_system_time_with_that_of_ended_children_whatever_the_program_is_called(name: str) -> None:
    line = STAT.format(f"41 {name}", 300, 50, 20, 5)
    assert seconds_of(line) == 375 / TICKS_A_SECOND


def test_cpu_is_told_per_stored_pod_and_by_process() -> None:
    result = Result(rate=250.0, p50=3.0, p99=9.0, wanted=500, refused=2, retry_later=1)
    round_ = figures_of(result, {"kube-apiserver": 1.0, "etcd": 0.25})
    assert round_.by_process == {"kube-apiserver": 2.0, "etcd": 0.5, "webhook": 0.0, "controller": 0.0}
    assert round_.cpu_ms_per_pod == 2.5
    assert (round_.pods_per_second, round_.p50_ms, round_.p99_ms) == (250.0, 3.0, 9.0)
    assert (round_.refused, round_.retry_later) == (2, 1)


def test_figures_are_medians_of_the_rounds_and_every_refusal_counts() -> None:
    median = medians([figures(2.0), figures(90.0, refused=3), figures(4.0)])
    assert median == figures(4.0, refused=3)


def test_json_is_by_arrangement_and_number_of_namespaces() -> None:
    results = {Case("none", 1): [figures(1.0)], Case("none", 10): [figures(2.0)], Case("ours-1", 1): [figures(4.0)]}
    report = json.loads(as_json(results))
    assert {name: [*cases] for name, cases in report.items()} == {"none": ["1", "10"], "ours-1": ["1"]}
    told = {"cpu_ms_per_pod": 4.0, "pods_per_second": 104.0, "p50_ms": 204.0, "p99_ms": 304.0, "refused": 0}
    assert report["ours-1"]["1"] == {**told, "retry_later": 0, "by_process": dict.fromkeys(PROCESSES, 1.0)}


def test_the_table_has_a_line_for_each_case_and_a_dash_for_what_does_not_run() -> None:
    by_process = {"kube-apiserver": 1.25, "etcd": 0.25, "webhook": 0.0, "controller": 0.0}
    alone = Figures(1.5, 900.0, 12.34, 56.78, 0, by_process)
    heading, *lines = as_table({Case("none", 1): [alone], Case("ours-1", 10): [figures(4.0)]}).splitlines()
    assert heading.split("  ")[0] == "creates of pods"
    assert lines[0].split() == ["none", "1", "1.50", "1.25", "0.25", "-", "-", "900", "12.3", "56.8", "0", "0"]
    assert lines[1].split()[:4] == ["ours-1", "10", "4.00", "1.00"]


def test_what_is_asked_for_is_measured_in_its_own_order_and_what_needs_go_is_skipped_with_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.go.installed", lambda: True)
    assert creates.chosen(()) == [*arrangements.EVERY]
    assert creates.chosen(("ours-1", "none", "go-pin")) == ["none", "go-pin", "ours-1"]
    monkeypatch.setattr("bench.go.installed", lambda: False)
    assert creates.chosen(("ours-1", "none")) == ["none", "ours-1"]
    assert capsys.readouterr().err == ""
    assert creates.chosen(("go-idle", "go-pin", "none")) == ["none"]
    assert capsys.readouterr().err.startswith("go-idle, go-pin skipped: there is no go on PATH")
    with pytest.raises(click.ClickException, match="nothing is left to measure"):
        creates.chosen(("go-pin",))


def test_the_constant_pin_is_the_patch_that_ours_answers_the_same_pod_with() -> None:
    quota = NamespaceQuota({"M40": Limit(800)})
    answer = asyncio.run(
        mutate(review(gpu_pod()), policy_for(quota), MemoryLedgers(), RecentChoices(), ReviewDeadline())
    )
    assert [msgspec.to_builtins(operation) for operation in answer.patch] == json.loads(PIN)


REGISTERED = """
kind: MutatingWebhookConfiguration
webhooks:
  - name: mutate.example.com
    clientConfig: {service: {namespace: vcuda-quota, name: vcuda-webhook, path: /mutate, port: 443}}
    failurePolicy: Ignore
    matchConditions: [{name: asks, expression: "true"}]
---
kind: ValidatingWebhookConfiguration
webhooks:
  - {name: validate.example.com, clientConfig: {service: {path: /validate}}, namespaceSelector: {matchLabels: {a: b}}}
  - {name: config.example.com, clientConfig: {service: {path: /quota}}}
"""


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    (tmp_path / "ca.crt").write_text("PEM")
    return tmp_path / "ca.crt"


def test_ours_are_registered_as_the_manifests_say_but_for_their_address(tmp_path: Path, ca: Path) -> None:
    registration = tmp_path / "registration.yaml"
    registration.write_text(REGISTERED)
    registered = hooks.installed("https://127.0.0.1:1", ca, registration)
    assert registered[hooks.MUTATING] == [
        {
            "name": "mutate.example.com",
            "clientConfig": {"url": "https://127.0.0.1:1/mutate", "caBundle": "UEVN"},
            "failurePolicy": "Ignore",
            "matchConditions": [{"name": "asks", "expression": "true"}],
        }
    ]
    validating = registered[hooks.VALIDATING]
    assert [called(webhook) for webhook in validating] == ["https://127.0.0.1:1/validate", "https://127.0.0.1:1/quota"]
    assert validating[0]["namespaceSelector"] == {"matchLabels": {"a": "b"}}


def test_the_manifests_of_this_project_are_what_is_registered(ca: Path) -> None:
    registered = hooks.installed("https://127.0.0.1:1", ca)
    paths = {called(webhook) for webhooks in registered.values() for webhook in webhooks}
    assert {f"https://127.0.0.1:1/{path}" for path in ("mutate", "validate", "quota")} <= paths


def test_with_ours_come_all_policies_of_the_base_and_their_bindings_last_the_one_that_is_probed() -> None:
    found = [(each["kind"], each["metadata"]["name"]) for each in hooks.policies()]
    ours = [each for each in rendered(BASE) if each["kind"].startswith("ValidatingAdmissionPolicy")]
    assert sorted(found) == sorted((each["kind"], each["metadata"]["name"]) for each in ours)
    assert [name for _, name in found[-2:]] == [hooks.PROBED] * 2


def called(webhook: Mapping[str, Mapping[str, str]]) -> str:
    return webhook["clientConfig"]["url"]
