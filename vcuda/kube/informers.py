"""Watches the quota ConfigMap, the nodes and the RuntimeClasses."""

import functools
import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog

from vcuda.allocations.cards import INDEXED
from vcuda.errors import QuotaFault
from vcuda.k8s_types import ConfigMap, Decoder, K8sStruct, Node, NodeStatus, ObjectMeta
from vcuda.kube import client, events, reflector
from vcuda.placement import affinity
from vcuda.placement.nodes import Nodes, NodeStates
from vcuda.placement.observed_nodes import ObservedNode, nodes_of, observe
from vcuda.placement.registers import ANNOTATIONS, Registers, read_registers
from vcuda.quota import changes, model
from vcuda.quota.quota_clock import QuotaClock
from vcuda.requests import config
from vcuda.requests.resources import BUILT_IN, GpuResources
from vcuda.requests.schemes import SCHEMES

# At most this many faults of one quota document are logged, because a YAML alias can repeat a fault without bound.
MAX_LOG_FAULTS = 20

_decode = Decoder(ConfigMap).decode
_decode_node = Decoder(Node).decode
_CARDS = tuple(name for scheme in INDEXED for name in (scheme.cores, scheme.memory))
_LOCKS = tuple(scheme.node_lock for scheme in SCHEMES if scheme.node_lock)


class QuotaSource(msgspec.Struct, frozen=True):
    """The place of the quota document: a ConfigMap, and a key in its data."""

    namespace: str = "kube-system"
    name: str = "gpuquota"
    key: str = config.QUOTA


