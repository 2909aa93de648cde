"""Callers that wait for the same work share it: whatever waits when a batch begins is done together."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False, slots=True)
class PendingCall(Generic[T, R]):
    """One caller's item, and the future that its caller awaits.

    ``deadline`` is in seconds of the monotonic clock; ``late`` is what the caller is told when it comes.
    """

    item: T
    deadline: float
    late: R
    answer: asyncio.Future[R] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def settle(self, result: R) -> None:
        """Give the caller its answer, if it still waits."""
        if not self.answer.done():
            self.answer.set_result(result)


@dataclass(eq=False)
class BatchCommitter(Generic[T, R]):
    """A queue that one task works off, a batch at a time: everything that waits when a batch begins.

    The task lives as long as something waits, and belongs to no caller: one that is cancelled, or whose deadline
    comes, leaves the others as they are. ``gather`` is awaited before each batch, told how many were in the one before:
    whoever comes in that time is in it too.
    """

    work: Callable[[Sequence[PendingCall[T, R]]], Awaitable[None]]
    late: R
    gather: Callable[[int], Awaitable[None]]
    clock: Callable[[], float] = time.monotonic
    # Held while a batch is in work; whoever else touches what the work does holds it too.
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    _waiting: list[PendingCall[T, R]] = field(default_factory=list)
    _last_batch: int = 0
    _task: asyncio.Task[None] | None = None

    async def serve(self, item: T, deadline: float) -> R:
        """Return the item's result; ``late``, as it then stands, where the deadline came first.

        Raises what ``work`` raised for it.
        """
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
            # One that is in work already is cancelled there: what became of it is nobody's to hear.
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
            # Those that the work passed over, or all where the loop ends in the midst: nobody is left waiting.
            for call in batch:
                call.settle(call.late)


@dataclass(eq=False)
class SharedCall(Generic[R]):
    """A call whose result is shared by all who wait when it begins; those who come later wait for the next one."""

    make: Callable[[], Awaitable[R]]
    clock: Callable[[], float] = time.monotonic
    _waiting: BatchCommitter[None, R | None] = field(init=False)

    def __post_init__(self) -> None:
        self._waiting = BatchCommitter(self._serve, None, _no_pause, self.clock)

    async def result(self, seconds: float) -> R | None:
        """Return the result of a call that begins after this one; None if it was not there within ``seconds``.

        Raises what the call raised.
        """
        return await self._waiting.serve(None, self.clock() + seconds)

    async def _serve(self, calls: Sequence[PendingCall[None, R | None]]) -> None:
        made = await self.make()
        for call in calls:
            call.settle(made)


async def _no_pause(_last_batch: int) -> None:
    """Gather nobody: those who wait are enough."""
