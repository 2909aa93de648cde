"""Reads the objects of a cluster, and the workloads to check, from files, for reviews without an API server."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
import structlog

from vcuda import documents, errors, k8s_types, workloads
from vcuda.allocations import stored_claims, stored_pods
from vcuda.claims import charges, devices as dra, digest, objects
from vcuda.claims.names import CLAIM, TEMPLATE
from vcuda.ledger.ledger import charges_by_model
from vcuda.placement import affinity, observed_nodes, patches, registers
from vcuda.placement.nodes import Nodes, NodeStates
from vcuda.quota import model, well_known
from vcuda.requests import config, resources, runtime_devices
from webhook.ledger import ledgers as memory
from webhook.review import context

_SYSTEM = well_known.SYSTEM_NAMESPACES | well_known.UNASKED_NAMESPACES

_KINDS: Mapping[str, type[k8s_types.K8sObject]] = {
    "Node": k8s_types.Node,
    "ResourceSlice": objects.ResourceSlice,
    "DeviceClass": objects.DeviceClass,
    TEMPLATE: objects.ResourceClaimTemplate,
    CLAIM: objects.ResourceClaim,
    "Pod": k8s_types.Pod,
}
"""The types of the objects in files, by kind. The file named by option --nodes may contain all of these kinds."""

_NAMESPACED = frozenset({TEMPLATE, CLAIM, "Pod"})

NOT_JSON = (msgspec.MsgspecError, ValueError, RecursionError)
"""Exceptions that msgspec raises for YAML that JSON cannot express, for example half of a surrogate pair, or an object
that contains itself."""

T = TypeVar("T")

TemplateSpecs = Mapping[tuple[str, str], objects.ClaimSpec]
"""Maps the namespace and name of a ResourceClaimTemplate to the spec of the claims that the template describes."""


class OfflineCluster(msgspec.Struct, frozen=True):
    """The quota, nodes and stored objects of a cluster, read from files. Decisions of reviews depend on this data."""

    policy: context.PolicySnapshot
    committed: Mapping[str, Mapping[str, model.Charge]]
    """The charges of the stored pods and claims, by namespace and GPU model."""
    templates: TemplateSpecs = {}

    def at(self, moment: float) -> "OfflineCluster":
        """Return the cluster with the quota limits that apply at ``moment``, in Unix seconds."""
        policy = msgspec.structs.replace(self.policy, quota=self.policy.quota.at(moment))
        return msgspec.structs.replace(self, policy=policy)

    def ledgers(self) -> memory.MemoryLedgers:
        return memory.MemoryLedgers(self.committed, self.policy.quota.members)


def read_cluster(
    quota: Path,
    nodes: Path | None,
    pin_settings: patches.PinSettings,
    gpu_runtime_classes: tuple[str, ...] = runtime_devices.GPU_RUNTIME_CLASSES,
    scheduler_users: frozenset[str] = context.SCHEDULER_USERS,
) -> OfflineCluster:
    """Return the cluster that these files describe. Claims are decided as on Kubernetes 1.34.

    ``quota``: the file with the quota document. ``nodes``: the file with the nodes and the stored objects, or
    None without such a file. Raises BadInput if a file has faults.
    """
    read = read_quota(quota)
    known = read.resources
    no_nodes = Nodes(pin_settings.labels, named=known.models)
    stored = read_stored_objects(nodes, pin_settings.labels, known) if nodes else StoredObjects(no_nodes)
    known = known.with_claimed(stored.devices.extended_resources).with_registered(stored.nodes.registered_cards)
    claims = charges.ClaimPolicy.of(stored.devices, stored.nodes.model_of, read.quota, known)
    policy = context.PolicySnapshot(
        read.quota,
        stored.nodes,
        pin_settings,
        resources=known,
        runtime_classes=runtime_devices.RuntimeClasses(gpu_runtime_classes),
        claims=claims,
        scheduler_users=scheduler_users,
        states=stored.states,
    )
    return OfflineCluster(policy, stored.committed(claims), stored.templates)


def read_quota(path: Path) -> config.QuotaConfig:
    """Return the quota in a file. The file contains the quota document, or a ConfigMap with the document.

    Raises BadInput if the file cannot be read, and QuotaFault if the quota document is malformed.
    """
    text = read_file(path)
    if not text.strip():
        raise errors.BadInput(f"{path}: must not be empty; write {{}} to limit no namespace")
    try:
        found = documents.load_all(text)
    except documents.NOT_YAML:
        found = []  # config.parse_config() reports text that is not YAML, with the position of the error
    if len(found) == 1 and isinstance(found[0], dict) and found[0].get("kind") == "ConfigMap":
        data = convert(str(path), found[0], k8s_types.ConfigMap).data or {}
        if config.QUOTA not in data:
            raise errors.BadInput(f"{path}: the ConfigMap has no key {config.QUOTA}")
        return config.parse_config(data, system=_SYSTEM)
    return config.parse_config({config.QUOTA: text}, system=_SYSTEM)


class StoredObjects(msgspec.Struct, frozen=True):
    """The objects of a cluster, as read from the file named by option --nodes."""

    nodes: Nodes
    states: NodeStates = NodeStates()
    devices: dra.Devices = dra.NO_DEVICES
    templates: TemplateSpecs = {}
    claims: Sequence[stored_claims.StoredClaim] = ()
    pods: Sequence[stored_pods.StoredPod] = ()

    def committed(self, claim_policy: charges.ClaimPolicy) -> Mapping[str, Mapping[str, model.Charge]]:
        """Return the GPU charges of the stored pods and claims, by namespace and GPU model.

        As on a cluster, a pod or claim that is not pinned to one GPU model is not charged.
        """
        price = stored_claims.ClaimCounter(claim_policy)
        namespaces = {*(claim.namespace for claim in self.claims), *(pod.namespace for pod in self.pods)}
        pods: dict[str, list[stored_pods.StoredPod]] = {namespace: [] for namespace in namespaces}
        for pod in self.pods:
            pods[pod.namespace].append(pod)
        taken = {namespace: list(stored_pods.charges_of(each, self.nodes)) for namespace, each in pods.items()}
        # If a pod requests extended resources, the scheduler makes a claim for the pod. Such a claim is not counted,
        # because the pod itself is charged.
        extended = {namespace: stored_claims.charged_by_pods(each, self.nodes) for namespace, each in pods.items()}
        for claim in self.claims:
            if claim.name not in extended[claim.namespace]:
                taken[claim.namespace] += price(claim).charges.items()
        return {namespace: charges_by_model(each) for namespace, each in taken.items()}


def read_stored_objects(path: Path, labels: affinity.NodeLabels, known: resources.GpuResources) -> StoredObjects:
    """Return the stored objects in a file that ``kubectl get … -A -o yaml`` has printed. Raises BadInput."""
    found: dict[str, dict[tuple[str, str], tuple[str, Any]]] = {kind: {} for kind in _KINDS}
    for where, manifest in workloads.objects_in(str(path), read_file(path)):
        stored = _read_object(where, manifest)
        found[manifest["kind"]][stored.metadata.namespace, stored.metadata.name] = where, stored
    seen = {}
    for (_, name), (where, node) in found["Node"].items():
        cards = registers.read_registers(node.annotations, functools.partial(_ignored, where))
        seen[name] = observed_nodes.observe(node, known, cards)
    slices = [_read_slice(where, each) for where, each in found["ResourceSlice"].values()]
    classes = {name: dra.read_class(each) for (_, name), (_, each) in found["DeviceClass"].items()}
    published = dra.Devices.of(slices, classes)
    nodes = observed_nodes.nodes_of(seen, labels, known.models)
    charged = known.with_claimed(published.extended_resources).with_registered(nodes.registered_cards)
    pods = (stored_pods.read_stored(pod, labels, charged) for _, pod in found["Pod"].values())
    return StoredObjects(
        nodes,
        NodeStates.of(nodes.index.names, {name: node.state for name, node in seen.items()}),
        published,
        {key: template.spec.spec for key, (_, template) in found[TEMPLATE].items()},
        tuple(
            stored_claims.StoredClaim(
                claim.metadata.uid, namespace, name, digest.pack(digest.digest_of(claim.spec)), claim.allocated
            )
            for (namespace, name), (_, claim) in found[CLAIM].items()
        ),
        tuple(filter(None, pods)),
    )


def _read_object(where: str, manifest: workloads.Manifest) -> k8s_types.K8sObject:
    kind = manifest["kind"]
    if kind not in _KINDS:
        raise errors.BadInput(f"{where}: kind must be one of {', '.join(_KINDS)}; got {kind}")
    if _KINDS[kind].__module__ == objects.__name__:
        workloads.require_claims_api(where, manifest)
    stored = convert(where, manifest, _KINDS[kind])
    if not stored.metadata.name:
        raise errors.BadInput(f"{where}: the {kind} has no name")
    # A pod, claim or template without a namespace cannot be charged, because each ledger belongs to one namespace.
    if kind in _NAMESPACED and not stored.metadata.namespace:
        raise errors.BadInput(f"{where}: the {kind} {stored.metadata.name} has no namespace")
    return stored


def _read_slice(where: str, published: objects.ResourceSlice) -> dra.PoolSlice:
    try:
        return dra.read_slice(published)
    except ValueError as error:
        raise errors.BadInput(f"{where}: the ResourceSlice is malformed: {error}") from error


def _ignored(where: str, annotation: str, error: ValueError) -> None:
    structlog.get_logger().warning(
        "malformed register of cards ignored", place=where, annotation=annotation, error=str(error)
    )


def read_file(path: Path) -> str:
    """Return the text of a file, or of standard input if the path is ``-``. Raises BadInput if it cannot be read."""
    try:
        with click.open_file(str(path), encoding="utf-8") as file:
            return str(file.read())
    except (OSError, UnicodeDecodeError) as error:
        raise errors.BadInput(f"{path}: the file cannot be read: {error}") from error


def typed_workloads(source: str, text: str, namespace: str) -> list[workloads.Workload | workloads.Unread]:
    """Return the workloads in a text. An object is malformed if one of its fields has a wrong type."""
    return workloads.workloads_in(source, text, namespace, _check)


def _check(where: str, manifest: workloads.Manifest) -> workloads.Manifest:
    convert(where, manifest, _KINDS[manifest["kind"]])
    return _plain(where, manifest)


def convert(where: str, manifest: workloads.Manifest, view: type[T]) -> T:
    """Return a manifest as an object of class ``view``. Raises BadInput if a field is missing or has a wrong type."""
    try:
        return msgspec.convert(_plain(where, manifest), view)
    except msgspec.MsgspecError as error:
        raise errors.BadInput(f"{where}: the object is malformed: {error}") from error


def _plain(where: str, manifest: workloads.Manifest) -> workloads.Manifest:
    # Like kubectl, convert YAML to JSON. Null fields are removed, because the API server treats them as absent.
    try:
        encoded = msgspec.json.encode(manifest, enc_hook=str)
        plain: workloads.Manifest = workloads.without_nulls(msgspec.json.decode(encoded))
    except NOT_JSON as error:
        raise errors.BadInput(f"{where}: the object is malformed: {error}") from error
    return plain
