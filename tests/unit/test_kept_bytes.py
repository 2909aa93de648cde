"""Tests that the controller keeps only small parts of tenants' large objects in memory."""

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import structlog

from controller.recount.labels import ENFORCED_LABEL, NamespaceLabels
from controller.recount.publisher import Publisher
from controller.retry.claim_retrier import ClaimRetrier
from controller.retry.rejected import (
    MAX_OWNER_BYTES,
    MAX_REJECTED,
    MAX_UID_LENGTH,
    Owner,
    RejectedOwner,
    RejectedOwners,
    rejected_by_events,
)
from controller.seen_events import CLAIM_REASON
from controller.ui.events import ReportedEvents
from tests.api_double import ApiDouble
from tests.builders import Manifest
from tests.tables import cases
from tests.unit.test_retrier import Retried
from tests.unit.test_stored_claims import report
from vcuda.errors import ListOverdue
from vcuda.kube import QuotaInformer, QuotaSource
from vcuda.quota.rejections import OVER_QUOTA
from vcuda.quota.well_known import USAGE_KEY, USAGE_LABELS, USAGE_NAME

MIB = 2**20
LARGE = "x" * MIB
EVENTS = "/api/v1/namespaces/team-a/events"


@contextmanager
def keeping_at_most(most: int) -> Iterator[None]:
    """Fail if, at the end of the ``with`` block, more than ``most`` bytes that the block allocated are still in use."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before <= most


# Tests of the memory that is kept for Events


def store_event(api: ApiDouble, name: str, /, **about: str) -> None:
    metadata = {"name": name, "namespace": "team-a", "uid": f"event-{name}"}
    message = f"{OVER_QUOTA}: M40 in namespace team-a {'x' * 1000}"
    api.store(
        f"{EVENTS}/{name}", {"metadata": metadata, "involvedObject": about, "message": message, "reason": CLAIM_REASON}
    )


@cases(
    "about",
    another_kind={"kind": "Nonsense", "name": "train", "uid": "1"},
    a_long_kind={"kind": LARGE, "name": "train", "uid": "1"},
    a_long_name={"kind": "Pod", "name": LARGE, "uid": "1"},
    a_long_uid={"kind": "Pod", "name": "train", "uid": "u" * (MAX_UID_LENGTH + 1)},
)
def test_an_event_about_an_impossible_object_is_skipped(api: ApiDouble, about: dict[str, str]) -> None:
    store_event(api, "forged", **about)
    store_event(api, "real", kind="Pod", name="train", uid="1")
    assert [each.name for each in rejected_by_events(api.kube, "team-a", CLAIM_REASON, ("Pod",))] == ["train"]


def test_the_number_of_kept_objects_of_events_is_bounded(api: ApiDouble) -> None:
    for number in range(MAX_REJECTED + 50):
        store_event(api, f"{number}", kind="Pod", name=f"train-{number}", uid=f"{number}")
    found = rejected_by_events(api.kube, "team-a", CLAIM_REASON, ("Pod",))
    assert len(found) == MAX_REJECTED
    rest = rejected_by_events(api.kube, "team-a", CLAIM_REASON, ("Pod",), leave_out={each.uid for each in found})
    assert len(rest) == 50


def test_the_number_of_pods_read_per_increase_of_free_quota_is_bounded(
    api: ApiDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.retry.claim_retrier.MAX_WOKEN", 30)
    for number in range(50):
        store_event(api, f"{number}", kind="Pod", name=f"train-{number}", uid=f"{number}")
    retrier = ClaimRetrier(api.kube, lambda: True)
    retrier.report("team-a", report(0))
    for _ in range(5):
        retrier.reconciler.turn("team-a")
    assert api.calls.count("GET") == 30


def test_a_message_of_a_megabyte_is_not_kept_by_the_page(api: ApiDouble) -> None:
    for number in range(10):
        store_event(api, f"{number}", kind="Pod", name=f"train-{number}")
        stored = api.objects[f"{EVENTS}/{number}"]
        stored["message"] = f"{OVER_QUOTA}: M40 in namespace team-a {LARGE}"
    events = ReportedEvents(api.kube)
    with keeping_at_most(100_000):
        events.read()
    assert len(events.current().rejections or ()) == 10


# Tests of the memory that is kept for owners (the controllers of pods)


def rejected_owner(name: str, size: int) -> RejectedOwner:
    return RejectedOwner(name, "2026-01-01T00:00:00Z", Owner(), size)


def test_large_owners_are_kept_within_the_bound_and_each_gets_a_turn() -> None:
    size = MAX_OWNER_BYTES // 3
    names = [f"train-{number}" for number in range(7)]
    judged = set[str]()
    looks = []
    for _ in range(3):
        found = RejectedOwners(judged)
        for name in names:
            found.add(rejected_owner(name, size))
        looks.append(([each.path for each in found.owners], found.complete))
        judged |= {each.path for each in found.owners}
    assert looks == [
        (["train-0", "train-1", "train-2"], False),
        (["train-3", "train-4", "train-5"], False),
        (["train-6", "train-0", "train-1"], True),
    ]


def test_an_owner_that_is_larger_than_the_bound_is_kept_alone() -> None:
    found = RejectedOwners()
    found.add(rejected_owner("huge", 2 * MAX_OWNER_BYTES))
    found.add(rejected_owner("small", 1))
    assert [each.path for each in found.owners] == ["huge"]


def test_large_workloads_are_all_finally_retried(api: ApiDouble) -> None:
    retried = Retried(api, owners=12)
    for manifest in api.objects.values():
        if "spec" in manifest:
            manifest["spec"]["template"]["metadata"] = {"annotations": {"note": "x" * (MAX_OWNER_BYTES // 4)}}
    told = []
    for _ in range(5):
        retried.retrier.reconciler.turn("team-a")
        retried.now += 10
        told.append(retried.told())
    assert told[0] <= 4
    assert told[-1] == 12


def test_a_namespace_whose_workloads_cannot_be_listed_in_time_rests(api: ApiDouble) -> None:
    retried = Retried(api, owners=1)

    def overdue(*_: object, **__: object) -> object:
        retried.now += 10
        raise ListOverdue("LIST took longer than 10 s")

    api.list_pages = overdue  # type: ignore[method-assign, assignment]
    with structlog.testing.capture_logs() as logs:
        retried.retrier.reconciler.turn("team-a")
    assert [line["event"] for line in logs] == ["rejected workloads not listed in time"]
    retried.queue.add("team-b")
    retried.now += 80
    assert retried.queue.next() == "team-b"
    retried.now += 11
    assert retried.queue.next() == "team-a"


# Tests of the memory that is kept for watched objects


def labels(api: ApiDouble) -> NamespaceLabels:
    return NamespaceLabels(api.kube, QuotaInformer(api.kube, QuotaSource(), frozenset()), lambda _: None)


@cases(
    "path, large, watched",
    annotations_of_a_namespace=(
        "/api/v1/namespaces/team-{}",
        {"labels": {ENFORCED_LABEL: "false"}, "annotations": {"note": LARGE}},
        lambda api: labels(api).reflector,
    ),
    a_report_that_a_tenant_wrote=(
        f"/api/v1/namespaces/team-{{}}/configmaps/{USAGE_NAME}",
        {"labels": USAGE_LABELS},
        lambda api: Publisher(api.kube).published,
    ),
)
def test_only_a_small_part_of_a_large_object_is_kept(
    api: ApiDouble, path: str, large: Manifest, watched: Callable[[ApiDouble], object]
) -> None:
    for number in range(10):
        where = path.format(number)
        metadata = {"name": where.rpartition("/")[2], "namespace": f"team-{number}", "uid": str(number), **large}
        api.store(where, {"metadata": metadata, "data": {USAGE_KEY: LARGE}})
    reflector = watched(api)
    with keeping_at_most(100_000):
        reflector.relist()  # type: ignore[attr-defined]
    assert len(reflector.snapshot()) == 10  # type: ignore[attr-defined]
