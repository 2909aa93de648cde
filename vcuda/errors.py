"""Every error this project raises on purpose; all are VcudaErrors, and each class stands below its own kind."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple


class Fault(NamedTuple):
    """One thing wrong at one place: ``path`` as in ``team-a.quota.V100.cards``, ``message`` a full sentence."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


MOST_FAULTS = 100
"""Faults that one answer names: a pod may have thousands, and an alias in YAML can repeat one without end."""


def limited(faults: Sequence[Fault], path: str = "") -> tuple[Fault, ...]:
    """Return the faults that an answer names, and as the last of them, at ``path``, how many more there are."""
    # kubectl prints the faults and not the message, so how many are left out is one of them.
    more = [Fault(path, f"and {len(faults) - MOST_FAULTS} more faults")] if len(faults) > MOST_FAULTS else []
    return (*faults[:MOST_FAULTS], *more)


class VcudaError(Exception):
    """The root of all errors below; catch it to catch them all."""


# `BadInput` is a mistake of a person: it ends a command, and says what to write instead. `Unavailable` is a failure on
# the way, and is retried.
class BadInput(VcudaError):
    """Something a person wrote cannot be read; the message says where and what to write instead."""


class QuotaFault(BadInput):
    """A quota document with faults: all of them, in the order of the document."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        super().__init__("; ".join(str(fault) for fault in faults))
        self.faults = faults


class BadReview(VcudaError):
    """The request itself is wrong, not the pod in it: answered with an HTTP 4xx, never with a verdict."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Cause:
    """One of the causes that a Status may have; ``reason`` is a word that programs may go by."""

    reason: str = ""
    message: str = ""


class ApiError(VcudaError):
    """The API server answered ``request``, a method and a path, with this HTTP status, message and causes."""

    def __init__(self, status: int, message: str, causes: tuple[Cause, ...] = (), request: str = "") -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.status = status
        self.message = message
        self.causes = causes
        self.request = request

    def has_cause(self, reason: str) -> bool:
        return any(cause.reason == reason for cause in self.causes)


class Forbidden(ApiError):
    """403: we have no right to what was asked, or an admission plugin refused it."""


class NotFound(ApiError):
    """404: the object or its namespace does not exist."""


class Conflict(ApiError):
    """409: the resourceVersion is not the newest, or the name is taken."""


class Gone(ApiError):
    """410: the resourceVersion or continue token is older than what etcd keeps."""


# 429 is here and not an ApiError: it says nothing of the request, and a write that timed out inside the API server may
# still land.
class Unavailable(VcudaError):
    """No usable answer: refused, reset, timed out, 429 or 5xx. Whether a write landed is not known."""


class TimedOut(Unavailable):
    """No answer, or not all of it, came in time."""


class TooLarge(Unavailable):
    """The answer has more bytes than are read; ``head`` is how it begins."""

    def __init__(self, message: str, head: bytes) -> None:
        super().__init__(message)
        self.head = head


class ListOverdue(Unavailable):
    """A LIST took longer than it may: there are too many objects, or they are too large."""


class DropReason(enum.StrEnum):
    """Why a review was not decided."""

    CROWDED = "crowded"
    """Too many large reviews waited."""
    LATE = "late"
    """Its deadline had passed, or would have before it was decided."""
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
    """A write was sent, and nobody said what became of it: it may have landed, or may land yet."""


class HeldByBudget(Unavailable):
    """429 to an eviction: a PodDisruptionBudget does not allow it now; ``why`` is the API server's own sentence."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


class WatchLost(Unavailable):
    """A watch reported a fault of the API server, or an event that cannot be read. A list shows the missed changes."""


class UnsupportedVersion(VcudaError):
    """The API server is older than the oldest Kubernetes that this release supports; nothing may be sent to it."""


class UnreadableLedger(VcudaError):
    """A stored ledger is damaged. Counting from nothing could admit too much, so a person has to look."""


class LedgerLost(VcudaError):
    """A ledger was lost ``missing`` seconds ago. Its pods may be stored for ``left`` seconds; then it is counted."""

    def __init__(self, namespace: str, missing: float, left: float) -> None:
        super().__init__(
            f"the ledger of namespace {namespace} was lost; pods that were charged in it may still be stored, "
            f"so that nothing is admitted for {math.ceil(left)} s; then it is rebuilt"
        )
        self.missing = missing
        self.left = left


class UnreadableJournal(VcudaError):
    """The journal of a node is damaged. Its assigned cards are not known, so no card may be assigned."""


class NotPlaced(VcudaError):
    """No card was chosen for a pod. The message says why; the call may be retried."""
