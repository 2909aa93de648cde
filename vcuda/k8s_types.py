"""Typed views of Kubernetes objects: only the fields that are read, decoded from raw bytes by msgspec.

A view is never written back: what it leaves out would be lost. Changes go out as patches.
Field names are Kubernetes' own in snake case. ``None`` stands for absent and for null alike, as in Go's API types.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

Quantity = str | int | float
"""A Kubernetes quantity as it stands in JSON: the API server writes text, people also write numbers."""


UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that hold no such view: not JSON, not UTF-8, of another shape, or nested too deep."""


MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
"""Set by a kubelet on the pod that shows one of its static pods (pkg/kubelet/types); but anyone can write it."""

_LONGEST_NAME = 253
_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")


def can_be_name(text: str) -> bool:
    """Return whether a node, pod or namespace can have this name: a DNS subdomain of RFC 1123, as all of theirs are.

    Nothing else may be asked for: a slash, however it is quoted, leads to another resource of the API.
    """
    return len(text) <= _LONGEST_NAME and _NAME.fullmatch(text) is not None


class K8sStruct(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """A part of an object; unknown fields are skipped while decoding. A tree has no cycles, so none is looked for."""


class OwnerReference(K8sStruct, frozen=True, gc=False):
    """Who made an object."""

    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None


class ObjectMeta(K8sStruct, frozen=True, gc=False):
    """metadata; the times are RFC 3339 text."""

    name: str = ""
    generate_name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None
    owner_references: tuple[OwnerReference, ...] | None = None


class Resources(K8sStruct, frozen=True, gc=False):
    """A container's resources; for extended resources Kubernetes wants requests equal to limits."""

    limits: Mapping[str, Quantity] | None = None
    requests: Mapping[str, Quantity] | None = None


class SecurityContext(K8sStruct, frozen=True, gc=False):
    """The one security setting that decides whether a container sees every device of its node."""

    privileged: bool | None = None


class Container(K8sStruct, frozen=True, gc=False):
    """A container or init container; an init container with restartPolicy Always is a sidecar."""

    name: str = ""
    resources: Resources | None = None
    security_context: SecurityContext | None = None
    restart_policy: str | None = None


class Requirement(K8sStruct, frozen=True, gc=False):
    """One line of matchExpressions (over node labels) or matchFields (over metadata.name)."""

    key: str = ""
    operator: str = ""
    values: tuple[str, ...] | None = None


class NodeSelectorTerm(K8sStruct, frozen=True, gc=False):
    """Its requirements are ANDed. A term without any matches no node."""

    match_expressions: tuple[Requirement, ...] | None = None
    match_fields: tuple[Requirement, ...] | None = None


class NodeSelector(K8sStruct, frozen=True, gc=False):
    """Terms are ORed."""

    node_selector_terms: tuple[NodeSelectorTerm, ...] | None = None


class NodeAffinity(K8sStruct, frozen=True, gc=False):
    """Only what is required; preferences decide nothing here."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None


class Affinity(K8sStruct, frozen=True, gc=False):
    """The node part of spec.affinity."""

    node_affinity: NodeAffinity | None = None


class PodSpec(K8sStruct, frozen=True, gc=False):
    """What a pod asks for and where it may run."""

    containers: tuple[Container, ...] | None = None
    init_containers: tuple[Container, ...] | None = None
    node_name: str = ""
    node_selector: Mapping[str, str] | None = None
    affinity: Affinity | None = None
    scheduler_name: str = ""


class PodStatus(K8sStruct, frozen=True, gc=False):
    """phase is Pending, Running, Succeeded, Failed or Unknown."""

    phase: str = ""


class Pod(K8sStruct, frozen=True, gc=False):
    """A pod, or a pod template (which has neither uid nor status)."""

    metadata: ObjectMeta = ObjectMeta()
    spec: PodSpec = PodSpec()
    status: PodStatus | None = None

    @property
    def annotations(self) -> Mapping[str, str]:
        """The annotations, empty where there are none."""
        return self.metadata.annotations or {}

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels, empty where there are none."""
        return self.metadata.labels or {}

    def all_containers(self) -> Iterator[tuple[str, Container]]:
        """Yield every container with its field path, init containers first, as they start."""
        for field, containers in (
            ("initContainers", self.spec.init_containers),
            ("containers", self.spec.containers),
        ):
            for index, container in enumerate(containers or ()):
                yield f"spec.{field}[{index}]", container


class NodeStatus(K8sStruct, frozen=True, gc=False):
    """What a node has, and what of it pods may have, as its kubelet and its device plugins say."""

    capacity: Mapping[str, Quantity] | None = None
    allocatable: Mapping[str, Quantity] | None = None


class Node(K8sStruct, frozen=True, gc=False):
    """A node's name, labels, annotations and capacity."""

    metadata: ObjectMeta = ObjectMeta()
    status: NodeStatus | None = None

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels, empty where there are none."""
        return self.metadata.labels or {}

    @property
    def annotations(self) -> Mapping[str, str]:
        """The annotations, empty where there are none."""
        return self.metadata.annotations or {}

    @property
    def capacity(self) -> Mapping[str, Quantity]:
        """The capacity by resource, empty where it is not known."""
        return (self.status and self.status.capacity) or {}


class ConfigMap(K8sStruct, frozen=True, gc=False):
    """A ConfigMap with text data."""

    metadata: ObjectMeta = ObjectMeta()
    data: Mapping[str, str] | None = None
