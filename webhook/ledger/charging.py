"""The interface of the ledgers, which record the GPU charges of namespaces: requests to charge, and decisions."""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from vcuda.ledger.ledger import MAX_PENDING, Admitted, Rejected
from vcuda.quota.model import Charge, NamespaceQuota, Team, Usage
from vcuda.quota.shortage import Shortage


class RetryLater(msgspec.Struct, frozen=True):
    """The charge was not decided, for example because too many charges are pending. The caller must retry."""

    reason: str
    """Why the charge was not decided, as a sentence without a full stop. The creator of the pod gets this text."""
    soon: bool = False
    """True if a retry within 2 s is expected to succeed."""


class PutOff(msgspec.Struct, frozen=True):
    """By the ledger, the charge exceeds a limit now, but may be within the limit later. The caller must retry."""

    shortages: tuple[Shortage, ...]
    """For each GPU model that was tried, the quota that is missing according to the ledger."""
    soon: bool = False
    """True if the missing quota is expected to be free within 2 s."""
    counted: bool = True
    """False if the stored pods and claims could not be counted before the deadline."""


Decision = Admitted | Rejected | PutOff | RetryLater

CROWDED = RetryLater(f"{MAX_PENDING} admitted pods and claims of this namespace are not seen stored yet")

TOO_MANY_NAMESPACES = RetryLater("too many namespaces have a ledger in memory")


class ChargeRequest(msgspec.Struct, frozen=True):
    """A request to charge one pod or claim to the ledger of its namespace."""

    namespace: str
    uid: str
    """The uid of the pod or claim."""
    model: str
    charge: Charge
    quota: NamespaceQuota
    deadline: float
    """The deadline for the decision, in seconds of the monotonic clock."""
    counted_since: str = ""
    """The resourceVersion of the quota ConfigMap with ``quota``. A ledger that was counted before this version may lack
    pods that were stored while the namespace had no limit."""
    dry_run: bool = False
    created: float = math.inf
    """The creationTimestamp of the pod or claim, in Unix seconds; infinity if the timestamp is unknown. A charge with
    an unknown timestamp is never admitted from a reservation."""
    grace: int = 0
    """The grace period of the pod in seconds; 0 if the period is so short that the ledger need not record it."""


class Ledgers(Protocol):
    """The ledgers of all namespaces. All calls of one instance must come from the same event loop."""

    async def charge(self, request: ChargeRequest) -> Decision:
        """Decide a charge, and record it if it is admitted. A second call for the same uid charges nothing more.

        A dry run records nothing. Raises Unavailable if the store of the ledgers does not answer. The charge may then
        be recorded or not.
        """

    # ``team``: the team of the namespace by the quota of the review. The usages then have the usage of its other
    # namespaces too. The ledger of the namespace may still name another team.

    async def usage(
        self, namespace: str, team: Team | None = None, seconds: float | None = None
    ) -> Mapping[str, Usage]:
        """Return the usage of the namespace by GPU model. Models without a charge are left out.

        Raises Unavailable if the store of the ledgers does not answer, or not within ``seconds``.
        """

    async def cached_usage(self, namespace: str, team: Team | None = None) -> Mapping[str, Usage]:
        """Return the usage by GPU model, up to some seconds old. The caller must not reject a pod by this usage."""

    async def stored_usage(
        self, namespace: str, shortages: Sequence[Shortage], charged: Mapping[str, Usage], deadline: float
    ) -> Mapping[str, Usage] | None:
        """Return the usage by GPU model: all stored pods and claims, and the terminating charges in ``charged``.

        Terminating charges belong to deleted pods that may still run. ``shortages``: why no model fits ``charged``. If
        a limit of the team causes one of them, the other namespaces are counted until it is certain whether it is real.
        A rejection may depend on this usage. Return None
        if the count does not end before the deadline. Raises Unavailable if the store does not answer.
        """

    async def close(self) -> None:
        """Write all admitted charges that are not written yet. The caller must have stopped answering reviews."""
