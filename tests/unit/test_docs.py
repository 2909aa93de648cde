"""Tests of the links, the navigation, and the lists and tables of README, CHANGELOG, CONTRIBUTING and docs/.

The Chinese pages must have the headings, commands and tables of the English pages.
"""

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OF_THE_SITE = tuple(sorted(DOCS.rglob("*.md")))
PAGES = (*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")), *OF_THE_SITE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^ *```")
BLOCK = re.compile(r"[-*] |\d+\. |\| ")
OF_A_BLOCK = re.compile(rf"{BLOCK.pattern}|\||  |#")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


pages = pytest.mark.parametrize("page", PAGES, ids=name_of)
pages_of_the_site = pytest.mark.parametrize("page", OF_THE_SITE, ids=name_of)


def prose(page: Path) -> list[str]:
    """Return the lines of the page. The lines of code blocks are replaced by empty lines."""
    lines, in_code = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = FENCE.match(line) is not None
        lines.append("" if fence or in_code else line)
        in_code = in_code != fence
    return lines


def slugs(heading: str) -> set[str]:
    """Return two anchors of a heading: on GitHub, and on the mkdocs site, where one dash replaces several in a row."""
    github = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
    return {github, re.sub(r"-+", "-", github)}


def anchors(page: Path) -> set[str]:
    """Return the anchors that are equal on GitHub and on the mkdocs site. Links may use only these anchors."""
    headings = [found[1] for line in prose(page) if (found := re.match(r"#+ (.+)", line))]
    return {min(of_heading) for heading in headings if len(of_heading := slugs(heading)) == 1}


def relative_links(page: Path) -> Iterator[tuple[Path, str]]:
    for target in LINK.findall("\n".join(prose(page))):
        path, _, anchor = target.partition("#")
        if not re.match(r"[a-z]+:", target):
            yield (page.parent / path if path else page), anchor


@pages
def test_every_named_file_of_the_code_exists(page: Path) -> None:
    named = re.findall(r"`((?:webhook|controller|certs|vcuda|tests|tools|bench|manifests)/[\w./-]*)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", [DOCS / "recipes.md", DOCS / "architecture.md"], ids=name_of)
def test_every_name_of_the_code_is_in_a_file_that_the_same_step_names(page: Path) -> None:
    missing = []
    for step in re.split(r"\n(?=\d+\. |\||#|\n)", page.read_text()):
        words = re.findall(r"`([^`]+)`", step)
        texts = [(ROOT / word).read_text() for word in words if (ROOT / word).is_file()]
        names = {word for word in words if re.fullmatch(r"\w*(?:[a-z]_|_[a-z]|[a-z][A-Z])\w*|[A-Z]\w+", word)}
        missing += [name for name in names if texts and not any(re.search(rf"\b{name}", each) for each in texts)]
    assert missing == []


@pages
def test_every_relative_link_and_anchor_resolves(page: Path) -> None:
    for target, anchor in relative_links(page):
        assert target.is_file(), target
        assert not anchor or anchor in anchors(target), f"{target}#{anchor}"


@pages_of_the_site
def test_a_page_of_the_site_links_to_nothing_outside_the_site(page: Path) -> None:
    """`make docs` fails if a linked file is not on the site."""
    assert [target for target, _ in relative_links(page) if not target.resolve().is_relative_to(DOCS)] == []


@pages_of_the_site
def test_every_list_and_every_table_begins_after_an_empty_line(page: Path) -> None:
    """Without an empty line before it, mkdocs (unlike GitHub) renders a list as text of the paragraph before it."""
    lines = ["", *prose(page)]
    broken = [line for before, line in pairwise(lines) if BLOCK.match(line) and before and not OF_A_BLOCK.match(before)]
    assert broken == []


def test_every_page_of_docs_is_in_the_navigation_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = sorted(pages_of(config["nav"]))
    assert named == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def pages_of(nav: object) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
        return
    assert isinstance(nav, list)
    for entry in nav:
        for below in entry.values():
            yield from pages_of(below)


TRANSLATED = {
    "README.md": "README.zh-CN.md",
    "docs/install.md": "docs/zh-CN/install.md",
    "docs/users.md": "docs/zh-CN/users.md",
}
CODE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"\s+#\s.*$|^\s*#\s.*$", re.MULTILINE)


def code_of(page: Path) -> list[tuple[str, str]]:
    """Return the language and the lines of each code block. Comments are left out, because they are translated."""
    return [(language, COMMENT.sub("", code)) for _, language, code in CODE.findall(page.read_text(encoding="utf-8"))]


def levels_of(page: Path) -> list[str]:
    return [line.split()[0] for line in prose(page) if re.match(r"#+ ", line)]


def rows_of(page: Path) -> list[tuple[int, list[str]]]:
    """Return the number of cells, and the words in backticks in the first cell, of each table row of a page."""
    rows = [line.strip("|").split("|") for line in prose(page) if line.startswith("|")]
    return [(len(cells), re.findall(r"`([^`]*)`", cells[0])) for cells in rows]


@pytest.mark.parametrize(("english", "chinese"), TRANSLATED.items(), ids=[*TRANSLATED])
@pytest.mark.parametrize("parts_of", [levels_of, code_of, rows_of], ids=["headings", "commands", "tables"])
def test_a_chinese_page_has_the_parts_of_the_english_one(
    english: str, chinese: str, parts_of: Callable[[Path], object]
) -> None:
    assert parts_of(ROOT / english)
    assert parts_of(ROOT / chinese) == parts_of(ROOT / english)
