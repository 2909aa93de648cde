"""Tests of the end of a grant (temporary quota). Before it, Events announce which pods will be over the limit."""

from typing import Any

import pytest

from tests.builders import Manifest
from tests.violation_world import HOUR, NOON, PERIOD, Cluster, Watched, crowded


@pytest.fixture
def api() -> Cluster:
    return crowded()


def grant(api: Cluster, *grants: Manifest, **fields: Any) -> None:
    api.limit({"quota": {"M40": 2}, "grants": list(grants), **fields})


ALL_FOUR = {"M40": 2, "until": "2026-11-26"}
"""A grant of two more M40, so that all four pods fit. It ends at midnight, 36 hours after the time of the tests."""
ENDS = "a GPU grant ends at 2026-11-27 00:00 UTC. This pod"


def test_a_day_before_a_grant_ends_an_event_announces_the_outcome_for_each_pod(api: Cluster) -> None:
    grant(api, ALL_FOUR)
    watched = Watched(api, unix=NOON + 12 * HOUR - 1)
    watched.look()
    assert api.told() == []
    watched.unix = NOON + 12 * HOUR
    for _ in range(2):
        watched.look()
    assert api.told() == [("new", "GrantEnds"), ("newest", "GrantEnds")]
    [event] = api.events("newest.")
    assert event["message"].startswith(f"{ENDS} will then be evicted: beyond GPU quota: M40 in namespace team-a, ")
    assert api.calls.count("POST") == 2


@pytest.mark.parametrize(("mode", "enforce"), [("enforce", False), ("warn", True)])
def test_without_evictions_the_event_says_that_the_pod_stays(api: Cluster, mode: str, enforce: bool) -> None:
    grant(api, ALL_FOUR, mode=mode)
    Watched(api, enforce=enforce, unix=NOON + 20 * HOUR).look()
    [event] = api.events("newest.")
    assert event["message"].startswith(f"{ENDS} stays, but then new pods and claims are rejected until")


def test_a_quota_that_audits_announces_nothing(api: Cluster) -> None:
    grant(api, ALL_FOUR, mode="audit")
    Watched(api, unix=NOON + 20 * HOUR).look()
    assert api.told() == []


def test_each_pods_event_names_the_first_end_after_which_it_does_not_fit(api: Cluster) -> None:
    grant(api, {"M40": 1, "until": "2026-11-25T18:00"}, {"M40": 1, "until": "2026-11-25T20:00"})
    Watched(api).look()
    ends = {name: api.events(f"{name}.")[0]["message"].split(". ")[0] for name in ("new", "newest")}
    assert ends == {
        "newest": "a GPU grant ends at 2026-11-25 18:00 UTC",
        "new": "a GPU grant ends at 2026-11-25 20:00 UTC",
    }


def test_every_night_that_ends_is_announced(api: Cluster) -> None:
    grant(api, {"M40": 2, "daily": "10:00-20:00"})
    watched = Watched(api, enforce=False)
    for day in range(2):
        watched.unix = NOON + day * 24 * HOUR
        watched.look()
    assert len([name for name, _ in api.told() if name == "newest"]) == 2


def test_after_the_end_the_excess_is_reported_and_evicted(api: Cluster) -> None:
    grant(api, ALL_FOUR)
    watched = Watched(api, unix=NOON + 36 * HOUR - 1)
    for _ in range(3):
        watched.look(PERIOD)
    assert (watched.counted("pods", namespace="team-a", finding="over-quota"), api.evicted()) == (None, [])
    watched.unix += 1
    for _ in range(4):
        watched.look(PERIOD)
        watched.see_pods()
    assert api.evicted() == ["newest", "new"]
