"""The ledger of one namespace in one webhook replica, which writes waiting charges in groups by compare-and-swap."""

import asyncio
import contextlib
import math
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import msgspec

from vcuda.errors import Conflict, LedgerLost, ListOverdue, Unavailable, VcudaError, WriteUnanswered
from vcuda.kube import LedgerStore, Stored
from vcuda.ledger import ledger as rules
from vcuda.ledger.ledger import Admitted, Ledger, Pending, Refused
from vcuda.ledger.settle import ObservedPods, is_counted_before, settle
from vcuda.quota.model import Mode, Usage
from webhook.ledger.batches import BatchCommitter, PendingCall, SharedCall
from webhook.ledger.leases import (
    GIVE_WAY_SECONDS,
    MOST_WRITE_SECONDS,
    Demand,
    ReservationLease,
    Terms,
    boot_seconds,
    plan,
)
from webhook.ledger.ledgers import ChargeRequest, Decision, PutOff, RetryLater
from webhook.ledger.recount import SOON_SECONDS, Recount
from webhook.metrics import LedgerMetrics

T = TypeVar("T")

# Threads for reads and writes. A namespace has one write at a time, so the threads serve thirty busy namespaces.
KUBE_THREADS = 32

# Threads for LISTs, which take long. Most of these threads wait until it is their turn (`ListTurns`).
LIST_THREADS = 32

CACHED_USAGE_SECONDS = 0.5
"""Seconds for which a ledger in memory may be used to choose a GPU model. No pod is refused because of this ledger."""

GRANTING_USAGE_SECONDS = MOST_WRITE_SECONDS + 1.0
"""Replaces `CACHED_USAGE_SECONDS` while this replica has a reservation. The usage in memory then includes the charges
that this replica admits. It lacks the charges of other replicas until the next write of this replica. That write is
seconds away only if much quota is free."""

REMEMBERED_SECONDS = 1.0
"""Seconds for which this replica may write without another read, to replace the version that it read or wrote last.
Later, another process has usually written the ledger. The write would then fail, which costs more than a read."""

READ_TIMEOUT_SECONDS = 3.0
"""Timeout in seconds of a read of the ledger. It is short, so that the callers that wait still get an answer."""

USAGE_SECONDS = 15.0
"""Timeout in seconds of a read of the usage, which may have to wait for a LIST of the stored pods and claims."""

WRITE_TIMEOUT_SECONDS = 3.0
"""Timeout in seconds of a ledger write. Its outcome is then unknown, and the replica reads or writes again."""

# Seconds for which a write waits for more charges under load, because fewer and larger writes are cheaper. A write
# costs half as much as a pod's creation. PostgreSQL's commit_delay and commit_siblings do the same.
GATHER_SECONDS = 0.004

FLUSH_SECONDS = 0.1
"""Seconds between two checks whether this replica must write the charges that it admitted from its reservation."""

ASK_AGAIN_SECONDS = 1.0
"""Seconds between two `waiting` marks in the ledger. When other replicas read a mark, they release reservations."""

# The longest random delay before a retry. Without the delay, two replicas would conflict again at every retry.
MAX_JITTER_SECONDS = 0.02

TOO_MANY = RetryLater("too many charges of this namespace are being written at once", soon=True)
UNSURE = RetryLater("it is not known whether the charge was written", soon=True)

Charging = PendingCall[ChargeRequest, Decision]


@dataclass(eq=False)
class Shared:
    """The parts of a webhook replica that the ledgers of all namespaces share.

    ``store`` reads and writes the ledgers. ``boot_clock`` is the clock of reservations, which also counts suspension.
    ``leaving``: True if the replica is stopping. It then reserves nothing. ``threads`` run reads and writes of ledgers.
    ``list_threads`` run LISTs.
    """

    store: LedgerStore
    metrics: LedgerMetrics
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    boot_clock: Callable[[], float] = boot_seconds
    leaving: bool = False
    # The client of the API server blocks, so its calls run in threads. The number of threads bounds the calls. A thread
    # adds 50 µs to a call, which is little because a write takes milliseconds.
    threads: Executor = field(default_factory=lambda: ThreadPoolExecutor(KUBE_THREADS, thread_name_prefix="ledger"))
    list_threads: Executor = field(default_factory=lambda: ThreadPoolExecutor(LIST_THREADS, thread_name_prefix="list"))


