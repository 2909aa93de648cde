"""Answers the reviews of new pods and claims: reads the object, decides, and writes the verdict as an answer.

1. Read: `pod_review.read` or `claim_review.read` returns the object as a `Review`, or a verdict if none is needed.
2. Decide: ``mutate`` or ``validate`` of the same module returns a verdict, which is a plain value.
3. Answer: `written` gives the verdict its status, and a text for the owner of the object.
"""

from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import NamedTuple

from vcuda.admission_review import AdmissionResponse, Outcome
from vcuda.claims.names import GROUP
from vcuda.errors import LedgerLost, UnreadableLedger, VcudaError
from vcuda.ledger.ledger import Admitted, is_nearly_full
from vcuda.quota import grant_words
from vcuda.quota.model import NO_LIMIT, Charge, NamespaceQuota, Usage, cards
from vcuda.quota.rejections import over_quota, reports_shortage
from vcuda.quota.shortage import Shortage, exceeded
from vcuda.quota.well_known import TOTAL, UNSTORED_CAUSE
from webhook.ledger.charging import PutOff
from webhook.review import claim_review, decisions, pod_review
from webhook.review.decisions import Creation, Rejection, Review, Simple, Verdict

DELETED_RELEASED = "quota of deleted pods is being released"

TEAM_RELEASED = "quota of the team that no stored pod uses is being released"

_STATUS = {
    Outcome.BAD_REQUEST: HTTPStatus.BAD_REQUEST,
    Outcome.MALFORMED: HTTPStatus.BAD_REQUEST,
    Outcome.UNREADABLE_LEDGER: HTTPStatus.INTERNAL_SERVER_ERROR,
}
"""The status of a rejection without faults. Other rejections have 403, as those of Kubernetes' ResourceQuota. After a
403, a workload's controller retries with back-off."""


async def answer(path: str, create: Creation) -> AdmissionResponse:
    """Return the answer of /mutate, which pins the object, or of /validate, which charges it.

    Raises Unavailable if the ledger could not be read or written in time.
    """
    read = claim_review.read if create.request.kind.group == GROUP else pod_review.read
    review = read(create.request, create.policy, create.deadline.check)
    if isinstance(review, Simple):
        return written(review)
    if review.faults and review.enforced:
        return written(decisions.malformed(review.faults), review)
    try:
        if isinstance(review, pod_review.PodReview):
            decide_pod = pod_review.mutate if path == "/mutate" else pod_review.validate
            return _answer_to(review, await decide_pod(create, review))
        decide_claim = claim_review.mutate if path == "/mutate" else claim_review.validate
        return _answer_to(review, await decide_claim(create, review))
    # A lost or unreadable ledger is answered with a rejection. The API server would ignore an HTTP error of /mutate.
    # Then /validate would reject the pod with the misleading reason that the pod is not pinned.
    except LedgerLost as error:
        return written(Rejection(Outcome.LEDGER_LOST, str(error)))
    except UnreadableLedger as error:
        return written(Rejection(Outcome.UNREADABLE_LEDGER, str(error)))
    except VcudaError as error:
        if path == "/mutate" and create.skipped:
            create.skipped.add_failure(review.namespace, error)
        raise


def _answer_to(review: Review, verdict: Verdict) -> AdmissionResponse:
    match verdict:
        case decisions.AdmittedCharge(model, admitted, tolerated):
            outcome = Outcome.OVER_QUOTA_ALLOWED if admitted.shortage else Outcome.CHARGED
            warnings = review.warnings(*tolerated, _warning(review, model, admitted))
            return AdmissionResponse(outcome, warnings=warnings, model=model, scheme=review.scheme)
        case decisions.OverQuota(shortages):
            verdict = _over_quota(review, shortages)
        case PutOff():
            verdict = _over_quota_for_now(review, verdict)
    return written(verdict, review)


def written(verdict: Simple, review: Review | None = None) -> AdmissionResponse:
    """Return the answer with this verdict. ``review``: the object; None if it needed no decision."""
    if isinstance(verdict, AdmissionResponse):
        return verdict
    outcome, message = verdict.outcome, verdict.message
    # Status 422 is also the API server's answer to invalid objects. kubectl prints each fault with its path.
    status = HTTPStatus.UNPROCESSABLE_ENTITY if verdict.faults else _STATUS.get(outcome, HTTPStatus.FORBIDDEN)
    # A 429 always has retryAfterSeconds, after which client-go (kubectl and most controllers) repeats the request. A
    # sleeping controller blocks one of its workers. So a longer shortage is a 403, as of Kubernetes' ResourceQuota, and
    # our controller makes the workload retry when quota is free.
    wait = decisions.RETRY_AFTER_SECONDS if verdict.soon and review and review.may_wait else None
    status = HTTPStatus.TOO_MANY_REQUESTS if wait else status
    # Workflow engines wait for quota only after a rejection with these words.
    if outcome.lacks_quota and not verdict.soon and not reports_shortage(message):
        message = over_quota(message)
    # A bad request is no fault of the object, so its metrics do not name the object's scheme.
    scheme = review.scheme if review and outcome is not Outcome.BAD_REQUEST else ""
    return AdmissionResponse(
        outcome,
        allowed=False,
        status=status,
        message=message,
        faults=verdict.faults,
        retry_after=wait,
        model=verdict.model,
        scheme=scheme,
    )


