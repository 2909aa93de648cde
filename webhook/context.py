"""What decisions are made from besides the pod itself: the quota in force, the nodes, and the system's settings."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
import structlog
import yaml

from vcuda import errors, k8s_types, kube, workloads
from vcuda.claims import charges, devices, objects
from vcuda.placement import affinity, patches, placement, registers
from vcuda.quota import model
from vcuda.requests import config, refusals
from vcuda.requests.resources import BUILT_IN, GpuResources

SCHEDULER_USERS = frozenset({"system:kube-scheduler"})
"""Who makes the claim for a pod's extended resources, once it has chosen the devices; a flag adds other schedulers."""


ClaimTemplates = Callable[[str, str], objects.ClaimSpec | None]
"""Returns what the claims of a ResourceClaimTemplate ask for, by its namespace and name; None: it is not known."""


def no_templates(_namespace: str, _name: str) -> None:
    """Know none."""


class PolicySnapshot(msgspec.Struct, frozen=True):
    """One consistent view, taken at the start of a decision.

    What is pending, and was never stored, is given back ``storable_seconds`` after it was charged; None: never.
    ``resources`` is what pods can ask for; ``runtime_classes`` are those that give GPUs; ``claims`` is what claims are
    read by; None: the API server has none. ``templates`` are those that claims are made of, and ``scheduler_users``
    make claims for pods that are charged.
    """

    quota: model.Quota
    nodes: placement.Nodes
    hints: patches.Hints = patches.Hints()
    storable_seconds: float | None = None
    resources: GpuResources = BUILT_IN
    runtime_classes: frozenset[str] = refusals.GPU_RUNTIME_CLASSES
    claims: charges.ClaimPolicy | None = None
    templates: ClaimTemplates = no_templates
    scheduler_users: frozenset[str] = SCHEDULER_USERS

    @property
    def claim_policy(self) -> charges.ClaimPolicy:
        """What claims are read by, also where no device is known: a claim is never free."""
        return self.claims or charges.ClaimPolicy.of(
            devices.NO_DEVICES, self.nodes.model_of, self.quota, self.resources
        )


PolicySource = Callable[[], PolicySnapshot | None]
"""Returns the policy in force, or None until the quota has been read once."""


class ClusterPolicy(msgspec.Struct, frozen=True):
    """The quota and the nodes of a cluster, current to within a watch event; each watch is a thread.

    Which cards are free is published by the extender, where there is one, every few seconds; nothing waits for it.
    """

    quota: kube.QuotaInformer
    nodes: kube.NodeInformer
    cards: kube.FreeCardsInformer
    hints: patches.Hints
    storable_seconds: float
    claims: kube.ClaimPolicies
    templates: kube.TemplateInformer
    dra: kube.ServedWatches
    runtime_classes: frozenset[str] = refusals.GPU_RUNTIME_CLASSES
    scheduler_users: frozenset[str] = SCHEDULER_USERS

    def current(self) -> PolicySnapshot | None:
        """Return the policy in force, or None until quota and nodes have been read once."""
        read = self.quota.in_force()
        # Without its nodes every pod would be refused, as no node has the model that it needs; and every claim without
        # the devices, where any are published.
        if read is None or not self.nodes.reflector.synced.is_set() or not self.dra.settled:
            return None
        nodes, free = self.nodes.current(), self.cards.current()
        nodes = msgspec.structs.replace(nodes, free=free) if free else nodes
        return PolicySnapshot(
            read.quota,
            nodes,
            self.hints,
            self.storable_seconds,
            self.claims.charged(read.resources),
            self.runtime_classes,
            self.claims.current(),
            self.templates.find,
            self.scheduler_users,
        )

    def reflectors(self) -> Mapping[str, kube.Reflector[Any]]:
        """Return the watches that run, by the name under which their age is exported."""
        return {**self._always(), **self.dra.running()}

    def _always(self) -> Mapping[str, kube.Reflector[Any]]:
        return {"configmaps": self.quota.reflector, "nodes": self.nodes.reflector, "cards": self.cards.reflector}

    def start(self) -> None:
        """Start watching."""
        for reflector in self._always().values():
            reflector.start()
        self.dra.start()


def read_quota(path: Path) -> config.QuotaConfig:
    """Return what a file says: the quota document itself, or the ConfigMap that holds it and further keys.

    Raises:
        BadInput: the file cannot be read, or has faults (QuotaFault, with all of them).

    """
    text = read_text(path)
    try:
        documents = list(yaml.safe_load_all(text))
    except workloads.NOT_YAML:
        documents = []  # the parser below says what is wrong, and where
    if len(documents) == 1 and isinstance(documents[0], dict) and documents[0].get("kind") == "ConfigMap":
        data = documents[0].get("data") or {}
        if config.QUOTA not in data:
            raise errors.BadInput(f"{path}: the ConfigMap has no key {config.QUOTA}")
        return config.parse_config({str(key): str(value) for key, value in data.items()})
    return config.parse_config({config.QUOTA: text})


def read_nodes(path: Path, labels: affinity.NodeLabels) -> placement.Nodes:
    """Return the nodes in a file, as ``kubectl get nodes -o yaml`` prints them.

    Raises:
        BadInput: the file cannot be read or holds something else.

    """
    found, cards = {}, {}
    for where, manifest in workloads.objects_in(str(path), read_text(path)):
        if manifest.get("kind") != "Node":
            raise errors.BadInput(f"{where}: expected a Node, not {manifest.get('kind')}")
        node = workloads.convert(where, manifest, k8s_types.Node)
        found[node.metadata.name] = node.labels
        cards[node.metadata.name] = registers.read_registers(node.annotations, functools.partial(_ignored, where))
    return placement.Nodes.of(found, labels, cards)


def _ignored(where: str, annotation: str, error: ValueError) -> None:
    structlog.get_logger().warning(
        "malformed register of cards ignored", place=where, annotation=annotation, error=str(error)
    )


def read_text(path: Path) -> str:
    """Return what is in a file, or on standard input where the path is ``-``; BadInput where it cannot be read."""
    try:
        with click.open_file(str(path), encoding="utf-8") as file:
            return str(file.read())
    except (OSError, UnicodeDecodeError) as error:
        raise errors.BadInput(f"{path}: cannot be read: {error}") from error
