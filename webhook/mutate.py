"""/mutate: checks the request, picks a model with room, and injects the hints. It writes nothing."""

from __future__ import annotations

from vcuda.k8s_types import AdmissionRequest, AdmissionResponse
from vcuda.placement.affinity import patch_for, unpinned_patch
from vcuda.placement.placement import Candidates, Choice, choose, choose_regardless, find_candidates
from vcuda.quota.model import Shortage, exceeded
from webhook.context import PolicySnapshot
from webhook.ledgers import Ledgers, RecentChoices
from webhook.pod_review import PodReview, refused, review_of


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
    namespace, asked = review.namespace, review.request
    candidates = find_candidates(review.pod, asked.schemes, review.quota, policy.nodes, asked.share)
    if not candidates.models:
        return _without_model(review, candidates.sentence(namespace, review.quota))
    choice = await _choose(review, candidates, ledgers, choices)
    if not isinstance(choice, Choice):
        return refused(review, "over-quota", exceeded(namespace, *choice), choice[0].model)
    if not request.dry_run:
        choices.add(namespace, choice.model, asked.charge)
    # The reason reaches the API server's audit log alone; who only asks, by a dry run, is told it as a warning.
    forecast = [choice.forecast] if request.dry_run and choice.forecast else []
    return AdmissionResponse(
        "pinned",
        patch=patch_for(review.pod, choice.model, review.quota.pools, asked.schemes, policy.hints),
        warnings=review.warnings(*forecast),
        reason=choice.reason,
        model=choice.model,
        scheme=review.scheme,
    )


async def _choose(
    review: PodReview, candidates: Candidates, ledgers: Ledgers, choices: RecentChoices
) -> Choice | tuple[Shortage, ...]:
    namespace, quota, asked = review.namespace, review.quota, review.request.charge
    usage = choices.on_top_of(await ledgers.cached_usage(namespace), namespace)
    choice = choose(candidates, quota, asked, usage)
    if isinstance(choice, Choice):
        return choice
    # What is remembered, or was only chosen for others, refuses nobody: a refusal is by the ledger as it is.
    decide = choose if review.enforced else choose_regardless
    return decide(candidates, quota, asked, await ledgers.usage(namespace))


def _without_model(review: PodReview, sentence: str) -> AdmissionResponse:
    if review.enforced:
        return refused(review, "not-allowed", sentence)
    # It takes a card like any other: past the scheduler, that card would be given to another pod too.
    return AdmissionResponse("unpinned", patch=unpinned_patch(review.pod, review.policy.hints), scheme=review.scheme)
