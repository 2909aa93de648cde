"""Where charges are kept: the interface that decisions use, and the store in memory for the embedded mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from vcuda.ledger.ledger import MOST_PENDING, Admitted, Ledger, Pending, Refused, admit
from vcuda.quota.model import Charge, Mode, NamespaceQuota, Usage


class ChargeRequest(msgspec.Struct, frozen=True):
    """One pod's charge to be decided; ``uid`` is the pod's.

    ``deadline`` is in seconds of the monotonic clock. ``counted_since`` is the version of the quota: a ledger whose
    pods were counted before it may miss some that were stored while there was no limit.
    """

    namespace: str
    uid: str
    model: str
    charge: Charge
    quota: NamespaceQuota
    deadline: float
    counted_since: str = ""
    dry_run: bool = False

    def decide(self, ledger: Ledger) -> Decision:
        """Decide against one version of the namespace's ledger; nothing is written."""
        asked = Pending(self.model, self.charge)
        decision = admit(ledger, self.uid, asked, self.quota, enforced=self.quota.mode is Mode.ENFORCE)
        if isinstance(decision, Admitted | Refused):
            return decision
        return RetryLater("too many pods of this namespace are being created at once")


class RetryLater(msgspec.Struct, frozen=True):
    """Not decided: the caller comes again in a second. ``reason`` is a sentence without its full stop."""

    reason: str


Decision = Admitted | Refused | RetryLater


class Ledgers(Protocol):
    """The ledgers of all namespaces."""

    async def charge(self, request: ChargeRequest) -> Decision:
        """Decide a charge and keep it, once per uid; a dry run keeps nothing.

        Raises:
            Unavailable: the store did not answer; whether the charge is kept is not known.

        """

    async def usage(self, namespace: str) -> Mapping[str, Usage]:
        """Return what is charged to each model; a model without a charge is left out.

        Raises:
            Unavailable: the store did not answer.

        """

    async def cached_usage(self, namespace: str) -> Mapping[str, Usage]:
        """Return the same as of a moment ago: good enough to prefer a model by, never to refuse by."""


class MemoryLedgers:
    """Ledgers in this process alone: for the embedded mode, the demo and `check`."""

    def __init__(self) -> None:
        self._ledgers: dict[str, Ledger] = {}

    async def charge(self, request: ChargeRequest) -> Decision:
        """Decide a charge and keep it, once per uid; a dry run keeps nothing."""
        # No lock: nothing is awaited between reading the ledger and keeping it.
        decision = request.decide(self._ledgers.get(request.namespace, Ledger()))
        if isinstance(decision, Admitted) and not request.dry_run:
            self._ledgers[request.namespace] = _with_room(decision.ledger)
        return decision

    async def usage(self, namespace: str) -> Mapping[str, Usage]:
        """Return what is charged to each model."""
        return self._ledgers.get(namespace, Ledger()).usages()

    async def cached_usage(self, namespace: str) -> Mapping[str, Usage]:
        """Return what is charged to each model."""
        return await self.usage(namespace)


def _with_room(ledger: Ledger) -> Ledger:
    """Return a ledger that is not crowded: nobody sees pods stored here, so the oldest counts as committed in time."""
    if len(ledger.pending) < MOST_PENDING:
        return ledger
    uid, oldest = next(iter(ledger.pending.items()))
    committed = {**ledger.committed, oldest.model: ledger.committed.get(oldest.model, Charge()) + oldest.charge}
    pending = {other: entry for other, entry in ledger.pending.items() if other != uid}
    return msgspec.structs.replace(ledger, committed=committed, pending=pending)
