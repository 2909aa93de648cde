"""Finds the GPU model of a pod or ResourceClaim for /mutate: checks its annotation, then chooses a model with room.

/validate never calls these functions: the charge follows from the pin, and a tenant can write any annotation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from vcuda.admission_review import AdmissionResponse
from vcuda.errors import Fault
from vcuda.k8s_types import Operation
from vcuda.placement.choice import Choice, Option, choose, choose_regardless
from vcuda.quota.model import Charge, Usage
from vcuda.quota.preference import MAX_NAMED, Rule, read_wish
from vcuda.quota.terms import MODELS_ANNOTATION
from vcuda.quota.values import listed
from webhook.ledger.ledgers import PutOff
from webhook.review import verdicts

MODELS_PATH = f"metadata.annotations[{MODELS_ANNOTATION}]"

R = TypeVar("R", bound=verdicts.Review)


class Allowed(NamedTuple):
    """The models that an object may use."""

    options: Callable[[Mapping[str, Usage]], Sequence[Option]]
    """Returns the models at this usage, in the order of the rule."""
    rule: Rule
    charge_on: Callable[[str], Charge]
    """Returns the object's charge to a model."""
    patch: Callable[[str], Sequence[Operation]]
    """Returns the operations that pin the object to a model."""
    selector: str = ""
    """The node label by which a pod can select one model."""


def check_wish(review: R, annotations: Mapping[str, str]) -> R | AdmissionResponse:
    """Return the review, or the refusal of an annotation without effect; a note if nothing is enforced."""
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
        return verdicts.refused(review, "not-allowed", unlisted) if review.enforced else _noted(review, unlisted)
    return review


async def pin(create: verdicts.Creation, review: verdicts.Review, allowed: Allowed) -> AdmissionResponse:
    """Return the patch that pins an object to a model with room, or a refusal. Raises Unavailable."""
    several = _several_models(review, allowed) if review.quota.one_model else ""
    if several and review.enforced:
        return verdicts.refused(review, "not-allowed", several)
    choice = await _choose(create, review, allowed)
    if isinstance(choice, AdmissionResponse):
        return choice
    create.deadline.check()
    if not create.request.dry_run:
        create.choices.add(review.namespace, choice.model, allowed.charge_on(choice.model))
    told = [f"{several}; {verdicts.ADMITTED_ALL_THE_SAME}"] if several else []
    # The reason reaches only the API server's audit log. A dry run gets it as a warning.
    told += [choice.forecast] if create.request.dry_run else []
    return AdmissionResponse(
        "pinned",
        patch=allowed.patch(choice.model),
        warnings=review.warnings(*told),
        reason=choice.reason,
        model=choice.model,
        rule=choice.rule,
        scheme=review.scheme,
    )


def _several_models(review: verdicts.Review, allowed: Allowed) -> str:
    """Return the sentence for an object that may use several models; empty if it may use one."""
    # Models without room count too, so the answer does not depend on the load.
    models = [option.model for option in allowed.options({})]
    if len(models) == 1:
        return ""
    by_label = f", or nodeSelector {allowed.selector}: {models[0]}" if allowed.selector else ""
    return (
        f"the quota of namespace {review.namespace} requires one GPU model, and this object may use "
        f"{listed(models, MAX_NAMED)}; set annotation {MODELS_ANNOTATION}: {models[0]}{by_label}"
    )


async def _choose(create: verdicts.Creation, review: verdicts.Review, allowed: Allowed) -> Choice | AdmissionResponse:
    namespace = review.namespace
    usage = create.choices.on_top_of(await create.ledgers.cached_usage(namespace), namespace)
    choice = choose(allowed.options(usage), allowed.rule)
    if isinstance(choice, Choice):
        return choice
    # A cached ledger, or the choices for other objects, must not refuse an object: read the ledger now.
    usage = await create.ledgers.usage(namespace)
    if not review.enforced:
        return choose_regardless(allowed.options(usage), allowed.rule)
    choice = choose(allowed.options(usage), allowed.rule)
    if isinstance(choice, Choice):
        return choice
    # The ledger may still count deleted objects. If the stored objects leave room, pin this one and let /validate
    # decide.
    if not all(shortage.can_never_fit for shortage in choice):
        stored = await create.ledgers.stored_usage(namespace, usage, create.deadline.end)
        if stored is None:
            return verdicts.over_quota_for_now(review, PutOff(choice, counted=False))
        choice = choose(allowed.options(stored), allowed.rule)
    return choice if isinstance(choice, Choice) else verdicts.over_quota(review, *choice)


def _malformed(review: R, message: str) -> R | AdmissionResponse:
    fault = Fault(MODELS_PATH, message)
    if review.enforced:
        return verdicts.malformed((fault,), review.scheme)
    return _noted(review, verdicts.malformed_sentence((fault,)))


def _noted(review: R, sentence: str) -> R:
    return msgspec.structs.replace(review, notes=(*review.notes, f"{sentence}; {verdicts.ADMITTED_ALL_THE_SAME}"))
