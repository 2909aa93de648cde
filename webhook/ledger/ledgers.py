"""The ledgers of all namespaces, in the cluster or in the memory of a process. Each has one namespace's charges."""

import asyncio
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from vcuda.errors import ListOverdue, Unavailable
from vcuda.ledger.ledger import MAX_PENDING, Admitted, Ledger, charges_by_model
from vcuda.quota.membership import NO_MEMBERS, Members
from vcuda.quota.model import Charge, Team, Usage
from vcuda.quota.shortage import Shortage
from webhook.caches import MAX_KNOWN_NAMESPACES, NamespaceCache
from webhook.ledger.batches import decide
from webhook.ledger.charging import TOO_MANY_NAMESPACES, ChargeRequest, Decision, RetryLater
from webhook.ledger.namespace_ledger import NamespaceLedger
from webhook.ledger.shared import Shared
from webhook.ledger.team_account import TeamAccount, beside_others

CLOSING_ATTEMPTS = 5
"""A stopping webhook replica tries this many times to write each ledger. A try fails if another process wrote first."""


@dataclass(eq=False)
class ClusterLedgers(Shared):
    """Keeps one `NamespaceLedger` for each namespace in use. Implements the protocol `Ledgers` of `charging.py`."""

    check_namespace: Callable[[str], Awaitable[None]] | None = None
    """A function that raises BadReview if the namespace does not exist. None if every namespace in a review exists."""
    _ledgers: NamespaceCache[NamespaceLedger] = field(init=False)
    _accounts: NamespaceCache[TeamAccount] = field(init=False)

    def __post_init__(self) -> None:
        # This cache may drop a `NamespaceLedger` that is still writing, and make a second object for its namespace. No
        # charge is lost, because each write is a compare-and-swap: if both objects write, one of the writes fails.
        self._accounts = NamespaceCache(lambda team: TeamAccount(team, self), self.clock)
        team_account = self._accounts.__getitem__
        self._ledgers = NamespaceCache(lambda namespace: NamespaceLedger(namespace, self, team_account), self.clock)

    async def charge(self, request: ChargeRequest) -> Decision:
        if self.check_namespace:
            await self.check_namespace(request.namespace)
        try:
            return await self._ledgers[request.namespace].charge(request)
        except ListOverdue as error:
            return RetryLater(str(error))

    async def usage(
        self, namespace: str, team: Team | None = None, seconds: float | None = None
    ) -> Mapping[str, Usage]:
        # A missing namespace is no error here, because a namespace may get its quota before it exists.
        try:
            async with asyncio.timeout(seconds):
                return await self._ledgers[namespace].usage(team)
        except TimeoutError as error:
            raise Unavailable(f"the ledger could not be read within {seconds:g} s") from error

    async def cached_usage(self, namespace: str, team: Team | None = None) -> Mapping[str, Usage]:
        if self.check_namespace:
            await self.check_namespace(namespace)
        return await self._ledgers[namespace].cached_usage(team)

    async def stored_usage(
        self, namespace: str, shortages: Sequence[Shortage], charged: Mapping[str, Usage], deadline: float
    ) -> Mapping[str, Usage] | None:
        return await self._ledgers[namespace].stored_usage(shortages, charged, deadline)

    async def flush(self) -> None:
        """Write to each ledger the charges that this replica admitted without a write, and its next reservation.

        A failed write is repeated at the next flush.
        """
        await asyncio.gather(*(each.flush() for each in self._ledgers.values()))

    async def close(self) -> None:
        """Write to each ledger the charges that this replica admitted without a write, and release its reservation.

        If every write of a ledger fails, the leader of the controller later lists the pods and removes the reservation.
        """
        self.leaving = True
        for _ in range(CLOSING_ATTEMPTS):
            await self.flush()


class MemoryLedgers:
    """Ledgers in the memory of this process, for `serve --standalone`, the demo and the command `check`."""

    def __init__(
        self,
        committed: Mapping[str, Mapping[str, Charge]] = types.MappingProxyType({}),
        members: Members = NO_MEMBERS,
    ) -> None:
        """Keep ledgers with the committed charges by namespace and model. ``members``: the members of all teams."""
        self._ledgers = {namespace: Ledger(committed=taken) for namespace, taken in committed.items()}
        self._members = members

    async def charge(self, request: ChargeRequest) -> Decision:
        # No lock is needed, because this coroutine awaits nothing between reading and replacing the ledger.
        if request.namespace not in self._ledgers and len(self._ledgers) >= MAX_KNOWN_NAMESPACES:
            return TOO_MANY_NAMESPACES
        others = self._of_others(request.namespace)
        decision = decide(self._ledgers.get(request.namespace, Ledger()), request, others)
        if isinstance(decision, Admitted) and not request.dry_run:
            self._ledgers[request.namespace] = _oldest_committed(decision.ledger)
        return decision

    async def usage(
        self, namespace: str, _team: Team | None = None, _seconds: float | None = None
    ) -> Mapping[str, Usage]:
        return beside_others(self._ledgers.get(namespace, Ledger()).usages(), self._of_others(namespace) or {})

    def _of_others(self, namespace: str) -> Mapping[str, Charge] | None:
        """Return the charges of the other namespaces of the team by model; None if the namespace is in no team."""
        team = self._members.team_of(namespace)
        if team is None:
            return None
        names = (other for other in self._ledgers if other != namespace and self._members.team_of(other) == team)
        charges = ((model, usage.used) for name in names for model, usage in self._ledgers[name].usages().items())
        return charges_by_model(charges)

    cached_usage = usage

    async def stored_usage(
        self, _namespace: str, _shortages: Sequence[Shortage], charged: Mapping[str, Usage], _deadline: float
    ) -> Mapping[str, Usage] | None:
        """Return ``charged``, because ledgers in memory have no stored pods and claims that could be counted."""
        return charged

    async def close(self) -> None:
        """Do nothing, because ledgers in memory are never written to a store."""


def _oldest_committed(ledger: Ledger) -> Ledger:
    # On a cluster, the controller moves the charges of stored pods from `pending` to `committed`. No controller does so
    # for ledgers in memory. So if `pending` is full, move the oldest charge to make room for a new charge.
    if len(ledger.pending) < MAX_PENDING:
        return ledger
    uid, oldest = next(iter(ledger.pending.items()))
    committed = {**ledger.committed, oldest.model: ledger.committed.get(oldest.model, Charge()) + oldest.charge}
    pending = {other: entry for other, entry in ledger.pending.items() if other != uid}
    return msgspec.structs.replace(ledger, committed=committed, pending=pending)
