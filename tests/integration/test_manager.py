"""Tests of the leader of the controllers: its reported health, objects that it cannot decode, and its stop."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from controller.cli import run
from controller.garbage import stale_gc
from controller.manager import Leader, RunOptions
from controller.seen_events import REASON
from controller.ui.document import Document, ModelCards
from controller.ui.leading import LeaderSource
from examples.allocations import allocated_pod
from examples.discovery import A100_PRODUCT, features, labelled, node
from tests.api_double import ApiDouble, Delivery, Effect
from tests.builders import LABELS, container, stored_pod
from tests.cleaner import POD, START, marks_on
from tests.processes import eventually
from tests.quota_map import store_quota
from tests.waiting import PATIENT
from vcuda.quota.rejections import OVER_QUOTA
from vcuda.quota.well_known import LEDGER_NAMESPACE
from vcuda.requests.schemes import GPU_MANAGER


@pytest.fixture
def leader(api: ApiDouble) -> Iterator[Leader]:
    """The part of a controller that runs only in the leader. It is not started yet. The cluster has one failed pod."""
    api.store(POD, allocated_pod(GPU_MANAGER, START, status="Failed"))
    faults: list[str] = []
    registry, on_fault = CollectorRegistry(), partial(faults.append, "a loop")
    given = ["--model-label", LABELS.model, "--pool-label", LABELS.pool, "--webhook-service", ""]
    options = RunOptions(**run.make_context("run", given).params)
    leader = Leader(api.kube, options, registry, on_fault=on_fault)
    yield leader
    leader.stop()
    for reflector in leader.reflectors().values():
        reflector.join(PATIENT)
    assert faults == []


def test_a_leader_is_unhealthy_if_its_garbage_loop_is_stuck_or_a_watch_has_ended(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader.watch()
    leader.lead()
    assert leader.trouble() is None
    monkeypatch.setattr(leader.garbage, "is_stuck", lambda: True)
    assert leader.trouble() == "the loop that removes stale allocations is stuck"
    leader.nodes.reflector.stop()
    leader.nodes.reflector.join(PATIENT)
    assert leader.trouble() == "a watch of Kubernetes objects has ended"


CONFIG_MAPS = "/api/v1/namespaces/{}/configmaps"
CANNOT_BE_DECODED: dict[str, dict[str, Any]] = {
    "/api/v1/nodes/bad": {"metadata": {"name": "bad", "labels": 3}},
    "/api/v1/namespaces/bad": {"metadata": {"name": "bad", "labels": 3}},
    "/api/v1/namespaces/bad/pods/bad": {"metadata": {"name": "bad", "namespace": "bad"}, "spec": "?"},
    f"{CONFIG_MAPS.format('vcuda-quota')}/gpu-ledger-bad": {
        "metadata": {"name": "gpu-ledger-bad", "labels": {"quota.vcuda.io/ledger-of": "bad"}},
        "data": {"ledger": "{"},
    },
    f"{CONFIG_MAPS.format('bad')}/gpu-quota-usage": {"metadata": {"name": "gpu-quota-usage"}, "data": 3},
    "/apis/apps/v1/namespaces/team-a/replicasets/bad": {"metadata": {"name": "bad"}, "spec": 3},
    "/api/v1/namespaces/team-a/events/bad": {"metadata": {"name": "bad"}, "involvedObject": 3},
}
"""An object that cannot be decoded, in each collection that a loop of the leader reads."""


def test_an_object_that_cannot_be_decoded_affects_no_other_in_any_loop(api: ApiDouble, leader: Leader) -> None:
    store_quota(api, "team-a: {quota: {M40: 4}}")
    for name in ("team-a", "team-b"):
        api.store(f"/api/v1/namespaces/{name}", {"metadata": {"name": name, "uid": name}})
    condition = {"type": "ReplicaFailure", "status": "True", "message": f"{OVER_QUOTA}: M40 in namespace team-a"}
    template = {"spec": {"containers": [container({"tencent.com/vcuda-core": 100})]}}
    rejected = {"spec": {"replicas": 1, "template": template}, "status": {"conditions": [condition]}}
    waiting = "/apis/apps/v1/namespaces/team-a/replicasets/good"
    api.store(waiting, {"metadata": {"name": "good"}, **rejected})
    api.objects.update(CANNOT_BE_DECODED)
    done: dict[str, Callable[[], object]] = {
        "freed": lambda: not marks_on(api),
        "told": lambda: "annotations" in api.objects[waiting]["metadata"],
        "published": lambda: f"{CONFIG_MAPS.format('team-a')}/gpu-quota-usage" in api.objects,
        "labelled": lambda: "labels" in api.objects["/api/v1/namespaces/team-b"]["metadata"],
    }
    leader.watch()
    leader.lead()
    eventually(lambda: all(each() for each in done.values()), lambda: {name: each() for name, each in done.items()})
    assert leader.trouble() is None


LEDGER = f"{CONFIG_MAPS.format(LEDGER_NAMESPACE)}/gpu-ledger-team-a"


@pytest.fixture
def limited(api: ApiDouble) -> ApiDouble:
    """A namespace with a limit. Its ledger must count one stored pod, and another pod has a stale allocation."""
    store_quota(api, "team-a: {quota: {M40: 4}}")
    api.store("/api/v1/namespaces/team-a", {"metadata": {"name": "team-a", "uid": "team-a"}})
    counted = stored_pod({"tencent.com/vcuda-core": 100})
    counted["metadata"] = {"name": "p", "namespace": "team-a", "uid": "p"}
    api.store("/api/v1/namespaces/team-a/pods/p", counted)
    api.forget_calls()
    return api


def writes(api: ApiDouble) -> set[str]:
    return {*api.calls} - {"GET", "LIST"}


def test_a_standby_keeps_all_watches_and_writes_nothing(limited: ApiDouble, leader: Leader) -> None:
    leader.watch()
    eventually(lambda: leader.ready, lambda: "not ready")
    for name in ("a", "b"):
        limited.store(f"/api/v1/namespaces/{name}", {"metadata": {"name": name, "uid": name}})
    leader.namespaces.reflector.relist()
    assert leader.recounter.queue.lag() == 0.0
    assert not writes(limited)


def test_a_standby_recounts_ledgers_while_the_leader_is_silent_and_does_nothing_else(
    limited: ApiDouble, leader: Leader
) -> None:
    silent = threading.Event()
    leader.watch(silent.is_set)
    eventually(lambda: leader.ready, lambda: "not ready")
    silent.set()
    eventually(lambda: "M40" in str(limited.objects.get(LEDGER)), limited.objects.keys)
    assert f"{CONFIG_MAPS.format('team-a')}/gpu-quota-usage" not in limited.objects
    assert marks_on(limited), "only the leader removes stale allocations"
    silent.clear()

    def recounts() -> bool:
        leader.recounter.queue.add("later", 600)
        return leader.recounter.queue.is_active("later")

    eventually(lambda: not recounts(), lambda: "the standby still recounts")


def test_a_standby_that_becomes_the_leader_does_all_the_work_that_is_due(limited: ApiDouble, leader: Leader) -> None:
    leader.watch()
    eventually(lambda: leader.ready, lambda: "not ready")
    leader.lead()
    done: dict[str, Callable[[], object]] = {
        "recounted": lambda: "M40" in str(limited.objects.get(LEDGER)),
        "freed": lambda: not marks_on(limited),
        "published": lambda: f"{CONFIG_MAPS.format('team-a')}/gpu-quota-usage" in limited.objects,
    }
    eventually(lambda: all(each() for each in done.values()), lambda: {name: each() for name, each in done.items()})


def event(name: str, reason: str, message: str) -> dict[str, Any]:
    metadata = {"namespace": "team-a", "name": name, "uid": name, "creationTimestamp": "2026-01-01T00:00:00Z"}
    involved = {"kind": "Job", "namespace": "team-a", "name": name}
    return {"metadata": metadata, "involvedObject": involved, "message": message, "reason": reason}


def test_the_page_shows_the_usage_the_cards_and_the_events_that_the_leader_reads(
    api: ApiDouble, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a node with MIG devices, the page shows as many cards as `kubectl gpuquota nodes`."""
    monkeypatch.setattr("controller.ui.document.MIN_INTERVAL_SECONDS", 0.0)
    store_quota(api, "team-a: {quota: {A100: 4}}")
    api.store("/api/v1/namespaces/team-a", {"metadata": {"name": "team-a", "uid": "team-a"}})
    mig = {**features(A100_PRODUCT, count="8"), "allocatable": {"nvidia.com/mig-1g.5gb": "56"}}
    api.store("/api/v1/nodes/gpu-1", node(mig, labelled("A100")))
    for name, reason, message in (
        ("rejected", REASON, f"{OVER_QUOTA}: A100 in namespace team-a"),
        ("removed", stale_gc.REASON, "the stale allocation was removed"),
    ):
        api.store(f"/api/v1/namespaces/team-a/events/{name}", event(name, reason, message))
    source = LeaderSource(api.kube, leader, "https://docs.example").documents()

    def shown() -> Document:
        return source.current()[0]

    leader.watch()
    leader.lead()
    eventually(lambda: [each.namespace for each in shown().namespaces] == ["team-a"], shown)
    eventually(lambda: shown().models == [ModelCards("A100", 8, 0, 4)], shown)
    eventually(lambda: [each.name for each in shown().rejections or ()] == ["rejected"], shown)
    assert [each.name for each in shown().removals or ()] == ["removed"]
    assert (shown().beyond, shown().docs, shown().grafana) == ([], "https://docs.example", "")


