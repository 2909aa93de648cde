"""Tests of ledgers in memory, and of the list of models that /mutate has recently chosen."""

import asyncio
import math

import pytest
from hypothesis import example, given, strategies as st

from tests.replicas import Clock
from tests.tables import cases
from vcuda.ledger.ledger import Admitted
from vcuda.quota.membership import Members
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Team, Usage, total
from webhook.caches import CHOICE_SECONDS, RecentChoices
from webhook.ledger.charging import ChargeRequest
from webhook.ledger.ledgers import MemoryLedgers

CARD = Charge(100, 0, 100)
SHARE = Charge(20, 512)
M40 = {"M40": Usage(used=Charge(300), pending=Charge(100))}


def test_ledgers_in_memory_admit_up_to_the_limit_and_charge_each_uid_once() -> None:
    ledgers, quota = MemoryLedgers(), NamespaceQuota({"M40": Limit(200)})

    def admits(uid: str, *, dry_run: bool = False) -> bool:
        request = ChargeRequest("team-a", uid, "M40", CARD, quota, math.inf, dry_run=dry_run)
        return isinstance(asyncio.run(ledgers.charge(request)), Admitted)

    assert admits("c", dry_run=True)
    assert [admits(uid) for uid in "aabcb"] == [True, True, True, False, True]
    assert asyncio.run(ledgers.usage("team-a"))["M40"].used == CARD + CARD
    assert asyncio.run(ledgers.usage("team-b")) == {}


class Memory:
    """Ledgers in memory with a team of the namespaces a and b, and a namespace c without a team.

    The team may use four M40, but only five cards of M40 and T4 together.
    """

    TEAM = Team("vision", {"M40": Limit(400), "T4": Limit(400)}, Limit(500))

    def __init__(self, committed: dict[str, dict[str, Charge]] | None = None) -> None:
        self.ledgers, self.uid = MemoryLedgers(committed or {}, Members({"vision": ("a", "b")})), 0

    def create(self, namespace: str, cards: int, model: str = "M40", *, dry_run: bool = False) -> bool:
        self.uid += 1
        team = None if namespace == "c" else self.TEAM
        quota = NamespaceQuota({"M40": Limit(400), "T4": Limit(400)}, total=team.total if team else None, team=team)
        charge = Charge(100 * cards, 0, 100 * cards)
        request = ChargeRequest(namespace, str(self.uid), model, charge, quota, math.inf, dry_run=dry_run)
        return isinstance(asyncio.run(self.ledgers.charge(request)), Admitted)


@cases(
    "committed, created, admitted",
    within_the_team=({}, [("a", 2, "M40"), ("b", 2, "M40")], [True, True]),
    beyond_the_team=({}, [("a", 3, "M40"), ("b", 2, "M40"), ("b", 1, "M40")], [True, False, True]),
    beyond_the_total=({}, [("a", 3, "M40"), ("b", 3, "T4"), ("b", 2, "T4")], [True, False, True]),
    another_namespace=({}, [("a", 4, "M40"), ("c", 4, "M40")], [True, True]),
    stored_before=({"b": {"M40": Charge(300)}}, [("a", 2, "M40"), ("a", 1, "M40")], [False, True]),
    stored_elsewhere=({"c": {"M40": Charge(300)}}, [("a", 2, "M40")], [True]),
)
def test_ledgers_in_memory_hold_the_limits_of_a_team(
    committed: dict[str, dict[str, Charge]], created: list[tuple[str, int, str]], admitted: list[bool]
) -> None:
    memory = Memory(committed)
    assert [memory.create(*each) for each in created] == admitted


def test_the_usage_in_memory_has_what_other_members_use() -> None:
    memory = Memory()
    assert memory.create("a", 2)
    assert not memory.create("b", 3, dry_run=True)
    usage = asyncio.run(memory.ledgers.usage("b"))
    assert usage == {"M40": Usage(others=Charge(200, 0, 200))}
    assert asyncio.run(memory.ledgers.usage("c")) == {}


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
    st.sampled_from(["M40", "P100"]),
    st.sampled_from([CARD, SHARE]),
    st.sampled_from([0.0, 0.3, 1.0, CHOICE_SECONDS]),
)


@given(steps=st.lists(CHOICES, max_size=40))
@example([("add", "M40", CARD, 1.0), ("add", "M40", CARD, 0.0), ("release", "M40", CARD, 1.0)])
@example([("add", "M40", CARD, 0.0), ("release", "P100", CARD, 0.0), ("release", "M40", SHARE, 0.0)])
def test_a_charge_removes_the_oldest_equal_choice(
    steps: list[tuple[str, str, Charge, float]],
) -> None:
    """The recorded choices must equal those in a plain list. Releasing a missing or expired choice does nothing."""
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
        expected = {name: total([charge for _, model, charge in model_of if model == name]) for name in ("M40", "P100")}
        assert counted(choices) == {name: charge for name, charge in expected.items() if charge != Charge()}
