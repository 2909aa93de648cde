"""/validate: recomputes the charge from the pod as it will be stored, and charges it. Nothing else admits a pod."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from vcuda.k8s_types import AdmissionRequest, AdmissionResponse
from vcuda.ledger.ledger import Admitted, Refused
from vcuda.placement.placement import Pin, read_pin
from vcuda.quota.model import cards, exceeded
from webhook.context import PolicySnapshot
from webhook.ledgers import ChargeRequest, Decision, Ledgers, RecentChoices, RetryLater
from webhook.pod_review import ADMITTED_ALL_THE_SAME, PodReview, refused, review_of

RETRY_AFTER_SECONDS = 1


async def validate(
    request: AdmissionRequest, policy: PolicySnapshot, ledgers: Ledgers, choices: RecentChoices, deadline: float
) -> AdmissionResponse:
    """Return whether the pod may be stored, with its charge written down before it is allowed.

    ``deadline`` is when the answer must be there, in seconds of the monotonic clock.

    Raises:
        Unavailable: the ledger could not be read or written.

    """
    review = review_of(request, policy)
    if isinstance(review, AdmissionResponse):
        return review
    pin = read_pin(review.pod, policy.hints.labels)
    # Recomputed from the pod as it will be stored: another webhook, or its owner, may have undone what /mutate did.
    stray = () if pin.within(review.quota) else (_unpinned(review, pin),)
    if stray and review.enforced:
        return refused(review, "not-pinned", *stray)
    if pin.model is None:
        return AdmissionResponse("unpinned", scheme=review.scheme, warnings=review.warnings(*stray))
    # What /mutate has chosen for this pod counts no more: from here on its charge does.
    choices.release(review.namespace, pin.model, review.request.charge)
    return await _charge(request, review, ledgers, deadline, model=pin.model, stray=stray)


async def _charge(
    request: AdmissionRequest, review: PodReview, ledgers: Ledgers, deadline: float, *, model: str, stray: Sequence[str]
) -> AdmissionResponse:
    uid = review.pod.metadata.uid
    if not uid:
        # So it is in a mutating webhook. To admit it uncharged would be a way past the quota.
        message = "the pod has no uid yet; register this path as a validating webhook"
        return AdmissionResponse("bad-request", False, HTTPStatus.BAD_REQUEST, message)
    asked = ChargeRequest(
        namespace=review.namespace,
        uid=uid,
        model=model,
        charge=review.request.charge,
        quota=review.quota,
        deadline=deadline,
        counted_since=review.policy.quota.version,
        dry_run=bool(request.dry_run),
    )
    return _answer(review, model, await ledgers.charge(asked), stray)


def _answer(review: PodReview, model: str, decision: Decision, stray: Sequence[str]) -> AdmissionResponse:
    match decision:
        case Admitted():
            return AdmissionResponse(
                "over-quota-allowed" if decision.shortage else "charged",
                warnings=review.warnings(*stray, *_warnings(review.namespace, model, decision)),
                model=model,
                scheme=review.scheme,
            )
        case Refused(shortage):
            return refused(review, "over-quota", exceeded(review.namespace, shortage), model)
        case RetryLater(reason):
            # client-go tries a 429 with retryAfterSeconds again by itself, as kubectl and the controllers do.
            return AdmissionResponse(
                "busy",
                allowed=False,
                status=HTTPStatus.TOO_MANY_REQUESTS,
                message=f"{reason}; try again in {RETRY_AFTER_SECONDS} s",
                retry_after=RETRY_AFTER_SECONDS,
                model=model,
                scheme=review.scheme,
            )


def _warnings(namespace: str, model: str, granted: Admitted) -> list[str]:
    """Say that a pod is over a quota that only warns, or that an enforced one is nearly used up."""
    if granted.shortage:
        return [f"{exceeded(namespace, granted.shortage)}; {ADMITTED_ALL_THE_SAME}"]
    if granted.nearly_full:
        used, limit = granted.usage.used, granted.limit
        amounts = f"{cards(used.cores)} of {cards(limit.cores)}"
        if limit.memory is not None:
            amounts += f", {used.memory_under(limit)} of {limit.memory} MiB"
        return [f"GPU quota nearly used up: {model} in namespace {namespace}, {amounts}"]
    return []


def _unpinned(review: PodReview, pin: Pin) -> str:
    """Say why the pod is not held to one allowed model, with those it may use."""
    quota = review.quota
    if pin.model in quota.limits:
        where = f"pools {', '.join(quota.pools)}, where namespace {review.namespace} must stay"
        return f"the pod is not held to the {where}, by a required node affinity or nodeSelector"
    allowed = [f"{model}: {cards(limit.cores)}" for model, limit in quota.limits.items() if limit.cores]
    held = ", ".join(sorted(pin.models)) if pin.models else "none" if pin.models is not None else "any"
    return (
        f"the pod is not held to one GPU model that namespace {review.namespace} may use "
        f"({', '.join(allowed) or 'none'}) by a required node affinity or nodeSelector: it allows {held}"
    )
