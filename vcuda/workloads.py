"""Reads ResourceClaims and pod templates from manifests. A pod template is returned as the pod that it would create."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from vcuda import documents, errors, pod_templates
from vcuda.claims.names import API_VERSION, CLAIM, GROUP, TEMPLATE
from vcuda.quota.well_known import MODELS_ANNOTATION, NAMESPACE_RULE, is_namespace_name

Manifest = dict[str, Any]

ShapeCheck = Callable[[str, Manifest], Manifest]
"""A function that returns a pod or claim as the API server would read it. The first argument is the place of the object
in a file, for messages. The function raises BadInput if the object is malformed."""

NO_TEMPLATE = "no pod template found in this object; check the pods that its controller creates instead"
"""The reason why a custom resource is skipped."""

NO_PODS = "no pods found"

_KINDS: Mapping[str, tuple[str, ...]] = {
    "Pod": (),
    "Deployment": ("replicas",),
    "StatefulSet": ("replicas",),
    "ReplicaSet": ("replicas",),
    "ReplicationController": ("replicas",),
    "DaemonSet": (),
    "Job": ("parallelism", "completions"),
    "CronJob": ("parallelism", "completions"),
}
"""The built-in kinds that are checked, with the fields that state the number of pods. The smallest number is used."""


@dataclass(frozen=True, slots=True)
class Workload:
    """An object to check. ``created``: the claim, the claim template or the pod that would be created. ``count``: the
    number of such pods."""

    kind: str
    name: str
    namespace: str
    created: Manifest
    count: int
    warning: str = ""
    """A warning about an annotation that has no effect, because it is in the wrong place; empty without a warning."""
    part: str = ""
    """The place of the pod template in the object; empty if the object has only one pod template."""
    is_counted: bool = True
    """False if the object does not state the number of its pods. Then one pod is checked."""

    @property
    def title(self) -> str:
        return f"{self.kind}/{self.name}" + (f" {self.part}" if self.part else "")

    @property
    def claim_spec(self) -> Manifest | None:
        """The spec of the claims of a ResourceClaimTemplate, as written; None for an object of another kind."""
        spec: Manifest = self.created.get("spec", {}).get("spec", {})
        return spec if self.kind == TEMPLATE else None


@dataclass(frozen=True, slots=True)
class Unread:
    """An object that is not checked, because it is malformed, or is a custom resource without a pod template."""

    title: str
    namespace: str
    reason: str
    malformed: bool


class MadeClaim(NamedTuple):
    """A ResourceClaim that Kubernetes would create for a pod.

    ``name``: the name of the claim, with ``*`` for each part that is not known yet.
    ``template``: the name of the claim's template.
    ``claim``: the claim without its spec.
    """

    name: str
    template: str
    claim: Manifest


def made_claims(pod: Manifest) -> list[MadeClaim]:
    """Return the claims that Kubernetes creates from templates for a pod, in the order of the pod's spec."""
    metadata = pod["metadata"]
    given, generated = metadata.get("name"), metadata.get("generateName", "")
    found = []
    for each in entries(pod["spec"], "resourceClaims"):
        if template := each.get("resourceClaimTemplateName"):
            named = each.get("name", "")
            about = {"generateName": f"{given or generated}-{named}-", "namespace": metadata["namespace"]}
            claim = {"apiVersion": API_VERSION, "kind": CLAIM, "metadata": about}
            name = f"{given or f'{generated}*'}-{named}-*"
            found.append(MadeClaim(name, template, claim))
    return found


def workloads_in(source: str, text: str, namespace: str, check: ShapeCheck) -> list[Workload | Unread]:
    """Return every claim in a text, and every object that creates pods. ``source`` names the text in messages. Raises
    BadInput if the text cannot be read as YAML."""
    return [each for where, document in _documents(source, text) for each in _read(where, document, namespace, check)]


