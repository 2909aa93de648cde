"""Collects the charges of concurrent callers in a batch, and decides a batch by one version of the ledger.

`BatchCommitter` and `SharedCall` work for items of any type.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from vcuda.kube import Stored
from vcuda.ledger.ledger import Admitted, Ledger, Pending, Rejected, admit
from vcuda.quota.model import Charge, Mode
from webhook.ledger.charging import CROWDED, ChargeRequest, Decision

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False, slots=True)
class PendingCall(Generic[T, R]):
    """One call of `BatchCommitter.serve`: the caller's item, and the future that gets the result for the caller."""

    item: T
    deadline: float
    """The time on the monotonic clock, in seconds, at which the caller stops waiting for its result."""
    late: R
    """The result for the caller if the deadline passes before the item has a result."""
    answer: asyncio.Future[R] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def resolve(self, result: R) -> None:
        if not self.answer.done():
            self.answer.set_result(result)


@dataclass(eq=False)
class BatchCommitter(Generic[T, R]):
    """A queue of items that a task processes in batches. A batch has all items that wait when the batch begins.

    The batches run in their own task. So if a caller is cancelled or its deadline passes, the other callers still get
    their results. The task ends when no item waits.
    """

    work: Callable[[Sequence[PendingCall[T, R]]], Awaitable[None]]
    """The function that processes a batch. It must set the result of each call in the batch."""
    late: R
    """The result for a caller whose deadline passes before its item has a result."""
    gather: Callable[[int], Awaitable[None]] | None
    """A function that waits for more items before a batch; None for no wait. Its argument is the last batch's size."""
    clock: Callable[[], float] = time.monotonic
    # Locked while a batch is processed. Other code must take this lock to use data that the function ``work`` changes.
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waiting: list[PendingCall[T, R]] = field(default_factory=list)
    _last_batch: int = 0
    _task: asyncio.Task[None] | None = None

    async def serve(self, item: T, deadline: float) -> R:
        """Return the result of the item, or ``late`` if the deadline passes first. Raises the errors of ``work``."""
        call = PendingCall[T, R](item, deadline, self.late)
        self._waiting.append(call)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            return await asyncio.wait_for(call.answer, deadline - self.clock())
        except TimeoutError:
            if not call.answer.cancelled():  # the TimeoutError came from ``work``, not from wait_for()
                raise
            return call.late
        finally:
            # If the caller stops waiting before a batch has taken the item, nobody needs the result.
            if call in self._waiting:
                self._waiting.remove(call)

    async def _run(self) -> None:
        while self._waiting:
            if self.gather:
                await self.gather(self._last_batch)
            async with self.busy:
                batch, self._waiting = self._waiting, []
                self._last_batch = len(batch)
                await self._answer(batch)

    async def _answer(self, batch: Sequence[PendingCall[T, R]]) -> None:
        try:
            await self.work(batch)
        except Exception as error:  # noqa: BLE001  # each caller whose item has no result raises this error
            for call in batch:
                if not call.answer.done():
                    call.answer.set_exception(error)
        finally:
            # If ``work`` skipped an item or was cancelled, the caller of this item must not wait forever.
            for call in batch:
                call.resolve(call.late)


@dataclass(eq=False)
class SharedCall(Generic[R]):
    """Makes one call, such as a LIST, for all callers that wait when the call begins. The callers share the result."""

    make: Callable[[], Awaitable[R]]
    """The function that makes the shared call, and returns its result."""
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[int], Awaitable[None]] | None = None
    """A function that waits before each shared call; None for no wait. Its argument is the last call's number of
    callers."""
    _waiting: BatchCommitter[None, R | None] = field(init=False)

    def __post_init__(self) -> None:
        self._waiting = BatchCommitter(self._serve, None, self.pause, self.clock)

    async def result(self, deadline: float) -> R | None:
        """Return the result of the next shared call; None if the deadline passes first. Raises the call's error."""
        return await self._waiting.serve(None, deadline)

    async def _serve(self, calls: Sequence[PendingCall[None, R | None]]) -> None:
        made = await self.make()
        for call in calls:
            call.resolve(made)


Charging = PendingCall[ChargeRequest, Decision]


def decide(ledger: Ledger, request: ChargeRequest, others: Mapping[str, Charge] | None = None) -> Decision:
    """Decide whether a charge fits this ledger. An `Admitted` has the ledger that the caller must write.

    ``others``: by model, what the other namespaces of the team may use; None to leave out the limits of the team.
    """
    entry, quota = Pending(request.model, request.charge, request.grace), request.quota
    decision = admit(ledger, request.uid, entry, quota, enforced=quota.mode is Mode.ENFORCE, others=others)
    return decision if isinstance(decision, Admitted | Rejected) else CROWDED


class Read(NamedTuple):
    """A version of the ledger by which charges are decided."""

    stored: Stored
    counted: Ledger
    """The stored ledger. If it may lack stored objects, these were counted again."""
    flushed: Ledger
    """``counted``, in which the charges that this replica admitted from its reservation are pending charges."""


class Decided(NamedTuple):
    """The decisions about a batch of charges, and the ledger that the replica must write for them."""

    ledger: Ledger
    decisions: Sequence[Decision]
    changed: bool
    """True if the decisions, or a count of the stored objects before them, have changed the ledger."""

    @property
    def admits_all(self) -> bool:
        return all(isinstance(decision, Admitted) for decision in self.decisions)


def decide_all(read: Read, calls: Sequence[Charging], others: Mapping[str, Charge] | None = None) -> Decided:
    """Decide charges in order, each with those before it. ``others``: as for `decide`."""
    decisions, ledger = [], read.flushed
    for call in calls:
        decision = decide(ledger, call.item, others)
        decisions.append(decision)
        if isinstance(decision, Admitted) and not call.item.dry_run:
            ledger = decision.ledger
    return Decided(ledger, decisions, (ledger, read.counted) != (read.flushed, read.stored.ledger))
