"""The ledger of one namespace in one webhook replica. Charges that arrive during a write share the next write."""

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from vcuda.errors import Conflict, LedgerLost, ListOverdue, Unavailable, VcudaError, WriteUnanswered
from vcuda.kube import Stored
from vcuda.ledger.ledger import NO_MODEL, Admitted, Ledger, Rejected, is_counted_before, is_older
from vcuda.ledger.recount import recount
from vcuda.ledger.team import Membership, join, leave
from vcuda.quota.model import Team, Usage, all_models
from vcuda.quota.shortage import Shortage
from webhook.ledger.batches import BatchCommitter, Charging, Read, SharedCall
from webhook.ledger.charging import ChargeRequest, Decision, PutOff, RetryLater
from webhook.ledger.drafts import NEWER_QUOTA, Draft, Drafts
from webhook.ledger.fresh_count import FreshCount
from webhook.ledger.reservations import MAX_WRITE_SECONDS, Spending
from webhook.ledger.shared import READ_TIMEOUT_SECONDS, REMEMBERED_SECONDS, WRITE_TIMEOUT_SECONDS, Shared
from webhook.ledger.team_account import TeamAccount, admitted_beside, beside_others

CACHED_USAGE_SECONDS = 0.5
"""/mutate may choose a GPU model by usage in memory that is at most this many seconds old. No rejection uses it."""

SPENDING_USAGE_SECONDS = MAX_WRITE_SECONDS + 1.0
"""Replaces `CACHED_USAGE_SECONDS` while this replica has a reservation. The usage in memory then includes the charges
that this replica admits. It lacks the charges of other replicas since this replica's last write. The interval between
writes is long only if much quota is free, so the missing charges matter little."""

USAGE_SECONDS = 15.0
"""Timeout in seconds of a read of the usage, which may have to wait for a LIST of the stored pods and claims."""

# Under load, a ledger write waits for this many seconds, so that more charges join it, like PostgreSQL's commit_delay.
# A write costs half as much as the creation of a pod, and one large write costs less than several small writes.
GATHER_SECONDS = 0.004

FLUSH_SECONDS = 0.1
"""Seconds between two checks whether this replica must write the charges that it admitted from its reservation."""

# The maximum random delay before a write is repeated. Without a delay, two replicas would conflict at every retry.
MAX_JITTER_SECONDS = 0.02

TOO_MANY = RetryLater("too many charges of this namespace are being written at once", soon=True)
UNSURE = RetryLater("it is not known whether the charge was written", soon=True)


class StoredLedger:
    """Reads and writes the ledger of one namespace, and remembers the version that this replica wrote last.

    ``spending``: has the reservation of this replica in the ledger.
    """

    def __init__(self, namespace: str, shared: Shared, spending: Spending) -> None:
        self._namespace = namespace
        self._shared = shared
        self._spending = spending
        self._remembered: Stored | None = None
        self._remembered_at = -math.inf
        # If the outcome of the last write is unknown: the ledger that was sent, and the stored ledger that it replaces.
        self.unanswered: tuple[Ledger, Stored] | None = None

    def remember(self, stored: Stored) -> None:
        self._remembered, self._remembered_at = stored, self._shared.clock()

    def take(self) -> Stored | None:
        """Return the remembered ledger, and forget it; None if it is too old."""
        # Another process has probably written a newer version after a second.
        recent = self._shared.clock() - self._remembered_at < REMEMBERED_SECONDS
        remembered, self._remembered = self._remembered if recent else None, None
        return remembered

    async def read(self, *, opens: bool) -> Stored:
        """Read the ledger. ``opens``: True to create a missing ledger, which the caller must write."""
        store, reserved = self._shared.store, self._spending.reservation
        try:
            read = store.open if opens else store.read
            stored = await self._shared.in_thread(read, self._namespace, READ_TIMEOUT_SECONDS)
        except LedgerLost:
            reserved.forget()
            raise
        if stored.version is None:
            reserved.forget()
        reserved.observe(stored.ledger)
        return stored

    async def write(self, ledger: Ledger, replaced: Stored) -> Stored:
        write = self._shared.store.write
        try:
            stored = await self._shared.in_thread(write, self._namespace, ledger, replaced, WRITE_TIMEOUT_SECONDS)
        except Unavailable as error:
            if self._spending.reservation.active:
                self.unanswered = ledger, replaced
            raise WriteUnanswered from error
        self.unanswered = None
        self._spending.reservation.confirmed(stored.answered)
        if ledger.waiting != replaced.ledger.waiting:
            self._spending.release_request.stored()
        return stored

    async def send_again(self) -> None:
        """Repeat a write whose outcome is unknown. A read could not show that the write will not be stored later."""
        # The repeated write may include the charge of a call that still waits. When this call is decided, the ledger
        # has its uid, so the charge is not added a second time.
        if unanswered := self.unanswered:
            try:
                self.remember(await self.write(*unanswered))
            except Conflict:
                # The stored ledger has a newer version. So the unanswered write has been stored, or never will be.
                self.unanswered = None


