"""The Chinese pages must have the headings, commands and tables of the English pages."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRANSLATED = {
    "README.md": "README.zh-CN.md",
    "docs/install.md": "docs/zh-CN/install.md",
    "docs/users.md": "docs/zh-CN/users.md",
}
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"\s+#\s.*$|^\s*#\s.*$", re.MULTILINE)

pages = pytest.mark.parametrize(("english", "chinese"), TRANSLATED.items(), ids=[*TRANSLATED])


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def code_of(path: str) -> list[tuple[str, str]]:
    """Return the language and the lines of each code block, without comments, which are translated."""
    return [(language, COMMENT.sub("", code)) for _, language, code in BLOCK.findall(text_of(path))]


def prose_of(path: str) -> list[str]:
    return BLOCK.sub("", text_of(path)).splitlines()


def levels_of(path: str) -> list[str]:
    return [line.split()[0] for line in prose_of(path) if re.match(r"#+ ", line)]


def rows_of(path: str) -> list[tuple[int, list[str]]]:
    """Return for each table row of a page the number of cells, and the words in backticks in the first cell."""
    rows = [line.strip("|").split("|") for line in prose_of(path) if line.startswith("|")]
    return [(len(cells), re.findall(r"`([^`]*)`", cells[0])) for cells in rows]


@pages
def test_a_chinese_page_has_the_headings_of_the_english_one(english: str, chinese: str) -> None:
    assert levels_of(chinese) == levels_of(english)


@pages
def test_a_chinese_page_has_the_commands_of_the_english_one(english: str, chinese: str) -> None:
    assert code_of(english)
    assert code_of(chinese) == code_of(english)


@pages
def test_a_chinese_page_has_the_tables_of_the_english_one(english: str, chinese: str) -> None:
    assert rows_of(chinese) == rows_of(english)
