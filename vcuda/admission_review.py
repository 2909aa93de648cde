"""AdmissionReview v1: the request and the response of an admission webhook, and the deadline for the decision.

The source of the fields is k8s.io/api ``admission/v1``, described at
https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/.
"""

import base64
import enum
import math
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from vcuda.errors import MAX_TEXT_LENGTH, BadReview, Dropped, DropReason, Fault, VcudaError, cut
from vcuda.k8s_types import UNDECODABLE, Check, Decoder, K8sStruct, Operation, no_check

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"


class GroupVersionKind(K8sStruct, frozen=True, gc=False):
    """The kind of the object under review."""

    group: str = ""
    version: str = ""
    kind: str = ""


class UserInfo(K8sStruct, frozen=True, gc=False):
    """The user who sent the request, as authenticated by the API server. A tenant cannot forge these fields."""

    username: str = ""
    groups: tuple[str, ...] | None = None


class AdmissionRequest(K8sStruct, frozen=True, gc=False):
    """One operation on an object under review. ``namespace`` is set even if the object's metadata have no namespace."""

    uid: str
    kind: GroupVersionKind = GroupVersionKind()
    sub_resource: str = ""
    name: str = ""
    namespace: str = ""
    operation: str = ""
    user_info: UserInfo = UserInfo()
    object: msgspec.Raw = msgspec.Raw(b"null")
    old_object: msgspec.Raw = msgspec.Raw(b"null")
    """The object before an update or a deletion."""
    dry_run: bool | None = None


class AdmissionReview(K8sStruct, frozen=True, gc=False):
    """The body that the API server sends to a webhook. It contains one request."""

    api_version: str = ""
    kind: str = ""
    request: AdmissionRequest | None = None


MAX_REPAIRED = 2**18
"""The maximum size in bytes of a review with values that are nested too deep to be decoded. The removal of such values
takes longer than the decision. Claims can have such values in their ``parameters``, but useful claims have none."""

TOO_DEEP = (
    f"the admission review of this object has more than {MAX_REPAIRED} bytes ({MAX_REPAIRED // 2**10} KiB), "
    "and has values that cannot be decoded, for example values nested a thousand levels deep. "
    "Make the object smaller, or its values less deep"
)

_DECODER = Decoder(AdmissionReview, MAX_REPAIRED)


def read_review(body: bytes, check: Check = no_check) -> AdmissionRequest:
    """Return the request in a review. Raises BadReview if the body is not an AdmissionReview v1 with a request."""
    try:
        review = _DECODER.decode(body, check)
    except UNDECODABLE as error:
        if len(body) > MAX_REPAIRED and not isinstance(error, msgspec.ValidationError):
            raise BadReview(TOO_DEEP, HTTPStatus.REQUEST_ENTITY_TOO_LARGE) from error
        raise BadReview(f"the body is not an AdmissionReview in JSON: {error}") from error
    if review.kind != KIND or review.api_version != API_VERSION:
        got = f"apiVersion {review.api_version!r} and kind {review.kind!r}"
        hint = "The webhook configuration must have admissionReviewVersions: [v1]"
        raise BadReview(f"the body must be an {KIND} of {API_VERSION}; got {got}. {hint}")
    if review.request is None:
        raise BadReview(f"the {KIND} has no request")
    return review.request


class TooManySteps(VcudaError):
    """The decision about this review takes too long for the event loop. Another thread must decide the review."""


