"""Tests of the delays (in seconds) between two attempts of a reflector, and of the metric of undecodable objects."""

import msgspec
import pytest
from hypothesis import given, strategies as st

from tests.api_double import ApiDouble
from tests.tables import cases
from vcuda.kube import Backoff, Reflector
from vcuda.kube.metrics import MAX_SHOWN, unread_objects


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


def test_the_metric_names_at_most_ten_unread_objects_of_a_watch() -> None:
    def fail(_raw: bytes) -> None:
        raise MemoryError

    api = ApiDouble()
    for number in range(MAX_SHOWN + 1):
        name = f"pod-{number:02}"
        api.post("/api/v1/namespaces/a/pods", msgspec.json.encode({"metadata": {"namespace": "a", "name": name}}))
    reflector: Reflector[None] = Reflector(api.kube, "/api/v1/pods", fail)
    reflector.relist()
    samples = [each.labels for each in unread_objects({"pods": reflector}).samples]
    assert len(samples) == MAX_SHOWN
    assert samples[0] == {"resource": "pods", "namespace": "a", "name": "pod-00"}
