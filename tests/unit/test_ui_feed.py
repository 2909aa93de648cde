"""Tests of the feed (live updates) of the usage page."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, call

import msgspec
import pytest

from controller.refusals import ReportedObject
from controller.ui.feed import MAX_KEPT_CHANGES, Feed, Listener, TooManyListeners
from controller.ui.model import HolderRow
from controller.ui.snapshot import ModelCards, Picture
from examples.usage import Sample, ago, model_use, namespace_use
from tests.replicas import Clock
from tests.usage_page import VIEWS

REFUSAL = ReportedObject("team-b", "Job", "train", "exceeded quota: M40", ago(seconds=1))


@pytest.fixture
def sample() -> Sample:
    sample = Sample(cluster=(ModelCards("M40", 16, 0, 16),))
    sample.report(namespace_use("team-a", model_use("M40", 8)), namespace_use("team-b", model_use("M40", 8)))
    return sample


@pytest.fixture
def feed(sample: Sample, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Feed:
    """Return a feed that admits two listeners. It computes its picture (the page's data) only on request."""
    monkeypatch.setattr("controller.ui.feed.MAX_LISTENERS", 2)
    return Feed(sample.source(), VIEWS, clock=clock.monotonic)


@pytest.fixture(autouse=True)
def no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the feed's heartbeat interval to 0, so that a listener without changes gets a heartbeat at once."""
    monkeypatch.setattr("controller.ui.feed.HEARTBEAT_SECONDS", 0)


def use_cards(sample: Sample, cards: float) -> None:
    sample.report(namespace_use("team-a", model_use("M40", 8, cards)))


def listen(feed: Feed, since: str, namespace: str = "") -> tuple[Listener, Iterator[bytes]]:
    """Return a new listener of the feed, and its stream. The first line of the stream was already read."""
    listener = feed.listen(since, namespace)
    stream = iter(listener)
    assert next(stream) == b"retry: 2000\n\n"
    return listener, stream


def look(feed: Feed, clock: Clock) -> Picture:
    clock.now += 1
    return feed.picture()


def next_change(feed: Feed, clock: Clock, stream: Iterator[bytes]) -> dict[str, Any]:
    """Return the only change that the listener's stream has after one more second."""
    look(feed, clock)
    [change] = changes(next(stream))
    return change


def changes(text: bytes) -> list[dict[str, Any]]:
    pairs = itertools.pairwise(text.decode().splitlines())
    return [json.loads(data.removeprefix("data: ")) for event, data in pairs if event == "event: change"]


def test_a_picture_is_reused_for_a_second(feed: Feed, sample: Sample, clock: Clock) -> None:
    first = feed.picture()
    use_cards(sample, 3)
    clock.now += 0.9
    assert feed.picture() is first
    clock.now += 0.1
    assert feed.picture().uses["team-a"].models[0].used == 3


def test_the_version_stays_while_nothing_changes(feed: Feed, sample: Sample, clock: Clock) -> None:
    first = feed.picture()
    use_cards(sample, 0)
    assert look(feed, clock).version == first.version


def test_a_listener_gets_only_the_changed_rows(feed: Feed, sample: Sample, clock: Clock) -> None:
    before = feed.picture()
    _, stream = listen(feed, before.version)
    use_cards(sample, 3)
    after = look(feed, clock)
    [change] = changes(next(stream))
    assert list(change["rows"]) == ["team-a"]
    assert "<b>3</b> of 8" in change["rows"]["team-a"]
    assert (change["version"], change["touched"], change["refused"]) == (after.version, ["team-a"], [])
    assert after.lines["team-b"] is before.lines["team-b"], "an unchanged row is not rendered again"


def test_parts_are_sent_when_their_content_changed(feed: Feed, sample: Sample, clock: Clock) -> None:
    _, stream = listen(feed, feed.picture().version)
    sample.refusals = (REFUSAL,)
    change = next_change(feed, clock, stream)
    assert (list(change["parts"]), change["rows"], change["refused"]) == (["refusals"], {}, ["team-b"])
    sample.refusals = (replace(REFUSAL, namespace="team-a"), REFUSAL)
    change = next_change(feed, clock, stream)
    assert change["refused"] == ["team-a"], "the other listener must already have the change"
    sample.cluster = (ModelCards("M40", 17, 0, 16),)
    change = next_change(feed, clock, stream)
    assert list(change["parts"]) == ["summary", "cluster", "free"]


def test_a_new_namespace_or_model_reloads_the_page(feed: Feed, sample: Sample, clock: Clock) -> None:
    _, stream = listen(feed, feed.picture().version)
    sample.report(namespace_use("team-c", model_use("M40", 1)))
    version = look(feed, clock).version
    assert next(stream) == f"id: {version}\nevent: reset\ndata: {version}\n\n".encode()
    sample.cluster = (*sample.cluster, ModelCards("P100", 2, 0, 0))
    look(feed, clock)
    assert b"event: reset" in next(stream)


def test_a_moved_pod_updates_the_page_of_its_namespace(feed: Feed, sample: Sample, clock: Clock) -> None:
    """Only the list of pods changes. The figures of the namespace stay the same."""
    version = feed.picture().version
    _, looker = listen(feed, version, "team-a")
    look(feed, clock)
    sample.pods["team-a"] = (HolderRow("p", "M40", 100, 0, "gpu-1", ago(hours=1)),)
    change = next_change(feed, clock, looker)
    assert (change["touched"], change["rows"]) == (["team-a"], {})


def test_only_pods_of_viewed_namespaces_are_read(sample: Sample, clock: Clock) -> None:
    asked = Mock(return_value=())
    feed = Feed(msgspec.structs.replace(sample.source(), pods=asked), VIEWS, clock=clock.monotonic)
    version = feed.picture().version
    for namespace in ("", "team-b"):
        listen(feed, version, namespace)
        look(feed, clock)
    assert asked.mock_calls == [call("team-b")]


def test_a_late_listener_gets_everything_it_missed_at_once(feed: Feed, sample: Sample, clock: Clock) -> None:
    _, stream = listen(feed, feed.picture().version)
    for cards in (1, 2, 3):
        use_cards(sample, cards)
        look(feed, clock)
    for cards, change in enumerate(changes(next(stream)), 1):
        assert f"<b>{cards}</b>" in change["rows"]["team-a"]
    assert cards == 3


def test_a_listener_that_is_too_late_loads_the_page_again(feed: Feed, sample: Sample, clock: Clock) -> None:
    _, stream = listen(feed, feed.picture().version)
    for number in range(MAX_KEPT_CHANGES + 1):
        use_cards(sample, 1 + number % 2)
        look(feed, clock)
    assert b"event: reset" in next(stream)


@pytest.mark.parametrize("since", ["", "another-1", "1", "x-y", "-", "²", "{epoch}-99"])
def test_a_version_of_another_leader_reloads_the_page(feed: Feed, since: str) -> None:
    """The version that the browser sends may also be from the future, or malformed."""
    epoch = feed.picture().version.partition("-")[0]
    _, stream = listen(feed, since.format(epoch=epoch))
    assert b"event: reset" in next(stream)


def test_without_changes_a_heartbeat_shows_that_the_connection_is_alive(feed: Feed) -> None:
    _, stream = listen(feed, feed.picture().version)
    assert next(stream) == b"event: beat\ndata: 2026-03-04T12:00:00Z\n\n"


def test_the_number_of_listeners_is_bounded(feed: Feed) -> None:
    """A listener that is closed twice must release its place only once. A browser may close the connection before the
    first byte is sent.
    """
    version = feed.picture().version
    listen(feed, version)
    for read in (True, False):
        taken = listen(feed, version)[0] if read else feed.listen(version, "")
        with pytest.raises(TooManyListeners):
            feed.listen(version, "")
        taken.close()
        taken.close()


def test_closing_ends_every_stream(feed: Feed) -> None:
    _, stream = listen(feed, feed.picture().version)
    feed.close()
    assert list(stream) == []


def test_a_message_is_one_line_with_any_content(feed: Feed, sample: Sample, clock: Clock) -> None:
    """A line break would end the message, and a tenant's text could pretend to be another message."""
    _, stream = listen(feed, feed.picture().version)
    forged = "a\n\nevent: reset\ndata: forged\r\n\r\n"
    sample.refusals = (replace(REFUSAL, message=forged),)
    look(feed, clock)
    text = next(stream)
    assert [text.count(part) for part in (b"\n\n", b"\r", b"\nevent: reset")] == [1, 0, 0]
    assert len(changes(text)) == 1


def test_a_row_that_is_used_up_changes_the_summary(feed: Feed, sample: Sample, clock: Clock) -> None:
    _, stream = listen(feed, feed.picture().version)
    use_cards(sample, 8)
    change = next_change(feed, clock, stream)
    assert "<b>1</b> of them has reached a limit" in change["parts"]["summary"]
