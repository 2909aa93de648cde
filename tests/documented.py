"""Reads code blocks from the documentation, so that tests can check what a reader copies from there."""

import re
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]

DOCS = Path(__file__).parents[1] / "docs"
ABOUT_NEIGHBOURS = (DOCS / "neighbours.md", DOCS / "workloads.md")


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def documented_objects() -> list[Json]:
    """Return all objects in the YAML blocks of `ABOUT_NEIGHBOURS`. Raises yaml.YAMLError if a block is invalid."""
    texts = [text for page in ABOUT_NEIGHBOURS for text in blocks(page, "yaml")]
    return [found for text in texts for found in yaml.safe_load_all(text)]


def documented(kind: str) -> Json:
    [found] = [each for each in documented_objects() if each["kind"] == kind]
    return found
