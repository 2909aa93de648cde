"""Chooses the GPU model for a pod or ResourceClaim at /mutate.

`check_wish` checks the annotation in which the owner names the wanted models. `pin` chooses a model with enough free
quota, and returns the patch that pins the object to this model. /validate calls neither function, and does not read the
annotation, because a tenant can write any annotation.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from vcuda.admission_review import AdmissionResponse
from vcuda.errors import Fault
from vcuda.k8s_types import Operation
from vcuda.placement.choice import Choice, choose, choose_regardless
from vcuda.placement.placement import Candidates
from vcuda.quota.model import Charge
from vcuda.quota.preference import MAX_NAMED, read_wish
from vcuda.quota.terms import MODELS_ANNOTATION
from vcuda.quota.values import listed
from webhook.ledger.ledgers import PutOff
from webhook.review import verdicts

MODELS_PATH = f"metadata.annotations[{MODELS_ANNOTATION}]"

R = TypeVar("R", bound=verdicts.Review)


class Allowed(NamedTuple):
    """The GPU models that an object may use, and functions that return its charge and its patch for a given model."""

    candidates: Candidates
    charge_on: Callable[[str], Charge]
    patch: Callable[[str], Sequence[Operation]]
    selector: str = ""
    """The node label by which a pod can select one model; empty for a claim."""


def check_wish(review: R, annotations: Mapping[str, str]) -> R | AdmissionResponse:
    """Check the annotation in which the owner of an object names the wanted models.

    Return the review if the annotation is valid or missing, and otherwise a rejection. If the quota only warns or
    audits, return the review with a note (a warning for the owner) instead of the rejection.
    """
    try:
        wish = read_wish(annotations)
    except ValueError as error:
        return _malformed(review, str(error))
    if wish is None:
        return review
    policy = review.policy
    if unknown := wish.unknown(policy.quota.models | policy.nodes.models):
        return _malformed(review, unknown)
    if unlisted := wish.unlisted(review.namespace, review.quota):
        return verdicts.rejected(review, "not-allowed", unlisted) if review.enforced else _noted(review, unlisted)
    return review


async def pin(create: verdicts.Creation, review: verdicts.Review, allowed: Allowed) -> AdmissionResponse:
    """Return an answer with the patch that pins the object to a model with enough free quota, or a rejection.

    Raises Unavailable if the ledger could not be read.
    """
    several = _several_models(review, allowed) if review.quota.one_model else ""
    if several and review.enforced:
        return verdicts.rejected(review, "not-allowed", several)
    choice = await _choose(create, review, allowed)
    if isinstance(choice, AdmissionResponse):
        return choice
    create.deadline.check()
    patch = allowed.patch(choice.model)
    if not create.request.dry_run:
        create.choices.add(review.namespace, choice.model, allowed.charge_on(choice.model))
    warnings = [f"{several}; {verdicts.ADMITTED_ALL_THE_SAME}"] if several else []
    # A dry run returns the reason for the chosen model as a warning. Other calls do so only if nodes have changed the
    # choice. The audit log always has the reason.
    reason = choice.forecast if create.request.dry_run else choice.notice
    warnings += [reason] if reason else []
    return AdmissionResponse(
        "pinned",
        patch=patch,
        warnings=review.warnings(*warnings),
        reason=choice.reason,
        model=choice.model,
        rule=choice.rule,
        scheme=review.scheme,
    )


def _several_models(review: verdicts.Review, allowed: Allowed) -> str:
    """Return the error message if the object may use several GPU models, although one is required; else empty."""
    # The message lists models with and without free quota, so that it does not depend on the current usage.
    models = allowed.candidates.models
    if len(models) == 1:
        return ""
    message = (
        f"the quota of namespace {review.namespace} requires one GPU model, but this object may use "
        f"{listed(models, MAX_NAMED)}; set annotation {MODELS_ANNOTATION}: {models[0]}"
    )
    return f"{message}, or nodeSelector {allowed.selector}: {models[0]}" if allowed.selector else message


async def _choose(create: verdicts.Creation, review: verdicts.Review, allowed: Allowed) -> Choice | AdmissionResponse:
    namespace, rule = review.namespace, allowed.candidates.rule
    options = functools.partial(allowed.candidates.options, review.quota, allowed.charge_on)
    usage = create.choices.on_top_of(await create.ledgers.cached_usage(namespace), namespace)
    choice = choose(options(usage), rule)
    if isinstance(choice, Choice):
        return choice
    # The usage in memory may be outdated. It also includes models chosen for pods that are not charged yet. A rejection
    # must not depend on either, so read the ledger.
    usage = await create.ledgers.usage(namespace)
    if not review.enforced:
        return choose_regardless(options(usage), rule)
    choice = choose(options(usage), rule)
    if isinstance(choice, Choice):
        return choice
    # The ledger may still contain the charges of deleted objects. If the stored objects alone leave enough quota, pin
    # the object, and let /validate decide.
    if not all(shortage.can_never_fit for shortage in choice):
        stored = await create.ledgers.stored_usage(namespace, usage, create.deadline.end)
        if stored is None:
            return verdicts.over_quota_for_now(review, PutOff(choice, counted=False))
        choice = choose(options(stored), rule)
    return choice if isinstance(choice, Choice) else verdicts.over_quota(review, *choice)


def _malformed(review: R, message: str) -> R | AdmissionResponse:
    fault = Fault(MODELS_PATH, message)
    if review.enforced:
        return verdicts.malformed((fault,), review.scheme)
    return _noted(review, verdicts.malformed_sentence((fault,)))


def _noted(review: R, sentence: str) -> R:
    return msgspec.structs.replace(review, notes=(*review.notes, f"{sentence}; {verdicts.ADMITTED_ALL_THE_SAME}"))
