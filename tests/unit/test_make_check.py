"""Tests that `make check`, the command before each commit, runs lint and the fast tests of every kind."""

import shlex
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def output(*command: str) -> str:
    return subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout


def test_make_check_runs_lint_and_selects_the_fast_tests_of_both_folders() -> None:
    planned = output("make", "--dry-run", "--assume-old=.venv/installed", "check").splitlines()
    assert any(line.endswith("/mypy") for line in planned)
    [pytest_line] = [line for line in planned if "/pytest " in line]
    selected = output(*shlex.split(pytest_line), "--collect-only", "--quiet")
    for file, fast in {
        "tests/unit/test_reservations.py": True,
        "tests/unit/test_validate.py": True,
        "tests/integration/test_server.py": True,
        "tests/integration/test_fuzz_wire.py": False,
        "tests/unit/test_reservation_machine.py": False,
    }.items():
        assert (f"\n{file}::" in f"\n{selected}") is fast, file
