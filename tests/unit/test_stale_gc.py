"""What is stale in the store is removed from pods and nodes, once, and nothing else; a loop that is stuck says so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controller.stale_gc import EVERYTHING, MAX_ATTEMPTS, PERIOD_SECONDS, RETRY_SECONDS, STUCK_PERIODS, report_only
from controller.workqueue import MAX_RETRY_SECONDS
from tests.allocated import NODE, allocated_pod, rfc3339
from tests.api_double import ApiDouble, Effect, Script, delivered, lost_reply, lost_request
from tests.cleaner import LOCK, NODES, POD, START, TIMEOUT, Cleaner, before, bind, lock, marks_on, store
from vcuda.errors import ApiError, Conflict, Unavailable
from vcuda.requests.schemes import GPU_MANAGER

HOLDER = "/api/v1/namespaces/team-a/pods/holder"

# Pods


def test_a_pod_is_looked_at_when_its_allocation_can_first_be_stale_and_freed_then(cleaner: Cleaner) -> None:
    store(cleaner, annotations={"own/one": "x"})
    cleaner.api.forget_calls()
    cleaner.now = START + TIMEOUT - 1
    assert cleaner.serve() == []
    assert cleaner.api.calls == []
    cleaner.now = START + TIMEOUT
    [line] = cleaner.serve()
    assert marks_on(cleaner) == {"own/one": "x"}
    assert cleaner.api.calls == ["GET", "PATCH", "POST"]
    assert (line["event"], line["log_level"]) == ("stale allocation removed", "info")
    assert (line["kind"], line["namespace"], line["name"], line["uid"]) == ("Pod", "team-a", "train-0", "uid-1")
    assert (line["scheme"], line["rule"]) == ("gpu-manager", "unbound")
    assert cleaner.removed("unbound") == 1
    [event] = cleaner.events()
    about = event["involvedObject"]
    assert (about["kind"], about["namespace"], about["name"], about["uid"]) == ("Pod", "team-a", "train-0", "uid-1")
    assert (event["reason"], event["type"]) == ("StaleAllocationRemoved", "Normal")
    assert event["message"].startswith("removed the allocation of gpu-manager: made at 2023-11-14T22:13:20Z, and the")
    assert "tencent.com/predicate-gpu-idx-0" in event["message"]


def test_what_was_removed_is_not_looked_at_again_while_the_watch_is_behind(cleaner: Cleaner) -> None:
    store(cleaner)
    cleaner.now = START + TIMEOUT
    cleaner.serve()
    cleaner.api.forget_calls()
    for _ in range(3):
        cleaner.gc.reconciler.turn(EVERYTHING)
        cleaner.serve()
    cleaner.watch()
    cleaner.gc.reconciler.turn(EVERYTHING)
    cleaner.serve()
    assert set(cleaner.api.calls) == {"LIST"}
    assert cleaner.removed("unbound") == 1


@pytest.mark.parametrize("between", [False, True], ids=["before the look", "between the look and the patch"])
def test_a_pod_that_is_bound_before_the_watch_has_seen_it_keeps_its_allocation(cleaner: Cleaner, between: bool) -> None:
    """The patch tests the version that was judged; what was judged anew is another pod."""
    store(cleaner)
    kept = marks_on(cleaner)
    cleaner.api.deliver = before("PATCH" if between else "GET", lambda: bind(cleaner))
    cleaner.now = START + TIMEOUT
    assert cleaner.serve() == []
    assert marks_on(cleaner) == kept
    assert ("PATCH" in cleaner.api.calls) is between
    assert (cleaner.removed("unbound"), cleaner.events()) == (0, [])


@pytest.mark.parametrize("times", [1, MAX_ATTEMPTS - 1])
def test_a_pod_that_somebody_else_writes_first_is_judged_anew_and_freed(cleaner: Cleaner, times: int) -> None:
    store(cleaner)
    label = {"labels": {"touched": "yes"}}

    def touch() -> None:
        pod = cleaner.api.objects[POD]
        cleaner.api.store(POD, {**pod, "metadata": {**pod["metadata"], **label}})

    cleaner.api.deliver = before("PATCH", touch, times)
    cleaner.now = START + TIMEOUT
    cleaner.serve()
    assert marks_on(cleaner) == {}
    assert cleaner.api.objects[POD]["metadata"]["labels"] == label["labels"]
    assert (cleaner.removed("unbound"), len(cleaner.events())) == (1, 1)


@pytest.mark.parametrize(
    ("refusal", "tries"),
    [
        pytest.param(ApiError(403, "you may not"), 1, id="no right"),
        pytest.param(Conflict(409, "the object has been modified"), MAX_ATTEMPTS, id="409"),
        pytest.param(ApiError(422, "the test failed"), MAX_ATTEMPTS, id="422"),
    ],
)
def test_a_patch_that_is_always_refused_is_given_up_and_tried_again_later(
    cleaner: Cleaner, refusal: ApiError, tries: int
) -> None:
    store(cleaner)
    kept = marks_on(cleaner)

    def refuse(method: str, _timeout: float, effect: Effect) -> bytes:
        if method == "PATCH":
            raise refusal
        return effect()

    cleaner.api.deliver = refuse
    cleaner.now = START + TIMEOUT
    [line] = cleaner.serve()
    assert (line["event"], line["log_level"]) == ("stale allocations not looked at", "warning")
    assert marks_on(cleaner) == kept
    assert cleaner.api.calls.count("PATCH") == tries
    cleaner.api.deliver = delivered
    assert cleaner.serve() == []
    cleaner.now += RETRY_SECONDS
    cleaner.serve()
    assert marks_on(cleaner) == {}


@pytest.mark.parametrize("loss", [lost_request, lost_reply])
def test_a_patch_whose_answer_is_lost_is_followed_by_another_look(cleaner: Cleaner, loss: Any) -> None:
    """Whether it landed shows then; if it did, nothing is left to be done."""
    store(cleaner)
    cleaner.api.deliver = Script(loss, methods=("PATCH",))
    cleaner.now = START + TIMEOUT
    [line] = cleaner.serve()
    assert line["log_level"] == "warning"
    cleaner.now += RETRY_SECONDS
    cleaner.serve()
    assert marks_on(cleaner) == {}
    assert cleaner.api.calls.count("PATCH") == (2 if loss is lost_request else 1)


def test_an_event_that_cannot_be_written_is_only_logged(cleaner: Cleaner) -> None:
    store(cleaner)
    cleaner.api.deliver = Script(lost_request, methods=("POST",))
    cleaner.now = START + TIMEOUT
    lines = cleaner.serve()
    assert [line["event"] for line in lines] == ["stale allocation removed", "event not written"]
    cleaner.now += PERIOD_SECONDS
    assert cleaner.serve() == []
    assert cleaner.removed("unbound") == 1


@pytest.mark.parametrize("between", [False, True], ids=["before the look", "between the look and the patch"])
def test_a_pod_that_goes_is_no_fault_for_long(cleaner: Cleaner, between: bool) -> None:
    store(cleaner)
    cleaner.api.deliver = before("PATCH" if between else "GET", lambda: cleaner.api.remove(POD))
    cleaner.now = START + TIMEOUT
    assert len(cleaner.serve()) == between
    cleaner.now += RETRY_SECONDS
    assert cleaner.serve() == []


def test_a_pod_that_cannot_be_read_stops_nobody(cleaner: Cleaner) -> None:
    store(cleaner)
    stored = cleaner.api.objects[POD]
    other = POD.replace("train-0", "train-1")
    cleaner.api.store(other, {**stored, "metadata": {**stored["metadata"], "name": "train-1", "uid": "uid-2"}})
    cleaner.watch()
    cleaner.api.store(POD, {**stored, "spec": "?"})
    cleaner.now = START + TIMEOUT
    assert "stale allocations not looked at" in [line["event"] for line in cleaner.serve()]
    assert marks_on(cleaner, other) == {}


def test_a_pod_that_no_longer_asks_for_vcuda_is_left_alone(cleaner: Cleaner) -> None:
    """It was deleted and made again under its name, as another."""
    store(cleaner)
    stored = cleaner.api.objects[POD]
    cleaner.api.store(POD, {**stored, "spec": {"containers": [{"name": "main"}]}})
    cleaner.now = START + TIMEOUT
    assert cleaner.serve() == []
    assert marks_on(cleaner)


def test_a_pod_that_was_allocated_anew_is_looked_at_when_that_can_be_stale(cleaner: Cleaner) -> None:
    store(cleaner)
    cleaner.api.store(POD, allocated_pod(GPU_MANAGER, START + 100, created=START))
    cleaner.now = START + TIMEOUT
    assert cleaner.serve() == []
    cleaner.now = START + TIMEOUT + 100
    [line] = cleaner.serve()
    assert line["rule"] == "unbound"


# Nodes that are gone


def test_a_node_that_the_watch_does_not_know_is_only_gone_when_the_store_says_so(cleaner: Cleaner) -> None:
    """Else its pods are looked at in time, like all others."""
    store(cleaner)
    cleaner.api.remove(f"{NODES}/{NODE}")
    cleaner.watch()
    cleaner.api.store(f"{NODES}/{NODE}", {"metadata": {"name": NODE}})
    assert cleaner.serve() == []
    assert marks_on(cleaner)
    cleaner.now = START + TIMEOUT
    [line] = cleaner.serve()
    assert line["rule"] == "unbound"


def test_when_a_node_goes_the_pods_that_were_allocated_there_are_freed_at_once(cleaner: Cleaner) -> None:
    store(cleaner)
    cleaner.api.remove(f"{NODES}/{NODE}")
    cleaner.watch()
    [line] = cleaner.serve()
    assert (line["rule"], marks_on(cleaner)) == ("node-gone", {})


def test_while_nobody_can_say_whether_a_node_exists_nothing_is_removed(cleaner: Cleaner) -> None:
    store(cleaner)
    kept = marks_on(cleaner)
    cleaner.api.remove(f"{NODES}/{NODE}")
    cleaner.watch()
    calls: list[str] = []

    def deliver(method: str, _timeout: float, effect: Effect) -> bytes:
        calls.append(method)
        if calls == ["GET", "GET"]:
            raise Unavailable("timed out")
        return effect()

    cleaner.api.deliver = deliver
    [line] = cleaner.serve()
    assert line["log_level"] == "warning"
    assert (calls, marks_on(cleaner)) == (["GET", "GET"], kept)


@pytest.mark.parametrize("node", ["a/b", "../x", "..", "gpu-1?watch=1", "GPU-1", "gpu 1", "a" * 254, "gpu-1\n"])
def test_what_can_be_no_nodes_name_is_not_asked_for_and_names_no_node(cleaner: Cleaner, node: str) -> None:
    """The API server takes GET nodes/a%2Fb for a subresource, which it answers with 403 for ever."""
    store(cleaner, node=node)
    cleaner.api.forget_calls()
    [line] = cleaner.serve()
    assert (line["rule"], marks_on(cleaner)) == ("node-gone", {})
    assert cleaner.api.calls == ["GET", "PATCH", "POST"], "the pod alone was asked for"


def test_where_a_node_may_not_be_asked_for_its_pods_are_still_freed_in_time(cleaner: Cleaner) -> None:
    store(cleaner)
    cleaner.api.remove(f"{NODES}/{NODE}")
    cleaner.watch()
    plain, refused = cleaner.api.get, ApiError(403, "nodes is forbidden")

    def get(path: str, *arguments: Any, **named: Any) -> bytes:
        if path.startswith(NODES):
            raise refused
        return plain(path, *arguments, **named)

    cleaner.api.get = get  # type: ignore[method-assign]  # deliveries do not tell what is read
    for cleaner.now in (START, START + RETRY_SECONDS, START + TIMEOUT - 1):
        assert {(line["log_level"], line["error"]) for line in cleaner.serve()} == {("warning", str(refused))}
        assert marks_on(cleaner)
    cleaner.now = START + TIMEOUT + MAX_RETRY_SECONDS
    [line] = cleaner.serve()
    assert (line["rule"], marks_on(cleaner)) == ("unbound", {})


# Locks


def test_a_lock_goes_when_its_time_is_over(cleaner: Cleaner) -> None:
    cleaner.api.store(HOLDER, {"metadata": {"name": "holder"}})
    lock(cleaner, f"{rfc3339(START)},team-a,holder")
    for cleaner.now in (START + 10, START + TIMEOUT - 1):
        assert cleaner.serve() == []
    cleaner.now = START + TIMEOUT
    [line] = cleaner.serve()
    assert (line["kind"], line["name"], line["scheme"], line["rule"]) == ("Node", NODE, "hami", "lock-expired")
    assert marks_on(cleaner, f"{NODES}/{NODE}") == {}
    [event] = cleaner.events("default")
    assert event["involvedObject"]["kind"] == "Node"
    assert cleaner.removed("lock-expired") == 1


def test_a_lock_whose_pod_goes_is_removed_within_a_period(cleaner: Cleaner) -> None:
    cleaner.api.store(HOLDER, {"metadata": {"name": "holder"}})
    lock(cleaner, f"{rfc3339(START)},team-a,holder")
    cleaner.now = START + 10
    cleaner.gc.reconciler.turn(EVERYTHING)
    assert cleaner.serve() == []
    cleaner.api.remove(HOLDER)
    cleaner.now = START + 10 + PERIOD_SECONDS
    [line] = cleaner.serve()
    assert line["rule"] == "lock-holder-gone"


@pytest.mark.parametrize("holder", ["team-a,a/b", "team-a/pods,x", "..,x", "team-a,Holder"])
def test_what_can_be_no_pods_name_is_not_asked_for_and_names_no_pod(cleaner: Cleaner, holder: str) -> None:
    lock(cleaner, f"{rfc3339(START)},{holder}")
    cleaner.now = START + 10
    cleaner.api.forget_calls()
    [line] = cleaner.serve()
    assert line["rule"] == "lock-holder-gone"
    assert cleaner.api.calls == ["GET", "PATCH", "POST"], "the node alone was asked for"


def test_a_lock_that_is_given_back_in_time_costs_no_request(cleaner: Cleaner) -> None:
    lock(cleaner, rfc3339(START))
    cleaner.api.store(f"{NODES}/{NODE}", {"metadata": {"name": NODE}})
    cleaner.watch()
    cleaner.api.forget_calls()
    cleaner.now = START + TIMEOUT
    assert (cleaner.serve(), cleaner.api.calls) == ([], [])


def test_a_lock_that_was_taken_anew_before_the_watch_has_seen_it_stays(cleaner: Cleaner) -> None:
    lock(cleaner, rfc3339(START))
    renewed = {LOCK: rfc3339(START + 250)}
    cleaner.api.store(f"{NODES}/{NODE}", {"metadata": {"name": NODE, "annotations": renewed}})
    cleaner.now = START + TIMEOUT
    assert cleaner.serve() == []
    assert marks_on(cleaner, f"{NODES}/{NODE}") == renewed


def test_a_lock_on_a_node_that_somebody_else_writes_first_is_judged_anew(cleaner: Cleaner) -> None:
    """Its kubelet does so every now and then."""
    lock(cleaner, rfc3339(START))
    path = f"{NODES}/{NODE}"
    cleaner.api.deliver = before("PATCH", lambda: cleaner.api.store(path, cleaner.api.objects[path]))
    cleaner.now = START + TIMEOUT
    [line] = cleaner.serve()
    assert (line["rule"], marks_on(cleaner, path)) == ("lock-expired", {})


def test_while_nobody_can_say_whether_a_locks_pod_exists_it_stays(cleaner: Cleaner) -> None:
    lock(cleaner, f"{rfc3339(START)},team-a,holder")
    cleaner.api.deliver = Script(delivered, lost_request, methods=("GET",))
    cleaner.now = START + 10
    [line] = cleaner.serve()
    assert line["log_level"] == "warning"
    assert LOCK in marks_on(cleaner, f"{NODES}/{NODE}")


def test_a_lock_without_a_readable_time_goes_when_it_was_seen_for_long_enough(cleaner: Cleaner) -> None:
    lock(cleaner, "soon")
    cleaner.now = START + 10
    assert cleaner.serve() == []
    cleaner.now = START + 9 + TIMEOUT
    assert cleaner.serve() == []
    cleaner.now = START + 10 + TIMEOUT
    [line] = cleaner.serve()
    assert line["rule"] == "lock-expired"


def test_a_node_that_goes_with_its_lock_is_no_fault(cleaner: Cleaner) -> None:
    lock(cleaner, rfc3339(START))
    cleaner.api.remove(f"{NODES}/{NODE}")
    cleaner.now = START + TIMEOUT
    assert cleaner.serve() == []


# Dry run


def test_a_dry_run_writes_nothing_and_tells_once_until_the_pod_changes(api: ApiDouble) -> None:
    cleaner = Cleaner(api, report_only)
    store(cleaner)
    lock(cleaner, rfc3339(START))
    stored = json.dumps(api.objects)
    api.forget_calls()
    cleaner.now = START + TIMEOUT
    lines = cleaner.serve()
    assert {(line["kind"], line["rule"]) for line in lines} == {("Pod", "unbound"), ("Node", "lock-expired")}
    assert all("dry run" in line["event"] for line in lines)
    api.forget_calls()
    for _ in range(3):
        cleaner.now += PERIOD_SECONDS
        assert cleaner.serve() == []
    assert api.calls == []
    assert json.dumps(api.objects) == stored
    store(cleaner)  # anew, so that the pod has changed
    assert [line["kind"] for line in cleaner.serve()] == ["Pod"]


# Health


def test_the_loop_is_stuck_when_no_turn_has_ended_for_five_periods(cleaner: Cleaner) -> None:
    assert not cleaner.gc.is_stuck(), "it has not begun"
    store(cleaner, status="Failed")
    seen: list[bool] = []

    def deliver(method: str, _timeout: float, effect: Effect) -> bytes:
        if method == "GET":
            cleaner.now += PERIOD_SECONDS * STUCK_PERIODS
            seen.append(cleaner.gc.is_stuck())
            cleaner.now += 1
            seen.append(cleaner.gc.is_stuck())
            cleaner.gc.reconciler.stop()
        return effect()

    cleaner.api.deliver = deliver
    cleaner.gc.reconciler.run()
    assert (seen, cleaner.gc.is_stuck()) == ([False, True], False)


def test_a_failing_turn_is_a_turn(cleaner: Cleaner) -> None:
    """Starting anew would not mend an API server that does not answer."""
    store(cleaner, status="Failed")

    def deliver(_method: str, _timeout: float, _effect: Effect) -> bytes:
        cleaner.now += PERIOD_SECONDS * STUCK_PERIODS + 1
        cleaner.gc.reconciler.stop()
        raise Unavailable("timed out")

    cleaner.api.deliver = deliver
    cleaner.gc.reconciler.run()
    assert not cleaner.gc.is_stuck()
