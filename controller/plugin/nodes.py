"""The command ``kubectl gpuquota nodes``: lists the GPU nodes, and the promised and present cards of each model.

The command lists nodes, pods, ResourceClaims and ResourceSlices, and calls the same functions with which the controller
labels nodes and charges pods. So this module needs the packages of the extra `server`. The rest of the plugin does not.
"""

import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import yaml

from controller.plugin.published import EVERY_REPORT, SpoiltReport, read_report
from vcuda import errors, k8s_types
from vcuda.allocations.stored_claims import ClaimCounter, ClaimReader, charged_by_pods
from vcuda.allocations.stored_pods import StoredPod, read_stored
from vcuda.claims import charges, devices, objects
from vcuda.claims.names import API_PATH
from vcuda.discovery.discovered import Found, find_model
from vcuda.discovery.sources import DriverCards, published_cards
from vcuda.k8s_types import Decoder
from vcuda.kube import Kube, QuotaSource, is_served, segment
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.device_plugins import is_alive
from vcuda.placement.missing_models import model_warnings
from vcuda.placement.nodes import Nodes
from vcuda.placement.observed_nodes import ObservedNode, nodes_of, observe
from vcuda.placement.registers import read_registers
from vcuda.quota.model import CORES_PER_CARD, Cores, NamespaceQuota, Quota, total
from vcuda.quota.well_known import SYSTEM_NAMESPACES, UNASKED_NAMESPACES
from vcuda.requests.config import QuotaConfig, parse_config
from vcuda.requests.resources import PLAIN_CARDS, GpuResources, ProductRow

T = TypeVar("T")

# An installation in a namespace other than vcuda-quota is not checked.
_WEBHOOK = "/apis/apps/v1/namespaces/vcuda-quota/deployments/vcuda-webhook"
_NODE = Decoder(k8s_types.Node)
_POD = Decoder(k8s_types.Pod)
_SLICE = Decoder(objects.ResourceSlice)
_CLASS = Decoder(objects.DeviceClass)
_CONFIG_MAP = Decoder(k8s_types.ConfigMap)
_OBJECT = Decoder(k8s_types.K8sObject)


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


@dataclass(frozen=True, slots=True)
class PromisedCards:
    """The cards of one GPU model. MIG slices are counted as the parts of a card that they are charged.

    If the quota ConfigMap is malformed, ``promised``, ``charged`` and ``free`` are None, because they are unknown.
    """

    model: str
    promised: float | None
    """The sum of the limits of all namespaces, with the grants that apply now. A limit counts at most as `total`."""
    present: float
    """The cards of the nodes of this model."""
    taking_pods: float
    """The part of ``present`` on nodes that are ready and not cordoned."""
    charged: float | None
    """The sum of the published usage of all namespaces."""
    free: float | None
    """The part of ``taking_pods`` that no pod and no ResourceClaim uses."""


@dataclass(frozen=True, slots=True)
class ClusterNodes:
    """The GPU nodes, sorted by name, the cards of each model, and warnings about the quota."""

    nodes: tuple[GpuNode, ...]
    models: tuple[PromisedCards, ...]
    warnings: tuple[str, ...]


class _Seen(NamedTuple):
    name: str
    node: ObservedNode
    published: DriverCards
    found: Found


OWN_KUBECONFIG = Path("~/.kube/config")


def connect_to_cluster(kubeconfig: Path | None, context: str | None) -> Kube:
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


