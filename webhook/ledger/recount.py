"""Counts the stored pods and claims of a namespace before a refusal, since the ledger may still count deleted ones."""

import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec

from vcuda.errors import ListOverdue
from vcuda.ledger.ledger import MARGIN_SECONDS, UNSEEN_SECONDS, Ledger, Refused, is_older
from vcuda.ledger.settle import Expired, ObservedPods, settle
from vcuda.quota.model import Shortage, Usage, fits
from webhook.ledger.batches import SharedCall
from webhook.ledger.ledgers import PutOff

MIN_INTERVAL_SECONDS = 0.5
"""Seconds between the starts of two LISTs of a namespace, however many charges are refused there."""

REST_PER_SECOND = 4.0
"""Seconds of rest after each second that a LIST took, so that a large namespace is listed less often."""

SETTLE_SECONDS = UNSEEN_SECONDS + MARGIN_SECONDS
"""Age in seconds at which a replica settles by its own count, if no controller has settled by a newer view. If the
ledger records longer grace periods, the replica waits for these."""

SOON_SECONDS = 2.0
"""A shortage that has lasted longer than these seconds is not expected to pass within them."""


@dataclass(eq=False)
class Recount:
    """Counts by ``count``, a consistent LIST that waiting callers share. ``known`` returns the newest known ledger."""

    count: Callable[[], Awaitable[ObservedPods]]
    known: Callable[[], Ledger]
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    _next: float = -math.inf
    # The oldest count that the ledger has not been settled by, its time, and the time of the newest count.
    _first: ObservedPods | None = None
    _since: float = -math.inf
    _listed: float = -math.inf

    def __post_init__(self) -> None:
        self._lists = SharedCall(self._list, self.clock, self._pause)

    async def judge(self, shortage: Shortage, deadline: float) -> Refused | PutOff:
        """Return a refusal if a LIST that begins after this call shows no room either; otherwise a `PutOff`.

        ``shortage``: by a ledger that was read before this call. Raises Unavailable if the LIST failed.
        """
        if (observed := await self._begun_now(deadline)) is None:
            return PutOff((shortage,), counted=False)
        # The LIST lacks the pods that were terminating before it, so their charge is added. Pods deleted since the
        # LIST are still in it.
        usage = observed.usage(shortage.model, shortage.usage.terminating)
        if not fits(shortage.limit, usage.used, shortage.asked):
            return Refused(msgspec.structs.replace(shortage, usage=usage))
        self._note(observed)
        # A running controller settles within that time. A pending charge may stay for longer.
        soon = not shortage.rests_on_pending and self.clock() < self._since + SOON_SECONDS
        return PutOff((shortage,), soon=soon)

    def _note(self, observed: ObservedPods) -> None:
        first, now, before = self._first, self.clock(), self._listed
        self._listed = now
        # After etcd was restored from a backup, the older counts are invalid. Then versions are lower, or the ledger is
        # lost, and no charge of the namespace is decided for longer than this time.
        back = first and is_older(observed.resource_version, first.resource_version)
        if first is None or back or now > before + 2 * SETTLE_SECONDS or not _is_due(first, self.known()):
            self._first, self._since = observed, now

    async def usages(self, charged: Mapping[str, Usage], deadline: float) -> Mapping[str, Usage] | None:
        """Return the usage of each model by a LIST that begins now, with the terminating part of ``charged``.

        None if no LIST ended before the deadline. Raises Unavailable if the LIST failed.
        """
        if (observed := await self._begun_now(deadline)) is None:
            return None
        models = {*charged, *observed.committed, *(observed.claims.committed if observed.claims else ())}
        return {model: observed.usage(model, charged.get(model, Usage()).terminating) for model in models}

    def settle(self, ledger: Ledger) -> Ledger:
        """Return the ledger, settled if it has been due for so long that no controller can be running."""
        first, now = self._first, self.clock()
        # A LIST of this moment is required: it proves that etcd has not been restored to an older version.
        if first is None or now < self._since + SETTLE_SECONDS or now > self._listed + SOON_SECONDS:
            return ledger
        if not _is_due(first, ledger):
            return ledger
        # No watch of this replica saw why pods are missing, so their charges stay as terminating, as for a new leader.
        counted = settle(ledger, first)
        new = {key: each for key, each in counted.terminating.items() if key not in ledger.terminating}
        if now < self._since + max((each.seconds for each in new.values()), default=0) + MARGIN_SECONDS:
            return ledger
        # The count is older than these grace periods, so the terminating charges have ended.
        return settle(counted, first, Expired(ended=new.keys()))

    async def _begun_now(self, deadline: float) -> ObservedPods | None:
        observed = await self._lists.result(deadline)
        # A replica with an older quota ConfigMap than the ledger's does not know the current values of units.
        if observed and is_older(observed.config_version, self.known().config_version):
            return None
        return observed

    async def _pause(self, _last_batch: int) -> None:
        if (left := self._next - self.clock()) > 0:
            await self.sleep(left)

    async def _list(self) -> ObservedPods | None:
        started = self.clock()
        try:
            # A LIST that took too long yields None, and each caller reports that.
            with contextlib.suppress(ListOverdue):
                return await self.count()
            return None
        finally:
            ended = self.clock()
            self._next = max(started + MIN_INTERVAL_SECONDS, ended + (ended - started) * REST_PER_SECOND)


def _is_due(observed: ObservedPods, ledger: Ledger) -> bool:
    newer = is_older(ledger.pod_resource_version, observed.resource_version)
    return newer and not observed.is_older(ledger)
