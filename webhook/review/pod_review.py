"""Decides the creation of a pod. /mutate chooses a GPU model and patches the pod. /validate charges the pod.

/mutate writes to no ledger. /validate computes the charge again from the pod as it will be stored. Only /validate
admits pods. No pod is admitted or rejected because of its annotation `quota.vcuda.io/model`. It decides only whether a
rejected pod, which lacks the patch of /mutate, gets status 429 or 403.
"""

from collections.abc import Collection, Iterator, Sequence

import msgspec
from jsonpointer import JsonPointer

from vcuda.admission_review import AdmissionRequest, AdmissionResponse, Outcome
from vcuda.errors import Fault
from vcuda.k8s_types import MIRROR_ANNOTATION, UNDECODABLE, Check, Decoder, Operation, Pod, no_check
from vcuda.ledger.ledger import Pending
from vcuda.placement import patches, placement
from vcuda.placement.placement import DEFAULT_SCHEDULER, HOSTNAME, find_serving, reaches
from vcuda.quota.allowances import Allowance
from vcuda.quota.model import NamespaceQuota
from vcuda.quota.rejections import unpatched
from vcuda.quota.values import listed
from vcuda.quota.well_known import MODEL_ANNOTATION
from vcuda.requests.bypasses import could_reach_gpus, find_bypasses
from vcuda.requests.pod_request import PodRequest, read_request, requests_gpus, resources_of
from vcuda.requests.resources import MAX_PRODUCT, PLAIN_CARDS
from webhook.caches import SKIPPED_SECONDS
from webhook.review import decisions
from webhook.review.context import PolicySnapshot
from webhook.review.decisions import Creation, Rejection, Simple, Verdict

# The group of every kubelet. The groups in a review can be trusted, because the API server has authenticated the user.
# The fields of the pod cannot be trusted, because the creator of the pod writes them.
NODES_GROUP = "system:nodes"

# A rejection lists at most this many annotations and labels to remove, because a pod may have thousands of them.
MAX_RECORDS = 10
# A rejection lists at most this many models of the pod's node affinity, which may have a hundred thousand.
MAX_MODELS = 10
# A rejection shows at most this many characters of the pod's schedulerName, which may be very long.
MAX_OF_SCHEDULER = 63

GRACE = "spec.terminationGracePeriodSeconds"
# After a forced deletion, the containers of a pod may run on for its grace period, and the pod is charged for so long.
TOO_LONG = "must be at most {} (--max-terminating-seconds), because a deleted pod is charged for no longer; got {}"
# A pod with this finalizer is deleted by the propagation policy Orphan, so its ResourceClaims stay.
ORPHAN = "orphan"
ORPHANS = "must not contain orphan, because the ResourceClaims of the pod would stay after its deletion"

_PODS = Decoder(Pod)


class PodReview(decisions.Review, frozen=True, gc=False, kw_only=True):
    """A pod in a namespace with a limit. The pod requests GPUs itself (``request.asks``), or only by ResourceClaims
    (``claims``). If it requests none, it has allocation records, which a new pod must not have."""

    pod: Pod
    request: PodRequest
    claims: bool

    def pin_settings(self, model: str | None) -> patches.PinSettings:
        """Return the node labels and scheduler for the pod's patch. ``model``: the model to which it is pinned."""
        general = self.policy.pin_settings.of(self.request.schemes)
        if model is None:
            return general
        nodes = self.policy.nodes
        served = find_serving(self.pod, self.request, nodes.having(model), nodes, general.scheduler)
        return msgspec.structs.replace(general, scheduler=served.scheduler, avoided=served.avoided)


