"""The blocks of the pages about neighbours, as a reader copies them."""

import re
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]

DOCS = Path(__file__).parents[1] / "docs"
ABOUT_NEIGHBOURS = (DOCS / "neighbours.md", DOCS / "workloads.md")


def blocks(page: Path, language: str) -> list[str]:
    """The texts of the page's blocks of this language, in order."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def documented_objects() -> list[Json]:
    """Every object in the YAML blocks of these pages. Raises yaml.YAMLError for a block that is none."""
    texts = [text for page in ABOUT_NEIGHBOURS for text in blocks(page, "yaml")]
    return [found for text in texts for found in yaml.safe_load_all(text)]


def documented(kind: str) -> Json:
    """The one object of this kind."""
    [found] = [each for each in documented_objects() if each["kind"] == kind]
    return found
