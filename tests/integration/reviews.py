"""Pods for tests, and their AdmissionReviews as the API server sends them."""

import base64
import json
import uuid
from typing import Any

import jsonpatch

from tests.builders import MODEL, held_to

Json = dict[str, Any]

POD = {"group": "", "version": "v1", "kind": "Pod"}


def gpu_pod(name: str, namespace: str, limits: Json, **metadata: object) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, **metadata},
        "spec": {"containers": [{"name": "train", "image": "cuda", "resources": {"limits": limits}}]},
    }


def card_pod(name: str, namespace: str, cards: int = 1) -> Json:
    return gpu_pod(name, namespace, {"tencent.com/vcuda-core": 100 * cards})


def with_spec(pod: Json, **fields: object) -> Json:
    return {**pod, "spec": {**pod["spec"], **fields}}


def on_m40(pod: Json) -> Json:
    return with_spec(pod, nodeSelector={MODEL: "M40"})


def pinned(pod: Json) -> Json:
    return with_spec(pod, affinity=held_to("M40"))


def review_of(manifest: object, **fields: object) -> Json:
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
    """Apply the JSON Patch in the webhook's answer to the pod, by a library that the webhook does not use."""
    if "patch" not in response:
        return pod
    assert response["patchType"] == "JSONPatch"
    result: Json = jsonpatch.apply_patch(pod, json.loads(base64.b64decode(response["patch"])))
    return result


def with_uid(pod: Json) -> Json:
    """Return the pod with a uid, which the API server sets between the calls of /mutate and /validate."""
    return {**pod, "metadata": {**pod["metadata"], "uid": str(uuid.uuid4())}}
