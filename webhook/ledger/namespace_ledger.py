"""The ledger of one namespace in one webhook replica. Charges that arrive during a write share the next write."""

import asyncio
import contextlib
import math
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from vcuda.errors import Conflict, LedgerLost, ListOverdue, Unavailable, VcudaError, WriteUnanswered
from vcuda.kube import LedgerStore, Stored
from vcuda.ledger import ledger as rules
from vcuda.ledger.ledger import Admitted, Ledger, Pending, Rejected, is_counted_before
from vcuda.ledger.recount import ObservedPods, recount
from vcuda.quota.model import Mode, Usage, all_models
from webhook.ledger.batches import BatchCommitter, Charging, Decided, Read, SharedCall, decide_all
from webhook.ledger.charging import ChargeRequest, Decision, PutOff, RetryLater
from webhook.ledger.fresh_count import SOON_SECONDS, FreshCount
from webhook.ledger.reservations import (
    GIVE_WAY_SECONDS,
    MAX_WRITE_SECONDS,
    Demand,
    ReplicaReservation,
    Terms,
    boot_seconds,
    plan_reservation,
)
from webhook.metrics import LedgerMetrics

T = TypeVar("T")

# The number of threads for reads and writes of ledgers. It bounds how many ledgers are written at the same time.
KUBE_THREADS = 32

# The number of threads for LISTs. Most of them only wait, because `ListTurns` lets few LISTs run at the same time.
LIST_THREADS = 32

CACHED_USAGE_SECONDS = 0.5
"""/mutate may choose a GPU model by usage in memory that is at most this many seconds old. No rejection uses it."""

SPENDING_USAGE_SECONDS = MAX_WRITE_SECONDS + 1.0
"""Replaces `CACHED_USAGE_SECONDS` while this replica has a reservation. The usage in memory then includes the charges
that this replica admits. It lacks the charges of other replicas since this replica's last write. The interval between
writes is long only if much quota is free, so the missing charges matter little."""

REMEMBERED_SECONDS = 1.0
"""For this many seconds, this replica may write a ledger from its copy in memory, without another read. In a longer
time, another process has usually written the ledger. The write would then fail, which costs more than a read."""

READ_TIMEOUT_SECONDS = 3.0
"""Timeout in seconds of a read of the ledger. The timeout is short, so that waiting reviews still get an answer."""

USAGE_SECONDS = 15.0
"""Timeout in seconds of a read of the usage, which may have to wait for a LIST of the stored pods and claims."""

WRITE_TIMEOUT_SECONDS = 3.0
"""Timeout in seconds of a ledger write. After a timeout the outcome of the write is unknown, so the replica reads or
writes the ledger again."""

# Under load, a ledger write waits for this many seconds, so that more charges join it, like PostgreSQL's commit_delay.
# A write costs half as much as the creation of a pod, and one large write costs less than several small writes.
GATHER_SECONDS = 0.004

FLUSH_SECONDS = 0.1
"""Seconds between two checks whether this replica must write the charges that it admitted from its reservation."""

ASK_AGAIN_SECONDS = 1.0
"""This replica sets at most one `waiting` mark in a ledger within this many seconds. When other replicas read a new
mark, they release their reservations, so that a charge of this replica can fit."""

# The maximum random delay before a write is repeated. Without a delay, two replicas would conflict at every retry.
MAX_JITTER_SECONDS = 0.02

TOO_MANY = RetryLater("too many charges of this namespace are being written at once", soon=True)
UNSURE = RetryLater("it is not known whether the charge was written", soon=True)

NEWER_QUOTA = "the ledger was counted by a newer quota ConfigMap than this replica has read"


