"""Tests of the controller's loop that removes stale allocations from pods and nodes."""

import json
from typing import Any

import pytest

from controller.garbage.stale_gc import (
    EVERYTHING,
    MAX_ATTEMPTS,
    MAX_KEYS_LOGGED,
    MIN_INTERVAL_SECONDS,
    PERIOD_SECONDS,
    RETRY_SECONDS,
    STUCK_PERIODS,
    report_only,
)
from controller.workqueue import MAX_RETRY_SECONDS
from examples.allocations import NODE, allocated_pod, rfc3339
from tests.api_double import ApiDouble, Effect, Script, before, delivered, lost_reply, lost_request, rejected
from tests.cleaner import LOCK, NODES, POD, START, TIMEOUT, Cleaner, bind, lock, marks_on, store
from vcuda.errors import ApiError, Conflict, Unavailable
from vcuda.requests.schemes import GPU_MANAGER

HOLDER = "/api/v1/namespaces/team-a/pods/holder"
LOCKED = f"{NODES}/{NODE}"


@pytest.fixture
def past(cleaner: Cleaner) -> Cleaner:
    """Return the loop at the time when the allocation of the stored pod has just become stale."""
    store(cleaner)
    cleaner.now = START + TIMEOUT
    return cleaner


# Tests of pods


def test_a_pod_is_checked_when_its_allocation_can_first_be_stale_and_is_cleared_then(cleaner: Cleaner) -> None:
    store(cleaner, annotations={"own/one": "x"})
    cleaner.api.forget_calls()
    cleaner.now = START + TIMEOUT - 1
    assert cleaner.serve() == []
    assert cleaner.api.calls == []
    cleaner.now = START + TIMEOUT
    [line] = cleaner.serve()
    assert marks_on(cleaner.api) == {"own/one": "x"}
    assert cleaner.api.calls == ["GET", "PATCH", "POST"]
    assert (line["event"], line["log_level"]) == ("stale allocation removed", "info")
    assert (line["kind"], line["namespace"], line["name"], line["uid"]) == ("Pod", "team-a", "train-0", "uid-1")
    assert (line["scheme"], line["rule"]) == ("gpu-manager", "unbound")
    assert cleaner.removed("unbound") == 1
    [event] = cleaner.events()
    about = event["involvedObject"]
    assert (about["kind"], about["namespace"], about["name"], about["uid"]) == ("Pod", "team-a", "train-0", "uid-1")
    assert (event["reason"], event["type"]) == ("StaleAllocationRemoved", "Normal")
    assert event["message"].startswith(
        "the stale allocation of gpu-manager was removed: the allocation was made at 2023-11-14T"
    )
    assert "tencent.com/predicate-gpu-idx-0" in event["message"]


def test_an_allocation_of_thousands_of_keys_and_of_huge_texts_is_removed_as_a_whole(cleaner: Cleaner) -> None:
    """The watch keeps only a part of large annotations. So the loop reads the pod before it removes an allocation."""
    huge = {f"tencent.com/predicate-gpu-idx-{number}": "0" for number in range(5000)}
    others = {
        "tencent.com/gpu-assigned": "x" * 50_000,
        "hami.io/vgpu-node": NODE,
        "hami.io/vgpu-devices-allocated": "x" * 99_999,
    }
    store(cleaner)
    pod = cleaner.api.objects[POD]
    annotations = {**pod["metadata"]["annotations"], **huge, **others, "own/one": "x"}
    cleaner.api.store(POD, {**pod, "metadata": {**pod["metadata"], "annotations": annotations}})
    cleaner.watch()
    cleaner.now = START + TIMEOUT
    lines = cleaner.serve()
    assert marks_on(cleaner.api) == {"own/one": "x"}
    assert {line["scheme"]: line["removals"] for line in lines} == {"gpu-manager": 5003, "hami": 2}
    assert all(len(line["keys"]) <= MAX_KEYS_LOGGED for line in lines)


def test_a_future_time_counts_as_the_time_at_which_it_was_seen(cleaner: Cleaner) -> None:
    """A pod's owner can write any time into its annotations. A future time once kept a stale allocation for a day."""
    cleaner.api.store(f"{NODES}/{NODE}", {"metadata": {"name": NODE}})
    cleaner.api.store(POD, allocated_pod(GPU_MANAGER, START + 80_000, created=START - 1000))
    cleaner.watch()
    for cleaner.now in (START + TIMEOUT / 2, START + TIMEOUT - 1):
        cleaner.gc.look_at_all()
        assert cleaner.serve() == []
    cleaner.now = START + TIMEOUT
    assert [line["rule"] for line in cleaner.serve()] == ["unbound"]