def read_nodes(kube: Kube, model_label: str, source: tuple[str, str, str]) -> ClusterNodes:
    """Return the GPU nodes of the cluster. ``source``: namespace, name and key of the quota ConfigMap.

    Raises VcudaError, for example if the user lacks a permission.
    """
    keys = NodeLabels(model_label)
    config, faults = _config(kube, QuotaSource(*source))
    known = config.resources
    read = list(_each(kube, "/api/v1/nodes", _NODE.decode))
    slices: list[devices.PoolSlice] = []
    if is_served(kube):
        slices += _each(kube, f"{API_PATH}/resourceslices", lambda raw: devices.read_slice(_SLICE.decode(raw)))
    published = published_cards(slices)
    seen = [_look(node, keys, known, published.get(node.metadata.name, {})) for node in read]
    nodes = nodes_of({each.name: each.node for each in seen}, keys, known.models)
    used = _used(kube, keys, config, nodes, slices)
    rows = [
        _row(each, known, None if faults else used.get(each.name, 0))
        for each in sorted(seen, key=lambda each: each.name)
        if each.found.label or each.found.seen or each.found.doubts or any(each.node.facts.offered.values())
    ]
    closed = {each.name for each in seen if each.node.state.obstacles}
    models = tuple(_model_cards(kube, config.quota.at(time.time()), rows, closed, is_known=not faults))
    warnings = (
        *faults,
        *model_warnings(config.quota.models, nodes.models),
        *oversubscribed(models),
        *uncounted(rows),
        *(() if faults else map(without_scheduler, sorted(_without_scheduler(kube, known, seen)))),
    )
    return ClusterNodes(tuple(rows), models, warnings)


def _config(kube: Kube, source: QuotaSource) -> tuple[QuotaConfig, tuple[str, ...]]:
    path = f"/api/v1/namespaces/{segment(source.namespace)}/configmaps/{segment(source.name)}"
    try:
        config = parse_config(_CONFIG_MAP.decode(kube.get(path)).data or {}, source.key)
        # The names of the installation's own namespaces are not known here. The webhook has checked with them that no
        # team has one of these namespaces.
        quota = msgspec.structs.replace(config.quota, system=SYSTEM_NAMESPACES | UNASKED_NAMESPACES)
        return msgspec.structs.replace(config, quota=quota), ()
    except errors.NotFound:
        return QuotaConfig(), ()
    except errors.QuotaFault as fault:
        unknown = "the last valid quota stays in force, and PROMISED, CHARGED and FREE are unknown"
        return QuotaConfig(), (f"{unknown}, because the quota ConfigMap is malformed: {fault}",)


def _model_cards(
    kube: Kube, quota: Quota, rows: Iterable[GpuNode], closed: Collection[str], *, is_known: bool
) -> Iterator[PromisedCards]:
    """Yield the cards of each model. ``closed``: nodes that take no new pods. ``is_known``: True with a quota."""
    promised: Counter[str] = Counter()
    for entry in _entries_in_force(kube, quota):
        most = entry.total.most_cores if entry.total else sys.maxsize
        promised.update({model: min(limit.most_cores, most) for model, limit in entry.limits.items()})
    charged: Counter[str] = Counter()
    for report in _each(kube, "/api/v1/configmaps", lambda raw: read_report(msgspec.json.decode(raw)), EVERY_REPORT):
        for use in report.models:
            charged[use.model] += round(use.used * CORES_PER_CARD)
    present, taking, free = Counter[str](), Counter[str](), Counter[str]()
    for row in (row for row in rows if row.models):
        model, cores = row.models[0], round((row.cards or 0) * CORES_PER_CARD)
        present[model] += cores
        if row.node not in closed:
            taking[model] += cores
            free[model] += round((row.free or 0) * CORES_PER_CARD)
    for model in sorted({*quota.models, *present}):
        own, used, left = (each[model] / CORES_PER_CARD if is_known else None for each in (promised, charged, free))
        yield PromisedCards(model, own, present[model] / CORES_PER_CARD, taking[model] / CORES_PER_CARD, used, left)


def _entries_in_force(kube: Kube, quota: Quota) -> Iterator[NamespaceQuota]:
    """Yield the quota of each namespace and team. The limits of a team count once, whatever its members are. The entry
    "*" counts once for each existing namespace that it limits."""
    for team in quota.teams:
        yield quota.of_team(team)
    names = {*quota.namespaces}
    if quota.default:
        names.update(_each(kube, "/api/v1/namespaces", lambda raw: _OBJECT.decode(raw).metadata.name))
    for name in names:
        if (entry := quota.for_namespace(name)) and not entry.team:
            yield entry


def oversubscribed(models: Iterable[PromisedCards]) -> Iterator[str]:
    for each in models:
        if each.promised is not None and each.promised > each.present > 0:
            yield f"the quotas promise {each.promised:g} cards of {each.model}, but the nodes have {each.present:g}"


