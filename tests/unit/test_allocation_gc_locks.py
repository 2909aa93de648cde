"""The loop that removes stale allocations: its locks, its dry run, and how it tells that it is stuck."""

from __future__ import annotations

import json
import threading

import pytest

from controller.stale_gc import PERIOD, PERIODS, Reporting
from tests.allocated import NODE, rfc3339
from tests.api_double import ApiDouble, Effect, Script, delivered, lost_request
from tests.cleaner import LOCK, NODES, START, TIMEOUT, Cleaner, before, lock, marks_on, store
from vcuda.errors import Unavailable

HOLDER = "/api/v1/namespaces/team-a/pods/holder"


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
    cleaner.gc.look_at_all()
    assert cleaner.serve() == []
    cleaner.api.remove(HOLDER)
    cleaner.now = START + 10 + PERIOD
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


def test_a_dry_run_writes_nothing_and_tells_once(api: ApiDouble) -> None:
    cleaner = Cleaner(api, Reporting())
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
        cleaner.now += PERIOD
        assert cleaner.serve() == []
    assert api.calls == []
    assert json.dumps(api.objects) == stored


def test_a_dry_run_tells_again_when_the_pod_has_changed(api: ApiDouble) -> None:
    cleaner = Cleaner(api, Reporting())
    store(cleaner)
    cleaner.now = START + TIMEOUT
    assert len(cleaner.serve()) == 1
    store(cleaner)
    assert len(cleaner.serve()) == 1


# Health


def test_the_loop_is_stuck_when_no_turn_has_ended_for_five_periods(cleaner: Cleaner) -> None:
    assert not cleaner.gc.stuck(), "it has not begun"
    store(cleaner, status="Failed")
    seen: list[bool] = []

    def deliver(method: str, _timeout: float, effect: Effect) -> bytes:
        if method == "GET":
            cleaner.now += PERIOD * PERIODS
            seen.append(cleaner.gc.stuck())
            cleaner.now += 1
            seen.append(cleaner.gc.stuck())
            cleaner.gc.due.close()
        return effect()

    cleaner.api.deliver = deliver
    cleaner.gc.run()
    assert (seen, cleaner.gc.stuck()) == ([False, True], False)


def test_a_failing_turn_is_a_turn(cleaner: Cleaner) -> None:
    """Starting anew would not mend an API server that does not answer."""
    store(cleaner, status="Failed")

    def deliver(_method: str, _timeout: float, _effect: Effect) -> bytes:
        cleaner.now += PERIOD * PERIODS + 1
        cleaner.gc.due.close()
        raise Unavailable("timed out")

    cleaner.api.deliver = deliver
    cleaner.gc.run()
    assert not cleaner.gc.stuck()


def test_closing_the_queue_ends_the_loop(cleaner: Cleaner) -> None:
    thread = threading.Thread(target=cleaner.gc.run)
    thread.start()
    cleaner.gc.due.close()
    thread.join(20)
    assert not thread.is_alive()
