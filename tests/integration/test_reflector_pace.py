"""When a reflector acts: how long it waits, how old its view is, and how soon it ends."""

from __future__ import annotations

import itertools
import queue
import threading

import pytest

from tests.integration.rounds import PATH, run, running, thing
from tests.integration.scripted import Script, bookmark, event, item, page, status, stream
from vcuda.kube import Backoff, Kube, Reflector


def test_a_server_that_ends_every_watch_at_once_meets_longer_and_longer_pauses(kube: Kube, script: Script) -> None:
    script.answers.append(page(10))
    script.watches.extend([stream(bookmark(11))] * 5)
    done = run(kube, 5)
    assert done.rounds.delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6])
    assert done.reflector.counts.failures == 0


def test_a_watch_that_stood_for_a_while_starts_the_delays_over(kube: Kube, script: Script) -> None:
    now = [0.0]

    def let_pass(_old: int | None, seconds: int | None) -> None:
        """Each event takes as many seconds as its object says."""
        now[0] += seconds or 0

    script.answers.append(page(10))
    for number, seconds in enumerate((1, 9, 9, 10, 1)):
        script.watches.append(stream(event("ADDED", item(f"n{number}", 11 + number, value=seconds))))
    done = run(kube, 5, clock=lambda: now[0], on_event=let_pass)
    assert done.rounds.delays == pytest.approx([0.1, 0.2, 0.4, 0.1, 0.2])


def test_the_age_of_the_last_event_counts_from_list_watch_event_and_bookmark(kube: Kube, script: Script) -> None:
    now = [100.0]
    stamps: list[float] = []

    def tick() -> float:
        """A second passes each time somebody looks: after a LIST, at both ends of a watch, after each line."""
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


@pytest.mark.parametrize("where", ["watching", "waiting"])
def test_stop_is_prompt(kube: Kube, script: Script, where: str) -> None:
    """A silent watch would last for minutes, and the wait here for an hour."""
    script.answers.append(page(10) if where == "watching" else status(500, "no"))
    reached = threading.Event()
    waiting = Backoff(first=3600, ceiling=3600)
    reflector = Reflector(kube, PATH, thing, backoff=waiting, log=Signal(reached))  # type: ignore[arg-type]
    with running(reflector):
        assert reached.wait(20)
    assert not reflector.alive
    assert reflector.counts.failures == (0 if where == "watching" else 1)


class Signal:
    """A logger that only tells that it listed, or failed."""

    def __init__(self, reached: threading.Event) -> None:
        self._reached = reached

    def bind(self, **_context: object) -> Signal:
        return self

    def info(self, event: str, **_context: object) -> None:
        if event in {"listed", "watch failed"}:
            self._reached.set()

    warning = info


def test_stop_while_a_watch_is_being_opened_ends_that_watch(kube: Kube, script: Script) -> None:
    script.answers.append(page(10))
    reflector: Reflector[int]
    looks = itertools.count(1)

    def stop_second() -> float:
        """The time is looked at after the LIST, after the opening, and at the end."""
        if next(looks) == 2:
            reflector.stop()
        return 0.0

    reflector = Reflector(kube, PATH, thing, clock=stop_second)
    reflector.start()
    reflector.join(20)
    assert not reflector.alive
    assert script.asked() == ["LIST", "WATCH 10"]
    assert reflector.counts.failures == 0


def test_stop_between_the_pages_of_a_list_asks_for_no_more_and_shows_no_half(kube: Kube, script: Script) -> None:
    script.answers.append(page(10, item("a", 1, value=1), token="t"))
    reflector: Reflector[int]

    def stop(_raw: bytes) -> int:
        reflector.stop()
        return 1

    reflector = Reflector(kube, PATH, stop)
    reflector.start()
    reflector.join(20)
    assert script.asked() == ["LIST"]
    assert not reflector.synced.is_set()
    assert dict(reflector.snapshot()) == {}


def test_stop_from_a_callback_ends_the_watch(kube: Kube, script: Script) -> None:
    script.answers.append(page(10))
    script.watches.append(stream(event("ADDED", item("a", 11, value=1)), event("ADDED", item("b", 12, value=2))))
    seen: queue.Queue[int | None] = queue.Queue()
    reflector: Reflector[int]

    def stop(_old: int | None, new: int | None) -> None:
        seen.put(new)
        reflector.stop()

    reflector = Reflector(kube, PATH, thing, on_event=stop)
    reflector.start()
    reflector.join(20)
    assert not reflector.alive
    assert seen.qsize() == 1
