"""Tests of the ages by which the leader releases charges: each rule about time in docs/ledger.md has a test here."""

import pytest

from controller.recount.charge_ages import ChargeAges, Overdue, RecountTiming, Watch
from tests.tables import cases
from vcuda.ledger.ledger import (
    MARGIN_SECONDS,
    RESERVATION_SECONDS,
    UNSEEN_SECONDS,
    Ledger,
    Pending,
    Reservation,
    Terminating,
)
from vcuda.quota.model import Charge
from vcuda.quota.well_known import MAX_TERMINATING_SECONDS, STORABLE_SECONDS

TEAM = "team-a"
WATCH = Watch("1", "1", began=0.0)
CARD = Charge(100, 0, 100)
PENDING = Ledger(pending={"a": Pending("M40", CARD)})


@pytest.fixture
def ages() -> ChargeAges:
    return ChargeAges(RecountTiming())


def reserved(counter: int) -> Ledger:
    return Ledger(reserved={"replica": Reservation({"M40": CARD}, counter)})


def test_a_pending_charge_expires_when_its_pod_can_no_longer_be_stored(ages: ChargeAges) -> None:
    """The age of a charge counts from the first time that the leader saw it, and does not restart later."""
    assert ages.pending(TEAM, PENDING, WATCH, 100.0) == Overdue(next_in=STORABLE_SECONDS)
    assert ages.pending(TEAM, PENDING, WATCH, 100.0 + STORABLE_SECONDS - 1) == Overdue(next_in=1.0)
    assert ages.pending(TEAM, PENDING, WATCH, 100.0 + STORABLE_SECONDS) == Overdue({"a"})


@cases(
    "counter, watch_began, began",
    never_renewed=(1, 0, 0),
    renewed=(2, 0, 50),
    a_later_watch=(1, 60, 60 - RESERVATION_SECONDS),
)
def test_a_reservation_expires_after_its_lease_the_storable_time_and_the_margin(
    ages: ChargeAges, counter: int, watch_began: float, began: float
) -> None:
    """The lease counts from the reservation's last renewal. The storable time starts with the watch, or later."""
    watch = Watch("1", "1", watch_began)
    ages.reservations(TEAM, reserved(1), watch, 0.0)
    ages.reservations(TEAM, reserved(counter), watch, 50.0)
    end = began + RESERVATION_SECONDS + STORABLE_SECONDS + MARGIN_SECONDS
    assert ages.reservations(TEAM, reserved(counter), watch, end - 1) == Overdue(next_in=1.0)
    assert ages.reservations(TEAM, reserved(counter), watch, end) == Overdue({"replica"})


@pytest.mark.parametrize(("grace", "seconds"), [(40, 40), (10**6, MAX_TERMINATING_SECONDS)])
def test_a_terminating_charge_expires_after_its_time_and_the_longest_time(
    ages: ChargeAges, grace: int, seconds: float
) -> None:
    ledger = Ledger(terminating={"a": Terminating("M40", CARD, grace)})
    ages.terminating(TEAM, ledger, 100.0)
    assert ages.terminating(TEAM, ledger, 100.0 + seconds - 1) == Overdue(next_in=1.0)
    assert ages.terminating(TEAM, ledger, 100.0 + seconds) == Overdue({"a"})


@cases(
    "written, claim_grace, seconds",
    the_watch_began_before_the_charge=(True, 0, 0),
    the_charge_may_be_older_than_the_watch=(False, 0, UNSEEN_SECONDS),
    its_pod_may_use_a_claim=(False, 90, 90),
    never_longer_than_the_longest_time=(False, 10**6, MAX_TERMINATING_SECONDS),
)
def test_a_pod_that_may_be_older_than_the_watch_may_run_unseen_for_its_grace_period(
    ages: ChargeAges, written: bool, claim_grace: int, seconds: int
) -> None:
    """A charge is newer than the watch if the leader, since the watch began, has written the ledger without it."""
    ledger = Ledger(pending=PENDING.pending, claim_grace=claim_grace)
    if written:
        ages.written(TEAM, WATCH)
    ages.pending(TEAM, ledger, WATCH, 0.0)
    assert ages.seconds_unseen(TEAM, ledger, "a", WATCH, 0.0) == seconds
    assert ages.seconds_unseen(TEAM, ledger, "a", Watch("2", "1", began=0.0), 0.0) >= UNSEEN_SECONDS
