"""The decision on one charge against one version of a namespace's ledger."""

from __future__ import annotations

import pytest

from vcuda.ledger.ledger import (
    MOST_PENDING,
    Admitted,
    Ledger,
    Pending,
    Refused,
    TooManyPending,
    admit,
    charges_by_model,
)
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Shortage, Usage

QUOTA = NamespaceQuota({"M40": Limit(800), "P100": Limit(0), "A100": Limit(200, 1000)})
CARD = Pending("M40", Charge(100, 0, 100))
SHARE = Pending("A100", Charge(20, 300))


def held(number: int, pending: Pending = CARD) -> Ledger:
    """Return a ledger with so many pending charges of this kind."""
    return Ledger(pending={f"uid-{index}": pending for index in range(number)})


def granted(ledger: Ledger, asked: Pending = CARD, uid: str = "new", *, enforced: bool = True) -> Admitted:
    decision = admit(ledger, uid, asked, QUOTA, enforced=enforced)
    assert isinstance(decision, Admitted)
    return decision


# Granted


def test_the_first_charge_is_kept_as_pending() -> None:
    decision = granted(Ledger())
    assert decision.ledger == Ledger(pending={"new": CARD})
    assert decision.usage == Usage(used=CARD.charge, pending=CARD.charge)
    assert (decision.limit, decision.shortage) == (Limit(800), None)


def test_nothing_else_in_the_ledger_changes() -> None:
    before = Ledger({"M40": Charge(300)}, "77", {"old": CARD})
    assert granted(before).ledger == Ledger({"M40": Charge(300)}, "77", {"old": CARD, "new": CARD})
    assert before.pending == {"old": CARD}, "the version that was decided against is left as it was"


def test_a_uid_is_charged_once() -> None:
    """The API server repeats calls; the second is granted too, from the same record."""
    once = granted(Ledger()).ledger
    assert granted(once).ledger is once


def test_a_uid_that_is_charged_is_granted_though_the_quota_is_full_by_now() -> None:
    full = held(8)
    assert granted(full, uid="uid-3").ledger is full
    assert granted(full, uid="uid-3").usage.used.cores == 800


def test_a_uid_that_is_charged_is_granted_though_the_ledger_is_crowded_by_now() -> None:
    crowded = held(MOST_PENDING, Pending("M40", Charge(1, 1)))
    assert granted(crowded, uid="uid-0").ledger is crowded


def test_committed_and_pending_count_alike() -> None:
    ledger = Ledger({"M40": Charge(500)}, pending={"a": CARD, "b": CARD})
    assert granted(ledger).usage.used == Charge(800, 0, 300)
    assert isinstance(admit(granted(ledger).ledger, "other", CARD, QUOTA, enforced=True), Refused)


def test_models_do_not_share_a_limit() -> None:
    assert granted(Ledger({"M40": Charge(800)}), SHARE).usage.used == SHARE.charge


# Refused


def refused(ledger: Ledger, asked: Pending) -> Shortage:
    decision = admit(ledger, "new", asked, QUOTA, enforced=True)
    assert isinstance(decision, Refused)
    return decision.shortage


@pytest.mark.parametrize(
    ("ledger", "asked", "limit"),
    [
        pytest.param(Ledger({"M40": Charge(701)}), CARD, Limit(800), id="one core over"),
        pytest.param(held(8), CARD, Limit(800), id="full of pending charges"),
        pytest.param(Ledger(), Pending("P100", Charge(1, 1)), Limit(0), id="blocked by 0"),
        pytest.param(Ledger(), Pending("V100", Charge(1, 1)), Limit(0), id="not listed"),
        pytest.param(held(3, SHARE), Pending("A100", Charge(1, 101)), Limit(200, 1000), id="memory"),
        pytest.param(Ledger({"M40": Charge(10_000)}), CARD, Limit(800), id="the limit was lowered below what is used"),
    ],
)
def test_refused_with_every_figure(ledger: Ledger, asked: Pending, limit: Limit) -> None:
    assert refused(ledger, asked) == Shortage(asked.model, asked.charge, ledger.usage(asked.model), limit)