def read(request: AdmissionRequest, policy: PolicySnapshot, check: Check = no_check) -> PodReview | Simple:
    """Return the pod that needs a decision, or the verdict if none is needed."""
    quota = policy.quota.for_namespace(request.namespace)
    pod = gpu_pod_of(request, quota)
    check()
    if isinstance(pod, Simple):
        return pod
    check(policy.resources.steps(name for _, each in pod.all_containers() for name in resources_of(each)))
    if is_mirror(request, pod):
        return AdmissionResponse(Outcome.MIRROR)
    if misnamed := decisions.misnamed(request.namespace):
        return misnamed
    if quota is None:
        return AdmissionResponse(Outcome.UNLIMITED if requests_gpus(pod, policy.resources) else Outcome.IGNORED)
    gpus = read_request(pod, policy.resources, check)
    check()
    claims = bool(pod.spec.resource_claims and policy.claims)
    charged = gpus.asks or claims
    faults = [*faults_of(pod, gpus, policy, quota.allow, check)]
    if charged and pod.spec.grace_seconds > policy.max_terminating:
        faults.append(Fault(GRACE, TOO_LONG.format(policy.max_terminating, pod.spec.grace_seconds)))
    if charged and ORPHAN in (pod.metadata.finalizers or ()):
        faults.append(Fault("metadata.finalizers", ORPHANS))
    check()
    # HAMi and NVIDIA's device plugin use one resource for whole cards. So the metrics name this resource, not a vendor.
    plain = {each for each in gpus.schemes if each.counts_plain_cards and each not in gpus.registered}
    names = [PLAIN_CARDS if each in plain else each.name for each in gpus.schemes]
    scheme = ",".join([*sorted(names), *["units"] * gpus.by_units])
    review = PodReview(request.namespace, quota, policy, tuple(faults), scheme, pod=pod, request=gpus, claims=claims)
    needed = charged or (faults and review.enforced) or patches.unrecorded_patch(pod)
    return review if needed else _not_charged(review)


def faults_of(
    pod: Pod, request: PodRequest, policy: PolicySnapshot, allow: Collection[Allowance], check: Check
) -> Iterator[Fault]:
    yield from request.faults
    extended = policy.claims.devices.extended_resources if policy.claims else None
    for rejection in find_bypasses(pod, request, policy.resources, policy.runtime_classes, extended):
        check()
        if rejection.allowance not in allow:
            yield rejection.fault


def _not_charged(review: PodReview, patch: Sequence[Operation] = ()) -> AdmissionResponse:
    # If the GPU request of a pod is malformed, but the quota only warns or audits, the pod is admitted without a
    # charge. A warning or the log has the faults.
    if not review.faults:
        return AdmissionResponse(Outcome.IGNORED, patch=patch)
    return AdmissionResponse(
        Outcome.MALFORMED, message=decisions.malformed(review.faults).message, patch=patch, warnings=review.warnings()
    )


def gpu_pod_of(request: AdmissionRequest, quota: NamespaceQuota | None) -> Pod | Simple:
    """Return the new pod if it could reach a GPU or has allocation records; otherwise the verdict. The ``quota`` of its
    namespace decides only about a pod that cannot be decoded."""
    kind = request.kind
    if kind.kind != "Pod" or kind.group:
        named = "/".join(part for part in (kind.group, kind.version, kind.kind) if part)
        message = f"this webhook reviews pods, not {named or 'an unnamed kind'}; correct the webhook's rules"
        return Rejection(Outcome.BAD_REQUEST, message)
    # Updates are not decided, because the GPU requests of a stored pod cannot change. An ephemeral container, which can
    # be added to a stored pod, cannot request GPUs.
    if request.operation != "CREATE" or request.sub_resource:
        return AdmissionResponse(Outcome.IGNORED)
    try:
        pod = _PODS.decode(request.object)
    except UNDECODABLE as error:
        return decisions.unread("pod", error, quota)
    return pod if could_reach_gpus(pod) or patches.unrecorded_patch(pod) else AdmissionResponse(Outcome.IGNORED)


def is_mirror(request: AdmissionRequest, pod: Pod) -> bool:
    """Return True if a kubelet creates the pod as the mirror of a static pod, which already runs on the node."""
    # Every user may write the annotation of a mirror pod. So the user of the request must be a kubelet too.
    return MIRROR_ANNOTATION in pod.annotations and NODES_GROUP in (request.user_info.groups or ())


async def mutate(create: Creation, review: PodReview) -> Verdict:
    """Pin the pod to a model. Raises Unavailable if the ledger could not be read in time."""
    request, check = review.request, create.deadline.check
    if not request.asks:
        removed = patches.unrecorded_patch(review.pod)
        if not review.claims:
            return _not_charged(review, removed)
        # A pod that requests cards only by ResourceClaims is not pinned, because each of its claims is pinned.
        in_pools = patches.pools_patch(review.pod, review.quota.pools, create.policy.pin_settings, check)
        return AdmissionResponse(Outcome.CLAIMS, patch=[*in_pools, *removed], warnings=review.warnings())
    warning = decisions.check_wish(review, review.pod.annotations)
    if isinstance(warning, Rejection):
        return warning
    allowed = _allowed(review, check)
    if allowed.candidates.models:
        return await decisions.pin(create, review, allowed, warning)
    if review.enforced:
        return Rejection(Outcome.NOT_ALLOWED, allowed.candidates.sentence("pod", review.namespace, review.quota))
    # The quota only warns or audits, so this pod runs and may get a card. The patch sets the scheduler that allocates
    # the cards, because another scheduler could give the same card to two pods.
    patch = patches.unpinned_patch(review.pod, review.pin_settings(None), check)
    return AdmissionResponse(Outcome.UNPINNED, patch=patch, scheme=review.scheme)