def test_a_removed_allocation_is_not_checked_again_while_the_watch_lags(past: Cleaner) -> None:
    past.serve()
    past.api.forget_calls()
    for turn in range(4):
        if turn == 3:
            past.watch()
        past.gc.reconciler.turn(EVERYTHING)
        past.serve()
    assert set(past.api.calls) == {"LIST"}
    assert past.removed("unbound") == 1


@pytest.mark.parametrize("between", [False, True], ids=["before the loop reads the pod", "between read and patch"])
def test_a_pod_that_is_bound_before_the_watch_has_seen_it_keeps_its_allocation(past: Cleaner, between: bool) -> None:
    """The patch requires the resourceVersion of the checked pod. The binding changes it, so the patch fails."""
    kept = marks_on(past.api)
    past.api.deliver = before("PATCH" if between else "GET", lambda: bind(past))
    assert past.serve() == []
    assert marks_on(past.api) == kept
    assert ("PATCH" in past.api.calls) is between
    assert (past.removed("unbound"), past.events()) == (0, [])


@pytest.mark.parametrize("times", [1, MAX_ATTEMPTS - 1])
def test_a_pod_that_another_client_writes_first_is_judged_again_and_cleared(past: Cleaner, times: int) -> None:
    def touch() -> None:
        pod = past.api.objects[POD]
        past.api.store(POD, {**pod, "metadata": {**pod["metadata"], "labels": {"touched": "yes"}}})

    past.api.deliver = before("PATCH", touch, times)
    past.serve()
    assert marks_on(past.api) == {}
    assert past.api.objects[POD]["metadata"]["labels"] == {"touched": "yes"}
    assert (past.removed("unbound"), len(past.events())) == (1, 1)


@pytest.mark.parametrize(
    ("rejection", "tries"),
    [
        (ApiError(403, "you may not"), 1),
        (Conflict(409, "the object has been modified"), MAX_ATTEMPTS),
        (ApiError(422, "the test failed"), MAX_ATTEMPTS),
    ],
)
def test_a_patch_that_is_always_rejected_is_retried_later(past: Cleaner, rejection: ApiError, tries: int) -> None:
    kept = marks_on(past.api)
    past.api.deliver = rejected(rejection, "PATCH")
    [line] = past.serve()
    assert (line["event"], line["log_level"]) == ("stale allocations could not be checked", "warning")
    assert marks_on(past.api) == kept
    assert past.api.calls.count("PATCH") == tries
    past.api.deliver = delivered
    assert past.serve() == []
    past.now += RETRY_SECONDS
    past.serve()
    assert marks_on(past.api) == {}


@pytest.mark.parametrize("loss", [lost_request, lost_reply])
def test_a_patch_whose_answer_is_lost_is_followed_by_another_check(past: Cleaner, loss: Any) -> None:
    """If the first patch was stored, the second check finds nothing to remove."""
    past.api.deliver = Script(loss, methods=("PATCH",))
    [line] = past.serve()
    assert line["log_level"] == "warning"
    past.now += RETRY_SECONDS
    past.serve()
    assert marks_on(past.api) == {}
    assert past.api.calls.count("PATCH") == (2 if loss is lost_request else 1)


def test_an_event_that_cannot_be_written_is_only_logged(past: Cleaner) -> None:
    past.api.deliver = Script(lost_request, methods=("POST",))
    assert [line["event"] for line in past.serve()] == ["stale allocation removed", "event not written"]
    past.now += PERIOD_SECONDS
    assert (past.serve(), past.removed("unbound")) == ([], 1)


@pytest.mark.parametrize("between", [False, True], ids=["before the loop reads the pod", "between read and patch"])
def test_a_deleted_pod_is_no_lasting_error(past: Cleaner, between: bool) -> None:
    past.api.deliver = before("PATCH" if between else "GET", lambda: past.api.remove(POD))
    assert len(past.serve()) == between
    past.now += RETRY_SECONDS
    assert past.serve() == []


def test_a_pod_that_cannot_be_read_delays_no_other(past: Cleaner) -> None:
    stored, other = past.api.objects[POD], POD.replace("train-0", "train-1")
    past.api.store(other, {**stored, "metadata": {**stored["metadata"], "name": "train-1", "uid": "uid-2"}})
    past.watch()
    past.api.store(POD, {**stored, "spec": "?"})
    assert "stale allocations could not be checked" in [line["event"] for line in past.serve()]
    assert marks_on(past.api, other) == {}


def test_a_pod_that_no_longer_requests_vcuda_is_not_changed(past: Cleaner) -> None:
    """The pod was deleted, and a new pod of the same name has no GPU request."""
    past.api.store(POD, {**past.api.objects[POD], "spec": {"containers": [{"name": "main"}]}})
    assert past.serve() == []
    assert marks_on(past.api)


