"""Tests of the package's console scripts: missing packages, completion, and `vcuda-webhook check` with grants."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.reviews import card_pod
from tests.processes import SCRIPTS

pytestmark = pytest.mark.slow

PROGRAMS = ("vcuda-webhook", "vcuda-controller", "vcuda-certs", "kubectl-gpuquota")


def python(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run((sys.executable, "-c", text), capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("program", ["webhook", "controller", "certs"])
def test_a_server_without_the_packages_of_the_extra_names_it(program: str) -> None:
    """If sys.modules has None for a package, its import fails as if the package were not installed."""
    missing = "import sys; sys.modules.update(kubernetes=None, flask=None, cryptography=None)"
    done = python(f"{missing}; from vcuda import programs; programs.{program}()")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"Error: vcuda-{program} needs the package ")
    assert done.stderr.endswith(". Install vcuda-quota[server]\n")
    assert done.stderr.count("\n") == 1


def test_a_missing_module_of_our_own_is_not_mistaken_for_a_missing_package() -> None:
    done = python("from vcuda import programs; programs.load('controller.nothing', 'x')")
    assert "ModuleNotFoundError: No module named 'controller.nothing'" in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_writes_the_completion_of_a_shell(program: str, shell: str) -> None:
    variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
    env = {**os.environ, variable: f"{shell}_source"}
    done = subprocess.run(SCRIPTS / program, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert variable in done.stdout
    assert program in done.stdout


def complete(*words: str) -> list[str]:
    command = (str(SCRIPTS / "kubectl_complete-gpuquota"), *words)
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "suggested", "directive"),
    [
        (("",), ["doctor", "explain", "nodes", "rejections", "why"], ":4"),
        (("wh",), ["why"], ":4"),
        (("--o",), ["--output"], ":4"),
        (("-o", ""), ["table", "wide", "json", "yaml"], ":4"),
        (("explain", "-f", ""), [], ":0"),
        (("explain", "-o", "j"), ["json"], ":4"),
    ],
)
def test_kubectl_gets_the_words_that_may_follow(words: tuple[str, ...], suggested: list[str], directive: str) -> None:
    """The last line is a number in cobra's format. 4 means that no file names may follow, and 0 that they may."""
    *lines, last = complete(*words)
    assert ([line.partition("\t")[0] for line in lines], last) == (suggested, directive)


@pytest.mark.parametrize(("until", "decision"), [("2999-12-31", "admitted"), ("2000-01-01", "rejected")])
@pytest.mark.parametrize("environment", [{}, {"PYTHONTZPATH": ""}], ids=["zones of the system", "zones of the package"])
def test_check_decides_by_the_present_grants(
    tmp_path: Path, until: str, decision: str, environment: dict[str, str]
) -> None:
    """The image has no time zone database, so the package must have its own."""
    quota, pod = tmp_path / "gpuquota.yaml", tmp_path / "pod.yaml"
    entry = {"quota": {"M40": 1}, "time_zone": "Europe/Berlin", "grants": [{"M40": 1, "until": until}]}
    quota.write_text(json.dumps({"team-a": entry}))
    pod.write_text(json.dumps(card_pod("train", "team-a", cards=2)))
    command = (SCRIPTS / "vcuda-webhook", "check", "--quota", quota, "-o", "json", pod)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    [row] = json.loads(done.stdout)["objects"]
    assert (row["decision"], done.stderr) == (decision, "")
    if decision == "admitted":
        assert "a grant ends at 3000-01-01 00:00 Europe/Berlin" in row["reason"]
