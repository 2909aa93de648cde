"""The answers to creations in a namespace with a limit, the same for pods and ResourceClaims."""

import contextlib
import math
from collections.abc import Sequence
from datetime import datetime
from http import HTTPStatus
from typing import NamedTuple

import msgspec

from vcuda.admission_review import AdmissionRequest, AdmissionResponse
from vcuda.errors import MOST_FAULTS, Fault, limited
from vcuda.k8s_types import ObjectMeta
from vcuda.ledger.ledger import Admitted, Refused
from vcuda.quota import grant_words
from vcuda.quota.model import Charge, Mode, NamespaceQuota, Shortage, cards, exceeded
from vcuda.quota.terms import MALFORMED, is_namespace_name
from webhook.ledger.ledgers import ChargeRequest, Decision, Ledgers, PutOff, RecentChoices, RetryLater, ReviewDeadline
from webhook.review.context import PolicySnapshot

ADMITTED_ALL_THE_SAME = "admitted, because this quota only warns"

RETRY_AFTER_SECONDS = 1

MOST_OF_NAMESPACE = 63


class Creation(msgspec.Struct, frozen=True, gc=False):
    """An object that is being created, and the means to decide about it."""

    request: AdmissionRequest
    policy: PolicySnapshot
    ledgers: Ledgers
    choices: RecentChoices = msgspec.field(default_factory=RecentChoices)
    deadline: ReviewDeadline = msgspec.field(default_factory=ReviewDeadline)


class Review(msgspec.Struct, frozen=True, gc=False):
    """An object in a namespace with a limit, under review by /mutate or /validate.

    ``scheme``: the schemes that the object uses, for metrics and logs. ``notes``: sentences for the answer that admits
    the object. ``may_wait``: the creator may retry after the time that a 429 states.
    """

    namespace: str
    quota: NamespaceQuota
    policy: PolicySnapshot
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()
    scheme: str = ""
    may_wait: bool = True

    @property
    def enforced(self) -> bool:
        """Whether an object over the quota, or a malformed one, is refused."""
        return self.quota.mode is Mode.ENFORCE

    def warnings(self, *sentences: str) -> tuple[str, ...]:
        """Return the warnings for the object's owner; empty if the quota only audits."""
        if self.quota.mode is Mode.AUDIT:
            return ()
        malformed = [f"{malformed_sentence(self.faults)}; {ADMITTED_ALL_THE_SAME}"] if self.faults else []
        return (*malformed, *self.notes[:MOST_FAULTS], *sentences)


def misnamed(namespace: str) -> AdmissionResponse | None:
    """Return the refusal of a review whose namespace has an impossible name; None if the name is possible."""
    if is_namespace_name(namespace):
        return None
    # The message cuts the name off, since a forged name may be as long as a request.
    message = f"{namespace[:MOST_OF_NAMESPACE]!r} is no name of a namespace"
    return AdmissionResponse("bad-request", False, HTTPStatus.BAD_REQUEST, message)


def admitted_unread(malformed: AdmissionResponse, quota: NamespaceQuota) -> AdmissionResponse:
    """Return the answer to an object that cannot be decoded, by the mode of its quota."""
    # The object is not charged here. The controller counts it once it is stored.
    if quota.mode is Mode.ENFORCE:
        return malformed
    told = [f"{malformed.message}; {ADMITTED_ALL_THE_SAME}"] if quota.mode is Mode.WARN else []
    return AdmissionResponse(malformed.outcome, warnings=told)


def malformed_sentence(faults: Sequence[Fault]) -> str:
    return f"{MALFORMED}: " + "; ".join(map(str, limited(faults)))


def malformed(faults: Sequence[Fault], scheme: str = "") -> AdmissionResponse:
    # The API server's own validation answers 422 too. kubectl prints each fault with its path, from the Status' causes.
    status = HTTPStatus.UNPROCESSABLE_ENTITY
    return AdmissionResponse("malformed", False, status, malformed_sentence(faults), limited(faults), scheme=scheme)


def refused(review: Review, outcome: str, message: str, model: str = "") -> AdmissionResponse:
    # Kubernetes' ResourceQuota answers 403 too: a controller that creates pods retries with back-off.
    return AdmissionResponse(outcome, False, HTTPStatus.FORBIDDEN, message, model=model, scheme=review.scheme)


def over_quota(review: Review, *shortages: Shortage) -> AdmissionResponse:
    """Return the refusal of an object for which no model has room. ``shortages``: one for each of its models."""
    moment = review.policy.quota.moment
    grants = (grant_words.coming(review.quota, shortage.model, moment) for shortage in shortages)
    message = "; ".join([exceeded(review.namespace, *shortages), *filter(None, grants)])
    return refused(review, "over-quota", message, shortages[0].model)


