"""/mutate: checks the request, picks a model with room, and injects the hints. It writes nothing."""

from __future__ import annotations

from vcuda.k8s_types import AdmissionResponse, Request
from vcuda.placement.affinity import patch_for, unpinned_patch
from vcuda.placement.placement import Candidates, Choice, choose, choose_regardless, find_candidates
from vcuda.quota.model import Shortage, exceeded
from webhook.choices import RecentChoices
from webhook.context import PolicySnapshot
from webhook.ledgers import Ledgers
from webhook.pod_review import PodReview, malformed, refused, subject_of


def mutate(request: Request, facts: PolicySnapshot, ledgers: Ledgers, holds: RecentChoices) -> AdmissionResponse:
    """Return the patch that pins the pod, or the refusal of a pod that can get no model now.

    Raises:
        Unreachable: the ledger could not be read.

    """
    subject = subject_of(request, facts)
    if isinstance(subject, AdmissionResponse):
        return subject
    return malformed(subject) or _place(subject, request, ledgers, holds)


def _place(subject: PodReview, request: Request, ledgers: Ledgers, holds: RecentChoices) -> AdmissionResponse:
    namespace, quota, asked = subject.namespace, subject.quota, subject.request
    candidates = find_candidates(subject.pod, asked.schemes, quota, subject.facts.nodes, asked.share)
    if not candidates.models:
        return _without_model(subject, candidates.sentence(namespace, quota))
    choice = _choose(subject, candidates, ledgers, holds)
    if not isinstance(choice, Choice):
        return refused(subject, "over-quota", exceeded(namespace, *choice), choice[0].model)
    if not request.dry_run:
        holds.add(namespace, choice.model, asked.charge)
    return _pinned(subject, choice, choice.forecast if request.dry_run else "")


def _choose(
    subject: PodReview, candidates: Candidates, ledgers: Ledgers, holds: RecentChoices
) -> Choice | tuple[Shortage, ...]:
    """Choose by the ledger of a moment ago and by what is held; where that leaves no room, by the ledger as it is."""
    namespace, quota, asked = subject.namespace, subject.quota, subject.request.charge
    estimate = holds.on_top_of(ledgers.cached_usage(namespace), namespace)
    choice = choose(candidates, quota, asked, estimate)
    if isinstance(choice, Choice):
        return choice
    decide = choose if subject.enforced else choose_regardless
    return decide(candidates, quota, asked, ledgers.usage(namespace))


def _without_model(subject: PodReview, sentence: str) -> AdmissionResponse:
    if subject.enforced:
        return refused(subject, "not-allowed", sentence)
    return AdmissionResponse("unpinned", patch=unpinned_patch(subject.pod, subject.facts.hints), scheme=subject.scheme)


def _pinned(subject: PodReview, choice: Choice, forecast: str) -> AdmissionResponse:
    """Return the patch. ``forecast`` is for the owner: the reason itself reaches the API server's audit log alone."""
    return AdmissionResponse(
        "pinned",
        patch=patch_for(subject.pod, choice.model, subject.quota.pools, subject.request.schemes, subject.facts.hints),
        warnings=subject.warnings(*filter(None, [forecast])),
        reason=choice.reason,
        model=choice.model,
        scheme=subject.scheme,
    )
