"""The ledger of one namespace, as a replica works on it: charges are committed in groups, by compare-and-swap."""

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
    seconds_until_write,
    target,
)
from webhook.ledger.ledgers import ChargeRequest, Decision, PutOff, RetryLater
from webhook.ledger.recount import SOON_SECONDS, Recount
from webhook.metrics import LedgerMetrics

T = TypeVar("T")

# A namespace has one write under way at a time, and now and then a read: enough for thirty busy ones.
KUBE_THREADS = 32

# Apart from those that write, since LISTs take long. Most of these threads wait for a turn (`ListTurns`).
LIST_THREADS = 32

CACHED_USAGE_SECONDS = 0.5
"""How long a ledger once read is good enough to prefer a model by; never to refuse by."""

GRANTING_USAGE_SECONDS = MOST_WRITE_SECONDS + 1.0
"""The same while charges are granted from a reservation: these are added, and the next flush tells what others took.
That is seconds away only where there is much room."""

REMEMBERED_SECONDS = 1.0
"""How long the version that was read or written last is replaced without a read. After that time the controller or
another replica has usually written, and a write that loses costs more than a read."""

READ_TIMEOUT_SECONDS = 3.0
"""So short that those who wait for a read that fails still hear of it."""

USAGE_SECONDS = 15.0
"""For a read that has to count, and waits for its turn."""

WRITE_TIMEOUT_SECONDS = 3.0
"""After which a write counts as lost, and is looked for by reading."""

# A write costs the API server and etcd about as much as half a pod's creation, so under load fewer and larger ones are
# worth more than the time. PostgreSQL's commit_delay and commit_siblings do the same.
GATHER_SECONDS = 0.004

FLUSH_SECONDS = 0.1
"""Between two looks at whether what was granted from the reservation has to be written."""

ASK_AGAIN_SECONDS = 1.0
"""Between two marks of a replica that it finds no room for what others reserve."""

# Two replicas that lost to each other would else meet again at every try.
MAX_JITTER_SECONDS = 0.02

TOO_MANY = RetryLater("too many charges to this namespace at once", soon=True)
UNSURE = RetryLater("it is not known whether the charge was written", soon=True)

Charging = PendingCall[ChargeRequest, Decision]


@dataclass(eq=False)
class Shared:
    """What the ledgers of all namespaces share in one replica.

    ``store`` reads and writes them. ``clock``, ``sleep`` and ``boot_clock``, the clock of leases, are for tests.
    ``leaving``: the replica stops, and reserves nothing any more. ``threads`` have the calls of reads and writes, and
    ``list_threads`` those of LISTs.
    """

    store: LedgerStore
    metrics: LedgerMetrics
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    boot_clock: Callable[[], float] = boot_seconds
    leaving: bool = False
    # The API server's client blocks, so its calls are in threads, and bounded by them; all else is on the event loop.
    # To hand a call over takes 50 µs, beside a write's milliseconds: too little to have a second HTTP client for.
    threads: Executor = field(default_factory=lambda: ThreadPoolExecutor(KUBE_THREADS, thread_name_prefix="ledger"))
    list_threads: Executor = field(default_factory=lambda: ThreadPoolExecutor(LIST_THREADS, thread_name_prefix="list"))


class _Unanswered(NamedTuple):
    """A write whose outcome is not known, and what it was to replace."""

    ledger: Ledger
    replaced: Stored