@pytest.fixture
def queued(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The namespaces whose rejected workloads the leader retries after a change of models or offered resources."""
    found: list[set[str]] = []
    monkeypatch.setattr(leader.retrier, "models_changed", lambda names: found.append({*names}))
    return found


def test_a_change_of_a_nodes_model_makes_pods_without_a_usable_model_retry(
    api: ApiDouble, leader: Leader, queued: list[set[str]]
) -> None:
    store_quota(api, "team-a: {quota: {M40: 4}}")
    leader.watch()
    leader.lead()
    eventually(lambda: len(queued) == 2, lambda: queued)  # at the first quota document, and at the start of the loops
    queued.clear()
    api.store("/api/v1/nodes/n1", {"metadata": {"name": "n1", "uid": "n1", "labels": {LABELS.model: "M40"}}})
    leader.nodes.reflector.relist()  # the double of the API server has no watches
    eventually(lambda: {"team-a"} in queued, lambda: queued)


def test_pods_without_a_model_retry_when_a_node_offers_a_resource_if_the_quota_requires_nodes(
    api: ApiDouble, leader: Leader, queued: list[set[str]]
) -> None:
    store_quota(api, "{team-a: {require_nodes: true, quota: {M40: 4}}, team-b: {quota: {M40: 4}}}")
    plain: dict[str, Any] = {"metadata": {"name": "n1", "uid": "n1"}}
    api.store("/api/v1/nodes/n1", plain)
    leader.watch()
    leader.lead()
    eventually(lambda: len(queued) == 2, lambda: queued)  # at the first quota document, and at the start of the loops
    for amount, retried in (("8", True), ("0", False), ("4", True)):
        queued.clear()
        api.store("/api/v1/nodes/n1", {**plain, "status": {"allocatable": {"nvidia.com/gpu": amount}}})
        leader.nodes.reflector.relist()
        if retried:
            eventually(lambda: {"team-a"} in queued, lambda: queued)
        assert queued == [{"team-a"}] * retried


def after(method: str, act: Callable[[], object]) -> Delivery:
    def deliver(called: str, _timeout: float, effect: Effect) -> bytes:
        answer = effect()
        if called == method:
            act()
        return answer

    return deliver


def test_a_stop_waits_for_the_removal_in_progress(
    api: ApiDouble, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller is stopped after it has patched a pod, and before it writes the Event about this."""
    monkeypatch.setattr("controller.manager.STOP_TIMEOUT_SECONDS", PATIENT)
    patched, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        patched.set()
        assert goes_on.wait(PATIENT)

    api.deliver = after("PATCH", hold)
    leader.watch()
    leader.lead()
    assert patched.wait(PATIENT)
    stopping = threading.Thread(target=leader.stop)
    stopping.start()
    leader.nodes.reflector.join(PATIENT)  # the leader first stops its loops, and then the writer of Events
    goes_on.set()
    stopping.join(PATIENT)
    assert marks_on(api) == {}
    assert any("/events/" in path for path in api.objects)
