"""What is stored of one namespace's pods and claims, as a refusal has to know it: counted anew, not by the ledger."""

import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from vcuda.errors import ListOverdue
from vcuda.ledger.ledger import MARGIN_SECONDS, UNSEEN_SECONDS, Ledger, Refused, is_older
from vcuda.ledger.settle import Expired, ObservedPods, settle
from vcuda.quota.model import Shortage, Usage, fits
from webhook.ledger.batches import BatchCommitter, PendingCall
from webhook.ledger.ledgers import PutOff

MIN_INTERVAL_SECONDS = 0.5
"""Between the beginnings of two LISTs of a namespace, however many are refused there."""

REST_PER_SECOND = 4.0
"""After each second that a LIST took: of a large namespace the pods are counted less often."""

SETTLE_SECONDS = UNSEEN_SECONDS + MARGIN_SECONDS
"""After which a replica settles by a count that it made then, if no controller has settled by a newer view. Where the
ledger records longer grace periods it waits for as long."""

SOON_SECONDS = 2.0
"""A shortage that has been known for longer is not one that passes by itself within this time."""


class Recount:
    """Counts by consistent LISTs; all who wait when one begins share it.

    ``count`` makes one, and ``known`` returns the ledger that was read or written last.
    """

    def __init__(
        self,
        count: Callable[[], Awaitable[ObservedPods]],
        known: Callable[[], Ledger],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._count = count
        self._known = known
        self._clock = clock
        self._sleep = sleep
        self._next = -math.inf
        self._waiting = BatchCommitter[None, ObservedPods | None](self._serve, None, self._pause, clock)
        # The oldest count by which the ledger is to be settled, when it was made, and when the newest was.
        self._first: ObservedPods | None = None
        self._since = self._listed = -math.inf

    async def judge(self, shortage: Shortage, deadline: float) -> Refused | PutOff:
        """Return a refusal where a LIST that begins after this call leaves no room either; else what puts it off.

        ``shortage`` is by a ledger that was read before.

        Raises:
            Unavailable: the LIST failed.

        """
        if (observed := await self._begun_now(deadline)) is None:
            return PutOff((shortage,), counted=False)
        # What was terminating before the LIST is not in it; what has gone since is, and may be terminating too by now.
        usage = observed.usage(shortage.model, shortage.usage.terminating)
        if not fits(shortage.limit, usage.used, shortage.asked):
            return Refused(msgspec.structs.replace(shortage, usage=usage))
        self._note(observed)
        # A controller that runs settles within that time, and what is pending may be so for longer.
        soon = not shortage.rests_on_pending and self._clock() < self._since + SOON_SECONDS
        return PutOff((shortage,), soon=soon)

    def _note(self, observed: ObservedPods) -> None:
        first, now, before = self._first, self._clock(), self._listed
        self._listed = now
        # Where etcd was set back, what was counted before is no more: then versions are earlier, or nothing is decided
        # in the namespace for longer than this, as its ledger is lost.
        back = first and is_older(observed.resource_version, first.resource_version)
        if first is None or back or now > before + 2 * SETTLE_SECONDS or not _is_due(first, self._known()):
            self._first, self._since = observed, now

    async def usages(self, charged: Mapping[str, Usage], deadline: float) -> Mapping[str, Usage] | None:
        """Return what a LIST that begins after this call counts of each model, and what is terminating of ``charged``.

        None: there was no such count in time. Raises Unavailable: the LIST failed.
        """
        if (observed := await self._begun_now(deadline)) is None:
            return None
        models = {*charged, *observed.committed, *(observed.claims.committed if observed.claims else ())}
        return {model: observed.usage(model, charged.get(model, Usage()).terminating) for model in models}

    def settle(self, ledger: Ledger) -> Ledger:
        """Return the ledger settled, where it was to be for so long that no controller does; else the same one."""
        first, now = self._first, self._clock()
        # Only with a LIST made just now, that shows etcd to be at a later version still.
        if first is None or now < self._since + SETTLE_SECONDS or now > self._listed + SOON_SECONDS:
            return ledger
        if not _is_due(first, ledger):
            return ledger
        # No watch here saw the departures that the count shows: they are held, as by a leader that begins.
        counted = settle(ledger, first)
        new = {key: each for key, each in counted.terminating.items() if key not in ledger.terminating}
        if now < self._since + max((each.seconds for each in new.values()), default=0) + MARGIN_SECONDS:
            return ledger
        # That time is over by now, as the count is so old.
        return settle(counted, first, Expired(ended=new.keys()))

    async def _begun_now(self, deadline: float) -> ObservedPods | None:
        observed = await self._waiting.serve(None, deadline)
        # Who knows an older quota ConfigMap than the ledger was counted by does not know what units are worth.
        if observed and is_older(observed.config_version, self._known().config_version):
            return None
        return observed

    async def _pause(self, _last_batch: int) -> None:
        if (left := self._next - self._clock()) > 0:
            await self._sleep(left)

    async def _serve(self, calls: Sequence[PendingCall[None, ObservedPods | None]]) -> None:
        started, observed = self._clock(), None
        try:
            # Of what could not be listed in time nothing is known; whoever waits is told so.
            with contextlib.suppress(ListOverdue):
                observed = await self._count()
        finally:
            ended = self._clock()
            self._next = max(started + MIN_INTERVAL_SECONDS, ended + (ended - started) * REST_PER_SECOND)
        for call in calls:
            call.settle(observed)


def _is_due(observed: ObservedPods, ledger: Ledger) -> bool:
    newer = is_older(ledger.pod_resource_version, observed.resource_version)
    return newer and not observed.is_older(ledger)
