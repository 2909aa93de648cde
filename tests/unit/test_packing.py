"""How many cards stay whole for exclusive pods: ours against gpu-admission's order, on the pods recorded."""

from __future__ import annotations

import heapq
import random

import pytest

from controller.extender.strategy import Placement, Strategy, bin_pack, least_free
from tests.decisions import steps
from vcuda.allocations.cards import CardRequest, Cards, read_card_request
from vcuda.requests.schemes import GPU_MANAGER

PODS, NODES, CARDS, LIFE = 2000, 40, 8, 150
"""LIFE is how many pods come, on average, until one ends: over half of the cards are in use, and every pod fits."""

WISHES = [wish for wish in (read_card_request(step.pod) for step in steps()) if isinstance(wish, CardRequest)]


def whole_share(strategy: Strategy, seed: int) -> float:
    """The share of cards that are wholly free, on average over all arrivals."""
    rng = random.Random(seed)  # noqa: S311  # the same pods each time, nothing secret
    known = {f"node-{number}": Cards.unused(GPU_MANAGER, CARDS, CARDS * 64) for number in range(NODES)}
    running: list[tuple[int, int, Placement]] = []
    whole = 0
    for now in range(PODS):
        while running and running[0][0] <= now:
            ended = heapq.heappop(running)[2]
            known[ended.node] = known[ended.node].returned(ended.assignment.all_shares())
        choice = strategy(rng.choice(WISHES), known, known)
        assert isinstance(choice, Placement)
        known[choice.node] = known[choice.node].taken(choice.assignment.all_shares())
        heapq.heappush(running, (now + 1 + int(rng.expovariate(1 / LIFE)), now, choice))
        whole += sum(cards.whole for cards in known.values())
    return whole / (PODS * NODES * CARDS)


@pytest.mark.parametrize("seed", [1, 2])
def test_more_whole_cards_stay_free_than_with_gpu_admission(seed: int) -> None:
    ours, theirs = whole_share(bin_pack, seed), whole_share(least_free, seed)
    print(f"wholly free cards: {ours:.1%}, with gpu-admission's order {theirs:.1%}")
    assert ours > theirs
