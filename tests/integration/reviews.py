"""Pods, and the AdmissionReviews about them as the API server writes them."""

import base64
import json
import uuid
from typing import Any

import jsonpatch

from tests.builders import MODEL, held_to

Json = dict[str, Any]

POD = {"group": "", "version": "v1", "kind": "Pod"}


def gpu_pod(name: str, namespace: str, limits: Json, **metadata: object) -> Json:
    """A pod with one container of these limits, as a person writes it: no uid, no status."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, **metadata},
        "spec": {"containers": [{"name": "train", "image": "cuda", "resources": {"limits": limits}}]},
    }


def card_pod(name: str, namespace: str, cards: int = 1) -> Json:
    """A pod that asks gpu-manager for whole cards."""
    return gpu_pod(name, namespace, {"tencent.com/vcuda-core": 100 * cards})


def on_m40(pod: Json) -> Json:
    """The pod as its owner has it run on nodes of this model."""
    return {**pod, "spec": {**pod["spec"], "nodeSelector": {MODEL: "M40"}}}


def pinned(pod: Json) -> Json:
    """The pod as its owner can write it: held to M40 by hand."""
    return {**pod, "spec": {**pod["spec"], "affinity": held_to("M40")}}


def review_of(manifest: object, **fields: object) -> Json:
    """A review of the creation of ``manifest``; ``fields`` replace those of its request, by Kubernetes' own names."""
    metadata = manifest.get("metadata") if isinstance(manifest, dict) else None
    named = metadata if isinstance(metadata, dict) else {}
    request = {
        "uid": str(uuid.uuid4()),
        "kind": POD,
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "name": named.get("name", ""),
        "namespace": named.get("namespace", ""),
        "operation": "CREATE",
        "userInfo": {"username": "alice", "groups": ["system:authenticated"]},
        "object": manifest,
        "dryRun": False,
        **fields,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def patched(pod: Json, response: Json) -> Json:
    """The pod with the patch of an answer applied, by a library that is not ours."""
    if "patch" not in response:
        return pod
    assert response["patchType"] == "JSONPatch"
    result: Json = jsonpatch.apply_patch(pod, json.loads(base64.b64decode(response["patch"])))
    return result


def with_uid(pod: Json) -> Json:
    """The pod with the uid under which it will be stored; validating webhooks see it, mutating ones do not."""
    return {**pod, "metadata": {**pod["metadata"], "uid": str(uuid.uuid4())}}
