"""Parses the product's source code, and finds texts and calls in it. The code is not imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("vcuda", "webhook", "controller", "certs")

_WORDS = re.compile(r"[\w)}`'.,;:] [\w({`'<*]")
_LOGS = frozenset({"debug", "info", "warning", "error", "exception"})
_NEVER_SHOWN = frozenset({"compile", "re", "replace", "startswith", "partition", "NewType"})


class Sentence(NamedTuple):
    """A text of several words in the product's source code. It has ``{}`` in place of each inserted value."""

    module: str
    line: int
    text: str

    def said_in(self, told: str) -> bool:
        """Return True if ``told`` contains this text, with any value in place of each ``{}``."""
        return re.search(".*".join(map(re.escape, self.text.split("{}"))), told, re.DOTALL) is not None


@cache
def modules() -> dict[str, ast.Module]:
    """Return the syntax tree of every module of the product, by the module's dotted name."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def calls(of: str) -> Iterator[tuple[str, str, ast.Call]]:
    """Yield every call of a function or class. ``of``: the name of this function or class.

    Each item has the calling module, the dotted name of the called function or class, and the call.
    """
    for module, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (called := _dotted(module, node.func)).rpartition(".")[2] == of:
                yield module, called, node


@cache
def _imported(module: str) -> Mapping[str, str]:
    found = [each for each in ast.walk(modules()[module]) if isinstance(each, ast.ImportFrom) and each.module]
    return {alias.asname or alias.name: f"{each.module}.{alias.name}" for each in found for alias in each.names}


def _dotted(module: str, node: ast.expr) -> str:
    """Return the full dotted name of a name or attribute, from the module's imports; empty for other expressions."""
    imported = _imported(module)
    match node:
        case ast.Name(id=name):
            return imported.get(name, f"{module}.{name}")
        case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in imported:
            return f"{imported[name]}.{attribute}"
    return ""


def constant(module: str, node: ast.expr) -> str:
    """Return the text of a literal, or of a constant of the module. Raises LookupError for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    named = node.id if isinstance(node, ast.Name) else ""
    for each in modules()[module].body:
        names = [ast.unparse(target) for target in each.targets] if isinstance(each, ast.Assign) else []
        if named in names and isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant):
            return str(each.value.value)
    raise LookupError(f"{module}:{node.lineno}: {ast.unparse(node)} must be a text, or a constant with a text")


def strings() -> Iterator[tuple[str, str]]:
    """Yield the module and the text of every string literal in the product, except docstrings."""
    for module, tree in modules().items():
        documented = {id(node) for node in _docstrings(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
                yield module, node.value


def sentences(*names: str) -> Iterator[Sentence]:
    """Yield every text of several words in the modules ``names`` that users can see, for example in messages."""
    for name in names:
        tree = modules()[name]
        skipped = {id(node) for node in (*_docstrings(tree), *_unshown(tree))}
        for node in ast.walk(tree):
            if id(node) not in skipped and _WORDS.search(text := _template(node)):
                yield Sentence(name, getattr(node, "lineno", 0), text)


def _template(node: ast.AST) -> str:
    """Return a string literal with ``{}`` for each inserted value; empty if the expression is not a string literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    values = node.values if isinstance(node, ast.JoinedStr) else []
    return "".join(str(value.value) if isinstance(value, ast.Constant) else "{}" for value in values)


def _unshown(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the syntax nodes that `sentences` must skip.

    Users do not see log lines, regular expressions, other internal arguments and type annotations. The parts of an
    f-string are skipped, because `sentences` uses the f-string as a whole.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield from (part for part in ast.walk(node) if isinstance(part, ast.Constant))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            logs = node.func.attr in _LOGS and "log" in ast.unparse(node.func.value)
            if logs or node.func.attr in _NEVER_SHOWN:
                yield from (part for argument in node.args for part in ast.walk(argument))
        if isinstance(node, ast.keyword) and node.arg == "failure":  # The text of a Reconciler's log line
            yield node.value
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield every literal that is a statement: the docstrings of modules, classes, functions, fields and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
