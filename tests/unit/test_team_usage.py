"""Tests of the usage of teams: reports, tables, the usage page, metrics and promised cards."""

import csv
import itertools
import json
from dataclasses import replace

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from controller.metrics import UsageCollector
from controller.recount.publisher import UNHURRIED_SECONDS, Publisher, limits_of
from controller.recount.team_usages import TeamUsages
from controller.ui.export import usage_csv
from controller.ui.leading import cluster_cards
from tests.api_double import ApiDouble
from tests.gpuquota import Cluster, run
from tests.quota_map import store_quota
from tests.replicas import Clock
from tests.unit.test_ledger_report import used
from tests.unit.test_plugin_why import deployment
from vcuda.errors import ApiError
from vcuda.ledger.ledger import FULL, Ledger, Terminating
from vcuda.ledger.report import ModelUse, NamespaceUse, TeamUse
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Team, Usage, all_models
from vcuda.quota.shortage import Shortage, exceeded
from vcuda.quota.well_known import USAGE_KEY

LIMITS = {"M40": Limit(800), "P100": Limit(400)}
VISION = Team("vision", LIMITS, Limit(1000))
SHARED = NamespaceQuota(LIMITS, team=VISION)
LEDGERS = {"a": Ledger({"M40": Charge(500)}), "b": Ledger({"M40": Charge(150), "P100": Charge(100)}), "c": Ledger()}


def reports() -> dict[str, NamespaceUse]:
    """Return the reports of three namespaces of the team, each with the newest figures of the team."""
    teams = TeamUsages()
    shared = [teams.record(namespace, VISION, ledger.usages()) for namespace, ledger in LEDGERS.items()][-1]
    assert shared
    uses = {namespace: used(ledger, quota=SHARED) for namespace, ledger in LEDGERS.items()}
    return {namespace: replace(use, namespace=namespace).within(shared) for namespace, use in uses.items()}


# Tests of the report


def test_the_usage_of_a_team_is_the_sum_over_its_namespaces() -> None:
    use = reports()["a"]
    assert use.team == TeamUse(
        "vision",
        (
            ModelUse("M40", limit=8, used=6.5, pending=0, available=1.5),
            ModelUse("P100", limit=4, used=1, pending=0, available=3),
        ),
        ModelUse("total", limit=10, used=7.5, pending=0, available=2.5),
    )


def test_the_usage_of_other_namespaces_is_one_number() -> None:
    """A reader of one namespace must not learn the names and figures of the others."""
    use = reports()["a"]
    assert use.team
    assert [use.used_by_others(each) for each in use.team.limits] == [1.5, 1, 2.5]
    assert not [field for field in ("b", "c") if f'"{field}"' in repr(use)]


def test_no_more_is_available_in_a_namespace_than_its_team_has_free() -> None:
    assert [each.available for each in reports()["a"].models] == [1.5, 3]
    assert [each.available for each in reports()["c"].models] == [1.5, 3]


def test_a_namespace_whose_team_is_nearly_full_has_no_room() -> None:
    own = used(Ledger(), quota=NamespaceQuota({"P100": Limit(400)}))
    nearly_full = TeamUse.of(VISION, Ledger({"M40": Charge(750)}).usages())
    assert own.has_room
    assert not replace(own, team=nearly_full).has_room


def test_a_namespace_that_changes_its_team_counts_in_one_team() -> None:
    teams, ocean = TeamUsages(), Team("ocean", LIMITS)
    usage = LEDGERS["a"].usages()
    before = teams.record("a", VISION, usage)
    teams.record("b", VISION, usage)
    after = teams.record("a", ocean, usage)
    assert before
    assert after
    assert (after.models[0].used, teams.members("vision"), teams.members("ocean")) == (5, ["b"], ["a"])
    assert teams.record("b", None, {}) is None
    assert teams.members("vision") == []
    assert teams.current(before) is before


