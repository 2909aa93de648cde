"""Makes the answers to the creation of pods and ResourceClaims in a namespace with a limit."""

import contextlib
import math
from collections.abc import Sequence
from datetime import datetime
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from vcuda.admission_review import AdmissionRequest, AdmissionResponse
from vcuda.errors import MAX_FAULTS, Fault, limited
from vcuda.k8s_types import ObjectMeta
from vcuda.ledger.ledger import Admitted, Rejected
from vcuda.quota import grant_words
from vcuda.quota.model import Charge, Mode, NamespaceQuota, Shortage, cards, exceeded
from vcuda.quota.terms import MALFORMED, OVER_QUOTA, UNSTORED_CAUSE, is_namespace_name
from webhook.ledger.ledgers import (
    ChargeRequest,
    Decision,
    Ledgers,
    PutOff,
    RecentChoices,
    RetryLater,
    ReviewDeadline,
    SkippedMutate,
)
from webhook.review.context import PolicySnapshot

ADMITTED_ALL_THE_SAME = "the object is admitted, because this quota only warns"

RETRY_AFTER_SECONDS = 1

DELETED_RELEASED = "quota of deleted pods is being released"

MAX_NAMESPACE_LENGTH = 63


class Creation(msgspec.Struct, frozen=True, gc=False):
    """The review of an object that is being created, with the policy and the ledgers by which it is decided."""

    request: AdmissionRequest
    policy: PolicySnapshot
    ledgers: Ledgers
    choices: RecentChoices = msgspec.field(default_factory=RecentChoices)
    deadline: ReviewDeadline = msgspec.field(default_factory=ReviewDeadline)
    skipped: SkippedMutate | None = None
    """The namespaces whose pods are retried, because the API server skips /mutate; None to reject such pods at once."""


class Review(msgspec.Struct, frozen=True, gc=False):
    """An object in a namespace with a limit, under review by /mutate or /validate."""

    namespace: str
    quota: NamespaceQuota
    policy: PolicySnapshot
    faults: tuple[Fault, ...] = ()
    """The faults in the GPU request of the object, each with the path of its field."""
    notes: tuple[str, ...] = ()
    """Warnings for the owner if the object is admitted."""
    scheme: str = ""
    """The schemes (vendors' ways to request GPUs) of the object, for example hami. For metrics and logs."""
    may_wait: bool = True
    """True if the answer may have status 429, after which clients wait and retry; otherwise the status is 403."""

    @property
    def enforced(self) -> bool:
        return self.quota.mode is Mode.ENFORCE

    def warnings(self, *sentences: str) -> tuple[str, ...]:
        """Return all warnings for the owner: faults, notes and ``sentences``. In audit mode, return none."""
        if self.quota.mode is Mode.AUDIT:
            return ()
        malformed = [f"{malformed_sentence(self.faults)}; {ADMITTED_ALL_THE_SAME}"] if self.faults else []
        return (*malformed, *self.notes[:MAX_FAULTS], *sentences)


def misnamed(namespace: str) -> AdmissionResponse | None:
    if is_namespace_name(namespace):
        return None
    # An invented namespace name may be as long as the request. So the message contains only the first part of the name.
    message = f"{namespace[:MAX_NAMESPACE_LENGTH]!r} is not a valid namespace name"
    return AdmissionResponse("bad-request", False, HTTPStatus.BAD_REQUEST, message)


def admitted_unread(malformed: AdmissionResponse, quota: NamespaceQuota) -> AdmissionResponse:
    """Return the answer to an object that cannot be decoded. The object is rejected only if the quota is enforced."""
    # An admitted object that cannot be decoded is not charged now. The controller charges it after it has been stored.
    if quota.mode is Mode.ENFORCE:
        return malformed
    warnings = [f"{malformed.message}; {ADMITTED_ALL_THE_SAME}"] if quota.mode is Mode.WARN else []
    return AdmissionResponse(malformed.outcome, warnings=warnings)


