"""Holds: what was just promised steers the next choice, for a short while, and no more than that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.quota.model import Charge, Usage
from webhook.ledgers import CHOICE_SECONDS, RecentChoices

CARD = Charge(100, 0, 100)
SHARE = Charge(20, 512)
M40 = {"M40": Usage(used=Charge(300), pending=Charge(100))}


class Clock:
    """Seconds that pass when the test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def holds(clock: Clock) -> RecentChoices:
    return RecentChoices(clock)


def held(holds: RecentChoices, namespace: str = "team-a") -> dict[str, Charge]:
    """Return what is held, by model."""
    return {model: usage.used for model, usage in holds.on_top_of({}, namespace).items()}


def test_nothing_is_held_at_first(holds: RecentChoices) -> None:
    assert holds.on_top_of(M40, "team-a") is M40


def test_what_is_held_counts_as_used_and_not_as_pending(holds: RecentChoices) -> None:
    holds.add("team-a", "M40", CARD)
    holds.add("team-a", "M40", SHARE)
    holds.add("team-a", "P100", CARD)
    before = dict(M40)
    assert holds.on_top_of(M40, "team-a") == {
        "M40": Usage(used=Charge(420, 512, 100), pending=Charge(100)),
        "P100": Usage(used=CARD, pending=Charge()),
    }
    assert before == M40


def test_models_that_are_not_held_stay(holds: RecentChoices) -> None:
    holds.add("team-a", "P100", CARD)
    assert holds.on_top_of(M40, "team-a")["M40"] is M40["M40"]


def test_namespaces_are_apart(holds: RecentChoices) -> None:
    holds.add("team-a", "M40", CARD)
    holds.release("team-b", "M40", CARD)
    assert (held(holds, "team-a"), held(holds, "team-b")) == ({"M40": CARD}, {})


def test_a_hold_is_forgotten_in_time(holds: RecentChoices, clock: Clock) -> None:
    holds.add("team-a", "M40", CARD)
    clock.now += CHOICE_SECONDS / 2
    holds.add("team-a", "M40", SHARE)
    clock.now += CHOICE_SECONDS / 2 - 0.01
    assert held(holds) == {"M40": CARD + SHARE}
    clock.now += 0.01
    assert held(holds) == {"M40": SHARE}
    clock.now += CHOICE_SECONDS
    assert holds.on_top_of(M40, "team-a") is M40


def test_what_is_charged_is_held_no_more(holds: RecentChoices) -> None:
    for charge in (CARD, SHARE, CARD):
        holds.add("team-a", "M40", charge)
    holds.release("team-a", "M40", CARD)
    assert held(holds) == {"M40": CARD + SHARE}
    holds.release("team-a", "M40", SHARE)
    assert held(holds) == {"M40": CARD}
    holds.release("team-a", "M40", CARD)
    assert held(holds) == {}


def test_the_oldest_of_those_alike_is_released(holds: RecentChoices, clock: Clock) -> None:
    """It would have been forgotten first; the younger one goes on to be held for its full time."""
    holds.add("team-a", "M40", CARD)
    clock.now += CHOICE_SECONDS / 2
    holds.add("team-a", "M40", CARD)
    holds.release("team-a", "M40", CARD)
    clock.now += CHOICE_SECONDS / 2
    assert held(holds) == {"M40": CARD}


@pytest.mark.parametrize(("model", "charge"), [("P100", CARD), ("M40", SHARE)], ids=["model", "charge"])
def test_what_is_not_held_releases_nothing(holds: RecentChoices, model: str, charge: Charge) -> None:
    """Its pod was promised by another replica, or its hold has been forgotten."""
    holds.add("team-a", "M40", CARD)
    holds.release("team-a", model, charge)
    assert held(holds) == {"M40": CARD}


STEPS = st.tuples(
    st.sampled_from(["add", "release"]),
    st.sampled_from(["M40", "P100"]),
    st.sampled_from([CARD, SHARE]),
    st.sampled_from([0.0, 0.3, 1.0, CHOICE_SECONDS]),
)


@given(steps=st.lists(STEPS, max_size=40))
def test_the_sums_are_those_of_the_holds(steps: list[tuple[str, str, Charge, float]]) -> None:
    """Beside a plain list of what is held."""
    clock = Clock()
    holds = RecentChoices(clock)
    model_of: list[tuple[float, str, Charge]] = []
    for action, model, charge, pause in steps:
        if action == "add":
            holds.add("team-a", model, charge)
            model_of.append((clock.now + CHOICE_SECONDS, model, charge))
        else:
            holds.release("team-a", model, charge)
            alike = [each for each in model_of if each[1:] == (model, charge)]
            if alike:
                model_of.remove(alike[0])
        clock.now += pause
        model_of = [each for each in model_of if each[0] > clock.now]
        for name in ("M40", "P100"):
            cores = sum(charge.cores for _, model, charge in model_of if model == name)
            assert held(holds).get(name, Charge()).cores == cores