def over_quota_for_now(review: Review, decision: PutOff) -> AdmissionResponse:
    """Return the answer to an object that does not fit the ledger, though the stored objects may leave room."""
    shortages = decision.shortages
    message, model = exceeded(review.namespace, *shortages), shortages[0].model
    # A long wait goes without retryAfterSeconds, because a controller would sleep for it in one of its few workers. Our
    # controller has the workload retried when quota is released.
    wait = RETRY_AFTER_SECONDS if decision.soon and review.may_wait else None
    if not decision.counted:
        message += "; how much of that is stored could not be counted in time"
        return put_off(review, "over-quota-uncounted", message, wait, model)
    if any(shortage.rests_on_reserved for shortage in shortages):
        return put_off(review, "over-quota-reserved", f"{message}; what is reserved is given back", wait, model)
    if any(shortage.rests_on_pending for shortage in shortages):
        within = f" within {review.policy.storable_seconds:g} s" if review.policy.storable_seconds else ""
        message += f"; what is pending and is never stored is given back{within}"
        return put_off(review, "over-quota-pending", message, wait, model)
    return put_off(
        review, "over-quota-unsettled", f"{message}; what has gone is given back when it is settled", wait, model
    )


def put_off(review: Review, outcome: str, message: str, wait: int | None, model: str) -> AdmissionResponse:
    """Return the answer to an object that may fit later. ``wait``: seconds to the retry; None if that is not soon."""
    status = HTTPStatus.TOO_MANY_REQUESTS if review.may_wait else HTTPStatus.FORBIDDEN
    return AdmissionResponse(outcome, False, status, message, retry_after=wait, model=model, scheme=review.scheme)


class Asked(NamedTuple):
    """The charge of an object to one model."""

    metadata: ObjectMeta
    model: str
    charge: Charge
    grace: int = 0
    """The grace period of a pod in seconds; 0 for a claim."""


async def charge(create: Creation, review: Review, asked: Asked, *, stray: Sequence[str] = ()) -> AdmissionResponse:
    """Charge the object, and return the answer with the ``stray`` warnings. Raises Unavailable."""
    if not asked.metadata.uid:
        # Only a mutating webhook sees an object without a uid. Admitting it uncharged would bypass the quota.
        message = f"the {create.request.kind.kind.lower()} has no uid yet; register this path as a validating webhook"
        return AdmissionResponse("bad-request", False, HTTPStatus.BAD_REQUEST, message)
    return _answer(review, asked.model, await _charge(create, review, asked), stray)


async def record_grace(create: Creation, review: Review, asked: Asked) -> AdmissionResponse | None:
    """Record the grace period of a pod that is charged by its claims; None if it is recorded. Raises Unavailable."""
    if not needs_record(review, asked.grace) or not asked.metadata.uid:
        return None
    decision = await _charge(create, review, asked)
    return None if isinstance(decision, Admitted) else _answer(review, asked.model, decision, ())


def needs_record(review: Review, grace: int) -> bool:
    """Return whether the ledger has to record a grace period, as it is longer than a charge stays pending."""
    storable = review.policy.storable_seconds
    return storable is not None and grace > storable


async def _charge(create: Creation, review: Review, asked: Asked) -> Decision:
    request, deadline = create.request, create.deadline
    created = math.inf
    # An UPDATE may come long after the creation, so its creationTimestamp says nothing about this charge. At a creation
    # the API server has overwritten the creator's value by now.
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
        case Refused(shortage):
            return over_quota(review, shortage)
        case PutOff():
            return over_quota_for_now(review, decision)
        case RetryLater(reason, soon):
            # client-go, and so kubectl and every controller, retries a 429 with retryAfterSeconds by itself.
            wait = RETRY_AFTER_SECONDS if soon and review.may_wait else None
            message = f"{reason}; try again in {wait} s" if wait else f"{reason}; try again later"
            return put_off(review, "busy", message, wait, model)


def _warnings(review: Review, model: str, granted: Admitted) -> list[str]:
    """Return the warning if a quota that only warns is exceeded, if a grant ends on which this charge depends, or if
    the quota is nearly used up."""
    namespace = review.namespace
    if granted.shortage:
        return [f"{exceeded(namespace, granted.shortage)}; {ADMITTED_ALL_THE_SAME}"]
    if review.quota.granted and (ending := grant_words.ending(namespace, review.quota, model, granted.usage.in_use)):
        return [ending]
    if granted.nearly_full:
        used, limit = granted.usage.in_use, granted.limit
        amounts = [] if limit.cores is None else [f"{cards(used.cores)} of {cards(limit.cores)}"]
        amounts += [] if limit.memory is None else [f"{used.memory_under(limit)} of {limit.memory} MiB"]
        return [f"GPU quota nearly used up: {model} in namespace {namespace}, {', '.join(amounts)}"]
    return []
