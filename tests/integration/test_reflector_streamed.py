"""A reflector with a streamed list.

One watch request first sends all objects as initial events, which become the reflector's view. Then it sends changes.
"""

import threading

import pytest

from tests.integration.rounds import GONE, PATH, run, running, stopped_at_its_first_object, thing
from tests.integration.scripted import (
    NOT_STREAMED,
    Answer,
    Script,
    bookmark,
    event,
    forever,
    initial_events_end,
    item,
    page,
    status,
    status_object,
    stream,
    tear,
)
from vcuda.kube import Kube, Reflector

EXPIRED = event("ERROR", status_object(410, "too old resource version"))


def listed(version: int, *items: dict[str, object]) -> bytes:
    return b"".join(event("ADDED", one) for one in items) + initial_events_end(version)


def test_one_request_lists_and_watches(kube: Kube, script: Script) -> None:
    first, second = item("a", 3, value=1), item("b", 4, value=2)
    changes = event("MODIFIED", item("a", 12, value=5)) + event("DELETED", item("b", 13, value=2)) + bookmark(20)
    script.streams.append(stream(listed(10, first, second), changes))
    done = run(kube, 1, params={"fieldSelector": "metadata.name!=c"})
    assert script.asked() == ["STREAM"]
    as_in_every_watch = {"fieldSelector": "metadata.name!=c", "watch": "true", "allowWatchBookmarks": "true"}
    initial = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan", "timeoutSeconds": ""}
    assert dict(script.seen[0].params) | {"timeoutSeconds": ""} == {**as_in_every_watch, **initial}
    assert done.values() == {"a": 5}
    assert done.events == [(None, 1), (None, 2), (1, 5), (2, None)]
    assert done.reflector.resource_version == "20"
    counts = done.reflector.counts
    assert (counts.lists, counts.streamed_lists, counts.watches, counts.events) == (1, 1, 1, 2)


def test_after_a_stream_that_ends_with_the_list_a_watch_starts_from_its_version(kube: Kube, script: Script) -> None:
    script.streams.append(stream(listed(10, item("a", 3, value=1)), event("ADDED", item("b", 11, value=2))))
    script.watches.append(stream(event("ADDED", item("c", 12, value=3))))
    assert run(kube, 2).values() == {"a": 1, "b": 2, "c": 3}
    assert script.asked() == ["STREAM", "WATCH 11"]


def test_changes_before_the_list_is_complete_are_included(kube: Kube, script: Script) -> None:
    """A bookmark without the annotation k8s.io/initial-events-end only reports progress, and does not end the list."""
    early = event("ADDED", item("a", 3, value=1)) + event("ADDED", item("b", 4, value=2)) + bookmark(5)
    changes = event("MODIFIED", item("a", 11, value=5)) + event("DELETED", item("b", 12, value=2))
    unkept = event("ADDED", item("c", 6, value=3)) + event("MODIFIED", item("c", 13, value=0))
    script.streams.append(stream(early, changes, unkept, initial_events_end(13)))
    done = run(kube, 1)
    assert done.events == [(None, 5)]
    assert done.reflector.resource_version == "13"


def test_after_410_the_list_is_streamed_again_and_the_view_is_replaced_in_one_step(kube: Kube, script: Script) -> None:
    kept = item("kept", 1, value=1)
    script.streams.append(stream(listed(10, kept, item("gone", 3, value=3)), EXPIRED))
    script.streams.append(stream(event("ADDED", item("new", 26, value=4)), event("ADDED", kept), listed(30)))
    views: list[set[str]] = []
    run(kube, 2, lambda reflector: views.append({key.name for key in reflector.snapshot()}))
    assert script.asked() == ["STREAM", "STREAM"]
    assert views == [{"kept", "gone"}] * 2 + [{"kept", "new"}] * 2


@pytest.mark.parametrize("refusal", [NOT_STREAMED, status(400, "unknown parameter")], ids=["422", "400"])
def test_a_server_that_does_not_stream_is_tried_once_and_then_lists_in_pages(
    kube: Kube, script: Script, refusal: Answer
) -> None:
    script.streams.append(refusal)
    script.answers.extend([page(10, item("a", 3, value=1)), page(20, item("a", 3, value=1))])
    script.watches.extend([GONE, stream(bookmark(21))])
    done = run(kube, 2)
    assert script.asked() == ["STREAM", "LIST", "WATCH 10", "LIST", "WATCH 20"]
    assert script.refused_streams == 0
    counts = done.reflector.counts
    assert (counts.lists, counts.streamed_lists, counts.failures) == (2, 0, 1)


def test_any_other_error_is_reported_by_the_list_and_the_next_one_is_streamed(kube: Kube, script: Script) -> None:
    """The error, for example a missing right, may be temporary. So the reflector requests a streamed list again."""
    script.streams.append(status(403, "cannot watch"))
    script.answers.append(status(403, "cannot list"))
    script.streams.append(stream(listed(10, item("a", 3, value=1))))
    done = run(kube, 2)
    assert script.asked() == ["STREAM", "LIST", "STREAM"]
    assert done.values() == {"a": 1}
    assert done.reflector.counts.failures == 1


