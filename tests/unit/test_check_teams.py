"""Tests of the command `check` with teams: shared limits, stored pods, and edits that move namespaces."""

from pathlib import Path

import yaml

from tests.builders import Manifest, pod_of_cores
from tests.unit.test_check import cards, compare, decisions, rows

TEAMS = "vision: {namespaces: [vision-train, 'vision-dev-*'], quota: {M40: 2}}"


def in_namespace(name: str, manifest: Manifest) -> Manifest:
    return {**manifest, "metadata": {**manifest["metadata"], "namespace": name}}


def with_teams(entries: str = "{}", teams: str = TEAMS) -> str:
    return yaml.safe_dump({"kind": "ConfigMap", "data": {"gpu_quota": entries, "gpu_teams": teams}})


def test_a_namespace_that_an_edit_moves_is_shown_with_its_stored_pods(tmp_path: Path) -> None:
    """The stored pods come from the file of --nodes. So a member that only a beginning names is found too."""
    (tmp_path / "quota.yaml").write_text(with_teams(teams=TEAMS.replace("vision:", "sight:")))
    stored = in_namespace("vision-dev-1", pod_of_cores(100))
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text(yaml.safe_dump_all([stored]))
    result = compare(tmp_path, with_teams(), "--nodes", str(nodes))
    assert "vision-dev-1: moves from team vision to team sight and brings 1 card of M40" in result.stderr
    assert "vision-train" not in result.stderr
    assert ["gpu_teams.sight.namespaces", "-", "vision-train"] in [line.split() for line in result.stdout.splitlines()]


def test_the_namespaces_of_a_team_share_its_limits(tmp_path: Path) -> None:
    pods = [in_namespace(name, cards(1)) for name in ("vision-train", "vision-dev-1", "vision-dev-2", "team-a")]
    quota = with_teams("team-a: {quota: {M40: 1}}")
    found = rows(tmp_path, *pods, quota=quota)
    assert [row["decision"] for row in found] == ["admitted", "admitted", "rejected", "admitted"]
    told = "exceeded quota: M40 in team vision, requested: 1 card, used: 2 (this namespace 0, others 2), limited: 2"
    assert found[2]["reason"].startswith(told)


def test_the_entry_of_a_member_limits_it_before_its_team_does(tmp_path: Path) -> None:
    pods = [in_namespace("vision-train", cards(1)) for _ in range(2)]
    found = rows(tmp_path, *pods, quota=with_teams("vision-train: {quota: {M40: 1}}"))
    assert [row["decision"] for row in found] == ["admitted", "rejected"]
    assert "M40 in namespace vision-train, requested: 1 card, used: 1" in found[1]["reason"]


def test_the_stored_pods_of_other_members_use_the_limits_of_a_team(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes.yaml"
    stored = in_namespace("vision-dev-1", pod_of_cores(200))
    nodes.write_text(yaml.safe_dump_all([stored]))
    pod = in_namespace("vision-train", cards(1))
    assert decisions(tmp_path, pod, options=("--nodes", str(nodes)), quota=with_teams()) == ["1 rejected M40"]