def _allowed(review: PodReview, check: Check) -> decisions.Allowed:
    pod, policy, request = review.pod, review.policy, review.request
    offered, scheduler = _without_claimed(review), review.pin_settings(None).scheduler
    candidates = placement.find_candidates(
        pod, offered, review.quota, policy.nodes, scheduler, states=policy.states, check=check
    )

    def patch(model: str) -> Sequence[Operation]:
        types = patches.type_annotations(pod, request.schemes, model, policy.nodes.types, has_share=request.has_share)
        settings = review.pin_settings(model)
        return patches.patch_for(pod, model, review.quota.pools, types, settings, nodes=policy.nodes, check=check)

    return decisions.Allowed(candidates, request.charge_on, patch, policy.pin_settings.labels.model)


def _without_claimed(review: PodReview) -> PodRequest:
    # If a DeviceClass names an extended resource, the scheduler makes a claim for it, so no node has to offer it.
    claims, request = review.policy.claims, review.request
    claimed = claims.devices.extended_resources if claims else frozenset()
    if claimed.isdisjoint(request.resources):
        return request
    offered = {name: amount for name, amount in request.resources.items() if name not in claimed}
    return msgspec.structs.replace(request, resources=offered)


async def validate(create: Creation, review: PodReview) -> Verdict:
    """Charge the pod. Raises Unavailable if the ledger could not be read or written in time."""
    if not (review.request.asks or review.claims):
        return _recorded(create, review) or _not_charged(review)
    pinned = placement.read_pod_pin(
        review.pod, create.policy.pin_settings.labels, create.policy.resources.models, create.deadline.check
    )
    create.deadline.check()
    metadata, grace = review.pod.metadata, review.pod.spec.grace_seconds
    if not review.request.asks:
        unrecorded = await decisions.record_grace(create, review, metadata, grace)
        return unrecorded or _claiming(create, review, pinned)
    # The pod may lack the patch of /mutate. Another webhook may have undone the patch, or the API server may have
    # skipped /mutate (failurePolicy Ignore). So /validate computes everything again from the pod that will be stored.
    pin_settings = review.pin_settings(pinned.model)
    undone = [*_undone(review, pinned, pin_settings)]
    tolerated = [_lacks(create, review, undone)] if undone else []
    tolerated += other_scheduler(review, pin_settings.scheduler)
    if tolerated and review.enforced:
        return _unpatched(create, review, "; ".join(tolerated), skipped=bool(undone))
    # A node cannot have a model with a longer name. Such a name must not become a key in the ledger.
    if pinned.model is None or (len(pinned.model) > MAX_PRODUCT and pinned.model not in review.quota.limits):
        return AdmissionResponse(Outcome.UNPINNED, warnings=review.warnings(*tolerated), scheme=review.scheme)
    entry = Pending(pinned.model, review.request.charge_on(pinned.model), grace)
    return await decisions.charge(create, review, metadata, entry, tolerated)


def _unpatched(create: Creation, review: PodReview, message: str, *, skipped: bool) -> Rejection:
    """Return the rejection of a pod that lacks changes of /mutate. ``skipped``: /mutate would still change the pod.

    The API server skips /mutate while no replica answers. Clients repeat a request after a 429 with retryAfterSeconds,
    but not after a 403. So a pod without any trace of /mutate gets 429 at first.
    """
    if not skipped or create.skipped is None or MODEL_ANNOTATION in review.pod.annotations:
        return Rejection(Outcome.NOT_PINNED, message)
    if create.skipped.may_pass(review.namespace):
        return Rejection(Outcome.NOT_MUTATED, f"{message}; try again in {decisions.RETRY_AFTER_SECONDS} s", soon=True)
    if _failure(create, review):
        return Rejection(Outcome.NOT_PINNED, message)
    seconds = SKIPPED_SECONDS
    likely = f"/mutate has patched no such pod for {seconds:g} s, so its registration is probably missing or wrong"
    return Rejection(Outcome.NOT_PINNED, f"{message}; {likely}")


