"""Exports the data of the usage page as CSV (for spreadsheets) and as JSON (for scripts)."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from controller.ui.model import HolderRow, number
from vcuda.ledger.report import NamespaceUse
from vcuda.quota.model import CORES_PER_CARD

MAX_HOLDERS = 5000
"""The most pods and claims in one exported file. The record of a pod or claim has less than a kilobyte."""

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""A spreadsheet may execute a cell that begins with one of these characters as a formula (OWASP, CSV Injection)."""


class UsageRecord(msgspec.Struct, frozen=True):
    """The usage of one GPU model by one namespace, in cards or in MiB. A field is None if it does not apply."""

    namespace: str
    mode: str
    model: str
    """The name of the GPU model; empty if the quota of the namespace lists no model."""
    used: float | None = None
    limit: float | None = None
    available: float | None = None
    pending: float | None = None
    terminating: float | None = None
    reserved: float | None = None
    memory_used_mib: int | None = None
    memory_limit_mib: int | None = None


class HolderRecord(msgspec.Struct, frozen=True):
    """A pod or claim that is charged for cards. ``model``: None if no model is known. ``created``: time in RFC 3339."""

    kind: str
    name: str
    model: str | None
    cards: float
    memory_mib: int
    node: str
    created: str


Records = Sequence[UsageRecord] | Sequence[HolderRecord]


def usage_records(uses: Iterable[NamespaceUse]) -> Iterator[UsageRecord]:
    """Yield a record for each GPU model of each namespace. A namespace without any model has one record, too."""
    for use in sorted(uses, key=lambda use: use.namespace):
        for each in use.models:
            yield UsageRecord(
                *(use.namespace, use.mode, each.model, each.used, each.limit, each.available),
                *(each.pending, each.terminating, each.reserved, each.memory_used, each.memory_limit),
            )
        if not use.models:
            yield UsageRecord(use.namespace, use.mode, "")


def holder_record(holder: HolderRow) -> HolderRecord:
    cards = holder.cores / CORES_PER_CARD
    return HolderRecord(holder.kind, holder.name, holder.model, cards, holder.memory, holder.node, holder.created)


def as_csv(kind: type[UsageRecord] | type[HolderRecord], records: Records) -> str:
    """Return the records as CSV (RFC 4180). The first line has the names of the fields."""
    text = io.StringIO()
    lines = csv.writer(text)
    lines.writerow(kind.__struct_fields__)
    lines.writerows([_cell(value) for value in msgspec.structs.astuple(each)] for each in records)
    return text.getvalue()


def as_json(records: Records, updated: str, left_out: int = 0) -> bytes:
    """Return the records as JSON. ``left_out``: how many more records exist than are exported."""
    return msgspec.json.encode({"updated": updated, "left_out": left_out, "items": records})


def _cell(value: str | float | None) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        return number(value)
    # A leading apostrophe keeps a spreadsheet from executing the text of the cell as a formula.
    return f"'{value}" if value.startswith(FORMULA_STARTS) else value
