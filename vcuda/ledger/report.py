"""The report of a namespace's GPU usage, which is published in a ConfigMap, in metrics and on the usage page.

`vcuda.ledger.reporting` creates the report. This module imports no binary package, because `kubectl gpuquota` needs it.
"""

from dataclasses import dataclass, replace

from vcuda.quota.terms import CORES_PER_CARD, UNSTORED_CAUSE

MAX_REPORTED_PODS = 100
"""A report names at most this many pods for each model (the largest ones), and this many pods without a model."""


@dataclass(frozen=True, slots=True)
class PodUse:
    """The charge of one pod or ResourceClaim. ``cores`` are hundredths of a card, ``memory`` is in MiB."""

    name: str
    cores: int
    memory: int
    claim: bool = False


@dataclass(frozen=True, slots=True)
class GrantUse:
    """The part of a limit that a grant (a dated addition to the limit) adds until the grant ends."""

    cards: float | None
    """The cards that the grant adds; None if only memory is limited."""
    until: str
    """The end of the grant in RFC 3339, with the offset of the grant's time zone."""
    memory: int | None = None
    """The MiB that the grant adds; None if memory is not limited."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class ModelUse:
    """The usage of one model in one namespace, in cards such as 2.5. Memory is in MiB; None if it is not limited."""

    model: str
    limit: float | None
    """The limit in cards; None if only memory is limited."""
    used: float
    """The charged cards, including ``pending`` and ``terminating``, without ``reserved``."""
    pending: float
    """The cards of admitted pods that the controller has not yet observed as stored."""
    available: float | None
    """The free part of the limit in cards, at least 0; None if only memory is limited."""
    memory_limit: int | None = None
    memory_used: int | None = None
    pods: tuple[PodUse, ...] = ()
    more_pods: int = 0
    terminating: float = 0
    """The cards of deleted pods whose containers may still run."""
    reserved: float = 0
    """The cards that webhook replicas reserve in advance, to admit pods without a write of the ledger."""
    memory_reserved: int = 0
    card_memory: int = 0
    """The memory of one card in MiB if only memory is limited; otherwise 0."""
    grants: tuple[GrantUse, ...] = ()
    """The grants that end at a known time. ``limit`` includes them."""
    unstored: float = 0
    """The part of ``pending`` that was admitted more than 5 s ago. These pods are probably never created."""

    @property
    def memory_available(self) -> int | None:
        """The free part of the memory limit in MiB, at least 0; None if memory is not limited."""
        if self.memory_limit is None:
            return None
        return max(self.memory_limit - (self.memory_used or 0) - self.memory_reserved, 0)

    @property
    def has_room(self) -> bool:
        cards = max((pod.cores for pod in self.pods), default=0) / CORES_PER_CARD
        memory = max((pod.memory for pod in self.pods), default=0)
        available = self.memory_available
        return _has_room(self.available, self.limit, cards) and _has_room(available, self.memory_limit, memory)


def _has_room(available: float | None, limit: float | None, largest: float) -> bool:
    return available is None or limit is None or available >= max(limit / 10, largest)


@dataclass(frozen=True, slots=True)
class NamespaceUse:
    """The GPU usage of one namespace, by model."""

    namespace: str
    mode: str
    models: tuple[ModelUse, ...]
    unpinned: tuple[str, ...] = ()
    """Running or pending pods that are not charged, because neither their spec nor their node has a known GPU model."""
    more_unpinned: int = 0
    """The number of pods without a GPU model that `shortened` has left out of ``unpinned``."""
    taking_effect: bool = False
    """True if the API server may not call the webhook for the namespace's pods yet."""
    unregistered: str = ""
    """The webhooks and policies that the API server lacks, without which no quota is in effect; empty if none."""
    ledger_lost: bool = False
    """True if the ledger was lost, and charges may be missing. All unused quota is then shown as reserved."""
    warnings: tuple[str, ...] = ()
    """The reasons why the quota cannot be used, for example a model that no node has."""

    @property
    def unstored_warning(self) -> str:
        """A warning about charged pods that are not created, with the likely cause; empty if there are none."""
        found = ", ".join(f"{each.unstored:g} of {each.model}" for each in self.models if each.unstored)
        if not found:
            return ""
        subject = f"cards of namespace {self.namespace} are charged to pods that are not created"
        return f"{subject} ({found}): {UNSTORED_CAUSE}"

    @property
    def has_room(self) -> bool:
        return all(model.has_room for model in self.models)

    def shortened(self) -> "NamespaceUse":
        """Return the report as it is published, with at most `MAX_REPORTED_PODS` pods in ``unpinned``."""
        more = max(len(self.unpinned) - MAX_REPORTED_PODS, 0)
        return replace(self, unpinned=self.unpinned[:MAX_REPORTED_PODS], more_unpinned=more)
