"""Whom a review is about: which pods the quota holds, and which it lets pass untouched."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

import msgspec

from vcuda.errors import Fault
from vcuda.k8s_types import MIRROR_ANNOTATION, UNDECODABLE, AdmissionRequest, AdmissionResponse, Pod
from vcuda.placement.affinity import oversized
from vcuda.quota.model import Mode, NamespaceQuota
from vcuda.requests.pod_request import MALFORMED, PodRequest, asks_for_vcuda, read_request
from webhook.context import PolicySnapshot

# Only nodes are in it, by their certificates or bound tokens; the API server does not let one name itself into it.
NODES_GROUP = "system:nodes"

ADMITTED_ALL_THE_SAME = "admitted, because this quota only warns"

_PODS = msgspec.json.Decoder(Pod)


class PodReview(msgspec.Struct, frozen=True, gc=False):
    """A vcuda pod in a namespace with a limit: what /mutate and /validate decide about."""

    namespace: str
    pod: Pod
    request: PodRequest
    quota: NamespaceQuota
    policy: PolicySnapshot

    @property
    def enforced(self) -> bool:
        """Whether what is over the quota, or malformed, is refused."""
        return self.quota.mode is Mode.ENFORCE

    @property
    def scheme(self) -> str:
        """The schemes by which the pod asks, as counted and logged."""
        return ",".join(scheme.name for scheme in self.request.schemes)

    def warnings(self, *sentences: str) -> tuple[str, ...]:
        """Return the sentences for the pod's owner, and those of its request; a quota that only audits tells nobody."""
        if self.quota.mode is Mode.AUDIT:
            return ()
        faults = self.request.faults
        malformed = [f"{malformed_sentence(faults)}; {ADMITTED_ALL_THE_SAME}"] if faults else []
        return (*malformed, *self.request.warnings, *sentences)


def review_of(request: AdmissionRequest, policy: PolicySnapshot) -> PodReview | AdmissionResponse:
    """Return the pod under review, or the answer where its quota has nothing to decide: it has none, or is malformed.

    A malformed pod is under review all the same where its quota does not enforce.
    """
    pod = vcuda_pod_of(request)
    if isinstance(pod, AdmissionResponse):
        return pod
    if is_mirror(request, pod):
        return AdmissionResponse("mirror")
    quota = policy.quota.for_namespace(request.namespace)
    if quota is None:
        return AdmissionResponse("unlimited")
    # Before anything else reads it, and in every mode: to go through such an affinity takes longer than a webhook has.
    too_large = oversized(pod.spec)
    if too_large:
        return _malformed((too_large,))
    review = PodReview(request.namespace, pod, read_request(pod), quota, policy)
    faults = review.request.faults
    return _malformed(faults, review.scheme) if faults and review.enforced else review


def vcuda_pod_of(request: AdmissionRequest) -> Pod | AdmissionResponse:
    """Return the vcuda pod that a review creates, or the answer to any other, which is the same under every quota."""
    kind = request.kind
    if kind.kind != "Pod" or kind.group:
        named = "/".join(part for part in (kind.group, kind.version, kind.kind) if part)
        message = f"this webhook answers for pods, not for {named or 'an unnamed kind'}; correct the rules that call it"
        return AdmissionResponse("bad-request", False, HTTPStatus.BAD_REQUEST, message)
    # A pod's requests for cards cannot be changed once it is stored; ephemeral containers may have no resources.
    if request.operation != "CREATE" or request.sub_resource:
        return AdmissionResponse("ignored")
    try:
        pod = _PODS.decode(request.object)
    except UNDECODABLE as error:
        return AdmissionResponse("malformed", False, HTTPStatus.BAD_REQUEST, f"the pod cannot be read: {error}")
    return pod if asks_for_vcuda(pod) else AdmissionResponse("ignored")


def is_mirror(request: AdmissionRequest, pod: Pod) -> bool:
    """Return whether a kubelet shows one of its static pods: it runs already, and only a node may say so."""
    # The annotation alone exempts nobody: anyone can write it.
    return MIRROR_ANNOTATION in pod.annotations and NODES_GROUP in (request.user_info.groups or ())


def malformed_sentence(faults: Sequence[Fault]) -> str:
    """Return the message that names everything wrong with a request."""
    return f"{MALFORMED}: " + "; ".join(map(str, faults))


def refused(review: PodReview, outcome: str, message: str, model: str = "") -> AdmissionResponse:
    """Return a refusal by quota."""
    # 403 as Kubernetes' own ResourceQuota: a controller that creates pods tries again, with back-off.
    return AdmissionResponse(outcome, False, HTTPStatus.FORBIDDEN, message, model=model, scheme=review.scheme)


def _malformed(faults: Sequence[Fault], scheme: str = "") -> AdmissionResponse:
    # 422 as the API server's own validation: kubectl prints each fault with its path, from the causes of the Status.
    status = HTTPStatus.UNPROCESSABLE_ENTITY
    return AdmissionResponse("malformed", False, status, malformed_sentence(faults), faults, scheme=scheme)
