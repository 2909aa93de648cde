"""Collects the items of several callers in batches, and processes each batch at once."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False, slots=True)
class PendingCall(Generic[T, R]):
    """One caller's item, and the future by which the caller waits for the result."""

    item: T
    deadline: float
    """The end of the caller's wait, in seconds of the monotonic clock."""
    late: R
    """The result for the caller if the deadline passes before the item has a result."""
    answer: asyncio.Future[R] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def settle(self, result: R) -> None:
        if not self.answer.done():
            self.answer.set_result(result)


@dataclass(eq=False)
class BatchCommitter(Generic[T, R]):
    """A queue of items that a task processes in batches. A batch has all items that wait when the batch begins.

    The task is independent of the callers. So a caller that is cancelled, or whose deadline passes, does not affect
    the other callers. The task ends when no item waits.
    """

    work: Callable[[Sequence[PendingCall[T, R]]], Awaitable[None]]
    """A function that processes a batch, and sets the result of each call."""
    late: R
    """The result of a call whose deadline passes before the call has another result."""
    gather: Callable[[int], Awaitable[None]]
    """A pause before each batch, given the size of the last batch. Items that arrive in the pause join the batch."""
    clock: Callable[[], float] = time.monotonic
    # This lock is held while a batch is processed. Other code must hold it while using data that ``work`` changes.
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waiting: list[PendingCall[T, R]] = field(default_factory=list)
    _last_batch: int = 0
    _task: asyncio.Task[None] | None = None

    async def serve(self, item: T, deadline: float) -> R:
        """Return the result of the item, or ``late`` after the deadline. Raises the error that ``work`` raised."""
        call = PendingCall[T, R](item, deadline, self.late)
        self._waiting.append(call)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            return await asyncio.wait_for(call.answer, deadline - self.clock())
        except TimeoutError:
            if not call.answer.cancelled():  # ``work`` itself raised the TimeoutError
                raise
            return call.late
        finally:
            # The caller no longer waits for its answer. If no batch has taken the caller's item, remove the item.
            if call in self._waiting:
                self._waiting.remove(call)

    async def _run(self) -> None:
        while self._waiting:
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
            # Even if ``work`` skipped an item or was cancelled, the caller of this item must not wait forever.
            for call in batch:
                call.settle(call.late)


async def _no_pause(_last_batch: int) -> None:
    """Return at once, so that the next batch starts without a pause."""


@dataclass(eq=False)
class SharedCall(Generic[R]):
    """Makes one call, such as a LIST, for all callers that wait when the call begins. The callers share the result."""

    make: Callable[[], Awaitable[R]]
    """A function that makes the call."""
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[int], Awaitable[None]] = _no_pause
    """A pause before each call, given the number of callers that shared the last call."""
    _waiting: BatchCommitter[None, R | None] = field(init=False)

    def __post_init__(self) -> None:
        self._waiting = BatchCommitter(self._serve, None, self.pause, self.clock)

    async def result(self, deadline: float) -> R | None:
        """Return the result of the next call that begins; None after the deadline. Raises the error of the call."""
        return await self._waiting.serve(None, deadline)

    async def _serve(self, calls: Sequence[PendingCall[None, R | None]]) -> None:
        made = await self.make()
        for call in calls:
            call.settle(made)
