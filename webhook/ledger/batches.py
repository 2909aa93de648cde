"""Lets callers share work: all items that wait when a batch begins are worked on together."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False, slots=True)
class PendingCall(Generic[T, R]):
    """One caller's item and the future that it awaits. ``late``: the result after the deadline, a monotonic time."""

    item: T
    deadline: float
    late: R
    answer: asyncio.Future[R] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def settle(self, result: R) -> None:
        if not self.answer.done():
            self.answer.set_result(result)


@dataclass(eq=False)
class BatchCommitter(Generic[T, R]):
    """A queue whose items one task works on in batches. A batch has all items that wait when it begins.

    The task ends when no item waits. It belongs to no caller, so a caller that is cancelled, or whose deadline passes,
    does not disturb the others. ``gather`` is awaited before each batch, with the size of the last batch. Items that
    arrive meanwhile join the batch.
    """

    work: Callable[[Sequence[PendingCall[T, R]]], Awaitable[None]]
    late: R
    gather: Callable[[int], Awaitable[None]]
    clock: Callable[[], float] = time.monotonic
    # Held during a batch. Other code must hold it to use the data that ``work`` changes.
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waiting: list[PendingCall[T, R]] = field(default_factory=list)
    _last_batch: int = 0
    _task: asyncio.Task[None] | None = None

    async def serve(self, item: T, deadline: float) -> R:
        """Return the result, or the call's ``late`` after the deadline. Raises what ``work`` raised for it."""
        call = PendingCall[T, R](item, deadline, self.late)
        self._waiting.append(call)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            return await asyncio.wait_for(call.answer, deadline - self.clock())
        except TimeoutError:
            if not call.answer.cancelled():  # the work itself raised it
                raise
            return call.late
        finally:
            # If the caller was cancelled while its item is in a batch, the result is dropped.
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
        except Exception as error:  # noqa: BLE001  # raised again, in the caller of each item that has no result
            for call in batch:
                if not call.answer.done():
                    call.answer.set_exception(error)
        finally:
            # No caller may wait forever, even if ``work`` skipped its item or was cancelled.
            for call in batch:
                call.settle(call.late)


async def _no_pause(_last_batch: int) -> None:
    """Start the batch at once."""


@dataclass(eq=False)
class SharedCall(Generic[R]):
    """A call whose result all callers share that wait at its start. ``pause`` is awaited before each call."""

    make: Callable[[], Awaitable[R]]
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[int], Awaitable[None]] = _no_pause
    _waiting: BatchCommitter[None, R | None] = field(init=False)

    def __post_init__(self) -> None:
        self._waiting = BatchCommitter(self._serve, None, self.pause, self.clock)

    async def result(self, deadline: float) -> R | None:
        """Return the result of a call that begins after this one, or raise its error; None after the deadline."""
        return await self._waiting.serve(None, deadline)

    async def _serve(self, calls: Sequence[PendingCall[None, R | None]]) -> None:
        made = await self.make()
        for call in calls:
            call.settle(made)
