"""The data by which reviews are decided: the quota in force, the nodes, the devices, and the webhook's settings."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from vcuda import kube
from vcuda.claims import charges, devices, drivers
from vcuda.placement import patches
from vcuda.placement.card_counts import count_cards
from vcuda.placement.nodes import Nodes, NodeStates
from vcuda.quota import model
from vcuda.quota.well_known import MAX_TERMINATING_SECONDS
from vcuda.requests.resources import BUILT_IN, GpuResources
from vcuda.requests.runtime_devices import RuntimeClasses

SCHEDULER_USERS = frozenset({"system:kube-scheduler"})
"""The user names of schedulers, which create claims for the extended resources of pods (flag --scheduler-users)."""


class PolicySnapshot(msgspec.Struct, frozen=True):
    """The quota, the nodes and the settings by which one review is decided, as they are when the decision begins."""

    quota: model.Quota
    """The GPU quota limits of each namespace at the time of the review."""
    nodes: Nodes
    """The nodes of the cluster, with their GPU models."""
    pin_settings: patches.PinSettings = patches.PinSettings()
    """The node labels that name GPU models and node pools, and the schedulers for pods with GPUs."""
    storable_seconds: float | None = None
    """Seconds after which the charge of an object that was never stored is released; None for never."""
    resources: GpuResources = BUILT_IN
    """The resources that count as GPUs, with the charge of each."""
    runtime_classes: RuntimeClasses = RuntimeClasses()
    """Decides which RuntimeClasses give pods access to GPUs."""
    claims: charges.ClaimPolicy | None = None
    """Determines the charge of a ResourceClaim; None if the API server serves no claims."""
    scheduler_users: frozenset[str] = SCHEDULER_USERS
    """The user names of schedulers, which create claims for pods that are charged already."""
    max_terminating: int = MAX_TERMINATING_SECONDS
    """The longest grace period of a pod that is charged, in seconds."""
    states: NodeStates = NodeStates()
    """The states of ``nodes``: taints and offered resources. /mutate and /quota read them."""

    @property
    def claim_policy(self) -> charges.ClaimPolicy:
        """The value of ``claims``. If this is None, a policy that knows no devices, but still charges every claim."""
        return self.claims or charges.ClaimPolicy.of(
            devices.NO_DEVICES, self.nodes.model_of, self.quota, self.resources
        )

    @property
    def cards(self) -> Mapping[str, int]:
        """The number of cards of each model whose nodes all have a known number of cards."""
        published = self.claims.devices.count_cards({each.name for each in drivers.DRIVERS}) if self.claims else {}
        return count_cards(self.nodes, self.states, published, self.resources.schemes)


PolicySource = Callable[[], PolicySnapshot | None]
"""Returns the current `PolicySnapshot`; None until the quota, and in a cluster nodes and devices, have been read."""


class ClusterPolicy(msgspec.Struct, frozen=True):
    """Makes each `PolicySnapshot` from the watches of a cluster.

    The first snapshot does not wait for the watch of RuntimeClasses. A RuntimeClass that the watch has not delivered is
    recognized by its name alone.
    """

    quota: kube.QuotaInformer
    nodes: kube.NodeInformer
    pin_settings: patches.PinSettings
    storable_seconds: float
    claims: kube.ClaimPolicies
    dra: kube.ServedWatches
    runtime_classes: kube.RuntimeClassInformer
    gpu_runtime_classes: RuntimeClasses
    scheduler_users: frozenset[str]
    max_terminating: int

    def current(self) -> PolicySnapshot | None:
        """Return the present snapshot; None until the quota, the nodes and the devices have been read."""
        read = self.quota.in_force()
        # Without the nodes no GPU model is known, so every pod would be rejected. Without the devices, every claim
        # would be rejected. So there is no snapshot before both are read.
        if read is None or not self.nodes.reflector.synced.is_set() or not self.dra.is_ready:
            return None
        nodes, states = self.nodes.with_states()
        return PolicySnapshot(
            quota=self.quota.clock.now(read.quota),
            nodes=nodes,
            pin_settings=self.pin_settings,
            storable_seconds=self.storable_seconds,
            resources=self.claims.charged(read.resources),
            runtime_classes=self.gpu_runtime_classes,
            claims=self.claims.current(),
            scheduler_users=self.scheduler_users,
            max_terminating=self.max_terminating,
            states=states,
        )

    def team_map(self) -> kube.TeamMap | None:
        """Return the teams of namespaces by the present quota; None until the quota has been read."""
        read = self.quota.in_force()
        return kube.TeamMap(read.quota.members.team_of, read.quota.version) if read else None

    def reflectors(self) -> Mapping[str, kube.Reflector[Any]]:
        """Return the running watches, by their names in the metrics."""
        return {**self._always(), **self.dra.running()}

    def _always(self) -> Mapping[str, kube.Reflector[Any]]:
        return {
            "configmaps": self.quota.reflector,
            "nodes": self.nodes.reflector,
            "runtimeclasses": self.runtime_classes.reflector,
        }

    def start(self) -> None:
        for reflector in self._always().values():
            reflector.start()
        self.dra.start()
