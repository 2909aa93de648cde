"""/validate: recomputes the charge from the pod as it will be stored, and charges it. Nothing else admits a pod."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from vcuda.k8s_types import AdmissionRequest, AdmissionResponse
from vcuda.ledger.ledger import Admitted, Refused
from vcuda.placement.placement import Pin, read_pin
from vcuda.quota.model import NamespaceQuota, cards, exceeded
from webhook.context import PolicySnapshot
from webhook.ledgers import ChargeRequest, Decision, Ledgers, RecentChoices, RetryLater
from webhook.pod_review import PodReview, malformed, refused, review_of

RETRY_AFTER = 1


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
    wrong = malformed(review)
    if wrong:
        return wrong
    pin = read_pin(review.pod, policy.hints.labels)
    stray = () if pin.within(review.quota) else (_unpinned(review, pin),)
    if stray and review.enforced:
        return refused(review, "not-pinned", *stray)
    if pin.model is None:
        return AdmissionResponse("unpinned", scheme=review.scheme, warnings=review.warnings(*stray))
    choices.release(review.namespace, pin.model, review.request.charge)
    return await _charge(request, review, ledgers, deadline, model=pin.model, stray=stray)


async def _charge(
    request: AdmissionRequest, review: PodReview, ledgers: Ledgers, deadline: float, *, model: str, stray: Sequence[str]
) -> AdmissionResponse:
    uid = review.pod.metadata.uid
    if not uid:
        message = "the pod has no uid yet; register this path as a validating webhook"
        return AdmissionResponse("bad-request", False, HTTPStatus.BAD_REQUEST, message)
    charge_request = ChargeRequest(
        namespace=review.namespace,
        uid=uid,
        model=model,
        charge=review.request.charge,
        quota=review.quota,
        deadline=deadline,
        counted_since=review.policy.quota.version,
        dry_run=bool(request.dry_run),
    )
    return _answer(review, model, await ledgers.charge(charge_request), stray)


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
            return AdmissionResponse(
                "busy",
                allowed=False,
                status=HTTPStatus.TOO_MANY_REQUESTS,
                message=f"{reason}; try again in {RETRY_AFTER} s",
                retry_after=RETRY_AFTER,
                model=model,
                scheme=review.scheme,
            )


def _warnings(namespace: str, model: str, granted: Admitted) -> list[str]:
    """Say that a pod is over a quota that only warns, or that an enforced one is nearly used up."""
    if granted.shortage:
        return [f"{exceeded(namespace, granted.shortage)}; admitted, because this quota only warns"]
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
    held = ", ".join(sorted(pin.models)) if pin.models else "none" if pin.models is not None else "any"
    return (
        f"the pod is not held to one GPU model that namespace {review.namespace} may use "
        f"({_allowed(quota)}) by a required node affinity or nodeSelector: it allows {held}"
    )


def _allowed(quota: NamespaceQuota) -> str:
    listed = [f"{model}: {cards(limit.cores)}" for model, limit in quota.limits.items() if limit.cores]
    return ", ".join(listed) or "none"
