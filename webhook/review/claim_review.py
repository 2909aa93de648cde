"""Decides the creation of a ResourceClaim: /mutate pins the claim to a GPU model, and /validate charges the claim.

A ResourceClaimTemplate is not charged: Kubernetes makes claims from the template, and each claim is charged. A new
template is rejected if its claims can never be admitted. It is admitted with a warning if its claims must wait for free
quota. A changed template, and the templates that a pod names, are not reviewed. Their claims are.
"""

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType

from vcuda.admission_review import MAX_REPAIRED, AdmissionRequest, AdmissionResponse
from vcuda.claims.charges import ClaimRequest, ambiguous
from vcuda.claims.digest import ClaimDigest, digest_of
from vcuda.claims.names import CLAIM, TEMPLATE
from vcuda.claims.objects import ResourceClaim, ResourceClaimTemplate
from vcuda.claims.request import read_claim
from vcuda.errors import Fault
from vcuda.k8s_types import UNDECODABLE, Decoder, ObjectMeta
from vcuda.placement.node_states import NodeStates
from vcuda.placement.nodes import NO_NODES, Nodes
from vcuda.placement.placement import Candidates
from vcuda.quota.model import NOT_MUTATED, NamespaceQuota, exceeded
from vcuda.quota.preference import ordered_models
from vcuda.quota.terms import MODELS_ANNOTATION
from vcuda.requests.bypasses import find_unlimited
from webhook.ledger.ledgers import Ledgers
from webhook.review import verdicts
from webhook.review.context import PolicySnapshot
from webhook.review.models import Allowed, check_wish, pin

WAITS = "a claim from this template must wait until the quota is free"

NO_DEVICES = "no node publishes such devices now"
REQUIRED = f"`require_nodes` of the quota, because {NO_DEVICES}"

_CLAIMS = Decoder(ResourceClaim, MAX_REPAIRED)
_TEMPLATES = Decoder(ResourceClaimTemplate, MAX_REPAIRED)


class ClaimReview(verdicts.Review, frozen=True, gc=False, kw_only=True):
    """A ResourceClaim or ResourceClaimTemplate that requests GPUs in a namespace with a quota."""

    metadata: ObjectMeta
    request: ClaimRequest


def review_of(request: AdmissionRequest, policy: PolicySnapshot) -> ClaimReview | AdmissionResponse:
    """Return the claim or template that needs a decision, or the answer to the review if none is needed."""
    if request.kind.kind not in (CLAIM, TEMPLATE):
        message = f"this webhook reviews ResourceClaims, not {request.kind.kind}; correct the webhook's rules"
        return AdmissionResponse("bad-request", False, HTTPStatus.BAD_REQUEST, message)
    # Updates are not decided, because Kubernetes forbids changing the requests of a stored claim.
    if request.operation != "CREATE" or request.sub_resource:
        return AdmissionResponse("ignored")
    # A scheduler creates claims for pods that request extended resources. Such a claim is not charged, because its pod
    # has already been charged and pinned.
    if request.kind.kind == CLAIM and request.user_info.username in (
        policy.scheduler_users | policy.resources.scheduler_users
    ):
        return AdmissionResponse("scheduler")
    quota, misnamed = policy.quota.for_namespace(request.namespace), verdicts.misnamed(request.namespace)
    if misnamed or quota is None:
        return misnamed or AdmissionResponse("unlimited")
    try:
        return _read(request, quota, policy)
    except UNDECODABLE as error:
        message = f"the {request.kind.kind} cannot be read: {error}"
        return verdicts.admitted_unread(AdmissionResponse("malformed", False, HTTPStatus.BAD_REQUEST, message), quota)


def _read(request: AdmissionRequest, quota: NamespaceQuota, policy: PolicySnapshot) -> ClaimReview | AdmissionResponse:
    metadata, digest, annotations, under = _decode(request)
    asked = read_claim(digest, policy.claim_policy)
    if not asked.entries and not asked.faults:
        return AdmissionResponse("ignored")
    rejections = find_unlimited(annotations) if asked.has_share else ()
    rejected = [each.fault for each in rejections if each.allowance not in quota.allow]
    faults = tuple(Fault(f"{under}{path}", message) for path, message in (*asked.faults, *rejected))
    scheme = ",".join(sorted({entry.found.driver or "" for entry in asked.entries}))
    # A claim never gets a 429, because the client would wait before it repeats the call. During such a wait, a
    # controller blocks one of its few workers, and the scheduler withholds devices from other pods.
    review = ClaimReview(
        request.namespace, quota, policy, faults, scheme=scheme, may_wait=False, metadata=metadata, request=asked
    )
    return verdicts.malformed(faults, scheme) if faults and review.enforced else review


