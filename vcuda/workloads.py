"""Manifests: every pod template in them, as the pods that its owner would create."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import yaml

from vcuda.errors import BadInput
from vcuda.objects import Pod

Manifest = dict[str, Any]
T = TypeVar("T")

MOST_PODS = 10_000
"""Pods that one workload may stand for here."""

NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""What PyYAML raises: a ValueError for a date that is none, the last for nesting without end."""

NOT_JSON = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""What msgspec raises for what YAML can write and JSON cannot: half a surrogate pair, an object inside itself."""


class Workload(msgspec.Struct, frozen=True):
    """An object that makes pods: its kind and name, a pod as it would create it, and how many at once."""

    kind: str
    name: str
    namespace: str
    pod: Manifest
    count: int


def workloads_in(source: str, text: str, namespace: str) -> list[Workload]:
    """Return every object in YAML or JSON that makes pods, in order; ``namespace`` is for those that name none.

    ``source`` says in messages where the text is from.

    Raises:
        BadInput: it is not YAML, or an object in it makes no pods or a malformed one.

    """
    return [_workload(where, manifest, namespace) for where, manifest in objects_in(source, text)]


def objects_in(source: str, text: str) -> Iterator[tuple[str, Manifest]]:
    """Yield every object with its place; a List is what it lists."""
    try:
        documents = list(yaml.safe_load_all(text))
    except NOT_YAML as error:
        raise BadInput(f"{source}: not YAML: {error}") from error
    for index, document in enumerate(documents):
        yield from _listed(f"{source}, document {index + 1}", document)


def _listed(where: str, document: object) -> Iterator[tuple[str, Manifest]]:
    if document is None:
        return
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        raise BadInput(f"{where}: no Kubernetes object: it has no kind")
    if not document["kind"].endswith("List") or "items" not in document:
        yield where, document
        return
    items = document["items"]
    if not isinstance(items, list | None):
        raise BadInput(f"{where}: items must be a list")
    for item in items or ():
        yield from _listed(where, item)


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
    count = _count(where, kind, spec)
    return Workload(kind, name, home, _checked(where, pod), count)


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
    """Return the pod as it is in JSON, proven to have a pod's shape."""
    convert(where, pod, Pod)
    plain: Manifest = msgspec.json.decode(msgspec.json.encode(pod, enc_hook=str))
    return plain


def convert(where: str, manifest: Manifest, view: type[T]) -> T:
    """Return a typed view of a manifest. Raises BadInput where its shape is not that kind's."""
    try:
        return msgspec.json.decode(msgspec.json.encode(manifest, enc_hook=str), type=view)
    except NOT_JSON as error:
        raise BadInput(f"{where}: malformed: {error}") from error


def _mapping(where: str, parent: Mapping[str, Any], field: str) -> Manifest:
    value = parent.get(field)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadInput(f"{where}: {field} must be a mapping")
    return value