def test_an_unavailable_server_is_asked_for_a_stream_again(kube: Kube, script: Script) -> None:
    """If all clients changed to paged LISTs, they would overload an API server that has just started."""
    script.streams.extend([status(503, "not ready"), status(429, "too many"), stream(listed(10))])
    done = run(kube, 3)
    assert script.asked() == ["STREAM"] * 3
    assert done.reflector.synced.is_set()


CUT_SHORT = [
    pytest.param((), id="ended by the server"),
    pytest.param((tear,), id="torn between lines"),
    pytest.param((b'{"type": "ADDED", "object": {"metad', tear), id="torn inside a line"),
    pytest.param((bookmark(10),), id="ends after a bookmark without the annotation"),
    pytest.param((event("ERROR", status_object(500, "cannot decode")),), id="an ERROR event"),
    pytest.param((EXPIRED,), id="expired"),
    pytest.param((b"<html>\n", listed(10)), id="a line that cannot be read"),
]


@pytest.mark.parametrize("end", CUT_SHORT)
def test_a_streamed_list_that_breaks_shows_no_partial_result_and_is_read_in_pages(
    kube: Kube, script: Script, end: tuple[bytes, ...]
) -> None:
    script.streams.append(stream(event("ADDED", item("half", 3, value=9)), *end))
    script.answers.append(page(10, item("a", 3, value=1)))
    script.watches.append(GONE)
    script.streams.append(stream(listed(20, item("a", 3, value=1))))
    done = run(kube, 3)
    assert script.asked() == ["STREAM", "LIST", "WATCH 10", "STREAM"]
    assert done.events == [(None, 1)]
    assert done.reflector.counts.failures == 2


def test_a_synced_view_survives_a_list_that_breaks(kube: Kube, script: Script) -> None:
    script.streams.append(stream(listed(10, item("a", 3, value=1)), b"<html>\n"))
    script.streams.append(stream(event("ADDED", item("half", 13, value=9))))
    done = run(kube, 2)
    assert done.values() == {"a": 1}
    assert done.reflector.resource_version == "10"


def test_an_undecodable_object_affects_no_other_object(kube: Kube, script: Script) -> None:
    """If the new version of an object cannot be decoded, the store keeps the old version. The uid is the same."""
    good = listed(10, item("good", 1, value=1), item("bad", 2, value="x"))
    script.streams.append(stream(good, EXPIRED))
    turned_bad = event("ADDED", item("other", 12, value=3)) + event("MODIFIED", item("other", 13, value="z"))
    script.streams.append(stream(turned_bad, listed(20, item("good", 11, value="y"))))
    done = run(kube, 2)
    assert done.values() == {"good": 1, "other": 3}
    assert done.events == [(None, 1), (None, 3)]
    assert done.reflector.counts.undecodable == 3


def test_an_object_with_an_unchanged_version_is_not_decoded_again(kube: Kube, script: Script) -> None:
    decoded: list[bytes] = []

    def note(raw: bytes) -> int | None:
        decoded.append(raw)
        return thing(raw)

    script.streams.append(stream(listed(10, item("a", 1, value=1)), EXPIRED))
    script.streams.append(stream(listed(20, item("a", 1, value=1), item("b", 11, value=2))))
    done = run(kube, 2, decode=note)
    assert len(decoded) == 2
    assert done.events == [(None, 1), (None, 2)]


def test_stop_during_the_initial_events_ends_them_at_once_and_shows_no_partial_result(
    kube: Kube, script: Script
) -> None:
    """Without the stop, the reflector would read more objects from its buffers. The stream would last for minutes."""
    script.streams.append(stream(listed(10, item("a", 1, value=1)), b"\n"))
    reflector = stopped_at_its_first_object(kube)
    assert not reflector.alive
    assert not reflector.synced.is_set()
    assert dict(reflector.snapshot()) == {}
    assert reflector.counts.failures == 0


def test_a_stream_that_becomes_silent_during_the_list_is_ended(
    kube: Kube, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the reflector did not end the stream, a dead connection would block the first list forever."""
    monkeypatch.setattr("vcuda.kube.reflector.SILENCE", 0.2)
    script.streams.append(stream(event("ADDED", item("half", 3, value=9)), forever))
    script.answers.append(page(10, item("a", 3, value=1)))
    reflector = Reflector(kube, PATH, thing)
    with running(reflector):
        assert reflector.synced.wait(20)
    assert script.asked()[:2] == ["STREAM", "LIST"]
    assert list(reflector.snapshot().values()) == [1]


def test_stop_is_prompt_during_a_list_that_waits_for_its_next_event(kube: Kube, script: Script) -> None:
    script.streams.append(stream(event("ADDED", item("half", 3, value=9)), forever))
    reached = threading.Event()

    def decode(raw: bytes) -> int | None:
        reached.set()
        return thing(raw)

    reflector = Reflector(kube, PATH, decode)
    with running(reflector):
        assert reached.wait(20)
    assert not reflector.alive
    assert reflector.counts.failures == 0
