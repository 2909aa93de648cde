"""Decides the creation of a ResourceClaim: /mutate pins the claim to a GPU model, and /validate charges the claim.

A ResourceClaimTemplate is not charged: Kubernetes makes claims from the template, and each claim is charged. A new
template is rejected if its claims can never be admitted. It is admitted with a warning if its claims must wait for free
quota. A changed template, and the templates that a pod names, are not reviewed. Their claims are.
"""

from collections.abc import Mapping
from types import MappingProxyType

from vcuda.admission_review import MAX_REPAIRED, AdmissionRequest, AdmissionResponse, Outcome
from vcuda.claims.charges import ClaimRequest, ambiguous
from vcuda.claims.digest import ClaimDigest, digest_of
from vcuda.claims.names import CLAIM, TEMPLATE
from vcuda.claims.objects import ResourceClaim, ResourceClaimTemplate
from vcuda.claims.request import read_claim
from vcuda.errors import Fault
from vcuda.k8s_types import UNDECODABLE, Check, Decoder, ObjectMeta, no_check
from vcuda.ledger.ledger import Pending
from vcuda.placement.choice import ordered_models, shortages_of
from vcuda.placement.nodes import NO_NODES, Nodes, NodeStates
from vcuda.placement.placement import Candidates
from vcuda.quota.model import NamespaceQuota
from vcuda.quota.rejections import unpatched
from vcuda.quota.shortage import exceeded
from vcuda.quota.well_known import MODELS_ANNOTATION
from vcuda.requests.bypasses import find_unlimited
from webhook.ledger.charging import Ledgers
from webhook.review import decisions
from webhook.review.context import PolicySnapshot
from webhook.review.decisions import Creation, Rejection, Simple, Verdict

WAITS = "a claim from this template must wait until the quota is free"

NO_DEVICES = "no node publishes such devices now"
REQUIRED = f"`require_nodes` of the quota, because {NO_DEVICES}"

_CLAIMS = Decoder(ResourceClaim, MAX_REPAIRED)
_TEMPLATES = Decoder(ResourceClaimTemplate, MAX_REPAIRED)


class ClaimReview(decisions.Review, frozen=True, gc=False, kw_only=True):
    """A ResourceClaim or ResourceClaimTemplate that requests GPUs in a namespace with a quota."""

    kind: str
    metadata: ObjectMeta
    request: ClaimRequest


def read(request: AdmissionRequest, policy: PolicySnapshot, _check: Check = no_check) -> ClaimReview | Simple:
    """Return the claim or template that needs a decision, or the verdict if none is needed."""
    kind = request.kind.kind
    if kind not in (CLAIM, TEMPLATE):
        message = f"this webhook reviews ResourceClaims, not {kind}; correct the webhook's rules"
        return Rejection(Outcome.BAD_REQUEST, message)
    # Updates are not decided, because Kubernetes forbids changing the requests of a stored claim.
    # A scheduler creates claims for pods that request extended resources. Such a claim is not charged, because its pod
    # has already been charged and pinned.
    schedulers = policy.scheduler_users | policy.resources.scheduler_users
    created = request.operation == "CREATE" and not request.sub_resource
    if not created or (kind == CLAIM and request.user_info.username in schedulers):
        return AdmissionResponse(Outcome.SCHEDULER if created else Outcome.IGNORED)
    quota, misnamed = policy.quota.for_namespace(request.namespace), decisions.misnamed(request.namespace)
    if misnamed or quota is None:
        return misnamed or AdmissionResponse(Outcome.UNLIMITED)
    try:
        metadata, digest, annotations, under = _decode(request)
        claim_request = read_claim(digest, policy.claim_policy)
    except UNDECODABLE as error:
        return decisions.unread(kind, error, quota)
    if not claim_request.entries and not claim_request.faults:
        return AdmissionResponse(Outcome.IGNORED)
    rejections = find_unlimited(annotations) if claim_request.has_share else ()
    rejected = [each.fault for each in rejections if each.allowance not in quota.allow]
    faults = tuple(Fault(f"{under}{path}", message) for path, message in (*claim_request.faults, *rejected))
    scheme = ",".join(sorted({entry.found.driver or "" for entry in claim_request.entries}))
    # A claim never gets a 429, because the client would wait before it repeats the call. During such a wait, a
    # controller blocks one of its few workers, and the scheduler withholds devices from other pods.
    return ClaimReview(
        request.namespace,
        quota,
        policy,
        faults,
        scheme,
        may_wait=False,
        kind=kind,
        metadata=metadata,
        request=claim_request,
    )


def _decode(request: AdmissionRequest) -> tuple[ObjectMeta, ClaimDigest, Mapping[str, str], str]:
    """Return four values: the object's metadata, the claim's digest and annotations, and the prefix of its field paths.

    A digest (`vcuda.claims.digest`) has the parts of a claim's spec that determine the charge of the claim.
    """
    if request.kind.kind == TEMPLATE:
        template = _TEMPLATES.decode(request.object)
        return template.metadata, digest_of(template.spec.spec), template.spec.annotations, "spec."
    claim = _CLAIMS.decode(request.object)
    return claim.metadata, digest_of(claim.spec), claim.annotations, ""


