"""The report of a namespace's ledger. It is published, exported as metrics, and shown to people.

`vcuda.ledger.reporting` creates it. This module imports no binary package, because `kubectl gpuquota` reads it too.
"""

from dataclasses import dataclass, replace

from vcuda.quota.terms import CORES_PER_CARD

MOST_PODS = 100
"""The most pods that a report names for each model, the largest first, and the most pods without a model."""


@dataclass(frozen=True, slots=True)
class PodUse:
    """One pod or ResourceClaim that is charged. ``cores`` are hundredths of a card, ``memory`` is in MiB."""

    name: str
    cores: int
    memory: int
    claim: bool = False


@dataclass(frozen=True, slots=True)
class GrantUse:
    """A part of a limit that ends at a known time, because a grant ends."""

    cards: float | None
    """The cards of this part; None if only memory is limited."""
    until: str
    """The end in RFC 3339, with the offset of the grant's time zone."""
    memory: int | None = None
    """The MiB of this part; None if memory is not limited."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class ModelUse:
    """The usage of one model in one namespace. Cards are numbers such as 2.5. Memory is in MiB; None if it is not
    limited.

    If only memory is limited, ``limit`` and ``available`` are None, and ``card_memory`` is the memory of one card.

    ``used`` includes ``pending`` and ``terminating``. ``pending``: the charges of admitted pods that the watch has not
    shown yet. ``terminating``: the charges of deleted pods whose containers may still run. ``used`` does not include
    ``reserved``, the charges that webhook replicas may admit within seconds. ``available`` is the rest of the limit, at
    least 0. ``grants`` are the parts of the limit that end.
    """

    model: str
    limit: float | None
    used: float
    pending: float
    available: float | None
    memory_limit: int | None = None
    memory_used: int | None = None
    pods: tuple[PodUse, ...] = ()
    more_pods: int = 0
    terminating: float = 0
    reserved: float = 0
    memory_reserved: int = 0
    card_memory: int = 0
    grants: tuple[GrantUse, ...] = ()

    @property
    def memory_available(self) -> int | None:
        """The free part of the memory limit in MiB, at least 0; None if memory is not limited."""
        if self.memory_limit is None:
            return None
        return max(self.memory_limit - (self.memory_used or 0) - self.memory_reserved, 0)

    @property
    def has_room(self) -> bool:
        cores = max((pod.cores for pod in self.pods), default=0)
        cards_left = (
            self.limit is None
            or self.available is None
            or self.available >= max(self.limit / 10, cores / CORES_PER_CARD)
        )
        if self.memory_limit is None or self.memory_available is None:
            return cards_left
        largest = max((pod.memory for pod in self.pods), default=0)
        return cards_left and self.memory_available >= max(self.memory_limit / 10, largest)


@dataclass(frozen=True, slots=True)
class NamespaceUse:
    """The report of a namespace.

    ``unpinned``: live pods whose model is unknown, because neither their spec nor their node has one.
    ``more_unpinned``: the number of such pods that a `shortened` report leaves out.
    ``taking_effect``: True if the API server may not call the webhook for the namespace's pods yet.
    ``ledger_lost``: True if charges of pods that are being stored are unknown. All unused quota is then reserved.
    """

    namespace: str
    mode: str
    models: tuple[ModelUse, ...]
    unpinned: tuple[str, ...] = ()
    more_unpinned: int = 0
    taking_effect: bool = False
    ledger_lost: bool = False
    warnings: tuple[str, ...] = ()
    """The reasons why the quota cannot be used, for example a model that no node has."""

    @property
    def has_room(self) -> bool:
        return all(model.has_room for model in self.models)

    def shortened(self) -> "NamespaceUse":
        """Return the report as it is published, with at most `MOST_PODS` unpinned pods."""
        more = max(len(self.unpinned) - MOST_PODS, 0)
        return replace(self, unpinned=self.unpinned[:MOST_PODS], more_unpinned=more)
