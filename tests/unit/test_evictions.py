"""Tests of the reports about pods beyond their quota, and of the eviction of the newest of these pods."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from tests.api_double import Delivery, Script, lost_reply, lost_request
from tests.builders import Manifest
from tests.quota_map import QUOTA
from tests.violation_world import PERIOD, PODS, Cluster, Watched, crowded
from vcuda.errors import ApiError, Conflict, HeldByBudget, NotFound, Unavailable, VcudaError
from vcuda.kube.client import rejection


@pytest.fixture
def api() -> Cluster:
    return crowded()


@pytest.fixture
def watched(api: Cluster) -> Watched:
    """Return a watcher that may evict pods beyond their quota, and has checked the namespace once."""
    watched = Watched(api)
    watched.look()
    return watched


def test_each_pod_beyond_the_quota_is_reported_once_and_counted(api: Cluster) -> None:
    watched = Watched(api, enforce=False)
    for _ in range(3):
        watched.look(PERIOD)
    assert api.told() == [("new", "BeyondQuota"), ("newest", "BeyondQuota")]
    assert api.calls.count("POST") == 2
    assert watched.counted("pods", namespace="team-a", finding="over-quota") == 2
    found = watched.watcher.ongoing()
    assert [each.violation.stored.name for each in found] == ["newest", "new"]
    assert all(each.at.endswith("Z") for each in found)
    [event] = api.events("newest.")
    assert (event["type"], event["involvedObject"]["uid"]) == ("Warning", "uid-newest")
    assert "beyond GPU quota: M40 in namespace team-a, used: 4 cards, limited: 2 cards" in event["message"]


def raise_limit(api: Cluster) -> None:
    api.limit({"quota": {"M40": 4}})


def remove_quota(api: Cluster) -> None:
    api.remove(QUOTA)


@pytest.mark.parametrize("mend", [raise_limit, remove_quota])
def test_a_pod_that_fits_again_is_no_longer_found(api: Cluster, mend: Callable[[Cluster], None]) -> None:
    watched = Watched(api, enforce=False)
    watched.look()
    mend(api)
    watched.watch()
    watched.look()
    assert watched.watcher.ongoing() == []
    assert watched.counted("pods", namespace="team-a", finding="over-quota") is None


def test_a_pod_that_is_not_pinned_has_its_own_event_and_is_never_evicted(api: Cluster) -> None:
    api.limit({"quota": {"M40": 4}})
    api.add("free", hour=9, affinity={})
    watched = Watched(api)
    for _ in range(3):
        watched.look(PERIOD)
    assert watched.counted("pods", namespace="team-a", finding="unpinned") == 1
    assert (api.told(), api.evicted(), api.calls.count("POST")) == ([("free", "NotCounted")], [], 1)
    [event] = api.events("free.")
    assert (event["type"], event["involvedObject"]["uid"]) == ("Warning", "uid-free")
    assert "the GPU quota of namespace team-a does not count this pod" in event["message"]
    # The pod may also have been admitted, with a model that `gpu_models` had by mistake.
    assert "before the quota was enforced, or before its model was renamed" in event["message"]


def test_another_leader_repeats_no_event(api: Cluster) -> None:
    api.add("free", hour=9, affinity={})
    for _ in range(2):
        Watched(api, enforce=False).look()
    assert [name for name, _ in api.told()] == ["free", "new", "newest"]
    assert api.calls.count("POST") == 6


def test_a_recreated_pod_with_the_same_name_is_reported_again(api: Cluster) -> None:
    watched = Watched(api, enforce=False)
    watched.look()
    api.make_anew("newest")
    watched.see_pods()
    watched.look()
    assert [name for name, _ in api.told()] == ["new", "newest", "newest"]


ALL_THREE = ["free", "new", "newest"]


@pytest.mark.parametrize(
    ("mode", "enforce", "system", "told"),
    [
        pytest.param("enforce", False, frozenset(), ALL_THREE, id="without the flag"),
        pytest.param("warn", True, frozenset(), ALL_THREE, id="a quota that only warns"),
        pytest.param("audit", True, frozenset(), [], id="a quota that only audits, without reports"),
        # The webhook is not called for pods in a system namespace. If this pod were evicted, its owner would create a
        # new pod, which nothing would check.
        pytest.param("enforce", True, frozenset({"team-a"}), ALL_THREE, id="a system namespace"),
    ],
)
def test_a_pod_that_is_not_evicted_is_still_counted(
    api: Cluster, mode: str, enforce: bool, system: frozenset[str], told: list[str]
) -> None:
    api.limit({"quota": {"M40": 2}, "mode": mode})
    api.add("free", hour=9, affinity={})
    watched = Watched(api, enforce=enforce, system=system)
    for _ in range(5):
        watched.look(PERIOD)
    assert ([name for name, _ in api.told()], api.evicted()) == (told, [])
    assert watched.counted("pods", namespace="team-a", finding="over-quota") == 2


def test_the_newest_pod_is_evicted_after_a_period_and_one_pod_per_check(api: Cluster, watched: Watched) -> None:
    watched.look(PERIOD - 1)
    assert api.evicted() == []
    watched.look(1)
    assert api.evicted() == ["newest"]
    for _ in range(4):
        watched.see_pods()
        watched.look(PERIOD)
    assert api.evicted() == ["newest", "new"]
    assert watched.counted("evictions_total", outcome="evicted") == 2
    assert ("newest", "EvictedOverQuota") in api.told()
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "newest", "namespace": "team-a"}}
    assert api.evictions[0] == {**body, "deleteOptions": {"preconditions": {"uid": "uid-newest"}}}


WARNS: Manifest = {"quota": {"M40": 2}, "mode": "warn"}


@pytest.mark.parametrize("between", [{"quota": {"M40": 4}}, WARNS], ids=["fits", "warns"])
def test_a_check_that_finds_no_pod_to_evict_restarts_the_period(
    api: Cluster, watched: Watched, between: Manifest
) -> None:
    for entry in (between, {"quota": {"M40": 2}}):
        api.limit(entry)
        watched.watch()
        watched.look(PERIOD / 2)
    watched.look(PERIOD - 1)
    assert api.evicted() == []
    watched.look(1)
    assert api.evicted() == ["newest"]


TWO = ("new", "newest")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda api: [api.remove(f"{PODS}/{name}") for name in TWO], id="both are deleted"),
        pytest.param(
            lambda api: [api.make_anew(name) for name in TWO], id="both are replaced by pods of the same names"
        ),
        pytest.param(
            lambda api: [api.remove(f"{PODS}/oldest"), api.terminate("old")], id="older pods are deleted or terminating"
        ),
        raise_limit,
        pytest.param(lambda api: api.limit({"quota": {"M40": "many"}}), id="the quota is malformed"),
        remove_quota,
    ],
)
def test_the_stored_pods_decide_about_an_eviction(
    api: Cluster, watched: Watched, change: Callable[[Cluster], object]
) -> None:
    """The pods or the quota have changed, so that no pod may be evicted. The watches do not show this yet."""
    change(api)
    for _ in range(3):
        watched.look(PERIOD)
    assert api.evicted() == []


CAUSE = {"reason": "DisruptionBudget", "message": "The disruption budget pdb needs 1 healthy pods and has 1 currently"}
STATUS = {"message": "Cannot evict pod: it would violate the disruption budget.", "details": {"causes": [CAUSE]}}


def test_an_eviction_that_a_budget_rejects_is_reported_and_retried(api: Cluster, watched: Watched) -> None:
    api.rejection = rejection("POST /eviction", 429, json.dumps(STATUS).encode())
    for after in (PERIOD, 0.0, 0.0):
        watched.look(after)
    assert api.evicted() == ["newest", "new"]
    assert watched.counted("evictions_total", outcome="budget") == 2
    assert ("newest", "EvictionPutOff") in api.told()
    api.rejection = None
    watched.look(PERIOD)
    assert api.evicted() == ["newest", "new", "newest"]


BUSY = {"message": "busy", "details": {"retryAfterSeconds": 1}}


@pytest.mark.parametrize(
    ("body", "kind"),
    [(STATUS, HeldByBudget), ({"message": "busy"}, Unavailable), (BUSY, Unavailable), ([], Unavailable)],
)
def test_only_a_429_with_a_budget_cause_counts_as_a_budget(body: object, kind: type[VcudaError]) -> None:
    error = rejection("POST /eviction", 429, json.dumps(body).encode())
    assert type(error) is kind
    assert "(HTTP 429)" in str(error)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (NotFound(404, "not found"), "gone"),
        (Conflict(409, "the UID in the precondition does not match"), "gone"),
        (ApiError(403, "pods/eviction is forbidden"), "failed"),
        (Unavailable("more than one PodDisruptionBudget (HTTP 500)"), "failed"),
    ],
)
def test_a_rejected_eviction_is_counted_and_not_reported(
    api: Cluster, watched: Watched, error: VcudaError, outcome: str
) -> None:
    api.rejection = error
    watched.look(PERIOD)
    watched.look()
    assert watched.counted("evictions_total", outcome=outcome) == 2
    assert {reason for _, reason in api.told()} == {"BeyondQuota"}
    assert watched.counted("evictions_total", outcome="evicted") is None


def test_no_pod_is_evicted_if_the_pods_cannot_be_listed(api: Cluster, watched: Watched) -> None:
    api.deliver = Script(lost_request, methods=("LIST",))
    with pytest.raises(Unavailable):
        watched.look(PERIOD)
    assert api.evicted() == []
    watched.look()
    assert api.evicted() == ["newest"]


def test_a_rejected_event_is_not_retried_and_delays_nothing(api: Cluster) -> None:
    def rejected(*_: Any) -> bytes:
        raise ApiError(422, "metadata.name: too long")

    api.deliver = Script(rejected)
    watched = Watched(api)
    assert sorted(watched.look()) == ["event rejected", "reported a pod beyond its quota"]
    assert watched.look() == []


@pytest.mark.parametrize("lost", [lost_request, lost_reply])
def test_a_failed_check_of_a_namespace_is_retried(api: Cluster, lost: Delivery) -> None:
    """The failed check may have written some of the Events. The retry writes only the missing Events."""
    watched = Watched(api, enforce=False)
    api.deliver = Script(lost, lost)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            watched.watcher.reconciler.turn("team-a")
            assert watched.watcher.reconciler.queue.is_active("team-a")
    assert logs[0]["event"] == "violations not checked"
    assert [name for name, _ in api.told()] == ["new", "newest"]


def test_a_namespace_is_checked_after_a_report_and_each_period_while_pods_exceed_the_quota(api: Cluster) -> None:
    watched = Watched(api, enforce=False)
    watched.watcher.report("team-a", None)
    watched.clock.now += 1.0
    queue = watched.watcher.reconciler.queue
    for _ in range(3):
        assert queue.next() == "team-a"
        watched.watcher.reconciler.turn("team-a")
        watched.clock.now += PERIOD
