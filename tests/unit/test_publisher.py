"""Tests of the controller's usage reports: when they are written, and what happens if a write fails."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import structlog
from prometheus_client import CollectorRegistry

from controller.metrics import UsageCollector
from controller.recount.publisher import Publisher
from tests.api_double import ApiDouble, Script, delivered, lost_reply, rejected
from tests.replicas import Clock
from tests.tables import cases
from vcuda.errors import ApiError, Cause, NotFound, VcudaError
from vcuda.ledger.report import ModelUse, NamespaceUse, PodUse
from vcuda.quota.values import MIB
from vcuda.quota.well_known import UNSTORED_CAUSE

TERMINATING = ApiError(
    403,
    'configmaps "gpu-quota-usage" is forbidden: unable to create new content in namespace team-a because it is being '
    "terminated",
    (Cause("NamespaceTerminating", "namespace team-a is being terminated"),),
)
FORBIDDEN = ApiError(403, 'User "nobody" cannot create resource "configmaps" in API group "" in the namespace "team-a"')
M40 = {"model": "M40"}
USE = NamespaceUse("team-a", "enforce", ())


@pytest.fixture
def publisher(api: ApiDouble) -> Publisher:
    publisher = Publisher(api.kube)
    publisher.report("team-a", USE)
    return publisher


def publish(publisher: Publisher, times: int = 1) -> list[str]:
    """Publish the usage report of team-a ``times`` times. Return the warnings in the log."""
    with structlog.testing.capture_logs() as logs:
        for _ in range(times):
            publisher.reconciler.turn("team-a")
    return [line["event"] for line in logs if line["log_level"] == "warning"]


def published_in(api: ApiDouble) -> list[str]:
    return [path.split("/")[4] for path in api.objects]


@pytest.mark.parametrize("rejection", [TERMINATING, NotFound(404, "no such namespace")], ids=["terminating", "gone"])
def test_no_report_is_written_in_a_terminating_namespace(
    api: ApiDouble, publisher: Publisher, rejection: VcudaError
) -> None:
    api.deliver = rejected(rejection, "POST")
    assert publish(publisher) == []


def test_any_other_error_is_logged_and_retried(api: ApiDouble, publisher: Publisher) -> None:
    api.deliver = rejected(FORBIDDEN, "POST")
    assert publish(publisher) == ["usage not published"]
    api.deliver = delivered
    assert publish(publisher) == []
    assert published_in(api) == ["team-a"]


def test_a_write_without_an_answer_is_repeated(api: ApiDouble, publisher: Publisher) -> None:
    """The first write stores the report, but its answer is lost. The second write finds the stored report."""
    api.deliver = Script(lost_reply, methods=("POST",))
    assert publish(publisher, times=2) == ["usage not published"]
    assert (published_in(api), api.calls) == (["team-a"], ["PATCH", "POST", "PATCH"])


def use_of(**fields: Any) -> NamespaceUse:
    model = {"model": "M40", "limit": 10.0, "used": 2.0, "pending": 0.0, "available": 8.0, **fields}
    return replace(USE, models=(ModelUse(**model), ModelUse("P100", 4, 0, 0, 4)))


@cases(
    "fields, room",
    most_is_free=({}, True),
    a_tenth_is_free=({"available": 1.0}, True),
    less_than_a_tenth_is_free=({"available": 0.9}, False),
    a_model_whose_limit_is_zero=({"limit": 0.0, "available": 0.0}, True),
    as_much_is_free_as_the_largest_pod_has=({"available": 2.0, "pods": (PodUse("a", 200, 0),)}, True),
    less_is_free_than_the_largest_pod_has=({"available": 2.0, "pods": (PodUse("a", 250, 0),)}, False),
    a_tenth_of_the_memory_is_free=({"memory_limit": 100, "memory_used": 90}, True),
    less_than_a_tenth_of_the_memory_is_free=({"memory_limit": 100, "memory_used": 91}, False),
    memory_is_reserved=({"memory_limit": 100, "memory_used": 50, "memory_reserved": 41}, False),
    less_memory_than_the_largest_pod_has=(
        {"memory_limit": 100, "memory_used": 50, "pods": (PodUse("a", 10, 51),)},
        False,
    ),
)
def test_there_is_room_if_no_pod_like_the_stored_ones_could_be_rejected(fields: dict[str, Any], *, room: bool) -> None:
    assert use_of(**fields).has_room == room


@cases(
    "second, waits",
    there_is_room=(use_of(used=3.0, available=7.0), 5),
    there_is_hardly_any_room=(use_of(used=9.5, available=0.5), 1),
    another_limit=(use_of(limit=20.0, available=18.0), 1),
    another_mode=(replace(use_of(), mode="warn"), 1),
    limit_removed=(None, 1),
)
def test_reports_are_five_seconds_apart_if_no_pod_could_be_rejected_and_otherwise_one(
    api: ApiDouble, second: NamespaceUse | None, waits: float
) -> None:
    clock = Clock()
    publisher = Publisher(api.kube, clock.monotonic)
    queue = publisher.reconciler.queue
    publisher.report("team-a", use_of())
    assert queue.next() == "team-a", "the first report is written at once"
    publisher.report("team-a", second)
    clock.now += waits - 0.1
    queue.add("end")
    assert queue.next() == "end"
    clock.now += 0.1
    assert queue.next() == "team-a"


def test_only_writes_of_others_cause_another_report(api: ApiDouble) -> None:
    clock = Clock()
    publisher = Publisher(api.kube, clock.monotonic)
    publisher.report("team-a", use_of())
    assert publisher.reconciler.queue.next() == "team-a"
    publish(publisher)
    publisher.published.relist()
    publisher.reconciler.queue.add("end", 5)
    clock.now += 5
    assert publisher.reconciler.queue.next() == "end"
    [path] = api.objects
    api.store(path, {**api.objects[path], "data": {"usage.json": "{}"}})
    publisher.published.relist()
    assert publisher.reconciler.queue.next() == "team-a"
    publish(publisher)
    assert api.objects[path]["data"]["usage.json"] != "{}"


def test_a_report_equal_to_the_outdated_watch_still_replaces_the_newer_one(api: ApiDouble) -> None:
    publisher = Publisher(api.kube)
    published: list[float] = []
    for used in (1.0, 2.0, 1.0):
        publisher.report("team-a", use_of(used=used))
        publish(publisher)
        if not published:
            publisher.published.relist()
        [path] = api.objects
        published.append(msgspec.json.decode(api.objects[path]["data"]["usage.json"])["models"][0]["used"])
    assert published == [1, 2, 1]


def test_the_age_of_a_reservation_is_a_metric_while_cards_are_reserved() -> None:
    """In team-b nothing is reserved any more. The metric is absent, although an age is still recorded."""
    uses = {"team-a": use_of(reserved=3.0), "team-b": replace(use_of(), namespace="team-b")}
    registry = CollectorRegistry()
    registry.register(UsageCollector(lambda: uses, {"team-a": 7, "team-b": 99}.copy))
    labels = ({"namespace": namespace} for namespace in uses)
    assert [registry.get_sample_value("vcuda_quota_reservation_age_seconds", each) for each in labels] == [7, None]


def test_every_figure_of_a_report_is_a_gauge() -> None:
    model = ModelUse(
        "M40", limit=8, used=5, pending=2, available=1, memory_limit=40, memory_used=30, reserved=1, terminating=0.5
    )
    registry = CollectorRegistry()
    use = replace(use_of(), models=(model,), unpinned=("a", "b"), taking_effect=True, ledger_lost=True)
    registry.register(UsageCollector(lambda: {"team-a": use}, dict))
    expected = {
        "limit_cards": 8,
        "used_cards": 5,
        "pending_cards": 2,
        "terminating_cards": 0.5,
        "reserved_cards": 1,
        "limit_memory_bytes": 40 * MIB,
        "used_memory_bytes": 30 * MIB,
        "unpinned_pods": 2,
        "taking_effect": 1,
        "ledger_lost": 1,
    }
    for name, figure in expected.items():
        labels = {"namespace": "team-a", **(M40 if name.endswith(("_cards", "_bytes")) else {})}
        assert registry.get_sample_value(f"vcuda_quota_{name}", labels) == figure, name


def test_an_event_an_hour_names_the_likely_cause_of_charged_pods_that_are_not_created(
    api: ApiDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(api.kube)
    for minute, unstored in (("10:00", 0), ("10:01", 2), ("10:02", 3), ("11:00", 3)):
        monkeypatch.setattr("vcuda.k8s_types.time_now", lambda at=minute: f"2026-01-01T{at}:00Z")
        publisher.report("team-a", use_of(pending=4, unstored=unstored))
        publish(publisher)
    events = [each for path, each in api.objects.items() if "/events/" in path]
    assert [each["metadata"]["name"][-13:] for each in events] == ["2026-01-01t10", "2026-01-01t11"]
    subject = {"apiVersion": "v1", "kind": "ConfigMap", "name": "gpu-quota-usage", "namespace": "team-a"}
    assert all(each["involvedObject"] == subject for each in events)
    assert events[0]["message"] == (
        f"cards of namespace team-a are charged to pods that are not created (2 of M40): {UNSTORED_CAUSE}"
    )
