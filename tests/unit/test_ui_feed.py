"""The picture is taken at most once a second, and listeners hear what differs, however late they are."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from controller.ui.feed import MAX_KEPT_CHANGES, Feed, Listener, TooManyListeners
from controller.ui.model import PodRow
from controller.ui.page import Views
from controller.ui.snapshot import ModelCards, Picture, RefusedWorkload
from tests.usage_samples import NOW, Sample, ago, model_use, namespace_use

VIEWS = Views(lambda: NOW)
REFUSAL = RefusedWorkload("team-b", "Job", "train", "exceeded GPU quota: M40", ago(seconds=1))


class Clock:
    """Seconds, which pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        """Let them pass."""
        self.now += seconds


class Asked(dict[str, Sequence[PodRow]]):
    """No pods, and which namespaces they were asked of."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def get(self, name: str, default: Any = None, /) -> Any:
        self.names.append(name)
        return default


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sample() -> Sample:
    """Two namespaces that use nothing yet."""
    sample = Sample(cluster=(ModelCards("M40", 16, 0, 16),))
    sample.report(namespace_use("team-a", model_use("M40", 8)), namespace_use("team-b", model_use("M40", 8)))
    return sample


@pytest.fixture
def make_feed(sample: Sample, clock: Clock) -> Callable[..., Feed]:
    """Return a feed whose thread is not started: pictures are taken when asked for."""

    def make(most: int = 64) -> Feed:
        return Feed(sample.source(), VIEWS, heartbeat=0, most=most, clock=clock)

    return make


@pytest.fixture
def feed(make_feed: Callable[..., Feed]) -> Feed:
    return make_feed()


def use_cards(sample: Sample, cards: float, namespace: str = "team-a") -> None:
    """Let the namespace use so many."""
    sample.report(namespace_use(namespace, model_use("M40", 8, cards)))


def listen(feed: Feed, since: str, namespace: str = "") -> tuple[Listener, Iterator[bytes]]:
    """A listener, past the first line of its stream."""
    listener = feed.listen(since, namespace)
    stream = iter(listener)
    assert next(stream) == b"retry: 2000\n\n"
    return listener, stream


def look(feed: Feed, clock: Clock) -> Picture:
    """The picture a second later."""
    clock.pass_by(1)
    return feed.picture()


def changes(text: bytes) -> list[dict[str, Any]]:
    """The changes in a part of a stream."""
    lines = text.decode().splitlines()
    return [
        json.loads(data.removeprefix("data: ")) for event, data in itertools.pairwise(lines) if event == "event: change"
    ]


def test_a_picture_stands_for_a_second(feed: Feed, sample: Sample, clock: Clock) -> None:
    first = feed.picture()
    use_cards(sample, 3)
    clock.pass_by(0.9)
    assert feed.picture() is first
    clock.pass_by(0.1)
    assert feed.picture().uses["team-a"].models[0].used == 3


def test_where_nothing_changes_the_version_stays(feed: Feed, sample: Sample, clock: Clock) -> None:
    first = feed.picture()
    use_cards(sample, 0)
    assert look(feed, clock) is first


def test_a_listener_hears_only_of_the_rows_that_changed(feed: Feed, sample: Sample, clock: Clock) -> None:
    before = feed.picture()
    _, stream = listen(feed, before.version)
    use_cards(sample, 3)
    after = look(feed, clock)
    [change] = changes(next(stream))
    assert list(change["rows"]) == ["team-a"]
    assert "<b>3</b> of 8" in change["rows"]["team-a"]
    assert (change["version"], change["touched"], change["refused"]) == (after.version, ["team-a"], [])
    assert after.lines["team-b"] is before.lines["team-b"], "a row that is the same is not rendered again"


def test_changes_within_a_second_come_as_one(feed: Feed, sample: Sample, clock: Clock) -> None:
    _, stream = listen(feed, feed.picture().version)
    for cards in range(1, 6):
        use_cards(sample, cards)
        feed.picture()
    look(feed, clock)
    [change] = changes(next(stream))
    assert "<b>5</b> of 8" in change["rows"]["team-a"]


def test_parts_come_when_what_they_show_changed(feed: Feed, sample: Sample, clock: Clock) -> None:
    _, stream = listen(feed, feed.picture().version)
    sample.refusals = (REFUSAL,)
    look(feed, clock)
    [change] = changes(next(stream))
    assert (list(change["parts"]), change["rows"], change["refused"]) == (["refusals"], {}, ["team-b"])
    sample.refusals = (msgspec.structs.replace(REFUSAL, namespace="team-a"), REFUSAL)
    look(feed, clock)
    [change] = changes(next(stream))
    assert change["refused"] == ["team-a"], "the other one was told before"
    sample.cluster = (ModelCards("M40", 17, 0, 16),)
    look(feed, clock)
    [change] = changes(next(stream))
    assert list(change["parts"]) == ["summary", "cluster", "free"]


def test_a_namespace_that_comes_or_goes_has_the_page_loaded_again(feed: Feed, sample: Sample, clock: Clock) -> None:
    _, stream = listen(feed, feed.picture().version)
    sample.report(namespace_use("team-c", model_use("M40", 1)))
    version = look(feed, clock).version
    assert next(stream) == f"id: {version}\nevent: reset\ndata: {version}\n\n".encode()


def test_a_model_that_comes_has_the_page_loaded_again(feed: Feed, sample: Sample, clock: Clock) -> None:
    _, stream = listen(feed, feed.picture().version)
    sample.cluster = (*sample.cluster, ModelCards("P100", 2, 0, 0))
    look(feed, clock)
    assert b"event: reset" in next(stream)


def test_pods_that_move_touch_the_namespace_of_those_who_look_at_it(feed: Feed, sample: Sample, clock: Clock) -> None:
    """Its figures are the same: a pod was bound to a node."""
    version = feed.picture().version
    _, looker = listen(feed, version, "team-a")
    look(feed, clock)
    sample.pods["team-a"] = (PodRow("p", "M40", 100, 0, "gpu-1", ago(hours=1)),)
    look(feed, clock)
    [change] = changes(next(looker))
    assert (change["touched"], change["rows"]) == (["team-a"], {})


def test_only_pods_of_namespaces_that_somebody_looks_at_are_asked_for(feed: Feed, sample: Sample, clock: Clock) -> None:
    asked = sample.pods = Asked()
    version = feed.picture().version
    for namespace in ("", "team-b"):
        listen(feed, version, namespace)
        look(feed, clock)
    assert asked.names == ["team-b"]


def test_a_listener_that_is_late_hears_everything_it_missed_at_once(feed: Feed, sample: Sample, clock: Clock) -> None:
    _, stream = listen(feed, feed.picture().version)
    for cards in (1, 2, 3):
        use_cards(sample, cards)
        look(feed, clock)
    assert [f"<b>{cards}</b>" in each["rows"]["team-a"] for cards, each in enumerate(changes(next(stream)), 1)] == [
        True,
        True,
        True,
    ]


def test_a_listener_that_is_too_late_loads_the_page_again(feed: Feed, sample: Sample, clock: Clock) -> None:
    _, stream = listen(feed, feed.picture().version)
    for number in range(MAX_KEPT_CHANGES + 1):
        use_cards(sample, 1 + number % 2)
        look(feed, clock)
    assert b"event: reset" in next(stream)


@pytest.mark.parametrize("since", ["", "another-1", "1", "x-y", "-", "²"])
def test_a_version_that_is_not_this_leader_s_has_the_page_loaded_again(feed: Feed, since: str) -> None:
    feed.picture()
    _, stream = listen(feed, since)
    assert b"event: reset" in next(stream)


def test_a_version_that_is_still_to_come_is_not_believed(feed: Feed) -> None:
    epoch = feed.picture().version.partition("-")[0]
    _, stream = listen(feed, f"{epoch}-99")
    assert b"event: reset" in next(stream)


def test_where_nothing_happens_a_heartbeat_tells_that_the_connection_stands(feed: Feed) -> None:
    _, stream = listen(feed, feed.picture().version)
    assert next(stream) == b"event: beat\ndata:\n\n"


def test_there_are_never_more_listeners_than_may_be(make_feed: Callable[..., Feed]) -> None:
    feed = make_feed(most=2)
    version = feed.picture().version
    first, _ = listen(feed, version)
    listen(feed, version)
    with pytest.raises(TooManyListeners):
        feed.listen(version, "")
    first.close()
    first.close()
    again, _ = listen(feed, version)
    with pytest.raises(TooManyListeners):
        feed.listen(version, "")
    again.close()


def test_a_listener_that_was_never_read_gives_its_place_back(make_feed: Callable[..., Feed]) -> None:
    """A browser may be gone before the first byte is written."""
    feed = make_feed(most=1)
    feed.listen("", "").close()
    feed.listen("", "").close()


def test_closing_ends_every_stream(feed: Feed) -> None:
    _, stream = listen(feed, feed.picture().version)
    feed.close()
    assert list(stream) == []


def test_a_message_is_one_line_whatever_is_in_it(feed: Feed, sample: Sample, clock: Clock) -> None:
    """A line break in it would end the event, and let somebody write the next one."""
    _, stream = listen(feed, feed.picture().version)
    sample.refusals = (
        RefusedWorkload("team-a", "Job", "x", "a\n\nevent: reset\ndata: forged\r\n\r\n", ago(seconds=1)),
    )
    look(feed, clock)
    text = next(stream)
    assert text.count(b"\n\n") == 1
    assert b"\r" not in text
    assert b"\nevent: reset" not in text
    assert len(changes(text)) == 1


def test_a_row_that_is_used_up_changes_the_summary(feed: Feed, sample: Sample, clock: Clock) -> None:
    _, stream = listen(feed, feed.picture().version)
    use_cards(sample, 8)
    look(feed, clock)
    [change] = changes(next(stream))
    assert "<b>1</b> of them has used up a model" in change["parts"]["summary"]
