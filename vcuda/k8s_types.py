"""Types for the Kubernetes API: views of objects, and quantities.

A view is a type with only those fields of an object that are read. msgspec decodes a view from raw bytes. A view is
never written back, because the other fields of the object would be lost. Changes are sent as patches. Fields have the
names that Kubernetes gives them, in snake case. ``None`` stands for an absent or null field, as in Go's types.
"""

import datetime
import functools
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from kubernetes.utils import quantity as kubernetes_quantity

from vcuda.shallow import shallow

Quantity = str | int | float
"""A Kubernetes quantity in JSON. The API server writes a text. Manifests may also have a number."""


Operation = dict[str, Any]
"""One operation of a JSON Patch (RFC 6902)."""


class Check(Protocol):
    """A function that long computations call repeatedly.

    It raises an exception if their result is no longer needed, or if another thread must compute it.
    ``steps``: before nested loops, the number of their steps; otherwise 0.
    """

    def __call__(self, steps: int = 0, /) -> None: ...


def no_check(_steps: int = 0, /) -> None:
    """A `Check` that never raises an exception, for computations that nothing stops."""


def time_now() -> str:
    """Return the current time as text, as in a field of Kubernetes' type Time."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_time_now() -> str:
    """Return the current time as text, as in a field of Kubernetes' type MicroTime."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions of a msgspec decoder. It raises RecursionError for values that are nested too deep."""

T = TypeVar("T")


class Decoder(Generic[T]):
    """Decodes JSON of one type. If that fails, `shallow` first removes the parts that no decoder can read.

    Raises one of `UNDECODABLE`. If the text has at most ``most`` bytes, a fault in a field that is not read raises
    nothing.
    """

    def __init__(self, kind: type[T], most: float = math.inf) -> None:
        self._decode = msgspec.json.Decoder(kind).decode
        self._most = most

    def decode(self, text: bytes | msgspec.Raw, check: Check = no_check) -> T:
        try:
            return self._decode(text)
        except msgspec.ValidationError:
            raise
        except UNDECODABLE:
            whole = bytes(text)
            if len(whole) > self._most:
                raise
            check(len(whole))
            return self._decode(shallow(whole))


MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
"""The annotation that kubelet sets on the mirror pod of a static pod (pkg/kubelet/types). Anyone can write it."""

DEFAULT_GRACE_SECONDS = 30
"""The termination grace period that the API server sets in a pod that has none."""

_MAX_NAME_LENGTH = 253
_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")


def can_be_name(text: str) -> bool:
    """Return whether a node, pod or namespace may have this name. Names are DNS subdomains of RFC 1123."""
    # Names in API requests are checked, because a slash in a name, even if escaped, could address another resource.
    return len(text) <= _MAX_NAME_LENGTH and _NAME.fullmatch(text) is not None