class NamespaceLedger:
    """The ledger of one namespace in this webhook replica.

    The replica decides all waiting charges in order by one version of the ledger, and replaces this version by one PUT.
    If another process wrote first, the replica reads and decides again, until the deadlines of the reviews. The replica
    keeps the written version in memory, to decide the next charges without a read. Only the task that decides charges,
    and `flush` between two batches, may use this version. Under load, the replica admits charges from a reservation
    (quota that it holds in advance), and `flush` writes these charges later.
    """

    def __init__(self, namespace: str, shared: Shared, team_account: Callable[[str], TeamAccount]) -> None:
        self._namespace = namespace
        self._shared = shared
        self._team_account = team_account
        self._newest = Ledger()
        self._usages: Mapping[str, Usage] = {}
        self._usages_read_at = -math.inf
        self._committer = BatchCommitter[ChargeRequest, Decision](self._commit, TOO_MANY, self._gather, shared.clock)
        read = shared.store.read
        self._reads = SharedCall(lambda: shared.in_thread(read, namespace, READ_TIMEOUT_SECONDS), shared.clock)
        self._fresh_count = FreshCount(
            lambda: shared.listed(shared.store.count_pods, namespace, READ_TIMEOUT_SECONDS),
            lambda: self._newest,
            shared.clock,
            shared.sleep,
        )
        self._spending = Spending(shared)
        self._reserved = self._spending.reservation
        self._stored = StoredLedger(namespace, shared, self._spending)
        self._drafts = Drafts(namespace, self._spending, team_account)
        self._flusher: asyncio.Task[None] | None = None

    async def charge(self, request: ChargeRequest) -> Decision:
        """Admit a charge from the reservation. If it has no room there, decide it with all waiting charges."""
        decision: Decision | None = self._spend(request)
        if decision is None:
            started = self._shared.clock()
            decision = await self._committer.serve(request, request.deadline)
            self._shared.metrics.wait.observe(self._shared.clock() - started)
        if isinstance(decision, Rejected):
            decision = await self._reject(request, decision)
        if isinstance(decision, Admitted) and (team := request.quota.team):
            # A warning may be about the quota of the team, which this replica need not read to admit the charge.
            decision = admitted_beside(
                decision, request.model, self._team_account(team.name).known_others(self._namespace)
            )
        return decision

    async def _reject(self, request: ChargeRequest, rejected: Rejected) -> Decision:
        """Answer a charge that exceeds a limit by the ledger. Reject it only if the stored objects use too much."""
        shortage = rejected.shortage
        if shortage.can_never_fit:
            return rejected
        if shortage.rests_on_reserved:
            # Only reserved quota is missing. Running replicas release their reservations soon after a `waiting` mark.
            # The reservation of a dead replica stays until the leader of the controller removes it.
            return PutOff((shortage,), soon=self._spending.release_request.just_began)
        if shortage.team:
            judged = await self._team_account(shortage.team).judge(self._namespace, shortage, request.deadline)
        else:
            judged = await self._fresh_count.judge(shortage, request.deadline)
        if isinstance(judged, Rejected) or not judged.counted:
            return judged
        # The controller may have recounted the ledger during the LIST, so the charge may fit now. Decide it again.
        decision: Decision = await self._committer.serve(request, request.deadline)
        if isinstance(decision, Rejected):
            # This limit has room now, but another limit may have none. Only a LIST can confirm this.
            if _rank(decision.shortage) > _rank(shortage):
                return await self._reject(request, decision)
            return replace(judged, shortages=(decision.shortage,))
        return decision

    async def stored_usage(
        self, shortages: Sequence[Shortage], charged: Mapping[str, Usage], deadline: float
    ) -> Mapping[str, Usage] | None:
        usages = await self._fresh_count.usages(charged, deadline)
        of_team = [each for each in shortages if each.team]
        if usages is None or not of_team:
            return usages
        account = self._team_account(of_team[0].team)
        others = await account.counted_others(self._namespace, of_team, deadline)
        return None if others is None else beside_others(usages, others)

    async def _gather(self, last_batch: int) -> None:
        # More charges can join the batch during this sleep. If the previous batch had one charge, there is no load, so
        # there is no sleep.
        if last_batch > 1:
            await self._shared.sleep(GATHER_SECONDS)

    def _spend(self, request: ChargeRequest) -> Admitted | None:
        """Admit a charge from the reservation, to write it later. Return None if the charge must be written first."""
        if not self._spending.spend(request, self._newest):
            return None
        usage = self._usages.get(request.model, Usage())
        usage = replace(usage, used=usage.used + request.charge, pending=usage.pending + request.charge)
        self._usages = {**self._usages, request.model: usage}
        total_usage = all_models(self._usages.values()) if request.quota.total or request.quota.team else None
        return Admitted(self._newest, usage, request.quota.limits[request.model], total_usage=total_usage)

    async def _flush(self) -> None:
        """Call `flush` whenever a write is due, until this replica has no reservation and no unwritten charge."""
        while self._reserved.active:
            await self._shared.sleep(FLUSH_SECONDS)
            reserved, idle = self._reserved, not self._spending.demand.recent()
            if reserved.is_due or reserved.gives_way or self._stored.unanswered or idle:
                await self.flush()

    async def flush(self) -> None:
        """Write to the ledger the charges that were admitted from the reservation, and the next reservation."""
        async with self._committer.busy:
            # A failed write is repeated later. Until then, the reservation in the ledger covers the admitted charges.
            with contextlib.suppress(VcudaError):
                if self._reserved.active:
                    await self._attempt([])

    async def cached_usage(self, team: Team | None = None) -> Mapping[str, Usage]:
        good_for = SPENDING_USAGE_SECONDS if self._reserved.active else CACHED_USAGE_SECONDS
        if self._shared.clock() - self._usages_read_at >= good_for:
            await self._read_usages()
        if team is None:
            return self._usages
        return beside_others(self._usages, await self._team_account(team.name).others(self._namespace))

    async def usage(self, team: Team | None = None) -> Mapping[str, Usage]:
        """Read the ledger, and return its usage without reservations. After a timeout, return the usage in memory."""
        usages = await self._read_usages()
        if team is None:
            return usages
        return beside_others(usages, await self._team_account(team.name).others(self._namespace, 0))

    async def _read_usages(self) -> Mapping[str, Usage]:
        with contextlib.suppress(ListOverdue):  # /validate reports that a LIST takes too long
            # No charge may be decided by this ledger, because another task may be writing a newer version.
            if stored := await self._reads.result(self._shared.clock() + USAGE_SECONDS):
                self._update(stored.ledger)
        return self._usages

    def _update(self, ledger: Ledger) -> None:
        # For the choice of a model at /mutate, reserved quota counts as free, because replicas release reservations
        # when a charge needs the quota.
        self._usages = replace(ledger, reserved={}).usages()
        self._newest, self._usages_read_at = ledger, self._shared.clock()

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
        await self._stored.send_again()
        remembered = self._stored.take()
        if not (remembered and await self._decide(calls, remembered)):
            await self._decide(calls)
        if self._reserved.active and (self._flusher is None or self._flusher.done()):
            self._flusher = asyncio.create_task(self._flush())

    async def _decide(self, calls: Sequence[Charging], remembered: Stored | None = None) -> bool:
        """Decide the calls by one version of the ledger, write the ledger, and answer the calls.

        Return False, without an answer, if only a newly read ledger makes the decisions final.
        """
        # 1. Read: use the ledger in memory if it is recent, otherwise read the stored ledger. If the ledger may lack
        # stored pods, count them.
        membership = self._membership(calls)
        read = await self._read(calls, membership, remembered)
        # 2. Decide the calls in order. If the namespace needs more quota of its team, raise its allotment first.
        draft = await self._drafts.draft(read, calls, membership, final=remembered is None or not calls)
        if draft is None:
            return False
        # 3. Write the ledger, if it has changed, and answer the calls.
        if isinstance(draft, RetryLater):
            decisions: Sequence[Decision] = [draft] * len(calls)
        else:
            await self._write_draft(draft, calls)
            decisions = draft.decided.decisions
        for call, decision in zip(calls, decisions, strict=True):
            call.resolve(decision)
        return True

    async def _read(self, calls: Sequence[Charging], membership: Membership, remembered: Stored | None) -> Read:
        opens = any(not call.item.dry_run for call in calls)
        stored = remembered or await self._stored.read(opens=opens)
        counted = await self._complete(stored.ledger, calls)
        if calls and membership.is_outdated_for(counted):
            raise Unavailable(NEWER_QUOTA)
        if calls and not membership.team:
            counted = leave(counted, membership.version)
        if opens and membership.team and membership.name not in counted.allotments:
            # The raise of the allotment must come after this write, so that no process overlooks the namespace.
            stored = await self._stored.write(join(counted, membership.name, membership.version), stored)
            counted = stored.ledger
        return Read(stored, counted, self._reserved.flushed(counted))

    def _membership(self, calls: Sequence[Charging]) -> Membership:
        """Return the team of the namespace by the newest quota of the calls; without calls, by the last known quota."""
        if calls:
            newest = max((call.item for call in calls), key=lambda each: int(each.counted_since or 0))
            for call in calls:
                # The review of this call began before the edit that moved the namespace to another team.
                if call.item.quota.team != newest.quota.team:
                    call.item = replace(call.item, quota=newest.quota, counted_since=newest.counted_since)
            return Membership.of(newest.quota, newest.counted_since)
        basis = self._spending.basis
        return Membership.of(basis.quota, basis.counted_since) if basis else Membership(None, "", enforced=True)

    async def _write_draft(self, draft: Draft, calls: Sequence[Charging]) -> None:
        stored, ledger = draft.read.stored, draft.ledger
        if draft.writes:
            for call in calls:
                call.late = UNSURE  # the result for a call whose deadline passes during the write
            stored = await self._stored.write(ledger, stored)
            ledger = stored.ledger
            self._shared.metrics.size.observe(stored.size)
        if stored.version is not None:  # None if no open ledger (which admits charges) is stored
            self._stored.remember(stored)
        self._update(ledger)

    async def _complete(self, ledger: Ledger, calls: Sequence[Charging]) -> Ledger:
        # If the quota was edited after the last count of the stored objects, the ledger may have charges by old values
        # of GPU resources. It may also lack pods that were stored while the namespace had no limit.
        config_version = self._shared.store.resources().version
        ledger = self._fresh_count.recount(ledger)
        # A newer quota ConfigMap may not name a model that no node has. Then the ledger lacks the pods of this model.
        nameless = {call.item.model for call in calls} - self._shared.store.nodes().models - {NO_MODEL}
        if nameless and is_older(config_version, ledger.config_version):
            raise Unavailable(NEWER_QUOTA)
        # If the API server did not serve ResourceClaims at the last count, the ledger lacks the claims.
        uncounted = not ledger.claim_resource_version and self._shared.store.claim_price() is not None
        if uncounted or any(is_counted_before(ledger, call.item.counted_since, config_version) for call in calls):
            observed = await self._shared.in_thread(
                self._shared.store.count_pods, self._namespace, READ_TIMEOUT_SECONDS
            )
            # A new count with an older quota ConfigMap must not replace the stored ledger, which may lack pods. So
            # the caller must retry until this replica's watch has delivered the newer ConfigMap.
            if observed.is_older(ledger):
                raise Unavailable(NEWER_QUOTA)
            return recount(ledger, observed, counted_since=observed.resource_version)
        return ledger

    def _in_time(self, calls: Sequence[Charging]) -> Sequence[Charging]:
        now = self._shared.clock()
        for call in calls:
            if call.deadline <= now:
                call.resolve(call.late)
        return [call for call in calls if not call.answer.done()]


def _rank(shortage: Shortage) -> int:
    """Return a number that is higher for a limit that is checked later."""
    return 2 * bool(shortage.team) + shortage.of_total
