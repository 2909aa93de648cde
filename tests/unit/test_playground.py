"""Tests of the playground: its texts, the check for missing programs, and what its teams do."""

from collections import Counter
from pathlib import Path

import pytest

from examples.playground.cluster import SHARES_PER_CARD, nodes
from examples.playground.programs import BUILDS, ETCD, KUBERNETES, KWOK, PROGRAMS, ROOT, find, missing_text
from examples.playground.teams import (
    ALL,
    SHARED,
    YOURS,
    RunJob,
    job_manifest,
)
from examples.playground.texts import COMMANDS, verdict, welcome
from tests.tables import cases
from vcuda.placement.registers import read_registers

PROGRAM_NAMES = [program.name for program in PROGRAMS]


def test_the_welcome_has_the_page_the_environment_and_eight_commands() -> None:
    lines = welcome(Path("/play"), Path("/play/bin"), "http://127.0.0.1:8088/").splitlines()
    indented = [line.strip() for line in lines if line.startswith("    ")]
    page, *exports = indented[:3]
    assert page == "http://127.0.0.1:8088/"
    assert exports[0].startswith("export KUBECONFIG=/play/kubeconfig ")
    assert exports[1] == "export PATH=/play/bin:$PATH"
    assert indented[3:] == [command.typed for command in COMMANDS]
    assert len(COMMANDS) == 8
    for team in ALL:
        assert any(line.startswith(f"{team.namespace} ") for line in lines)


@cases(
    "has_go, assets, advice",
    without_Go=(False, None, "Install Go 1.26 or later (https://go.dev/dl)"),
    a_directory_without_the_programs=(True, "/opt/assets", "Unset KUBEBUILDER_ASSETS, which is /opt/assets"),
)
def test_every_missing_program_has_one_line_that_says_how_to_provide_it(
    has_go: bool, assets: str | None, advice: str
) -> None:
    first, *others = missing_text(PROGRAMS, has_go=has_go, assets=assets).splitlines()
    assert advice in first
    assert [line.strip().partition(":")[0] for line in others] == PROGRAM_NAMES


def test_go_is_not_recommended_for_a_program_that_it_does_not_build() -> None:
    [setpriv] = [program for program in PROGRAMS if program.name == "setpriv"]
    assert missing_text([setpriv], has_go=False, assets=None).splitlines() == [
        "Some programs are missing. Provide each:",
        "  setpriv: install the package util-linux",
    ]


def test_a_program_is_found_in_the_first_directory_and_kwok_only_with_its_stages(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory, names in ((first, ("etcd", "kwok")), (second, ("etcd", "kubectl"))):
        directory.mkdir()
        for name in names:
            (directory / name).touch(mode=0o755)
    path = [str(first), str(second)]
    assert find(path) == {"etcd": first / "etcd", "kubectl": second / "kubectl"}
    (first / "stages").mkdir()
    assert find(path)["kwok"] == first / "kwok"


def test_the_versions_in_the_advice_are_those_that_are_built() -> None:
    scripts = [(ROOT / command[0]).read_text() for command in BUILDS]
    for version in (KUBERNETES.removeprefix("v"), ETCD.removeprefix("v"), f"kwok={KWOK}"):
        assert any(version in script for script in scripts), version


def test_a_job_ends_and_is_deleted_even_if_none_of_its_pods_is_admitted() -> None:
    spec = job_manifest(RunJob("team-lab", "sweep-1", {}, 2, 30))["spec"]
    assert spec["activeDeadlineSeconds"] > 40
    assert spec["ttlSecondsAfterFinished"] > 0
    assert {*spec["template"]["metadata"]["annotations"].values()} == {"30s"}


def test_the_quotas_fit_the_cards_even_after_the_proposed_edit() -> None:
    limits = Counter[str](SHARED)
    for team in ALL:
        limits.update(team.quota)
    found = list(nodes())
    plain = sum(int(node["metadata"]["labels"].get("nvidia.com/gpu.count", 0)) for node in found)
    registers = [read_registers(node["metadata"]["annotations"], lambda *_: None) for node in found]
    shared = sum(len(register) for node in registers for register in node.values())
    assert (plain, shared) == (8, 16)
    assert limits["A100"] <= plain
    assert limits["T4"] - YOURS.quota["T4"] + 4 <= shared
    offered = sum(int(node["status"]["allocatable"]["nvidia.com/gpu"]) for node in found)
    assert offered == plain + shared * SHARES_PER_CARD


@pytest.mark.parametrize(
    ("running", "rejected", "missing"),
    [
        (3, 1, None),
        (0, 1, "no pod of a team was admitted"),
        (3, 0, "no pod of a team was rejected"),
        (0, 0, "no pod of a team was admitted"),
    ],
)
def test_a_run_that_showed_no_admission_or_no_rejection_has_failed(
    running: int, rejected: int, missing: str | None
) -> None:
    assert verdict(running, rejected) == missing


def test_the_page_has_the_teams_and_the_commands_as_they_are_printed() -> None:
    page = (ROOT / "docs/playground.md").read_text().splitlines()
    printed = welcome(Path("/play"), Path("/play/bin"), "http://127.0.0.1:8088/").splitlines()
    teams = [line for line in printed if line.startswith(("NAMESPACE ", *(team.namespace for team in ALL)))]
    assert [line for line in [*teams, *(command.typed for command in COMMANDS)] if line not in page] == []
