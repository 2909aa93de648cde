"""Tests that each row of the tables in docs/requests.md is proved by a test, which tests/data/requests.yaml names."""

import re
from pathlib import Path

import pytest
import yaml

from vcuda.quota.allowances import Allowance

ROOT = Path(__file__).parents[2]
TESTS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "unit").glob("test_*.py")}
HEAD = re.compile(r"^\| [^|]+ \| it is charged \|$")

PROOF = yaml.safe_load((ROOT / "tests" / "data" / "requests.yaml").read_text())


def page() -> str:
    return (ROOT / "docs" / "requests.md").read_text(encoding="utf-8")


def rows() -> list[str]:
    """Return the rows of the tables that have a column "it is charged", each without its first bar."""
    lines = page().splitlines()
    found = []
    for at in (at for at, line in enumerate(lines) if HEAD.match(line)):
        end = lines.index("", at)
        found += [line.removeprefix("| ") for line in lines[at + 2 : end]]
    return found


def test_every_row_has_its_tests_and_every_test_its_row() -> None:
    proven = {row: [start for start in PROOF if row.startswith(start)] for row in rows()}
    assert {row for row, starts in proven.items() if len(starts) != 1} == set()
    assert PROOF.keys() - {starts[0] for starts in proven.values()} == set()


@pytest.mark.parametrize("start", PROOF)
def test_the_tests_of_a_row_exist(start: str) -> None:
    assert [name for name in PROOF[start] if not (name in TESTS or has_function(name))] == []


def test_the_page_lists_every_permission_of_a_quota_entry() -> None:
    section = page().partition("## What can be allowed\n")[2]
    first_cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    assert {name for cell in first_cells for name in re.findall(r"`([a-z-]+)`", cell)} == {*Allowance} | {"allow"}


def has_function(name: str) -> bool:
    return any(f"def {name}(" in text for text in TESTS.values())
