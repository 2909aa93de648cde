"""Lets callers that arrive together be served together: one of them works for all that wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False, slots=True)
class Ticket(Generic[T, R]):
    """One caller's item, and its result once there is one. ``deadline`` is in seconds of the monotonic clock."""

    item: T
    deadline: float
    result: R | None = None
    error: BaseException | None = None
    leads: bool = False
    _woken: threading.Event = field(default_factory=threading.Event)

    @property
    def settled(self) -> bool:
        """Whether the caller has its result, or an error instead."""
        return self.result is not None or self.error is not None

    def wake(self) -> None:
        """Let its caller go on."""
        self._woken.set()

    def wait(self) -> None:
        """Block until woken, or until the deadline."""
        self._woken.wait(max(self.deadline - time.monotonic(), 0))


class Turns(Generic[T, R]):
    """A queue whose waiting callers take turns at working it off.

    The first caller leads: it takes everything that waits as one batch, has it worked off, and wakes those served.
    When its own item is done it hands the lead to the next caller that waits, so nobody works for others for long.
    ``gather`` is called by a leader before it takes its batch, where the one before it was of several: it may wait for
    more to come. A caller that comes alone never waits for others.
    """

    def __init__(
        self, work: Callable[[Sequence[Ticket[T, R]]], None], gather: Callable[[], None] = lambda: None
    ) -> None:
        self._work = work
        self._gather = gather
        self._last_batch = 0
        self._lock = threading.Lock()
        self._waiting: list[Ticket[T, R]] = []
        self._led = False

    def serve(self, item: T, deadline: float) -> R | None:
        """Return the item's result, or None where the deadline came first. Raises what ``work`` raised for it."""
        ticket: Ticket[T, R] = Ticket(item, deadline)
        with self._lock:
            self._waiting.append(ticket)
            ticket.leads = not self._led
            self._led = True
        if not ticket.leads:
            ticket.wait()
        if self._leaves(ticket):
            return None
        if ticket.leads:
            self._lead()
        if ticket.error is not None:
            raise ticket.error
        return ticket.result

    def _leaves(self, ticket: Ticket[T, R]) -> bool:
        """Take a caller out of the queue whose deadline has come; one that was just asked to lead does that first."""
        with self._lock:
            if ticket.settled or ticket.leads:
                return False
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            return True

    def _lead(self) -> None:
        try:
            if self._last_batch > 1:
                self._gather()
            with self._lock:
                batch, self._waiting = self._waiting, []
            self._last_batch = len(batch)
            self._run(batch)
        finally:
            self._hand_over()

    def _run(self, batch: list[Ticket[T, R]]) -> None:
        try:
            self._work(batch)
        except Exception as error:  # noqa: BLE001  # raised again, in the caller of each item that has no result
            for ticket in batch:
                if not ticket.settled:
                    ticket.error = error
        finally:
            for ticket in batch:
                ticket.wake()

    def _hand_over(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting[0].leads = True
                self._waiting[0].wake()
            else:
                self._led = False
