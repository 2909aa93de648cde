"""Refusals and removals, from the Events that tell of them."""

from typing import Any

import msgspec
import pytest

from controller.ui.events import MAX_MESSAGE_LENGTH, Newest, StoredEvent, merge_by_workload, read_refusal, read_removal
from controller.ui.snapshot import RefusedWorkload, RemovedAllocation

QUOTA = "exceeded GPU quota: M40 in namespace team-a, requested: 2 cards, used: 7 (1 pending), limited: 8"
NEW_YEAR = "2026-01-01T00:00:00Z"
DENIED = 'Error creating: admission webhook "validate.quota.vcuda.io" denied the request: '


def event(message: str | None, **fields: Any) -> StoredEvent:
    """An Event of a ReplicaSet, as the API server has it."""
    metadata = {"namespace": "team-a", "name": "train.17", "uid": "e1", "creationTimestamp": NEW_YEAR}
    involved = {"kind": "ReplicaSet", "namespace": "team-a", "name": "train-6d9"}
    stored = {"metadata": metadata, "involvedObject": involved, "message": message, **fields}
    return msgspec.json.decode(msgspec.json.encode(stored), type=StoredEvent)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        pytest.param(DENIED + QUOTA, QUOTA, id="over quota"),
        pytest.param(f"create Pod train-0 in StatefulSet failed: {DENIED}{QUOTA}", QUOTA, id="another owner's words"),
        pytest.param(DENIED + "malformed GPU request: spec: 150", "malformed GPU request: spec: 150", id="malformed"),
        pytest.param(DENIED + "namespace a may use no GPU model", "namespace a may use no GPU model", id="any of ours"),
        pytest.param(QUOTA, QUOTA, id="by its own words, whatever the webhook is called"),
        pytest.param(DENIED + "two\nlines", "two\nlines", id="more than a line"),
        pytest.param(DENIED + "x" * 5000, "x" * MAX_MESSAGE_LENGTH, id="long, so it is cut"),
    ],
)
def test_a_refusal_of_ours_is_known_by_the_webhook_or_by_its_words(message: str, reason: str) -> None:
    refusal = read_refusal(event(message))
    assert refusal == RefusedWorkload("team-a", "ReplicaSet", "train-6d9", reason, NEW_YEAR, 1)


@pytest.mark.parametrize(
    "message",
    [
        None,
        "",
        'Error creating: pods "train-" is forbidden: exceeded quota: compute, requested: cpu=1',
        'Error creating: admission webhook "policy.example.com" denied the request: no',
        'Error creating: Internal error occurred: failed calling webhook "validate.quota.vcuda.io": timeout',
    ],
    ids=["none", "empty", "ResourceQuota", "another webhook", "webhook away"],
)
def test_what_others_refuse_is_not_shown(message: str | None) -> None:
    assert read_refusal(event(message)) is None


@pytest.mark.parametrize(
    ("fields", "at", "times"),
    [
        ({}, NEW_YEAR, 1),
        ({"count": 4, "lastTimestamp": "2026-01-02T00:00:00Z"}, "2026-01-02T00:00:00Z", 4),
        ({"eventTime": "2026-01-03T00:00:00.1Z", "lastTimestamp": None}, "2026-01-03T00:00:00.1Z", 1),
        (
            {"eventTime": "2026-01-03T00:00:00Z", "series": {"count": 9, "lastObservedTime": "2026-01-04T00:00:00Z"}},
            "2026-01-04T00:00:00Z",
            9,
        ),
    ],
    ids=["bare", "core v1", "events.k8s.io", "a series"],
)
def test_every_writer_of_events_sets_other_times(fields: dict[str, Any], at: str, times: int) -> None:
    found = event(DENIED + QUOTA, **fields)
    assert (found.at, found.times) == (at, times)


def test_a_removal_names_its_object() -> None:
    removed = event("removed the allocation of hami: old", involvedObject={"kind": "Node", "name": "gpu-1"})
    assert read_removal(removed) == RemovedAllocation(
        "", "gpu-1", "Node", "removed the allocation of hami: old", NEW_YEAR
    )


def refusal(name: str, at: int, message: str = "no", count: int = 1) -> RefusedWorkload:
    return RefusedWorkload("team-a", "ReplicaSet", name, message, f"2026-01-01T00:00:{at:02}Z", count)


def test_one_workload_is_shown_once_with_its_newest_reason_and_the_sum_of_all() -> None:
    events = [refusal("a", 9, "newest", 2), refusal("b", 8), refusal("a", 7, "older", 5)]
    assert merge_by_workload(events) == (refusal("a", 9, "newest", 7), refusal("b", 8))


def test_only_the_newest_are_remembered() -> None:
    newest: Newest[RefusedWorkload] = Newest(2)
    for at in (5, 9, 7):
        newest.add(f"e{at}", refusal("a", at))
    assert [each.at[-3:-1] for each in newest.all()] == ["09", "07"]


def test_an_event_that_happens_again_takes_its_own_place() -> None:
    newest: Newest[RefusedWorkload] = Newest(2)
    for uid, told in (("same", refusal("a", 1)), ("same", refusal("a", 3)), ("other", refusal("b", 2))):
        newest.add(uid, told)
    assert newest.all() == [refusal("a", 3), refusal("b", 2)]
