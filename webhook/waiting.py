"""Connections that wait without a thread: for how long each may, and which one goes when there are too many."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from enum import IntEnum, auto
from typing import Generic, Protocol, TypeVar


class Stage(IntEnum):
    """What a connection does, or waits for."""

    HELLO = auto()
    """The TLS handshake."""
    FIRST = auto()
    """The first byte of its first request: Go's transport opens connections that it does not use at once."""
    NEXT = auto()
    """The first byte of another request."""
    REQUEST = auto()
    """The rest of a request."""
    ANSWER = auto()
    """Its peer to take an answer."""
    PARTING = auto()
    """Its peer to have read the last answer, and to close: what is closed before can destroy that answer."""
    AGAIN = auto()
    """Nothing: it goes on when it is its turn."""
    CLOSED = auto()
    """It has ended."""


KEEP_ALIVE = 120.0
"""Seconds an idle connection stays open: longer than the API server's 90, so that it never sends into a closed one."""

REQUEST = 10.0
"""Seconds from the first byte of a request to its last: the API server's own default for the whole call."""

PATIENCE = {
    Stage.HELLO: 10.0,
    Stage.FIRST: KEEP_ALIVE,
    Stage.NEXT: KEEP_ALIVE,
    Stage.REQUEST: REQUEST,
    Stage.ANSWER: 10.0,
    Stage.PARTING: 2.0,
}
"""Seconds each may take as a whole, however often something moves."""

IDLE = frozenset({Stage.HELLO, Stage.FIRST, Stage.NEXT})
"""Where nobody waits for an answer."""


class Waiting(Protocol):
    """A connection; ``deadline`` is in seconds of the monotonic clock."""

    stage: Stage
    deadline: float


C = TypeVar("C", bound=Waiting)


class Room(Generic[C]):
    """The connections that wait, by stage, in the order in which they came; every step takes the same short time."""

    def __init__(self) -> None:
        self._of: dict[Stage, OrderedDict[C, None]] = {stage: OrderedDict() for stage in Stage}

    def enter(self, connection: C) -> None:
        """Let it wait."""
        self._of[connection.stage][connection] = None

    def __contains__(self, connection: C) -> bool:
        return connection in self._of[connection.stage]

    def leave(self, connection: C) -> None:
        """Let it wait no more."""
        del self._of[connection.stage][connection]

    def expired(self, now: float) -> Iterator[C]:
        """Yield those that have waited too long; each has to leave before the next is asked for.

        One that moves now and then stands behind those that came later; so its deadline has to be looked at
        when it moves, too.
        """
        for group in self._of.values():
            while group and (first := next(iter(group))).deadline <= now:
                yield first

    def idle(self, stages: frozenset[Stage] = IDLE) -> list[C]:
        """Return those of these stages."""
        return [connection for stage in stages for connection in self._of[stage]]

    def oldest(self, stage: Stage) -> C | None:
        """Return the one that has not moved for the longest, of this stage."""
        return next(iter(self._of[stage]), None)

    def most_spare(self) -> C | None:
        """Return the one to go where there are too many: the oldest of the stage that has the most.

        A flood of any one kind so closes itself, and spares the API server's connections: those are few, or are used.
        """
        return self.oldest(max(self._of, key=lambda stage: len(self._of[stage])))
