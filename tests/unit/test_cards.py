"""The cards of a node: what its capacity offers, and what shares take of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.allocations.cards import Cards, Share, Unplaceable, read_cards
from vcuda.requests.schemes import GPU_MANAGER, NVIDIA_VCUDA

CORES, MEMORY = GPU_MANAGER.cores, GPU_MANAGER.memory
OTHERS = {"nvidia.com/vcuda-core": "100", "nvidia.com/vcuda-memory": "16000"}


def four() -> Cards:
    """Four cards of 16 GiB."""
    return Cards.unused(GPU_MANAGER, 4, 4 * 64)


def test_memory_is_divided_evenly_in_whole_blocks() -> None:
    cards = read_cards({CORES: "400", MEMORY: "67", "cpu": "64"})
    assert isinstance(cards, Cards)
    assert (len(cards.used_cores), cards.card_memory, cards.free_memory) == (4, 16 * 256, 67 * 256)


def test_nvidia_counts_memory_in_mebibytes() -> None:
    cards = read_cards(OTHERS)
    assert cards == Cards.unused(NVIDIA_VCUDA, 1, 16000)
    assert isinstance(cards, Cards)
    assert cards.card_memory == 16000


@pytest.mark.parametrize(
    ("capacity", "reason"),
    [
        pytest.param({}, "no vcuda cards", id="no GPU"),
        pytest.param({CORES: "0", MEMORY: "0"}, "no vcuda cards", id="device plugin gone"),
        pytest.param({CORES: "50", MEMORY: "8"}, f"{CORES} in capacity is 50, not 100 a card", id="less than a card"),
        pytest.param({CORES: "x", MEMORY: "8"}, f"{CORES} in capacity is x, not 100 a card", id="no number"),
        pytest.param({CORES: "1T", MEMORY: "8"}, f"{CORES} in capacity is 1T, not 100 a card", id="too many"),
        pytest.param({CORES: "100"}, f"{MEMORY} missing in capacity", id="no memory"),
        pytest.param({CORES: "100", MEMORY: "0"}, f"{MEMORY} missing in capacity", id="memory of 0"),
        pytest.param({CORES: "100", MEMORY: "-1"}, f"{MEMORY} missing in capacity", id="negative memory"),
        pytest.param(
            {CORES: "100", MEMORY: "8", **OTHERS},
            f"{CORES} and nvidia.com/vcuda-core both in capacity",
            id="two schemes: the same cards twice, perhaps",
        ),
    ],
)
def test_a_node_without_cards_to_place_on_is_a_reason_that_lasts(capacity: dict[str, Any], reason: str) -> None:
    assert read_cards(capacity) == Unplaceable(reason, final=True)


def test_a_share_takes_cores_and_memory_and_a_whole_card_takes_all_of_it() -> None:
    cards = four().taken([Share(1, 30, 1024), Share(2, 100, 0)])
    assert (cards.used_cores, cards.used_memory) == ((0, 30, 100, 0), (0, 1024, 16384, 0))
    assert (cards.free_cores, cards.free_memory) == (270, 2 * 16384 + 16384 - 1024)
    assert [cards.free_of(card) for card in range(4)] == [(100, 16384), (70, 15360), (0, 0), (100, 16384)]
    assert (cards.whole, cards.fragmented_cores()) == (2, 70)


@pytest.mark.parametrize("card", [-1, 4, 10**9])
def test_a_share_of_a_card_that_the_node_does_not_have_counts_for_nothing(card: int) -> None:
    assert four().taken([Share(card, 50, 1024), Share(0, 10, 256)]) == four().taken([Share(0, 10, 256)])


def test_of_a_card_that_is_over_committed_nothing_is_free_and_all_of_it_comes_back() -> None:
    """gpu-admission forgets a share that does not fit: its card looks free as soon as another one ends."""
    over = [Share(0, 80, 16000), Share(0, 50, 1000)]
    cards = four().taken(over)
    assert (cards.free_of(0), cards.free_cores, cards.free_memory) == ((0, 0), 300, 3 * 16384)
    assert cards.returned(over[:1]).free_of(0) == (50, 15384)
    assert cards.returned(over) == four()


SHARES = st.lists(
    st.builds(Share, st.integers(-1, 5), st.sampled_from([5, 30, 75, 100]), st.sampled_from([0, 256, 4096, 20000]))
)


@given(SHARES, SHARES)
def test_what_was_taken_comes_back_and_the_sums_are_those_of_the_cards(kept: list[Share], gone: list[Share]) -> None:
    cards = four().taken(kept).taken(gone).returned(gone)
    assert cards == four().taken(kept)
    free = [cards.free_of(card) for card in range(4)]
    assert (cards.free_cores, cards.free_memory) == (sum(cores for cores, _ in free), sum(mib for _, mib in free))
    assert cards.whole == sum(map(cards.is_whole, range(4)))
    assert cards.most_cores == max(cores for cores, _ in free)


def test_shares_are_free_one_beside_the_other_or_not() -> None:
    cards = Cards.unused(GPU_MANAGER, 1, 64)
    assert cards.have([Share(0, 60, 1024), Share(0, 40, 1024)])
    assert not cards.have([Share(0, 60, 1024), Share(0, 41, 1024)])
    assert not cards.have([Share(0, 60, 16384), Share(0, 10, 1)])
    assert not cards.have([Share(0, 10, 0), Share(0, 100, 0)])
    assert not cards.have([Share(1, 10, 0)])
    assert cards.have([Share(0, 100, 0)])
