"""README's table of what is counted: each row has a test that shows it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = {path.name: path.read_text() for path in (ROOT / "tests" / "unit").glob("test_*.py")}
HEAD = "| a pod asks by | it is charged | test |\n|---|---|---|\n"


def rows() -> list[list[str]]:
    table = (ROOT / "README.md").read_text().split(HEAD)[1].split("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_every_row_of_what_is_counted_names_tests_that_there_are(row: list[str]) -> None:
    _, charged, tests = row
    names = re.findall(r"`(test_[a-z0-9_.]+)`", tests)
    assert charged
    assert names
    assert [name for name in names if not (name in TESTS or has_function(name))] == []


def has_function(name: str) -> bool:
    return any(f"def {name}(" in text for text in TESTS.values())
