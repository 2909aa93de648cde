"""Reads manifests: every pod template in them, as the pods that its owner would create."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
import yaml

from vcuda.errors import BadInput
from vcuda.objects import Node, Pod
from vcuda.placement import NodeLabels, Nodes
from vcuda.quota import Quota
from vcuda.quota_document import parse_quota

Manifest = dict[str, Any]
T = TypeVar("T")

MOST_PODS = 10_000
"""Pods that one workload may stand for here."""


class Workload(msgspec.Struct, frozen=True):
    """An object that makes pods: its kind and name, a pod as it would create it, and how many at once."""

    kind: str
    name: str
    namespace: str
    pod: Manifest
    count: int


def read_quota(path: Path) -> Quota:
    """Return the quota in a file: the document itself, or the ConfigMap that holds it under ``gpu_quota``.

    Raises:
        BadInput: the file cannot be read, or has faults (QuotaFault, with all of them).

    """
    text = _read(path)
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError:
        documents = []  # the parser below says what is wrong, and where
    if len(documents) == 1 and isinstance(documents[0], dict) and documents[0].get("kind") == "ConfigMap":
        data = documents[0].get("data") or {}
        if "gpu_quota" not in data:
            raise BadInput(f"{path}: the ConfigMap has no key gpu_quota")
        text = str(data["gpu_quota"])
    return parse_quota(text)


def read_nodes(path: Path, labels: NodeLabels) -> Nodes:
    """Return the nodes in a file, as ``kubectl get nodes -o yaml`` prints them.

    Raises:
        BadInput: the file cannot be read or holds something else.

    """
    found = {}
    for where, manifest in _objects([path]):
        if manifest.get("kind") != "Node":
            raise BadInput(f"{where}: expected a Node, not {manifest.get('kind')}")
        node = _convert(where, manifest, Node)
        found[node.metadata.name] = node.labels
    return Nodes.of(found, labels)


def read_workloads(paths: list[Path], namespace: str) -> list[Workload]:
    """Return every object that makes pods, in order; ``namespace`` is for those that name none.

    Raises:
        BadInput: a file cannot be read, or an object in it makes no pods or a malformed one.

    """
    return [_workload(where, manifest, namespace) for where, manifest in _objects(paths)]


def _objects(paths: list[Path]) -> Iterator[tuple[str, Manifest]]:
    """Yield every object with its place; ``-`` is standard input, and a List is what it lists."""
    for path in paths:
        try:
            documents = list(yaml.safe_load_all(_read(path)))
        except yaml.YAMLError as error:
            raise BadInput(f"{path}: not YAML: {error}") from error
        for index, document in enumerate(documents):
            yield from _listed(f"{path}, document {index + 1}", document)


def _listed(where: str, document: object) -> Iterator[tuple[str, Manifest]]:
    if document is None:
        return
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        raise BadInput(f"{where}: no Kubernetes object: it has no kind")
    if document["kind"].endswith("List") and "items" in document:
        for item in document["items"] or ():
            yield from _listed(where, item)
    else:
        yield where, document


def _workload(where: str, manifest: Manifest, namespace: str) -> Workload:
    kind = manifest["kind"]
    metadata = _mapping(where, manifest, "metadata")
    spec = _mapping(where, manifest, "spec")
    name = str(metadata.get("name") or metadata.get("generateName") or "")
    home = str(metadata.get("namespace") or namespace)
    if kind == "Pod":
        return Workload(kind, name, home, _checked(where, {**manifest, "metadata": {**metadata, "namespace": home}}), 1)
    if kind == "CronJob":
        spec = _mapping(where, _mapping(where, spec, "jobTemplate"), "spec")
    template = _mapping(where, spec, "template")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**_mapping(where, template, "metadata"), "generateName": f"{name}-", "namespace": home},
        "spec": template.get("spec"),
    }
    return Workload(kind, name, home, _checked(where, pod), _count(where, kind, spec))


def _count(where: str, kind: str, spec: Mapping[str, Any]) -> int:
    """Return how many pods there are at once. A DaemonSet's depend on the nodes: one is looked at."""
    fields: tuple[str, ...] = ()
    match kind:
        case "Deployment" | "StatefulSet" | "ReplicaSet" | "ReplicationController":
            fields = ("replicas",)
        case "Job" | "CronJob":
            fields = ("parallelism", "completions")
        case "DaemonSet":
            pass
        case _:
            raise BadInput(f"{where}: a {kind} makes no pods that can be checked here")
    counts = [spec[field] for field in fields if spec.get(field) is not None]
    for count in counts:
        if type(count) is not int or not 0 <= count <= MOST_PODS:
            raise BadInput(f"{where}: {count!r} is no number of pods from 0 to {MOST_PODS}")
    if kind in ("Job", "CronJob") and spec.get("parallelism") is None:
        return 1
    return min(counts, default=1)


def _checked(where: str, pod: Manifest) -> Manifest:
    """Return the pod, proven to have a pod's shape."""
    _convert(where, pod, Pod)
    return pod


def _convert(where: str, manifest: Manifest, view: type[T]) -> T:
    try:
        return msgspec.json.decode(msgspec.json.encode(manifest, enc_hook=str), type=view)
    except msgspec.MsgspecError as error:
        raise BadInput(f"{where}: malformed: {error}") from error


def _mapping(where: str, parent: Mapping[str, Any], field: str) -> Manifest:
    value = parent.get(field)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadInput(f"{where}: {field} must be a mapping")
    return value


def _read(path: Path) -> str:
    try:
        with click.open_file(str(path), encoding="utf-8") as file:
            return str(file.read())
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error
