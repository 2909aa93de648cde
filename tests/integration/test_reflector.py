"""Tests of a reflector whose server fails, ends watches, stays silent, or sends invalid data."""

import json
from typing import Any

import kmock
import pytest
import structlog

from tests.integration.rounds import GONE, PATH, run, thing
from tests.integration.scripted import (
    Answer,
    Script,
    bookmark,
    event,
    forever,
    item,
    page,
    status,
    status_object,
    stream,
    tear,
    torn,
)
from vcuda.errors import Unavailable
from vcuda.kube import Key, Kube, Reflector
from vcuda.kube.pages import MAX_OBJECT_BYTES
from vcuda.kube.watch import WatchEvent, read_event


def test_events_since_the_list_are_applied_in_order(kube: Kube, script: Script) -> None:
    script.answers.append(page(10, item("a", 3, value=1), item("b", 4, value=2)))
    added, deleted = event("ADDED", item("c", 11, value=3)), event("DELETED", item("b", 13, value=2))
    script.watches.append(stream(added, event("MODIFIED", item("a", 12, value=5)), deleted, bookmark(20)))
    done = run(kube, 1)
    assert script.asked() == ["LIST", "WATCH 10"]
    assert script.seen[1].params["allowWatchBookmarks"] == "true"
    assert done.values() == {"a": 5, "c": 3}
    assert done.events == [(None, 1), (None, 2), (None, 3), (1, 5), (2, None)]
    assert done.reflector.resource_version == "20"
    assert done.reflector.get(("ns", "a")) == 5
    assert done.reflector.get(("ns", "b")) is None


def test_an_object_that_is_no_longer_kept_is_reported_as_deleted(kube: Kube, script: Script) -> None:
    script.answers.append(page(10, item("a", 3, value=1)))
    script.watches.append(stream(event("MODIFIED", item("a", 11, value=0)), event("DELETED", item("a", 12, value=0))))
    done = run(kube, 1)
    assert done.values() == {}
    assert done.events == [(None, 1), (1, None)]


@pytest.mark.parametrize(
    "gone",
    [
        GONE,
        stream(event("ERROR", status_object(410, "too old resource version"))),
        stream(event("ERROR", status_object(500, "cannot decode"))),
    ],
    ids=["as a status", "as an event", "any other ERROR event"],
)
def test_after_a_410_a_new_list_reports_the_missed_changes(kube: Kube, script: Script, gone: Answer) -> None:
    kept = item("kept", 1, value=1)
    script.answers.append(page(10, kept, item("changed", 2, value=2), item("gone", 3, value=3)))
    script.answers.append(page(30, kept, item("changed", 25, value=20), item("new", 26, value=4)))
    script.watches.extend([gone, stream(event("MODIFIED", item("new", 31, value=40)))])
    done = run(kube, 2)
    assert script.asked() == ["LIST", "WATCH 10", "LIST", "WATCH 30"]
    assert done.events[3:] == [(3, None), (2, 20), (None, 4), (4, 40)]
    assert done.values() == {"kept": 1, "changed": 20, "new": 40}


def test_a_recreated_object_is_a_deletion_and_a_creation(kube: Kube, script: Script) -> None:
    """One change event would mix up the charge of the old pod, to be released, with the charge of the new pod."""
    script.answers.append(page(10, item("a", 3, uid="first", value=1)))
    script.answers.append(page(30, item("a", 20, uid="second", value=2)))
    script.watches.extend([GONE, stream(event("MODIFIED", item("a", 31, uid="third", value=3)))])
    assert run(kube, 2).events == [(None, 1), (1, None), (None, 2), (2, None), (None, 3)]


def test_the_view_is_replaced_in_one_step(kube: Kube, script: Script) -> None:
    """At the first event of the second LIST, the callback already finds the complete new view."""
    script.answers.append(page(10, item("a", 1, value=1), item("b", 2, value=2)))
    script.answers.append(page(30, item("c", 21, value=3), token="t"))
    script.answers.append(page(30, item("d", 22, value=4)))
    script.watches.extend([GONE, stream(bookmark(31))])
    views: list[list[str]] = []
    run(kube, 2, lambda reflector: views.append(sorted(key.name for key in reflector.snapshot())))
    assert views == [["a", "b"]] * 2 + [["c", "d"]] * 4


