"""The ledgers of a cluster, shared by every replica: charges are committed in groups, by compare-and-swap."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from vcuda.errors import Conflict, Unavailable
from vcuda.kube import LedgerStore, Stored
from vcuda.ledger.ledger import Admitted, Ledger, Refused, is_older, settle
from vcuda.quota.model import Usage
from webhook.ledgers import ChargeRequest, RetryLater
from webhook.metrics import LedgerMetrics

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


Decision = Admitted | Refused | RetryLater
Waiting = Sequence[Ticket[ChargeRequest, Decision]]

VIEW_AGE = 0.5
"""Seconds for which a ledger once read is good enough to prefer a model by; never to refuse by."""

READ_TIMEOUT = 3.0
"""Seconds after which a read has failed: so short that its callers still hear of it."""

WRITE_TIMEOUT = 3.0
"""Seconds after which a write counts as lost, and is looked for by reading."""

GATHER = 0.004
"""Seconds that a group waits for more charges, where the last one held several.

A write costs the API server and etcd about as much as half a pod's creation, so under load fewer and larger ones are
worth more than the time. PostgreSQL's commit_delay and commit_siblings do the same.
"""

TOO_MANY = RetryLater("too many charges to this namespace at once")
UNSURE = RetryLater("it is not known whether the charge was written")


class ClusterLedgers:
    """One book per namespace. ``charge`` and ``headroom`` are the interface of `webhook.ledgers.Ledgers`."""

    def __init__(self, store: LedgerStore, metrics: LedgerMetrics) -> None:
        self._store = store
        self._metrics = metrics
        self._books: dict[str, Book] = {}

    def charge(self, demand: ChargeRequest) -> Decision:
        """Decide a charge and keep it, once per uid; a dry run keeps nothing."""
        return self._book(demand.namespace).charge(demand)

    def usage(self, namespace: str) -> Mapping[str, Usage]:
        """Return what is charged to each model, as of now."""
        return self._book(namespace).usage()

    def cached_usage(self, namespace: str) -> Mapping[str, Usage]:
        """Return what is charged to each model, as of a moment ago."""
        return self._book(namespace).cached_usage()

    def _book(self, namespace: str) -> Book:
        book = self._books.get(namespace)
        if book is None:
            book = self._books.setdefault(namespace, Book(namespace, self._store, self._metrics))
        return book


class Seen(msgspec.Struct, frozen=True):
    """Usages and when they were read, in seconds of the monotonic clock."""

    usages: Mapping[str, Usage]
    at: float


class Book:
    """One namespace's ledger as this replica works on it.

    The charges that wait are decided in order against one version, and written by one PUT with that version. What was
    written last is remembered, so the next group needs no read; whoever loses to another replica reads and decides
    again, until the caller's deadline. Only the caller that leads touches ``_known``.
    """

    def __init__(self, namespace: str, store: LedgerStore, metrics: LedgerMetrics) -> None:
        self._namespace = namespace
        self._store = store
        self._metrics = metrics
        self._known: Stored | None = None
        self._seen = Seen({}, -math.inf)
        self._turns: Turns[ChargeRequest, Decision] = Turns(self._commit, lambda: time.sleep(GATHER))

    def charge(self, demand: ChargeRequest) -> Decision:
        """Decide a charge together with those that wait beside it."""
        started = time.monotonic()
        decision = self._turns.serve(demand, demand.deadline)
        self._metrics.waited(time.monotonic() - started)
        return decision or TOO_MANY

    def cached_usage(self) -> Mapping[str, Usage]:
        """Return what is charged to each model, as of at most `VIEW_AGE` seconds ago."""
        seen = self._seen
        if time.monotonic() - seen.at < VIEW_AGE:
            return seen.usages
        return self.usage()

    def usage(self) -> Mapping[str, Usage]:
        """Return what is charged to each model, read now."""
        return self._see(self._store.read(self._namespace, READ_TIMEOUT).ledger).usages

    def _see(self, ledger: Ledger) -> Seen:
        self._seen = seen = Seen(ledger.usages(), time.monotonic())
        return seen

    def _commit(self, waiting: Waiting) -> None:
        """Give every ticket its decision. Raises Unreachable where nothing is known to be written."""
        self._metrics.batch(len(waiting))
        unsure = False
        while open_ := _in_time(waiting, UNSURE if unsure else TOO_MANY):
            try:
                written = self._attempt(open_)
            except Unavailable:
                if not unsure:
                    raise
                _settle(open_, UNSURE)
                return
            if not written:
                unsure = unsure or written is None
                time.sleep(random.uniform(0, 0.02))  # noqa: S311  # spreads the replicas; guards nothing

    def _attempt(self, waiting: Waiting) -> bool | None:
        """Decide against one version and write it; False if another writer was first, None if that is not known."""
        remembered, self._known = self._known, None
        stored = remembered or self._store.read(self._namespace, READ_TIMEOUT)
        ledger, decisions = _decide(self._complete(stored.ledger, waiting), waiting)
        proves_itself = ledger is not stored.ledger and all(isinstance(decision, Admitted) for decision in decisions)
        if remembered and not proves_itself:
            return self._attempt(waiting)  # a refusal, or a yes that writes nothing, is never taken from memory
        if ledger is not stored.ledger and not all(ticket.item.dry_run for ticket in waiting):
            written = self._write(ledger, stored.version)
            if not isinstance(written, Stored):
                return written
            stored = written
        if stored.version is not None:  # one that has yet to be created counts pods, and those change unseen
            self._known = stored
        self._see(ledger)
        for ticket, decision in zip(waiting, decisions, strict=True):
            ticket.result = decision
        return True

    def _complete(self, ledger: Ledger, waiting: Waiting) -> Ledger:
        """Return the ledger with every pod in it that the callers' quota counts.

        One that was last counted before the quota was edited may miss pods: those that were stored while the namespace
        was not limited, and no leader was there to drop the ledger.
        """
        if any(is_older(ledger.pod_resource_version, ticket.item.counted_since) for ticket in waiting):
            view = self._store.look(self._namespace, READ_TIMEOUT)
            return settle(ledger, view, counted_since=view.resource_version)
        return ledger

    def _write(self, ledger: Ledger, version: str | None) -> Stored | bool | None:
        try:
            written = self._store.write(self._namespace, ledger, version, WRITE_TIMEOUT)
        except Conflict:
            self._metrics.conflicts.inc()
            return False
        except Unavailable:
            self._metrics.unsure.inc()
            return None
        self._metrics.written(written.size)
        return written


def _decide(ledger: Ledger, waiting: Waiting) -> tuple[Ledger, list[Decision]]:
    """Decide the tickets in order, each beside those granted before it."""
    decisions = []
    for ticket in waiting:
        decision = ticket.item.decide(ledger)
        decisions.append(decision)
        if isinstance(decision, Admitted) and not ticket.item.dry_run:
            ledger = decision.ledger
    return ledger, decisions


def _in_time(waiting: Waiting, late: RetryLater) -> Waiting:
    """Return the tickets still to be decided; those whose deadline has come are told to come again."""
    now = time.monotonic()
    _settle([ticket for ticket in waiting if not ticket.settled and ticket.deadline <= now], late)
    return [ticket for ticket in waiting if not ticket.settled]


def _settle(tickets: Waiting, decision: Decision) -> None:
    for ticket in tickets:
        ticket.result = decision