def _lacks(create: Creation, review: PodReview, undone: Sequence[str]) -> str:
    """Return the error message for the changes of /mutate that the pod lacks."""
    return unpatched(undone, _failure(create, review))


def _failure(create: Creation, review: PodReview) -> str:
    """Return why /mutate of this replica failed lately in the namespace; empty if the pod has a trace of /mutate."""
    if create.skipped is None or MODEL_ANNOTATION in review.pod.annotations:
        return ""
    return create.skipped.failure(review.namespace)


def _recorded(create: Creation, review: PodReview, undone: Sequence[str] = ()) -> Rejection | None:
    """Return the rejection of a pod that requests no GPU itself, if it has allocation records or faults ``undone``."""
    undone = [*undone, *left_to_mutate(patches.unrecorded_patch(review.pod))]
    if undone and review.enforced:
        return _unpatched(create, review, _lacks(create, review, undone), skipped=True)
    return None


def _claiming(create: Creation, review: PodReview, pin: placement.Pin) -> Simple:
    """Return the verdict about a pod that requests cards only by ResourceClaims. Only the claims are charged."""
    # The webhook does not judge the templates that the pod names, because replicas keep no copy of the templates.
    undone = [] if pin.in_pools(review.quota) else [_outside_pools(review)]
    warnings = review.warnings(*(_lacks(create, review, [each]) for each in undone))
    return _recorded(create, review, undone) or AdmissionResponse(Outcome.CLAIMS, warnings=warnings)


def _undone(review: PodReview, pin: placement.Pin, pin_settings: patches.PinSettings) -> Iterator[str]:
    """Yield a phrase of the error message for each part of a pod that is not as /mutate would patch it."""
    pod, nodes = review.pod, review.policy.nodes
    if not pin.within(review.quota):
        yield _unpinned(review, pin)
    yield from left_to_mutate(patches.unpinned_patch(pod, pin_settings))
    if pin.model is None:
        return
    if pin_settings.avoided and reaches(pod, nodes, HOSTNAME, pin_settings.avoided):
        yield "the pod's node selection allows nodes that its scheduler must not use"
    request, types = review.request, nodes.types
    for what in patches.reachable_others(pod, request.schemes, pin.model, types, has_share=request.has_share):
        yield f"the pod's annotations allow {what}"


def left_to_mutate(patch: Sequence[Operation]) -> Iterator[str]:
    """Yield a phrase of the error message for each change in ``patch``: what /mutate would still change in the pod."""
    removed = [operation["path"] for operation in patch if operation["op"] == "remove"]
    records = [JsonPointer(path).parts[-1] for path in removed if path.startswith("/metadata/")]
    if "/spec/nodeName" in removed:
        yield "spec.nodeName is set, which bypasses the scheduler"
    if records:
        yield f"the pod has allocation records: {listed(records, MAX_RECORDS)}"
    if any(operation["path"] == "/spec/schedulerName" for operation in patch):
        yield "spec.schedulerName is not the scheduler of vcuda pods"


def other_scheduler(review: PodReview, scheduler: str | None) -> Iterator[str]:
    """Yield a phrase if the pod names a scheduler other than ``scheduler``, which allocates the cards of its model."""
    named = review.pod.spec.scheduler_name
    # Two schedulers could give the same free card to two pods. But a pod may use any scheduler if it requests only
    # resources that Kubernetes itself counts on each node.
    if scheduler and review.request.schemes and named not in ("", scheduler, DEFAULT_SCHEDULER):
        name = named[:MAX_OF_SCHEDULER]
        yield f"spec.schedulerName must be {scheduler} or empty, because {name} may assign cards that are not free"


def _unpinned(review: PodReview, pin: placement.Pin) -> str:
    """Return why the pod is rejected: it is not restricted to one allowed GPU model, or to its namespace's pools."""
    quota = review.quota
    if pin.model in quota.limits:
        return _outside_pools(review)
    allowed = [f"{model}: {limit}" for model, limit in quota.limits.items() if not limit.blocks]
    found = "any" if pin.models is None else listed(sorted(pin.models), MAX_MODELS)
    return (
        "a required node affinity or nodeSelector must restrict the pod to one GPU model of namespace "
        f"{review.namespace} ({', '.join(allowed) or 'none'}), but the pod allows these models: {found}"
    )


def _outside_pools(review: PodReview) -> str:
    pools = ", ".join(review.quota.pools)
    return (
        "a required node affinity or nodeSelector must restrict the pod to the pools of namespace "
        f"{review.namespace}: {pools}"
    )
