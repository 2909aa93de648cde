"""Counts what keeps the code easy to take over: sizes of files, imports, comments, names that mean two things.

Run `python -m tools.house` for the figures, `--check` to fail where one is past its bound (`make lint` does).
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PRODUCT = ("webhook", "vcuda", "controller", "certs")
MAX_FILE_LINES = 450
MIN_MEDIAN = 170
MAX_MEDIAN = 220
MAX_IMPORT_SHARE = 0.05
MIN_COMMENT_SHARE = 0.03
MAX_TEST_RATIO = 1.9


class Figure(NamedTuple):
    """One count, how it reads, and whether it is within its bound."""

    name: str
    value: str
    bound: str
    holds: bool


def modules(package: str) -> list[Path]:
    """Every Python file of a top-level folder."""
    return sorted((ROOT / package).rglob("*.py"))


def line_count(paths: list[Path]) -> int:
    """The lines of all files together."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def import_lines(tree: ast.Module) -> int:
    """Lines taken by import statements, wherever they stand."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in found)


def comment_lines(text: str) -> int:
    """Lines with a comment, alone or after code; directives for tools are none."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    directives = ("# noqa", "# type:", "# pragma")
    return len({token.start[0] for token in comments if not token.string.startswith(directives)})


def classes(path: Path) -> Iterator[str]:
    """The names of the classes that a module defines at its top level, or inside one another."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            yield node.name


def repeated_classes(paths: list[Path]) -> dict[str, list[str]]:
    """Class names that several modules define, with those modules; a leading underscore makes no other name."""
    where: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        for name in classes(path):
            where[name.lstrip("_")].append(str(path.relative_to(ROOT)))
    return {name: found for name, found in sorted(where.items()) if len(found) > 1}


def figures() -> list[Figure]:
    """Every count of the house."""
    product = [path for package in PRODUCT for path in modules(package)]
    sizes = {path: line_count([path]) for path in product}
    lines = sum(sizes.values())
    texts = [path.read_text(encoding="utf-8") for path in product]
    imports = sum(import_lines(ast.parse(text)) for text in texts) / lines
    comments = sum(map(comment_lines, texts)) / lines
    ratio = line_count(modules("tests")) / lines
    largest = max(sizes, key=lambda path: sizes[path])
    repeated = repeated_classes(product)
    # An __init__ with a docstring alone is no file that anybody opens.
    median = statistics.median(size for path, size in sizes.items() if path.name != "__init__.py")
    return [
        Figure("product files", str(len(product)), "no bound", holds=True),
        Figure("product lines", str(lines), "no bound", holds=True),
        Figure(
            "largest file",
            f"{sizes[largest]} ({largest.relative_to(ROOT)})",
            f"at most {MAX_FILE_LINES}",
            sizes[largest] <= MAX_FILE_LINES,
        ),
        Figure("median file", f"{median:g}", f"{MIN_MEDIAN} to {MAX_MEDIAN}", MIN_MEDIAN <= median <= MAX_MEDIAN),
        Figure("import lines", f"{imports:.1%}", f"under {MAX_IMPORT_SHARE:.0%}", imports < MAX_IMPORT_SHARE),
        Figure("comments", f"{comments:.1%}", f"at least {MIN_COMMENT_SHARE:.0%}", comments >= MIN_COMMENT_SHARE),
        Figure("tests : product", f"{ratio:.2f}", f"at most {MAX_TEST_RATIO}", ratio <= MAX_TEST_RATIO),
        Figure("class names defined twice", ", ".join(repeated) or "none", "none", not repeated),
    ]


def main() -> None:
    """Print the figures; with ``--check``, exit with 1 where one is past its bound."""
    found = figures()
    width = max(len(figure.name) for figure in found)
    for figure in found:
        print(f"{figure.name:<{width}}  {figure.value}  ({figure.bound}){'' if figure.holds else '  <-'}")
    if "--check" in sys.argv[1:] and not all(figure.holds for figure in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