def _read(where: str, document: object, namespace: str, check: ShapeCheck) -> list[Workload | Unread]:
    title, home = where, namespace
    try:
        manifest = _object(where, document)
        title = f"{manifest['kind']}/{_name_of(manifest)}"
        metadata, home = _place(where, manifest, namespace)
        if manifest["kind"] in _KINDS or _is_claim(manifest):
            return [_workload(where, manifest, metadata, home, check)]
        if _is_built_in(manifest):
            return []
        found = _templated(where, manifest, metadata, home, check)
    except errors.BadInput as error:
        return [Unread(title, home, str(error), malformed=True)]
    return [*found] or [Unread(title, home, NO_TEMPLATE, malformed=False)]


def _is_built_in(manifest: Manifest) -> bool:
    # The name of a built-in API group has no dot, or ends in .k8s.io. Without apiVersion, the group is unknown.
    version = str(manifest.get("apiVersion") or "")
    group = version.rpartition("/")[0]
    return bool(version) and ("." not in group or group.endswith(".k8s.io"))


def _templated(where: str, manifest: Manifest, metadata: Manifest, home: str, check: ShapeCheck) -> list[Workload]:
    """Return one workload for each pod template of a custom resource. ``home``: the namespace of the resource."""
    name = _name_of(manifest)
    try:
        templates = pod_templates.pod_templates(manifest)
    except ValueError as error:
        raise errors.BadInput(f"{where}: {error}") from error
    found = []
    for template in templates:
        # A Notebook's template has no metadata. notebook-controller copies the Notebook's annotations and labels.
        copied = {key: metadata[key] for key in ("annotations", "labels") if key in metadata}
        own = copied if manifest["kind"] == "Notebook" else template.metadata
        inner = _mapping(where, {"metadata": own}, "metadata")
        pod = _checked(where, _pod(name, home, inner, template.spec), check)
        warning = _misplaced(metadata, inner, "the annotations of its pod template")
        part = template.path if len(templates) > 1 else ""
        count, stated = template.count or 0, template.count is not None
        found.append(Workload(manifest["kind"], name, home, pod, count if stated else 1, warning, part, stated))
    return found


def _is_claim(manifest: Manifest) -> bool:
    # Another API group may also have a kind ResourceClaim. Without apiVersion, the object is assumed to be a claim.
    group = str(manifest.get("apiVersion", GROUP)).partition("/")[0]
    return manifest["kind"] in (CLAIM, TEMPLATE) and group == GROUP


def require_claims_api(where: str, manifest: Manifest) -> None:
    """Raise BadInput if an object of resource.k8s.io has an unsupported apiVersion."""
    version = manifest.get("apiVersion")
    if not version:
        raise errors.BadInput(f"{where}: apiVersion is required; it must be {API_VERSION} for a {manifest['kind']}")
    if version != API_VERSION:
        raise errors.BadInput(f"{where}: apiVersion must be {API_VERSION}; got {version}")


def objects_in(source: str, text: str) -> Iterator[tuple[str, Manifest]]:
    """Yield each object in a text, and each item of a List, as a pair of place and object. Raises BadInput."""
    return ((where, _object(where, document)) for where, document in _documents(source, text))


def _documents(source: str, text: str) -> Iterator[tuple[str, object]]:
    try:
        found = documents.load_all(text)
    except documents.NOT_YAML as error:
        raise errors.BadInput(f"{source}: the text cannot be read as YAML: {error}") from error
    for index, document in enumerate(found):
        yield from _listed(f"{source}, document {index + 1}", document)


def _listed(where: str, document: object) -> Iterator[tuple[str, object]]:
    match document:
        case {"kind": kind, "items": None | list() as items} if str(kind).endswith("List"):
            for item in items or ():
                yield from _listed(where, item)
        case None:
            pass
        case _:
            yield where, document


def _object(where: str, document: object) -> Manifest:
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        raise errors.BadInput(f"{where}: the document is not a Kubernetes object: kind is required")
    if document["kind"].endswith("List") and "items" in document:
        raise errors.BadInput(f"{where}: items must be a list")
    return document


