"""What settling does to any ledger: it counts exactly what was seen, and keeps the rest charged."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.ledger.ledger import Ledger, ObservedPods, Pending, is_older, settle
from vcuda.quota.model import Charge

MODELS = ("M40", "P100")
UIDS = tuple("abcdef")
CHARGES = st.builds(Charge, st.integers(1, 300), st.integers(0, 500), st.integers(0, 300))
COMMITTED = st.dictionaries(st.sampled_from(MODELS), CHARGES)
VERSIONS = st.integers(0, 12).map(lambda version: str(version or ""))
PENDING = st.dictionaries(st.sampled_from(UIDS), st.builds(Pending, st.sampled_from(MODELS), CHARGES))
LEDGERS = st.builds(Ledger, COMMITTED, VERSIONS, PENDING)
SOME = st.frozensets(st.sampled_from(UIDS))
VIEWS = st.builds(ObservedPods, VERSIONS, COMMITTED, SOME)


@given(ledger=LEDGERS, view=VIEWS, absent=SOME)
def test_what_was_not_seen_and_not_proven_absent_stays_charged(
    ledger: Ledger, view: ObservedPods, absent: frozenset[str]
) -> None:
    """And what was seen is counted once: as pending no more, when it is in the count."""
    settled = settle(ledger, view, absent)
    stale = is_older(view.resource_version, ledger.pod_resource_version)
    released = absent if stale else absent | set(view.seen)
    assert settled.pending == {uid: each for uid, each in ledger.pending.items() if uid not in released}
    assert settled.committed == (ledger.committed if stale else view.committed)


@given(ledger=LEDGERS, view=VIEWS, absent=SOME)
def test_settled_twice_is_settled_once(ledger: Ledger, view: ObservedPods, absent: frozenset[str]) -> None:
    """Else two leaders would write for ever."""
    once = settle(ledger, view, absent)
    assert settle(once, view, absent) is once


@given(ledger=LEDGERS, views=st.lists(VIEWS, max_size=5))
def test_the_count_never_goes_back_in_time(ledger: Ledger, views: list[ObservedPods]) -> None:
    for view in views:
        settled = settle(ledger, view, ())
        assert not is_older(settled.pod_resource_version, ledger.pod_resource_version)
        ledger = settled


@given(ledger=LEDGERS, view=VIEWS, absent=SOME)
def test_the_version_that_was_read_is_left_as_it_was(
    ledger: Ledger, view: ObservedPods, absent: frozenset[str]
) -> None:
    before = msgspec.json.encode(ledger)
    settle(ledger, view, absent)
    assert msgspec.json.encode(ledger) == before


@pytest.mark.parametrize(
    ("counted", "seen"),
    [
        pytest.param({"M40": Charge(100)}, {"A100": Charge(100)}, id="a model renamed"),
        pytest.param({"M40": Charge(100)}, {}, id="the namespace made again, without its pods"),
        pytest.param({}, {"M40": Charge(900)}, id="pods that slipped in before the label"),
    ],
)
def test_the_ledger_follows_what_is_stored(counted: dict[str, Charge], seen: dict[str, Charge]) -> None:
    pending = {"a": Pending("M40", Charge(100))}
    settled = settle(Ledger(counted, "5", pending), ObservedPods("6", seen, ()), ())
    assert settled == Ledger(seen, "6", pending)
