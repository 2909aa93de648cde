"""/validate: recomputes the charge from the pod as it will be stored, and charges it. Nothing else admits a pod."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from vcuda.k8s_types import AdmissionResponse, Request
from vcuda.ledger.ledger import Admitted, Refused
from vcuda.placement.placement import Pin, read_pin
from vcuda.quota.model import NamespaceQuota, cards, exceeded
from webhook.choices import RecentChoices
from webhook.context import PolicySnapshot
from webhook.ledgers import ChargeRequest, Ledgers, RetryLater
from webhook.pod_review import PodReview, malformed, refused, subject_of

RETRY_AFTER = 1


def validate(
    request: Request, facts: PolicySnapshot, ledgers: Ledgers, holds: RecentChoices, deadline: float
) -> AdmissionResponse:
    """Return whether the pod may be stored, with its charge written down before it is allowed.

    ``deadline`` is when the answer must be there, in seconds of the monotonic clock.

    Raises:
        Unreachable: the ledger could not be read or written.

    """
    subject = subject_of(request, facts)
    if isinstance(subject, AdmissionResponse):
        return subject
    wrong = malformed(subject)
    if wrong:
        return wrong
    pin = read_pin(subject.pod, facts.hints.labels)
    stray = () if pin.within(subject.quota) else (_unpinned(subject, pin),)
    if stray and subject.enforced:
        return refused(subject, "not-pinned", *stray)
    if pin.model is None:
        return AdmissionResponse("unpinned", scheme=subject.scheme, warnings=subject.warnings(*stray))
    holds.release(subject.namespace, pin.model, subject.request.charge)
    return _charge(request, subject, ledgers, deadline, model=pin.model, stray=stray)


def _charge(
    request: Request, subject: PodReview, ledgers: Ledgers, deadline: float, *, model: str, stray: Sequence[str]
) -> AdmissionResponse:
    uid = subject.pod.metadata.uid
    if not uid:
        message = "the pod has no uid yet; register this path as a validating webhook"
        return AdmissionResponse("bad-request", False, HTTPStatus.BAD_REQUEST, message)
    demand = ChargeRequest(
        namespace=subject.namespace,
        uid=uid,
        model=model,
        charge=subject.request.charge,
        quota=subject.quota,
        deadline=deadline,
        counted_since=subject.facts.quota.version,
        dry_run=bool(request.dry_run),
    )
    return _answer(subject, model, ledgers.charge(demand), stray)


def _answer(
    subject: PodReview, model: str, decision: Admitted | Refused | RetryLater, stray: Sequence[str]
) -> AdmissionResponse:
    match decision:
        case Admitted():
            return AdmissionResponse(
                "over-quota-allowed" if decision.shortage else "charged",
                warnings=subject.warnings(*stray, *_warnings(subject.namespace, model, decision)),
                model=model,
                scheme=subject.scheme,
            )
        case Refused(shortage):
            return refused(subject, "over-quota", exceeded(subject.namespace, shortage), model)
        case RetryLater(reason):
            return AdmissionResponse(
                "busy",
                allowed=False,
                status=HTTPStatus.TOO_MANY_REQUESTS,
                message=f"{reason}; try again in {RETRY_AFTER} s",
                retry_after=RETRY_AFTER,
                model=model,
                scheme=subject.scheme,
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


def _unpinned(subject: PodReview, pin: Pin) -> str:
    """Say why the pod is not held to one allowed model, with those it may use."""
    quota = subject.quota
    if pin.model in quota.limits:
        where = f"pools {', '.join(quota.pools)}, where namespace {subject.namespace} must stay"
        return f"the pod is not held to the {where}, by a required node affinity or nodeSelector"
    held = ", ".join(sorted(pin.models)) if pin.models else "none" if pin.models is not None else "any"
    return (
        f"the pod is not held to one GPU model that namespace {subject.namespace} may use "
        f"({_allowed(quota)}) by a required node affinity or nodeSelector: it allows {held}"
    )


def _allowed(quota: NamespaceQuota) -> str:
    listed = [f"{model}: {cards(limit.cores)}" for model, limit in quota.limits.items() if limit.cores]
    return ", ".join(listed) or "none"
