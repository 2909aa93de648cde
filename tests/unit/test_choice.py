"""Which of the models that a pod may use it gets, and what a stored pod is held to."""

from __future__ import annotations

import json
from collections.abc import Iterable

import msgspec
import pytest

from tests.builders import (
    LABELS,
    MODEL,
    POOL,
    Manifest,
    container,
    held_to,
    pod,
    required,
    requirement,
    term,
    vcuda_pod,
    view,
)
from vcuda.placement.placement import (
    Candidates,
    Choice,
    FreeCards,
    Nodes,
    Pin,
    choose,
    choose_regardless,
    find_candidates,
    free_by_model,
    read_free_cards,
    read_pin,
    write_free_cards,
)
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Shortage, Usage
from vcuda.requests.pod_request import read_request


def quota_of(*models: str, pools: Iterable[str] = ()) -> NamespaceQuota:
    """Return a quota of eight cards of each model."""
    return NamespaceQuota({model: Limit(800) for model in models}, tuple(pools))


QUOTA = quota_of("M40", "P100", "A100")
CARD, SHARE, SHARES = Charge(100, card_memory=100), Charge(50, 1024), Charge(120, 2048)


def cards(**cores: int) -> dict[str, Usage]:
    """Return what is used of each model, in cores."""
    return {model: Usage(Charge(used)) for model, used in cores.items()}


@pytest.mark.parametrize(
    ("present", "usage", "model", "reason"),
    [
        pytest.param("", {}, "M40", "most room, 8 cards of 8 cards free", id="first-in-the-document"),
        pytest.param("", {"M40": 100}, "P100", "most room, 8 cards of 8 cards free", id="most-room"),
        pytest.param("", {"M40": 1, "P100": 1, "A100": 2}, "M40", "most room, 7.99 cards of 8 cards free", id="tie"),
        pytest.param(
            "A100", {"A100": 700}, "A100", "a node of it can take the pod now, 1 card of 8 cards free", id="present"
        ),
        pytest.param(
            "M40 A100",
            {"M40": 300},
            "A100",
            "a node of it can take the pod now, 8 cards of 8 cards free",
            id="two-present",
        ),
        pytest.param("M40 P100 A100", {"M40": 300}, "P100", "most room, 8 cards of 8 cards free", id="all-present"),
        pytest.param("A100", {"A100": 750}, "M40", "most room, 8 cards of 8 cards free", id="present-but-full"),
        pytest.param(
            "M40",
            {"M40": 800, "P100": 701},
            "A100",
            "the only model with room, 8 cards of 8 cards free",
            id="the-only-one-with-room",
        ),
    ],
)
def test_the_choice_goes_by_present_nodes_then_room_then_order(
    present: str, usage: dict[str, int], model: str, reason: str
) -> None:
    candidates = Candidates(("M40", "P100", "A100"), frozenset(present.split()), {})
    assert choose(candidates, QUOTA, Charge(100), cards(**usage)) == Choice(model, reason)


@pytest.mark.parametrize(
    ("free", "asked", "model"),
    [
        pytest.param({"M40": FreeCards(8, 2, 300), "P100": FreeCards(8, 3, 300)}, CARD, "P100", id="whole cards"),
        pytest.param({"M40": FreeCards(8, 2, 300), "P100": FreeCards(8, 3, 300)}, SHARE, "M40", id="a share, first"),
        pytest.param({"M40": FreeCards(8, 0, 100), "P100": FreeCards(8, 0, 200)}, SHARE, "P100", id="a share, free"),
        pytest.param({"M40": FreeCards(8, 1, 100), "P100": FreeCards(8, 0, 200)}, SHARES, "P100", id="several shares"),
        pytest.param({"A100": FreeCards(8, 1, 100)}, CARD, "A100", id="none of the others"),
        pytest.param({}, CARD, "M40", id="not published"),
    ],
)
def test_where_it_is_published_the_model_with_the_most_free_cards_is_chosen(
    free: dict[str, FreeCards], asked: Charge, model: str
) -> None:
    present = frozenset(("M40", "P100", "A100"))
    candidates = Candidates(("M40", "P100", "A100"), present, {}, free)
    chosen = choose(candidates, QUOTA, asked, {})
    assert isinstance(chosen, Choice)
    assert chosen.model == model
    assert chosen.reason.startswith("most room" if model == "M40" else "most cards are free")


def test_what_was_admitted_a_moment_ago_counts_as_no_longer_free() -> None:
    """The figures are some seconds old: a burst of pods must not all go to one model."""
    free = {"M40": FreeCards(8, 3, 300), "P100": FreeCards(8, 2, 200)}
    candidates = Candidates(("M40", "P100"), frozenset(("M40", "P100")), {}, free)
    pending = {"M40": Usage(Charge(200), Charge(200))}
    chosen = choose(candidates, QUOTA, CARD, pending)
    assert isinstance(chosen, Choice)
    assert chosen.model == "P100"