def test_new_decoding_rules_cause_a_new_list_of_unchanged_objects(kube: Kube, script: Script) -> None:
    """New rules may keep objects that the old rules dropped. The open watch ends for this, which is no failure."""
    listed = [item("a", 1, value=1), item("b", 2, value=-1)]
    script.answers += [page(10, *listed), page(30, *listed)]
    script.watches += [stream(event("ADDED", item("c", 11, value=3)), forever), stream(bookmark(31))]
    offsets, at_list = [0], [0]

    def decode(raw: bytes) -> int | None:
        return max((thing(raw) or 0) + at_list[0], 0) or None

    def begin() -> bool:
        before, at_list[0] = at_list[0], offsets[0]
        return before != at_list[0]

    def look(reflector: Reflector[int]) -> None:
        if len(reflector.snapshot()) > 1 and not offsets[0]:
            offsets[0] = 5
            reflector.list_again()

    done = run(kube, 2, look, decode=decode, on_listing=begin)
    assert script.asked() == ["LIST", "WATCH 10", "LIST", "WATCH 30"]
    assert done.values() == {"a": 6, "b": 4}
    assert done.reflector.counts.failures == 0


def test_a_snapshot_never_changes(kube: Kube, script: Script) -> None:
    script.answers.append(page(10, item("a", 1, value=1)))
    script.watches.append(stream(event("ADDED", item("b", 11, value=2))))
    snapshots: list[object] = []
    reflector = run(kube, 1, lambda reflector: snapshots.append(reflector.snapshot())).reflector
    assert snapshots == [{Key("ns", "a"): 1}, {Key("ns", "a"): 1, Key("ns", "b"): 2}]
    assert reflector.snapshot() is reflector.snapshot()


@pytest.mark.parametrize(
    "end",
    [
        pytest.param((), id="ended by the server"),
        pytest.param((tear,), id="torn between lines"),
        pytest.param((b'{"type": "MODIFIED", "object": {"metad', tear), id="torn inside a line"),
        pytest.param((b'{"type": "MODIFIED", "object": {"metad',), id="ended inside a line"),
    ],
)
def test_a_watch_that_ends_continues_from_the_last_event_without_a_list(
    kube: Kube, script: Script, end: tuple[kmock.Payload, ...]
) -> None:
    script.answers.append(page(10, item("a", 1, value=1)))
    script.watches.append(stream(event("MODIFIED", item("a", 11, value=2)), *end))
    script.watches.append(stream(event("MODIFIED", item("a", 12, value=3))))
    done = run(kube, 2)
    assert script.asked() == ["LIST", "WATCH 10", "WATCH 11"]
    assert done.events == [(None, 1), (1, 2), (2, 3)]


def test_a_silent_watch_is_restarted_and_is_no_failure(
    kube: Kube, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vcuda.kube.reflector.SILENCE", 0.2)
    script.answers.append(page(10))
    script.watches.extend([stream(bookmark(11), forever), stream(bookmark(12))])
    done = run(kube, 2)
    assert script.asked() == ["LIST", "WATCH 10", "WATCH 11"]
    assert done.reflector.counts.failures == 0


def test_lines_may_be_cut_anywhere_even_inside_a_character(kube: Kube, script: Script) -> None:
    line = '{"type":"ADDED","object":{"metadata":{"name":"é€","namespace":"ns","resourceVersion":"11"},"value":7}}\n'
    script.answers.append(page(10))
    script.watches.append(stream(*(bytes([byte]) for byte in line.encode()), b"\n" + bookmark(12) * 2))
    done = run(kube, 1)
    assert done.values() == {"é€": 7}
    assert done.reflector.resource_version == "12"


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b"<html>\n", id="no JSON"),
        pytest.param(b'{"type":"ADDED","object":{"metadata":{}}}\n', id="no resourceVersion"),
        pytest.param(b'{"type":"RENAMED","object":{"metadata":{"resourceVersion":"11"}}}\n', id="unknown type"),
        pytest.param(b'{"type":"ERROR","object":7}\n', id="ERROR without a Status"),
    ],
)
def test_an_event_without_an_identifiable_object_causes_a_new_list(kube: Kube, script: Script, line: bytes) -> None:
    script.answers.extend([page(10, item("a", 1, value=1)), page(20, item("a", 11, value=2))])
    script.watches.extend([stream(line, event("ADDED", item("late", 12, value=9))), stream(bookmark(21))])
    done = run(kube, 2)
    assert script.asked() == ["LIST", "WATCH 10", "LIST", "WATCH 20"]
    assert done.values() == {"a": 2}
    assert done.reflector.counts.failures == 1