def _workload(where: str, manifest: Manifest, metadata: Manifest, home: str, check: ShapeCheck) -> Workload:
    kind, name = manifest["kind"], _name_of(manifest)
    spec = _mapping(where, manifest, "spec")
    if _is_claim(manifest):
        require_claims_api(where, manifest)
        claim = {**manifest, "metadata": {**metadata, "namespace": home}}
        created = check(where, claim)
        inner = created.get("spec", {}).get("metadata", {}) if kind == TEMPLATE else metadata
        return Workload(kind, name, home, created, 1, _misplaced(metadata, inner, "spec.metadata.annotations"))
    if kind == "Pod":
        pod = _checked(where, {**manifest, "metadata": {**metadata, "namespace": home}}, check)
        return Workload(kind, name, home, pod, 1)
    if kind == "CronJob":
        spec = _mapping(where, _mapping(where, spec, "jobTemplate"), "spec")
    template = _mapping(where, spec, "template")
    inner = _mapping(where, template, "metadata")
    count = _count(where, kind, spec)
    warning = _misplaced(metadata, inner, "the annotations of its pod template")
    pod = _checked(where, _pod(name, home, inner, template.get("spec")), check)
    return Workload(kind, name, home, pod, count, warning)


def _name_of(manifest: Manifest) -> str:
    metadata = manifest.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    return str(metadata.get("name") or metadata.get("generateName") or "")


def _place(where: str, manifest: Manifest, namespace: str) -> tuple[Manifest, str]:
    """Return an object's metadata and namespace (default: ``namespace``). Raises BadInput for an invalid namespace."""
    metadata = _mapping(where, manifest, "metadata")
    home = str(metadata.get("namespace") or namespace)
    if not is_namespace_name(home):
        raise errors.BadInput(f"{where}: {home!r} is not a valid namespace: {NAMESPACE_RULE}")
    return metadata, home


def _pod(name: str, home: str, metadata: Manifest, spec: object) -> Manifest:
    about = {**metadata, "generateName": f"{name}-", "namespace": home}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}


def _misplaced(outer: Manifest, inner: Manifest, place: str) -> str:
    found = [each.get("annotations") for each in (outer, inner)]
    outside, inside = (isinstance(each, dict) and MODELS_ANNOTATION in each for each in found)
    if inside or not outside:
        return ""
    return f"annotation {MODELS_ANNOTATION} has no effect on this object; write it into {place}"


def _count(where: str, kind: str, spec: Mapping[str, Any]) -> int:
    try:
        stated = pod_templates.at_once({field: spec.get(field) for field in _KINDS[kind]})
    except ValueError as error:
        raise errors.BadInput(f"{where}: {error}") from error
    # If an object states no number of pods, one pod is checked. This is also true of a DaemonSet, which has many pods.
    return 1 if stated is None else stated


def _checked(where: str, pod: Manifest, check: ShapeCheck) -> Manifest:
    if not pod.get("spec"):
        raise errors.BadInput(f"{where}: the object has no pod spec")
    return check(where, pod)


def check_shape(where: str, manifest: Manifest) -> Manifest:
    """Return a pod or claim as JSON values, without null fields, which count as absent. This is a `ShapeCheck`.

    Raises BadInput if the spec is not a mapping, or if JSON cannot represent a value. The API server checks the rest.
    """
    try:
        plain: Manifest = without_nulls(json.loads(json.dumps(manifest, default=str, allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.BadInput(f"{where}: the object is malformed: {error}") from error
    _mapping(where, plain, "spec")
    return plain


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the keys whose value is null. The API server treats such keys as absent."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value


def _mapping(where: str, parent: Mapping[str, Any], field: str) -> Manifest:
    value = parent.get(field)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise errors.BadInput(f"{where}: {field} must be a mapping")
    return value


def entries(parent: Mapping[str, Any], field: str) -> list[Manifest]:
    """Return the mappings in a list of a manifest. Other items are ignored, because the API server rejects them."""
    found = parent.get(field)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
