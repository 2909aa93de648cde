"""Tests of the delays between two attempts of a reflector, in seconds."""

import pytest
from hypothesis import given, strategies as st

from tests.tables import cases
from vcuda.kube import Backoff


@cases(
    "draw, delays",
    the_longest_random_delay=(1.0, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10]),
    the_shortest_random_delay=(0.0, [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5]),
)
def test_delays_double_up_to_the_ceiling(draw: float, delays: list[float]) -> None:
    backoff = Backoff(draw=lambda: draw)
    assert [backoff.next() for _ in delays] == pytest.approx(delays)


def test_after_a_success_delays_start_over() -> None:
    backoff = Backoff(draw=lambda: 1.0)
    before = [backoff.next(), backoff.next()]
    backoff.reset()
    assert [backoff.next(), backoff.next()] == before


@given(draw=st.floats(0, 1))
def test_no_number_of_failures_overflows(draw: float) -> None:
    backoff = Backoff(draw=lambda: draw)
    assert all(0.05 <= backoff.next() <= 10 for _ in range(1100))
