"""Measures how easy the code is to maintain: sizes of files and functions, and names that are defined twice.

`python -m tools.house` prints the numbers. With `--check`, as in `make lint`, it fails if a number exceeds its bound.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PRODUCT = ("webhook", "vcuda", "controller", "certs")
OTHERS = ("tests", "tools", "bench", "examples")

MAX_PRODUCT_LINES = 39_030
"""The maximum number of lines of the product's code. A commit that raises this number must say why."""

MAX_CREATE_MODULES = 31
"""The maximum number of modules that run when a pod is created. A test traces those that docs/architecture.md lists."""

MAX_FILE_LINES = 420
"""The maximum number of lines of a file, also of tests and tools."""

MAX_FUNCTION_LINES = 25
"""The maximum for the 90th percentile of lines per function."""

SMALL = 5
"""A helper with one caller and at most this many lines may be clearer inside the caller."""

PARALLEL = frozenset({"mutate", "validate", "read", "rotate", "status"})
"""The public names that two modules may define. For example, the reviews of pods and of claims both define
``mutate``."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Figure(NamedTuple):
    """One measurement: its name, its value as text, its bound, and whether the value is within the bound."""

    name: str
    value: str
    bound: str
    holds: bool


def modules(package: str) -> list[Path]:
    """Return the paths of all Python files in one top-level folder of the repository, for example ``webhook``."""
    return sorted((ROOT / package).rglob("*.py"))


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def lines_of(function: Function) -> int:
    """Return the number of lines from ``def`` to the end of the body, with the docstring."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def ninth_of_ten(sizes: Sequence[int]) -> int:
    """Return the 90th percentile of ``sizes``."""
    return round(statistics.quantiles(sizes, n=10)[8])


def public_names(tree: ast.Module) -> set[str]:
    """Return the names of public classes and functions at the top level of a module, except ``main``."""
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef | Function)}
    return {name for name in names if not name.startswith("_")} - {"main"}


def class_names(tree: ast.Module) -> set[str]:
    """Return the names of all classes in a module, without leading underscores."""
    return {node.name.lstrip("_") for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def repeated(names_of_modules: Iterable[set[str]]) -> list[str]:
    """Return the names that more than one module defines."""
    counts = Counter(name for names in names_of_modules for name in names)
    return sorted(name for name, count in counts.items() if count > 1)


def small_helpers(tree: ast.Module) -> list[str]:
    """Return the names of private functions that have at most `SMALL` lines, and that their module uses only once."""
    named = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )
    private = [each for each in functions(tree) if each.name.startswith("_") and not each.name.endswith("__")]
    return [each.name for each in private if lines_of(each) <= SMALL and named[each.name] == 1]


def path_lengths() -> list[int]:
    """Return how many modules docs/architecture.md lists for a pod's creation, and for the recount of a ledger."""
    _, *sections = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("### The modules of ")
    numbered = (section.partition("\n#")[0].splitlines() for section in sections)
    return [sum(line[:1].isdigit() for line in lines) for lines in numbered]


def figures() -> list[Figure]:
    texts = {path: path.read_text(encoding="utf-8") for package in PRODUCT for path in modules(package)}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    sizes = {path: len(text.splitlines()) for path, text in texts.items()}
    lines = sum(sizes.values())
    others = {path: len(path.read_text(encoding="utf-8").splitlines()) for part in OTHERS for path in modules(part)}
    files = sizes | others
    largest = max(files, key=lambda path: files[path])
    ninth = ninth_of_ten([lines_of(each) for tree in trees.values() for each in functions(tree)])
    classes = repeated(map(class_names, trees.values()))
    twice = [name for name in repeated(map(public_names, trees.values())) if name not in PARALLEL]
    create, recount = path_lengths()
    tests = sum(size for path, size in others.items() if path.is_relative_to(ROOT / "tests"))
    return [
        Figure("product files", str(len(sizes)), "no bound", holds=True),
        Figure("product lines", str(lines), f"at most {MAX_PRODUCT_LINES}", lines <= MAX_PRODUCT_LINES),
        Figure(
            "largest file",
            f"{files[largest]} ({largest.relative_to(ROOT)})",
            f"at most {MAX_FILE_LINES}",
            files[largest] <= MAX_FILE_LINES,
        ),
        Figure("function, 90th percentile", str(ninth), f"at most {MAX_FUNCTION_LINES}", ninth <= MAX_FUNCTION_LINES),
        Figure("class names defined twice", ", ".join(classes) or "none", "none", not classes),
        Figure("public names defined twice", ", ".join(twice) or "none", "none", not twice),
        Figure(
            "small helpers with one caller", str(sum(len(small_helpers(t)) for t in trees.values())), "no bound", True
        ),
        Figure("modules of a create", str(create), f"at most {MAX_CREATE_MODULES}", create <= MAX_CREATE_MODULES),
        Figure("modules of a recount", str(recount), "no bound", holds=True),
        Figure("test lines", str(tests), "no bound", holds=True),
    ]


def main() -> None:
    """Print the measured numbers. With ``--check``, exit with status 1 if a number exceeds its bound."""
    found = figures()
    width = max(len(figure.name) for figure in found)
    for figure in found:
        print(f"{figure.name:<{width}}  {figure.value}  ({figure.bound}){'' if figure.holds else '  <-'}")
    if "--check" in sys.argv[1:] and not all(figure.holds for figure in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