def test_a_pod_that_was_allocated_again_is_checked_when_that_can_be_stale(past: Cleaner) -> None:
    past.api.store(POD, allocated_pod(GPU_MANAGER, START + 100, created=START))
    assert past.serve() == []
    past.now += 100
    assert [line["rule"] for line in past.serve()] == ["unbound"]


def test_a_pod_whose_allocation_is_written_again_and_again_is_checked_once_in_the_interval(past: Cleaner) -> None:
    def write(number: int) -> None:
        store(past, annotations={"own/number": str(number)})
        past.api.forget_calls()

    assert [line["rule"] for line in past.serve()] == ["unbound"]
    for number in range(9):
        past.now += MIN_INTERVAL_SECONDS / 10
        write(number)
        assert past.serve() == []
        assert past.api.calls == []
    past.now += MIN_INTERVAL_SECONDS / 10
    assert [line["rule"] for line in past.serve()] == ["unbound"]


# Tests of deleted nodes


@pytest.fixture
def orphaned(cleaner: Cleaner) -> Cleaner:
    """Return the loop after the watch showed that the node is deleted. The allocation is not stale by age yet."""
    store(cleaner)
    cleaner.api.remove(LOCKED)
    cleaner.watch()
    return cleaner


def test_a_node_missing_in_the_watch_counts_as_deleted_only_after_a_read(orphaned: Cleaner) -> None:
    """The node exists, although the watch lacks it. So the allocation becomes stale only after the usual time."""
    orphaned.api.store(LOCKED, {"metadata": {"name": NODE}})
    assert orphaned.serve() == []
    assert marks_on(orphaned.api)
    orphaned.now = START + TIMEOUT
    assert [line["rule"] for line in orphaned.serve()] == ["unbound"]


def test_the_pods_allocated_on_a_deleted_node_are_cleared_at_once(orphaned: Cleaner) -> None:
    assert [line["rule"] for line in orphaned.serve()] == ["node-gone"]
    assert marks_on(orphaned.api) == {}


def test_nothing_is_removed_while_the_existence_of_a_node_is_unknown(orphaned: Cleaner) -> None:
    kept = marks_on(orphaned.api)
    orphaned.api.forget_calls()
    orphaned.api.deliver = Script(delivered, lost_request, methods=("GET",))
    assert [line["log_level"] for line in orphaned.serve()] == ["warning"]
    assert (orphaned.api.calls, marks_on(orphaned.api)) == (["GET", "GET"], kept)


@pytest.mark.parametrize("node", ["a/b", "../x", "..", "gpu-1?watch=1", "GPU-1", "gpu 1", "a" * 254, "gpu-1\n"])
def test_an_invalid_node_name_is_not_looked_up_and_names_no_node(cleaner: Cleaner, node: str) -> None:
    """The API server would read nodes/a%2Fb as the path of a subresource, and always answer 403."""
    store(cleaner, node=node)
    cleaner.api.forget_calls()
    [line] = cleaner.serve()
    assert (line["rule"], marks_on(cleaner.api)) == ("node-gone", {})
    assert cleaner.api.calls == ["GET", "PATCH", "POST"], "only the pod may be read"


def test_without_the_right_to_read_nodes_pods_are_still_cleared_in_time(orphaned: Cleaner) -> None:
    plain, rejected = orphaned.api.get, ApiError(403, "nodes is forbidden")

    def get(path: str, *arguments: Any, **named: Any) -> bytes:
        if path.startswith(NODES):
            raise rejected
        return plain(path, *arguments, **named)

    # The hook `deliver` of the API server double does not get the path of a call, so this test replaces `get`.
    orphaned.api.get = get  # type: ignore[method-assign]
    for orphaned.now in (START, START + RETRY_SECONDS, START + TIMEOUT - 1):
        assert {(line["log_level"], line["error"]) for line in orphaned.serve()} == {("warning", str(rejected))}
        assert marks_on(orphaned.api)
    orphaned.now = START + TIMEOUT + MAX_RETRY_SECONDS
    assert [line["rule"] for line in orphaned.serve()] == ["unbound"]
    assert marks_on(orphaned.api) == {}


# Tests of locks on nodes


def test_a_lock_is_removed_when_its_time_is_over(cleaner: Cleaner) -> None:
    cleaner.api.store(HOLDER, {"metadata": {"name": "holder"}})
    lock(cleaner, f"{rfc3339(START)},team-a,holder")
    for cleaner.now in (START + 10, START + TIMEOUT - 1):
        assert cleaner.serve() == []
    cleaner.now = START + TIMEOUT
    [line] = cleaner.serve()
    assert (line["kind"], line["name"], line["scheme"], line["rule"]) == ("Node", NODE, "hami", "lock-expired")
    assert marks_on(cleaner.api, LOCKED) == {}
    [event] = cleaner.events("default")
    assert event["involvedObject"]["kind"] == "Node"
    assert cleaner.removed("lock-expired") == 1


