"""Tests of ledgers in memory, and of the list of models that /mutate has recently chosen."""

import asyncio
from fractions import Fraction

import msgspec
import pytest
from hypothesis import example, given, settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.replicas import Clock
from vcuda.ledger.ledger import Admitted, Rejected
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota, Usage
from webhook.ledger.ledgers import CHOICE_SECONDS, ChargeRequest, Decision, MemoryLedgers, RecentChoices

MODELS = ("M40", "P100")
CHARGES = st.builds(Charge, st.integers(1, 300), st.integers(0, 2000), st.integers(0, 300))
LIMITS = st.builds(Limit, st.integers(0, 1000), st.none() | st.integers(1, 5000))
QUOTAS = st.builds(NamespaceQuota, st.dictionaries(st.sampled_from(MODELS), LIMITS), mode=st.sampled_from(Mode))
ROOMY = NamespaceQuota(dict.fromkeys(MODELS, Limit(1000)))


def total(charges: list[Charge]) -> Charge:
    """Return the sum of the charges. It is computed without the code under test."""
    return Charge(
        sum(charge.cores for charge in charges),
        sum(charge.memory for charge in charges),
        sum(charge.card_memory for charge in charges),
    )


def within(charge: Charge, limit: Limit | None) -> bool:
    """Return whether the sum of all charges is within the limit, in exact arithmetic. A missing limit counts as 0."""
    limit = limit or Limit(0)
    if limit.memory is None:
        return charge.cores <= limit.most_cores
    cards = Fraction(charge.card_memory * limit.memory, limit.cores) if limit.cores else 0
    return charge.cores <= limit.most_cores and charge.memory + cards <= limit.memory


class Admissions(RuleBasedStateMachine):
    """Makes calls for one namespace in any order. After each call, the ledger must charge exactly the admitted pods."""

    demands = Bundle[ChargeRequest]("demands")

    def __init__(self) -> None:
        super().__init__()
        self.ledgers = MemoryLedgers()
        self.quota = ROOMY
        self.admitted: dict[str, ChargeRequest] = {}
        self.numbered = 0

    def decide(self, demand: ChargeRequest) -> Decision:
        return asyncio.run(self.ledgers.charge(demand))

    def taken(self, model: str) -> list[Charge]:
        return [demand.charge for demand in self.admitted.values() if demand.model == model]

    def put(self, demand: ChargeRequest) -> None:
        """Decide a request. An enforced quota must admit it only if it fits. Any other quota must admit it."""
        limit = demand.quota.limits.get(demand.model)
        fits = within(total([*self.taken(demand.model), demand.charge]), limit)
        decision = self.decide(demand)
        if isinstance(decision, Admitted):
            assert fits or (demand.quota.mode is not Mode.ENFORCE and decision.shortage)
            if not demand.dry_run:
                self.admitted[demand.uid] = demand
        else:
            assert isinstance(decision, Rejected)
            assert demand.quota.mode is Mode.ENFORCE
            assert not fits

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
        """Repeat a request. An admitted pod must be admitted again. A rejected request is decided again."""
        if demand.uid in self.admitted:
            assert isinstance(self.decide(demand), Admitted)
        else:
            self.put(msgspec.structs.replace(demand, quota=self.quota))

    @invariant()
    def every_admitted_uid_is_charged_once(self) -> None:
        usages = asyncio.run(self.ledgers.usage("team-a"))
        assert {model: usages.get(model, Usage()).used for model in MODELS} == {
            model: total(self.taken(model)) for model in MODELS
        }
        assert asyncio.run(self.ledgers.usage("team-b")) == {}


def test_never_more_than_the_limit_in_force_at_admission() -> None:
    run_state_machine_as_test(Admissions, settings=settings(max_examples=150, stateful_step_count=30))


CARD = Charge(100, 0, 100)
SHARE = Charge(20, 512)
M40 = {"M40": Usage(used=Charge(300), pending=Charge(100))}


@pytest.fixture
def choices(clock: Clock) -> RecentChoices:
    return RecentChoices(clock.monotonic)


def counted(choices: RecentChoices, namespace: str = "team-a") -> dict[str, Charge]:
    return {model: usage.used for model, usage in choices.on_top_of({}, namespace).items()}


def test_a_chosen_model_counts_as_used_and_not_as_pending(choices: RecentChoices) -> None:
    assert choices.on_top_of(M40, "team-a") is M40
    for model, charge in (("M40", CARD), ("M40", SHARE), ("P100", CARD)):
        choices.add("team-a", model, charge)
    before = dict(M40)
    assert choices.on_top_of(M40, "team-a") == {
        "M40": Usage(used=Charge(420, 512, 100), pending=Charge(100)),
        "P100": Usage(used=CARD, pending=Charge()),
    }
    assert before == M40


def test_namespaces_have_separate_choices(choices: RecentChoices) -> None:
    choices.add("team-a", "M40", CARD)
    choices.release("team-b", "M40", CARD)
    assert (counted(choices, "team-a"), counted(choices, "team-b")) == ({"M40": CARD}, {})


def test_a_choice_expires(choices: RecentChoices, clock: Clock) -> None:
    choices.add("team-a", "M40", CARD)
    clock.now += CHOICE_SECONDS / 2
    choices.add("team-a", "M40", SHARE)
    clock.now += CHOICE_SECONDS / 2 - 0.01
    assert counted(choices) == {"M40": CARD + SHARE}
    clock.now += 0.01
    assert counted(choices) == {"M40": SHARE}
    clock.now += CHOICE_SECONDS
    assert choices.on_top_of(M40, "team-a") is M40


CHOICES = st.tuples(
    st.sampled_from(["add", "release"]),
    st.sampled_from(MODELS),
    st.sampled_from([CARD, SHARE]),
    st.sampled_from([0.0, 0.3, 1.0, CHOICE_SECONDS]),
)


@given(steps=st.lists(CHOICES, max_size=40))
@example([("add", "M40", CARD, 1.0), ("add", "M40", CARD, 0.0), ("release", "M40", CARD, 1.0)])
@example([("add", "M40", CARD, 0.0), ("release", "P100", CARD, 0.0), ("release", "M40", SHARE, 0.0)])
def test_a_charge_removes_the_oldest_equal_choice(
    steps: list[tuple[str, str, Charge, float]],
) -> None:
    """The recorded choices must equal those in a plain list. Releasing a missing or expired choice has no effect."""
    clock = Clock()
    choices = RecentChoices(clock.monotonic)
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
        expected = {name: total([charge for _, model, charge in model_of if model == name]) for name in MODELS}
        assert counted(choices) == {name: charge for name, charge in expected.items() if charge != Charge()}
