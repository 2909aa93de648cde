"""A ledger is recounted from what a controller has seen stored; whatever it has not seen stays charged."""

from __future__ import annotations

import pytest

from vcuda.charge import Charge
from vcuda.ledger import Ledger, Pending, StoredView, is_older, settle

CARD = Pending("M40", Charge(100, 0, 100), since=1_000)
ONE, TWO = ({"M40": Charge(100 * count, 0, 100 * count)} for count in (1, 2))


@pytest.mark.parametrize(
    ("ledger", "view", "absent", "settled"),
    [
        pytest.param(
            Ledger({}, "5", {"a": CARD}), StoredView("7", ONE, {"a"}), (), Ledger(ONE, "7"), id="a pod that was stored"
        ),
        pytest.param(
            Ledger({}, "5", {"a": CARD}), StoredView("7", {}, {"a"}), (), Ledger({}, "7"), id="stored, and gone since"
        ),
        pytest.param(
            Ledger(ONE, "5", {"a": CARD}), StoredView("7", {}, ()), (), Ledger({}, "7", {"a": CARD}), id="not yet seen"
        ),
        pytest.param(
            Ledger(ONE, "5", {"a": CARD, "b": CARD}),
            StoredView("7", TWO, {"a"}),
            (),
            Ledger(TWO, "7", {"b": CARD}),
            id="one of two",
        ),
        pytest.param(
            Ledger({}, "5", {"a": CARD}), StoredView("7", {}, ()), ("a",), Ledger({}, "7"), id="never to be stored"
        ),
        pytest.param(Ledger(TWO, "5"), StoredView("5", ONE, ()), (), Ledger(ONE, "5"), id="a view as old as the count"),
        pytest.param(Ledger({}, ""), StoredView("1", ONE, ()), (), Ledger(ONE, "1"), id="a ledger never counted"),
    ],
)
def test_settled(ledger: Ledger, view: StoredView, absent: tuple[str, ...], settled: Ledger) -> None:
    assert settle(ledger, view, absent) == settled


@pytest.mark.parametrize("seen", [set(), {"a"}])
def test_a_view_older_than_the_count_lowers_nothing(seen: set[str]) -> None:
    """A leader that has slept still believes in pods that are gone, and does not know those that came."""
    ledger = Ledger(TWO, "100", {"a": CARD})
    assert settle(ledger, StoredView("99", ONE, seen), ()) is ledger


def test_what_is_proven_absent_goes_though_the_view_is_old() -> None:
    ledger = Ledger(TWO, "100", {"a": CARD, "b": CARD})
    assert settle(ledger, StoredView("99", ONE, {"a"}), ("b",)) == Ledger(TWO, "100", {"a": CARD})


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(StoredView("7", ONE, ()), id="nothing new"),
        pytest.param(StoredView("7", ONE, {"x", "y"}), id="pods that were not pending"),
    ],
)
def test_without_a_change_nothing_is_to_be_written(view: StoredView) -> None:
    ledger = Ledger(ONE, "5", {"a": CARD})
    assert settle(ledger, view, ("z",)) is ledger


@pytest.mark.parametrize(
    ("version", "than", "older"),
    [("9", "10", True), ("10", "9", False), ("10", "10", False), ("", "1", True), ("1", "", False), ("", "", False)],
)
def test_versions_are_compared_as_numbers(version: str, than: str, older: bool) -> None:
    assert is_older(version, than) is older