def test_the_sums_of_a_team_follow_each_namespace_and_read_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A team may have thousands of namespaces, and each recount of one of them changes the sums."""
    teams, added = TeamUsages(), list[int]()

    def counted(usages: list[Usage]) -> Usage:
        added.append(len(usages))
        return all_models(usages)

    monkeypatch.setattr("controller.recount.team_usages.all_models", counted)
    for number in range(200):
        teams.record(f"m-{number}", VISION, Ledger({"M40": Charge(1)}).usages())
    for number in range(0, 200, 2):
        teams.record(f"m-{number}", VISION, Ledger({"P100": Charge(1)}).usages())
    use = teams.record("m-1", VISION, {})
    assert use
    assert [each.used for each in use.limits] == [0.99, 1, 1.99]
    assert added == [2] * 300


def test_a_namespace_with_too_many_deleted_pods_does_not_fill_its_team() -> None:
    """Its ledger has a charge that is larger than every cluster. No pod uses this charge."""
    full = {f"M40{FULL}600": Terminating("M40", Charge(10**7), 600), "x": Terminating("M40", Charge(100), 30)}
    use = TeamUsages().record("a", VISION, Ledger(terminating=full).without_fill().usages())
    assert use
    assert (use.models[0].used, use.models[0].available) == (1, 7)


# Tests of the publication


def test_the_other_reports_of_a_team_follow_a_change_about_once_a_second_in_all(api: ApiDouble) -> None:
    clock, teams = Clock(), TeamUsages()
    publisher = Publisher(api.kube, clock.monotonic, teams=teams)
    names, numbers = [f"m-{number}" for number in range(20)], itertools.count()

    def report(name: str, cores: int) -> None:
        ledger = Ledger({"M40": Charge(cores)})
        use = replace(used(ledger, quota=SHARED), namespace=name, team=teams.record(name, VISION, ledger.usages()))
        publisher.report(name, use)

    def turns() -> list[str]:
        """Take all due turns, and return the namespaces whose reports were written."""
        before = {path: each["data"] for path, each in api.objects.items()}
        publisher.reconciler.queue.add(end := f"end-{next(numbers)}")
        while (key := publisher.reconciler.queue.next()) != end:
            assert key
            publisher.reconciler.turn(key)
        return [path.split("/")[4] for path in api.objects if api.objects[path]["data"] != before.get(path)]

    for name in names:
        report(name, 10)
    while turns():
        clock.pass_by(30)
    clock.pass_by(30)
    report("m-0", 20)
    assert turns() == ["m-0"]
    clock.pass_by(1)
    assert sorted(turns()) == sorted(names[1:])
    clock.pass_by(UNHURRIED_SECONDS)
    report("m-0", 30)
    assert turns() == ["m-0"]
    clock.pass_by(len(names) - UNHURRIED_SECONDS - 1)
    assert turns() == []
    clock.pass_by(3)
    turns()
    clock.pass_by(1)
    turns()
    [path] = [path for path in api.objects if "/m-7/" in path]
    assert json.loads(api.objects[path]["data"][USAGE_KEY])["team"]["models"][0]["used"] == 2.2


def test_a_changed_limit_of_a_team_is_published_at_once() -> None:
    use = reports()["a"]
    raised = use.within(TeamUse.of(Team("vision", {"M40": Limit(900)}), {}))
    assert limits_of(use) != limits_of(raised)


# Tests of the metrics, the files and the page


def test_the_metrics_have_the_usage_of_each_team_once() -> None:
    registry = CollectorRegistry()
    memory = Team("memory", {"P100": Limit(None, 1024, 512)})
    other = replace(used(Ledger()), team=TeamUse.of(memory, Ledger({"P100": Charge(0, 256)}).usages()))
    registry.register(UsageCollector(lambda: {**reports(), "z": other, "alone": used(Ledger())}, dict))

    def figure(name: str, team: str, model: str) -> float | None:
        return registry.get_sample_value(f"vcuda_quota_team_{name}", {"team": team, "model": model})

    assert [figure(name, "vision", "M40") for name in ("limit_cards", "used_cards")] == [8, 6.5]
    assert [figure(name, "vision", "total") for name in ("limit_cards", "used_cards")] == [10, 7.5]
    assert [figure(name, "memory", "P100") for name in ("limit_cards", "limit_memory_bytes")] == [None, 2**30]
    assert figure("used_memory_bytes", "memory", "P100") == 2**28


def test_the_csv_file_has_the_team_of_each_namespace_and_rows_for_the_team() -> None:
    rows = list(csv.DictReader(usage_csv([*reports().values(), used(Ledger())]).splitlines()))
    assert [(row["namespace"], row["team"], row["model"], row["used"]) for row in rows] == [
        *(("a", "vision", "M40", "5"), ("a", "vision", "P100", "0")),
        *(("b", "vision", "M40", "1.5"), ("b", "vision", "P100", "1")),
        *(("c", "vision", "M40", "0"), ("c", "vision", "P100", "0")),
        *(("team-a", "", "M40", "0"), ("team-a", "", "P100", "0")),
        *(("", "vision", "M40", "6.5"), ("", "vision", "P100", "1")),
    ]


def test_the_limits_of_a_team_count_once_in_the_sum_of_the_quotas() -> None:
    alone = {"team-a": used(Ledger())}
    assert [(each.model, each.limits, each.used) for each in cluster_cards({}, {**reports(), **alone}, [])] == [
        ("M40", 16, 6.5),
        ("P100", 6.5, 1),
    ]


def test_the_limits_of_a_team_are_promised_once(cluster: Cluster) -> None:
    teams = '{vision: {namespaces: [a, b, "dev-*"], quota: {A100: 4}}}'
    store_quota(cluster, "{a: {quota: {A100: 2}}, alone: {quota: {A100: 1}}}", gpu_teams=teams)
    for name in ("a", "b", "dev-1", "alone"):
        cluster.store(f"/api/v1/namespaces/{name}", {"metadata": {"name": name}})
    [model] = json.loads(run("nodes", "-o", "json").stdout)["models"]
    assert (model["model"], model["promised"]) == ("A100", 5)


# Tests of the plugin


def test_why_shows_what_other_namespaces_of_the_team_use(cluster: Cluster) -> None:
    deployment(cluster)
    shared = replace(used(LEDGERS["a"], quota=SHARED), namespace="team-a").within(
        reports()["a"].team or TeamUse("", ())
    )
    cluster.publish("team-a", text=msgspec.json.encode(shared).decode())
    usage = Usage(Charge(500), others=Charge(150))
    over = exceeded("team-a", Shortage("M40", Charge(200), usage, Limit(800), team="vision"))
    cluster.rejection = ApiError(403, over)
    [missing] = json.loads(run("-n", "team-a", "why", "deploy/train", "-o", "json").stdout)["missing"]
    assert (missing["model"], missing["needed"], missing["team"], missing["others"]) == ("M40", 0.5, "vision", 1.5)
    assert "other namespaces of team vision use 1.5 cards" in run("-n", "team-a", "why", "deploy/train").stdout


def publish(cluster: Cluster) -> None:
    for namespace, use in {**reports(), "team-a": used(Ledger())}.items():
        cluster.publish(namespace, text=msgspec.json.encode(use).decode())


def test_a_namespace_of_a_team_has_its_own_rows_and_the_rows_of_its_team(cluster: Cluster) -> None:
    publish(cluster)
    assert run("-n", "a").stdout.splitlines()[1:] == [
        "a (team vision)  M40    5                    1.5   8      [############--------]  0",
        "a (team vision)  P100   0                    3     4      [--------------------]  0",
        "team vision      M40    6.5 (1.5 by others)  1.5   8      [################----]  0",
        "team vision      P100   1 (1 by others)      3     4      [#####---------------]  0",
        "team vision      total  7.5 (2.5 by others)  2.5   10     [###############-----]  0",
    ]


@pytest.mark.parametrize("flag", ["-A"])
def test_all_namespaces_are_grouped_by_team_and_the_total_has_the_limits_of_a_team_once(
    cluster: Cluster, flag: str
) -> None:
    publish(cluster)
    lines = [line.split("  ") for line in run(flag).stdout.splitlines()[1:]]
    assert [line[0] for line in lines] == [
        *["team-a"] * 2,
        *["a (team vision)"] * 2,
        *["b (team vision)"] * 2,
        *["c (team vision)"] * 2,
        *["team vision"] * 3,
        *["total"] * 2,
    ]
    shown = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert [row[1:5] for row in shown[-2:]] == [["M40", "6.5", "9.5", "16"], ["P100", "1", "5.5", "6.5"]]