class QuotaInformer:
    """Watches the quota ConfigMap. If its new document is malformed, the last good document stays in force, and an
    Event reports the fault.

    After the ConfigMap is deleted, no namespace is limited, as after the deletion of a ResourceQuota.

    ``on_change`` is called after a new quota comes into force. ``clock`` returns the Unix time in seconds. This time
    decides when a grant (a dated addition to a limit) begins and ends.
    """

    def __init__(
        self,
        kube: client.Kube,
        source: QuotaSource,
        system: frozenset[str],
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._kube = kube
        self._source = source
        self._nobody = model.Quota(system=system)
        self._log = structlog.get_logger().bind(configmap=f"{source.namespace}/{source.name}")
        self._config: config.QuotaConfig | None = None
        self._absent: config.QuotaConfig | None = None
        self._faulty = False
        self._on_change = on_change
        self.clock = QuotaClock(clock)
        self._path = f"/api/v1/namespaces/{client.segment(source.namespace)}/configmaps"
        self._params = {"fieldSelector": f"metadata.name={source.name}"}
        self.reflector = reflector.Reflector(kube, self._path, _decode, params=self._params, on_event=self._on_event)

    def current(self) -> model.Quota | None:
        """Return the quota in force, with the limits at this moment; None until the ConfigMap has been read."""
        read = self.in_force()
        return self.clock.now(read.quota) if read else None

    def resources(self) -> GpuResources:
        """Return the GPU resources that pods can request. Their ``version`` is empty until the quota has been read."""
        read = self.in_force()
        return read.resources if read else BUILT_IN

    def in_force(self) -> config.QuotaConfig | None:
        """Return the quota ConfigMap in force, without grants (dated additions to limits); None until it was read."""
        # Any thread may call this method, so it does not assign `_config`. A late assignment could overwrite a document
        # that the watch has just delivered.
        if self._config is None and self.reflector.synced.is_set() and not self._faulty:
            # A review compares this object with the document for which charges were prepared. So return the same object
            # each time.
            self._absent = self._absent or self._without_document()
            return self._absent
        return self._config

    def _without_document(self) -> config.QuotaConfig:
        # Without a ConfigMap, the quota gets the watch's resourceVersion, which is newer than any deleted ConfigMap's.
        built_in = GpuResources(version=self.reflector.resource_version, limited=self._nobody.models)
        return config.QuotaConfig(self._nobody, built_in)

    def stored_version(self) -> str:
        """List the quota ConfigMap, and return its stored resourceVersion; empty if the ConfigMap does not exist."""
        pages = self._kube.list_pages(self._path, self._params, seconds=10)
        found = (_decode(raw).metadata for page in pages for raw in page.items)
        return next((each.resource_version for each in found if each.name == self._source.name), "")

    def is_valid(self) -> bool:
        """Return False if the stored quota document is malformed, even while an older document is still in force."""
        return not self._faulty

    def _on_event(self, _old: ConfigMap | None, new: ConfigMap | None) -> None:
        self._config = self.in_force()
        if new is None:
            self._accept(self._without_document())
            self._log.warning("the quota ConfigMap was deleted, so no namespace is limited")
            return
        try:
            version = new.metadata.resource_version
            read = config.parse_config(new.data or {}, self._source.key, self._nobody.system, version)
        except QuotaFault as fault:
            self._reject(new, fault)
        else:
            before = self._config
            self._accept(read)
            self._log.info(
                "quota read", namespaces=len(read.quota.namespaces), teams=len(read.quota.teams), version=version
            )
            message = changes.outline(before.quota, read.quota, events.MAX_EVENT_MESSAGE_LENGTH) if before else ""
            if message:
                subject, id_ = self._subject(new), f"edited-{version}"
                event = events.Event(subject, id_, "QuotaEdited", message, "vcuda-quota")
                events.post_event_or_log(self._kube, event)

    def _accept(self, read: config.QuotaConfig) -> None:
        self._config, self._faulty = read, False
        self._on_change()

    def _reject(self, config_map: ConfigMap, fault: QuotaFault) -> None:
        self._faulty = True
        kept = "the last good document stays in force" if self._config else "no quota has been read yet"
        self._log.error("quota document malformed", faults=[str(f) for f in fault.faults[:MAX_LOG_FAULTS]], kept=kept)
        message, subject = f"the quota document is malformed, and {kept}: {fault}", self._subject(config_map)
        # The Event's name contains the version of the ConfigMap, so that all replicas together write only one Event.
        id_ = f"malformed-{subject.resource_version}"
        event = events.Event(subject, id_, "MalformedQuota", message, "vcuda-quota", type="Warning")
        events.post_event_or_log(self._kube, event)

    def _subject(self, config_map: ConfigMap) -> events.InvolvedObject:
        metadata, source = config_map.metadata, self._source
        return events.InvolvedObject(
            "v1", "ConfigMap", source.name, source.namespace, metadata.uid, metadata.resource_version
        )


NodeChange = Callable[[Node | None, Node | None], None]
"""A function that is called with the old and the new state of a node. The old state is None if the node was created.
The new state is None if the node was deleted."""


@dataclass(eq=False)
class NodeInformer:
    """Watches the labels, registered cards, GPU capacity and scheduler locks of nodes. Indexes the labels and cards.

    ``on_model_change`` is called after the GPU model, the pool or the registered cards of a node change.
    ``on_offer`` is called after a node's allocatable amount of an extended resource changes to a new amount above 0.
    ``resources`` returns the GPU resources, including the table that translates values of the model label to models.
    """

    kube: client.Kube
    keys: affinity.NodeLabels
    on_model_change: Callable[[], None] = lambda: None
    resources: Callable[[], GpuResources] = lambda: BUILT_IN
    on_offer: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        # A node's registers (annotations in which HAMi or vgpu-manager lists its cards) by the hash of their texts.
        # Node objects change every few seconds, but unchanged registers are not parsed again.
        self._registers: dict[str, tuple[bytes, Registers]] = {}
        self._log = structlog.get_logger()
        self._nodes = Nodes(self.keys)
        self._states = NodeStates()
        self._stale = self._stale_states = False
        self._followers: list[NodeChange] = []
        self.reflector: reflector.Reflector[ObservedNode] = reflector.Reflector(
            self.kube, "/api/v1/nodes", self._decode, on_event=self._on_event
        )

    def follow(self, on_change: NodeChange) -> None:
        """Call ``on_change`` after a node is created or deleted, and after a field in `ObservedNode` changes.

        The caller must call this before the watch starts.
        """
        self._followers.append(on_change)

    def current(self) -> Nodes:
        return self.with_states()[0]

    def with_states(self) -> tuple[Nodes, NodeStates]:
        """Return the nodes, and the states that show whether they can take new pods.

        A change of states does not replace the `Nodes` object, because other indexes are computed from it.
        """
        known = self.resources()
        with self._lock:
            if self._stale or self._nodes.named is not known.models:
                self._stale = False
                seen = {key.name: node for key, node in self.reflector.snapshot().items()}
                self._nodes = nodes_of(seen, self.keys, known.models)
                self._stale_states = True
            if self._nodes.version != known.version:
                self._nodes = msgspec.structs.replace(self._nodes, limited=known.limited, version=known.version)
            if self._stale_states:
                self._stale_states = False
                states = {key.name: node.state for key, node in self.reflector.snapshot().items()}
                self._states = NodeStates.of(self._nodes.index.names, states)
            return self._nodes, self._states

    def _on_event(self, old: ObservedNode | None, new: ObservedNode | None) -> None:
        # Most events of nodes are kubelet's heartbeats, which change no field that is kept.
        if old == new:
            return
        if old and new is None:
            self._registers.pop(old.metadata.name, None)
        with self._lock:
            self._stale |= not (old and new and _indexed(old) == _indexed(new))
            self._stale_states |= not (old and new and old.state == new.state)
        if self._groups(old) != self._groups(new) or (old and new and old.registers != new.registers):
            self.on_model_change()
        if new and new.state.offered and new.state.offered - ((old and old.state.offered) or set()):
            self.on_offer()
        for on_change in self._followers:
            on_change(old, new)

    def _groups(self, node: Node | None) -> tuple[str | None, str | None]:
        labels = node.labels if node else {}
        return labels.get(self.keys.model), labels.get(self.keys.pool)

    def _decode(self, raw: bytes) -> ObservedNode:
        node = _decode_node(raw)
        locks = {key: node.annotations[key] for key in _LOCKS if key in node.annotations} or None
        cards = {key: node.capacity[key] for key in _CARDS if key in node.capacity} or None
        read = node.metadata
        metadata = ObjectMeta(name=read.name, uid=read.uid, labels=read.labels, annotations=locks)
        observed = observe(node, self.resources(), self._read_registers(node))
        return msgspec.structs.replace(observed, metadata=metadata, status=NodeStatus(cards) if cards else None)

    def _read_registers(self, node: Node) -> Registers:
        texts = {key: node.annotations[key] for key in ANNOTATIONS if key in node.annotations}
        name = node.metadata.name
        if not texts:
            self._registers.pop(name, None)
            return {}
        # Only a hash of a node's registers is kept, because a register may have 256 KiB.
        digest = hashlib.blake2b(msgspec.json.encode(texts), digest_size=16).digest()
        known = self._registers.get(name)
        if known is None or known[0] != digest:
            known = self._registers[name] = (digest, read_registers(texts, functools.partial(self._warn, name)))
        return known[1]

    def _warn(self, node: str, annotation: str, error: ValueError) -> None:
        self._log.warning("malformed register of cards ignored", node=node, annotation=annotation, error=str(error))


def _indexed(node: ObservedNode) -> tuple[object, ...]:
    return node.labels, node.registers, node.outdated


class _RuntimeClass(K8sStruct, frozen=True, gc=False):
    """The fields of a RuntimeClass that are read. ``handler``: the container runtime for the pods of the class."""

    handler: str = ""


_decode_runtime_class = Decoder(_RuntimeClass).decode


class RuntimeClassInformer:
    """Keeps each RuntimeClass's handler in memory, without a limit: only administrators can write RuntimeClasses."""

    def __init__(self, kube: client.Kube) -> None:
        path = "/apis/node.k8s.io/v1/runtimeclasses"
        self.reflector: reflector.Reflector[str] = reflector.Reflector(
            kube, path, lambda raw: _decode_runtime_class(raw).handler
        )

    def handler_of(self, name: str) -> str | None:
        """Return a RuntimeClass's handler (container runtime); None if the class is missing or was not read yet."""
        return self.reflector.get(("", name))
