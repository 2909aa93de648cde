"""The ledgers of a cluster, which all replicas share."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from vcuda.errors import ListOverdue
from vcuda.quota.model import Usage
from webhook.ledger.ledgers import ByNamespace, ChargeRequest, Decision, RetryLater
from webhook.ledger.namespace_ledger import NamespaceLedger, Shared

CLOSING_ATTEMPTS = 5
"""How often the last write of a replica that stops is tried when others write first."""


@dataclass(eq=False)
class ClusterLedgers(Shared):
    """One `NamespaceLedger` for each namespace; the interface is `webhook.ledger.ledgers.Ledgers`."""

    _ledgers: "ByNamespace[NamespaceLedger]" = field(init=False)

    def __post_init__(self) -> None:
        # One that goes while a write is under way, and is made again, loses at most a compare-and-swap to the other.
        self._ledgers = ByNamespace(lambda namespace: NamespaceLedger(namespace, self), self.clock)

    async def charge(self, request: ChargeRequest) -> Decision:
        """Decide a charge and keep it, once per uid; a dry run keeps nothing."""
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
        """Write down what was granted, and what is reserved from now on; what cannot be written now is so later."""
        await asyncio.gather(*(each.flush() for each in self._ledgers.values()))

    async def close(self) -> None:
        """Write down what was granted, and give back what is reserved; what cannot be is counted after its time."""
        self.leaving = True
        for _ in range(CLOSING_ATTEMPTS):
            await self.flush()
