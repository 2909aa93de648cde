"""The policy of reviews: the quota in force, the nodes, and the settings of the system."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from vcuda import kube
from vcuda.claims import charges, devices, digest
from vcuda.placement import patches
from vcuda.placement.nodes import Nodes
from vcuda.quota import model
from vcuda.requests.resources import BUILT_IN, GpuResources
from vcuda.requests.runtime_devices import GPU_RUNTIME_CLASSES, RuntimeClasses

SCHEDULER_USERS = frozenset({"system:kube-scheduler"})
"""The users that create the claim for a pod's extended resources. A flag adds other schedulers."""


ClaimTemplates = Callable[[str, str], digest.PackedDigest | None]
"""Returns the digest of a ResourceClaimTemplate by its namespace and name; None if it is not known."""


def no_templates(_namespace: str, _name: str) -> None:
    """Return None: no template is known."""


class PolicySnapshot(msgspec.Struct, frozen=True):
    """One consistent view, taken at the start of a decision.

    ``storable_seconds``: a pending charge whose object was never stored is released so long after it was made; None:
    never. ``resources``: the resources that pods can request. ``runtime_classes``: says which classes give GPUs.
    ``claims``: how claims are read; None if the API server serves none. ``templates``: finds the templates of claims.
    ``scheduler_users``: the users that create claims for pods that are charged already.
    """

    quota: model.Quota
    nodes: Nodes
    hints: patches.Hints = patches.Hints()
    storable_seconds: float | None = None
    resources: GpuResources = BUILT_IN
    runtime_classes: RuntimeClasses = RuntimeClasses()
    claims: charges.ClaimPolicy | None = None
    templates: ClaimTemplates = no_templates
    scheduler_users: frozenset[str] = SCHEDULER_USERS

    @property
    def claim_policy(self) -> charges.ClaimPolicy:
        """The policy of claims. Without known devices there is one too, because a claim is never free."""
        return self.claims or charges.ClaimPolicy.of(
            devices.NO_DEVICES, self.nodes.model_of, self.quota, self.resources
        )


PolicySource = Callable[[], PolicySnapshot | None]
"""Returns the policy in force, or None until the quota has been read once."""


class ClusterPolicy(msgspec.Struct, frozen=True, dict=True):
    """The quota and the nodes of a cluster, each by a watch.

    It waits neither for the free cards nor for the RuntimeClasses: an unknown class is judged by its name.
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
        # Before the nodes are known every pod would be refused, because no node has the model that it needs. Before the
        # published devices are known every claim would be refused.
        if read is None or not self.nodes.reflector.synced.is_set() or not self.dra.settled:
            return None
        nodes, free = self.nodes.current(), self.cards.current()
        nodes = msgspec.structs.replace(nodes, free=free) if free else nodes
        return PolicySnapshot(
            self.quota.clock.now(read.quota),
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
        for reflector in self._always().values():
            reflector.start()
        self.dra.start()
