"""What the usage page is made of: plain values, and the one place where each comes in.

The page knows nothing of watches and loops. Whatever has something to show plugs a callable into `Source`. A callable
is called by one thread at a time, at most once a second, and only while somebody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from vcuda.usage import NamespaceUse


class PodRow(msgspec.Struct, frozen=True):
    """A pod that holds cards.

    ``cores`` are hundredths of a card, ``memory`` is in MiB. ``model`` is None where it is held to none and runs on
    none that is known; ``node`` is empty until it is bound; ``created`` is RFC 3339.
    """

    name: str
    model: str | None
    cores: int
    memory: int
    node: str
    created: str


class ModelCards(msgspec.Struct, frozen=True):
    """One model in the whole cluster, in cards.

    ``cards`` is what the nodes have, None where they do not say. ``used`` is charged to pods, limited or not, those
    not yet placed too. ``promised`` is the sum of the limits. ``fragmented`` is free, but in parts of cards that no
    pod that wants whole cards can have; None where that is not known.
    """

    model: str
    cards: float | None
    used: float
    promised: float
    fragmented: float | None = None

    @property
    def free(self) -> float | None:
        """Cards that nobody is charged for, never below 0; None where it is not known how many there are."""
        return None if self.cards is None else max(self.cards - self.used, 0.0)


class Refusal(msgspec.Struct, frozen=True):
    """A workload whose pods were refused: the newest reason, when (RFC 3339), and how often so far."""

    namespace: str
    kind: str
    name: str
    message: str
    at: str
    count: int = 1


class Removal(msgspec.Struct, frozen=True):
    """Something stale that was removed from an object (``what`` is its kind), why it was stale, and when (RFC 3339)."""

    namespace: str
    name: str
    what: str
    why: str
    at: str


class Certificate(msgspec.Struct, frozen=True):
    """A certificate of this system and when it ends (RFC 3339); ``problem`` is what is wrong with it, or empty."""

    name: str
    not_after: str
    problem: str = ""


class Finding(msgspec.Struct, frozen=True):
    """A pod that runs although the quota does not allow it, what is wrong, and since when (RFC 3339)."""

    namespace: str
    pod: str
    message: str
    at: str


def _nothing_known() -> None:
    """Stand in for a source that is not there: its section says so, or is left out."""


@dataclass(frozen=True)
class Source:
    """Where each part of the page comes from. A callable that returns None says: not known, or not known yet.

    ``uses`` holds the report of every limited namespace; ``pods`` are a namespace's, limited or not; ``cluster`` has
    one entry a model. ``refusals`` and ``removals`` come newest first. A part that nothing is plugged into (removals,
    certificates, findings) is not on the page.
    """

    uses: Callable[[], Mapping[str, NamespaceUse]]
    pods: Callable[[str], Sequence[PodRow]]
    cluster: Callable[[], Sequence[ModelCards]]
    refusals: Callable[[], Sequence[Refusal] | None] = _nothing_known
    removals: Callable[[], Sequence[Removal] | None] = _nothing_known
    certificates: Callable[[], Sequence[Certificate] | None] = _nothing_known
    findings: Callable[[], Sequence[Finding] | None] = _nothing_known
