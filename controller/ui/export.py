"""Exports the data of the usage page as CSV, for spreadsheets. Scripts read the JSON that the page reads, too."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from controller.ui.document import Holder
from vcuda.ledger.report import ModelUse, NamespaceUse, TeamUse

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""A spreadsheet may execute a cell that begins with one of these characters as a formula (OWASP, CSV Injection)."""

FIGURES = ("used", "limit", "available", "pending", "terminating", "reserved", "memory_used", "memory_limit")
"""The exported fields of a namespace's usage of one GPU model."""
OF_TOTAL = ("used", "limit")
"""The exported fields of a namespace's usage of all GPU models together. They are repeated on each line."""

Cell = str | float | None


def usage_csv(uses: Iterable[NamespaceUse]) -> str:
    """Return a line for each GPU model of each namespace and team. A namespace without any model has one line, too.

    The lines of a team have its name, and no namespace and mode.
    """
    names = ("namespace", "team", "mode", "model", *FIGURES, *(f"total_{name}" for name in OF_TOTAL))
    return _csv(names, _usage_lines(uses))


def _usage_lines(uses: Iterable[NamespaceUse]) -> Iterator[Sequence[Cell]]:
    teams: dict[str, TeamUse] = {}
    for use in uses:
        team = use.team.name if use.team else ""
        teams |= {team: use.team} if use.team else {}
        together = _totals(use)
        for each in use.models:
            yield (use.namespace, team, use.mode, each.model, *_figures(each), *together)
        if not use.models:
            yield (use.namespace, team, use.mode, "", *[None] * len(FIGURES), *together)
    for name, of_team in sorted(teams.items()):
        yield from (("", name, "", each.model, *_figures(each), *_totals(of_team)) for each in of_team.models)


def _figures(use: ModelUse) -> Iterator[Cell]:
    return (getattr(use, name) for name in FIGURES)


def _totals(use: NamespaceUse | TeamUse) -> Sequence[Cell]:
    return [getattr(use.total, name, None) for name in OF_TOTAL]


def holders_csv(holders: Iterable[Holder]) -> str:
    return _csv(Holder.__struct_fields__, map(msgspec.structs.astuple, holders))


def _csv(names: Sequence[str], lines: Iterable[Sequence[Cell]]) -> str:
    """Return CSV (RFC 4180). The first line has the names of the columns."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(names)
    writer.writerows([_cell(value) for value in line] for line in lines)
    return text.getvalue()


def _cell(value: Cell) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    # A leading apostrophe keeps a spreadsheet from executing the text of the cell as a formula.
    return f"'{value}" if value.startswith(FORMULA_STARTS) else value
