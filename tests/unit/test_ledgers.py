"""Ledgers in memory admit no more than the quota in any order of events; recent choices steer, for a short while."""

from __future__ import annotations

import asyncio
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from vcuda.ledger.ledger import Admitted, Refused
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota, Usage
from webhook.ledgers import CHOICE_SECONDS, ChargeRequest, Decision, MemoryLedgers, RecentChoices

MODELS = ("M40", "P100")
CHARGES = st.builds(Charge, st.integers(1, 300), st.integers(0, 2000), st.integers(0, 300))
LIMITS = st.builds(Limit, st.integers(0, 1000), st.none() | st.integers(1, 5000))
QUOTAS = st.builds(NamespaceQuota, st.dictionaries(st.sampled_from(MODELS), LIMITS), mode=st.sampled_from(Mode))
ROOMY = NamespaceQuota(dict.fromkeys(MODELS, Limit(1000)))


def total(charges: list[Charge]) -> Charge:
    """Return the sum, worked out apart from the code under test."""
    return Charge(
        sum(charge.cores for charge in charges),
        sum(charge.memory for charge in charges),
        sum(charge.card_memory for charge in charges),
    )


def within(charge: Charge, limit: Limit | None) -> bool:
    """Return whether a total is within a limit, in exact arithmetic; a model without a limit may not be used."""
    limit = limit or Limit(0)
    if limit.memory is None:
        return charge.cores <= limit.cores
    cards = Fraction(charge.card_memory * limit.memory, limit.cores) if limit.cores else 0
    return charge.cores <= limit.cores and charge.memory + cards <= limit.memory


class Admissions(RuleBasedStateMachine):
    """Any interleaving on one namespace, beside a plain record of the pods that were admitted and are not gone."""

    demands = Bundle[ChargeRequest]("demands")

    def __init__(self) -> None:
        super().__init__()
        self.quota = ROOMY
        self.admitted: dict[str, ChargeRequest] = {}
        self.finished: set[str] = set()
        self.numbered = 0

    def decide(self, demand: ChargeRequest) -> Decision:
        """Put the demand to the store under test."""
        raise NotImplementedError

    def counted(self, model: str) -> Charge:
        """Return the most that the store may count now."""
        raise NotImplementedError

    def taken(self, model: str) -> list[Charge]:
        return [demand.charge for demand in self.admitted.values() if demand.model == model]

    def put(self, demand: ChargeRequest) -> None:
        """Have a demand decided: an enforced quota grants only what fits the limit in force, any other everything."""
        limit, counted = demand.quota.limits.get(demand.model), self.counted(demand.model)
        fits = within(total([*self.taken(demand.model), demand.charge]), limit)
        decision = self.decide(demand)
        if isinstance(decision, Admitted):
            assert fits or (demand.quota.mode is not Mode.ENFORCE and decision.shortage)
            if not demand.dry_run:
                self.admitted[demand.uid] = demand
        else:
            assert isinstance(decision, Refused)
            assert demand.quota.mode is Mode.ENFORCE
            assert not within(total([counted, demand.charge]), limit)

    @rule(quota=QUOTAS)
    def edit_quota(self, quota: NamespaceQuota) -> None:
        self.quota = quota

    @rule(target=demands, model=st.sampled_from(MODELS), charge=CHARGES, dry_run=st.booleans())
    def admit(self, model: str, charge: Charge, dry_run: bool) -> ChargeRequest:
        self.numbered += 1
        uid = f"uid-{self.numbered}"
        demand = ChargeRequest("team-a", uid, model, charge, self.quota, float("inf"), dry_run=dry_run)
        self.put(demand)
        return demand

    @rule(demand=demands)
    def repeat(self, demand: ChargeRequest) -> None:
        """What was granted is granted again, whatever the quota is by now; what was refused is decided anew."""
        if demand.uid in self.admitted:
            assert isinstance(self.decide(demand), Admitted)
        elif demand.uid not in self.finished:
            self.put(msgspec.structs.replace(demand, quota=self.quota))


