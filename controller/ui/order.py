"""Search and sort, as the page's address says: it can be kept and sent, and works without a script."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from urllib.parse import urlencode

import msgspec

from controller.ui.figures import Amount, Row
from controller.ui.source import PodRow

NAME = "name"
TOTAL = "total"
MODEL = "model."
"""What the sort by a model begins with, so that no model's name means something else."""

LONGEST_SEARCH = 100
"""Characters of a search that count."""


class Order(msgspec.Struct, frozen=True):
    """What is searched for, and what the rows are sorted by."""

    search: str = ""
    sort: str = NAME
    descending: bool = False

    def toggled(self, sort: str) -> Order:
        """Return the order that a click on a column's header asks for: fullest first, names from a to z, or turned."""
        turned = not self.descending if sort == self.sort else sort != NAME
        return Order(self.search, sort, turned)

    def query(self) -> str:
        """Return the query of an address that asks for this order; empty for the default."""
        fields = {"q": self.search, "sort": self.sort, "order": "desc" if self.descending else ""}
        defaults = {"q": "", "sort": NAME, "order": ""}
        return urlencode({key: value for key, value in fields.items() if value != defaults[key]})

    def aria(self, sort: str) -> str:
        """Return the value of a column header's ``aria-sort``."""
        if sort != self.sort:
            return "none"
        return "descending" if self.descending else "ascending"


def read_order(query: Mapping[str, str], sorts: Iterable[str]) -> Order:
    """Return the order of an address; what it asks for and does not exist counts as not asked for."""
    sort = query.get("sort", NAME)
    if sort not in sorts:
        return Order(query.get("q", "").strip()[:LONGEST_SEARCH])
    return Order(query.get("q", "").strip()[:LONGEST_SEARCH], sort, query.get("order") == "desc")


def sorts_of(models: Iterable[str]) -> list[str]:
    """Return what the rows of namespaces can be sorted by."""
    return [NAME, TOTAL, *(MODEL + model for model in models)]


def matches(search: str, name: str) -> bool:
    """Return whether a name holds every word of a search, whatever their case."""
    return all(word in name.casefold() for word in search.casefold().split())


def ordered(rows: Iterable[Row], order: Order) -> list[Row]:
    """Return the rows that are searched for, sorted. Those without the model that is sorted by always come last."""
    found = sorted((row for row in rows if matches(order.search, row.namespace)), key=lambda row: row.namespace)
    if order.sort == NAME:
        return found[::-1] if order.descending else found
    having = [(amount, row) for row in found if (amount := _amount(row, order.sort))]
    having.sort(key=lambda pair: (pair[0].fullness, pair[0].used), reverse=order.descending)
    return [row for _, row in having] + [row for row in found if not _amount(row, order.sort)]


def _amount(row: Row, sort: str) -> Amount | None:
    return row.total if sort == TOTAL else row.amounts.get(sort.removeprefix(MODEL))


POD_SORTS: Mapping[str, Callable[[PodRow], str | int]] = {
    NAME: lambda pod: pod.name,
    "model": lambda pod: pod.model or "",
    "cards": lambda pod: pod.cores,
    "memory": lambda pod: pod.memory,
    "node": lambda pod: pod.node,
    "created": lambda pod: pod.created,
}
"""What a namespace's pods can be sorted by."""


def ordered_pods(pods: Iterable[PodRow], order: Order) -> Sequence[PodRow]:
    """Return the pods that are searched for, sorted."""
    found = sorted((pod for pod in pods if matches(order.search, pod.name)), key=lambda pod: pod.name)
    return sorted(found, key=POD_SORTS[order.sort], reverse=order.descending)