def _over_quota(review: Review, shortages: Sequence[Shortage]) -> Rejection:
    """Return the rejection of an object for which no model has enough free quota. ``shortages``: one per model."""
    quota = review.policy.quota
    exceeded_in = [(each, quota.of_team(each.team) if each.team else review.quota) for each in shortages]
    grants = (grant_words.coming(of, each.model, quota.moment) for each, of in exceeded_in if not each.of_total)
    later = any(grant_words.makes_room(of, shortage, quota.moment) for shortage, of in exceeded_in)
    released = [DELETED_RELEASED] if any(shortage.rests_on_terminating for shortage in shortages) else []
    message = "; ".join([exceeded(review.namespace, *shortages, later=later), *filter(None, grants), *released])
    return Rejection(Outcome.OVER_QUOTA, message, model=shortages[0].model)


def _over_quota_for_now(review: Review, decision: PutOff) -> Rejection:
    """Return the answer to an object that has no room in the ledger now, although the stored objects may leave room."""
    shortages = decision.shortages
    if not decision.counted:
        outcome, why = Outcome.OVER_QUOTA_UNCOUNTED, "the stored pods could not be counted in time"
    elif any(shortage.rests_on_reserved for shortage in shortages):
        outcome, why = Outcome.OVER_QUOTA_RESERVED, "reserved quota is being released"
    elif any(shortage.team for shortage in shortages):
        outcome, why = Outcome.OVER_QUOTA_RESERVED, TEAM_RELEASED
    elif any(shortage.rests_on_pending for shortage in shortages):
        seconds = review.policy.storable_seconds
        within = f" within {seconds:g} s" if seconds else ""
        outcome = Outcome.OVER_QUOTA_PENDING
        why = (
            f"quota of admitted pods that were never created is being released{within}; if this lasts, {UNSTORED_CAUSE}"
        )
    else:
        outcome, why = Outcome.OVER_QUOTA_NOT_RECOUNTED, DELETED_RELEASED
    message = f"{exceeded(review.namespace, *shortages)}; {why}"
    return Rejection(outcome, message, soon=decision.soon, model=shortages[0].model)


def _warning(review: Review, model: str, admitted: Admitted) -> str:
    """Return a warning about the quota of an admitted object; empty if none applies.

    It is the first of these that applies: the object exceeds a quota that only warns; the charge needs a grant (a
    temporary addition to the limit) that will end; the quota is nearly used up.
    """
    if admitted.shortage:
        return f"{exceeded(review.namespace, admitted.shortage)}; {decisions.ADMITTED_ALL_THE_SAME}"
    scopes = [*_scopes(review, admitted)]
    endings = (grant_words.ending(each.where, each.quota, model, each.used) for each in scopes if each.quota.granted)
    return next(filter(None, (*endings, *(_nearly_full(each, model) for each in scopes))), "")


class _Scope(NamedTuple):
    """The limits of the namespace or of its team, and the usage under these limits."""

    where: str
    quota: NamespaceQuota
    used: Charge
    used_in_total: Charge


def _scopes(review: Review, admitted: Admitted) -> Iterator[_Scope]:
    team, usage, total = review.quota.team, admitted.usage, admitted.total_usage or Usage()
    # If the entry of the namespace has no limits, the limits of its team are used. Then the warning names the team.
    if team is None or (team.limits, team.total) != (review.quota.limits, review.quota.total):
        yield _Scope(f"namespace {review.namespace}", review.quota, usage.in_use, total.in_use)
    if team is not None:
        of_team = review.policy.quota.of_team(team.name)
        yield _Scope(f"team {team.name}", of_team, usage.in_use + usage.others, total.in_use + total.others)


def _nearly_full(scope: _Scope, model: str) -> str:
    used, limit, in_total = scope.used, scope.quota.limits.get(model, NO_LIMIT), scope.quota.total
    if not is_nearly_full(used, limit):
        if not in_total or not is_nearly_full(scope.used_in_total, in_total):
            return ""
        model, used, limit = TOTAL, scope.used_in_total, in_total
    amounts = [] if limit.cores is None else [f"{cards(used.cores)} of {cards(limit.cores)}"]
    amounts += [] if limit.memory is None else [f"{used.memory_under(limit)} of {limit.memory} MiB"]
    return f"the GPU quota is nearly used up: {model} in {scope.where}, {', '.join(amounts)}"
