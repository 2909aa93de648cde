"""Search and sort as the page's address asks for them."""

from __future__ import annotations

import pytest

from controller.ui.model import Row, row_of
from controller.ui.snapshot import (
    LONGEST_SEARCH,
    POD_SORTS,
    Order,
    PodRow,
    matches,
    ordered,
    ordered_pods,
    read_order,
    sorts_of,
)
from tests.usage_samples import model_use, namespace_use

SORTS = sorts_of(["M40", "total"])

ROWS: list[Row] = [
    row_of(namespace_use("delta", model_use("M40", 10, 1))),
    row_of(namespace_use("alpha", model_use("M40", 4, 2), model_use("P100", 100, 1))),
    row_of(namespace_use("charlie", model_use("P100", 1, 1))),
    row_of(namespace_use("bravo", model_use("M40", 8, 4))),
]


def names(order: Order) -> list[str]:
    return [row.namespace for row in ordered(ROWS, order)]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (Order(), ["alpha", "bravo", "charlie", "delta"]),
        (Order(descending=True), ["delta", "charlie", "bravo", "alpha"]),
        (Order(sort="model.M40", descending=True), ["bravo", "alpha", "delta", "charlie"]),
        (Order(sort="model.M40"), ["delta", "alpha", "bravo", "charlie"]),
        (Order(sort="total", descending=True), ["charlie", "bravo", "delta", "alpha"]),
        (Order(search="A  L", sort="total"), ["alpha", "delta", "charlie"]),
        (Order(search="nobody"), []),
    ],
    ids=["names", "names turned", "fullest first", "emptiest first", "all models", "search", "none"],
)
def test_rows(order: Order, expected: list[str]) -> None:
    """Of two that are as full, the one that uses more counts as more; those without the model come last either way."""
    assert names(order) == expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, Order()),
        ({"sort": "model.M40", "order": "desc"}, Order("", "model.M40", descending=True)),
        ({"sort": "total"}, Order("", "total")),
        ({"sort": "model.total"}, Order("", "model.total")),
        ({"sort": "model.GONE", "order": "desc", "q": "a"}, Order("a")),
        ({"sort": "M40"}, Order()),
        ({"order": "sideways"}, Order()),
        ({"q": "  team a "}, Order("team a")),
        ({"q": "x" * 1000}, Order("x" * LONGEST_SEARCH)),
    ],
)
def test_what_an_address_asks_for_and_does_not_exist_counts_as_not_asked_for(
    query: dict[str, str], expected: Order
) -> None:
    assert read_order(query, SORTS) == expected


@pytest.mark.parametrize(
    ("now", "click", "then"),
    [
        (Order("a"), "name", Order("a", "name", descending=True)),
        (Order("a"), "total", Order("a", "total", descending=True)),
        (Order("a", "total", descending=True), "total", Order("a", "total")),
        (Order("a", "total", descending=True), "name", Order("a")),
    ],
)
def test_a_header_turns_its_own_order_and_begins_with_the_fullest(now: Order, click: str, then: Order) -> None:
    assert now.toggled(click) == then


def test_an_order_survives_its_address() -> None:
    order = Order("a&b=<c>", "model.M40", descending=True)
    assert order.query() == "q=a%26b%3D%3Cc%3E&sort=model.M40&order=desc"
    assert Order().query() == ""


def test_aria_sort_stands_on_one_header_alone() -> None:
    order = Order(sort="total", descending=True)
    assert [order.aria(sort) for sort in ("name", "total")] == ["none", "descending"]
    assert Order().aria("name") == "ascending"


@pytest.mark.parametrize(
    ("search", "name", "found"),
    [("", "a", True), ("TEAM", "team-a", True), ("a team", "team-a", True), ("b team", "team-a", False)],
)
def test_a_search_is_for_every_word_whatever_its_case(search: str, name: str, found: bool) -> None:
    assert matches(search, name) is found


PODS = [
    PodRow("b", "M40", 100, 5, "", "2026-01-02T00:00:00Z"),
    PodRow("a", None, 100, 7, "n2", "2026-01-01T00:00:00Z"),
    PodRow("c", "A100", 50, 6, "n1", "2026-01-03T00:00:00Z"),
]


@pytest.mark.parametrize(
    ("sort", "expected"),
    [("name", "abc"), ("model", "acb"), ("cards", "cab"), ("memory", "bca"), ("node", "bca"), ("created", "abc")],
)
def test_pods(sort: str, expected: str) -> None:
    assert "".join(pod.name for pod in ordered_pods(PODS, Order(sort=sort))) == expected


def test_every_column_of_the_pods_can_be_sorted_by() -> None:
    assert list(POD_SORTS) == ["name", "model", "cards", "memory", "node", "created"]
    assert [pod.name for pod in ordered_pods(PODS, Order("c"))] == ["c"]
