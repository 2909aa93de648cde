"""Tests of the batch committer, which processes the items of all waiting callers in one batch."""

import asyncio
import functools
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, ParamSpec

import pytest

from tests.waiting import PATIENT
from webhook.ledger.batches import BatchCommitter, PendingCall

P = ParamSpec("P")
Batch = Sequence[PendingCall[str, str]]
LATE = "late"


async def capitals(batch: Batch) -> None:
    for call in batch:
        call.resolve(call.item.upper())


class BrokenError(Exception):
    """The error that the work function of these tests raises."""


class Gated:
    """A batch committer in which each batch waits at a gate until the test releases it."""

    def __init__(self) -> None:
        self.work: Callable[[Batch], Awaitable[None]] = capitals
        self.batches: list[list[str]] = []
        self.batches_before: list[int] = []
        self.committer: BatchCommitter[str, str] = BatchCommitter(self._at_the_gate, LATE, self._gather)
        self._gate = asyncio.Semaphore(0)

    async def _gather(self, last_batch: int) -> None:
        self.batches_before.append(last_batch)

    async def _at_the_gate(self, batch: Batch) -> None:
        self.batches.append([call.item for call in batch])
        await self._gate.acquire()
        await self.work(batch)

    async def calls(self, items: str, deadline: float = math.inf) -> list[asyncio.Task[str]]:
        """Start a caller per letter. Return when all callers are queued, or when their batch waits at the gate."""
        callers = [asyncio.create_task(self.committer.serve(item, deadline)) for item in items]
        await idle()
        return callers

    async def open(self, batches: int = 1) -> None:
        for _ in range(batches):
            self._gate.release()
        await idle()


async def idle() -> None:
    """Let the event loop run until every task waits for something."""
    for _ in range(20):
        await asyncio.sleep(0)


def on_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test on a new event loop, with the usual timeout of tests."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def in_time() -> None:
            async with asyncio.timeout(PATIENT):
                await test(*args, **kwargs)

        asyncio.run(in_time())

    return run


async def results(*callers: asyncio.Task[str]) -> list[str | BaseException]:
    return await asyncio.gather(*callers, return_exceptions=True)


@on_a_loop
async def test_a_served_caller_has_its_answer_while_the_next_batch_is_in_work() -> None:
    gated = Gated()
    [first], others = await gated.calls("a"), await gated.calls("bc")
    await gated.open()
    assert first.result() == "A"
    fourth = await gated.calls("d")
    await gated.open(2)
    assert await results(*others, *fourth) == ["B", "C", "D"]
    assert gated.batches == [["a"], ["b", "c"], ["d"]]


@on_a_loop
async def test_callers_that_wait_together_are_one_batch_in_order_and_each_may_wait_for_more() -> None:
    gated = Gated()
    callers = [*await gated.calls("a"), *await gated.calls("bcde")]
    await gated.open(4)
    assert await results(*callers) == list("ABCDE")
    assert gated.batches == [["a"], ["b", "c", "d", "e"]]
    assert [await gated.committer.serve(item, math.inf) for item in "fg"] == ["F", "G"]
    assert gated.batches[2:] == [["f"], ["g"]]
    assert gated.batches_before == [0, 1, 4, 1], "each batch must get the number of items before it"


@pytest.mark.parametrize("how", ["its deadline comes", "it is cancelled"])
@pytest.mark.parametrize(
    ("in_work", "batches"),
    [(False, [["a"], ["c"]]), (True, [["a"], ["b", "c"]])],
    ids=["its item waits", "its item is in a batch"],
)
@on_a_loop
async def test_a_caller_that_leaves_does_not_affect_the_others(
    how: str, in_work: bool, batches: list[list[str]]
) -> None:
    """If the item of the caller is still queued, it is dropped. If its batch has begun, only its result is dropped."""
    gated = Gated()
    first = await gated.calls("a")
    [late] = await gated.calls("b", time.monotonic() + 0.5 if how == "its deadline comes" else math.inf)
    last = await gated.calls("c")
    if in_work:
        await gated.open()
    if how == "it is cancelled":
        late.cancel()
    await asyncio.wait([late])
    assert late.cancelled() or late.result() == LATE
    await gated.open(3)
    assert await results(*first, *last) == ["A", "C"]
    assert gated.batches == batches


@on_a_loop
async def test_after_all_waiting_callers_have_left_the_next_caller_is_served() -> None:
    gated = Gated()
    first, [gone] = await gated.calls("a"), await gated.calls("b")
    gone.cancel()
    await idle()
    await gated.open(2)
    assert await results(*first, *await gated.calls("c")) == ["A", "C"]
    assert gated.batches == [["a"], ["c"]]


@on_a_loop
async def test_the_answer_to_a_late_caller_may_change_while_its_item_is_in_work() -> None:
    async def unsure(batch: Batch) -> None:
        for call in batch:
            call.late = "unsure"
        await asyncio.sleep(PATIENT)

    gated = Gated()
    gated.work = unsure
    await gated.open()
    assert await gated.committer.serve("a", time.monotonic() + 0.05) == "unsure"


@pytest.mark.parametrize("error", [BrokenError(), TimeoutError()], ids=repr)
@on_a_loop
async def test_an_error_reaches_every_caller_that_has_no_result(error: Exception) -> None:
    async def half(batch: Batch) -> None:
        await capitals([call for call in batch if call.item in "ac"])
        raise error

    gated = Gated()
    gated.work = half
    callers = [*await gated.calls("a"), *await gated.calls("bcd")]
    await gated.open(2)
    assert await results(*callers) == ["A", error, "C", error]
    gated.work = capitals
    await gated.open()
    assert await results(*await gated.calls("e")) == ["E"], "the queue continues"


@on_a_loop
async def test_an_item_that_the_work_skips_is_answered_as_late() -> None:
    gated = Gated()
    gated.work = lambda batch: capitals([call for call in batch if call.item != "b"])
    callers = await gated.calls("abc")
    await gated.open()
    assert await results(*callers) == ["A", LATE, "C"]
