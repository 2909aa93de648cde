"""The report of a namespace's ledger, as it is published, exported as metrics, and shown.

`vcuda.ledger.reporting` makes it. This module imports no binary package, because `kubectl gpuquota` reads reports too.
"""

from dataclasses import dataclass, replace

from vcuda.quota.terms import CORES_PER_CARD

MOST_PODS = 100
"""Pods named per model, the largest, and of those of no model: a published report stays small."""


@dataclass(frozen=True, slots=True)
class PodUse:
    """One pod that holds cards, or one ResourceClaim: cores in hundredths of a card, memory in MiB."""

    name: str
    cores: int
    memory: int
    claim: bool = False


@dataclass(frozen=True, slots=True)
class GrantUse:
    """A part of a limit that ends."""

    cards: float | None
    """None where memory alone is limited."""
    until: str
    """RFC 3339, with the offset of the grant's time zone."""
    memory: int | None = None
    """In MiB; None where memory is not limited."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class ModelUse:
    """One model in one namespace. Cards are numbers such as 2.5; memory is in MiB, and None where it is not limited.

    ``limit`` and ``available`` are None where memory alone is limited. ``card_memory`` is then the memory of one card.

    ``used`` includes ``pending``, the charges of admitted pods that the watch has not shown yet, and ``terminating``,
    the charges of deleted pods whose containers may still run. It does not include ``reserved``, the charges that
    replicas of the webhook may grant within seconds. ``available`` is the rest of the limit, at least 0. ``grants`` are
    the parts of the limit that end.
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
        """The free part of the limit on memory, in MiB, never below 0; None if memory is not limited."""
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
    """A namespace's report. ``unpinned`` names pods that hold no model by their spec and run on no known one.

    ``more_unpinned`` counts those that a `shortened` report leaves out. ``taking_effect``: the API server may not ask
    about the namespace's pods yet. ``ledger_lost``: all that is not used is reserved, for nobody, as charges of pods
    that are still being stored are not known.
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
        """Return the report as it is published: with few names."""
        more = max(len(self.unpinned) - MOST_PODS, 0)
        return replace(self, unpinned=self.unpinned[:MOST_PODS], more_unpinned=more)
