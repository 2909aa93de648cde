"""Runs a reflector (a cache of objects that a watch updates) for a limited number of attempts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.integration.scripted import status
from vcuda.kube import Backoff, Kube, Reflector

PATH = "/api/v1/namespaces/ns/configmaps"
GONE = status(410, "too old resource version")


Look = Callable[[Reflector[int]], None]


class Thing(msgspec.Struct, frozen=True):
    """A test object, of which only this integer value is decoded."""

    value: int = 0


def thing(raw: bytes) -> int | None:
    """Return the integer value of an object. For 0 return None, so that the reflector does not keep the object."""
    return msgspec.json.decode(raw, type=Thing).value or None


@dataclass
class Rounds:
    """Replaces the sleep of the reflector. It records the delays, and ends the reflector after ``limit`` of them."""

    limit: int
    delays: list[float] = field(default_factory=list)

    def __call__(self, seconds: float) -> bool:
        self.delays.append(seconds)
        return len(self.delays) >= self.limit


@dataclass
class Run:
    """The result of running a reflector. ``rounds``: its delays. It also has the events that were reported."""

    reflector: Reflector[int]
    rounds: Rounds
    events: list[tuple[int | None, int | None]]

    def values(self) -> dict[str, int]:
        return {key.name: value for key, value in self.reflector.snapshot().items()}


def run(kube: Kube, limit: int, look: Look = lambda _: None, **settings: Any) -> Run:
    """Run a reflector for ``limit`` attempts, without sleep and jitter. ``look`` is called after each event."""
    events: list[tuple[int | None, int | None]] = []
    rounds = Rounds(limit)
    reflector: Reflector[int]

    def note(old: int | None, new: int | None) -> None:
        events.append((old, new))
        look(reflector)

    settings = {"on_event": note, "decode": thing, **settings}
    reflector = Reflector(kube, PATH, wait=rounds, backoff=Backoff(draw=lambda: 1.0), **settings)
    reflector.start()
    reflector.join(20)
    assert not reflector.alive, "the script keeps a watch open"
    return Run(reflector, rounds, events)


@contextmanager
def running(reflector: Reflector[Any]) -> Iterator[None]:
    reflector.start()
    try:
        yield
    finally:
        reflector.stop()
        reflector.join(20)


def stopped_at_its_first_object(kube: Kube) -> Reflector[int]:
    reflector: Reflector[int]

    def stop(_raw: bytes) -> int:
        reflector.stop()
        return 1

    reflector = Reflector(kube, PATH, stop)
    reflector.start()
    reflector.join(20)
    return reflector
