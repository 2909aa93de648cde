"""What decisions are made from besides the pod itself: the quota in force, the nodes, and the system's settings."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from vcuda import kube
from vcuda.claims import charges, devices, digest
from vcuda.placement import patches, placement
from vcuda.quota import model
from vcuda.requests.resources import BUILT_IN, GpuResources
from vcuda.requests.runtime_devices import GPU_RUNTIME_CLASSES, RuntimeClasses

SCHEDULER_USERS = frozenset({"system:kube-scheduler"})
"""Who makes the claim for a pod's extended resources, once it has chosen the devices; a flag adds other schedulers."""


ClaimTemplates = Callable[[str, str], digest.PackedDigest | None]
"""Returns what the claims of a ResourceClaimTemplate ask for, by its namespace and name; None: it is not known."""


def no_templates(_namespace: str, _name: str) -> None:
    """Know none."""


class PolicySnapshot(msgspec.Struct, frozen=True):
    """One consistent view, taken at the start of a decision.

    What is pending, and was never stored, is given back ``storable_seconds`` after it was charged; None: never.
    ``resources`` is what pods can ask for; ``runtime_classes`` tells which of them give GPUs; ``claims`` is what claims
    are read by; None: the API server has none. ``templates`` are those that claims are made of, and ``scheduler_users``
    make claims for pods that are charged.
    """

    quota: model.Quota
    nodes: placement.Nodes
    hints: patches.Hints = patches.Hints()
    storable_seconds: float | None = None
    resources: GpuResources = BUILT_IN
    runtime_classes: RuntimeClasses = RuntimeClasses()
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


class ClusterPolicy(msgspec.Struct, frozen=True, dict=True):
    """The quota and the nodes of a cluster, current to within a watch event; each watch is a thread.

    Which cards are free is published by the extender, where there is one, every few seconds; nothing waits for it.
    Nothing waits for the RuntimeClasses either: a class that is not known yet is judged by its name. So the webhook
    serves without the right to list them. ``gpu_runtime_classes`` are the patterns of those that give GPUs.
    """

    quota: kube.QuotaInformer
    nodes: kube.NodeInformer
    cards: kube.FreeCardsInformer
    hints: patches.Hints
    storable_seconds: float
    claims: kube.ClaimPolicies
    templates: kube.TemplateInformer
    dra: kube.ServedWatches
    runtime_classes: kube.RuntimeClassInformer
    gpu_runtime_classes: tuple[str, ...] = GPU_RUNTIME_CLASSES
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
            self._gpu_runtime_classes,
            self.claims.current(),
            self.templates.find,
            self.scheduler_users,
        )

    @functools.cached_property
    def _gpu_runtime_classes(self) -> RuntimeClasses:
        return RuntimeClasses(self.gpu_runtime_classes, self.runtime_classes.handler_of)

    def reflectors(self) -> Mapping[str, kube.Reflector[Any]]:
        """Return the watches that run, by the name under which their age is exported."""
        return {**self._always(), **self.dra.running()}

    def _always(self) -> Mapping[str, kube.Reflector[Any]]:
        return {
            "configmaps": self.quota.reflector,
            "nodes": self.nodes.reflector,
            "cards": self.cards.reflector,
            "runtimeclasses": self.runtime_classes.reflector,
        }

    def start(self) -> None:
        """Start watching."""
        for reflector in self._always().values():
            reflector.start()
        self.dra.start()
