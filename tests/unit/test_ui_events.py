"""Tests of the search in Events for the rejections and removals that the usage page shows."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from controller.refusals import MAX_MESSAGE_LENGTH, ReportedObject, SeenEvent, merge_by_workload, read_refusal
from controller.ui.events import Newest, StoredEvent, read_removal
from controller.ui.snapshot import choose
from examples.usage import NOW
from tests.tables import cases

QUOTA = "exceeded quota: M40 in namespace team-a, requested: 2 cards, used: 7 (1 pending), limited: 8"
NEW_YEAR = "2026-01-01T00:00:00Z"
DENIED = 'Error creating: admission webhook "validate.quota.vcuda.io" denied the request: '


def event(message: str | None, **fields: Any) -> SeenEvent:
    metadata = {"namespace": "team-a", "name": "train.17", "uid": "e1", "creationTimestamp": NEW_YEAR}
    involved = {"kind": "ReplicaSet", "namespace": "team-a", "name": "train-6d9"}
    stored = {"metadata": metadata, "involvedObject": involved, "message": message, **fields}
    return SeenEvent.of(msgspec.json.decode(msgspec.json.encode(stored), type=StoredEvent), NOW)


@cases(
    "message, reason",
    over_quota=(DENIED + QUOTA, QUOTA),
    with_the_text_of_another_owner=(f"create Pod train-0 in StatefulSet failed: {DENIED}{QUOTA}", QUOTA),
    malformed=(DENIED + "malformed GPU request: spec: 150", "malformed GPU request: spec: 150"),
    any_of_our_messages=(DENIED + "namespace a may use no GPU model", "namespace a may use no GPU model"),
    by_its_text_without_the_webhooks_name=(QUOTA, QUOTA),
    more_than_one_line=(DENIED + "two\nlines", "two\nlines"),
    a_long_message_is_cut=(DENIED + "x" * 5000, "x" * MAX_MESSAGE_LENGTH),
)
def test_our_rejection_is_recognized_by_the_webhook_or_its_text(message: str, reason: str) -> None:
    refusal = read_refusal(event(message))
    assert refusal == ReportedObject("team-a", "ReplicaSet", "train-6d9", reason, NEW_YEAR, 1)


@cases(
    "message",
    none=None,
    empty="",
    ResourceQuota='Error creating: pods "train-" is forbidden: exceeded quota: compute, requested: cpu=1',
    another_webhook='Error creating: admission webhook "policy.example.com" denied the request: no',
    webhook_away='Error creating: Internal error occurred: failed calling webhook "validate.quota.vcuda.io": timeout',
)
def test_rejections_by_others_are_not_shown(message: str | None) -> None:
    assert read_refusal(event(message)) is None


@cases(
    "fields, at, times",
    bare=({}, NEW_YEAR, 1),
    core_v1=({"count": 4, "lastTimestamp": "2026-01-02T00:00:00Z"}, "2026-01-02T00:00:00Z", 4),
    events_k8s_io=({"eventTime": "2026-01-03T00:00:00.1Z", "lastTimestamp": None}, "2026-01-03T00:00:00.1Z", 1),
    a_series=(
        {"eventTime": "2026-01-03T00:00:00Z", "series": {"count": 9, "lastObservedTime": "2026-01-04T00:00:00Z"}},
        "2026-01-04T00:00:00Z",
        9,
    ),
)
def test_every_writer_of_events_sets_other_times(fields: dict[str, Any], at: str, times: int) -> None:
    found = event(DENIED + QUOTA, **fields)
    assert (found.at, found.times) == (at, times)


@pytest.mark.parametrize("forged", ["9999-12-31T23:59:59Z", "2026-03-04T12:02:00Z", "1970-01-01T00:00:00Z", "soon"])
@pytest.mark.parametrize("field", ["lastTimestamp", "eventTime", "series"])
def test_an_impossible_time_is_ignored(field: str, forged: str) -> None:
    """A time in the future, or before the Event was stored, is replaced by the API server's time of storing."""
    written = {"lastObservedTime": forged} if field == "series" else forged
    assert event(DENIED + QUOTA, **{field: written}).at == NEW_YEAR


def test_a_removal_names_its_object() -> None:
    removed = event("the stale allocation of hami was removed: old", involvedObject={"kind": "Node", "name": "gpu-1"})
    assert read_removal(removed) == ReportedObject(
        "", "Node", "gpu-1", "the stale allocation of hami was removed: old", NEW_YEAR
    )


def refusal(name: str, at: int, message: str = "no", count: int = 1) -> ReportedObject:
    return ReportedObject("team-a", "ReplicaSet", name, message, f"2026-01-01T00:00:{at:02}Z", count)


def test_one_workload_is_shown_once_with_its_newest_reason_and_the_sum_of_all() -> None:
    events = [refusal("a", 9, "newest", 2), refusal("b", 8), refusal("a", 7, "older", 5)]
    assert merge_by_workload(events) == (refusal("a", 9, "newest", 7), refusal("b", 8))


def remembered(*told: tuple[str, int], most: int = 9, most_of_one: int = 9) -> list[str]:
    """Add a rejection for each namespace and second. Return the remembered ones as NAMESPACE/SECOND, newest first."""
    newest: Newest = Newest(most, most_of_one)
    for namespace, at in told:
        newest.add(namespace, f"{namespace}/{at}", refusal(f"{namespace}/{at}", at))
    return [each.name for each in newest.all()]


def test_only_the_newest_are_remembered() -> None:
    assert remembered(("a", 5), ("a", 9), ("a", 7), most_of_one=2) == ["a/9", "a/7"]


def test_events_of_one_namespace_never_displace_those_of_another() -> None:
    """If the memory for Events is full, the namespace with the most Events loses one."""
    storm = [(namespace, at) for at in range(20, 59) for namespace in ("x", "y")]
    assert "a/1" in remembered(("a", 1), *storm, most=5, most_of_one=3)
    assert remembered(("a", 1), ("b", 2), *storm, most=3).count("b/2") == 1


def test_a_repeated_event_replaces_itself() -> None:
    newest: Newest = Newest(2)
    for uid, told in (("same", refusal("a", 1)), ("same", refusal("a", 3)), ("other", refusal("b", 2))):
        newest.add("team-a", uid, told)
    assert newest.all() == [refusal("a", 3), refusal("b", 2)]


def test_the_newest_of_each_namespace_is_listed_before_any_second_one() -> None:
    told = [replace(refusal(f"{at}", at), namespace="x" if at > 3 else f"team-{at}") for at in (9, 8, 7, 3, 1)]
    assert [each.name for each in choose(told, 3)] == ["9", "3", "1"]
    assert choose(told) == told
