"""Tests of the choice of a pod's model among the models that it may use."""

from collections.abc import Mapping

import pytest

from tests.tables import cases
from vcuda.placement.choice import PLACES, Choice, Rule, choose, choose_regardless
from vcuda.placement.placement import Candidates
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Usage
from vcuda.quota.shortage import Shortage

ALL = ("M40", "P100", "A100")
QUOTA = NamespaceQuota({model: Limit(800) for model in ALL})
CARD = Charge(100, card_memory=100)
BOTH = Candidates(("M40", "P100"), frozenset(), {})


def used(**cores: int) -> dict[str, Usage]:
    """Return the usage of each model. Each keyword is a model, and its value is the number of used cores."""
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
    assert why == f"the first in {PLACES[rule]}, {FREE}"


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
