"""The command ``kubectl gpuquota nodes``: lists the GPU nodes with their models, cards and free cards.

The command lists nodes, pods, ResourceClaims and ResourceSlices, and calls the same functions with which the controller
labels nodes and charges pods. So this module needs the packages of the extra `server`. The rest of the plugin does not.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import yaml

from vcuda import errors, k8s_types
from vcuda.allocations.stored_claims import ClaimCounter, ClaimReader, charged_by_pods
from vcuda.allocations.stored_pods import StoredPod, read_stored
from vcuda.claims import charges, devices, objects
from vcuda.claims.names import API_PATH
from vcuda.discovery.discovered import Found, find_model
from vcuda.discovery.names import model_warnings
from vcuda.discovery.sources import DriverCards, NodeFacts, is_alive, published_cards, read_facts
from vcuda.k8s_types import Decoder
from vcuda.kube import Kube, QuotaPlace, is_served, segment
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.node_states import NodeAvailability, read_state
from vcuda.placement.nodes import Nodes
from vcuda.placement.registers import Registers, read_registers
from vcuda.quota.model import CORES_PER_CARD, Cores, total
from vcuda.requests.config import QuotaConfig, parse_config
from vcuda.requests.resources import PLAIN_CARDS, GpuResources, ProductRow

T = TypeVar("T")

_NODE = Decoder(k8s_types.Node)
_POD = Decoder(k8s_types.Pod)
_SLICE = Decoder(objects.ResourceSlice)
_CLASS = Decoder(objects.DeviceClass)
_CONFIG_MAP = Decoder(k8s_types.ConfigMap)


@dataclass(frozen=True, slots=True)
class GpuNode:
    """A node with GPUs. A field is None if its value is unknown."""

    node: str
    models: tuple[str, ...]
    """First the model in the node's label, by which the quota counts, then other models. Empty if there is no label."""
    cards: float | None
    memory: int | None
    """The memory of one card in MiB."""
    source: str
    """The source of the model label. Without a label, the source that reports a model; empty if none does."""
    scheme: str
    """The names of the device plugins and DRA drivers that serve the node."""
    free: float | None
    """The number of cards that no pod and no ResourceClaim uses."""
    doubts: tuple[str, ...] = ()
    """Messages that say why the GPU model is not certain."""
    takes_pods: str = ""
    """Whether new pods may run on the node: `yes`, or `no` or `if tolerated` with the reasons."""


class ClusterNodes(NamedTuple):
    """The GPU nodes, sorted by name, and warnings about the quota."""

    nodes: tuple[GpuNode, ...]
    warnings: tuple[str, ...]


class _Seen(NamedTuple):
    name: str
    labels: Mapping[str, str]
    registers: Registers
    facts: NodeFacts
    published: DriverCards
    found: Found
    state: NodeAvailability


OWN_KUBECONFIG = Path("~/.kube/config")


def connect(kubeconfig: Path | None, context: str | None) -> Kube:
    """Return a client for the cluster that kubectl uses. Raises BadInput if the kubeconfig cannot be read.

    As in client-go, a kubeconfig has precedence over the service account of the pod in which the command runs.
    """
    named = kubeconfig or os.environ.get("KUBECONFIG")
    return Kube.connect(Path(named) if named else _own_kubeconfig(), context)


def _own_kubeconfig() -> Path | None:
    # If the kubeconfig has no current context, return None. The client then uses the pod's service account, as kubectl
    # does.
    home = os.environ.get("HOME")
    path = Path(home) / OWN_KUBECONFIG.relative_to("~") if home else None
    if path is None or not path.exists():
        return None
    try:
        config = yaml.safe_load(path.read_bytes())
    except (OSError, yaml.YAMLError):
        return OWN_KUBECONFIG  # `Kube.connect` reads this file again, and raises the error.
    return OWN_KUBECONFIG if isinstance(config, dict) and config.get("current-context") else None


def read(kubeconfig: Path | None, context: str | None, model_label: str, place: tuple[str, str, str]) -> ClusterNodes:
    """Return the GPU nodes of the cluster. ``place``: namespace, name and key of the quota ConfigMap.

    Raises VcudaError, for example if the user lacks a permission.
    """
    kube, keys = connect(kubeconfig, context), NodeLabels(model_label)
    config, faults = _config(kube, QuotaPlace(*place))
    known = config.resources
    read = list(_each(kube, "/api/v1/nodes", _NODE.decode))
    slices: list[devices.PoolSlice] = []
    if is_served(kube):
        slices += _each(kube, f"{API_PATH}/resourceslices", lambda raw: devices.read_slice(_SLICE.decode(raw)))
    published = published_cards(slices)
    seen = [_look(node, keys, known, published.get(node.metadata.name, {})) for node in read]
    registers = {each.name: each.registers for each in seen if each.registers}
    nodes = Nodes.of({each.name: each.labels for each in seen}, keys, registers, known.models)
    used = _used(kube, keys, config, nodes, slices)
    rows = [
        _row(each, known, used.get(each.name, 0))
        for each in sorted(seen, key=lambda each: each.name)
        if each.found.label or each.found.seen or each.found.doubts or any(each.facts.offered.values())
    ]
    return ClusterNodes(tuple(rows), (*faults, *model_warnings(config.quota.models, nodes.models)))


