"""The full pass: a ledger at rest that differs from the pods is told, counted and mended; any other is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import structlog

from tests.api_double import ApiDouble
from tests.builders import stored_pod
from tests.replicas import Replica
from tests.settling import Settling
from vcuda.ledger.ledger import Ledger
from vcuda.quota.model import Charge

CARD = {"tencent.com/vcuda-core": 100}
ONE, TWO = Charge(100, 0, 100), Charge(200, 0, 200)
COUNTED, FAR = "102", "1000000"
"""Versions: after the quota's, before the list of the pods; and one that the list is older than."""


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a ledger be at rest as soon as nothing is due."""
    monkeypatch.setattr("controller.settler.SPACING", 0.0)


def audited(settling: Settling) -> list[Any]:
    """Run one full pass, which settles nothing yet; return what was warned of."""
    with structlog.testing.capture_logs() as logs:
        settling.settler.audit()
    return [(line["event"], line["namespace"]) for line in logs if line["log_level"] == "warning"]


@pytest.mark.parametrize(
    "committed",
    [
        pytest.param({"M40": TWO}, id="too high"),
        pytest.param({}, id="too low"),
        pytest.param({"P100": ONE}, id="another model"),
    ],
)
def test_a_ledger_at_rest_that_differs_from_the_pods_is_told_counted_and_mended(
    api: ApiDouble, replica: Replica, committed: dict[str, Charge]
) -> None:
    settling = Settling(api, replica, Ledger(committed, COUNTED), stored_pod(CARD))
    assert audited(settling) == [("ledger differs from the pods; mending", "team-a")]
    assert settling.counted("mended_total") == 1
    settling.run()
    assert replica.store.read("team-a").ledger.committed == {"M40": ONE}


def test_a_ledger_that_agrees_with_the_pods_is_not_written(api: ApiDouble, replica: Replica) -> None:
    settling = Settling(api, replica, Ledger({"M40": ONE}, COUNTED), stored_pod(CARD))
    assert audited(settling) == []
    settling.run()
    assert (settling.counted("mended_total"), api.calls) == (0, [])


def test_a_ledger_that_is_about_to_be_settled_is_not_counted(api: ApiDouble, replica: Replica) -> None:
    """What an event has brought is no difference that events should have mended."""
    settling = Settling(api, replica, Ledger({"M40": TWO}, COUNTED), stored_pod(CARD))
    settling.settler.due.add("team-a")
    assert audited(settling) == []
    assert settling.counted("mended_total") == 0


def test_a_ledger_counted_at_a_newer_version_is_right_for_all_that_is_known(api: ApiDouble, replica: Replica) -> None:
    """Not even etcd knows better here."""
    settling = Settling(api, replica, Ledger({"M40": TWO}, FAR), stored_pod(CARD))
    assert audited(settling) == []
    settling.run()
    assert (settling.counted("mended_total"), api.calls) == (0, ["LIST"])


def test_where_the_watch_is_behind_the_count_etcd_is_asked(api: ApiDouble, replica: Replica) -> None:
    """As after a webhook's own count, while nothing happens that would bring the watch forward."""
    settling = Settling(api, replica, Ledger({"M40": TWO}, "104"), stored_pod(CARD))
    api.store("/api/v1/namespaces/team-b/pods/other", {"metadata": {"name": "other"}})
    settling.settler.due.add("team-a")
    settling.run()
    assert replica.store.read("team-a").ledger.committed == {"M40": ONE}
