"""Reviews that take long to decode or to decide: they wait in turn by namespace, and are decided in one thread.

1. A review takes a *place* before the rest of its body is read, and holds it until it is answered. Places bound the
   bytes that such reviews hold.
2. It takes a *turn* for each part of its work between two calls of the ledgers. One review computes at a time: two
   threads would only take the interpreter's lock from the event loop, and from each other.
3. The event loop makes the calls of the ledgers. The review has no turn meanwhile, so others compute.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Generic, TypeVar

import msgspec

from vcuda.errors import Dropped, DropReason
from vcuda.quota.model import Usage
from webhook.intake.bodies import MAX_BODY
from webhook.intake.fair_queue import Bounds, FairQueue
from webhook.ledger.ledgers import ChargeRequest, Decision, Ledgers, ReviewDeadline

T = TypeVar("T")

PLACES = Bounds(grants=12, size=6 * MAX_BODY, key_grants=4, key_size=2 * MAX_BODY, waiting=96, keys=16)
"""The places of large pods and claims. A namespace holds at most a third of them. A waiting review holds some 100 KiB.
With the bodies that are read, all waiting reviews hold less than `MAX_UNFINISHED` of `webhook.server.worker`."""

QUOTA_PLACES = Bounds(grants=4, size=4 * MAX_BODY, key_grants=4, key_size=4 * MAX_BODY, waiting=16, keys=16)
"""The places of edits of the quota, so that pods and large documents do not wait for each other."""

WAIT_SHARE = 0.5
"""The part of its remaining time that a review waits for a place. The API server can then still repeat the call."""

LEAST_SECONDS = 0.3
"""Left of a review's time when it begins to compute: the largest take about as long (`python -m bench large-pods`)."""


class LedgerCall(Generic[T]):
    """A call of the ledgers that the event loop makes for a review. ``charges``: once begun it is not given up."""

    def __init__(self, make: Callable[[], Awaitable[T]], *, charges: bool = False) -> None:
        self.make = make
        self.charges = charges

    def __await__(self) -> Generator[Any, Any, T]:
        result: T = yield self
        return result


class _LoopLedgers(msgspec.Struct, frozen=True):
    """The ledgers as a review in the thread sees them: each call goes to the event loop, which owns their state."""

    ledgers: Ledgers

    async def charge(self, request: ChargeRequest) -> Decision:
        return await LedgerCall(lambda: self.ledgers.charge(request), charges=not request.dry_run)

    async def usage(self, namespace: str) -> Mapping[str, Usage]:
        return await LedgerCall(lambda: self.ledgers.usage(namespace))

    async def cached_usage(self, namespace: str) -> Mapping[str, Usage]:
        return await LedgerCall(lambda: self.ledgers.cached_usage(namespace))

    async def stored_usage(
        self, namespace: str, charged: Mapping[str, Usage], deadline: float
    ) -> Mapping[str, Usage] | None:
        return await LedgerCall(lambda: self.ledgers.stored_usage(namespace, charged, deadline))

    async def close(self) -> None:
        """Do nothing: the server closes the ledgers on the event loop."""


class _Ended(msgspec.Struct, frozen=True):
    """The result of a review."""

    value: Any


class ReviewThread:
    """One thread that decides reviews, and the queues of those that wait for it."""

    def __init__(self, name: str, places: Bounds) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        late = "this replica had too many large reviews to decide this one in time"
        self._places = FairQueue(places, "too many large reviews wait on this replica", late)
        # A review that holds a place waits for one turn at a time, so no review is dropped here for want of room.
        turns = Bounds(1, 0, 1, 0, waiting=4 * places.grants, keys=4 * places.grants)
        self._turns = FairQueue(turns, "too many large reviews are decided at once", late)

    @property
    def waiting(self) -> int:
        """The reviews that wait for a place."""
        return self._places.waiting

    def place(self, namespace: str, size: int, deadline: ReviewDeadline) -> AbstractAsyncContextManager[None]:
        """Return the place of a review with a body of ``size`` bytes. Entering it waits, or raises Dropped."""
        return self._places.granted(namespace, size, deadline.end - max(deadline.left, 0) * WAIT_SHARE)

    async def run(
        self,
        work: Callable[[Ledgers], Coroutine[Any, Any, T]],
        ledgers: Ledgers,
        namespace: str,
        deadline: ReviewDeadline,
    ) -> T:
        """Return what ``work`` returns. It runs in the thread, and gets ledgers that it may use there.

        Raises Dropped if the deadline passed before a turn, or the caller has disconnected.
        """
        steps = work(_LoopLedgers(ledgers))
        outcome: Any = None
        try:
            while True:
                step = await self._in_turn(steps, outcome, namespace, deadline)
                if isinstance(step, _Ended):
                    result: T = step.value
                    return result
                outcome = await _make(step, deadline)
        except asyncio.CancelledError:
            deadline.abandon()
            raise
        finally:
            with suppress(ValueError):  # it still computes, if this task was cancelled a second time
                steps.close()

    async def _in_turn(
        self, steps: Coroutine[Any, Any, T], outcome: Any, namespace: str, deadline: ReviewDeadline
    ) -> "LedgerCall[Any] | _Ended":
        """Wait for a turn, and let the review compute up to its next call of the ledgers."""
        latest = math.inf if deadline.charging else deadline.end - min(LEAST_SECONDS, max(deadline.left, 0) / 2)
        async with self._turns.granted(namespace, 0, latest):
            step = asyncio.get_running_loop().run_in_executor(self._thread, _step, steps, outcome)
            try:
                return await asyncio.shield(step)
            except asyncio.CancelledError:
                # A thread cannot be interrupted. It ends at its next check, and so does its turn.
                deadline.abandon()
                await asyncio.wait([step])
                step.exception()  # asyncio would log an exception that is never read
                raise


def _step(steps: Coroutine[Any, Any, T], outcome: Any) -> "LedgerCall[Any] | _Ended":
    # In the thread. A StopIteration cannot pass through a future, so the result is wrapped.
    try:
        call: LedgerCall[Any] = steps.throw(outcome) if isinstance(outcome, Exception) else steps.send(outcome)
    except StopIteration as ended:
        return _Ended(ended.value)
    return call


async def _make(call: LedgerCall[Any], deadline: ReviewDeadline) -> Any:
    """Return what a call of the ledgers returns, or the error that it raises."""
    try:
        async with asyncio.timeout(None if call.charges or math.isinf(deadline.end) else deadline.left):
            return await call.make()
    except TimeoutError:
        return Dropped("the ledger did not answer before the deadline of this review", DropReason.LATE)
    except Exception as error:  # noqa: BLE001  # raised again in the review that made the call
        return error
