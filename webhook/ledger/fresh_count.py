"""Counts the stored pods and claims of a namespace before a rejection: the ledger may charge deleted objects."""

import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec

from vcuda.errors import ListOverdue
from vcuda.ledger.ledger import MARGIN_SECONDS, UNSEEN_SECONDS, Ledger, Rejected, is_older
from vcuda.ledger.recount import Expired, ObservedPods, recount
from vcuda.quota.model import Usage, fits
from vcuda.quota.shortage import Shortage
from webhook.ledger.batches import SharedCall
from webhook.ledger.charging import PutOff
from webhook.ledger.reservations import SOON_SECONDS

MIN_INTERVAL_SECONDS = 0.5
"""The minimum number of seconds between the starts of two LISTs of one namespace, even if many charges are rejected."""

REST_PER_SECOND = 4.0
"""After a LIST of a namespace, the next LIST is delayed for this many times as long as the LIST took. So namespaces
whose LISTs are slow are listed less often."""

RECOUNT_SECONDS = UNSEEN_SECONDS + MARGIN_SECONDS
"""A webhook replica itself recounts a ledger if no controller has done so for this many seconds. If the ledger records
longer grace periods of pods, the replica waits for the longest period."""


@dataclass(eq=False)
class Pace:
    """Delays LISTs, so that slow LISTs are made less often."""

    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    _next: float = -math.inf

    async def pause(self, _last_batch: int) -> None:
        if (left := self._next - self.clock()) > 0:
            await self.sleep(left)

    def listed(self, started: float) -> None:
        """Record that LISTs have ended now. ``started``: the time at which they began."""
        ended = self.clock()
        self._next = max(started + MIN_INTERVAL_SECONDS, ended + (ended - started) * REST_PER_SECOND)


@dataclass(eq=False)
class FreshCount:
    """Counts the stored pods and claims of one namespace by LISTs. Callers that wait together share one LIST."""

    count: Callable[[], Awaitable[ObservedPods]]
    """A function that lists the pods and claims of the namespace consistently, and returns their charges."""
    known: Callable[[], Ledger]
    """A function that returns the newest ledger that this replica has read or written."""
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    # The result of this replica's oldest LIST after which no process has recounted the ledger.
    _first: ObservedPods | None = None
    # The time of the LIST whose result is in `_first`.
    _since: float = -math.inf
    # The time of this replica's newest LIST.
    _listed: float = -math.inf

    def __post_init__(self) -> None:
        self._pace = Pace(self.clock, self.sleep)
        self._lists = SharedCall(self._list, self.clock, self._pace.pause)

    async def judge(self, shortage: Shortage, deadline: float) -> Rejected | PutOff:
        """Return a rejection if the stored pods and claims leave no room for a charge; otherwise `PutOff`.

        The objects are counted by a LIST that begins after this call. ``shortage``: why the charge does not fit the
        ledger. The caller must have read the ledger before this call. Raises Unavailable if the LIST failed.
        """
        if (observed := await self._begun_now(deadline)) is None:
            return PutOff((shortage,), counted=False)
        # The LIST lacks deleted pods that may still run. The ledger has their charges as terminating, so add these
        # charges. Pods that are deleted after the LIST are still in it.
        terminating = shortage.usage.terminating
        usage = observed.total_usage(terminating) if shortage.of_total else observed.usage(shortage.model, terminating)
        if not fits(shortage.limit, usage.used, shortage.asked):
            return Rejected(msgspec.structs.replace(shortage, usage=usage))
        self._remember(observed)
        # A running controller soon recounts the ledger, which ends the shortage of quota. But if a pod is
        # admitted and never stored, its pending charge stays much longer, so an early retry would fail.
        soon = not shortage.rests_on_pending and self.clock() < self._since + SOON_SECONDS
        return PutOff((shortage,), soon=soon)

    def _remember(self, observed: ObservedPods) -> None:
        first, now, before = self._first, self.clock(), self._listed
        self._listed = now
        # After a restore of etcd from a backup, older counts are invalid. There are two signs of a restore. Either
        # resourceVersions have decreased, or the ledger is lost. While a ledger is lost, no charge is decided, so this
        # replica makes no LIST for more than twice `RECOUNT_SECONDS`.
        back = first and is_older(observed.resource_version, first.resource_version)
        if first is None or back or now > before + 2 * RECOUNT_SECONDS or not _is_due(first, self.known()):
            self._first, self._since = observed, now

    async def usages(self, charged: Mapping[str, Usage], deadline: float) -> Mapping[str, Usage] | None:
        """Return the usage by GPU model, counted by a LIST that begins after this call.

        ``charged``: the usage in the ledger. Its terminating charges are added, because a LIST lacks deleted pods that
        still run. Return None if no LIST ended before the deadline. Raises Unavailable if the LIST failed.
        """
        if (observed := await self._begun_now(deadline)) is None:
            return None
        models = {*charged, *observed.committed, *(observed.claims.committed if observed.claims else ())}
        return {model: observed.usage(model, charged.get(model, Usage()).terminating) for model in models}

    def recount(self, ledger: Ledger) -> Ledger:
        """Return the ledger. If no controller can be running, recount it first by a LIST of this replica.

        No controller is running if the ledger is still older than a LIST that was made `RECOUNT_SECONDS` ago.
        """
        first, now = self._first, self.clock()
        # A recent LIST must exist too. It proves that etcd was not restored from a backup since the older LIST.
        if first is None or now < self._since + RECOUNT_SECONDS or now > self._listed + SOON_SECONDS:
            return ledger
        if not _is_due(first, ledger):
            return ledger
        # The new count may have fewer pods although no watch of this replica saw a deletion. The missing charges become
        # terminating for as long as the pods may still run. Keep the old count until that time has passed.
        counted = recount(ledger, first)
        new = {key: each for key, each in counted.terminating.items() if key not in ledger.terminating}
        if now < self._since + max((each.seconds for each in new.values()), default=0) + MARGIN_SECONDS:
            return ledger
        # The grace periods of the missing pods have passed, so these pods have ended. Remove their terminating charges.
        return recount(counted, first, Expired(terminating=new.keys()))

    async def _begun_now(self, deadline: float) -> ObservedPods | None:
        observed = await self._lists.result(deadline)
        # If a newer quota ConfigMap counted the ledger, this replica's count uses outdated values of GPU resources.
        if observed and is_older(observed.config_version, self.known().config_version):
            return None
        return observed

    async def _list(self) -> ObservedPods | None:
        started = self.clock()
        try:
            # If the LIST takes too long, each caller of `result` gets None and reports the timeout.
            with contextlib.suppress(ListOverdue):
                return await self.count()
            return None
        finally:
            self._pace.listed(started)


def _is_due(observed: ObservedPods, ledger: Ledger) -> bool:
    newer = is_older(ledger.pod_resource_version, observed.resource_version)
    return newer and not observed.is_older(ledger)
