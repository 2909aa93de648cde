"""Tests of the choice of a pod's model among the models that it may use."""

import json
from collections.abc import Mapping

import msgspec
import pytest

from tests.builders import container, pod, view
from tests.tables import cases
from vcuda.placement.choice import Choice, choose, choose_regardless
from vcuda.placement.free_cards import FreeCards, free_by_model, read_free_cards, write_free_cards
from vcuda.placement.nodes import Nodes
from vcuda.placement.placement import Candidates, find_candidates
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Shortage, Usage
from vcuda.quota.preference import PLACES, Rule
from vcuda.requests.pod_request import read_request

ALL = ("M40", "P100", "A100")
QUOTA = NamespaceQuota({model: Limit(800) for model in ALL})
CARD, SHARE, SHARES = Charge(100, card_memory=100), Charge(50, 1024), Charge(120, 2048)
BOTH = Candidates(("M40", "P100"), frozenset(), {})


def used(**cores: int) -> dict[str, Usage]:
    """Return the usage of each model. A keyword is a model, and its value is the number of used cores."""
    return {model: Usage(Charge(used)) for model, used in cores.items()}


def chosen(
    candidates: Candidates,
    asked: Charge = CARD,
    usage: Mapping[str, Usage] = {},  # never changed, so a mutable default is safe
    quota: NamespaceQuota = QUOTA,
) -> tuple[str, str] | tuple[Shortage, ...]:
    choice = choose(candidates.options(quota, lambda _model: asked, usage), candidates.rule)
    return (choice.model, choice.reason) if isinstance(choice, Choice) else choice


FREE, FIRST = "8 cards of 8 cards free", "the first in the namespace's quota"


@cases(
    "present, usage, model, reason",
    first=("", {}, "M40", FIRST),
    first_until_it_is_full=("", {"M40": 700}, "M40", FIRST),
    next_when_it_is_full=("", {"M40": 701}, "P100", "the next in the namespace's quota after M40 (not enough quota)"),
    first_with_a_node=("P100 A100", {}, "P100", "the next in the namespace's quota after M40 (no node now)"),
    last=(
        *("A100", {"P100": 800}, "A100"),
        "the next in the namespace's quota after M40 (no node now), P100 (not enough quota)",
    ),
    present_but_full=("A100", {"A100": 750}, "M40", FIRST),
    one_with_room=("M40", {"M40": 800, "P100": 701}, "A100", "the only model with enough quota"),
)
def test_the_first_model_in_the_order_that_has_a_node_and_room_is_chosen(
    present: str, usage: dict[str, int], model: str, reason: str
) -> None:
    name, why = chosen(Candidates(ALL, frozenset(present.split()), {}), usage=used(**usage))
    assert name == model
    assert str(why).startswith(f"{reason}, ")


@pytest.mark.parametrize("rule", Rule)
def test_the_reason_names_the_place_of_the_order(rule: Rule) -> None:
    _, why = chosen(Candidates(ALL, frozenset(), {}, rule))
    assert why == (
        f"the model with the most free quota, {FREE}"
        if rule is Rule.MOST_FREE
        else f"the first in {PLACES[rule]}, {FREE}"
    )


UNLIKE = "a node of the model can take the pod now, unlike"


@cases(
    "present, usage, model, reason",
    first_in_the_document=("", {}, "M40", "the model with the most free quota, 8 cards of 8 cards free"),
    most_room=("", {"M40": 100}, "P100", "the model with the most free quota, 8 cards of 8 cards free"),
    tie=("", {"M40": 1, "P100": 1, "A100": 2}, "M40", "the model with the most free quota, 7.99 cards of 8 cards free"),
    present=(
        *("A100", {"A100": 700}, "A100"),
        f"{UNLIKE} M40 (no node now), P100 (no node now), 1 card of 8 cards free",
    ),
    two_present=(
        *("M40 A100", {"M40": 300}, "A100"),
        f"{UNLIKE} P100 (no node now), 8 cards of 8 cards free",
    ),
    all_present=("M40 P100 A100", {"M40": 300}, "P100", "the model with the most free quota, 8 cards of 8 cards free"),
    present_but_full=("A100", {"A100": 750}, "M40", "the model with the most free quota, 8 cards of 8 cards free"),
    one_with_room=(
        "M40",
        {"M40": 800, "P100": 701},
        "A100",
        "the only model with enough quota, 8 cards of 8 cards free",
    ),
)
def test_prefer_most_free_compares_present_nodes_then_room_then_order(
    present: str, usage: dict[str, int], model: str, reason: str
) -> None:
    candidates = Candidates(ALL, frozenset(present.split()), {}, Rule.MOST_FREE)
    assert chosen(candidates, usage=used(**usage)) == (model, reason)


