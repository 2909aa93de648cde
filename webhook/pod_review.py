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

NODES_GROUP = "system:nodes"

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
        wrong = [f"{malformed_sentence(faults)}; admitted, because this quota only warns"] if faults else []
        return (*wrong, *self.request.warnings, *sentences)


def review_of(request: AdmissionRequest, policy: PolicySnapshot) -> PodReview | AdmissionResponse:
    """Return the pod under review, or the answer where the quota has nothing to say."""
    pod = vcuda_pod_of(request)
    return pod if isinstance(pod, AdmissionResponse) else _limited(request, pod, policy)


def vcuda_pod_of(request: AdmissionRequest) -> Pod | AdmissionResponse:
    """Return the vcuda pod that a review creates, or the answer to any other, which is the same under every quota."""
    if request.kind.kind != "Pod" or request.kind.group:
        return _wrong_kind(request)
    if request.operation != "CREATE" or request.sub_resource:
        return AdmissionResponse("ignored")
    try:
        pod = _PODS.decode(request.object)
    except UNDECODABLE as error:
        return AdmissionResponse("malformed", False, HTTPStatus.BAD_REQUEST, f"the pod cannot be read: {error}")
    return pod if asks_for_vcuda(pod) else AdmissionResponse("ignored")


def _limited(request: AdmissionRequest, pod: Pod, policy: PolicySnapshot) -> PodReview | AdmissionResponse:
    if is_mirror(request, pod):
        return AdmissionResponse("mirror")
    quota = policy.quota.for_namespace(request.namespace)
    if quota is None:
        return AdmissionResponse("unlimited")
    too_large = oversized(pod.spec)
    if too_large:
        return _unprocessable((too_large,))
    return PodReview(request.namespace, pod, read_request(pod), quota, policy)


def is_mirror(request: AdmissionRequest, pod: Pod) -> bool:
    """Return whether a kubelet shows one of its static pods: it runs already, and only a node may say so.

    The annotation alone exempts nobody: anyone can write it.
    """
    return MIRROR_ANNOTATION in pod.annotations and NODES_GROUP in (request.user_info.groups or ())


def malformed(review: PodReview) -> AdmissionResponse | None:
    """Return the refusal of a pod that asks for vcuda in a way that means nothing, or None."""
    faults = review.request.faults
    if not faults or not review.enforced:
        return None
    return _unprocessable(faults, review.scheme)


def malformed_sentence(faults: Sequence[Fault]) -> str:
    """Return the message that names everything wrong with a request."""
    return f"{MALFORMED}: " + "; ".join(str(fault) for fault in faults)


def _unprocessable(faults: Sequence[Fault], scheme: str = "") -> AdmissionResponse:
    status = HTTPStatus.UNPROCESSABLE_ENTITY
    return AdmissionResponse("malformed", False, status, malformed_sentence(faults), faults, scheme=scheme)


def refused(review: PodReview, outcome: str, message: str, model: str = "") -> AdmissionResponse:
    """Return a refusal by quota."""
    return AdmissionResponse(outcome, False, HTTPStatus.FORBIDDEN, message, model=model, scheme=review.scheme)


def _wrong_kind(request: AdmissionRequest) -> AdmissionResponse:
    kind = "/".join(part for part in (request.kind.group, request.kind.version, request.kind.kind) if part)
    message = f"this webhook answers for pods, not for {kind or 'an unnamed kind'}; correct the rules that call it"
    return AdmissionResponse("bad-request", False, HTTPStatus.BAD_REQUEST, message)