def test_an_undecodable_object_affects_no_other_object(kube: Kube, script: Script) -> None:
    """The view lacks an undecodable object of a LIST. If an event is undecodable, its object keeps the last value."""
    script.answers.append(page(10, item("good", 1, value=1), item("bad", 2, value="x"), {"metadata": 5}))
    turned_bad, turned_good = item("good", 11, value="y"), item("bad", 13, value=4)
    other = event("ADDED", item("other", 12, value=3))
    script.watches.append(stream(event("MODIFIED", turned_bad), other, event("MODIFIED", turned_good)))
    done = run(kube, 1)
    assert script.asked() == ["LIST", "WATCH 10"]
    assert done.values() == {"good": 1, "bad": 4, "other": 3}
    assert done.events == [(None, 1), (None, 3), (None, 4)]
    assert done.reflector.counts.undecodable == 3
    assert done.reflector.resource_version == "13"


def test_an_undecodable_successor_does_not_inherit_the_value_of_its_name(kube: Kube, script: Script) -> None:
    script.answers.append(page(10, item("a", 1, uid="first", value=1)))
    script.watches.append(stream(event("MODIFIED", item("a", 11, uid="second", value="x"))))
    assert run(kube, 1).events == [(None, 1), (1, None)]


@pytest.mark.parametrize("error", [KeyError("spec"), RecursionError(), MemoryError()])
def test_an_object_that_cannot_be_decoded_is_named_until_it_is_deleted(
    kube: Kube, script: Script, error: Exception
) -> None:
    """Only one line is logged for the object, and objects of other namespaces do not wait for it."""

    def fail(raw: bytes) -> int | None:
        if thing(raw) == 9:
            raise error
        return thing(raw)

    bad = [item("bad", version, value=9) for version in (1, 11, 12)]
    script.answers.append(page(10, bad[0], item("kept", 2, value=1)))
    script.watches.append(stream(*(event("MODIFIED", each) for each in (*bad[1:], item("kept", 13, value=9)))))
    script.watches.append(stream(event("DELETED", bad[0]), event("MODIFIED", item("kept", 14, value=2))))
    named: list[dict[Key, bool]] = []
    with structlog.testing.capture_logs() as log:
        done = run(kube, 2, lambda reflector: named.append(reflector.unread()), decode=fail)
    assert named == [{Key("ns", "bad"): False}, {}]
    assert done.values() == {"kept": 2}
    assert done.reflector.counts.undecodable == 4
    assert [each["name"] for each in log if each["event"] == "object left out"] == ["bad", "kept"]


def test_a_namespace_waits_while_no_state_of_an_object_could_be_decoded(kube: Kube, script: Script) -> None:
    script.answers.append(page(10, item("bad", 2, value="x"), item("kept", 3, value=1)))
    script.watches.append(stream(event("MODIFIED", item("kept", 11, value="x"))))
    reflector = run(kube, 1).reflector
    assert reflector.unread() == {Key("ns", "bad"): False, Key("ns", "kept"): True}
    reflector.check_read("other")
    with pytest.raises(Unavailable, match="bad cannot be decoded"):
        reflector.check_read("ns")
    script.answers.append(page(20, item("kept", 11, value="x")))
    reflector.relist()
    reflector.check_read("ns")