class ReviewDeadline:
    """The deadline of an admission review, and whether the caller still waits. Threads may share this object.

    ``steps``: how many steps of work this thread may still do for the decision.
    """

    def __init__(self, end: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self.end = end
        self.charging = False
        self.steps: float = math.inf
        self._clock = clock
        self._abandoned = False

    @classmethod
    def after(cls, seconds: float) -> "ReviewDeadline":
        return cls(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        return self.end - self._clock()

    def abandon(self) -> None:
        self._abandoned = True

    def keep(self) -> None:
        """Record that the charge of this review may be written from now on. After this call, `check` never raises."""
        self.charging = True

    def check(self, steps: int = 0, /) -> None:
        """Raise Dropped if the deadline has passed or the caller has disconnected, but never after a call of `keep`.

        Long work on a review must call this method again and again, so that the work stops when nobody waits for the
        answer. Before nested loops, ``steps`` must be the number of their steps. Raises TooManySteps if the steps of a
        review are more than ``self.steps``.
        """
        if steps and not self.charging:
            self.steps -= steps
            if self.steps < 0:
                raise TooManySteps
        # The usual case comes first, because a review of a large pod calls this method tens of thousands of times.
        if self.charging or (not self._abandoned and self._clock() < self.end):
            return
        if self._abandoned:
            raise Dropped("the caller of this review has disconnected", DropReason.DISCONNECTED)
        raise Dropped("the deadline of this review has passed", DropReason.LATE)


class Outcome(enum.StrEnum):
    """The decision about one request. docs/reference.md explains each."""

    IGNORED = "ignored"
    UNLIMITED = "unlimited"
    SCHEDULER = "scheduler"
    CLAIMS = "claims"
    TEMPLATE = "template"
    MIRROR = "mirror"
    PINNED = "pinned"
    CHARGED = "charged"
    OVER_QUOTA_ALLOWED = "over-quota-allowed"
    UNPINNED = "unpinned"
    OVER_QUOTA = "over-quota"
    OVER_QUOTA_RESERVED = "over-quota-reserved"
    OVER_QUOTA_PENDING = "over-quota-pending"
    OVER_QUOTA_NOT_RECOUNTED = "over-quota-not-recounted"
    OVER_QUOTA_UNCOUNTED = "over-quota-uncounted"
    NOT_MUTATED = "not-mutated"
    NOT_ALLOWED = "not-allowed"
    NOT_PINNED = "not-pinned"
    MALFORMED = "malformed"
    BUSY = "busy"
    UNREADABLE_LEDGER = "unreadable-ledger"
    LEDGER_LOST = "ledger-lost"
    TOO_LARGE = "too-large"
    BAD_REQUEST = "bad-request"
    QUOTA_ACCEPTED = "quota-accepted"
    PROBED = "probed"
    QUOTA_REJECTED = "quota-rejected"

    @property
    def lacks_quota(self) -> bool:
        """True if the request is rejected for lack of quota. The same request may be admitted when quota is free."""
        over = self.startswith("over-quota") and self is not Outcome.OVER_QUOTA_ALLOWED
        return over or self in (Outcome.BUSY, Outcome.LEDGER_LOST)


class AdmissionResponse(msgspec.Struct, frozen=True, gc=False):
    """The decision about one request, before it is encoded."""

    outcome: str
    """An `Outcome`, for metrics and logs."""
    allowed: bool = True
    status: HTTPStatus = HTTPStatus.OK
    """The HTTP status of a rejection."""
    message: str = ""
    faults: Sequence[Fault] = ()
    patch: Sequence[Operation] = ()
    warnings: Sequence[str] = ()
    retry_after: int | None = None
    """The seconds after which the client should retry the request; None if the client should not retry."""
    reason: str = ""
    """The reason why the pod got its GPU ``model``, for the API server's audit log."""
    model: str = ""
    scheme: str = ""
    """The name of the vendor's scheme by which the pod requests GPUs, for metrics."""
    rule: str = ""
    """The rule that set the order in which GPU models were tried for the pod, for example ``order``."""

    def bounded(self) -> "AdmissionResponse":
        """Return the response with a message and warnings of at most `MAX_TEXT_LENGTH` characters each."""
        if all(len(text) <= MAX_TEXT_LENGTH for text in (self.message, *self.warnings)):
            return self
        texts = cut(self.message, MAX_TEXT_LENGTH), [cut(each, MAX_TEXT_LENGTH) for each in self.warnings]
        return msgspec.structs.replace(self, message=texts[0], warnings=texts[1])


MAX_PATCH_BYTES = 2**23
"""The maximum size of a patch in bytes. An object that needs a larger patch is not stored: etcd accepts at most 1.5 MiB
with an object."""

PATCH_TOO_LARGE = (
    f"the changes that this webhook makes to this object have more than {MAX_PATCH_BYTES} bytes "
    f"({MAX_PATCH_BYTES // 2**20} MiB). Each term of a pod's required node affinity gets the pod's GPU model, pools "
    "and nodeName. Use fewer terms"
)


_REASONS: Mapping[HTTPStatus, str] = {
    HTTPStatus.BAD_REQUEST: "BadRequest",
    HTTPStatus.FORBIDDEN: "Forbidden",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "RequestEntityTooLarge",
    HTTPStatus.UNPROCESSABLE_ENTITY: "Invalid",
    HTTPStatus.TOO_MANY_REQUESTS: "TooManyRequests",
}


def write_review(uid: str, answer: AdmissionResponse, check: Check = no_check) -> bytes:
    """Return the encoded response. Raises BadReview if the patch is too large."""
    response: dict[str, object] = {"uid": uid, "allowed": answer.allowed}
    if answer.patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = _encode_patch(answer.patch, check)
    if answer.warnings:
        response["warnings"] = answer.warnings
    # The API server writes ``auditAnnotations`` into its audit log, so administrators see why a pod got its GPU model.
    if answer.reason:
        response["auditAnnotations"] = {"model": answer.model, "reason": answer.reason}
    if not answer.allowed:
        response["status"] = _status(answer)
    return msgspec.json.encode({"apiVersion": API_VERSION, "kind": KIND, "response": response})


def _encode_patch(patch: Sequence[Operation], check: Check) -> msgspec.Raw:
    # A JSON Patch can have megabytes. Encode it in pieces, because one long call of msgspec blocks all other threads.
    pieces = []
    size = 0
    for at, operation in enumerate(patch):
        if at % 1000 == 0:
            check()
        pieces.append(msgspec.json.encode(operation))
        size += len(pieces[-1])
        if size > MAX_PATCH_BYTES:
            raise BadReview(PATCH_TOO_LARGE, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    text = b"[" + b",".join(pieces) + b"]"
    step = 3 * 2**16  # base64 needs no padding for a multiple of 3 bytes, so the encoded pieces can be joined
    encoded = b"".join(base64.b64encode(text[at : at + step]) for at in range(0, len(text), step))
    return msgspec.Raw(b'"' + encoded + b'"')


def _status(answer: AdmissionResponse) -> dict[str, object]:
    details: dict[str, Any] = {}
    # The API server sends ``retryAfterSeconds`` as a Retry-After header. client-go repeats the request after that time.
    if answer.retry_after is not None:
        details["retryAfterSeconds"] = answer.retry_after
    for path, message in answer.faults:
        cause = {"reason": "FieldValueInvalid", "field": path, "message": message}
        details.setdefault("causes", []).append(cause)
    fields = {"code": answer.status.value, "reason": _REASONS.get(answer.status, ""), "message": answer.message}
    return {"status": "Failure", **fields, **({"details": details} if details else {})}