class InMemory(Admissions):
    """The store of the embedded mode: it is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.ledgers = MemoryLedgers()

    def decide(self, demand: ChargeRequest) -> Decision:
        return asyncio.run(self.ledgers.charge(demand))

    def counted(self, model: str) -> Charge:
        return total(self.taken(model))

    @invariant()
    def every_admitted_uid_is_charged_once(self) -> None:
        usages = asyncio.run(self.ledgers.usage("team-a"))
        assert {model: usages.get(model, Usage()).used for model in MODELS} == {
            model: total(self.taken(model)) for model in MODELS
        }
        assert asyncio.run(self.ledgers.usage("team-b")) == {}


def test_never_more_than_the_limit_in_force_at_admission() -> None:
    run_state_machine_as_test(InMemory, settings=settings(max_examples=150, stateful_step_count=30, deadline=None))


# Recent choices

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
def choices(clock: Clock) -> RecentChoices:
    return RecentChoices(clock)


def counted(choices: RecentChoices, namespace: str = "team-a") -> dict[str, Charge]:
    """Return what counts as used, by model."""
    return {model: usage.used for model, usage in choices.on_top_of({}, namespace).items()}


def test_nothing_is_chosen_at_first(choices: RecentChoices) -> None:
    assert choices.on_top_of(M40, "team-a") is M40


def test_what_was_chosen_counts_as_used_and_not_as_pending(choices: RecentChoices) -> None:
    choices.add("team-a", "M40", CARD)
    choices.add("team-a", "M40", SHARE)
    choices.add("team-a", "P100", CARD)
    before = dict(M40)
    assert choices.on_top_of(M40, "team-a") == {
        "M40": Usage(used=Charge(420, 512, 100), pending=Charge(100)),
        "P100": Usage(used=CARD, pending=Charge()),
    }
    assert before == M40


def test_models_that_were_not_chosen_stay(choices: RecentChoices) -> None:
    choices.add("team-a", "P100", CARD)
    assert choices.on_top_of(M40, "team-a")["M40"] is M40["M40"]


def test_namespaces_are_apart(choices: RecentChoices) -> None:
    choices.add("team-a", "M40", CARD)
    choices.release("team-b", "M40", CARD)
    assert (counted(choices, "team-a"), counted(choices, "team-b")) == ({"M40": CARD}, {})


def test_a_choice_is_forgotten_in_time(choices: RecentChoices, clock: Clock) -> None:
    choices.add("team-a", "M40", CARD)
    clock.now += CHOICE_SECONDS / 2
    choices.add("team-a", "M40", SHARE)
    clock.now += CHOICE_SECONDS / 2 - 0.01
    assert counted(choices) == {"M40": CARD + SHARE}
    clock.now += 0.01
    assert counted(choices) == {"M40": SHARE}
    clock.now += CHOICE_SECONDS
    assert choices.on_top_of(M40, "team-a") is M40


def test_what_is_charged_counts_no_more(choices: RecentChoices) -> None:
    for charge in (CARD, SHARE, CARD):
        choices.add("team-a", "M40", charge)
    choices.release("team-a", "M40", CARD)
    assert counted(choices) == {"M40": CARD + SHARE}
    choices.release("team-a", "M40", SHARE)
    assert counted(choices) == {"M40": CARD}
    choices.release("team-a", "M40", CARD)
    assert counted(choices) == {}


def test_the_oldest_of_those_alike_is_released(choices: RecentChoices, clock: Clock) -> None:
    """It would have been forgotten first; the younger one counts for its full time."""
    choices.add("team-a", "M40", CARD)
    clock.now += CHOICE_SECONDS / 2
    choices.add("team-a", "M40", CARD)
    choices.release("team-a", "M40", CARD)
    clock.now += CHOICE_SECONDS / 2
    assert counted(choices) == {"M40": CARD}


@pytest.mark.parametrize(("model", "charge"), [("P100", CARD), ("M40", SHARE)], ids=["model", "charge"])
def test_what_was_not_chosen_releases_nothing(choices: RecentChoices, model: str, charge: Charge) -> None:
    """Its model was chosen by another replica, or the choice has been forgotten."""
    choices.add("team-a", "M40", CARD)
    choices.release("team-a", model, charge)
    assert counted(choices) == {"M40": CARD}


CHOICES = st.tuples(
    st.sampled_from(["add", "release"]),
    st.sampled_from(["M40", "P100"]),
    st.sampled_from([CARD, SHARE]),
    st.sampled_from([0.0, 0.3, 1.0, CHOICE_SECONDS]),
)


@given(steps=st.lists(CHOICES, max_size=40))
def test_the_sums_are_those_of_the_choices(steps: list[tuple[str, str, Charge, float]]) -> None:
    """Beside a plain list of what counts."""
    clock = Clock()
    choices = RecentChoices(clock)
    model_of: list[tuple[float, str, Charge]] = []
    for action, model, charge, pause in steps:
        if action == "add":
            choices.add("team-a", model, charge)
            model_of.append((clock.now + CHOICE_SECONDS, model, charge))
        else:
            choices.release("team-a", model, charge)
            alike = [each for each in model_of if each[1:] == (model, charge)]
            if alike:
                model_of.remove(alike[0])
        clock.now += pause
        model_of = [each for each in model_of if each[0] > clock.now]
        for name in ("M40", "P100"):
            cores = sum(charge.cores for _, model, charge in model_of if model == name)
            assert counted(choices).get(name, Charge()).cores == cores
