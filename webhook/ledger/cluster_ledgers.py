"""The ledgers of all namespaces, stored in the cluster. A ledger records the charges of one namespace."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from vcuda.errors import ListOverdue, Unavailable
from vcuda.quota.model import Usage
from webhook.ledger.ledgers import ByNamespace, ChargeRequest, Decision, RetryLater
from webhook.ledger.namespace_ledger import NamespaceLedger, Shared

CLOSING_ATTEMPTS = 5
"""A stopping webhook replica tries this many times to write each ledger. A try fails if another process wrote first."""


@dataclass(eq=False)
class ClusterLedgers(Shared):
    """Keeps one `NamespaceLedger` for each namespace in use. Implements the protocol `Ledgers` of `ledgers.py`."""

    check_namespace: Callable[[str], Awaitable[None]] | None = None
    """Raises BadReview for a namespace that does not exist; None if every review is of an existing namespace."""
    _ledgers: ByNamespace[NamespaceLedger] = field(init=False)

    def __post_init__(self) -> None:
        # This cache may drop a `NamespaceLedger` that is still writing, and make a second object for its namespace. No
        # charge is lost, because each write is a compare-and-swap: if both objects write, one of the writes fails.
        self._ledgers = ByNamespace(lambda namespace: NamespaceLedger(namespace, self), self.clock)

    async def charge(self, request: ChargeRequest) -> Decision:
        if self.check_namespace:
            await self.check_namespace(request.namespace)
        try:
            return await self._ledgers[request.namespace].charge(request)
        except ListOverdue as error:
            return RetryLater(str(error))

    async def usage(self, namespace: str, seconds: float | None = None) -> Mapping[str, Usage]:
        # A missing namespace is no error here, because a namespace may get its quota before it exists.
        try:
            async with asyncio.timeout(seconds):
                return await self._ledgers[namespace].usage()
        except TimeoutError as error:
            raise Unavailable(f"the ledger could not be read within {seconds:g} s") from error

    async def cached_usage(self, namespace: str) -> Mapping[str, Usage]:
        if self.check_namespace:
            await self.check_namespace(namespace)
        return await self._ledgers[namespace].cached_usage()

    async def stored_usage(
        self, namespace: str, charged: Mapping[str, Usage], deadline: float
    ) -> Mapping[str, Usage] | None:
        return await self._ledgers[namespace].stored_usage(charged, deadline)

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