def test_free_cards_of_other_pools_are_not_the_pods() -> None:
    figures = {
        ("M40", "lab"): FreeCards(8, 8, 800),
        ("M40", "public"): FreeCards(8, 1, 100),
        ("P100", ""): FreeCards(1),
    }
    assert free_by_model(figures, ["public"]) == {"M40": FreeCards(8, 1, 100)}
    assert free_by_model(figures, []) == {"M40": FreeCards(16, 9, 900), "P100": FreeCards(1)}


def test_figures_are_read_as_they_were_published() -> None:
    figures = {("M40", "lab"): FreeCards(8, 7, 760, 60, 100), ("P100", ""): FreeCards(1)}
    assert read_free_cards(write_free_cards(figures)) == figures
    assert free_by_model(figures, []) == {"M40": FreeCards(8, 7, 760, 60, 100), "P100": FreeCards(1)}
    with pytest.raises(ValueError, match="Expected"):
        read_free_cards("{}")


def test_figures_of_an_earlier_and_of_a_later_release_are_read() -> None:
    row = {"model": "M40", "pool": "lab", "free": {"cards": 8, "free_cores": 80, "new": 1}, "new": 1}
    assert read_free_cards(json.dumps([row])) == {("M40", "lab"): FreeCards(8, 0, 80)}


HALVES, WHOLE = FreeCards(8, 0, 400, 400, 50), FreeCards(1, 1, 100, 0, 100)
"""Eight cards of which half is used, and one free card."""


@pytest.mark.parametrize(
    ("containers", "halves", "chosen"),
    [
        pytest.param([(60, 10)], HALVES, ("P100", "a card of it has room now, 8 cards of 8 cards free"), id="60"),
        pytest.param([(50, 10)], HALVES, ("M40", "most cards are free, 8 cards of 8 cards free"), id="50"),
        pytest.param([(25, 10)] * 4, HALVES, ("M40", "most cards are free, 8 cards of 8 cards free"), id="4 of 25"),
        pytest.param([(100, 0)], HALVES, ("P100", "a card of it has room now, 8 cards of 8 cards free"), id="a card"),
        pytest.param(
            [(60, 10)],
            FreeCards(8, 0, 400, 400),
            ("M40", "most cards are free, 8 cards of 8 cards free"),
            id="published by an earlier release",
        ),
    ],
)
def test_a_model_none_of_whose_cards_has_room_for_a_container_comes_last(
    containers: list[tuple[int, int]], halves: FreeCards, chosen: tuple[str, str]
) -> None:
    """A pod is held to its model for good: the sum of what is free on many cards is no use to it."""
    limits = [{"tencent.com/vcuda-core": cores, "tencent.com/vcuda-memory": memory} for cores, memory in containers]
    asking = view(pod(*(container(each) for each in limits)))
    request, quota = read_request(asking), quota_of("M40", "P100")
    whole = WHOLE if halves.largest else msgspec.structs.replace(WHOLE, largest=0)
    nodes = Nodes(free={("M40", ""): halves, ("P100", ""): whole})
    candidates = find_candidates(asking, request.schemes, quota, nodes, request.share)
    assert choose(candidates, quota, request.charge, {}) == Choice(*chosen)


def test_the_only_candidate_is_taken_as_such() -> None:
    candidates = Candidates(("P100",), frozenset({"P100"}), {"M40": "annotation x"})
    assert choose(candidates, QUOTA, Charge(100), {}) == Choice(
        "P100", "the only model it may use, 8 cards of 8 cards free"
    )


def test_what_no_model_has_room_for_is_told_in_the_order_of_the_document() -> None:
    quota = NamespaceQuota({"M40": Limit(200), "P100": Limit(400)})
    candidates = Candidates(("M40", "P100"), frozenset({"P100"}), {})
    usage = {"P100": Usage(Charge(350), pending=Charge(50))}
    assert choose(candidates, quota, Charge(250), usage) == (
        Shortage("M40", Charge(250), Usage(), Limit(200)),
        Shortage("P100", Charge(250), usage["P100"], Limit(400)),
    )


@pytest.mark.parametrize(
    ("memory", "model"),
    [
        pytest.param(None, "M40", id="not-limited"),
        pytest.param(2048, "M40", id="just-enough"),
        pytest.param(2047, "P100", id="too-little"),
    ],
)
def test_a_model_needs_room_in_memory_too(memory: int | None, model: str) -> None:
    quota = NamespaceQuota({"M40": Limit(800, memory), "P100": Limit(100)})
    candidates = Candidates(("M40", "P100"), frozenset(), {})
    usage = {"M40": Usage(Charge(50, 1024))}
    choice = choose(candidates, quota, Charge(50, 1024), usage)
    assert isinstance(choice, Choice)
    assert choice.model == model