def malformed_sentence(faults: Sequence[Fault]) -> str:
    return f"{MALFORMED}: " + "; ".join(map(str, limited(faults)))


def malformed(faults: Sequence[Fault], scheme: str = "") -> AdmissionResponse:
    # Status 422 is also the API server's answer to invalid objects. kubectl prints each fault with its path.
    status = HTTPStatus.UNPROCESSABLE_ENTITY
    return AdmissionResponse("malformed", False, status, malformed_sentence(faults), limited(faults), scheme=scheme)


def rejected(review: Review, outcome: str, message: str, model: str = "") -> AdmissionResponse:
    # Kubernetes' ResourceQuota also answers with status 403. After a 403, a workload's controller retries with
    # back-off.
    return AdmissionResponse(outcome, False, HTTPStatus.FORBIDDEN, message, model=model, scheme=review.scheme)


def over_quota(review: Review, *shortages: Shortage) -> AdmissionResponse:
    """Return the rejection of an object for which no model has enough free quota. ``shortages``: one per model."""
    moment, quota = review.policy.quota.moment, review.quota
    grants = (grant_words.coming(quota, shortage.model, moment) for shortage in shortages)
    later = any(grant_words.makes_room(quota, shortage, moment) for shortage in shortages)
    released = [DELETED_RELEASED] if any(shortage.rests_on_terminating for shortage in shortages) else []
    message = "; ".join([exceeded(review.namespace, *shortages, later=later), *filter(None, grants), *released])
    return rejected(review, "over-quota", message, shortages[0].model)


def over_quota_for_now(review: Review, decision: PutOff) -> AdmissionResponse:
    """Return the answer to an object that has no room in the ledger now, although the stored objects may leave room."""
    shortages = decision.shortages
    message, soon, model = exceeded(review.namespace, *shortages), decision.soon, shortages[0].model
    if not decision.counted:
        message = f"{message}; the stored pods could not be counted in time"
        return put_off(review, "over-quota-uncounted", message, soon=soon, model=model)
    if any(shortage.rests_on_reserved for shortage in shortages):
        message = f"{message}; reserved quota is being released"
        return put_off(review, "over-quota-reserved", message, soon=soon, model=model)
    if any(shortage.rests_on_pending for shortage in shortages):
        message = f"{message}; quota of admitted pods that were never created is being released"
        if seconds := review.policy.storable_seconds:
            message = f"{message} within {seconds:g} s"
        return put_off(
            review, "over-quota-pending", f"{message}; if this lasts, {UNSTORED_CAUSE}", soon=soon, model=model
        )
    return put_off(review, "over-quota-not-recounted", f"{message}; {DELETED_RELEASED}", soon=soon, model=model)


def put_off(review: Review, outcome: str, message: str, *, soon: bool, model: str) -> AdmissionResponse:
    """Return the answer to an object that may fit later. ``soon``: True if a retry within 2 s is likely to succeed."""
    # A 429 always has retryAfterSeconds, after which client-go (kubectl and most controllers) repeats the request. A
    # sleeping controller blocks one of its workers. So a longer shortage is a 403, as of Kubernetes' ResourceQuota, and
    # our controller makes the workload retry when quota is free.
    wait = RETRY_AFTER_SECONDS if soon and review.may_wait else None
    status = HTTPStatus.TOO_MANY_REQUESTS if wait else HTTPStatus.FORBIDDEN
    return AdmissionResponse(outcome, False, status, message, retry_after=wait, model=model, scheme=review.scheme)


class Asked(NamedTuple):
    """The charge that one object requires on one GPU model."""

    metadata: ObjectMeta
    model: str
    charge: Charge
    grace: int = 0
    """The grace period of a pod in seconds; 0 for a claim."""


