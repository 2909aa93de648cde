"""Tests that a stopped reflector ends at once in any state, and adds no partial LIST to its view."""

import itertools
import threading
from typing import Self

import pytest

from tests.integration.rounds import PATH, run, running, stopped_at_its_first_object, thing
from tests.integration.scripted import Script, event, item, page, status, stream
from vcuda.kube import Backoff, Kube, Reflector


@pytest.mark.parametrize("where", ["watching", "waiting"])
def test_stop_is_prompt(kube: Kube, script: Script, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the stop, the watch would last minutes, and the wait after the failed LIST an hour."""
    script.answers.append(page(10) if where == "watching" else status(500, "no"))
    reached = threading.Event()
    waiting = Backoff(first=3600, ceiling=3600)
    monkeypatch.setattr("structlog.get_logger", lambda: Signal(reached))
    reflector = Reflector(kube, PATH, thing, backoff=waiting)
    with running(reflector):
        assert reached.wait(20)
    assert not reflector.alive
    assert reflector.counts.failures == (0 if where == "watching" else 1)


class Signal:
    """A logger that sets ``reached`` when the reflector logs a LIST or a failed watch."""

    def __init__(self, reached: threading.Event) -> None:
        self._reached = reached

    def bind(self, **_context: object) -> Self:
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
        """Stop the reflector at the second reading of the clock.

        The reflector reads the clock after the LIST, after the opening of the watch, and at the end.
        """
        if next(looks) == 2:
            reflector.stop()
        return 0.0

    reflector = Reflector(kube, PATH, thing, clock=stop_second)
    reflector.start()
    reflector.join(20)
    assert not reflector.alive
    assert script.asked() == ["LIST", "WATCH 10"]
    assert reflector.counts.failures == 0


def test_stop_between_the_pages_of_a_list_requests_no_more_and_shows_no_partial_result(
    kube: Kube, script: Script
) -> None:
    script.answers.append(page(10, item("a", 1, value=1), token="t"))
    reflector = stopped_at_its_first_object(kube)
    assert script.asked() == ["LIST"]
    assert not reflector.synced.is_set()
    assert dict(reflector.snapshot()) == {}


def test_stop_from_a_callback_ends_the_watch(kube: Kube, script: Script) -> None:
    script.answers.append(page(10))
    script.watches.append(stream(event("ADDED", item("a", 11, value=1)), event("ADDED", item("b", 12, value=2))))
    assert run(kube, 9, Reflector.stop).events == [(None, 1)]
