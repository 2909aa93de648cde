"""Tests of reservations (quota that a replica holds in advance): what they admit, their size, and their writes.

Each rule of reservations in docs/ledger.md has a test here that fails without it.
"""

import math
from collections.abc import Sequence

import pytest

from tests.tables import cases
from vcuda.ledger.ledger import RESERVATION_SECONDS, Ledger, Pending, Reservation
from vcuda.quota.model import Charge, Limit, NamespaceQuota
from webhook.ledger.reservations import (
    CREATED_SECONDS,
    GIVE_WAY_SECONDS,
    MAX_SPENT,
    MAX_WRITE_SECONDS,
    MIN_CHARGES,
    WRITE_SECONDS,
    Demand,
    ReplicaReservation,
    plan_reservation,
)

CARD = Charge(100, 0, 100)
SHARE = Charge(10, 1024)


def cards(number: int) -> Charge:
    return Charge(100 * number, 0, 100 * number)


def demand(seconds: float = 2.0, **charges: Sequence[Charge]) -> Demand:
    """Return a demand for V100: a charge ``seconds`` ago, another one halfway, and the charges in ``charges`` now."""
    now = 0.0
    demand = Demand(lambda: now)
    demand.add("first", "V100", CARD)
    now = seconds / 2
    demand.add("second", "V100", CARD)
    now = seconds
    for model, each in charges.items():
        for number, charge in enumerate(each):
            demand.add(f"{model}-{number}", model, charge)
    return demand


# Tests of what a reservation admits


def reserving(number: int) -> tuple[ReplicaReservation, Ledger]:
    """Return a lease whose reservation of ``number`` cards was written, and the ledger with this reservation."""
    lease = ReplicaReservation(lambda: 0.0)
    ledger = lease.send(Ledger(), {"M40": cards(number)})
    lease.confirmed(answered=0.0)
    return lease, ledger


def admitted(lease: ReplicaReservation, *uids: str) -> list[str]:
    """Return the uids that the reservation admits, in the order of ``uids``. Each is charged one card."""
    return [uid for uid in uids if lease.spend(uid, Pending("M40", CARD), created=0.0)]


@pytest.mark.parametrize(("seconds", "uids"), [(RESERVATION_SECONDS, ["a"]), (RESERVATION_SECONDS + 0.1, [])])
def test_a_reservation_admits_until_ten_seconds_after_its_write_was_sent(seconds: float, uids: list[str]) -> None:
    """The answer to the write arrives two seconds later, which does not extend the ten seconds."""
    now = 0.0
    lease = ReplicaReservation(lambda: now)
    lease.send(Ledger(), {"M40": cards(10)})
    now = 2.0
    lease.confirmed(answered=0.0)
    now = seconds
    assert admitted(lease, "a") == uids


def test_a_reservation_admits_no_more_than_it_holds_and_each_uid_once() -> None:
    lease, _ = reserving(2)
    assert admitted(lease, "a", "a", "b", "c", "a") == ["a", "a", "b", "a"]


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_during_a_write_the_smaller_of_the_old_and_the_new_reservation_admits(before: int, after: int) -> None:
    """The API server may store the write or lose it."""
    lease, ledger = reserving(before)
    lease.send(lease.flushed(ledger), {"M40": cards(after)})
    assert admitted(lease, "a", "b", "c") == ["a", "b"]


def test_a_write_makes_admitted_charges_pending_and_keeps_other_reservations() -> None:
    lease, ledger = reserving(4)
    admitted(lease, "a")
    other = Reservation({"M40": cards(3)}, 1)
    stored = Ledger(pending={"b": Pending("M40", SHARE)}, reserved={**ledger.reserved, "other": other})
    pending = {"a": Pending("M40", CARD), "b": Pending("M40", SHARE)}
    assert lease.flushed(stored) == Ledger(pending=pending, reserved={"other": other})


def test_charges_admitted_during_a_write_use_up_the_next_reservation_and_are_in_the_next_write() -> None:
    lease, ledger = reserving(4)
    admitted(lease, "a")
    lease.send(lease.flushed(ledger), {"M40": cards(2)})
    admitted(lease, "b")
    lease.confirmed(answered=0.0)
    assert list(lease.spent) == ["b"]
    assert admitted(lease, "c", "d") == ["c"]


@cases("stored, unwritten, uids", stored=(True, [], []), not_stored=(False, ["a"], ["b"]))
def test_the_counter_shows_whether_a_write_without_an_answer_was_stored(
    stored: bool, unwritten: list[str], uids: list[str]
) -> None:
    """If the write was stored, its time is unknown. So the replica admits nothing before its next confirmed write."""
    lease, old = reserving(4)
    admitted(lease, "a")
    new = lease.send(lease.flushed(old), {"M40": cards(4)})
    lease.observe(new if stored else old)
    assert list(lease.spent) == unwritten
    assert admitted(lease, "b") == uids


