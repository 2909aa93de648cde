"""The ledgers of a cluster, which all replicas of the webhook share."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from vcuda.errors import ListOverdue
from vcuda.quota.model import Usage
from webhook.ledger.ledgers import ByNamespace, ChargeRequest, Decision, RetryLater
from webhook.ledger.namespace_ledger import NamespaceLedger, Shared

CLOSING_ATTEMPTS = 5
"""How often a stopping replica attempts to write each ledger. An attempt fails if another process writes first."""


@dataclass(eq=False)
class ClusterLedgers(Shared):
    """One `NamespaceLedger` for each namespace. This class implements `webhook.ledger.ledgers.Ledgers`."""

    _ledgers: "ByNamespace[NamespaceLedger]" = field(init=False)

    def __post_init__(self) -> None:
        # The cache may drop a `NamespaceLedger` that is still writing, and make a second one for the same namespace. No
        # charge is lost: if both objects write, the compare-and-swap of one of them fails.
        self._ledgers = ByNamespace(lambda namespace: NamespaceLedger(namespace, self), self.clock)

    async def charge(self, request: ChargeRequest) -> Decision:
        """Decide a charge. Record an admitted charge in the ledger, once per uid. A dry run records nothing."""
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
        """Write the charges that were admitted from reservations, and the next reservations.

        A ledger whose write fails is written again later.
        """
        await asyncio.gather(*(each.flush() for each in self._ledgers.values()))

    async def close(self) -> None:
        """Write the charges that were admitted from reservations, and release the reservations.

        If every attempt fails, the leader later removes the reservation, and counts the admitted pods by a LIST.
        """
        self.leaving = True
        for _ in range(CLOSING_ATTEMPTS):
            await self.flush()
