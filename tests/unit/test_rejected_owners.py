"""Tests of the search for rejected workloads, by their conditions, by Events, and by how many pods they lack."""

from collections.abc import Mapping
from typing import Any

import pytest

from controller.retry.rejected import find_rejected
from tests.api_double import ApiDouble
from tests.tables import cases
from tests.unit.test_retrier import REJECTED, REPLICA_SETS, failure, read, store_event
from vcuda.quota.rejections import may_pass_later, unpatched

# Tests of how many pods a workload lacks


def condition(type_: str, status: str) -> Mapping[str, Any]:
    return {"conditions": [{"type": type_, "status": status}]}


@cases(
    "spec, status, missing",
    a_ReplicaSet_or_StatefulSet=({"replicas": 3}, {"replicas": 1}, 2),
    no_pod_yet=({"replicas": 3}, {}, 3),
    scaled_to_zero=({"replicas": 0}, {}, 0),
    scaled_down_pods_not_deleted_yet=({"replicas": 1}, {"replicas": 3}, 0),
    a_DaemonSet=({}, {"desiredNumberScheduled": 4, "currentNumberScheduled": 1}, 3),
    a_DaemonSet_at_rest=({}, {"desiredNumberScheduled": 4, "currentNumberScheduled": 4}, 0),
    a_DaemonSet_without_nodes=({}, {"desiredNumberScheduled": 0}, 0),
    a_Job=({"parallelism": 3}, {"active": 1}, 2),
    a_work_queue_Job_that_has_finished_pods=({"parallelism": 3}, {"active": 1, "succeeded": 1}, 0),
    a_Job_with_few_completions=({"parallelism": 5, "completions": 3}, {}, 3),
    a_Job_near_its_end=({"parallelism": 5, "completions": 8}, {"active": 1, "succeeded": 6}, 1),
    a_Job_that_has_succeeded=({"parallelism": 1, "completions": 1}, {"succeeded": 1}, 0),
    a_Job_that_is_suspended=({"parallelism": 1, "completions": 1, "suspend": True}, {}, 0),
    a_Job_that_has_failed=({"parallelism": 1}, condition("Failed", "True"), 0),
    a_Job_that_has_not_failed=({"parallelism": 1}, condition("Failed", "False"), 1),
    a_Job_with_another_condition=({"parallelism": 1}, condition("X", "True"), 1),
)
def test_the_missing_pods_of_an_owner_are_counted(
    spec: Mapping[str, Any], status: Mapping[str, Any], missing: int
) -> None:
    assert read({"spec": spec, "status": status}).missing == missing


def test_a_terminating_owner_misses_no_pods() -> None:
    assert read({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "spec": {"replicas": 3}}).missing == 0


@cases(
    "conditions, since",
    rejected_for_quota=([failure()], "2026-01-01T00:00:00Z"),
    among_other_conditions=([failure(type="Available"), failure()], "2026-01-01T00:00:00Z"),
    not_pinned_while_mutate_was_unavailable=([failure(message=unpatched(["x"]))], "2026-01-01T00:00:00Z"),
    not_pinned_because_mutate_failed=([failure(message=unpatched(["x"], "HTTP 503"))], "2026-01-01T00:00:00Z"),
    rejected_by_another_quota=([failure(message="exceeded quota: q, requested: cpu=1, used: cpu=2")], None),
    the_condition_has_ended=([failure(status="False")], None),
    another_condition_with_the_same_text=([failure(type="Progressing")], None),
    without_a_time=([failure(lastTransitionTime=None)], ""),
    no_condition=([], None),
    null=(None, None),
)
def test_an_owner_is_rejected_since_the_time_of_its_condition(
    conditions: list[dict[str, str | None]] | None, since: str | None
) -> None:
    assert read({"status": {"conditions": conditions}}).rejected_since(may_pass_later) == since


JOB = {"metadata": {"name": "train"}, "spec": {"parallelism": 1}, "status": {}}


@cases(
    "name, found",
    its_own=("train", ["/apis/batch/v1/namespaces/team-a/jobs/train"]),
    a_deleted_owner=("gone", []),
    a_path_to_another_namespace=("../../team-b/jobs/train", []),
    a_path_to_the_parent=("..", []),
    none=("", []),
)
def test_an_event_leads_to_an_owner_in_its_namespace_or_to_none(api: ApiDouble, name: str, found: list[str]) -> None:
    """Tenants can write Events. An Event must not make the leader read an object in another namespace."""
    for namespace in ("team-a", "team-b"):
        api.store(f"/apis/batch/v1/namespaces/{namespace}/jobs/train", JOB)
    store_event(api, name)
    assert [each.path for each in find_rejected(api.kube, "team-a").owners] == found
    asked = ["GET"] if name in ("train", "gone") else []
    assert api.calls == ["LIST", "LIST", "LIST", *asked]


@pytest.mark.parametrize(
    "bad", [{"spec": {"replicas": "many"}}, {"status": [1]}, {"metadata": {"name": "bad", "labels": 3}}]
)
def test_a_workload_that_cannot_be_decoded_affects_no_other(bad: Mapping[str, Any], api: ApiDouble) -> None:
    """Of the two valid workloads, one has its rejection in its status conditions, and the other one in an Event."""
    collections = (REPLICA_SETS.format("team-a"), REJECTED), ("/apis/batch/v1/namespaces/team-a/jobs", JOB)
    for collection, good in collections:
        api.store(f"{collection}/good", {**good, "metadata": {"name": "good"}})
        bad_metadata = {"name": "bad", **bad.get("metadata", {})}
        api.objects[f"{collection}/bad"] = {**good, **bad, "metadata": bad_metadata}
    for name in ("good", "bad"):
        store_event(api, name)
    api.objects["/api/v1/namespaces/team-a/events/odd"] = {"metadata": {"name": "odd"}, "involvedObject": 7}
    found = [each.path for each in find_rejected(api.kube, "team-a").owners]
    assert found == [f"{collection}/good" for collection, _ in collections]
