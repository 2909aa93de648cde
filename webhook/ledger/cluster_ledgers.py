"""The ledgers that are stored in a cluster, for all webhook replicas. A ledger records the charges of one namespace."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from vcuda.errors import ListOverdue
from vcuda.quota.model import Usage
from webhook.ledger.ledgers import ByNamespace, ChargeRequest, Decision, RetryLater
from webhook.ledger.namespace_ledger import NamespaceLedger, Shared

CLOSING_ATTEMPTS = 5
"""The number of times that a stopping webhook replica tries to write each ledger. A write fails if another process has
written the ledger first."""


@dataclass(eq=False)
class ClusterLedgers(Shared):
    """Keeps one `NamespaceLedger` for each namespace in use. Implements the protocol `Ledgers` of `ledgers.py`."""

    _ledgers: ByNamespace[NamespaceLedger] = field(init=False)

    def __post_init__(self) -> None:
        # This cache may drop a `NamespaceLedger` that is still writing, and make a second one for the same namespace.
        # No charge is lost, because the writes are compare-and-swap: if both objects write, one of the writes fails.
        self._ledgers = ByNamespace(lambda namespace: NamespaceLedger(namespace, self), self.clock)

    async def charge(self, request: ChargeRequest) -> Decision:
        """Decide a charge. The ledger records an admitted charge once for each uid. A dry run records nothing."""
        try:
            return await self._ledgers[request.namespace].charge(request)
        except ListOverdue as error:
            return RetryLater(str(error))

    async def usage(self, namespace: str) -> Mapping[str, Usage]:
        return await self._ledgers[namespace].usage()

    async def cached_usage(self, namespace: str) -> Mapping[str, Usage]:
        return await self._ledgers[namespace].cached_usage()

    async def stored_usage(
        self, namespace: str, charged: Mapping[str, Usage], deadline: float
    ) -> Mapping[str, Usage] | None:
        return await self._ledgers[namespace].stored_usage(charged, deadline)

    async def flush(self) -> None:
        """Write to each ledger the charges that were admitted from a reservation, and the next reservation.

        A write that fails is repeated at the next flush.
        """
        await asyncio.gather(*(each.flush() for each in self._ledgers.values()))

    async def close(self) -> None:
        """Write the charges that were admitted from reservations, and release the reservations of this replica.

        If every write of a ledger fails, the leading controller later counts the pods by a LIST, and removes the
        reservation from the ledger.
        """
        self.leaving = True
        for _ in range(CLOSING_ATTEMPTS):
            await self.flush()