def test_a_replica_whose_reservation_was_removed_admits_nothing_and_forgets_its_charges() -> None:
    """The process that removed the reservation has counted the charges that the replica admitted from it."""
    lease, _ = reserving(4)
    admitted(lease, "a")
    lease.observe(Ledger())
    assert (lease.active, admitted(lease, "a", "b")) == (False, [])


def test_a_reservation_admits_only_by_the_quota_that_sized_it() -> None:
    lease = ReplicaReservation(lambda: 0.0)
    lease.send(Ledger(), {"M40": cards(4)}, "old")
    lease.confirmed(answered=0.0)
    assert (lease.is_by("old"), lease.is_by("new")) == (True, False)
    lease.send(Ledger(), {"M40": cards(4)}, "new")
    assert (lease.is_by("old"), lease.is_by("new")) == (False, False), "the write has no answer yet"


def test_each_start_of_a_replica_has_a_reservation_of_its_own() -> None:
    assert len({ReplicaReservation().replica for _ in range(3)}) == 3


def test_a_new_waiting_mark_makes_a_replica_give_way_for_two_seconds() -> None:
    now = 0.0
    lease = ReplicaReservation(lambda: now)
    for waiting, gives_way in (("first", False), ("first", False), ("second", True)):
        lease.observe(Ledger(waiting=waiting))
        assert lease.gives_way is gives_way
    now = GIVE_WAY_SECONDS
    assert not lease.gives_way


# Tests of the size of a reservation


@cases(
    "limit, used, other_replicas, charges, reserved",
    five_seconds_of_the_demand=(1000, 0, 0, 12, 30),
    little_demand_nothing=(1000, 0, 0, MIN_CHARGES - 3, 0),
    at_most_a_tenth_of_the_room=(100, 40, 0, 12, 6),
    at_most_a_quarter_with_the_other_replicas=(100, 40, 3, 12, 3),
    room_for_20_is_enough=(60, 40, 0, 12, 2),
    near_the_limit_nothing=(60, 41, 0, 12, 0),
    over_a_lowered_limit_nothing=(60, 80, 0, 12, 0),
)
def test_a_reservation_is_the_demand_of_five_seconds_within_a_part_of_the_room(
    limit: int, used: int, other_replicas: int, charges: int, reserved: int
) -> None:
    others = {str(number): Reservation({}, 1) for number in range(other_replicas)}
    ledger = Ledger({"M40": cards(used)}, reserved=others)
    quota = NamespaceQuota({"M40": Limit(100 * limit)})
    wanted = {"M40": cards(reserved)} if reserved else {}
    assert plan_reservation(ledger, quota, demand(M40=[CARD] * charges)).charges == wanted


def test_quota_that_other_replicas_reserve_is_not_free() -> None:
    others = {"other": Reservation({"M40": cards(85)}, 1)}
    quota = NamespaceQuota({"M40": Limit(10_000)})
    assert plan_reservation(Ledger(reserved=others), quota, demand(M40=[CARD] * 12)).charges == {}


@pytest.mark.parametrize(("seconds", "reserved"), [(2.0, 30), (1.5, 40), (0.1, 600), (0.0, 600)])
def test_demand_that_has_just_begun_is_a_rate_too(seconds: float, reserved: int) -> None:
    """At the start of a burst, a replica would reserve far too little if it did not extrapolate a short demand."""
    quota = NamespaceQuota({"M40": Limit(1_000_000)})
    assert plan_reservation(Ledger(), quota, demand(seconds, M40=[CARD] * 12)).charges == {"M40": cards(reserved)}


def test_a_model_with_little_demand_is_reserved_together_with_others() -> None:
    """The pods of a namespace are spread over its models. For each model alone, a replica would get too few pods."""
    quota = NamespaceQuota({"M40": Limit(100_000), "P100": Limit(100_000)})
    reserved = plan_reservation(Ledger(), quota, demand(M40=[CARD] * 12, P100=[CARD])).charges
    assert reserved == {"M40": cards(30), "P100": cards(MIN_CHARGES)}


def test_a_replica_reserves_with_its_first_charge_if_others_have_charges_pending() -> None:
    """If only its own charges counted, each of many replicas would write four times before its first reservation."""
    own, limits = Demand(lambda: 0.0), NamespaceQuota({"M40": Limit(100_000)})
    own.add("own", "M40", CARD)
    others = {str(number): Pending("M40", CARD) for number in range(MIN_CHARGES - 1)}
    assert plan_reservation(Ledger(pending={**others, "own": Pending("M40", CARD)}), limits, own).charges == {
        "M40": cards(50)
    }
    assert plan_reservation(Ledger(pending=others), limits, own).charges == {}


