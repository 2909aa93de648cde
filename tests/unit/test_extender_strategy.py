"""Tests of the node and the cards that the extender chooses. As many cards as possible must stay completely free."""

import itertools

import pytest
from hypothesis import given, strategies as st

from controller.extender.strategy import Assignment, Placement, assign, bin_pack
from tests.tables import cases
from vcuda.allocations.cards import CardRequest, Cards, ContainerRequest, Share, Unplaceable
from vcuda.requests.schemes import GPU_MANAGER, NVIDIA_VCUDA

GIB = 1024


def node(*used: int, memory: int = 0) -> Cards:
    """Return a node of 16 GiB cards. ``used``: used cores of each card. ``memory``: used MiB of each used card."""
    cards = Cards.unused(GPU_MANAGER, len(used), len(used) * 64)
    return cards.taken(Share(card, cores, memory) for card, cores in enumerate(used) if cores)


def request(*demands: tuple[int, int]) -> CardRequest:
    return CardRequest(GPU_MANAGER, tuple(ContainerRequest(number, *demand) for number, demand in enumerate(demands)))


@cases(
    "cards, demands, wanted",
    the_card_with_the_fewest_free_cores=(node(0, 50, 20), [(30, GIB)], [[1]]),
    the_fullest_card_on_which_the_share_fits=(node(0, 80, 20), [(30, GIB)], [[2]]),
    no_room_in_memory=(node(50, 20, memory=15 * GIB), [(30, 2 * GIB)], []),
    the_lowest_number_among_equals=(node(20, 20), [(30, GIB)], [[0]]),
    unused_whole_cards=(node(0, 10, 0, 0), [(200, 0)], [[0, 2]]),
    some_memory_is_in_use=(node(0).taken([Share(0, 0, 256)]), [(100, 0)], []),
    containers_are_placed_in_order=(node(0, 0), [(60, GIB), (60, GIB), (40, GIB)], [[0], [1], [0]]),
    a_share_and_a_whole_card=(node(0, 0), [(60, GIB), (100, 0)], [[0], [1]]),
    all_containers_or_none=(node(0), [(60, GIB), (100, 0)], []),
)
def test_a_pod_gets_the_best_cards_of_a_node(
    cards: Cards, demands: list[tuple[int, int]], wanted: list[list[int]]
) -> None:
    found = assign(cards, request(*demands).containers)
    shares = found.shares.values() if isinstance(found, Assignment) else ()
    assert [[share.card for share in each] for each in shares] == wanted


@pytest.mark.parametrize(
    ("cards", "demand", "reason"),
    [
        (node(10, 80), (30, GIB), None),
        (node(80, 80), (30, GIB), Unplaceable("no card with 30 cores and 1024 MiB free", final=False)),
        (node(0), (30, 17 * GIB), Unplaceable("17408 MiB of one card needed, each has 16384 MiB", final=True)),
        (node(0, 10, 0), (300, 0), Unplaceable("3 whole vcuda cards needed, 2 free", final=False)),
        (node(0), (200, 0), Unplaceable("2 whole vcuda cards needed, 1 free", final=True)),
    ],
)
def test_the_reason_is_short_and_says_whether_it_can_pass(
    cards: Cards, demand: tuple[int, int], reason: Unplaceable | None
) -> None:
    found = assign(cards, request(demand).containers)
    assert found == reason if reason else isinstance(found, Assignment)


def chosen(asked: CardRequest, **nodes: Cards | Unplaceable) -> str:
    choice = bin_pack(asked, [*nodes, *nodes], nodes)  # a node that is named twice must count once
    assert isinstance(choice, Placement), choice
    return choice.node


def test_nodes_are_tried_from_the_least_free_and_equals_by_name() -> None:
    assert chosen(request((100, 0)), a=node(0, 0), b=node(0, 50), c=node(0, 50)) == "b"


def test_a_share_prefers_a_card_that_is_already_shared_even_on_a_freer_node() -> None:
    nodes = {"full": node(100, 0), "open": node(0, 0, 20)}
    assert chosen(request((30, GIB)), **nodes) == "open"


def test_as_few_whole_cards_as_possible_are_broken_up() -> None:
    nodes = {"two": node(100, 0, 0), "one": node(0, 0, 45)}
    assert chosen(request((60, GIB), (50, GIB)), **nodes) == "one"


def test_every_node_that_fails_has_its_reason() -> None:
    lacking = Unplaceable("the node has no vcuda cards")
    other = Cards.unused(NVIDIA_VCUDA, 1, 16000)
    nodes: dict[str, Cards | Unplaceable] = {"cpu": lacking, "full": node(100), "other": other}
    assert bin_pack(request((100, 0)), [*nodes, "new"], nodes) == {
        "cpu": lacking,
        "full": Unplaceable("1 whole vcuda cards needed, 0 free", final=False),
        "other": Unplaceable("no tencent.com/vcuda-core on the node"),
        "new": Unplaceable("the node is not known yet", final=False),
    }


DEMANDS = st.sampled_from([(5, 256), (30, 4096), (50, 8192), (75, 16384), (100, 0), (200, 0), (300, 0)])


@given(st.lists(st.lists(DEMANDS, min_size=1, max_size=3), max_size=30))
def test_no_card_is_ever_over_allocated(pods: list[list[tuple[int, int]]]) -> None:
    nodes = {"a": node(0), "b": node(0, 0, 0), "c": node(0, 0)}
    for demands in pods:
        choice = bin_pack(request(*demands), nodes, nodes)
        if isinstance(choice, Placement):
            shares = itertools.chain.from_iterable(choice.assignment.shares.values())
            nodes[choice.node] = nodes[choice.node].taken(shares)
    for cards in nodes.values():
        assert all(cores <= 100 for cores in cards.used_cores)
        assert all(memory <= cards.card_memory for memory in cards.used_memory)