def _decode(request: AdmissionRequest) -> tuple[ObjectMeta, ClaimDigest, Mapping[str, str], str]:
    """Return four values: the object's metadata, the claim's digest and annotations, and the prefix of its field paths.

    A digest (`vcuda.claims.digest`) has the parts of a claim's spec that determine the charge of the claim.
    """
    if request.kind.kind == TEMPLATE:
        template = _TEMPLATES.decode(request.object)
        return template.metadata, digest_of(template.spec.spec), template.spec.annotations, "spec."
    claim = _CLAIMS.decode(request.object)
    return claim.metadata, digest_of(claim.spec), claim.annotations, ""


def find_candidates(
    asked: ClaimRequest,
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
    absent = {model for model in quota.limits if nodes.labels and not asked.is_present(model)}
    excluded = dict.fromkeys(absent if quota.require_nodes else (), REQUIRED)
    excluded |= {model: reason for model in quota.limits if (reason := asked.excludes(model))}
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

    present = frozenset(filter(asked.is_present, ready))
    return Candidates(models, present, reasons, rule, why_not_ready=why_not_ready)


async def mutate(create: verdicts.Creation) -> AdmissionResponse:
    """Return the answer of /mutate: a patch that pins the claim to one GPU model, or a rejection.

    Raises Unavailable if the ledger could not be read.
    """
    review = review_of(create.request, create.policy)
    if isinstance(review, ClaimReview):
        if create.request.kind.kind == TEMPLATE:
            return AdmissionResponse("ignored")
        review = check_wish(review, review.metadata.annotations or {})
    if isinstance(review, AdmissionResponse):
        return review
    create.deadline.check(review.request.steps * len(review.quota.limits))
    policy, annotations = create.policy, review.metadata.annotations or {}
    candidates = find_candidates(review.request, review.quota, annotations, policy.nodes, policy.states)
    if not candidates.models:
        rejection = candidates.sentence("claim", review.namespace, review.quota)
        if review.enforced:
            return verdicts.rejected(review, "not-allowed", rejection)
        warnings = review.warnings(f"{rejection}; {verdicts.ADMITTED_ALL_THE_SAME}")
        return AdmissionResponse("unpinned", warnings=warnings, scheme=review.scheme)

    return await pin(create, review, Allowed(candidates, review.request.charge, review.request.patch))


async def validate(create: verdicts.Creation) -> AdmissionResponse:
    """Charge the claim, and return the answer of /validate.

    Raises Unavailable if the ledger could not be read or written.
    """
    review = review_of(create.request, create.policy)
    if isinstance(review, AdmissionResponse):
        return review
    create.deadline.check()
    if create.request.kind.kind == TEMPLATE:
        create.deadline.check(review.request.steps * len(review.quota.limits))
        return await _check_template(review, create.ledgers)
    model = review.request.model()
    stray = [] if model in review.quota.limits else [f"{NOT_MUTATED}: {_not_held(review, model)}"]
    if model and (product := review.request.policy.products.of_model(model).foreign):
        stray.append(ambiguous(model, product))
    if stray and review.enforced:
        return verdicts.rejected(review, "not-pinned", "; ".join(stray))
    if model is None:
        return AdmissionResponse("unpinned", scheme=review.scheme, warnings=review.warnings(*stray))
    asked = verdicts.Asked(review.metadata, model, review.request.charge(model))
    return await verdicts.charge(create, review, asked, stray=stray)


def _not_held(review: ClaimReview, model: str | None) -> str:
    allowed = [f"{each}: {limit}" for each, limit in review.quota.limits.items() if not limit.blocks]
    return (
        f"each request of a claim must select the products of one GPU model of namespace {review.namespace} "
        f"({', '.join(allowed) or 'none'}), but the requests of this claim select {model or 'no single model'}"
    )


async def _check_template(review: ClaimReview, ledgers: Ledgers) -> AdmissionResponse:
    """Reject a template if its claims can never fit the quota. Warn if the claims must wait for free quota now."""
    namespace, quota, asked = review.namespace, review.quota, review.request
    outcome, sentence, waits = "template", "", False
    candidates = find_candidates(asked, quota)
    if not candidates.models:
        outcome, sentence = "not-allowed", candidates.sentence("claim", namespace, quota)
    elif not asked.faults:
        options = candidates.options(quota, asked.charge, await ledgers.cached_usage(namespace))
        if not any(each.has_room for each in options):
            short = [each.shortage for each in options]
            sentence, waits = exceeded(namespace, *short), not all(each.can_never_fit for each in short)
            outcome = "template" if waits else "over-quota"
    if outcome != "template" and review.enforced:
        return verdicts.rejected(review, outcome, sentence)
    warnings = [f"{sentence}; {WAITS if waits else verdicts.ADMITTED_ALL_THE_SAME}"] if sentence else []
    return AdmissionResponse("template", warnings=review.warnings(*warnings), scheme=review.scheme)
