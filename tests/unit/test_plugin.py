"""Tests of `kubectl gpuquota`, which shows users the usage of their quotas."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.plugin.usage_table import bar
from tests.api_double import lost_request
from tests.builders import vcuda_pod
from tests.gpuquota import Cluster, explain, run
from tests.tables import cases
from vcuda.quota.well_known import USAGE_LABELS

M40 = {"model": "M40", "limit": 8.0, "used": 6.5, "pending": 1.0, "available": 1.5, "terminating": 0.0, "reserved": 0.0}
P100 = {"model": "P100", "limit": 0.0, "used": 0.0, "pending": 0.0, "available": 0.0, "terminating": 0.0}
MEMORY = {"memory_limit": 1000, "memory_used": 250}


def test_the_bar_is_full_only_if_nothing_is_left() -> None:
    amounts = [(0, 8, 0), (4, 8, 10), (8, 8, 20), (9, 8, 20), (2.5, 2.5, 20), (0, 0, 0), (1, 0, 20)]
    nearly = [(0.1, 8, 1), (0.01, 1000, 1), (7.9, 8, 19), (7.99, 8, 19)]
    for used, limit, filled in [*amounts, *nearly]:
        assert bar(used, limit) == f"[{'#' * filled}{'-' * (20 - filled)}]", (used, limit)


def test_the_bar_shows_reserved_after_used_cards() -> None:
    """The smallest reservation takes one character. If nothing is free, the reservation takes the rest of the bar."""
    for used, limit, reserved, shown in [
        (4, 8, 2, "##########+++++-----"),
        (4, 8, 0.01, "##########+---------"),
        (0, 8, 1, "++------------------"),
        (6, 8, 2, "###############+++++"),
        (7.99, 8, 0.01, "###################+"),
        (9, 8, 1, "####################"),
    ]:
        assert bar(used, limit, reserved) == f"[{shown}]", (used, limit, reserved)


def test_a_namespace_is_shown_as_a_table(cluster: Cluster) -> None:
    cluster.publish("team-a", {**M40, "terminating": 2.5}, {**P100, **MEMORY})
    assert run("-n", "team-a").stdout.splitlines() == [
        "NAMESPACE  MODEL  USED  FREE  LIMIT                          PENDING              MEMORY MiB",
        "team-a     M40    6.5   1.5   8      [################----]  1 (2.5 terminating)",
        "team-a     P100   0     0     0      [--------------------]  0                    250 of 1000",
    ]


@pytest.mark.usefixtures("cluster")
def test_if_no_namespace_has_published_usage_the_way_to_the_reason_is_shown() -> None:
    assert run("-A").stderr == "Warning: no namespace has published usage: see kubectl gpuquota doctor\n"


def test_reserved_cards_have_a_column_only_while_there_are_some(cluster: Cluster) -> None:
    """Reserved cards are neither used nor free, so they need their own column."""
    cluster.publish("team-a", {**M40, "used": 5, "available": 1, "reserved": 2.0}, P100)
    cluster.publish("team-b", {**M40, **MEMORY, "reserved": 1.0, "memory_reserved": 100})
    assert run("-A").stdout.splitlines() == [
        "NAMESPACE  MODEL  USED  FREE  LIMIT                          PENDING  MEMORY MiB   RESERVED",
        "team-a     M40    5     1     8      [############++++++--]  1                     2",
        "team-a     P100   0     0     0      [--------------------]  0                     0",
        "team-b     M40    6.5   1.5   8      [################+++-]  1        250 of 1000  1 (100 MiB)",
        "total      M40    11.5  2.5   16     [##############++++--]  2                     3",
    ]
    cluster.publish("team-a", M40)
    for output in ("table", "wide"):
        assert "reserved" not in run("-n", "team-a", "-o", output).stdout.lower()


def test_a_part_of_a_limit_that_ends_is_shown_with_its_end(cluster: Cluster) -> None:
    day, night = "2026-12-02T00:00:00+01:00", "2026-11-25T06:00:00+01:00"
    cluster.publish("team-a", {**M40, "grants": [{"cards": 4.0, "until": day}, {"cards": 0.5, "until": night}]}, P100)
    heading, granted, other = run("-n", "team-a").stdout.splitlines()
    assert heading.endswith("PENDING  MEMORY MiB  GRANTED")
    assert granted.endswith(f"  1                    4 until {day}, 0.5 until {night}")
    assert other.endswith("  0")


def test_a_reason_why_a_quota_is_not_effective_is_shown_with_the_namespace(cluster: Cluster) -> None:
    for name, fields in (("a", {}), ("b", {"taking_effect": True}), ("c", {"ledger_lost": True, "mode": "warn"})):
        namespace = f"team-{name}"
        use = {"namespace": namespace, "mode": "enforce", "models": [M40], **fields}
        cluster.publish(namespace, text=json.dumps(use))
    shown = [line.partition(" M40")[0].rstrip() for line in run("-A").stdout.splitlines()[1:]]
    assert shown == ["team-a", "team-b (taking effect)", "team-c (warn, ledger lost)", "total"]


def test_wide_lists_the_pods_and_claims_that_use_the_cards(cluster: Cluster) -> None:
    pods = [
        {"name": "gpu", "cores": 200, "memory": 0, "claim": True},
        {"name": "train", "cores": 50, "memory": 2048},
    ]
    cluster.publish("team-a", {**M40, "pods": pods, "more_pods": 3}, P100)
    cluster.publish("team-b")
    first, second = run("-A", "-o", "wide").stdout.split("\n\n")
    assert first == run("-A").stdout.rstrip()
    assert second.splitlines() == [
        "NAMESPACE  MODEL  HELD BY  NAME        CARDS  MEMORY MiB",
        "team-a     M40    claim    gpu         2",
        "team-a     M40    pod      train       0.5    2048",
        "team-a     M40             and 3 more",
    ]
    told = json.loads(run("-n", "team-a", "-o", "json").stdout)[0]["models"][0]["pods"]
    assert [(each["name"], each["claim"]) for each in told] == [("gpu", True), ("train", False)]


def test_pods_without_a_known_model_are_shown_as_not_counted(cluster: Cluster) -> None:
    use = {
        "namespace": "team-a",
        "mode": "enforce",
        "models": [M40],
        "unpinned": ["lab-7", "lab-8"],
        "more_unpinned": 3,
    }
    cluster.publish("team-a", text=json.dumps(use))
    text = "5 pods of namespace team-a are not counted, because they have no known GPU model, for example lab-7"
    assert run("-n", "team-a").stderr == f"Warning: {text}\n"


def test_a_reason_why_a_quota_cannot_be_used_is_shown_once(cluster: Cluster) -> None:
    warning = "no node has a GPU model, so pods that request GPUs stay pending"
    for namespace in ("team-a", "team-b"):
        use = {"namespace": namespace, "mode": "enforce", "models": [M40], "warnings": [warning]}
        cluster.publish(namespace, text=json.dumps(use))
    for output in ("table", "wide"):
        assert run("-A", "-o", output).stderr == f"Warning: {warning}\n"
    told = run("-n", "team-a", "-o", "json")
    assert (json.loads(told.stdout)[0]["warnings"], told.stderr) == ([warning], "")


def test_a_missing_registration_is_shown_once_and_next_to_every_namespace(cluster: Cluster) -> None:
    missing = "ValidatingWebhookConfiguration vcuda-quota does not exist"
    for namespace in ("team-a", "team-b"):
        use = {"namespace": namespace, "mode": "enforce", "models": [M40]}
        cluster.publish(namespace, text=json.dumps({**use, "taking_effect": True, "unregistered": missing}))
    shown = run("-A")
    assert shown.stderr == f"Warning: quotas are not in effect: {missing}\n"
    assert [line.partition(")")[0] for line in shown.stdout.splitlines()[1:3]] == [
        "team-a (not in effect",
        "team-b (not in effect",
    ]


def test_totals_are_by_model_and_a_line_says_why_a_total_has_no_limit(cluster: Cluster) -> None:
    memory = {**M40, "limit": None, "available": None, "memory_limit": 1000, "memory_used": 250, "card_memory": 500}
    cluster.publish("team-a", M40, P100)
    cluster.publish("team-b", M40)
    cluster.publish("team-c", P100, {**memory, "model": "L4"})
    totals = [line.split() for line in run("-A").stdout.splitlines() if line.startswith("total")]
    assert [row[:5] for row in totals] == [["total", "M40", "13", "3", "16"], ["total", "P100", "0", "0", "0"]]
    assert ("total" in run("-n", "team-a").stdout, run("-A").stderr) == (False, "")
    cluster.publish("team-b", memory)
    shown = run("-A")
    [total] = [line.split() for line in shown.stdout.splitlines() if line.startswith("total      M40")]
    assert total == ["total", "M40", "13", "2"]
    assert "the row total of M40 shows no limit and no free cards" in shown.stderr
    assert "limit only its memory: team-b\n" in shown.stderr
    [row] = run("-n", "team-b").stdout.splitlines()[1:]
    assert row.split() == ["team-b", "M40", "6.5", "[#####---------------]", "1", "250", "of", "1000"]


def test_watch_shows_the_figures_again_when_they_change(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.publish("team-a", M40)
    changes = iter([M40, {**M40, "used": 7.5, "available": 0.5}])

    def wait(_: float) -> None:
        change = next(changes, None)
        if change is None:
            raise KeyboardInterrupt
        cluster.publish("team-a", change)

    monkeypatch.setattr("controller.plugin.cli.time.sleep", wait)
    done = run("-n", "team-a", "--watch")
    assert done.exit_code == 0
    first, second = done.stdout.split("\n\n")
    assert [each.splitlines()[1].split()[2] for each in (first, second)] == ["6.5", "7.5"]


def test_every_namespace_is_listed_with_its_mode_if_it_does_not_enforce(cluster: Cluster) -> None:
    cluster.publish("team-a", M40)
    cluster.publish("team-b", P100, mode="warn")
    cluster.publish("team-c", mode="audit")
    cluster.publish("team-d")
    assert run("-A").stdout.splitlines() == [
        "NAMESPACE       MODEL   USED  FREE  LIMIT                          PENDING  MEMORY MiB",
        "team-a          M40     6.5   1.5   8      [################----]  1",
        "team-b (warn)   P100    0     0     0      [--------------------]  0",
        "team-c (audit)  no GPU",
        "team-d          no GPU",
    ]
    assert run("-n", "team-d").stdout.splitlines()[1:] == ["team-d     no GPU"]
    cluster.objects.clear()
    empty = run("-A")
    assert (empty.exit_code, empty.stdout.split()[0]) == (0, "NAMESPACE")


@pytest.mark.parametrize(("output", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_data_have_every_field_even_at_its_default(cluster: Cluster, output: str, read: Any) -> None:
    cluster.publish("team-a", M40)
    absent: dict[str, Any] = {
        "memory_limit": None,
        "memory_used": None,
        "pods": [],
        "more_pods": 0,
        "memory_reserved": 0,
        "card_memory": 0,
        "grants": [],
        "unstored": 0,
    }
    states = {"taking_effect": False, "unregistered": "", "ledger_lost": False}
    none = {"unpinned": [], "more_unpinned": 0, **states, "warnings": [], "total": None, "team": None}
    assert read(run("-n", "team-a", "-o", output).stdout) == [
        {"namespace": "team-a", "mode": "enforce", "models": [{**M40, **absent}], **none}
    ]


@cases(
    "name, labels",
    another_name=("mine", USAGE_LABELS),
    without_a_label_of_the_controller=("gpu-quota-usage", {"quota.vcuda.io/usage": "true"}),
)
def test_only_the_controllers_own_report_is_shown(cluster: Cluster, name: str, labels: dict[str, str]) -> None:
    """The policy that lets only the controller write reports may be missing, so the plugin checks name and labels."""
    cluster.publish("team-a", M40)
    forged = {"namespace": "team-b", "mode": "enforce", "models": [M40]}
    metadata = {"name": name, "namespace": "team-b", "labels": labels}
    data = {"usage.json": json.dumps(forged)}
    cluster.store(f"/api/v1/namespaces/team-b/configmaps/{name}", {"metadata": metadata, "data": data})
    assert [row.split()[0] for row in run("-A").stdout.splitlines()[1:]] == ["team-a"]


def test_a_report_of_another_namespace_is_not_shown(cluster: Cluster) -> None:
    cluster.publish("team-a", text=json.dumps({"namespace": "team-b", "mode": "enforce", "models": [M40]}))
    result = run("-A")
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 1)
    told = "the usage report in ConfigMap gpu-quota-usage of namespace team-a is the report of another namespace"
    assert result.stderr.startswith(f"Warning: {told}\n")
    assert run("-n", "team-a").stderr == f"Error: {told}\n"


@pytest.mark.parametrize("output", ["table", "json", "yaml", "wide"])
def test_terminal_codes_are_escaped(cluster: Cluster, manifest: Path, output: str) -> None:
    """The report is forged: its texts have colours, line breaks, cursor movements and right-to-left marks."""
    hostile = "M40\x1b[31m\r\n\x9b2A\u202etxt\x7f"
    cluster.publish("team-a", {**M40, "model": hostile}, mode="\x1b[8m")
    cluster.publish("team-b", text='{"namespace": "\\u001b[2J", "mode": "enforce", "models": []}')
    cluster.pinned_to, cluster.warnings = hostile, (hostile,)
    for result in (
        run("-A", "-o", output),
        run("-n", "team-a", "-o", output),
        explain(manifest, vcuda_pod(), output=output),
    ):
        assert "M40" in result.stdout
        assert {each for each in result.stdout + result.stderr if not each.isprintable()} <= {"\n"}
    assert len(run("-n", "team-a").stdout.splitlines()) == 2


def test_a_namespace_without_a_report_is_reported(cluster: Cluster) -> None:
    cluster.publish("team-b", M40)
    result = run("-n", "team-a")
    message = "Error: namespace team-a has no GPU quota, or its usage has not been published yet\n"
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", message)


@pytest.mark.parametrize("text", [" ", "{}", "no JSON", '{"namespace": 5}'])
def test_a_damaged_report_affects_only_its_namespace(cluster: Cluster, text: str) -> None:
    cluster.publish("team-a", text=text)
    cluster.publish("team-b", M40)
    one, every = run("-n", "team-a"), run("-A")
    sentence = "the usage report in ConfigMap gpu-quota-usage of namespace team-a cannot be read: "
    assert (one.exit_code, one.stdout, one.stderr.startswith(f"Error: {sentence}")) == (1, "", True)
    assert (every.exit_code, every.stdout.splitlines()[1].split()[0]) == (0, "team-b")
    assert every.stderr.startswith(f"Warning: {sentence}")


@pytest.mark.parametrize("arguments", [["-n", "team-a"], ["-A"]])
def test_a_cluster_that_does_not_answer_is_an_error(cluster: Cluster, arguments: list[str]) -> None:
    cluster.deliver = lost_request
    result = run(*arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "Error: timed out\n")


@pytest.mark.parametrize("arguments", [["-o", "xml"], ["--nothing"], ["explain"], ["explain", "-f", "missing.yaml"]])
def test_a_bad_argument_is_exit_status_2(home: Path, arguments: list[str]) -> None:
    assert home
    result = run(*arguments)
    assert (result.exit_code, result.stdout, "Error: " in result.stderr) == (2, "", True)


def test_the_namespace_is_that_of_the_context_unless_one_is_given(cluster: Cluster) -> None:
    for name in ("team-a", "team-b", "team-c"):
        cluster.publish(name, M40)
    cluster.home = "team-b"
    for arguments, namespace in ([], "team-b"), (["-n", "team-c"], "team-c"):
        (row,) = run(*arguments).stdout.splitlines()[1:]
        assert row.split()[0] == namespace


NO_NAMESPACE = (
    "is not a valid namespace: the name of a namespace must have at most 63 lower-case letters, digits and `-`, and "
    "must begin and end with a letter or digit"
)
PARTS_OF_PATHS = ["team-a/../team-b", "..", "TEAM", "-", "*", "team a", "a" * 64, "team-a\n", "5?x=y"]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *((given, name) for given in ("shown", "explained") for name in PARTS_OF_PATHS),
        *(("of the manifest", name) for name in ("team-a/../team-b", "TEAM")),
        ("of the context", "TEAM"),
    ],
)
def test_an_invalid_namespace_name_is_bad_input(cluster: Cluster, manifest: Path, given: str, name: Any) -> None:
    """The name is a part of an API path. A name with a slash could lead to another namespace."""
    cluster.publish("team-b", M40)
    in_manifest = given == "of the manifest"
    manifest.write_text(yaml.safe_dump(vcuda_pod(metadata={"namespace": name} if in_manifest else {})))
    explain = ["explain", "-f", str(manifest)]
    arguments = {"shown": ["-n", name], "explained": [*explain, "-n", name], "of the manifest": explain}
    cluster.home = name if given == "of the context" else "team-a"
    result = run(*arguments.get(given, []))
    told = f"Error: {f'{manifest}, document 1: ' if in_manifest else ''}{name!r} {NO_NAMESPACE}\n"
    assert (result.exit_code, result.stdout, result.stderr, cluster.asked, cluster.calls) == (2, "", told, [], [])
