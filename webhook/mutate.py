"""/mutate: checks the request, picks a model with room, and injects the hints. It writes nothing."""

from __future__ import annotations

from vcuda.k8s_types import AdmissionRequest, AdmissionResponse
from vcuda.placement.affinity import patch_for, unpinned_patch
from vcuda.placement.placement import Candidates, Choice, choose, choose_regardless, find_candidates
from vcuda.quota.model import Shortage, exceeded
from webhook.context import PolicySnapshot
from webhook.ledgers import Ledgers, RecentChoices
from webhook.pod_review import PodReview, malformed, refused, review_of


async def mutate(
    request: AdmissionRequest, policy: PolicySnapshot, ledgers: Ledgers, choices: RecentChoices
) -> AdmissionResponse:
    """Return the patch that pins the pod, or the refusal of a pod that can get no model now.

    Raises:
        Unavailable: the ledger could not be read.

    """
    review = review_of(request, policy)
    if isinstance(review, AdmissionResponse):
        return review
    return malformed(review) or await _place(review, request, ledgers, choices)


async def _place(
    review: PodReview, request: AdmissionRequest, ledgers: Ledgers, choices: RecentChoices
) -> AdmissionResponse:
    namespace, quota, asked = review.namespace, review.quota, review.request
    candidates = find_candidates(review.pod, asked.schemes, quota, review.policy.nodes, asked.share)
    if not candidates.models:
        return _without_model(review, candidates.sentence(namespace, quota))
    choice = await _choose(review, candidates, ledgers, choices)
    if not isinstance(choice, Choice):
        return refused(review, "over-quota", exceeded(namespace, *choice), choice[0].model)
    if not request.dry_run:
        choices.add(namespace, choice.model, asked.charge)
    return _pinned(review, choice, choice.forecast if request.dry_run else "")


async def _choose(
    review: PodReview, candidates: Candidates, ledgers: Ledgers, choices: RecentChoices
) -> Choice | tuple[Shortage, ...]:
    """Choose by the ledger of a moment ago and by what is held; where that leaves no room, by the ledger as it is."""
    namespace, quota, asked = review.namespace, review.quota, review.request.charge
    estimate = choices.on_top_of(await ledgers.cached_usage(namespace), namespace)
    choice = choose(candidates, quota, asked, estimate)
    if isinstance(choice, Choice):
        return choice
    decide = choose if review.enforced else choose_regardless
    return decide(candidates, quota, asked, await ledgers.usage(namespace))


def _without_model(review: PodReview, sentence: str) -> AdmissionResponse:
    if review.enforced:
        return refused(review, "not-allowed", sentence)
    return AdmissionResponse("unpinned", patch=unpinned_patch(review.pod, review.policy.hints), scheme=review.scheme)


def _pinned(review: PodReview, choice: Choice, forecast: str) -> AdmissionResponse:
    """Return the patch. ``forecast`` is for the owner: the reason itself reaches the API server's audit log alone."""
    return AdmissionResponse(
        "pinned",
        patch=patch_for(review.pod, choice.model, review.quota.pools, review.request.schemes, review.policy.hints),
        warnings=review.warnings(*filter(None, [forecast])),
        reason=choice.reason,
        model=choice.model,
        scheme=review.scheme,
    )