def find_claim_candidates(
    request: ClaimRequest,
    quota: NamespaceQuota,
    annotations: Mapping[str, str] = MappingProxyType({}),
    nodes: Nodes = NO_NODES,
    states: NodeStates = NodeStates(),  # noqa: B008  # it is immutable
) -> Candidates:
    """Divide the models of ``quota`` into allowed and excluded ones, by the claim's selectors and annotations.

    ``nodes`` and their ``states`` determine which models are ready. If the quota requires nodes, the models whose
    devices no node publishes are excluded too.
    """
    ordered, rule = ordered_models(annotations, quota)
    absent = {model for model in quota.limits if nodes.labels and not request.is_present(model)}
    excluded = dict.fromkeys(absent if quota.require_nodes else (), REQUIRED)
    excluded |= {model: reason for model in quota.limits if (reason := request.excludes(model))}
    excluded |= dict.fromkeys(quota.limits.keys() - set(ordered), f"annotation {MODELS_ANNOTATION}")
    models = tuple(model for model in ordered if model not in excluded)
    reasons = {model: f"{model} is excluded by {excluded[model]}" for model in quota.limits if model in excluded}
    # The claim's pod and its tolerations are unknown, so of the states only cordons and nodes that are not ready count.
    closed, having = states.closed, {model: nodes.having(model) for model in models}
    ready = {model for model in models if not having[model] or having[model] & closed.take(None)}

    def why_not_ready(model: str) -> str:
        if model in absent:
            return NO_DEVICES
        return "" if model in ready else closed.obstacle(having[model], {})

    present = frozenset(filter(request.is_present, ready))
    return Candidates(models, present, reasons, rule, why_not_ready=why_not_ready)


async def mutate(create: Creation, review: ClaimReview) -> Verdict:
    """Pin the claim to a model. Raises Unavailable if the ledger could not be read."""
    annotations, policy = review.metadata.annotations or {}, create.policy
    if review.kind == TEMPLATE:
        return AdmissionResponse(Outcome.IGNORED)
    warning = decisions.check_wish(review, annotations)
    if isinstance(warning, Rejection):
        return warning
    create.deadline.check(review.request.steps * len(review.quota.limits))
    candidates = find_claim_candidates(review.request, review.quota, annotations, policy.nodes, policy.states)
    if candidates.models:
        return await decisions.pin(
            create, review, decisions.Allowed(candidates, review.request.charge, review.request.patch), warning
        )
    sentence = candidates.sentence("claim", review.namespace, review.quota)
    if review.enforced:
        return Rejection(Outcome.NOT_ALLOWED, sentence)
    warnings = review.warnings(warning, f"{sentence}; {decisions.ADMITTED_ALL_THE_SAME}")
    return AdmissionResponse(Outcome.UNPINNED, warnings=warnings, scheme=review.scheme)


async def validate(create: Creation, review: ClaimReview) -> Verdict:
    """Charge the claim. Raises Unavailable if the ledger could not be read or written."""
    create.deadline.check()
    if review.kind == TEMPLATE:
        create.deadline.check(review.request.steps * len(review.quota.limits))
        return await _check_template(review, create.ledgers)
    model = review.request.model()
    tolerated = [] if model in review.quota.limits else [unpatched([_not_pinned(review, model)])]
    if model and (product := review.request.policy.products.of_model(model).foreign):
        tolerated.append(ambiguous(model, product))
    if tolerated and review.enforced:
        return Rejection(Outcome.NOT_PINNED, "; ".join(tolerated))
    if model is None:
        return AdmissionResponse(Outcome.UNPINNED, warnings=review.warnings(*tolerated), scheme=review.scheme)
    entry = Pending(model, review.request.charge(model))
    return await decisions.charge(create, review, review.metadata, entry, tolerated)


def _not_pinned(review: ClaimReview, model: str | None) -> str:
    allowed = [f"{each}: {limit}" for each, limit in review.quota.limits.items() if not limit.blocks]
    return (
        f"each request of a claim must select the products of one GPU model of namespace {review.namespace} "
        f"({', '.join(allowed) or 'none'}), but the requests of this claim select {model or 'no single model'}"
    )


async def _check_template(review: ClaimReview, ledgers: Ledgers) -> Verdict:
    """Reject a template if its claims can never fit the quota. Warn if the claims must wait for free quota now."""
    namespace, quota, request = review.namespace, review.quota, review.request
    outcome, sentence, waits = Outcome.TEMPLATE, "", False
    candidates = find_claim_candidates(request, quota)
    if not candidates.models:
        outcome, sentence = Outcome.NOT_ALLOWED, candidates.sentence("claim", namespace, quota)
    elif not request.faults:
        options = candidates.options(quota, request.charge, await ledgers.cached_usage(namespace, quota.team))
        short = shortages_of(options)
        if len(short) == len(options):
            sentence, waits = exceeded(namespace, *short), not all(each.can_never_fit for each in short)
            outcome = Outcome.TEMPLATE if waits else Outcome.OVER_QUOTA
    if outcome is not Outcome.TEMPLATE and review.enforced:
        return Rejection(outcome, sentence)
    warning = sentence and f"{sentence}; {WAITS if waits else decisions.ADMITTED_ALL_THE_SAME}"
    return AdmissionResponse(Outcome.TEMPLATE, warnings=review.warnings(warning), scheme=review.scheme)