@dataclass(eq=False)
class Shared:
    """The objects that the ledgers of all namespaces share in one webhook replica.

    ``store`` reads and writes the ledgers. ``boot_clock`` also runs while the machine is suspended.
    ``leaving``: True if the replica is stopping. It then reserves nothing. ``threads`` run reads and writes of ledgers.
    ``list_threads`` run LISTs.
    """

    store: LedgerStore
    metrics: LedgerMetrics
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    boot_clock: Callable[[], float] = boot_seconds
    leaving: bool = False
    # Each call to the API server blocks a thread. So the numbers of threads bound the number of concurrent calls. A
    # thread adds 50 µs to a call, which is little compared with the milliseconds of a write.
    threads: Executor = field(default_factory=lambda: ThreadPoolExecutor(KUBE_THREADS, thread_name_prefix="ledger"))
    list_threads: Executor = field(default_factory=lambda: ThreadPoolExecutor(LIST_THREADS, thread_name_prefix="list"))


class NamespaceLedger:
    """The ledger of one namespace in this webhook replica.

    The replica decides all waiting charges in order by one version of the ledger, and replaces this version by one PUT.
    If another process wrote first, the replica reads and decides again, until the deadlines of the reviews. The replica
    keeps the written version in memory, to decide the next charges without a read. Only the task that decides charges,
    and `flush` between two batches, may use this version. Under load, the replica admits charges from a reservation
    (quota that it holds in advance), and `flush` writes these charges later.
    """

    def __init__(self, namespace: str, shared: Shared) -> None:
        self._namespace = namespace
        self._shared = shared
        self._remembered: Stored | None = None
        self._remembered_at = -math.inf
        # If the outcome of the last write is unknown: the ledger that was sent, and the stored ledger that it replaces.
        self._unanswered: tuple[Ledger, Stored] | None = None
        self._noted = Ledger()
        self._usages: Mapping[str, Usage] = {}
        self._usages_read_at = -math.inf
        self._committer = BatchCommitter[ChargeRequest, Decision](self._commit, TOO_MANY, self._gather, shared.clock)
        self._reads = SharedCall(lambda: self._in_thread(shared.store.read, READ_TIMEOUT_SECONDS), shared.clock)
        self._fresh_count = FreshCount(self._list, lambda: self._noted, shared.clock, shared.sleep)
        self._reserved = ReplicaReservation(shared.boot_clock)
        self._demand = Demand(shared.clock)
        # The quota by which this replica sizes its next reservation.
        self._terms: Terms | None = None
        self._flusher: asyncio.Task[None] | None = None
        # The times of this replica's last `waiting` mark (it needs reserved quota), and of the first in a row of marks.
        self._asked_at = self._asking_since = -math.inf

    async def charge(self, request: ChargeRequest) -> Decision:
        """Admit a charge from the reservation. If it has no room there, decide it with all waiting charges."""
        decision: Decision | None = self._spend(request)
        if decision is None:
            started = self._shared.clock()
            decision = await self._committer.serve(request, request.deadline)
            self._shared.metrics.wait.observe(self._shared.clock() - started)
        if isinstance(decision, Rejected):
            decision = await self._reject(request, decision)
        return decision

    async def _reject(self, request: ChargeRequest, rejected: Rejected) -> Decision:
        """Answer a charge that exceeds a limit by the ledger. Reject it only if the stored objects use too much."""
        shortage = rejected.shortage
        if shortage.can_never_fit:
            return rejected
        if shortage.rests_on_reserved:
            # Only reserved quota is missing. Running replicas release their reservations soon after a `waiting` mark.
            # The reservation of a dead replica stays until the leader of the controller removes it.
            return PutOff((shortage,), soon=self._shared.clock() < self._asking_since + SOON_SECONDS)
        judged = await self._fresh_count.judge(shortage, request.deadline)
        if isinstance(judged, Rejected) or not judged.counted:
            return judged
        # The controller may have recounted the ledger during the LIST, so the charge may fit now. Decide it again.
        decision: Decision = await self._committer.serve(request, request.deadline)
        if isinstance(decision, Rejected):
            # The model has room now, but all models together may have none. Only a LIST can confirm this.
            if decision.shortage.of_total and not shortage.of_total:
                return await self._reject(request, decision)
            return msgspec.structs.replace(judged, shortages=(decision.shortage,))
        return decision

    async def stored_usage(self, charged: Mapping[str, Usage], deadline: float) -> Mapping[str, Usage] | None:
        return await self._fresh_count.usages(charged, deadline)

    async def _list(self) -> ObservedPods:
        self._shared.metrics.lists.inc()
        count = self._shared.store.count_pods
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._shared.list_threads, count, self._namespace, READ_TIMEOUT_SECONDS)

    async def _gather(self, last_batch: int) -> None:
        # More charges can join the batch during this sleep. If the previous batch had one charge, there is no load, so
        # there is no sleep.
        if last_batch > 1:
            await self._shared.sleep(GATHER_SECONDS)

    def _spend(self, request: ChargeRequest) -> Admitted | None:
        """Admit a charge from the reservation, to write it later. Return None if the charge must be written first."""
        crowded = len(self._noted.pending) + len(self._reserved.spent) >= rules.MAX_PENDING
        # If no watch reports the deletion of a pod, only a grace period in the ledger keeps its charge until the pod
        # has ended. So the charge of a pod with a long grace period is written before the pod is admitted.
        if request.dry_run or request.grace or crowded or not self._reserved.is_by(_terms(request, self._shared.store)):
            return None
        asked = Pending(request.model, request.charge)
        if not self._reserved.spend(request.uid, asked, request.created):
            return None
        self._shared.metrics.spent.inc()
        self._demand.add(request.uid, request.model, request.charge)
        usage = self._usages.get(request.model, Usage())
        usage = msgspec.structs.replace(usage, used=usage.used + request.charge, pending=usage.pending + request.charge)
        self._usages = {**self._usages, request.model: usage}
        total_usage = all_models(self._usages.values()) if request.quota.total else None
        return Admitted(self._noted, usage, request.quota.limits[request.model], total_usage=total_usage)

    async def _flush(self) -> None:
        """Call `flush` whenever a write is due, until this replica has no reservation and no unwritten charge."""
        while self._reserved.active:
            await self._shared.sleep(FLUSH_SECONDS)
            if self._reserved.is_due or self._reserved.gives_way or self._unanswered or not self._demand.recent():
                await self.flush()

    async def flush(self) -> None:
        """Write to the ledger the charges that were admitted from the reservation, and the next reservation."""
        async with self._committer.busy:
            # A failed write is repeated later. Until then, the reservation in the ledger covers the admitted charges.
            with contextlib.suppress(VcudaError):
                if self._reserved.active:
                    await self._attempt([])

    async def cached_usage(self) -> Mapping[str, Usage]:
        good_for = SPENDING_USAGE_SECONDS if self._reserved.active else CACHED_USAGE_SECONDS
        if self._shared.clock() - self._usages_read_at < good_for:
            return self._usages
        return await self.usage()

    async def usage(self) -> Mapping[str, Usage]:
        """Read the ledger, and return its usage without reservations. After a timeout, return the usage in memory."""
        with contextlib.suppress(ListOverdue):  # /validate reports that a LIST takes too long
            # No charge may be decided by this ledger, because another task may be writing a newer version.
            if stored := await self._reads.result(self._shared.clock() + USAGE_SECONDS):
                return self._note(stored.ledger)
        return self._usages

    def _note(self, ledger: Ledger) -> Mapping[str, Usage]:
        # For the choice of a model at /mutate, reserved quota counts as free, because replicas release reservations
        # when a charge needs the quota.
        self._usages = msgspec.structs.replace(ledger, reserved={}).usages()
        self._noted, self._usages_read_at = ledger, self._shared.clock()
        return self._usages

    async def _commit(self, calls: Sequence[Charging]) -> None:
        """Decide the charges in ``calls``, and write the ledger. If this raises Unavailable, nothing was written."""
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
                return  # each caller gets its `late`: the outcome of the write is unknown
            else:
                return
            for call in open_:
                # After a conflict, this write was certainly not stored. But if an earlier write was not answered, the
                # charges may be in the ledger.
                call.late = UNSURE if unsure else TOO_MANY
            await self._shared.sleep(random.uniform(0, MAX_JITTER_SECONDS))  # noqa: S311  # only a delay

    async def _attempt(self, calls: Sequence[Charging]) -> None:
        """Decide the charges in ``calls`` by one version of the ledger, and write the ledger if it has changed.

        Raises Conflict if another process wrote first, WriteUnanswered if the outcome of the write is unknown,
        Unavailable if the ledger could not be read, and LedgerLost if the ledger was lost with its charges.
        """
        # 1. Read: use the ledger in memory if it is recent, otherwise read the stored ledger. If the ledger may lack
        # stored pods, count them.
        await self._send_again()
        # Another process has probably written a newer version after a second.
        recent = self._shared.clock() - self._remembered_at < REMEMBERED_SECONDS
        remembered, self._remembered = self._remembered if recent else None, None
        read = await self._read(calls, remembered)
        # 2. Decide the calls in order.
        decided = decide_all(read, calls)
        # Only a compare-and-swap proves that the ledger in memory is not out of date. So a rejection, or an admission
        # that writes nothing, is decided again by a newly read ledger.
        if remembered and calls and not (decided.changed and decided.admits_all):
            read = await self._read(calls)
            decided = decide_all(read, calls)
        # 3. Write the ledger, if it has changed, and answer the calls.
        await self._write_decided(read, decided, calls)
        for call, decision in zip(calls, decided.decisions, strict=True):
            call.resolve(decision)
        if self._reserved.active and (self._flusher is None or self._flusher.done()):
            self._flusher = asyncio.create_task(self._flush())

    async def _read(self, calls: Sequence[Charging], remembered: Stored | None = None) -> Read:
        stored = remembered or await self._read_own(calls)
        counted = await self._complete(stored.ledger, calls)
        return Read(stored, counted, self._reserved.flushed(counted))

    async def _write_decided(self, read: Read, decided: Decided, calls: Sequence[Charging]) -> None:
        stored, ledger = read.stored, decided.ledger
        own = [each for call, each in zip(calls, decided.decisions, strict=True) if not call.item.dry_run]
        if any(isinstance(each, Rejected) and each.shortage.rests_on_reserved for each in own):
            ledger = self._ask_for_room(ledger)
        changed = decided.changed or ledger is not decided.ledger
        gives_back = self._reserved.active and not calls and stored.version
        if (changed and own) or stored.opens or self._reserved.spent or gives_back:
            self._note_demand(calls, decided.decisions)
            for call in calls:
                call.late = UNSURE  # the result for a call whose deadline passes during the write
            stored = await self._write(self._reserving(ledger, calls), stored)
            ledger = stored.ledger
            self._shared.metrics.size.observe(stored.size)
        if stored.version is not None:  # None if no open ledger (which admits charges) is stored
            self._remember(stored)
        self._note(ledger)

    def _note_demand(self, calls: Sequence[Charging], decisions: Sequence[Decision]) -> None:
        """Add the admitted charges to the measured demand, by which `_reserving` then sizes the next reservation."""
        for call, decision in zip(calls, decisions, strict=True):
            asked = call.item
            if isinstance(decision, Admitted) and not asked.dry_run and asked.model != rules.NO_MODEL:
                self._demand.add(asked.uid, asked.model, asked.charge)

    def _reserving(self, ledger: Ledger, calls: Sequence[Charging]) -> Ledger:
        """Return the ledger with the next reservation, whose size depends on the demand and on the free quota."""
        if calls:
            self._terms = _terms(calls[-1].item, self._shared.store)
        terms = self._terms
        if not terms or terms.quota.mode is not Mode.ENFORCE or self._reserved.gives_way or self._shared.leaving:
            return self._reserved.send(ledger, {}, terms)
        charges, next_seconds = plan_reservation(ledger, terms.quota, self._demand)
        return self._reserved.send(ledger, charges, terms, next_seconds)

    def _ask_for_room(self, ledger: Ledger) -> Ledger:
        """Return the ledger with a new `waiting` mark, unless the last mark is recent. Replicas then release quota."""
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
            if self._reserved.active:
                self._unanswered = ledger, replaced
            raise WriteUnanswered from error
        self._unanswered = None
        self._reserved.confirmed(stored.answered)
        # A `waiting` mark's time is recorded after the mark is stored. So if the write fails, a new mark is set.
        if ledger.waiting != replaced.ledger.waiting:
            self._asked_at = self._shared.clock()
        return stored

    async def _send_again(self) -> None:
        """Repeat a write whose outcome is unknown. A read could not show that the write will not be stored later."""
        # The repeated write may include the charge of a call that still waits. When this call is decided, the ledger
        # has its uid, so the charge is not added a second time.
        if unanswered := self._unanswered:
            try:
                self._remember(await self._write(*unanswered))
            except Conflict:
                # The stored ledger has a newer version. So the unanswered write has been stored, or never will be.
                self._unanswered = None

    def _remember(self, stored: Stored) -> None:
        self._remembered, self._remembered_at = stored, self._shared.clock()

    async def _read_own(self, calls: Sequence[Charging]) -> Stored:
        store = self._shared.store
        opens = any(not call.item.dry_run for call in calls)
        try:
            stored = await self._in_thread(store.open if opens else store.read, READ_TIMEOUT_SECONDS)
        except LedgerLost:
            self._reserved.forget()
            raise
        if stored.version is None:
            self._reserved.forget()
        self._reserved.observe(stored.ledger)
        return stored

    async def _complete(self, ledger: Ledger, calls: Sequence[Charging]) -> Ledger:
        # If the quota was edited after the last count of the stored objects, the ledger may have charges by old values
        # of GPU resources. It may also lack pods that were stored while the namespace had no limit.
        config_version = self._shared.store.resources().version
        ledger = self._fresh_count.recount(ledger)
        # A newer quota ConfigMap may not name a model that no node has. Then the ledger lacks the pods of this model.
        nameless = {call.item.model for call in calls} - self._shared.store.nodes().models - {rules.NO_MODEL}
        if nameless and rules.is_older(config_version, ledger.config_version):
            raise Unavailable(NEWER_QUOTA)
        # If the API server did not serve ResourceClaims at the last count, the ledger lacks the claims.
        uncounted = not ledger.claim_resource_version and self._shared.store.claim_price() is not None
        if uncounted or any(is_counted_before(ledger, call.item.counted_since, config_version) for call in calls):
            observed = await self._in_thread(self._shared.store.count_pods, READ_TIMEOUT_SECONDS)
            # A new count with an older quota ConfigMap must not replace the stored ledger, which may lack pods. So
            # the caller must retry until this replica's watch has delivered the newer ConfigMap.
            if observed.is_older(ledger):
                raise Unavailable(NEWER_QUOTA)
            return recount(ledger, observed, counted_since=observed.resource_version)
        return ledger

    async def _in_thread(self, call: Callable[..., T], *args: object) -> T:
        # If the awaiting task is cancelled, the thread still finishes the call. So a write may be stored although no
        # task waits for its answer.
        return await asyncio.get_running_loop().run_in_executor(self._shared.threads, call, self._namespace, *args)

    def _in_time(self, calls: Sequence[Charging]) -> Sequence[Charging]:
        now = self._shared.clock()
        for call in calls:
            if call.deadline <= now:
                call.resolve(call.late)
        return [call for call in calls if not call.answer.done()]


def _terms(asked: ChargeRequest, store: LedgerStore) -> Terms:
    return Terms(asked.quota, asked.counted_since, store.resources().version)