def test_a_charge_that_is_decided_again_is_demand_once() -> None:
    now = 0.0
    again = Demand(lambda: now)
    for _ in range(3):
        again.add("a", "M40", CARD)
    assert again.recent() == {"M40": (1, CARD)}
    now = 4.0
    assert again.recent() == {}
    again.add("a", "M40", CARD)
    assert again.recent() == {"M40": (1, CARD)}


def test_memory_is_room_too_and_a_model_without_a_quota_has_none() -> None:
    quota = NamespaceQuota({"M40": Limit(10_000, 40 * 1024)})
    recent = demand(M40=[SHARE] * 40, P100=[SHARE] * 40)
    assert plan_reservation(Ledger(), quota, recent).charges == {"M40": Charge(40, 4 * 1024)}


def test_demand_is_the_charges_of_the_last_four_seconds() -> None:
    now = 0.0
    demand = Demand(lambda: now)
    demand.add("a", "M40", CARD)
    now = 3.5
    demand.add("b", "M40", SHARE)
    demand.add("c", "P100", SHARE)
    assert demand.recent() == {"M40": (2, CARD + SHARE), "P100": (1, SHARE)}
    now = 4.0
    assert demand.recent() == {"M40": (1, SHARE), "P100": (1, SHARE)}
    now = 7.5
    assert demand.recent() == {}


@cases(
    "reserved, spent, seconds, due",
    few_new_charges=(400, 1, 0.5, False),
    a_second_after_the_last_write=(400, 1, WRITE_SECONDS, True),
    without_new_charges_to_read_the_mark_of_waiting_replicas=(400, 0, WRITE_SECONDS, True),
    more_than_a_quarter_is_left=(10, 7, 0.5, False),
    less_than_a_quarter_is_left=(10, 8, 0.5, True),
    many_new_charges=(400, MAX_SPENT, 0.5, True),
)
def test_admitted_charges_are_written_when_a_write_is_due(
    reserved: int, spent: int, seconds: float, *, due: bool
) -> None:
    now = 0.0
    reservation = ReplicaReservation(lambda: now)
    reservation.send(Ledger(), {"M40": cards(reserved)})
    reservation.confirmed(answered=0.0)
    assert all(reservation.spend(str(number), Pending("M40", CARD), created=0.0) for number in range(spent))
    now = seconds
    assert reservation.is_due is due


@cases(
    "room, replicas, seconds",
    enough_for_a_long_time=(10_000, 3, MAX_WRITE_SECONDS),
    enough_for_16_s=(96, 1, 2.0),
    enough_for_8_s_with_two_replicas=(96, 2, WRITE_SECONDS),
    for_none=(0, 1, WRITE_SECONDS),
)
def test_the_sooner_the_room_is_used_up_the_sooner_is_the_write(room: int, replicas: int, seconds: float) -> None:
    """The demand is six cards a second. ``room``: the free cards. ``seconds``: the time until the next write."""
    others = {str(number): Reservation({}, 1) for number in range(replicas - 1)}
    ledger = Ledger({"M40": cards(100)}, reserved=others)
    quota = NamespaceQuota({"M40": Limit(100 * (100 + room))})
    assert plan_reservation(ledger, quota, demand(M40=[CARD] * 12)).next_seconds == seconds


def test_a_write_is_due_after_the_seconds_that_it_was_sent_with() -> None:
    now = 0.0
    reservation = ReplicaReservation(lambda: now)
    reservation.send(Ledger(), {"M40": cards(400)}, next_seconds=MAX_WRITE_SECONDS)
    reservation.confirmed(answered=0.0)
    now = MAX_WRITE_SECONDS - 0.1
    assert not reservation.is_due
    now = MAX_WRITE_SECONDS
    assert reservation.is_due


def test_without_the_time_of_creation_or_of_the_answer_nothing_is_admitted_from_a_reservation() -> None:
    for answered, created in ((-math.inf, 0.0), (0.0, math.inf)):
        reservation = ReplicaReservation(lambda: 0.0)
        reservation.send(Ledger(), {"M40": cards(10)})
        reservation.confirmed(answered)
        assert not reservation.spend("uid", Pending("M40", CARD), created)


@pytest.mark.parametrize(("seconds", "spent"), [(CREATED_SECONDS, True), (CREATED_SECONDS + 1, False)])
def test_an_object_created_too_long_after_the_last_write_is_not_admitted_from_a_reservation(
    seconds: int, *, spent: bool
) -> None:
    """The API server's clock gives both times. A large difference means that this machine was suspended."""
    reservation = ReplicaReservation(lambda: 0.0)
    reservation.send(Ledger(), {"M40": cards(10)})
    reservation.confirmed(answered=1_000_000.0)
    assert reservation.spend("uid", Pending("M40", CARD), created=1_000_000.0 + seconds) is spent