# ``gc=False`` is safe, because a decoded object is a tree. Python's garbage collector would find no cycles in a tree.
class K8sStruct(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """The base class of Kubernetes objects and their parts. Unknown fields are ignored."""


class ObjectMeta(K8sStruct, frozen=True, gc=False):
    """The metadata of an object. Times are RFC 3339 texts."""

    name: str = ""
    generate_name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None
    finalizers: tuple[str, ...] | None = None


class K8sObject(K8sStruct, frozen=True, gc=False):
    """A Kubernetes object with metadata."""

    metadata: ObjectMeta = ObjectMeta()

    @property
    def annotations(self) -> Mapping[str, str]:
        return self.metadata.annotations or {}

    @property
    def labels(self) -> Mapping[str, str]:
        return self.metadata.labels or {}


class NamedClaim(K8sStruct, frozen=True, gc=False):
    """The name of an entry in the ``resourceClaims`` of a pod."""

    name: str = ""


class Resources(K8sStruct, frozen=True, gc=False):
    """The resources of a container. ``claims``: the claims of the pod whose devices the container may use."""

    limits: Mapping[str, Quantity] | None = None
    requests: Mapping[str, Quantity] | None = None
    claims: tuple[NamedClaim, ...] | None = None


class WindowsOptions(K8sStruct, frozen=True, gc=False):
    """The security settings of a container on Windows. A HostProcess container can use every device of its node."""

    host_process: bool | None = None


class SecurityContext(K8sStruct, frozen=True, gc=False):
    """The security settings of a pod or container. A privileged container can use every device of its node."""

    privileged: bool | None = None
    windows_options: WindowsOptions | None = None


class EnvVar(K8sStruct, frozen=True, gc=False):
    """A variable of a container. The API server omits an empty ``value``. The fields of ``value_from`` are not read."""

    name: str = ""
    value: str | None = None
    value_from: K8sStruct | None = None

    @property
    def known_value(self) -> str | None:
        """The value of the variable; None if the value comes from another object or field."""
        return None if self.value_from is not None else self.value or ""


class VolumeMount(K8sStruct, frozen=True, gc=False):
    """A volume in a container. The path may be relative, and may have ``..`` in it."""

    mount_path: str = ""


class Container(K8sStruct, frozen=True, gc=False):
    """A container or init container. An init container with restartPolicy Always is a sidecar."""

    name: str = ""
    resources: Resources | None = None
    security_context: SecurityContext | None = None
    restart_policy: str | None = None
    env: tuple[EnvVar, ...] | None = None
    volume_mounts: tuple[VolumeMount, ...] | None = None


class Requirement(K8sStruct, frozen=True, gc=False):
    """One requirement in matchExpressions (on node labels) or matchFields (on metadata.name)."""

    key: str = ""
    operator: str = ""
    values: tuple[str, ...] | None = None


class NodeSelectorTerm(K8sStruct, frozen=True, gc=False):
    """A term of a node selector. Its requirements are ANDed. A term without requirements matches no node."""

    match_expressions: tuple[Requirement, ...] | None = None
    match_fields: tuple[Requirement, ...] | None = None


class NodeSelector(K8sStruct, frozen=True, gc=False):
    """A node selector. Its terms are ORed."""

    node_selector_terms: tuple[NodeSelectorTerm, ...] | None = None


class NodeAffinity(K8sStruct, frozen=True, gc=False):
    """The required part of a node affinity. Preferences are not read."""

    required_during_scheduling_ignored_during_execution: NodeSelector | None = None


class Affinity(K8sStruct, frozen=True, gc=False):
    """The part of spec.affinity that is about nodes."""

    node_affinity: NodeAffinity | None = None


class PodResourceClaim(K8sStruct, frozen=True, gc=False):
    """An entry of a pod's ``resourceClaims``: an existing claim, or a template for a new claim of the pod."""

    name: str = ""
    resource_claim_template_name: str | None = None


class Toleration(K8sStruct, frozen=True, gc=False):
    """A toleration of a pod. With the operator Exists, an empty key tolerates every key. An empty effect tolerates
    every effect."""

    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""


class PodSpec(K8sStruct, frozen=True, gc=False):
    """The fields of a pod's spec that state what the pod requests, and where it may run."""

    containers: tuple[Container, ...] | None = None
    init_containers: tuple[Container, ...] | None = None
    node_name: str = ""
    node_selector: Mapping[str, str] | None = None
    affinity: Affinity | None = None
    scheduler_name: str = ""
    termination_grace_period_seconds: int | None = None
    runtime_class_name: str | None = None
    security_context: SecurityContext | None = None
    resource_claims: tuple[PodResourceClaim, ...] | None = None
    tolerations: tuple[Toleration, ...] | None = None

    @property
    def grace_seconds(self) -> int:
        given = self.termination_grace_period_seconds
        return DEFAULT_GRACE_SECONDS if given is None else given


class ExtendedResourceClaim(K8sStruct, frozen=True, gc=False):
    """The ResourceClaim that the scheduler has made for a pod's extended resources."""

    resource_claim_name: str = ""


class PodStatus(K8sStruct, frozen=True, gc=False):
    """The status of a pod. ``phase`` is Pending, Running, Succeeded, Failed or Unknown."""

    phase: str = ""
    extended_resource_claim_status: ExtendedResourceClaim | None = None


class Pod(K8sObject, frozen=True, gc=False):
    """A pod or a pod template. A pod template has neither a uid nor a status."""

    spec: PodSpec = PodSpec()
    status: PodStatus | None = None

    @property
    def has_ended(self) -> bool:
        """True if all containers have ended and will not restart. In a terminating pod, containers may still run."""
        return self.status is not None and self.status.phase in ("Succeeded", "Failed")

    def all_containers(self) -> Iterator[tuple[str, Container]]:
        """Yield every container with its field path. Init containers are first, because they start first."""
        for field, containers in (("initContainers", self.spec.init_containers), ("containers", self.spec.containers)):
            for index, container in enumerate(containers or ()):
                yield f"spec.{field}[{index}]", container


class NodeTaint(K8sStruct, frozen=True, gc=False):
    """A taint of a node. The API server omits an empty ``value``."""

    key: str = ""
    value: str = ""
    effect: str = ""


class NodeSpec(K8sStruct, frozen=True, gc=False):
    """The fields of a node's spec that keep away pods. ``unschedulable``: True if the node is cordoned."""

    unschedulable: bool = False
    taints: tuple[NodeTaint, ...] | None = None


class NodeCondition(K8sStruct, frozen=True, gc=False):
    """A condition of a node. ``status`` is True, False or Unknown, as a text."""

    type: str = ""
    status: str = ""


class NodeStatus(K8sStruct, frozen=True, gc=False):
    """The capacity of a node and its allocatable part, as reported by kubelet and the device plugins."""

    capacity: Mapping[str, Quantity] | None = None
    allocatable: Mapping[str, Quantity] | None = None
    conditions: tuple[NodeCondition, ...] | None = None


class Node(K8sObject, frozen=True, gc=False):
    """A node with its labels, annotations, taints and capacity."""

    status: NodeStatus | None = None
    spec: NodeSpec | None = None

    @property
    def capacity(self) -> Mapping[str, Quantity]:
        return (self.status and self.status.capacity) or {}


class ConfigMap(K8sObject, frozen=True, gc=False):
    """A ConfigMap with text data."""

    data: Mapping[str, str] | None = None


# The grammar of a quantity is that of apimachinery (pkg/api/resource/quantity.go). Python's Decimal also accepts NaN,
# 1_000 and digits of other alphabets. The length is bounded, because a long quantity takes a long time to parse.
_NUMBER = r"[+-]?(?=\.?[0-9])[0-9]{0,30}(\.[0-9]{0,30})?"
_GRAMMAR = re.compile(rf"{_NUMBER}([eE][+-]?[0-9]{{1,2}}|[numkMGTPE]|[KMGTPE]i)?", re.ASCII)

LONGEST = 40
"""The most characters of a malformed quantity that the error message shows."""


def parse_quantity(quantity: str | float) -> Decimal:
    """Return a quantity as an exact number. Raises ValueError if it is malformed."""
    text = str(quantity)
    if isinstance(quantity, bool) or not _GRAMMAR.fullmatch(text):
        shown = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
        raise ValueError(f"{shown!r} is not a quantity")
    number: Decimal = kubernetes_quantity.parse_quantity(text)  # type: ignore[no-untyped-call]  # the client has no type hints
    return number


# `parse_whole` is called for every pod. Its results are cached, because the pods of one owner request equal amounts.
@functools.lru_cache(maxsize=4096, typed=True)
def parse_whole(quantity: str | float) -> int:
    """Return a quantity as a whole number. Raises ValueError if it is not a whole number from 0 to 2^53."""
    number = parse_quantity(quantity)
    if number < 0:
        raise ValueError(f"{quantity} is negative")
    if number != number.to_integral_value():
        raise ValueError(f"{quantity} is not a whole number")
    if number > 2**53:
        raise ValueError(f"{quantity} is larger than any cluster")
    return int(number)


def whole_or_none(quantity: Quantity | None) -> int | None:
    """Return a quantity as a whole number; None if it is missing, or if `parse_whole` would reject it."""
    try:
        return None if quantity is None else parse_whole(quantity)
    except ValueError:
        return None