def _config(kube: Kube, place: QuotaPlace) -> tuple[QuotaConfig, tuple[str, ...]]:
    path = f"/api/v1/namespaces/{segment(place.namespace)}/configmaps/{segment(place.name)}"
    try:
        return parse_config(_CONFIG_MAP.decode(kube.get(path)).data or {}, place.key), ()
    except errors.NotFound:
        return QuotaConfig(), ()
    except errors.QuotaFault as fault:
        return QuotaConfig(), (f"the quota document is malformed and was ignored: {fault}",)


def _each(kube: Kube, path: str, decode: Callable[[bytes], T | None]) -> Iterator[T]:
    """Yield the objects of all pages of a LIST. An object that cannot be decoded is left out."""
    for page in kube.list_pages(path):
        for raw in page.items:
            try:
                found = decode(raw)
            except (ValueError, *k8s_types.UNDECODABLE):
                continue
            if found is not None:
                yield found


def _look(node: k8s_types.Node, keys: NodeLabels, known: GpuResources, published: DriverCards) -> _Seen:
    registers = read_registers(node.annotations, lambda *_: None)
    facts = read_facts(node, known, registers)
    found = find_model(node.labels, keys.model, registers, facts, published=published, known=known)
    return _Seen(node.metadata.name, node.labels, registers, facts, published, found, read_state(node))


def _row(seen: _Seen, known: GpuResources, used: Cores) -> GpuNode:
    found, named = seen.found, known.models
    counts = found.model(named)
    row = named.rows.get(counts, ProductRow())
    cards = found.cards(seen.facts, known)
    alive = [each for each in known.schemes if is_alive(each, seen.facts, seen.registers)]
    is_plain = seen.facts.offered.get(PLAIN_CARDS) and all(each.count != PLAIN_CARDS for each in alive)
    served_by = [*(each.name for each in alive), *([PLAIN_CARDS] if is_plain else [])]
    return GpuNode(
        seen.name,
        tuple(dict.fromkeys([counts, *found.models])) if counts else (),
        cards,
        next((each.memory for each in found.seen if each.memory), None) or row.memory or None,
        found.source,
        ", ".join([*served_by, *seen.published]),
        None if cards is None else max(round(cards * CORES_PER_CARD) - math.ceil(used), 0) / CORES_PER_CARD,
        tuple(found.doubts.values()),
        seen.state.takes_pods,
    )


def _used(
    kube: Kube, keys: NodeLabels, config: QuotaConfig, nodes: Nodes, slices: list[devices.PoolSlice]
) -> Mapping[str, Cores]:
    """Return the cores (hundredths of a card) that pods and claims use on each node, by the node's name."""
    known, used = config.resources, dict[str, Cores]()
    pods: dict[str, list[StoredPod]] = {}
    for pod in _each(kube, "/api/v1/pods", lambda raw: read_stored(_POD.decode(raw), keys, known)):
        pods.setdefault(pod.namespace, []).append(pod)
        if pod.live and pod.node:
            used[pod.node] = used.get(pod.node, 0) + pod.charge_on(nodes).cores
    if slices:
        for node, cores in _used_by_claims(kube, config, nodes, slices, pods):
            used[node] = used.get(node, 0) + cores
    return used


def _used_by_claims(
    kube: Kube,
    config: QuotaConfig,
    nodes: Nodes,
    slices: list[devices.PoolSlice],
    pods: Mapping[str, Iterable[StoredPod]],
) -> Iterator[tuple[str, Cores]]:
    classes = {
        each.metadata.name: devices.read_class(each) for each in _each(kube, f"{API_PATH}/deviceclasses", _CLASS.decode)
    }
    found = devices.Devices.of(slices, classes)
    # The scheduler creates claims for pods that request extended resources. These claims are left out, because the pods
    # are charged instead.
    extended = {namespace: charged_by_pods(within, nodes) for namespace, within in pods.items()}
    price = ClaimCounter(charges.ClaimPolicy.of(found, nodes.model_of, config.quota, config.resources))
    for claim in _each(kube, f"{API_PATH}/resourceclaims", ClaimReader().read):
        if not claim.allocated or claim.name in extended.get(claim.namespace, ()):
            continue
        on = found.find(claim.allocated[0])
        if on and on[1]:
            yield on[1], total(price(claim).charges.values()).cores


def node_row(node: GpuNode) -> tuple[str, ...]:
    figures = ["?" if each is None else f"{each:g}" for each in (node.cards, node.memory, node.free)]
    cards, memory, free = figures
    models, source = ", ".join(node.models) or "none", node.source or "none"
    return (node.node, models, cards, memory, source, node.scheme, free, node.takes_pods)
