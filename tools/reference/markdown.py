"""Formats tables and code as Markdown for GitHub."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown. A line break in a cell becomes a space."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def code(text: str) -> str:
    """Return ``text`` as inline code; empty for an empty text."""
    if not text:
        return ""
    fence = "``" if "`" in text else "`"
    padding = " " if "`" in text else ""
    return f"{fence}{padding}{text}{padding}{fence}"


def listed(words: Iterable[str]) -> str:
    """Return ``words`` as inline code, separated by commas."""
    return ", ".join(map(code, words))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