def test_whole_cards_take_their_share_of_the_memory() -> None:
    """Two of four cards are half of the memory, so a share that needs more than the other half goes elsewhere."""
    quota = NamespaceQuota({"M40": Limit(400, 4096), "P100": Limit(50)})
    candidates = Candidates(("M40", "P100"), frozenset(), {})
    usage = {"M40": Usage(Charge(200, card_memory=200))}
    assert isinstance(choose(candidates, quota, Charge(50, 2048), usage), Choice)
    assert choose(candidates, quota, Charge(50, 2049), usage) == Choice(
        "P100", "the only model with room, 0.5 cards of 0.5 cards free"
    )


@pytest.mark.parametrize(
    ("asked", "choice"),
    [
        pytest.param(300, Choice("P100", "the only model with room, 3 cards of 4 cards free"), id="room"),
        pytest.param(
            900,
            Choice("P100", "over quota on every model, and this quota does not enforce"),
            id="no-room",
        ),
    ],
)
def test_a_quota_that_does_not_enforce_always_chooses(asked: int, choice: Choice) -> None:
    quota = NamespaceQuota({"M40": Limit(200), "P100": Limit(400)})
    candidates = Candidates(("M40", "P100"), frozenset(), {})
    assert choose_regardless(candidates, quota, Charge(asked), cards(P100=100)) == choice


@pytest.mark.parametrize(
    ("stored", "models", "pools", "within"),
    [
        pytest.param(vcuda_pod(), None, None, False, id="not-held"),
        pytest.param(vcuda_pod(affinity=held_to("M40", "lab")), {"M40"}, {"lab"}, True, id="held"),
        pytest.param(vcuda_pod(nodeSelector={MODEL: "M40", POOL: "lab"}), {"M40"}, {"lab"}, True, id="by-selector"),
        pytest.param(vcuda_pod(affinity=held_to("M40")), {"M40"}, None, False, id="any-pool"),
        pytest.param(
            vcuda_pod(affinity=held_to("M40", "lab", "public")), {"M40"}, {"lab", "public"}, False, id="more-pools"
        ),
        pytest.param(vcuda_pod(affinity=held_to("V100", "lab")), {"V100"}, {"lab"}, False, id="not-in-the-quota"),
        pytest.param(
            vcuda_pod(affinity=required(term(requirement(MODEL, "In", "M40", "P100"), requirement(POOL, "In", "lab")))),
            {"M40", "P100"},
            {"lab"},
            False,
            id="two-models",
        ),
        pytest.param(
            vcuda_pod(affinity=required(term(requirement(MODEL, "In", "M40")), term(requirement(MODEL, "In", "P100")))),
            {"M40", "P100"},
            None,
            False,
            id="two-terms",
        ),
        pytest.param(
            vcuda_pod(affinity=required(term(requirement(MODEL, "In", "M40")), term(requirement("x", "Exists")))),
            None,
            None,
            False,
            id="a-term-leaves-it-open",
        ),
        pytest.param(vcuda_pod(affinity=required({})), frozenset(), frozenset(), False, id="nowhere"),
        pytest.param(vcuda_pod(nodeName="c"), None, None, False, id="a-node-name-holds-no-model"),
        pytest.param(
            vcuda_pod(annotations={"quota.vcuda.io/model": "M40", "nvidia.com/use-gputype": "M40"}),
            None,
            None,
            False,
            id="annotations-hold-nothing",
        ),
    ],
)
def test_a_stored_pod_is_held_by_its_spec_alone(
    stored: Manifest, models: Iterable[str] | None, pools: Iterable[str] | None, within: bool
) -> None:
    pin = read_pin(view(stored), LABELS)
    assert pin == Pin(
        None if models is None else frozenset(models),
        None if pools is None else frozenset(pools),
    )
    assert pin.within(quota_of("M40", "P100", pools=("lab",))) is within


@pytest.mark.parametrize(
    ("pin", "within"),
    [
        pytest.param(Pin(frozenset({"M40"}), None), True, id="any-pool"),
        pytest.param(Pin(frozenset({"M40"}), frozenset()), True, id="no-node-at-all"),
        pytest.param(Pin(frozenset(), None), False, id="no-model"),
        pytest.param(Pin(None, None), False, id="any-model"),
    ],
)
def test_without_pools_in_the_quota_only_the_model_counts(pin: Pin, within: bool) -> None:
    assert pin.within(quota_of("M40")) is within