class NamespaceLedger:
    """One namespace's ledger as this replica works on it.

    The charges that wait are decided in order against one version, and written by one PUT with that version. What was
    written last is remembered, so the next group needs no read; whoever loses to another replica reads and decides
    again, until the callers' deadlines. Only the committer's task, and the flush between its batches, touches what is
    remembered. Under load a part of the room is reserved, and charges are granted from that and written by the flush.
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
        # What the next reservation is sized by.
        self._terms: Terms | None = None
        self._flusher: asyncio.Task[None] | None = None
        # When the others were asked for room last, and since when again and again.
        self._asked_at = self._asking_since = -math.inf

    async def charge(self, request: ChargeRequest) -> Decision:
        """Decide a charge: from the reservation, or together with those that wait beside it."""
        decision: Decision | None = self._grant(request)
        if decision is None:
            started = self._shared.clock()
            decision = await self._committer.serve(request, request.deadline)
            self._shared.metrics.wait.observe(self._shared.clock() - started)
        if isinstance(decision, Refused):
            decision = await self._refuse(request, decision)
        return decision

    async def _refuse(self, request: ChargeRequest, refused: Refused) -> Decision:
        """Return a refusal where what is stored leaves no room either; else what puts the charge off, or admits it."""
        shortage = refused.shortage
        if shortage.can_never_fit:
            return refused
        if shortage.rests_on_reserved:
            # Replicas that live give way at once, and then reserve nothing while somebody waits. That of one that is
            # gone stays for as long as it takes to know that.
            return PutOff((shortage,), soon=self._shared.clock() < self._asking_since + SOON_SECONDS)
        judged = await self._recount.judge(shortage, request.deadline)
        if isinstance(judged, Refused) or not judged.counted:
            return judged
        # While one waited for the LIST the ledger may have been settled.
        decision: Decision = await self._committer.serve(request, request.deadline)
        return (
            msgspec.structs.replace(judged, shortages=(decision.shortage,))
            if isinstance(decision, Refused)
            else decision
        )

    async def stored_usage(self, charged: Mapping[str, Usage], deadline: float) -> Mapping[str, Usage] | None:
        """Return what is stored now of each model, and terminating of ``charged``; None if not counted in time."""
        return await self._recount.usages(charged, deadline)

    async def _list(self) -> ObservedPods:
        self._shared.metrics.lists.inc()
        count = self._shared.store.count_pods
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._shared.list_threads, count, self._namespace, READ_TIMEOUT_SECONDS)

    async def _gather(self, last_batch: int) -> None:
        # More may come in that time. Who comes alone never waits for others.
        if last_batch > 1:
            await self._shared.sleep(GATHER_SECONDS)

    def _grant(self, request: ChargeRequest) -> Admitted | None:
        """Return a yes that is written later; None where the ledger has to be asked."""
        crowded = len(self._noted.pending) + len(self._lease.granted) >= rules.MOST_PENDING
        # What is granted is counted until it is settled or its time is over. A pod that may run for longer has to be
        # recorded by a write: it could be deleted by force while nobody watches.
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
        """Write what was granted and the next reservation, until nothing is reserved any more."""
        while self._lease.active:
            await self._shared.sleep(FLUSH_SECONDS)
            if self._lease.is_due or self._lease.gives_way or self._unanswered or not self._demand.recent():
                await self.flush()

    async def flush(self) -> None:
        """Write what was granted, and what is reserved from now on."""
        async with self._committer.busy:
            # Nothing is lost where it fails, and it is tried again: what was granted is in what is reserved.
            with contextlib.suppress(VcudaError):
                if self._lease.active:
                    await self._attempt([])

    async def cached_usage(self) -> Mapping[str, Usage]:
        """Return what is charged to each model, from memory where that is new enough."""
        good_for = GRANTING_USAGE_SECONDS if self._lease.active else CACHED_USAGE_SECONDS
        if self._shared.clock() - self._usages_read_at < good_for:
            return self._usages
        return await self.usage()

    async def usage(self) -> Mapping[str, Usage]:
        """Return what is charged to each model, read now, without what is reserved; as read last if that takes long."""
        # Not remembered to decide by: the committer may be writing a later version at this moment.
        with contextlib.suppress(ListOverdue):  # /validate says so
            if stored := await self._reads.result(USAGE_SECONDS):
                return self._note(stored.ledger)
        return self._usages

    def _note(self, ledger: Ledger) -> Mapping[str, Usage]:
        # What is reserved is room to whoever chooses a model: it is granted, or given back, as soon as somebody asks.
        self._usages = msgspec.structs.replace(ledger, reserved={}).usages()
        self._noted, self._usages_read_at = ledger, self._shared.clock()
        return self._usages

    async def _commit(self, calls: Sequence[Charging]) -> None:
        """Give every call its decision. Raises Unavailable where nothing is known to be written."""
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
                return  # each caller is told UNSURE, which is its `late` by now
            else:
                return
            for call in open_:
                # After conflicts alone nothing of ours is in the ledger: those writes are known to have failed.
                call.late = UNSURE if unsure else TOO_MANY
            await self._shared.sleep(random.uniform(0, MAX_JITTER_SECONDS))  # noqa: S311  # spreads the replicas; guards nothing

    async def _attempt(self, calls: Sequence[Charging]) -> None:
        """Decide against one version, and write it where that is needed.

        Raises:
            Conflict: another writer was first.
            WriteUnanswered: it may be written, or not.
            Unavailable: the ledger could not be read.
            LedgerLost: it is gone, and so is what was charged in it.

        """
        await self._send_again()
        remembered = self._take_remembered()
        stored = remembered or await self._read_own(calls)
        counted = await self._complete(stored.ledger, calls)
        flushed = self._lease.flushed(counted)
        ledger, decisions = _decide(flushed, calls)
        waiting = [each for call, each in zip(calls, decisions, strict=True) if not call.item.dry_run]
        if any(isinstance(each, Refused) and each.shortage.rests_on_reserved for each in waiting):
            ledger = self._ask_for_room(ledger)
        changed = ledger is not flushed or counted is not stored.ledger
        if remembered and calls and not (changed and all(isinstance(decision, Admitted) for decision in decisions)):
            # A refusal is never taken from memory: the controller may have released a charge since. Nor is a yes that
            # writes nothing, for no compare-and-swap shows that what is remembered still holds.
            await self._attempt(calls)
            return
        gives_back = self._lease.active and not calls and stored.version
        changed = (changed and not all(call.item.dry_run for call in calls)) or stored.opens
        if changed or self._lease.granted or gives_back:
            self._note_demand(calls, decisions)
            for call in calls:
                call.late = UNSURE  # what a deadline means that comes while the write is under way
            stored = await self._write(self._reserving(ledger, calls), stored)
            ledger = stored.ledger
            self._shared.metrics.size.observe(stored.size)
        if stored.version is not None:  # one that has yet to be opened counts pods, and those change unseen
            self._remembered, self._remembered_at = stored, self._shared.clock()
        self._note(ledger)
        for call, decision in zip(calls, decisions, strict=True):
            call.settle(decision)
        if self._lease.active and (self._flusher is None or self._flusher.done()):
            self._flusher = asyncio.create_task(self._flush())

    def _note_demand(self, calls: Sequence[Charging], decisions: Sequence[Decision]) -> None:
        """Count the admitted charges as demand before their write, which reserves for the next ones."""
        for call, decision in zip(calls, decisions, strict=True):
            asked = call.item
            if isinstance(decision, Admitted) and not asked.dry_run and asked.model != rules.NO_MODEL:
                self._demand.add(asked.uid, asked.model, asked.charge)

    def _reserving(self, ledger: Ledger, calls: Sequence[Charging]) -> Ledger:
        """Return the flushed ledger with what is to be reserved, by the demand and the room that there is."""
        if calls:
            self._terms = _terms(calls[-1].item, self._shared.store)
        terms = self._terms
        if not terms or terms.quota.mode is not Mode.ENFORCE or self._lease.gives_way or self._shared.leaving:
            return self._lease.send(ledger, {}, terms)
        charges = target(ledger, terms.quota, self._demand)
        return self._lease.send(ledger, charges, terms, seconds_until_write(ledger, terms.quota, self._demand))

    def _ask_for_room(self, ledger: Ledger) -> Ledger:
        """Return the ledger with a mark that has the other replicas reserve nothing for a while."""
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
        # Not before: what was decided from memory is decided again, and so is what lost to another writer.
        if ledger.waiting != replaced.ledger.waiting:
            self._asked_at = self._shared.clock()
        return stored

    async def _send_again(self) -> None:
        """Send the same write until its outcome is known: reading the version that it replaces would prove nothing."""
        # Whoever waits may have its charge in it, and finds it there.
        if unanswered := self._unanswered:
            try:
                self._remembered, self._remembered_at = await self._write(*unanswered), self._shared.clock()
            except Conflict:
                # The version that it was to replace is gone: it has landed, or never will. The ledger tells which.
                self._unanswered = None

    def _take_remembered(self) -> Stored | None:
        """Return the version that this replica read or wrote last, once, if nobody is likely to have written since."""
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
        # One that was last counted before the quota was edited may miss pods: those that were stored while the
        # namespace was not limited, and no leader was there to drop the ledger. Nor has it what units are worth now.
        config_version = self._shared.store.config_version
        ledger = self._recount.settle(ledger)
        # Nor claims, where it is from before the API server had any.
        uncounted = not ledger.claim_resource_version and self._shared.store.claim_price() is not None
        if uncounted or any(is_counted_before(ledger, call.item.counted_since, config_version) for call in calls):
            observed = await self._in_thread(self._shared.store.count_pods, READ_TIMEOUT_SECONDS)
            # Such a count lowers no ledger; and without it this one may miss pods. The watch brings the ConfigMap.
            if observed.is_older(ledger):
                raise Unavailable("this replica knows an older quota ConfigMap than the ledger was counted by")
            return settle(ledger, observed, counted_since=observed.resource_version)
        return ledger

    async def _in_thread(self, call: Callable[..., T], *args: object) -> T:
        # One under way goes on where its task ends: a write that nobody awaits lands all the same, or does not.
        return await asyncio.get_running_loop().run_in_executor(self._shared.threads, call, self._namespace, *args)

    def _in_time(self, calls: Sequence[Charging]) -> Sequence[Charging]:
        now = self._shared.clock()
        for call in calls:
            if call.deadline <= now:
                call.settle(call.late)
        # Of the others nobody waits for the answer any more: it is there, or its caller has gone.
        return [call for call in calls if not call.answer.done()]


def _terms(asked: ChargeRequest, store: LedgerStore) -> Terms:
    return Terms(asked.quota, asked.counted_since, store.config_version)


def _decide(ledger: Ledger, calls: Sequence[Charging]) -> tuple[Ledger, list[Decision]]:
    """Decide the calls in order, each beside those granted before it."""
    decisions = []
    for call in calls:
        decision = call.item.decide(ledger)
        decisions.append(decision)
        if isinstance(decision, Admitted) and not call.item.dry_run:
            ledger = decision.ledger
    return ledger, decisions
