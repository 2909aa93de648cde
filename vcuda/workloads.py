"""Manifests: every pod template in them, as the pods that its owner would create, and ResourceClaims."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
import yaml

from vcuda import errors, k8s_types
from vcuda.claims.objects import API_VERSION, CLAIM, GROUP, TEMPLATE, ResourceClaim, ResourceClaimTemplate
from vcuda.quota.document import NO_NAMESPACE, is_namespace_name
from vcuda.quota.preference import MODELS_ANNOTATION

Manifest = dict[str, Any]
T = TypeVar("T")

MOST_PODS = 10_000
"""Pods that one workload may stand for here."""

NO_PODS = "no pods found"
"""What is told beside an empty answer."""

NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""What PyYAML raises: a ValueError for a date that is none, the last for nesting without end."""

NOT_JSON = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""What msgspec raises for what YAML can write and JSON cannot: half a surrogate pair, an object inside itself."""


_CLAIMS: Mapping[str, type[ResourceClaim | ResourceClaimTemplate]] = {
    CLAIM: ResourceClaim,
    TEMPLATE: ResourceClaimTemplate,
}

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
"""The kinds that can be checked, with the fields that say how many pods there are; the smallest counts."""


class Workload(msgspec.Struct, frozen=True):
    """An object that makes pods: its kind and name, a pod as it would create it, and how many at once.

    A ResourceClaim, or a template of them, is created as it is.
    """

    kind: str
    name: str
    namespace: str
    created: Manifest
    count: int
    warning: str = ""
    """A sentence about an annotation that has no effect where it stands; empty if there is none."""

    @property
    def claim_spec(self) -> Manifest | None:
        """What the claims of a template ask for, as it is written; None of anything else."""
        spec: Manifest = self.created.get("spec", {}).get("spec", {})
        return spec if self.kind == TEMPLATE else None


class MadeClaim(NamedTuple):
    """A claim that is made for a pod: its name as far as it is known before, of which template, and it but its spec."""

    name: str
    template: str
    claim: Manifest


def made_claims(pod: Manifest) -> list[MadeClaim]:
    """Return the claims that Kubernetes makes of templates for a pod, in order."""
    metadata = pod["metadata"]
    given, generated = metadata.get("name"), metadata.get("generateName", "")
    found = []
    for each in msgspec.convert(pod, k8s_types.Pod).spec.resource_claims or ():
        if each.resource_claim_template_name:
            about = {"generateName": f"{given or generated}-{each.name}-", "namespace": metadata["namespace"]}
            claim = {"apiVersion": API_VERSION, "kind": CLAIM, "metadata": about}
            name = f"{given or f'{generated}*'}-{each.name}-*"
            found.append(MadeClaim(name, each.resource_claim_template_name, claim))
    return found


def workloads_in(source: str, text: str, namespace: str) -> list[Workload]:
    """Return every claim, and every object that makes pods, in YAML or JSON, in order; all others are passed over.

    ``namespace`` is for those that name none; ``source`` says in messages where the text is from. Raises BadInput where
    it is not YAML, or an object in it makes malformed pods, or pods in a way that is not known here.
    """
    # An object of a kind that is not known here makes pods if a pod template is anywhere in it: operators' kinds do.
    return [
        _workload(where, manifest, namespace)
        for where, manifest in objects_in(source, text)
        if manifest["kind"] in _KINDS or _is_claim(manifest) or _holds_template(manifest.get("spec"))
    ]


def _is_claim(manifest: Manifest) -> bool:
    # Another group may have a kind of this name; one that says no group is a claim that lacks its first line.
    group = str(manifest.get("apiVersion", GROUP)).partition("/")[0]
    return manifest["kind"] in _CLAIMS and group == GROUP


def require_claims_api(where: str, manifest: Manifest) -> None:
    """Raise BadInput where an object of resource.k8s.io is written in a version that is not read."""
    version = manifest.get("apiVersion")
    if version != API_VERSION:
        raise errors.BadInput(f"{where}: apiVersion is {version}; write the {manifest['kind']} as of {API_VERSION}")


def objects_in(source: str, text: str) -> Iterator[tuple[str, Manifest]]:
    """Yield every object with its place; a List is what it lists."""
    try:
        documents = list(yaml.safe_load_all(text))
    except NOT_YAML as error:
        raise errors.BadInput(f"{source}: not YAML: {error}") from error
    for index, document in enumerate(documents):
        yield from _listed(f"{source}, document {index + 1}", document)


def _listed(where: str, document: object) -> Iterator[tuple[str, Manifest]]:
    if document is None:
        return
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        raise errors.BadInput(f"{where}: no Kubernetes object: it has no kind")
    if not document["kind"].endswith("List") or "items" not in document:
        yield where, document
        return
    items = document["items"]
    if not isinstance(items, list | None):
        raise errors.BadInput(f"{where}: items must be a list")
    for item in items or ():
        yield from _listed(where, item)


def _holds_template(spec: object) -> bool:
    # Each value is looked at once, however often an alias has it: YAML's aliases can nest without end.
    waiting, seen = [spec], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            template = value.get("template")
            template_spec = template.get("spec") if isinstance(template, dict) else None
            if isinstance(template_spec, dict) and "containers" in template_spec:
                return True
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    return False


def _workload(where: str, manifest: Manifest, namespace: str) -> Workload:
    kind, claims = manifest["kind"], _is_claim(manifest)
    if kind not in _KINDS and not claims:
        raise errors.BadInput(f"{where}: how many pods a {kind} makes is not known here; give its pods instead")
    metadata = _mapping(where, manifest, "metadata")
    spec = _mapping(where, manifest, "spec")
    name = str(metadata.get("name") or metadata.get("generateName") or "")
    home = str(metadata.get("namespace") or namespace)
    if not is_namespace_name(home):
        raise errors.BadInput(f"{where}: {home!r} {NO_NAMESPACE}")
    if claims:
        require_claims_api(where, manifest)
        claim = {**manifest, "metadata": {**metadata, "namespace": home}}
        convert(where, claim, _CLAIMS[kind])
        created = _plain(where, claim)
        inner = created.get("spec", {}).get("metadata", {}) if kind == TEMPLATE else metadata
        return Workload(kind, name, home, created, 1, _misplaced(metadata, inner, "spec.metadata.annotations"))
    if kind == "Pod":
        return Workload(kind, name, home, _checked(where, {**manifest, "metadata": {**metadata, "namespace": home}}), 1)
    if kind == "CronJob":
        spec = _mapping(where, _mapping(where, spec, "jobTemplate"), "spec")
    template = _mapping(where, spec, "template")
    inner = _mapping(where, template, "metadata")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**inner, "generateName": f"{name}-", "namespace": home},
        "spec": template.get("spec"),
    }
    count = _count(where, kind, spec)
    warning = _misplaced(metadata, inner, "the annotations of its pod template")
    return Workload(kind, name, home, _checked(where, pod), count, warning)


def _misplaced(outer: Manifest, inner: Manifest, place: str) -> str:
    found = [each.get("annotations") for each in (outer, inner)]
    outside, inside = (isinstance(each, dict) and MODELS_ANNOTATION in each for each in found)
    if inside or not outside:
        return ""
    return f"annotation {MODELS_ANNOTATION} has no effect on this object; write it into {place}"


def _count(where: str, kind: str, spec: Mapping[str, Any]) -> int:
    counts = [spec[field] for field in _KINDS[kind] if spec.get(field) is not None]
    for count in counts:
        if type(count) is not int or not 0 <= count <= MOST_PODS:
            raise errors.BadInput(f"{where}: {count!r} is no number of pods from 0 to {MOST_PODS}")
    # A Job without parallelism runs one pod at a time, whatever its completions.
    if kind in ("Job", "CronJob") and spec.get("parallelism") is None:
        return 1
    # The rest have one where nothing is said; a DaemonSet's number depends on the nodes, so one pod stands for it.
    return min(counts, default=1)


def _checked(where: str, pod: Manifest) -> Manifest:
    if not pod.get("spec"):
        raise errors.BadInput(f"{where}: malformed: it has no pod spec")
    convert(where, pod, k8s_types.Pod)
    return _plain(where, pod)


def convert(where: str, manifest: Manifest, view: type[T]) -> T:
    """Return a typed view of a manifest. Raises BadInput where its shape is not that kind's."""
    try:
        return msgspec.convert(_plain(where, manifest), view)
    except msgspec.MsgspecError as error:
        raise errors.BadInput(f"{where}: malformed: {error}") from error


def _plain(where: str, manifest: Manifest) -> Manifest:
    # As JSON, which is what reaches the API server; null fields count as absent there.
    try:
        plain: Manifest = _without_nulls(msgspec.json.decode(msgspec.json.encode(manifest, enc_hook=str)))
    except NOT_JSON as error:
        raise errors.BadInput(f"{where}: malformed: {error}") from error
    return plain


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def _mapping(where: str, parent: Mapping[str, Any], field: str) -> Manifest:
    value = parent.get(field)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise errors.BadInput(f"{where}: {field} must be a mapping")
    return value
