"""A rotation played through on a copy of the state: what it would do, with nothing written and nothing waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

from certs.changes import Write, after
from certs.state import State


class Rehearsal:
    """The state as it would become, and a clock that waits by jumping ahead. Endpoints follow the Secret at once.

    Endpoints follow where somebody waits for them, as they do once kubelet has; none becomes ready that is not.
    """

    def __init__(self, state: State, now: datetime) -> None:
        self._state = state
        self._now = now
        self._elapsed = 0.0

    def read(self, now: Callable[[], datetime]) -> State:
        """Return the state as it would be."""
        del now
        return self._state

    def write(self, write: Write) -> None:
        """Change the copy."""
        self._state = after(self._state, write)

    def now(self) -> datetime:
        """The time that it would be."""
        return self._now

    def monotonic(self) -> float:
        """Seconds since the start."""
        return self._elapsed

    def sleep(self, seconds: float) -> None:
        """Let the time pass, and every endpoint read the Secret."""
        self._elapsed += seconds
        self._now += timedelta(seconds=seconds)
        leaf = self._state.serving.leaf
        if leaf is not None:
            followed = (replace(one, leaf=leaf.certificate, fault="") for one in self._state.endpoints)
            self._state = replace(self._state, endpoints=tuple(followed))
