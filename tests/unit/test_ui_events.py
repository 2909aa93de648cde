"""Tests of how the usage page finds rejections and removals in Events."""

from dataclasses import replace
from http import HTTPStatus
from typing import Any

import msgspec
import pytest

from controller.garbage import stale_gc
from controller.seen_events import (
    CLAIM_REASON,
    MAX_MESSAGE_LENGTH,
    REASON,
    ReportedObject,
    SeenEvent,
    merge_by_workload,
    read_rejection,
)
from controller.ui.events import PERIOD_SECONDS, Newest, Reported, ReportedEvents, StoredEvent, by_turns, read_removal
from examples.usage import NOW
from tests.api_double import ApiDouble, rejected
from tests.processes import eventually
from tests.tables import cases
from vcuda.errors import ApiError

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
    rejection = read_rejection(event(message))
    assert rejection == ReportedObject("team-a", "ReplicaSet", "train-6d9", reason, NEW_YEAR, 1)


@cases(
    "message",
    none=None,
    empty="",
    ResourceQuota='Error creating: pods "train-" is forbidden: exceeded quota: compute, requested: cpu=1',
    another_webhook='Error creating: admission webhook "policy.example.com" denied the request: no',
    webhook_away='Error creating: Internal error occurred: failed calling webhook "validate.quota.vcuda.io": timeout',
)
def test_rejections_by_others_are_not_shown(message: str | None) -> None:
    assert read_rejection(event(message)) is None


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
    """A time in the future, or before the Event was stored, is replaced by the time when the API server stored it."""
    written = {"lastObservedTime": forged} if field == "series" else forged
    assert event(DENIED + QUOTA, **{field: written}).at == NEW_YEAR


def test_a_removal_names_its_object() -> None:
    removed = event("the stale allocation of hami was removed: old", involvedObject={"kind": "Node", "name": "gpu-1"})
    assert read_removal(removed) == ReportedObject(
        "", "Node", "gpu-1", "the stale allocation of hami was removed: old", NEW_YEAR
    )


def rejection(name: str, at: int, message: str = "no", count: int = 1) -> ReportedObject:
    return ReportedObject("team-a", "ReplicaSet", name, message, f"2026-01-01T00:00:{at:02}Z", count)


def test_one_workload_is_shown_once_with_its_newest_reason_and_the_sum_of_all() -> None:
    events = [rejection("a", 9, "newest", 2), rejection("b", 8), rejection("a", 7, "older", 5)]
    assert merge_by_workload(events) == (rejection("a", 9, "newest", 7), rejection("b", 8))


def remembered(*told: tuple[str, int], most: int = 9, most_of_one: int = 9) -> list[str]:
    """Add a rejection for each namespace and second. Return the remembered ones as NAMESPACE/SECOND, newest first."""
    newest: Newest = Newest(most, most_of_one)
    for namespace, at in told:
        newest.add(namespace, f"{namespace}/{at}", rejection(f"{namespace}/{at}", at))
    return [each.name for each in newest.all()]


def test_only_the_newest_are_remembered() -> None:
    assert remembered(("a", 5), ("a", 9), ("a", 7), most_of_one=2) == ["a/9", "a/7"]


def test_events_of_one_namespace_never_displace_those_of_another() -> None:
    """If the memory for Events is full, an Event of the namespace with the most Events is removed."""
    storm = [(namespace, at) for at in range(20, 59) for namespace in ("x", "y")]
    assert "a/1" in remembered(("a", 1), *storm, most=5, most_of_one=3)
    assert remembered(("a", 1), ("b", 2), *storm, most=3).count("b/2") == 1


def test_a_repeated_event_replaces_itself() -> None:
    newest: Newest = Newest(2)
    for uid, told in (("same", rejection("a", 1)), ("same", rejection("a", 3)), ("other", rejection("b", 2))):
        newest.add("team-a", uid, told)
    assert newest.all() == [rejection("a", 3), rejection("b", 2)]


def test_the_newest_of_each_namespace_is_listed_before_any_second_one() -> None:
    """The page shows only the first entries of the list. One namespace with many Events must not fill them."""
    told = [replace(rejection(f"{at}", at), namespace="x" if at > 3 else f"team-{at}") for at in (9, 8, 7, 3, 1)]
    assert [each.name for each in by_turns(told)] == ["9", "3", "1", "8", "7"]


def store_event(api: ApiDouble, name: str, reason: str, message: str) -> None:
    metadata = {"namespace": "team-a", "name": name, "uid": name, "creationTimestamp": NEW_YEAR}
    involved = {"kind": "ReplicaSet", "namespace": "team-a", "name": name}
    stored = {"metadata": metadata, "involvedObject": involved, "message": message, "reason": reason}
    api.store(f"/api/v1/namespaces/team-a/events/{name}", stored)


def test_the_events_are_listed_only_on_request_and_at_most_every_few_seconds(api: ApiDouble) -> None:
    now = [1000.0]
    events = ReportedEvents(api.kube, lambda: now[0])
    store_event(api, "pod", REASON, DENIED + QUOTA)
    store_event(api, "claim", CLAIM_REASON, DENIED + QUOTA)
    store_event(api, "gone", stale_gc.REASON, "the stale allocation was removed")
    assert api.calls == []
    assert events.current() == Reported()
    eventually(lambda: events.current() != Reported())
    found = events.current()
    assert {each.name for each in found.rejections or ()} == {"pod", "claim"}
    assert [each.name for each in found.removals or ()] == ["gone"]
    listed = len(api.calls)
    now[0] += PERIOD_SECONDS - 1
    events.current()
    assert len(api.calls) == listed
    now[0] += 1
    events.current()
    eventually(lambda: len(api.calls) == 2 * listed)


def test_the_rejections_are_not_known_while_the_events_cannot_be_listed(api: ApiDouble) -> None:
    events = ReportedEvents(api.kube)
    store_event(api, "pod", REASON, DENIED + QUOTA)
    events.read()
    assert events.current().rejections
    api.deliver = rejected(ApiError(HTTPStatus.FORBIDDEN, "no", ()), "LIST")
    events.read()
    assert events.current() == Reported()
