"""All errors that this project raises on purpose. Each is a VcudaError, and a subclass of a more general error."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple


class Fault(NamedTuple):
    """One fault at one place. ``path``: the place, as in ``team-a.quota.V100.cards``. ``message``: a full sentence."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


MOST_FAULTS = 100
"""The most faults that one answer names. A pod may have thousands, and a YAML alias can repeat a fault without end."""


def limited(faults: Sequence[Fault], path: str = "") -> tuple[Fault, ...]:
    """Return the faults that an answer names. If some are left out, the last fault, at ``path``, has their number."""
    # kubectl prints the faults and not the message, so the number of faults that are left out is a fault too.
    more = [Fault(path, f"and {len(faults) - MOST_FAULTS} more faults")] if len(faults) > MOST_FAULTS else []
    return (*faults[:MOST_FAULTS], *more)


class VcudaError(Exception):
    """The root of all errors in this module."""


# `BadInput` is a mistake of a person. It ends a command, and its message has the correction. `Unavailable` is a failure
# on the way to the API server, and is retried.
class BadInput(VcudaError):
    """The input of a person cannot be read. The message has the place and the correction."""


class QuotaFault(BadInput):
    """A quota document has faults. ``faults`` has all of them, in the order of the document."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        super().__init__("; ".join(str(fault) for fault in faults))
        self.faults = faults


class BadReview(VcudaError):
    """The request to the webhook is malformed, and not the pod in it. The answer is an HTTP 4xx without a verdict."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause in a Status. ``reason`` is a word that programs may compare."""

    reason: str = ""
    message: str = ""


class ApiError(VcudaError):
    """The API server answered ``request`` (a method and a path) with this HTTP status, message and causes."""

    def __init__(self, status: int, message: str, causes: tuple[Cause, ...] = (), request: str = "") -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.status = status
        self.message = message
        self.causes = causes
        self.request = request

    def has_cause(self, reason: str) -> bool:
        return any(cause.reason == reason for cause in self.causes)


class Forbidden(ApiError):
    """403: this process has no right to make the request, or an admission plugin refused the request."""


class NotFound(ApiError):
    """404: the object or its namespace does not exist."""


class Conflict(ApiError):
    """409: the resourceVersion is not the newest, or the name is already used."""


class Gone(ApiError):
    """410: the resourceVersion or continue token is older than the versions that etcd keeps."""


# 429 raises this error and not ApiError. It does not judge the request. A write that timed out in the API server may be
# stored.
class Unavailable(VcudaError):
    """No usable answer: refused, reset, timed out, 429 or 5xx. It is unknown whether a write was stored."""


class TimedOut(Unavailable):
    """The answer did not arrive, or did not arrive completely, in time."""


class TooLarge(Unavailable):
    """The answer has more bytes than are read. ``head``: its first bytes."""

    def __init__(self, message: str, head: bytes) -> None:
        super().__init__(message)
        self.head = head


class ListOverdue(Unavailable):
    """A LIST took longer than it may, because there are too many objects, or they are too large."""


class DropReason(enum.StrEnum):
    """The reasons why a review is not decided."""

    CROWDED = "crowded"
    """Too many large reviews waited."""
    LATE = "late"
    """The deadline of the review had passed, or would have passed before the decision."""
    DISCONNECTED = "disconnected"
    """The caller closed the connection."""
    SLOW = "slow"
    """The rest of a large body did not arrive in time."""


class Dropped(Unavailable):
    """This replica does not decide the review. It has charged nothing, so another replica may decide it."""

    def __init__(self, message: str, reason: DropReason) -> None:
        super().__init__(message)
        self.reason = reason


class WriteUnanswered(Unavailable):
    """A write was sent, and its outcome is unknown. It may have been stored, or may be stored later."""


class HeldByBudget(Unavailable):
    """429 to an eviction that a PodDisruptionBudget does not allow now. ``why``: the API server's own message."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


class WatchLost(Unavailable):
    """A watch reported a fault of the API server, or an unreadable event. A new list shows the missed changes."""


class UnsupportedVersion(VcudaError):
    """The API server is older than the oldest Kubernetes that this release supports. No request may be sent to it."""


class UnreadableLedger(VcudaError):
    """A stored ledger is damaged. An empty ledger could admit too much, so a person must repair it."""


class LedgerLost(VcudaError):
    """A ledger was lost ``missing`` seconds ago. Its pods may be stored for ``left`` more; then it is rebuilt."""

    def __init__(self, namespace: str, missing: float, left: float) -> None:
        super().__init__(
            f"the ledger of namespace {namespace} was lost; pods that were charged in it may still be stored, "
            f"so that nothing is admitted for {math.ceil(left)} s; then it is rebuilt"
        )
        self.missing = missing
        self.left = left


class UnreadableJournal(VcudaError):
    """The journal of a node is damaged. The assigned cards of the node are unknown, so no card may be assigned."""


class NotPlaced(VcudaError):
    """No card was chosen for a pod. The message has the reason. The caller may retry."""
