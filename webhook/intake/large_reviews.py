"""Decides large reviews, which take long to decode or decide, in one thread. So they do not delay small reviews.

A small review that takes many steps (`webhook.admission.MAX_REVIEW_STEPS`) is treated like a large one.

1. A large review needs a *place* before the rest of its body is read, and keeps the place until it is answered. The
   number of places bounds the memory of all large reviews. Namespaces get places in turn.
2. A review needs a *turn* for each part of its work between two calls to the ledgers. Only one review has a turn at a
   time, because two threads would only compete for the interpreter's lock.
3. The event loop makes the calls to the ledgers. During such a call the review has no turn, so that another review can
   compute.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Generic, TypeVar

import msgspec

from vcuda.admission_review import ReviewDeadline
from vcuda.errors import Dropped, DropReason
from vcuda.quota.model import Team, Usage
from vcuda.quota.shortage import Shortage
from webhook.intake.bodies import MAX_BODY
from webhook.intake.fair_queue import Bounds, FairQueue
from webhook.ledger.charging import ChargeRequest, Decision, Ledgers

T = TypeVar("T")

PLACES = Bounds(turns=12, size=6 * MAX_BODY, key_turns=4, key_size=2 * MAX_BODY, waiting=96, keys=16)
"""The bounds of the places for reviews of large pods and claims. A review needs a place before its whole body is read.
A namespace gets at most a third of the places. A waiting review takes 100 KiB of memory. Waiting reviews and bodies
together take less memory than `MAX_UNFINISHED` in `webhook.server.worker`."""

QUOTA_PLACES = Bounds(turns=4, size=4 * MAX_BODY, key_turns=4, key_size=4 * MAX_BODY, waiting=16, keys=16)
"""The queue bounds for edits of the quota ConfigMap. These reviews have their own queue, so that reviews of pods and
edits of the quota do not wait for each other."""

WAIT_SHARE = 0.5
"""A large review waits in the queue for at most this fraction of the time until its deadline. If the wait fails, the
API server has enough time left to call another replica."""

MIN_SECONDS = 0.3
"""A review must get the thread at least this many seconds before its deadline, because the largest reviews compute for
about this long (`python -m bench large-pods`)."""


class LedgerCall(Generic[T]):
    """A call to the ledgers that the event loop makes for a review in a thread.

    ``charges``: True if the call may write a charge. Such a call has no timeout.
    """

    def __init__(self, make: Callable[[], Awaitable[T]], *, charges: bool = False) -> None:
        self.make = make
        self.charges = charges

    def __await__(self) -> Generator[Any, Any, T]:
        result: T = yield self
        return result


class _LoopLedgers(msgspec.Struct, frozen=True):
    """The ledgers for a review that a thread decides. Each call runs on the event loop, because no thread may use the
    ledgers."""

    ledgers: Ledgers

    async def charge(self, request: ChargeRequest) -> Decision:
        return await LedgerCall(lambda: self.ledgers.charge(request), charges=not request.dry_run)

    async def usage(
        self, namespace: str, team: Team | None = None, seconds: float | None = None
    ) -> Mapping[str, Usage]:
        return await LedgerCall(lambda: self.ledgers.usage(namespace, team, seconds))

    async def cached_usage(self, namespace: str, team: Team | None = None) -> Mapping[str, Usage]:
        return await LedgerCall(lambda: self.ledgers.cached_usage(namespace, team))

    async def stored_usage(
        self, namespace: str, shortages: Sequence[Shortage], charged: Mapping[str, Usage], deadline: float
    ) -> Mapping[str, Usage] | None:
        return await LedgerCall(lambda: self.ledgers.stored_usage(namespace, shortages, charged, deadline))

    async def close(self) -> None:
        """Do nothing: the server closes the ledgers on the event loop."""


class _Ended(msgspec.Struct, frozen=True):
    """The result of a review that the thread has decided."""

    value: Any


class ReviewThread:
    """One thread that decides large reviews, and queues for places (to read a body) and turns (to use the thread)."""

    def __init__(self, name: str, places: Bounds) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        late = "this replica had too many large reviews, so it could not decide this review in time"
        self._places = FairQueue(places, "too many large reviews wait on this replica", late)
        # Only reviews with a place wait for the thread, and none waits twice. So this queue is never full.
        turns = Bounds(1, 0, 1, 0, waiting=4 * places.turns, keys=4 * places.turns)
        self._turns = FairQueue(turns, "too many large reviews are decided at once", late)

    @property
    def waiting(self) -> int:
        return self._places.waiting

    def place(self, namespace: str, size: int, deadline: ReviewDeadline) -> AbstractAsyncContextManager[None]:
        """Return a context manager that waits until ``size`` bytes may be read, or raises Dropped."""
        return self._places.turn(namespace, size, deadline.end - max(deadline.left, 0) * WAIT_SHARE)

    async def run(
        self,
        work: Callable[[Ledgers], Coroutine[Any, Any, T]],
        ledgers: Ledgers,
        namespace: str,
        deadline: ReviewDeadline,
    ) -> T:
        """Run ``work`` in the thread and return its result. ``work`` gets ledgers that a thread may call.

        Raises Dropped if the thread was not free before the deadline, or if the caller has disconnected.
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
            with suppress(ValueError):  # if the task was cancelled twice, the thread may still run `steps`
                steps.close()

    async def _in_turn(
        self, steps: Coroutine[Any, Any, T], outcome: Any, namespace: str, deadline: ReviewDeadline
    ) -> "LedgerCall[Any] | _Ended":
        """Wait until the thread is free. Then run the review in it until the next call to the ledgers, or the end."""
        latest = math.inf if deadline.charging else deadline.end - min(MIN_SECONDS, max(deadline.left, 0) / 2)
        async with self._turns.turn(namespace, 0, latest):
            step = asyncio.get_running_loop().run_in_executor(self._thread, _step, steps, outcome)
            try:
                return await asyncio.shield(step)
            except asyncio.CancelledError:
                # Python cannot interrupt a thread. So the review uses the thread until it checks its deadline and ends.
                deadline.abandon()
                await asyncio.wait([step])
                step.exception()  # otherwise asyncio would log the exception as never read
                raise


def _step(steps: Coroutine[Any, Any, T], outcome: Any) -> "LedgerCall[Any] | _Ended":
    # This function runs in a thread, and its result goes into a future. A future cannot have the exception
    # StopIteration, with which a coroutine ends. So the result of the review is wrapped in an object.
    try:
        call: LedgerCall[Any] = steps.throw(outcome) if isinstance(outcome, Exception) else steps.send(outcome)
    except StopIteration as ended:
        return _Ended(ended.value)
    return call


async def _make(call: LedgerCall[Any], deadline: ReviewDeadline) -> Any:
    """Make a call to the ledgers. Return the result of the call, or the exception that the call raises."""
    try:
        async with asyncio.timeout(None if call.charges or math.isinf(deadline.end) else deadline.left):
            return await call.make()
    except TimeoutError:
        return Dropped("the ledger did not answer before the deadline of this review", DropReason.LATE)
    except Exception as error:  # noqa: BLE001  # the coroutine of the review raises this error again
        return error
