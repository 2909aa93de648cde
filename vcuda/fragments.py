"""Counts how much of the nodes' cards is free, by model and pool."""

from __future__ import annotations

from vcuda.allocate import Known
from vcuda.cards import Cards
from vcuda.free_cards import Figures, FreeCards
from vcuda.placement import Nodes


def figures_of(known: Known, nodes: Nodes) -> Figures:
    """Return the figures by model and pool; a node without a model counts for nothing."""
    found: dict[tuple[str, str], FreeCards] = {}
    for name, cards in known.items():
        model = nodes.model_of(name)
        if model and isinstance(cards, Cards):
            key = (model, nodes.labels[name].get(nodes.keys.pool, ""))
            found[key] = found.get(key, FreeCards()) + _count(cards)
    return found


def _count(cards: Cards) -> FreeCards:
    return FreeCards(len(cards.used_cores), cards.whole, cards.free_cores, cards.fragmented_cores(), cards.most_cores)
