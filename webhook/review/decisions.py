"""Decides the creation of an object in a namespace with a limit: chooses its GPU model, and charges it.

`pod_review` and `claim_review` read an object, and decide by these functions. Each decision is a `Verdict`. It is a
value, from which `webhook.review.answers` makes the answer. /validate does not read the annotation with the wanted
models, because a tenant can write any annotation.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import msgspec

from vcuda.admission_review import AdmissionRequest, AdmissionResponse, Outcome, ReviewDeadline
from vcuda.errors import Fault, limited
from vcuda.k8s_types import ObjectMeta, Operation
from vcuda.ledger.ledger import NO_MODEL, Admitted, Pending, Rejected
from vcuda.placement.choice import MAX_NAMED, Choice, choose, choose_regardless, read_wish
from vcuda.placement.placement import Candidates
from vcuda.quota.model import Charge, Mode, NamespaceQuota
from vcuda.quota.rejections import malformed_request
from vcuda.quota.shortage import Shortage
from vcuda.quota.values import listed
from vcuda.quota.well_known import DNS_LABEL, MODELS_ANNOTATION
from webhook.caches import RecentChoices, SkippedMutate
from webhook.ledger.charging import ChargeRequest, Ledgers, PutOff, RetryLater
from webhook.review.context import PolicySnapshot

MODELS_PATH = f"metadata.annotations[{MODELS_ANNOTATION}]"

ADMITTED_ALL_THE_SAME = "the object is admitted, because this quota only warns"

RETRY_AFTER_SECONDS = 1

MAX_OF_NAMESPACE = 63


class Creation(msgspec.Struct, frozen=True, gc=False):
    """The review of an object that is being created, with the policy and the ledgers by which it is decided."""

    request: AdmissionRequest
    policy: PolicySnapshot
    ledgers: Ledgers
    choices: RecentChoices = msgspec.field(default_factory=RecentChoices)
    deadline: ReviewDeadline = msgspec.field(default_factory=ReviewDeadline)
    skipped: SkippedMutate | None = None
    """The namespaces whose pods are retried, because the API server skips /mutate; None to reject such pods at once."""


class Review(msgspec.Struct, frozen=True, gc=False):
    """An object in a namespace with a limit, as it was read for /mutate or /validate."""

    namespace: str
    quota: NamespaceQuota
    policy: PolicySnapshot
    faults: tuple[Fault, ...] = ()
    """The faults in the GPU request of the object, each with the path of its field."""
    scheme: str = ""
    """The schemes (vendors' ways to request GPUs) of the object, for example hami. For metrics and logs."""
    may_wait: bool = True
    """True if the answer may have status 429, after which clients wait and retry; otherwise the status is 403."""

    @property
    def enforced(self) -> bool:
        return self.quota.mode is Mode.ENFORCE

    def must_record(self, grace: int) -> bool:
        """Return True if the ledger must record this grace period, because a pending charge may end before the pod."""
        storable = self.policy.storable_seconds
        return storable is not None and grace > storable

    def warnings(self, *sentences: str) -> tuple[str, ...]:
        """Return all warnings for the owner: about faults, and ``sentences``. In audit mode, return none."""
        if self.quota.mode is Mode.AUDIT:
            return ()
        wrong = [f"{malformed(self.faults).message}; {ADMITTED_ALL_THE_SAME}"] if self.faults else []
        return (*wrong, *filter(None, sentences))


class AdmittedCharge(msgspec.Struct, frozen=True, gc=False):
    """The ledger has admitted the object.

    ``tolerated``: faults of the object, for which an enforced quota would reject it. They become warnings.
    """

    model: str
    admitted: Admitted
    tolerated: Sequence[str] = ()


class OverQuota(msgspec.Struct, frozen=True, gc=False):
    """No model has enough free quota for the object. ``shortages``: one for each model that it may use."""

    shortages: Sequence[Shortage]


class Rejection(msgspec.Struct, frozen=True, gc=False):
    """The request is rejected, for a reason that needs no figures of the quota."""

    outcome: Outcome
    message: str
    faults: Sequence[Fault] = ()
    soon: bool = False
    """True if a retry within 2 s is likely to succeed."""
    model: str = ""


Simple = AdmissionResponse | Rejection

Verdict = Simple | AdmittedCharge | OverQuota | PutOff


class Allowed(msgspec.Struct, frozen=True, gc=False):
    """The GPU models that an object may use, and functions that return its charge and its patch for a given model."""

    candidates: Candidates
    charge_on: Callable[[str], Charge]
    patch: Callable[[str], Sequence[Operation]]
    selector: str = ""
    """The node label by which a pod can select one model; empty for a claim."""


def misnamed(namespace: str) -> Rejection | None:
    if DNS_LABEL.fullmatch(namespace):
        return None
    # An invented namespace name may be as long as the request. So the message contains only the first part of the name.
    message = f"{namespace[:MAX_OF_NAMESPACE]!r} is not a valid namespace name"
    return Rejection(Outcome.BAD_REQUEST, message)


def unread(kind: str, error: Exception, quota: NamespaceQuota | None) -> Simple:
    """Return the verdict about an object that cannot be decoded. A quota that only warns or audits does not reject."""
    message = f"the {kind} cannot be read: {error}"
    # An admitted object that cannot be decoded is not charged now. The controller charges it after it has been stored.
    if quota is None or quota.mode is Mode.ENFORCE:
        return Rejection(Outcome.MALFORMED, message)
    warnings = [f"{message}; {ADMITTED_ALL_THE_SAME}"] if quota.mode is Mode.WARN else []
    return AdmissionResponse(Outcome.MALFORMED, warnings=warnings)


def malformed(faults: Sequence[Fault]) -> Rejection:
    shown = limited(faults)
    return Rejection(Outcome.MALFORMED, malformed_request("; ".join(map(str, shown))), shown)


def check_wish(review: Review, annotations: Mapping[str, str]) -> str | Rejection:
    """Check the annotation in which the owner of an object names the wanted models.

    Return a warning for the owner if the annotation is wrong, and the quota only warns or audits; otherwise empty.
    """
    try:
        wish = read_wish(annotations)
        fault = wish.unknown(review.policy.quota.models | review.policy.nodes.models) if wish else None
    except ValueError as error:
        wish, fault = None, str(error)
    if fault:
        wrong = malformed((Fault(MODELS_PATH, fault),))
    elif wish and (unlisted := wish.unlisted(review.namespace, review.quota)):
        wrong = Rejection(Outcome.NOT_ALLOWED, unlisted)
    else:
        return ""
    return wrong if review.enforced else f"{wrong.message}; {ADMITTED_ALL_THE_SAME}"


async def pin(create: Creation, review: Review, allowed: Allowed, warning: str) -> Verdict:
    """Choose a model with enough free quota, and pin the object to it. ``warning``: a warning for the owner, or empty.

    Raises Unavailable if the ledger could not be read.
    """
    several = _several_models(review, allowed) if review.quota.one_model else ""
    if several and review.enforced:
        return Rejection(Outcome.NOT_ALLOWED, several)
    choice = await _choose(create, review, allowed)
    if not isinstance(choice, Choice):
        return choice
    create.deadline.check()
    patch = allowed.patch(choice.model)
    if not create.request.dry_run:
        create.choices.add(review.namespace, choice.model, allowed.charge_on(choice.model))
    # A dry run returns the reason for the chosen model as a warning. Other calls do so only if nodes have changed the
    # choice. The audit log always has the reason.
    reason = choice.forecast if create.request.dry_run else choice.notice
    several = several and f"{several}; {ADMITTED_ALL_THE_SAME}"
    return AdmissionResponse(
        Outcome.PINNED,
        patch=patch,
        warnings=review.warnings(warning, several, reason),
        reason=choice.reason,
        model=choice.model,
        scheme=review.scheme,
        rule=choice.rule,
    )


def _several_models(review: Review, allowed: Allowed) -> str:
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


async def _choose(create: Creation, review: Review, allowed: Allowed) -> Choice | OverQuota | PutOff:
    namespace, team, rule = review.namespace, review.quota.team, allowed.candidates.rule
    options = functools.partial(allowed.candidates.options, review.quota, allowed.charge_on)
    usage = create.choices.on_top_of(await create.ledgers.cached_usage(namespace, team), namespace)
    choice = choose(options(usage), rule)
    if isinstance(choice, Choice):
        return choice
    # The usage in memory may be outdated. It also includes models chosen for pods that are not charged yet. A rejection
    # must not depend on either, so read the ledger.
    usage = await create.ledgers.usage(namespace, team)
    if not review.enforced:
        return choose_regardless(options(usage), rule)
    choice = choose(options(usage), rule)
    if isinstance(choice, Choice):
        return choice
    # The ledger may still contain the charges of deleted objects. If the stored objects alone leave enough quota, pin
    # the object, and let /validate decide.
    if not all(shortage.can_never_fit for shortage in choice):
        stored = await create.ledgers.stored_usage(namespace, choice, usage, create.deadline.end)
        if stored is None:
            return PutOff(choice, counted=False)
        choice = choose(options(stored), rule)
    return choice if isinstance(choice, Choice) else OverQuota(choice)


async def charge(
    create: Creation, review: Review, of: ObjectMeta, entry: Pending, tolerated: Sequence[str] = ()
) -> Verdict:
    """Charge the object with the metadata ``of``. Raises Unavailable if the ledger could not be read or written.

    ``entry.grace``: the grace period of a pod. ``tolerated``: as in `AdmittedCharge`.
    """
    # The object's choice of a model at /mutate would be counted together with the charge, so remove the choice. A dry
    # run has recorded no choice and is not charged.
    if not create.request.dry_run:
        create.choices.release(review.namespace, entry.model, entry.charge)
    if not of.uid:
        # The ledger identifies a charge by the uid. The API server sets the uid after it has called mutating webhooks.
        message = f"the {create.request.kind.kind.lower()} has no uid yet; register this path as a validating webhook"
        return Rejection(Outcome.BAD_REQUEST, message)
    return await _charge(create, review, of, entry, tolerated)


async def record_grace(create: Creation, review: Review, of: ObjectMeta, grace: int) -> Verdict | None:
    """Record in the ledger the grace period of a pod that gets GPUs only by ResourceClaims, which are charged instead.

    Return None if the period is recorded or needs no record; otherwise return the verdict that rejects the pod. Raises
    Unavailable if the ledger could not be read or written.
    """
    if not (review.must_record(grace) and of.uid):
        return None
    verdict = await _charge(create, review, of, Pending(NO_MODEL, Charge(), grace))
    return None if isinstance(verdict, AdmittedCharge) else verdict


async def _charge(
    create: Creation, review: Review, of: ObjectMeta, entry: Pending, tolerated: Sequence[str] = ()
) -> Verdict:
    request, deadline = create.request, create.deadline
    created = math.inf
    # In a CREATE, the API server has just set the creationTimestamp, whatever value the client sent. In an UPDATE, the
    # timestamp is not used, because it may be old.
    if request.operation == "CREATE" and of.creation_timestamp:
        with contextlib.suppress(ValueError):
            created = datetime.fromisoformat(of.creation_timestamp).timestamp()
    charged = ChargeRequest(
        review.namespace,
        of.uid,
        entry.model,
        entry.charge,
        quota=review.quota,
        deadline=deadline.end,
        counted_since=review.policy.quota.version,
        dry_run=bool(request.dry_run),
        created=created,
        grace=entry.grace if review.must_record(entry.grace) else 0,
    )
    deadline.check()
    if not request.dry_run:
        deadline.keep()
    match await create.ledgers.charge(charged):
        case Admitted() as admitted:
            return AdmittedCharge(entry.model, admitted, tolerated)
        case Rejected(shortage):
            return OverQuota((shortage,))
        case RetryLater(reason, soon):
            message = f"{reason}; try again in {RETRY_AFTER_SECONDS} s" if soon else reason
            return Rejection(Outcome.BUSY, message, soon=soon, model=entry.model)
        case PutOff() as later:
            return later
