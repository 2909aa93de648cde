"""Tests of the table of bounds in docs/security.md: each row must name an existing constant and an existing test."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADING = "## What a tenant controls is bounded\n"
NAMED = re.compile(r"`([a-z_.]+\.[A-Z_]+)`, `(test_\w+)` \|$")


def rows() -> list[str]:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    section = text.partition(HEADING)[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][1:]


def all_tests() -> set[str]:
    files = (ROOT / "tests").rglob("test_*.py")
    return {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.split(" | ")[0].strip("| "))
def test_a_bound_names_a_constant_and_a_test_that_exist(row: str) -> None:
    named = NAMED.search(row)
    assert named
    module, _, constant = named[1].rpartition(".")
    assert getattr(importlib.import_module(module), constant)
    assert named[2] in all_tests()


def test_the_table_has_the_bounds_of_every_part() -> None:
    parts = {found[1].partition(".")[0] for row in rows() if (found := NAMED.search(row))}
    assert parts == {"webhook", "controller", "vcuda"}
    assert len(rows()) > 20, "an empty table would pass the test above"