def test_a_lock_whose_pod_was_deleted_is_removed_within_a_period(cleaner: Cleaner) -> None:
    cleaner.api.store(HOLDER, {"metadata": {"name": "holder"}})
    lock(cleaner, f"{rfc3339(START)},team-a,holder")
    cleaner.now = START + 10
    cleaner.gc.reconciler.turn(EVERYTHING)
    assert cleaner.serve() == []
    cleaner.api.remove(HOLDER)
    cleaner.now = START + 10 + PERIOD_SECONDS
    assert [line["rule"] for line in cleaner.serve()] == ["lock-holder-gone"]


@pytest.mark.parametrize("holder", ["team-a,a/b", "team-a/pods,x", "..,x", "team-a,Holder"])
def test_an_invalid_pod_name_is_not_looked_up_and_names_no_pod(cleaner: Cleaner, holder: str) -> None:
    lock(cleaner, f"{rfc3339(START)},{holder}")
    cleaner.now = START + 10
    cleaner.api.forget_calls()
    assert [line["rule"] for line in cleaner.serve()] == ["lock-holder-gone"]
    assert cleaner.api.calls == ["GET", "PATCH", "POST"], "only the node may be read"


def test_a_lock_that_is_released_in_time_costs_no_request(cleaner: Cleaner) -> None:
    lock(cleaner, rfc3339(START))
    cleaner.api.store(LOCKED, {"metadata": {"name": NODE}})
    cleaner.watch()
    cleaner.api.forget_calls()
    cleaner.now = START + TIMEOUT
    assert (cleaner.serve(), cleaner.api.calls) == ([], [])


@pytest.mark.parametrize("node", [None, {LOCK: rfc3339(START + 250)}], ids=["gone", "locked anew"])
def test_a_lock_that_changed_before_the_watch_has_seen_it_stays(cleaner: Cleaner, node: Any) -> None:
    lock(cleaner, rfc3339(START))
    cleaner.api.remove(LOCKED)
    if node:
        cleaner.api.store(LOCKED, {"metadata": {"name": NODE, "annotations": node}})
    cleaner.now = START + TIMEOUT
    assert cleaner.serve() == []
    assert not node or marks_on(cleaner.api, LOCKED) == node


def test_a_lock_stays_while_the_existence_of_its_pod_is_unknown(cleaner: Cleaner) -> None:
    lock(cleaner, f"{rfc3339(START)},team-a,holder")
    cleaner.api.deliver = Script(delivered, lost_request, methods=("GET",))
    cleaner.now = START + 10
    assert [line["log_level"] for line in cleaner.serve()] == ["warning"]
    assert LOCK in marks_on(cleaner.api, LOCKED)


def test_a_lock_without_a_readable_time_is_removed_when_it_was_seen_for_long_enough(cleaner: Cleaner) -> None:
    lock(cleaner, "soon")
    for cleaner.now in (START + 10, START + 9 + TIMEOUT):
        assert cleaner.serve() == []
    cleaner.now = START + 10 + TIMEOUT
    assert [line["rule"] for line in cleaner.serve()] == ["lock-expired"]


# Tests of the dry run


def test_a_dry_run_writes_nothing_and_reports_once_until_the_pod_changes(api: ApiDouble) -> None:
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
    store(cleaner)  # storing the pod again gives it a new version
    assert [line["kind"] for line in cleaner.serve()] == ["Pod"]


# Tests of the health check


@pytest.mark.parametrize("failing", [False, True])
def test_the_loop_is_stuck_when_no_turn_has_ended_for_five_periods(cleaner: Cleaner, failing: bool) -> None:
    """A failed turn counts as ended. If the API server does not answer, a restart would not help."""
    assert not cleaner.gc.is_stuck(), "a loop that has not started is not stuck"
    store(cleaner, status="Failed")
    seen: list[bool] = []

    def deliver(method: str, _timeout: float, effect: Effect) -> bytes:
        if method == "GET":
            for seconds in (PERIOD_SECONDS * STUCK_PERIODS, 1):
                cleaner.now += seconds
                seen.append(cleaner.gc.is_stuck())
            cleaner.gc.reconciler.stop()
        if failing:
            raise Unavailable("timed out")
        return effect()

    cleaner.api.deliver = deliver
    cleaner.gc.reconciler.run()
    assert (seen, cleaner.gc.is_stuck()) == ([False, True], False)
