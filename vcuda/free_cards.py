"""How much of the cards is free, by model and pool, and how that is published for those who choose a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from vcuda.charge import CORES_PER_CARD, Charge

CONFIG_MAP = "gpu-cards"
KEY = "cards.json"


class FreeCards(msgspec.Struct, frozen=True, gc=False):
    """The cards of one model in one pool: how many there are, and how many nobody has anything of.

    ``free_cores`` are hundredths of a card; ``fragmented_cores`` are those of them on cards that are in use: no pod
    that wants whole cards can have them. ``largest`` are those of the card that has the most: no container gets a
    larger share. Releases that do not publish it leave it 0, for every model.
    """

    cards: int = 0
    whole: int = 0
    free_cores: int = 0
    fragmented_cores: int = 0
    largest: int = 0

    def __add__(self, other: FreeCards) -> FreeCards:
        return FreeCards(
            self.cards + other.cards,
            self.whole + other.whole,
            self.free_cores + other.free_cores,
            self.fragmented_cores + other.fragmented_cores,
            max(self.largest, other.largest),
        )

    def room_for(self, asked: Charge) -> int:
        """Return the cores that a pod can choose from: those of whole cards alone, where it asks for any."""
        return self.whole * CORES_PER_CARD if asked.card_memory >= CORES_PER_CARD else self.free_cores


Figures = Mapping[tuple[str, str], FreeCards]
"""By model and pool; the pool of a node that has none is empty."""


class _Row(msgspec.Struct, frozen=True):
    model: str
    pool: str
    free: FreeCards


def by_model(figures: Figures, pools: Iterable[str]) -> Mapping[str, FreeCards]:
    """Return the sums by model over these pools; none named: over all."""
    allowed = frozenset(pools)
    found: dict[str, FreeCards] = {}
    for (model, pool), free in figures.items():
        if not allowed or pool in allowed:
            found[model] = found.get(model, FreeCards()) + free
    return found


def write_figures(figures: Figures) -> str:
    """Return the figures as they are published, in a fixed order."""
    rows = [_Row(model, pool, free) for (model, pool), free in sorted(figures.items())]
    return msgspec.json.format(msgspec.json.encode(rows), indent=2).decode()


def read_figures(text: str) -> Figures:
    """Return published figures; raises ValueError where they are none."""
    return {(row.model, row.pool): row.free for row in msgspec.json.decode(text, type=list[_Row])}
