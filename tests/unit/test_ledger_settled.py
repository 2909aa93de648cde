"""A ledger is recounted from what a controller has seen stored; whatever it has not seen stays charged."""

from __future__ import annotations

import pytest

from vcuda.ledger.ledger import Ledger, ObservedPods, Pending, is_older, settle
from vcuda.quota.model import Charge

CARD = Pending("M40", Charge(100, 0, 100))
ONE, TWO = ({"M40": Charge(100 * count, 0, 100 * count)} for count in (1, 2))


@pytest.mark.parametrize(
    ("ledger", "view", "absent", "settled"),
    [
        pytest.param(
            Ledger({}, "5", {"a": CARD}),
            ObservedPods("7", ONE, {"a"}),
            (),
            Ledger(ONE, "7"),
            id="a pod that was stored",
        ),
        pytest.param(
            Ledger({}, "5", {"a": CARD}), ObservedPods("7", {}, {"a"}), (), Ledger({}, "7"), id="stored, and gone since"
        ),
        pytest.param(
            Ledger(ONE, "5", {"a": CARD}),
            ObservedPods("7", {}, ()),
            (),
            Ledger({}, "7", {"a": CARD}),
            id="not yet seen",
        ),
        pytest.param(
            Ledger(ONE, "5", {"a": CARD, "b": CARD}),
            ObservedPods("7", TWO, {"a"}),
            (),
            Ledger(TWO, "7", {"b": CARD}),
            id="one of two",
        ),
        pytest.param(
            Ledger({}, "5", {"a": CARD}), ObservedPods("7", {}, ()), ("a",), Ledger({}, "7"), id="never to be stored"
        ),
        pytest.param(
            Ledger(TWO, "100", {"a": CARD, "b": CARD}),
            ObservedPods("99", ONE, {"a"}),
            ("b",),
            Ledger(TWO, "100", {"a": CARD}),
            id="never to be stored, though the view is old",
        ),
        pytest.param(
            Ledger(TWO, "5"), ObservedPods("5", ONE, ()), (), Ledger(ONE, "5"), id="a view as old as the count"
        ),
        pytest.param(Ledger({}, ""), ObservedPods("1", ONE, ()), (), Ledger(ONE, "1"), id="a ledger never counted"),
    ],
)
def test_settled(ledger: Ledger, view: ObservedPods, absent: tuple[str, ...], settled: Ledger) -> None:
    assert settle(ledger, view, absent) == settled


@pytest.mark.parametrize(
    ("ledger", "view"),
    [
        pytest.param(Ledger(ONE, "5", {"a": CARD}), ObservedPods("7", ONE, ()), id="nothing new"),
        pytest.param(Ledger(ONE, "5", {"a": CARD}), ObservedPods("7", ONE, {"x", "y"}), id="others were seen"),
        pytest.param(Ledger(TWO, "100", {"a": CARD}), ObservedPods("99", ONE, ()), id="an old view lowers nothing"),
        pytest.param(
            Ledger(TWO, "100", {"a": CARD}), ObservedPods("99", ONE, {"a"}), id="nor does it drop what it saw"
        ),
    ],
)
def test_without_news_nothing_is_to_be_written(ledger: Ledger, view: ObservedPods) -> None:
    """A leader that has slept still believes in pods that are gone, and does not know those that came."""
    assert settle(ledger, view, ("z",)) is ledger


def test_a_count_from_before_the_quota_was_edited_is_renewed_though_it_is_the_same() -> None:
    """Else every webhook would count for itself, again and again."""
    ledger, view = Ledger(ONE, "5", {"a": CARD}), ObservedPods("7", ONE, ())
    assert settle(ledger, view, counted_since="6") == Ledger(ONE, "7", {"a": CARD})
    assert settle(ledger, view, counted_since="5") is ledger


@pytest.mark.parametrize(
    ("version", "than", "older"),
    [("9", "10", True), ("10", "9", False), ("10", "10", False), ("", "1", True), ("1", "", False), ("", "", False)],
)
def test_versions_are_compared_as_numbers(version: str, than: str, older: bool) -> None:
    assert is_older(version, than) is older
