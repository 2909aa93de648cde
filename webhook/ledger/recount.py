"""Counts the stored pods and claims of a namespace before a refusal, because the ledger may charge deleted objects."""

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
"""The minimum of seconds between the starts of two LISTs of one namespace, even if many charges are refused."""

REST_PER_SECOND = 4.0
"""Seconds that a namespace is not listed after a LIST, per second of the LIST. So large ones are listed less often."""

SETTLE_SECONDS = UNSEEN_SECONDS + MARGIN_SECONDS
"""Seconds after which a webhook replica itself settles a ledger, that is, sets it to the count of the stored objects. A
running controller settles the ledger earlier. If the ledger records longer grace periods of pods, the replica waits for
the longest of these periods."""

SOON_SECONDS = 2.0
"""A running controller settles a ledger within these seconds. If quota is missing for longer, no retry is advised."""


@dataclass(eq=False)
class Recount:
    """Counts the stored pods and claims of one namespace by LISTs. Callers that wait at the same time share a LIST."""

    count: Callable[[], Awaitable[ObservedPods]]
    """Makes a consistent LIST of the pods and claims of the namespace, and returns their charges."""
    known: Callable[[], Ledger]
    """Returns the newest ledger that this replica has read or written."""
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    _next: float = -math.inf
    # The oldest count (LIST) that is newer than the ledger. Since this count, no process has settled the ledger.
    _first: ObservedPods | None = None
    # The time of `_first`.
    _since: float = -math.inf
    # The time of this replica's newest LIST.
    _listed: float = -math.inf

    def __post_init__(self) -> None:
        self._lists = SharedCall(self._list, self.clock, self._pause)

    async def judge(self, shortage: Shortage, deadline: float) -> Refused | PutOff:
        """Return a refusal if the stored pods and claims leave no room for a charge; otherwise return a `PutOff`.

        The objects are counted by a LIST that begins after this call. ``shortage``: why the charge does not fit the
        ledger. The caller must have read the ledger before this call. Raises Unavailable if the LIST failed.
        """
        if (observed := await self._begun_now(deadline)) is None:
            return PutOff((shortage,), counted=False)
        # The LIST lacks the pods that were deleted before it. The terminating charges belong to such pods, so these
        # charges are added. Pods that were deleted after the LIST are still part of it.
        usage = observed.usage(shortage.model, shortage.usage.terminating)
        if not fits(shortage.limit, usage.used, shortage.asked):
            return Refused(msgspec.structs.replace(shortage, usage=usage))
        self._note(observed)
        # The shortage is short if a running controller settles the ledger. The pending charge of a pod that is never
        # stored makes it longer.
        soon = not shortage.rests_on_pending and self.clock() < self._since + SOON_SECONDS
        return PutOff((shortage,), soon=soon)

    def _note(self, observed: ObservedPods) -> None:
        first, now, before = self._first, self.clock(), self._listed
        self._listed = now
        # If etcd was restored from a backup, the older counts are invalid. A restore shows in two ways:
        # resourceVersions are lower, or the ledger is lost. While the ledger is lost, nothing is decided, so this
        # replica makes no LIST for more than twice `SETTLE_SECONDS`.
        back = first and is_older(observed.resource_version, first.resource_version)
        if first is None or back or now > before + 2 * SETTLE_SECONDS or not _is_due(first, self.known()):
            self._first, self._since = observed, now

    async def usages(self, charged: Mapping[str, Usage], deadline: float) -> Mapping[str, Usage] | None:
        """Return the usage by GPU model, counted by a LIST that begins after this call.

        The terminating charges are taken from ``charged``, because a LIST does not show deleted pods.

        Return None if no LIST ended before the deadline. Raises Unavailable if the LIST failed.
        """
        if (observed := await self._begun_now(deadline)) is None:
            return None
        models = {*charged, *observed.committed, *(observed.claims.committed if observed.claims else ())}
        return {model: observed.usage(model, charged.get(model, Usage()).terminating) for model in models}

    def settle(self, ledger: Ledger) -> Ledger:
        """Return the ledger. If no controller can be running, return it settled by the LIST of this replica.

        No controller can be running if the ledger is still older than a LIST that is `SETTLE_SECONDS` old.
        """
        first, now = self._first, self.clock()
        # A recent LIST is required, because it proves that etcd has not been restored since the older count.
        if first is None or now < self._since + SETTLE_SECONDS or now > self._listed + SOON_SECONDS:
            return ledger
        if not _is_due(first, ledger):
            return ledger
        # No watch of this replica shows why a pod is missing from the count. So settling makes its charge terminating,
        # as it does for a new leader.
        counted = settle(ledger, first)
        new = {key: each for key, each in counted.terminating.items() if key not in ledger.terminating}
        if now < self._since + max((each.seconds for each in new.values()), default=0) + MARGIN_SECONDS:
            return ledger
        # More time has passed since the count than the missing pods may run. So their terminating charges have ended.
        return settle(counted, first, Expired(ended=new.keys()))

    async def _begun_now(self, deadline: float) -> ObservedPods | None:
        observed = await self._lists.result(deadline)
        # If the ledger was counted by a newer quota ConfigMap, this replica does not know the current values of units.
        if observed and is_older(observed.config_version, self.known().config_version):
            return None
        return observed

    async def _pause(self, _last_batch: int) -> None:
        if (left := self._next - self.clock()) > 0:
            await self.sleep(left)

    async def _list(self) -> ObservedPods | None:
        started = self.clock()
        try:
            # If the LIST takes too long, each caller gets None and reports the timeout.
            with contextlib.suppress(ListOverdue):
                return await self.count()
            return None
        finally:
            ended = self.clock()
            self._next = max(started + MIN_INTERVAL_SECONDS, ended + (ended - started) * REST_PER_SECOND)


def _is_due(observed: ObservedPods, ledger: Ledger) -> bool:
    newer = is_older(ledger.pod_resource_version, observed.resource_version)
    return newer and not observed.is_older(ledger)
