"""The figures of the usage page: how full, in which step of the heat, and in which words."""

from __future__ import annotations

import pytest

from controller.ui.model import OVER, Amount, moment, number, plural, rounded, row_of, span, step
from controller.ui.model import memory as memory_text
from tests.usage_samples import model_use, namespace_use


@pytest.mark.parametrize(
    ("used", "limit", "expected"),
    [
        pytest.param(0, 8, 0, id="unused"),
        pytest.param(0.01, 8, 1, id="a hundredth of a card shows"),
        pytest.param(0.79, 8, 1, id="under a tenth"),
        pytest.param(0.8, 8, 1, id="a tenth"),
        pytest.param(5.6, 8, 7, id="seven tenths, which floats make 6.99"),
        pytest.param(0.3, 1, 3, id="three tenths, which floats make 3.0"),
        pytest.param(0.01, 0.05, 2, id="two tenths, which floats make 1.99"),
        pytest.param(7.99, 8, 9, id="nearly full"),
        pytest.param(8, 8, 10, id="full"),
        pytest.param(8.01, 8, OVER, id="over the limit"),
        pytest.param(1, 0, OVER, id="some of what is blocked"),
        pytest.param(0, 0, 0, id="nothing of what is blocked"),
    ],
)
def test_the_step_of_the_heat(used: float, limit: float, expected: int) -> None:
    assert Amount(used, limit).step == expected


def test_the_fuller_of_cores_and_memory_counts() -> None:
    assert Amount(1, 8, memory_used=900, memory_limit=1000).step == 9
    assert Amount(8, 8, memory_used=100, memory_limit=1000).step == 10
    assert Amount(1, 8, memory_used=1001, memory_limit=1000).step == OVER


def test_steps_never_fall_as_more_is_used() -> None:
    steps = [step(hundredths / 100) for hundredths in range(110)]
    assert steps == sorted(steps)
    assert set(steps) == set(range(12))


def test_only_what_is_unused_and_has_no_limit_is_blocked() -> None:
    assert Amount(0, 0).blocked
    assert not Amount(1, 0).blocked
    assert not Amount(0, 1).blocked


def test_a_row_sums_its_models_exactly() -> None:
    row = row_of(namespace_use("a", model_use("M40", 1.1, 0.1, 0.05), model_use("P100", 2.2, 0.2), unpinned=("x",)))
    assert (row.total.used, row.total.limit, row.total.pending, row.unpinned) == (0.3, 3.3, 0.05, 1)
    assert list(row.amounts) == ["M40", "P100"]


def test_a_sum_is_exact_to_hundredths_of_a_card() -> None:
    assert rounded([0.1] * 3) == 0.3


@pytest.mark.parametrize(("cards", "text"), [(8, "8"), (2.5, "2.5"), (0.05, "0.05"), (100, "100"), (0, "0")])
def test_cards_are_written_without_spare_digits(cards: float, text: str) -> None:
    assert number(cards) == text


@pytest.mark.parametrize(("count", "text"), [(1, "1 card"), (0.5, "0.5 cards"), (2, "2 cards")])
def test_a_noun_goes_by_its_number(count: float, text: str) -> None:
    assert plural(count, "card", "cards") == text


@pytest.mark.parametrize(
    ("mebibytes", "text"), [(0, "0 MiB"), (1023, "1023 MiB"), (1024, "1 GiB"), (1536, "1.5 GiB"), (81920, "80 GiB")]
)
def test_memory_is_in_the_unit_that_people_would_use(mebibytes: int, text: str) -> None:
    assert memory_text(mebibytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (0, "0 s"), (59.9, "59 s"), (60, "1 min"), (3599, "59 min"), (3600, "1 h"), (90000, "1 d")],
)
def test_a_span_is_in_its_largest_unit(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize("text", ["", "yesterday", "2026-03-04", "2026-03-04T12:00:00", "2026-13-04T12:00:00Z"])
def test_what_is_no_time_is_none(text: str) -> None:
    """One without a zone is none either: the API server writes none of these."""
    assert moment(text) is None


@pytest.mark.parametrize("text", ["2026-03-04T12:00:00Z", "2026-03-04T12:00:00.000001Z", "2026-03-04T13:00:00+01:00"])
def test_the_times_of_the_api_server_are_read(text: str) -> None:
    at = moment(text)
    assert at is not None
    assert at.utctimetuple()[:5] == (2026, 3, 4, 12, 0)