@cases(
    "free, asked, model",
    whole_cards=({"M40": FreeCards(8, 2, 300), "P100": FreeCards(8, 3, 300)}, CARD, "P100"),
    a_share_first=({"M40": FreeCards(8, 2, 300), "P100": FreeCards(8, 3, 300)}, SHARE, "M40"),
    a_share_free=({"M40": FreeCards(8, 0, 100), "P100": FreeCards(8, 0, 200)}, SHARE, "P100"),
    several_shares=({"M40": FreeCards(8, 1, 100), "P100": FreeCards(8, 0, 200)}, SHARES, "P100"),
    none_of_the_others=({"A100": FreeCards(8, 1, 100)}, CARD, "A100"),
    not_published=({}, CARD, "M40"),
)
def test_with_prefer_most_free_the_model_with_the_most_free_cards_is_chosen_if_they_are_published(
    free: dict[str, FreeCards], asked: Charge, model: str
) -> None:
    why = "the model with the most free quota" if model == "M40" else "the model with the most free cards"
    candidates = Candidates(ALL, frozenset(ALL), {}, Rule.MOST_FREE, free)
    assert chosen(candidates, asked) == (model, f"{why}, {FREE}")


def test_cards_of_pending_pods_do_not_count_as_free() -> None:
    """The published numbers of free cards are some seconds old. If the cards of pending pods still counted as free, a
    burst of pods would all be pinned to one model.
    """
    free = {"M40": FreeCards(8, 3, 300), "P100": FreeCards(8, 2, 200)}
    candidates = Candidates(("M40", "P100"), frozenset(("M40", "P100")), {}, Rule.MOST_FREE, free)
    assert chosen(candidates, usage={"M40": Usage(Charge(200), Charge(200))}) == (
        "P100",
        f"the model with the most free cards, {FREE}",
    )


def test_free_cards_of_other_pools_do_not_count() -> None:
    public = FreeCards(8, 1, 100)
    figures = {("M40", "lab"): FreeCards(8, 8, 800), ("M40", "public"): public, ("P100", ""): FreeCards(1)}
    assert free_by_model(figures, ["public"]) == {"M40": public}
    assert free_by_model(figures, []) == {"M40": FreeCards(16, 9, 900), "P100": FreeCards(1)}


def test_published_figures_are_read_back_unchanged() -> None:
    figures = {("M40", "lab"): FreeCards(8, 7, 760, 60, 100), ("P100", ""): FreeCards(1)}
    assert read_free_cards(write_free_cards(figures)) == figures
    assert free_by_model(figures, []) == {"M40": FreeCards(8, 7, 760, 60, 100), "P100": FreeCards(1)}
    with pytest.raises(ValueError, match="Expected"):
        read_free_cards("{}")


def test_figures_of_an_earlier_and_of_a_later_release_are_read() -> None:
    row = {"model": "M40", "pool": "lab", "free": {"cards": 8, "free_cores": 80, "new": 1}, "new": 1}
    assert read_free_cards(json.dumps([row])) == {("M40", "lab"): FreeCards(8, 0, 80)}


HALVES, WHOLE = FreeCards(8, 0, 400, 400, 50), FreeCards(1, 1, 100, 0, 100)
"""Free cards of two models. HALVES: eight cards that are each half in use. WHOLE: one card that is completely free."""


IN_P100 = (
    "P100",
    "the next in the namespace's quota after M40 (no card with enough free cores), 8 cards of 8 cards free",
)
IN_M40 = ("M40", "the first in the namespace's quota, 8 cards of 8 cards free")


@cases(
    "containers, halves, expected",
    more_than_half_a_card=([(60, 10)], HALVES, IN_P100),
    half_a_card=([(50, 10)], HALVES, IN_M40),
    four_quarters=([(25, 10)] * 4, HALVES, IN_M40),
    a_card=([(100, 0)], HALVES, IN_P100),
    published_by_an_earlier_release=([(60, 10)], FreeCards(8, 0, 400, 400), IN_M40),
)
def test_a_model_without_a_card_with_room_for_a_container_is_tried_last(
    containers: list[tuple[int, int]], halves: FreeCards, expected: tuple[str, str]
) -> None:
    """A container cannot combine parts of several cards. Pinned to this model, the pod would wait for a free card."""
    limits = [{"tencent.com/vcuda-core": cores, "tencent.com/vcuda-memory": memory} for cores, memory in containers]
    asking = view(pod(*(container(each) for each in limits)))
    request, quota = read_request(asking), NamespaceQuota({"M40": Limit(800), "P100": Limit(800)})
    whole = WHOLE if halves.largest else msgspec.structs.replace(WHOLE, largest=0)
    nodes = Nodes(free={("M40", ""): halves, ("P100", ""): whole})
    candidates = find_candidates(asking, request, quota, nodes)
    assert chosen(candidates, request.charge, quota=quota) == expected


@cases(
    "asked, model, reason",
    room=(300, "P100", "the only model with enough quota, 3 cards of 4 cards free"),
    no_room=(900, "M40", "over quota on every model, but the quota does not enforce its limits"),
)
def test_a_quota_that_does_not_enforce_takes_the_first_model_if_none_has_room(
    asked: int, model: str, reason: str
) -> None:
    quota = NamespaceQuota({"M40": Limit(200), "P100": Limit(400)})
    options = BOTH.options(quota, lambda _model: Charge(asked), used(P100=100))
    assert choose_regardless(options, Rule.DOCUMENT) == Choice(model, reason)