@pytest.mark.parametrize("callback", ["on_listing", "on_listed"])
def test_a_reflector_lists_again_after_any_error(kube: Kube, script: Script, callback: str) -> None:
    answers = iter([RecursionError(), MemoryError(), None])

    def fail_twice() -> bool:
        if error := next(answers):
            raise error
        return False

    script.answers.extend([page(10, item("a", 3, value=1))] * 3)
    script.watches.append(stream(event("ADDED", item("b", 11, value=2))))
    callbacks: dict[str, Any] = {callback: fail_twice}
    done = run(kube, 3, **callbacks)
    assert done.reflector.synced.is_set()
    assert done.reflector.counts.failures == 2
    assert done.values() == {"a": 1, "b": 2}


def test_a_watch_that_fails_by_an_unexpected_error_starts_again_with_a_list(
    kube: Kube, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.answers.extend([page(10), page(20, item("a", 12, value=1))])
    script.watches.extend([stream(bookmark(11)), stream(bookmark(21))])
    answers = iter([MemoryError(), None])

    def read(line: bytes, what: str) -> WatchEvent:
        if error := next(answers):
            raise error
        return read_event(line, what)

    monkeypatch.setattr("vcuda.kube.watch.read_event", read)
    assert run(kube, 2).values() == {"a": 1}
    assert script.asked() == ["LIST", "WATCH 10", "LIST", "WATCH 20"]


def test_a_callback_that_raises_is_counted_and_the_next_event_follows(kube: Kube, script: Script) -> None:
    seen: list[int | None] = []

    def stumble(_old: int | None, new: int | None) -> None:
        seen.append(new)
        if new == 1:
            raise RuntimeError("the callback failed")

    script.answers.append(page(10, item("a", 1, value=1), item("b", 2, value=2)))
    script.watches.append(stream(event("MODIFIED", item("a", 11, value=3))))
    done = run(kube, 1, on_event=stumble)
    assert seen == [1, 2, 3]
    assert done.reflector.counts.callback_errors == 1
    assert done.values() == {"a": 3, "b": 2}


LIST_FAILURES = [
    pytest.param(status(403, "configmaps is forbidden"), id="forbidden"),
    pytest.param(status(401, "Unauthorized"), id="unauthorized"),
    pytest.param(status(429, "too many requests"), id="too many requests"),
    pytest.param(status(500, "etcd has no leader"), id="fault in the server"),
    pytest.param(torn(b'{"items": ['), id="cut short"),
    pytest.param(stream(b'{"metadata": {"resourceVersion": "9"}, "items": [{"me'), id="complete, but half a list"),
]


@pytest.mark.parametrize("failure", LIST_FAILURES)
def test_while_lists_fail_the_reflector_is_unsynced_and_waits_longer_each_time(
    kube: Kube, script: Script, failure: Answer
) -> None:
    script.answers.extend([failure] * 9)
    done = run(kube, 9)
    assert done.rounds.delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10])
    assert not done.reflector.synced.is_set()
    assert done.reflector.resource_version == ""
    assert done.reflector.last_event_age(now=1.0) == float("inf")
    assert done.reflector.counts.failures == 9


@pytest.mark.parametrize("failure", LIST_FAILURES)
def test_a_synced_view_survives_failures(kube: Kube, script: Script, failure: Answer) -> None:
    script.answers.extend([page(10, item("a", 1, value=1)), failure, page(30, item("a", 1, value=1))])
    script.watches.extend([GONE, stream(bookmark(31))])
    done = run(kube, 3)
    assert script.asked() == ["LIST", "WATCH 10", "LIST", "LIST", "WATCH 30"]
    assert done.events == [(None, 1)]


def test_a_list_whose_next_page_expired_restarts_and_shows_no_partial_result(kube: Kube, script: Script) -> None:
    script.answers.extend([page(10, item("a", 1, value=1), token="t"), GONE, page(20, item("b", 2, value=2))])
    script.watches.append(stream(bookmark(21)))
    done = run(kube, 2)
    assert done.values() == {"b": 2}
    assert done.events == [(None, 2)]


