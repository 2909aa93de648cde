"""Example pods, admission requests and an API server, from which the code produces messages for docs/reference.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec

from vcuda.admission_review import AdmissionRequest, GroupVersionKind
from vcuda.errors import NotFound
from vcuda.kube import Heard, Kube
from vcuda.kube.pages import Page
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import NamespaceQuota, Quota
from webhook.review.context import PolicySnapshot

Manifest = dict[str, Any]

LABELS = NodeLabels()
MODEL, POOL = LABELS.model, LABELS.pool
NO_NODES = Nodes(LABELS)
NOON = 1_795_521_600.0
"""The time of the examples, 2026-11-24T12:00Z, in Unix seconds."""
ONE_CARD = {"tencent.com/vcuda-core": 100}


def container(limits: Mapping[str, Any] = ONE_CARD, **fields: Any) -> Manifest:
    """Return a container with these resource limits. ``fields`` are its other fields."""
    return {"name": "main", "image": "cuda", "resources": {"limits": dict(limits)}, **fields}


def pod(*containers: Manifest, **fields: Any) -> Manifest:
    """Return a pod. ``fields`` belong to its spec, except ``metadata`` and ``annotations``."""
    annotations = {"annotations": fields.pop("annotations")} if "annotations" in fields else {}
    metadata = {"name": "train-0", **annotations, **fields.pop("metadata", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": list(containers), **fields}}


def requires(*models: str) -> Manifest:
    """Return the node affinity of a pod that requires a node of one of these models."""
    terms = [{"matchExpressions": [{"key": MODEL, "operator": "In", "values": list(models)}]}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def review(manifest: object, namespace: str = "team-a", **fields: Any) -> AdmissionRequest:
    """Return the admission request for the creation of an object. ``fields`` replace fields of the request."""
    given: dict[str, Any] = {
        "uid": "review-1",
        "kind": GroupVersionKind(version="v1", kind="Pod"),
        "namespace": namespace,
        "operation": "CREATE",
        "object": msgspec.Raw(msgspec.json.encode(manifest)),
    }
    return AdmissionRequest(**{**given, **fields})


def policy_for(quota: NamespaceQuota, nodes: Nodes = NO_NODES) -> PolicySnapshot:
    """Return the quota and the nodes of a cluster, in which namespace team-a has ``quota`` at the time `NOON`."""
    return PolicySnapshot(Quota({"team-a": quota}, version="41").at(NOON), nodes)


class ExampleServer:
    """A test double of the API client, which returns ``objects`` by their path and admits every dry run.

    ``events``: the messages of the Events that were created.
    """

    def __init__(self, objects: Mapping[str, Manifest] | None = None) -> None:
        self.objects = {**(objects or {})}
        self.events: list[str] = []

    @property
    def kube(self) -> Kube:
        """This object, cast to the type of the API client."""
        return cast("Kube", self)

    def get(self, path: str, **_: object) -> bytes:
        if path not in self.objects:
            raise NotFound(404, f"{path} not found")
        return json.dumps(self.objects[path]).encode()

    def list_pages(self, path: str, *_: object, **_bounds: object) -> Iterator[Page]:
        found = [each for own, each in self.objects.items() if own.rpartition("/")[0] == path]
        yield Page("101", [msgspec.Raw(msgspec.json.encode(each)) for each in found])

    def post(self, _path: str, body: bytes) -> bytes:
        self.events.append(json.loads(body)["message"])
        return body

    def patch(self, _path: str, body: bytes, _content_type: str) -> bytes:
        return body

    def post_heard(self, _path: str, body: bytes, _params: object) -> Heard:
        return Heard(body)
