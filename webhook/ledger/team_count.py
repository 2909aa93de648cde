"""Counts the stored pods and claims of a team before a rejection: unused quota may be allotted to its namespaces."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from vcuda.errors import VcudaError
from vcuda.ledger.ledger import FULL, Ledger, Rejected, charges_by_model, is_older
from vcuda.ledger.recount import ObservedPods
from vcuda.ledger.team import Allotted, needed
from vcuda.quota.model import Charge, Usage, total
from vcuda.quota.shortage import Shortage
from webhook.ledger.batches import BatchCommitter, PendingCall
from webhook.ledger.charging import PutOff
from webhook.ledger.fresh_count import Pace
from webhook.ledger.shared import READ_TIMEOUT_SECONDS, Shared

MEMBER_SECONDS = 2.0
"""If the LIST of a namespace takes longer than this many seconds, its ledger tells what it uses."""

MAX_LISTS = 4
"""The most namespaces of a team that are listed at the same time."""

Used = Mapping[str, Allotted]
"""By namespace and model: the charges of the stored pods and claims, and of the deleted pods that may still run."""


class _Question(NamedTuple):
    namespace: str
    shortages: Sequence[Shortage]
    """The question is whether all of these are real. Each is a shortage of the team's quota."""

    def judged(self, shortage: Shortage, used: Used) -> Shortage:
        """Return the shortage with the charges in ``used``."""
        amounts = {namespace: _amount(shortage, each) for namespace, each in used.items()}
        own = amounts.pop(self.namespace, Charge())
        usage = Usage(own, terminating=shortage.usage.terminating, others=total(amounts.values()))
        return replace(shortage, usage=usage)

    def is_short(self, used: Used) -> bool:
        return all(self.judged(each, used).missing for each in self.shortages)


def _amount(shortage: Shortage, charges: Allotted) -> Charge:
    return total(charges.values()) if shortage.of_total else charges.get(shortage.model, Charge())


class TeamCount:
    """Counts what the namespaces of one team use. Callers that wait together share one count."""

    def __init__(self, team: str, shared: Shared) -> None:
        self._team = team
        self._shared = shared
        self._pace = Pace(shared.clock, shared.sleep)
        self._counts = BatchCommitter[_Question, Used | None](self._count, None, self._pace.pause, shared.clock)

    async def judge(self, namespace: str, shortage: Shortage, deadline: float) -> Rejected | PutOff:
        """Return a rejection if the stored pods and claims leave no room for a charge; otherwise `PutOff`.

        The count begins after this call. ``shortage``: why the charge does not fit. Raises Unavailable if the ledgers
        of the team could not be listed.
        """
        question = _Question(namespace, (shortage,))
        if (used := await self._counts.serve(question, deadline)) is None:
            return PutOff((shortage,), counted=False)
        judged = question.judged(shortage, used)
        return Rejected(judged) if judged.missing else PutOff((shortage,))

    async def others(self, namespace: str, shortages: Sequence[Shortage], deadline: float) -> Allotted | None:
        """Return what the other namespaces use, by model; None if the count does not end before the deadline.

        The count ends when it is certain whether all of the shortages are real.
        """
        if (used := await self._counts.serve(_Question(namespace, shortages), deadline)) is None:
            return None
        return charges_by_model(each for name, own in used.items() if name != namespace for each in own.items())

    async def _count(self, calls: Sequence[PendingCall[_Question, Used | None]]) -> None:
        started = self._shared.clock()
        try:
            version, ledgers = await self._shared.listed(self._shared.teams.members, self._team, READ_TIMEOUT_SECONDS)
            in_use = {name: needed(replace(each, reserved={})) for name, each in ledgers.items()}
            # If the charges in the ledgers leave room, nothing needs to be listed: only unused quota is missing.
            open_ = [call for call in calls if call.item.is_short(in_use)]
            for call in calls:
                if call not in open_:
                    call.resolve(in_use)
            by_ledger = {name: charges_by_model(_stored(each)) for name, each in ledgers.items()}
            await self._list(version, ledgers, by_ledger, open_)
        finally:
            self._pace.listed(started)

    async def _list(
        self,
        version: str,
        ledgers: Mapping[str, Ledger],
        by_ledger: Used,
        calls: Sequence[PendingCall[_Question, Used | None]],
    ) -> None:
        """List the namespaces, those with the largest charges first, until the answer to every call is certain."""
        counted: dict[str, Allotted] = {}
        left = iter(sorted(ledgers, key=lambda name: total(by_ledger[name].values()).cores, reverse=True))

        async def work() -> None:
            for name in left:
                if all(call.answer.done() for call in calls):
                    return
                used = await self._used(name, version, ledgers[name])
                counted[name] = by_ledger[name] if used is None else used
                for call in calls:
                    if call.item.is_short(counted):
                        call.resolve({**by_ledger, **counted})

        await asyncio.gather(*(work() for _ in range(MAX_LISTS)))
        for call in calls:
            call.resolve(counted)

    async def _used(self, namespace: str, version: str, ledger: Ledger) -> Allotted | None:
        """Return what a namespace uses, counted at ``version``; None if it could not be counted in time."""
        # All namespaces are counted at one version. Otherwise a pod that is replaced by a pod in another namespace
        # could count twice.
        try:
            async with asyncio.timeout(MEMBER_SECONDS):
                count = self._shared.store.count_pods
                observed = await self._shared.listed(count, namespace, READ_TIMEOUT_SECONDS, version)
        except (VcudaError, TimeoutError):
            return None
        # If a newer quota ConfigMap counted the ledger, this replica's count uses outdated values of GPU resources.
        if is_older(observed.config_version, ledger.config_version):
            return None
        return charges_by_model([*_counted(observed), *_terminating(ledger)])


def _stored(ledger: Ledger) -> Iterator[tuple[str, Charge]]:
    yield from ledger.committed.items()
    yield from ledger.claimed.items()
    yield from _terminating(ledger)


def _counted(observed: ObservedPods) -> Iterator[tuple[str, Charge]]:
    yield from observed.committed.items()
    yield from observed.claims.committed.items() if observed.claims else ()


def _terminating(ledger: Ledger) -> Iterator[tuple[str, Charge]]:
    return ((each.model, each.charge) for key, each in ledger.terminating.items() if FULL not in key)