class _Unanswered(NamedTuple):
    """A ledger write whose outcome is unknown, and the version of the ledger that the write replaces."""

    ledger: Ledger
    replaced: Stored


class NamespaceLedger:
    """The ledger of one namespace in this webhook replica.

    The replica decides the waiting charges in order by one version of the ledger, and replaces that version by one PUT.
    If another process wrote first, the replica reads and decides again, until the callers' deadlines. It remembers the
    written version for the next group. Only the committer's task, and the flush between its batches, may use this
    version. Under load the replica admits charges from a reservation. The flush writes these charges later.
    """

    def __init__(self, namespace: str, shared: Shared) -> None:
        self._namespace = namespace
        self._shared = shared
        self._remembered: Stored | None = None
        self._remembered_at = -math.inf
        self._unanswered: _Unanswered | None = None
        self._noted = Ledger()
        self._usages: Mapping[str, Usage] = {}
        self._usages_read_at = -math.inf
        self._committer = BatchCommitter[ChargeRequest, Decision](self._commit, TOO_MANY, self._gather, shared.clock)
        self._reads = SharedCall(lambda: self._in_thread(shared.store.read, READ_TIMEOUT_SECONDS), shared.clock)
        self._recount = Recount(self._list, lambda: self._noted, shared.clock, shared.sleep)
        self._lease = ReservationLease(shared.boot_clock)
        self._demand = Demand(shared.clock)
        # The quota by which the next reservation will be sized.
        self._terms: Terms | None = None
        self._flusher: asyncio.Task[None] | None = None
        # The times of the last `waiting` mark, and of the first mark of an unbroken series.
        self._asked_at = self._asking_since = -math.inf

    async def charge(self, request: ChargeRequest) -> Decision:
        """Decide a charge: admit it from the reservation, or decide and write it with the other waiting charges."""
        decision: Decision | None = self._grant(request)
        if decision is None:
            started = self._shared.clock()
            decision = await self._committer.serve(request, request.deadline)
            self._shared.metrics.wait.observe(self._shared.clock() - started)
        if isinstance(decision, Refused):
            decision = await self._refuse(request, decision)
        return decision

    async def _refuse(self, request: ChargeRequest, refused: Refused) -> Decision:
        """Decide a charge that does not fit the ledger. Refuse it only if the stored objects leave no room either."""
        shortage = refused.shortage
        if shortage.can_never_fit:
            return refused
        if shortage.rests_on_reserved:
            # Running replicas release their reservations at once, and reserve nothing while a caller waits. The
            # reservation of a dead replica stays until the leader removes it.
            return PutOff((shortage,), soon=self._shared.clock() < self._asking_since + SOON_SECONDS)
        judged = await self._recount.judge(shortage, request.deadline)
        if isinstance(judged, Refused) or not judged.counted:
            return judged
        # Decide again, because the ledger may have been settled (recounted) during the LIST.
        decision: Decision = await self._committer.serve(request, request.deadline)
        return (
            msgspec.structs.replace(judged, shortages=(decision.shortage,))
            if isinstance(decision, Refused)
            else decision
        )

    async def stored_usage(self, charged: Mapping[str, Usage], deadline: float) -> Mapping[str, Usage] | None:
        return await self._recount.usages(charged, deadline)

    async def _list(self) -> ObservedPods:
        self._shared.metrics.lists.inc()
        count = self._shared.store.count_pods
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._shared.list_threads, count, self._namespace, READ_TIMEOUT_SECONDS)

    async def _gather(self, last_batch: int) -> None:
        # More charges may arrive during the pause. A single charge never waits for others.
        if last_batch > 1:
            await self._shared.sleep(GATHER_SECONDS)

    def _grant(self, request: ChargeRequest) -> Admitted | None:
        """Admit a charge from the reservation, to be written later. Return None if it must be written at once."""
        crowded = len(self._noted.pending) + len(self._lease.granted) >= rules.MOST_PENDING
        # A charge that is admitted here counts until it is settled or expires. If the pod may run for longer after a
        # forced deletion, its grace period must be written now, because possibly no watch sees the deletion.
        if request.dry_run or request.grace or crowded or not self._lease.is_by(_terms(request, self._shared.store)):
            return None
        asked = Pending(request.model, request.charge)
        if not self._lease.grant(request.uid, asked, request.created):
            return None
        self._shared.metrics.granted.inc()
        self._demand.add(request.uid, request.model, request.charge)
        usage = self._usages.get(request.model, Usage())
        usage = msgspec.structs.replace(usage, used=usage.used + request.charge, pending=usage.pending + request.charge)
        self._usages = {**self._usages, request.model: usage}
        return Admitted(self._noted, usage, request.quota.limits[request.model])

    async def _flush(self) -> None:
        """Call `flush` whenever it is due. End when this replica has no reservation and no unwritten charge."""
        while self._lease.active:
            await self._shared.sleep(FLUSH_SECONDS)
            if self._lease.is_due or self._lease.gives_way or self._unanswered or not self._demand.recent():
                await self.flush()

    async def flush(self) -> None:
        """Write to the ledger the charges that were admitted from the reservation, and the next reservation."""
        async with self._committer.busy:
            # A failed write is retried. It loses no charge, because the reservation in the ledger covers the charges.
            with contextlib.suppress(VcudaError):
                if self._lease.active:
                    await self._attempt([])

    async def cached_usage(self) -> Mapping[str, Usage]:
        """Return the usage by GPU model, from memory if the last read of the ledger is new enough."""
        good_for = GRANTING_USAGE_SECONDS if self._lease.active else CACHED_USAGE_SECONDS
        if self._shared.clock() - self._usages_read_at < good_for:
            return self._usages
        return await self.usage()

    async def usage(self) -> Mapping[str, Usage]:
        """Read the ledger, and return its usage without reservations. After a timeout, return the last known usage."""
        # This version must not be remembered for decisions, because the committer may be writing a later version.
        with contextlib.suppress(ListOverdue):  # /validate reports the slow LIST
            if stored := await self._reads.result(self._shared.clock() + USAGE_SECONDS):
                return self._note(stored.ledger)
        return self._usages

    def _note(self, ledger: Ledger) -> Mapping[str, Usage]:
        # Reserved room is free for the choice of a model, because it is released as soon as another charge needs it.
        self._usages = msgspec.structs.replace(ledger, reserved={}).usages()
        self._noted, self._usages_read_at = ledger, self._shared.clock()
        return self._usages

    async def _commit(self, calls: Sequence[Charging]) -> None:
        """Decide all waiting calls, and write the ledger. Raises Unavailable if certainly nothing was written."""
        self._shared.metrics.batch.observe(len(calls))
        unsure = False
        while open_ := self._in_time(calls):
            try:
                await self._attempt(open_)
            except Conflict:
                self._shared.metrics.conflicts.inc()
            except WriteUnanswered:
                self._shared.metrics.unsure.inc()
                unsure = True
            except Unavailable:
                if not unsure:
                    raise
                return  # each caller gets UNSURE, the present value of `late`
            else:
                return
            for call in open_:
                # A conflict proves that the write failed. If all writes conflicted, the ledger has none of the charges.
                call.late = UNSURE if unsure else TOO_MANY
            await self._shared.sleep(random.uniform(0, MAX_JITTER_SECONDS))  # noqa: S311  # not used for security

    async def _attempt(self, calls: Sequence[Charging]) -> None:
        """Decide the calls by one version of the ledger, and write the ledger if something changed.

        Raises Conflict if another process wrote first, WriteUnanswered if the outcome of the write is unknown,
        Unavailable if the ledger could not be read, and LedgerLost if the ledger was lost with its charges.
        """
        # 1. Read: take the remembered version, or read the stored one. Count the pods if the version lacks some.
        await self._send_again()
        remembered = self._take_remembered()
        stored = remembered or await self._read_own(calls)
        counted = await self._complete(stored.ledger, calls)
        # 2. Decide: move the charges admitted from the reservation to `pending`. Then decide the calls in order.
        flushed = self._lease.flushed(counted)
        ledger, decisions = _decide(flushed, calls)
        waiting = [each for call, each in zip(calls, decisions, strict=True) if not call.item.dry_run]
        if any(isinstance(each, Refused) and each.shortage.rests_on_reserved for each in waiting):
            ledger = self._ask_for_room(ledger)
        changed = (ledger, counted) != (flushed, stored.ledger)
        if remembered and calls and not (changed and all(isinstance(decision, Admitted) for decision in decisions)):
            # The remembered version may be outdated. Only a compare-and-swap proves that it is current. So decide
            # again by a new read if a charge is refused, or is admitted without a write.
            await self._attempt(calls)
            return
        # 3. Write, if there is something to write, and answer the calls.
        gives_back = self._lease.active and not calls and stored.version
        changed = (changed and not all(call.item.dry_run for call in calls)) or stored.opens
        if changed or self._lease.granted or gives_back:
            self._note_demand(calls, decisions)
            for call in calls:
                call.late = UNSURE  # the answer if the deadline passes during the write
            stored = await self._write(self._reserving(ledger, calls), stored)
            ledger = stored.ledger
            self._shared.metrics.size.observe(stored.size)
        if stored.version is not None:  # without a version, no open ledger is stored
            self._remember(stored)
        self._note(ledger)
        for call, decision in zip(calls, decisions, strict=True):
            call.settle(decision)
        if self._lease.active and (self._flusher is None or self._flusher.done()):
            self._flusher = asyncio.create_task(self._flush())

    def _note_demand(self, calls: Sequence[Charging], decisions: Sequence[Decision]) -> None:
        """Add the admitted charges to the demand. The caller must do so before a write, which reserves by demand."""
        for call, decision in zip(calls, decisions, strict=True):
            asked = call.item
            if isinstance(decision, Admitted) and not asked.dry_run and asked.model != rules.NO_MODEL:
                self._demand.add(asked.uid, asked.model, asked.charge)

    def _reserving(self, ledger: Ledger, calls: Sequence[Charging]) -> Ledger:
        """Return the ledger with the next reservation. Its size depends on the demand and the free quota."""
        if calls:
            self._terms = _terms(calls[-1].item, self._shared.store)
        terms = self._terms
        if not terms or terms.quota.mode is not Mode.ENFORCE or self._lease.gives_way or self._shared.leaving:
            return self._lease.send(ledger, {}, terms)
        charges, next_seconds = plan(ledger, terms.quota, self._demand)
        return self._lease.send(ledger, charges, terms, next_seconds)

    def _ask_for_room(self, ledger: Ledger) -> Ledger:
        """Return the ledger with a new `waiting` mark. Replicas that read the mark release their reservations."""
        now = self._shared.clock()
        if now >= self._asked_at + GIVE_WAY_SECONDS:
            self._asking_since = now
        if now < self._asked_at + ASK_AGAIN_SECONDS:
            return ledger
        return msgspec.structs.replace(ledger, waiting=secrets.token_urlsafe(6))

    async def _write(self, ledger: Ledger, replaced: Stored) -> Stored:
        try:
            stored = await self._in_thread(self._shared.store.write, ledger, replaced, WRITE_TIMEOUT_SECONDS)
        except Unavailable as error:
            if self._lease.active:
                self._unanswered = _Unanswered(ledger, replaced)
            raise WriteUnanswered from error
        self._unanswered = None
        self._lease.confirmed(stored.answered)
        # Record the time of a `waiting` mark when its write is confirmed. After a lost write, the mark is set again.
        if ledger.waiting != replaced.ledger.waiting:
            self._asked_at = self._shared.clock()
        return stored

    async def _send_again(self) -> None:
        """Repeat a write whose outcome is unknown. No read could prove that it failed: it may be stored later."""
        # The charge of a waiting call may be part of the repeated write. The call then finds its charge in the ledger.
        if unanswered := self._unanswered:
            try:
                self._remember(await self._write(*unanswered))
            except Conflict:
                # The ledger has a newer version, so the write was stored or never will be. The next read shows which.
                self._unanswered = None

    def _remember(self, stored: Stored) -> None:
        self._remembered, self._remembered_at = stored, self._shared.clock()

    def _take_remembered(self) -> Stored | None:
        """Return and forget the ledger that this replica read or wrote last; None if it is probably outdated."""
        remembered, self._remembered = self._remembered, None
        return remembered if self._shared.clock() - self._remembered_at < REMEMBERED_SECONDS else None

    async def _read_own(self, calls: Sequence[Charging]) -> Stored:
        store = self._shared.store
        opens = any(not call.item.dry_run for call in calls)
        try:
            stored = await self._in_thread(store.open if opens else store.read, READ_TIMEOUT_SECONDS)
        except LedgerLost:
            self._lease.forget()
            raise
        if stored.version is None:
            self._lease.forget()
        self._lease.observe(stored.ledger)
        return stored

    async def _complete(self, ledger: Ledger, calls: Sequence[Charging]) -> Ledger:
        # A ledger that was counted before the last edit of the quota may use old values of units. If no leader deleted
        # the ledger while the namespace had no limit, the ledger may also lack the pods that were stored then.
        config_version = self._shared.store.config_version
        ledger = self._recount.settle(ledger)
        # A ledger that was counted before the API server served ResourceClaims lacks the claims.
        uncounted = not ledger.claim_resource_version and self._shared.store.claim_price() is not None
        if uncounted or any(is_counted_before(ledger, call.item.counted_since, config_version) for call in calls):
            observed = await self._in_thread(self._shared.store.count_pods, READ_TIMEOUT_SECONDS)
            # An older count must not lower the ledger, and without a count the ledger may lack pods. So the caller
            # must retry. By then the watch has delivered the newer ConfigMap.
            if observed.is_older(ledger):
                raise Unavailable("the ledger was counted by a newer quota ConfigMap than this replica has read")
            return settle(ledger, observed, counted_since=observed.resource_version)
        return ledger

    async def _in_thread(self, call: Callable[..., T], *args: object) -> T:
        # A call continues in its thread after its task was cancelled. So a write may be stored that no task awaits.
        return await asyncio.get_running_loop().run_in_executor(self._shared.threads, call, self._namespace, *args)

    def _in_time(self, calls: Sequence[Charging]) -> Sequence[Charging]:
        now = self._shared.clock()
        for call in calls:
            if call.deadline <= now:
                call.settle(call.late)
        # All other calls have their answers, or their callers have disconnected.
        return [call for call in calls if not call.answer.done()]


def _terms(asked: ChargeRequest, store: LedgerStore) -> Terms:
    return Terms(asked.quota, asked.counted_since, store.config_version)


def _decide(ledger: Ledger, calls: Sequence[Charging]) -> tuple[Ledger, list[Decision]]:
    """Decide the calls in order. Each decision counts the charges of the calls that were admitted before."""
    decisions = []
    for call in calls:
        decision = call.item.decide(ledger)
        decisions.append(decision)
        if isinstance(decision, Admitted) and not call.item.dry_run:
            ledger = decision.ledger
    return ledger, decisions
