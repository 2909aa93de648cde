"""Builds the manifests, reviews and policies that tests start from. Omitted fields have Kubernetes' defaults."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from vcuda.admission_review import AdmissionRequest, GroupVersionKind, UserInfo
from vcuda.errors import Fault, QuotaFault
from vcuda.k8s_types import Pod
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.nodes import Nodes
from vcuda.quota.document import parse_quota
from vcuda.quota.model import NamespaceQuota, Quota
from webhook.review.context import PolicySnapshot

Manifest = dict[str, Any]

LABELS = NodeLabels()
MODEL, POOL = LABELS.model, LABELS.pool
POD_KIND = GroupVersionKind(version="v1", kind="Pod")

ONE_CARD = {"tencent.com/vcuda-core": 100}


def container(limits: Mapping[str, Any] | None = None, **fields: Any) -> Manifest:
    """Return a container with these limits. ``fields``: fields of the container by their YAML names."""
    resources = {"resources": {"limits": dict(limits)}} if limits is not None else {}
    return {"name": "main", "image": "cuda", **resources, **fields}


def sidecar(limits: Mapping[str, Any] | None = None, **fields: Any) -> Manifest:
    return container(limits, restartPolicy="Always", **fields)


def pod(
    *containers: Manifest,
    init: Iterable[Manifest] = (),
    metadata: Mapping[str, Any] | None = None,
    annotations: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    affinity: Mapping[str, Any] | None = None,
    **spec: Any,
) -> Manifest:
    """Return a pod. ``spec``: more fields of its spec by their YAML names. Omitted arguments add no field."""
    given = {"annotations": annotations, "labels": labels}
    about = {"name": "train-0", **{key: dict(value) for key, value in given.items() if value is not None}}
    inits = {"initContainers": list(init)} if init else {}
    where = {"affinity": dict(affinity)} if affinity is not None else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**about, **(metadata or {})},
        "spec": {**inits, "containers": list(containers), **where, **spec},
    }


def vcuda_pod(limits: Mapping[str, Any] = ONE_CARD, **fields: Any) -> Manifest:
    return pod(container(limits), **fields)


def stored_pod(limits: Mapping[str, Any], uid: str = "pod-uid", **fields: Any) -> Manifest:
    """Return a pod as the API server stores it: with a uid, and pinned to a model (by default M40)."""
    return vcuda_pod(limits, metadata={"uid": uid}, **{"affinity": held_to("M40"), **fields})


def pod_of_cores(cores: int, **fields: Any) -> Manifest:
    return stored_pod({"nvidia.com/vcuda-core": cores, "nvidia.com/vcuda-memory": 1}, **fields)


def requirement(key: str, operator: str, *values: str) -> Manifest:
    return {"key": key, "operator": operator, **({"values": list(values)} if values else {})}


def term(*expressions: Manifest, fields: Iterable[Manifest] = ()) -> Manifest:
    expressed = {"matchExpressions": list(expressions)} if expressions else {}
    return {**expressed, **({"matchFields": list(fields)} if fields else {})}


def required(*terms: Manifest) -> Manifest:
    """Return a spec.affinity that requires nodes to match one of these terms."""
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}}


def held_to(model: str, *pools: str) -> Manifest:
    """Return the spec.affinity of a pod that is pinned to a model, and to these pools of nodes if any are given."""
    pool = [requirement(POOL, "In", *pools)] if pools else []
    return required(term(requirement(MODEL, "In", model), *pool))


def view(manifest: Mapping[str, Any]) -> Pod:
    """Return the pod as the product decodes it from JSON."""
    return msgspec.json.decode(msgspec.json.encode(manifest), type=Pod)


def nodes(**by_name: Mapping[str, str]) -> Nodes:
    return Nodes.of(by_name, LABELS)


def review(manifest: object, namespace: str = "team-a", **fields: Any) -> AdmissionRequest:
    """Return an admission request that creates this pod. ``fields`` replace fields of the request."""
    given: dict[str, Any] = {
        "uid": "review-1",
        "kind": POD_KIND,
        "namespace": namespace,
        "operation": "CREATE",
        "user_info": UserInfo("alice", ("system:authenticated",)),
        "object": msgspec.Raw(msgspec.json.encode(manifest)),
    }
    return AdmissionRequest(**{**given, **fields})


def policy_for(quota: NamespaceQuota, nodes: Nodes | None = None, namespace: str = "team-a") -> PolicySnapshot:
    return PolicySnapshot(Quota({namespace: quota}, version="41"), nodes or Nodes(LABELS))


def quota_faults(text: str) -> tuple[Fault, ...]:
    try:
        parse_quota(text)
    except QuotaFault as rejection:
        return rejection.faults
    return ()