def uncounted(rows: Iterable[GpuNode]) -> Iterator[str]:
    unknown = Counter(row.models[0] for row in rows if row.models and row.cards is None)
    for model, count in sorted(unknown.items()):
        yield f"the number of cards of {count} nodes of {model} is unknown, so PRESENT and FREE leave these nodes out"


def without_scheduler(scheme: str) -> str:
    return (
        f"neither the webhook's flags nor gpu_schemes name a scheduler for the nodes of {scheme}, so a pod that "
        "requests a share stays pending, unless another webhook sets its scheduler"
    )


def _without_scheduler(kube: Kube, known: GpuResources, seen: Iterable[_Seen]) -> set[str]:
    """Return the vendors' schemes in use for which no scheduler is set; empty if this cannot be found out."""
    own = [each for each in known.schemes if each.register and not each.scheduler]
    found = {scheme.name for each in seen for scheme in own if is_alive(scheme, each.node.facts, each.node.registers)}
    if not found:
        return set()
    try:
        deployment = msgspec.json.decode(kube.get(_WEBHOOK))
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        variables = [f"{each['name']}={each.get('value')}" for each in container.get("env") or ()]
    except (errors.VcudaError, *k8s_types.UNDECODABLE, LookupError, TypeError):
        return set()
    text = " ".join([*container.get("command", ()), *container.get("args", ()), *variables])
    if re.search("--scheduler-name[= ]|VCUDA_SCHEDULER_NAME=", text):
        return set()
    named = re.findall("(?:--scheme-schedulers[= ]|VCUDA_SCHEME_SCHEDULERS=)([^ ]*)", text)
    return found - {part.partition("=")[0] for each in named for part in each.split(",")}


def _each(
    kube: Kube, path: str, decode: Callable[[bytes], T | None], params: Mapping[str, str] | None = None
) -> Iterator[T]:
    """Yield the objects of all pages of a LIST. An object that cannot be decoded is left out."""
    for page in kube.list_pages(path, params):
        for raw in page.items:
            try:
                found = decode(raw)
            except (ValueError, SpoiltReport, *k8s_types.UNDECODABLE):
                continue
            if found is not None:
                yield found


def _look(node: k8s_types.Node, keys: NodeLabels, known: GpuResources, published: DriverCards) -> _Seen:
    seen = observe(node, known, read_registers(node.annotations, lambda *_: None))
    found = find_model(node.labels, keys.model, seen.registers, seen.facts, published=published, known=known)
    return _Seen(node.metadata.name, seen, published, found)


def _row(seen: _Seen, known: GpuResources, used: Cores | None) -> GpuNode:
    found, node, named = seen.found, seen.node, known.models
    counts = found.model(named)
    row = named.rows.get(counts, ProductRow())
    cards = found.cards(node.facts, known, seen.published)
    free = None
    if cards is not None and used is not None:
        free = max(round(cards * CORES_PER_CARD) - math.ceil(used), 0) / CORES_PER_CARD
    alive = [each for each in known.schemes if is_alive(each, node.facts, node.registers)]
    is_plain = node.facts.offered.get(PLAIN_CARDS) and all(each.count != PLAIN_CARDS for each in alive)
    served_by = [*(each.name for each in alive), *([PLAIN_CARDS] if is_plain else [])]
    return GpuNode(
        seen.name,
        tuple(dict.fromkeys([counts, *found.models])) if counts else (),
        cards,
        next((each.memory for each in found.seen if each.memory), None) or row.memory or None,
        found.source,
        ", ".join([*served_by, *seen.published]),
        free,
        tuple(found.doubts.values()),
        node.state.takes_pods,
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
    cards, memory, free = map(_figure, (node.cards, node.memory, node.free))
    models, source = ", ".join(node.models) or "none", node.source or "none"
    return (node.node, models, cards, memory, source, node.scheme, free, node.takes_pods)


def model_row(cards: PromisedCards) -> tuple[str, ...]:
    figures = (cards.promised, cards.present, cards.taking_pods, cards.charged, cards.free)
    return (cards.model, *map(_figure, figures))


def _figure(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"
