"""AdmissionReview v1: what the API server asks, and what it is answered.

Source: k8s.io/api ``admission/v1`` and https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from http import HTTPStatus

import msgspec

from vcuda.errors import BadReview, Fault
from vcuda.k8s_types import UNDECODABLE, K8sStruct
from vcuda.placement.patches import Operation

API_VERSION = "admission.k8s.io/v1"
KIND = "AdmissionReview"


class GroupVersionKind(K8sStruct, frozen=True, gc=False):
    """The kind of the object under review."""

    group: str = ""
    version: str = ""
    kind: str = ""


class UserInfo(K8sStruct, frozen=True, gc=False):
    """Who asks, as the API server authenticated them: this part cannot be forged."""

    username: str = ""
    groups: tuple[str, ...] | None = None


class Request(K8sStruct, frozen=True, gc=False):
    """One operation under review. A pod's own metadata.namespace may be empty in mutation: ``namespace`` is not."""

    uid: str
    kind: GroupVersionKind = GroupVersionKind()
    sub_resource: str = ""
    name: str = ""
    namespace: str = ""
    operation: str = ""
    user_info: UserInfo = UserInfo()
    object: msgspec.Raw = msgspec.Raw(b"null")
    old_object: msgspec.Raw = msgspec.Raw(b"null")
    dry_run: bool | None = None


class AdmissionReview(K8sStruct, frozen=True, gc=False):
    """The envelope."""

    api_version: str = ""
    kind: str = ""
    request: Request | None = None


_DECODER = msgspec.json.Decoder(AdmissionReview)


def read_review(body: bytes) -> Request:
    """Return the request in a review.

    Raises:
        BadReview: the body is no AdmissionReview v1 with a request.

    """
    try:
        review = _DECODER.decode(body)
    except UNDECODABLE as error:
        raise BadReview(f"the body is no AdmissionReview in JSON: {error}") from error
    if review.kind != KIND or review.api_version != API_VERSION:
        got = f"{review.api_version or 'no apiVersion'} {review.kind or 'no kind'}"
        raise BadReview(
            f"this server answers {API_VERSION} {KIND}, not {got}; set admissionReviewVersions: [v1] in the webhook"
        )
    if review.request is None:
        raise BadReview(f"the {KIND} has no request")
    return review.request


class AdmissionResponse(msgspec.Struct, frozen=True, gc=False):
    """The decision on one request, before it is put on the wire.

    ``outcome`` is the word under which it is counted and logged. ``status`` is what a refused client sees;
    ``retry_after`` is in seconds, where it should come again by itself. ``reason`` tells why an allowed pod got its
    model; with the model it goes into the API server's audit log.
    """

    outcome: str
    allowed: bool = True
    status: HTTPStatus = HTTPStatus.OK
    message: str = ""
    faults: Sequence[Fault] = ()
    patch: Sequence[Operation] = ()
    warnings: Sequence[str] = ()
    retry_after: int | None = None
    reason: str = ""
    model: str = ""
    scheme: str = ""


_REASONS: Mapping[HTTPStatus, str] = {
    HTTPStatus.BAD_REQUEST: "BadRequest",
    HTTPStatus.FORBIDDEN: "Forbidden",
    HTTPStatus.UNPROCESSABLE_ENTITY: "Invalid",
    HTTPStatus.TOO_MANY_REQUESTS: "TooManyRequests",
}


def write_review(uid: str, answer: AdmissionResponse) -> bytes:
    """Return the AdmissionReview that answers the request ``uid``."""
    response: dict[str, object] = {"uid": uid, "allowed": answer.allowed}
    if answer.patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(msgspec.json.encode(answer.patch)).decode()
    if answer.warnings:
        response["warnings"] = answer.warnings
    if answer.reason:
        response["auditAnnotations"] = {"model": answer.model, "reason": answer.reason}
    if not answer.allowed:
        response["status"] = _status(answer)
    return msgspec.json.encode({"apiVersion": API_VERSION, "kind": KIND, "response": response})


def _status(answer: AdmissionResponse) -> dict[str, object]:
    """Return the metav1.Status that reaches the client; client-go waits by itself for retryAfterSeconds."""
    details: dict[str, object] = {}
    if answer.retry_after is not None:
        details["retryAfterSeconds"] = answer.retry_after
    if answer.faults:
        details["causes"] = [
            {"reason": "FieldValueInvalid", "field": fault.path, "message": fault.message} for fault in answer.faults
        ]
    return {
        "status": "Failure",
        "code": answer.status.value,
        "reason": _REASONS.get(answer.status, ""),
        "message": answer.message,
        **({"details": details} if details else {}),
    }