def test_selectors_are_sent_with_list_and_watch(kube: Kube, script: Script) -> None:
    script.answers.append(page(10))
    script.watches.append(stream(bookmark(11)))
    run(kube, 1, params={"fieldSelector": "metadata.name=gpuquota"})
    assert [request.params["fieldSelector"] for request in script.seen] == ["metadata.name=gpuquota"] * 2


def test_a_server_that_ends_every_watch_is_called_less_often_until_a_watch_lasts(kube: Kube, script: Script) -> None:
    now = [0.0]

    def let_pass(_old: int | None, seconds: int | None) -> None:
        """Advance the clock by as many seconds as the value of the event's object."""
        now[0] += seconds or 0

    script.answers.append(page(10))
    for number, seconds in enumerate((1, 9, 9, 10, 1)):
        script.watches.append(stream(event("ADDED", item(f"n{number}", 11 + number, value=seconds))))
    done = run(kube, 5, clock=lambda: now[0], on_event=let_pass)
    assert done.rounds.delays == pytest.approx([0.1, 0.2, 0.4, 0.1, 0.2])
    assert done.reflector.counts.failures == 0


def test_the_age_of_the_last_event_is_reset_by_list_watch_event_and_bookmark(kube: Kube, script: Script) -> None:
    now = [100.0]
    stamps: list[float] = []

    def tick() -> float:
        """Advance the clock by a second at each reading.

        The reflector reads the clock after a LIST, at both ends of a watch, and after each line of the watch.
        """
        now[0] += 1
        return now[0]

    def look(_seconds: float) -> bool:
        stamps.append(-reflector.last_event_age(0))
        return len(stamps) == 4

    script.answers.append(page(10))
    script.watches.extend([status(500, "no"), stream(b"\n"), stream(bookmark(11))])
    script.watches.append(stream(event("ADDED", item("a", 12, value=1))))
    reflector = Reflector(kube, PATH, thing, clock=tick, wait=look)
    reflector.start()
    reflector.join(20)
    assert stamps == [101, 102, 105, 108]


def large(name: str, version: int) -> dict[str, object]:
    """Return an object that exceeds the reflector's size limit, with its fields in the order of the API server."""
    metadata = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": metadata, "value": 9, "text": "x" * MAX_OBJECT_BYTES}


def test_an_event_that_is_too_large_causes_a_new_list_and_ends_no_watch(kube: Kube, script: Script) -> None:
    script.answers += [page(10, item("a", 3, value=1)), page(30, item("a", 3, value=1), item("b", 21, value=2))]
    script.watches += [stream(event("ADDED", large("b", 21))), stream(event("ADDED", item("c", 31, value=3)))]
    done = run(kube, 2)
    assert script.asked() == ["LIST", "WATCH 10", "LIST", "WATCH 30"]
    assert done.values() == {"a": 1, "b": 2, "c": 3}


def test_an_object_that_is_too_large_keeps_its_last_good_value_and_the_others_are_listed(
    kube: Kube, script: Script
) -> None:
    def compact(*items: dict[str, object], token: str = "") -> Answer:
        """Return a page of a LIST without spaces, as the API server writes it."""
        listed = {"kind": "List", "metadata": {"resourceVersion": "30", "continue": token}, "items": items}
        return Answer(json.dumps(listed, separators=(",", ":")).encode())

    script.answers.append(page(10, item("a", 3, value=1), item("b", 4, value=2)))
    script.answers += [*[compact(large("a", 21), token="t")] * 4, compact(item("b", 22, value=20))]
    script.watches += [GONE, stream(bookmark(31))]
    done = run(kube, 2)
    limits = [request.params["limit"] for request in script.seen if "watch" not in request.params]
    assert limits == ["32", "32", "8", "2", "1", "1"]
    assert done.values() == {"a": 1, "b": 20}
    assert done.reflector.counts.undecodable == 1