async def charge(create: Creation, review: Review, asked: Asked, *, stray: Sequence[str] = ()) -> AdmissionResponse:
    """Charge the object, and return the answer. Raises Unavailable if the ledger could not be read or written.

    ``stray``: further warnings for the owner if the object is admitted.
    """
    # The object's choice of a model at /mutate would be counted together with the charge, so remove the choice. A dry
    # run has recorded no choice and is not charged.
    if not create.request.dry_run:
        create.choices.release(review.namespace, asked.model, asked.charge)
    if not asked.metadata.uid:
        # The ledger identifies a charge by the uid. The API server sets the uid after it has called mutating webhooks.
        message = f"the {create.request.kind.kind.lower()} has no uid yet; register this path as a validating webhook"
        return AdmissionResponse("bad-request", False, HTTPStatus.BAD_REQUEST, message)
    return _answer(review, asked.model, await _charge(create, review, asked), stray)


async def record_grace(create: Creation, review: Review, asked: Asked) -> AdmissionResponse | None:
    """Record in the ledger the grace period of a pod that gets GPUs only by ResourceClaims, which are charged instead.

    Return None if the period is recorded or needs no record; otherwise return the rejection. Raises Unavailable if the
    ledger could not be read or written.
    """
    if not needs_record(review, asked.grace) or not asked.metadata.uid:
        return None
    decision = await _charge(create, review, asked)
    return None if isinstance(decision, Admitted) else _answer(review, asked.model, decision, ())


def needs_record(review: Review, grace: int) -> bool:
    """Return True if the ledger must record this grace period, because a pending charge may be released earlier."""
    storable = review.policy.storable_seconds
    return storable is not None and grace > storable


async def _charge(create: Creation, review: Review, asked: Asked) -> Decision:
    request, deadline = create.request, create.deadline
    created = math.inf
    # In a CREATE, the API server has just set the creationTimestamp, whatever value the client sent. In an UPDATE, the
    # timestamp is not used, because it may be old.
    if request.operation == "CREATE" and asked.metadata.creation_timestamp:
        with contextlib.suppress(ValueError):
            created = datetime.fromisoformat(asked.metadata.creation_timestamp).timestamp()
    version, dry_run = review.policy.quota.version, bool(request.dry_run)
    charged = ChargeRequest(
        *(review.namespace, asked.metadata.uid, asked.model, asked.charge, review.quota, deadline.end),
        *(version, dry_run, created, asked.grace if needs_record(review, asked.grace) else 0),
    )
    deadline.check()
    if not dry_run:
        deadline.keep()
    return await create.ledgers.charge(charged)


def _answer(review: Review, model: str, decision: Decision, stray: Sequence[str]) -> AdmissionResponse:
    match decision:
        case Admitted():
            return AdmissionResponse(
                "over-quota-allowed" if decision.shortage else "charged",
                warnings=review.warnings(*stray, *_warnings(review, model, decision)),
                model=model,
                scheme=review.scheme,
            )
        case Rejected(shortage):
            return over_quota(review, shortage)
        case PutOff():
            return over_quota_for_now(review, decision)
        case RetryLater(reason, soon):
            message = f"{reason}; try again in {RETRY_AFTER_SECONDS} s" if soon else f"{OVER_QUOTA}: {reason}"
            return put_off(review, "busy", message, soon=soon, model=model)


def _warnings(review: Review, model: str, granted: Admitted) -> list[str]:
    """Return at most one warning about the quota of an admitted object.

    It is the first of these that applies: the object exceeds a quota that only warns; the charge needs a grant (a
    temporary addition to the limit) that will end; the quota is nearly used up.
    """
    namespace = review.namespace
    if granted.shortage:
        return [f"{exceeded(namespace, granted.shortage)}; {ADMITTED_ALL_THE_SAME}"]
    if review.quota.granted and (ending := grant_words.ending(namespace, review.quota, model, granted.usage.in_use)):
        return [ending]
    if granted.nearly_full:
        used, limit = granted.usage.in_use, granted.limit
        amounts = [] if limit.cores is None else [f"{cards(used.cores)} of {cards(limit.cores)}"]
        amounts += [] if limit.memory is None else [f"{used.memory_under(limit)} of {limit.memory} MiB"]
        return [f"the GPU quota is nearly used up: {model} in namespace {namespace}, {', '.join(amounts)}"]
    return []
