"""Tests of which admission reviews are checked against a quota. /mutate and /validate have the same rules."""

from http import HTTPStatus
from typing import Any

import msgspec
import pytest

from tests.builders import container, pod, policy_for, review, vcuda_pod
from tests.tables import cases
from vcuda.admission_review import AdmissionRequest, AdmissionResponse, GroupVersionKind, Outcome, UserInfo
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Quota
from webhook.review.answers import written
from webhook.review.context import PolicySnapshot
from webhook.review.decisions import Rejection
from webhook.review.pod_review import PodReview, read

QUOTA = NamespaceQuota({"M40": Limit(800)})
POLICY = policy_for(QUOTA)
NO_CARD = {"resources": {"limits": {"nvidia.com/gpu": 0}}}
MIRROR = {"kubernetes.io/config.mirror": "hash"}
NODE = UserInfo("system:node:gpu-1", ("system:nodes", "system:authenticated"))


def outcome(request: AdmissionRequest, policy: PolicySnapshot = POLICY) -> str:
    verdict = read(request, policy)
    assert isinstance(verdict, AdmissionResponse)
    assert verdict == AdmissionResponse(verdict.outcome), "admitted without a patch, a warning or a message"
    return verdict.outcome


def limited(request: AdmissionRequest, policy: PolicySnapshot = POLICY) -> PodReview:
    found = read(request, policy)
    assert isinstance(found, PodReview)
    return found


def test_a_vcuda_pod_in_a_limited_namespace_is_decided() -> None:
    found = limited(review(vcuda_pod({"tencent.com/vcuda-core": 200})))
    assert (found.namespace, found.quota, found.policy) == ("team-a", QUOTA, POLICY)
    assert found.request.charge == Charge(200, 0, 200)
    assert found.scheme == "gpu-manager"


def test_two_schemes_are_named_once_each_for_any_number_of_containers() -> None:
    """The names of the schemes are the value of a metric label. Many containers must not lead to further values."""
    both = pod(*[container({"nvidia.com/gpu": 1}), container({"tencent.com/vcuda-core": 100})] * 50)
    assert limited(review(both)).scheme == "gpu-manager,nvidia.com/gpu"


@cases(
    "limits, scheme",
    whole_cards=({"nvidia.com/gpu": 1}, "nvidia.com/gpu"),
    a_share_of_hami=({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}, "hami"),
    a_slice=({"nvidia.com/mig-1g.5gb": 1}, "units"),
)
def test_metrics_name_hami_only_if_no_other_plugin_could_serve_the_request(limits: Any, scheme: str) -> None:
    assert limited(review(pod(container(limits)))).scheme == scheme


def test_the_namespace_is_the_requests_own() -> None:
    """At /mutate, the pod's own field metadata.namespace may still be empty."""
    elsewhere = vcuda_pod(metadata={"namespace": "team-b"})
    assert limited(review(elsewhere, "team-a")).namespace == "team-a"
    assert outcome(review(vcuda_pod(metadata={"namespace": "team-a"}), "team-b")) == "unlimited"


@pytest.mark.parametrize(
    "manifest", [{}, {"resources": {"limits": {"cpu": 1}}}, NO_CARD, {"securityContext": {"privileged": False}}]
)
def test_a_pod_without_a_vcuda_request_is_ignored(manifest: dict[str, Any]) -> None:
    assert outcome(review(pod(container(**manifest)))) == "ignored"


@pytest.mark.parametrize(
    "fields",
    [
        *({"operation": each} for each in ("UPDATE", "DELETE", "CONNECT", "")),
        *({"sub_resource": each} for each in ("binding", "ephemeralcontainers", "status")),
    ],
    ids=str,
)
def test_only_creation_is_decided_and_no_subresource(fields: dict[str, str]) -> None:
    assert outcome(review(vcuda_pod(), **fields)) == "ignored"


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (GroupVersionKind("apps", "v1", "Deployment"), "apps/v1/Deployment"),
        (GroupVersionKind("", "v1", "PodTemplate"), "v1/PodTemplate"),
        (GroupVersionKind("example.com", "v2", "Pod"), "example.com/v2/Pod"),
        (GroupVersionKind(), "an unnamed kind"),
    ],
)
def test_another_kind_is_rejected_as_a_mistake_of_the_configuration(kind: GroupVersionKind, named: str) -> None:
    """If an object of another kind were admitted, nobody would notice that the webhook configuration is wrong."""
    message = f"this webhook reviews pods, not {named}; correct the webhook's rules"
    verdict = read(review(vcuda_pod(), kind=kind), POLICY)
    assert verdict == Rejection(Outcome.BAD_REQUEST, message)
    answer = AdmissionResponse("bad-request", False, HTTPStatus.BAD_REQUEST, message)
    assert written(verdict) == answer


@cases(
    "raw",
    no_object=b"null",
    a_list=b"[]",
    limits_are_a_list=b'{"spec": {"containers": [{"resources": {"limits": []}}]}}',
    no_UTF_8=b'{"spec": {"nodeName": "\xff"}}',
    nested_very_deeply=b'{"spec": {"containers": ' + b"[" * 100_000,
)
def test_an_object_that_is_no_pod_is_rejected(raw: bytes) -> None:
    verdict = read(review(None, object=msgspec.Raw(raw)), POLICY)
    assert isinstance(verdict, Rejection)
    answer = written(verdict)
    assert (answer.outcome, answer.allowed, answer.status) == ("malformed", False, HTTPStatus.BAD_REQUEST)
    assert answer.message.startswith("the pod cannot be read: ")


# Tests of namespaces without a limit


@cases(
    "quota, namespace, limited",
    no_quota_at_all=(Quota(), "team-a", False),
    no_entry=(Quota({"team-b": QUOTA}), "team-a", False),
    the_default=(Quota({}, default=QUOTA), "team-a", True),
    the_default_excludes_system_namespaces=(Quota({}, default=QUOTA), "kube-system", False),
    a_system_namespaces_own_entry=(Quota({"kube-system": QUOTA}), "kube-system", True),
    an_entry_without_a_model=(Quota({"team-a": NamespaceQuota({})}), "team-a", True),
)
def test_a_namespace_is_limited_if_it_has_a_quota(quota: Quota, namespace: str, limited: bool) -> None:
    found = read(review(vcuda_pod(), namespace), PolicySnapshot(quota, POLICY.nodes))
    assert isinstance(found, PodReview) is limited
    assert limited or found == AdmissionResponse(Outcome.UNLIMITED)


# Tests of mirror pods


def test_the_mirror_pod_that_a_kubelet_creates_is_exempt() -> None:
    assert outcome(review(vcuda_pod(annotations=MIRROR), user_info=NODE)) == "mirror"


@cases(
    "annotations, user",
    forged_by_a_user=(MIRROR, UserInfo("alice", ("system:authenticated",))),
    a_user_with_the_name_of_the_group=(MIRROR, UserInfo("system:nodes", None)),
    a_group_with_a_similar_name=(MIRROR, UserInfo("x", ("system:nodes:fake", "system:node", "nodes"))),
    a_nodes_other_pods=({}, NODE),
    another_annotation=({"kubernetes.io/config.source": "file"}, NODE),
)
def test_no_other_pod_is_exempt(annotations: dict[str, str], user: UserInfo) -> None:
    limited(review(vcuda_pod(annotations=annotations), user_info=user))
