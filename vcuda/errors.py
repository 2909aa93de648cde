"""All exceptions that this project raises on purpose. Each exception is a subclass of VcudaError."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple


class Fault(NamedTuple):
    """A fault in a document or object. ``path``: the field, for example ``team-a.quota.A100.cards``; may be empty."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


MAX_FAULTS = 100
"""The maximum number of faults in one response. A pod may have thousands, and a YAML alias can repeat a fault."""


MAX_VALUE_LENGTH = 100
"""The maximum length of a value of a pod in a message, such as an annotation or the name of a variable."""

MAX_FAULT_LENGTH = 1_500
"""The maximum length of the path and of the message of a fault. The longest name of a resource occurs twice in it."""

MAX_TEXT_LENGTH = 16 * 1024
"""The maximum length of a message or warning. Clients log it, and controllers write it into Events."""


def cut(text: str, most: int = MAX_VALUE_LENGTH) -> str:
    """Return the first ``most`` characters of a text that a user wrote, with the number of the omitted characters."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most} more characters)"


def limited(faults: Sequence[Fault], path: str = "") -> tuple[Fault, ...]:
    """Return at most `MAX_FAULTS` faults. If some are omitted, add a fault at ``path`` with their number."""
    # For a rejection, kubectl prints only the faults. So the number of omitted faults must itself be a fault.
    omitted = len(faults) - MAX_FAULTS
    more = [Fault(path, f"{omitted} more faults are not listed")] if omitted > 0 else []
    return (*(Fault(*(cut(text, MAX_FAULT_LENGTH) for text in fault)) for fault in faults[:MAX_FAULTS]), *more)


class VcudaError(Exception):
    """The base class of all errors in this module."""


class BadInput(VcudaError):
    """A user's input is invalid. The message names the invalid place, and how to correct it."""


class QuotaFault(BadInput):
    """A quota document has faults. ``faults`` contains all faults, in the order of the document."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        super().__init__("; ".join(str(fault) for fault in faults))
        self.faults = faults


class BadReview(VcudaError):
    """The HTTP request to the webhook is malformed. The webhook answers with a 4xx status and makes no decision."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause in a Kubernetes Status. Programs read the constant ``reason``. People read ``message``."""

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
    """403: this process has no permission for the request, or an admission plugin rejected the request."""


class NotFound(ApiError):
    """404: the object or its namespace does not exist."""


class Conflict(ApiError):
    """409: the resourceVersion is not the newest, or the name is already used."""


class Gone(ApiError):
    """410: the resourceVersion or the continue token is too old, so etcd no longer has this version."""


# Statuses 429 and 5xx raise `Unavailable` and not `ApiError`, because the outcome of the request is not final. For
# example, a write that timed out in the API server may still be stored.
class Unavailable(VcudaError):
    """The connection failed, the request timed out, or the status was 429 or 5xx. A write may have been stored."""


class TimedOut(Unavailable):
    """The complete answer to a request did not arrive in time."""


class TooLarge(Unavailable):
    """The answer to a request is larger than the allowed maximum. ``head``: the first bytes of the answer."""

    def __init__(self, message: str, head: bytes) -> None:
        super().__init__(message)
        self.head = head


class ListOverdue(Unavailable):
    """A LIST exceeded its time limit, because the objects are too many or too large."""


class DropReason(enum.StrEnum):
    """The reasons for which the webhook drops an admission review without a decision."""

    CROWDED = "crowded"
    """Too many large admission reviews were waiting for a decision."""
    LATE = "late"
    """The deadline of the review had passed, or would have passed before the decision."""
    DISCONNECTED = "disconnected"
    """The caller, usually the API server, closed the connection before the decision."""
    SLOW = "slow"
    """The body of a large review did not arrive completely in time."""


class Dropped(Unavailable):
    """This replica drops an admission review without a decision or a charge. Another replica may decide the review."""

    def __init__(self, message: str, reason: DropReason) -> None:
        super().__init__(message)
        self.reason = reason


class WriteUnanswered(Unavailable):
    """A write was sent, but not answered. The write may have been stored, or may be stored later."""


class HeldByBudget(Unavailable):
    """A PodDisruptionBudget does not allow an eviction now (HTTP 429). ``why``: the API server's own message."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


class WatchLost(Unavailable):
    """A watch delivered an error or an unreadable event, so changes may be missing. The watcher must LIST again."""


class UnsupportedVersion(VcudaError):
    """The API server is older than the oldest supported Kubernetes version. No other request may be sent to it."""


class UnreadableLedger(VcudaError):
    """A stored ledger (record of charges) is damaged. A person must repair it: an empty ledger admits too many pods."""


class LedgerLost(VcudaError):
    """The ledger of a namespace or team was lost ``missing`` seconds ago. For ``left`` more seconds, no GPU pod is
    admitted by it. ``kind``: namespace or team."""

    def __init__(self, name: str, missing: float, left: float, kind: str = "namespace") -> None:
        super().__init__(
            f"the ledger of {kind} {name} was lost. Pods that were charged in the ledger may still be stored. "
            f"So nothing is admitted for {math.ceil(left)} s, and then the ledger is rebuilt"
        )
        self.missing = missing
        self.left = left


class UnreadableJournal(VcudaError):
    """The journal (the list of assigned cards) of a node is damaged. So no card of the node may be assigned."""


class NotPlaced(VcudaError):
    """No card was chosen for a pod, for the reason in the message. The caller may retry."""