def test_a_namespace_that_may_use_no_model() -> None:
    assert isinstance(admit(Ledger(), "new", CARD, NamespaceQuota({}), enforced=True), Refused)


def test_pending_and_committed_are_told_apart() -> None:
    ledger = Ledger({"M40": Charge(600)}, pending={"a": CARD, "b": CARD, "c": SHARE})
    assert refused(ledger, CARD).usage == Usage(used=Charge(800, 0, 200), pending=Charge(200, 0, 200))


# Not enforced


@pytest.mark.parametrize("model", ["M40", "P100", "V100"])
def test_over_a_quota_that_only_warns_is_charged_all_the_same(model: str) -> None:
    asked = Pending(model, Charge(900))
    decision = granted(Ledger(), asked, enforced=False)
    limit = QUOTA.limits.get(model, Limit(0))
    assert decision.ledger.pending == {"new": asked}
    assert decision.shortage == Shortage(model, asked.charge, Usage(), limit)
    assert decision.usage.used == asked.charge


def test_within_a_quota_that_only_warns_there_is_no_shortage() -> None:
    assert granted(Ledger(), enforced=False).shortage is None


# Crowded


@pytest.mark.parametrize("enforced", [True, False])
def test_a_namespace_has_at_most_512_pending_charges(enforced: bool) -> None:
    least = Pending("M40", Charge(1, 1))
    last = granted(held(511, least), least, enforced=enforced).ledger
    assert len(last.pending) == 512
    assert admit(last, "one-more", least, QUOTA, enforced=enforced) == TooManyPending()


def test_over_quota_is_said_before_crowded() -> None:
    """Coming again would not help."""
    assert isinstance(admit(held(512), "new", CARD, QUOTA, enforced=True), Refused)


# Usage


def test_usage_of_every_charged_model() -> None:
    ledger = Ledger({"P100": Charge(50, 10), "M40": Charge(100)}, pending={"a": CARD, "b": SHARE, "c": SHARE})
    assert ledger.usages() == {
        "A100": Usage(used=Charge(40, 600), pending=Charge(40, 600)),
        "M40": Usage(used=Charge(200, 0, 100), pending=Charge(100, 0, 100)),
        "P100": Usage(used=Charge(50, 10), pending=Charge()),
    }
    assert list(ledger.usages()) == ["A100", "M40", "P100"]
    for model, usage in ledger.usages().items():
        assert ledger.usage(model) == usage


def test_an_empty_ledger_uses_nothing() -> None:
    assert Ledger().usages() == {}
    assert Ledger().usage("M40") == Usage()


@pytest.mark.parametrize(
    ("limit", "used", "nearly"),
    [
        pytest.param(Limit(800), Charge(719), False, id="below nine tenths of the cores"),
        pytest.param(Limit(800), Charge(720), True, id="nine tenths of the cores"),
        pytest.param(Limit(800), Charge(800), True, id="all cores"),
        pytest.param(Limit(70), Charge(63), True, id="nine tenths of a share"),
        pytest.param(Limit(70), Charge(62), False, id="below nine tenths of a share"),
        pytest.param(Limit(800, 1000), Charge(10, 899), False, id="below nine tenths of the memory"),
        pytest.param(Limit(800, 1000), Charge(10, 900), True, id="nine tenths of the memory"),
        pytest.param(Limit(800, 1000), Charge(10, 0, 720), True, id="nine tenths of the cards' memory"),
        pytest.param(Limit(800), Charge(10, 10**6, 800), False, id="memory is not limited"),
    ],
)
def test_nearly_full(limit: Limit, used: Charge, nearly: bool) -> None:
    assert Admitted(Ledger(), Usage(used), limit).nearly_full is nearly


def test_nearly_full_counts_the_charge_that_was_granted() -> None:
    assert not granted(Ledger({"M40": Charge(600)})).nearly_full
    assert granted(Ledger({"M40": Charge(700)})).nearly_full


# Sums


def test_charges_are_summed_by_model() -> None:
    stored = [("M40", Charge(100, 0, 100)), ("A100", Charge(20, 300)), ("M40", Charge(50, 256))]
    assert charges_by_model(stored) == {"M40": Charge(150, 256, 100), "A100": Charge(20, 300)}
    assert charges_by_model([]) == {}
