"""Tests that each rule for reservations is needed: if a test breaks the rule in the code, a scenario must fail."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import pytest

from controller.recount import charge_ages, recounter
from controller.recount.charge_ages import ChargeAges, Overdue, RecountTiming
from tests import reservation_scenarios as scenarios
from tests.reservation_world import ReservationWorld
from vcuda.errors import Conflict, Unavailable
from vcuda.kube import LedgerStore, Stored
from vcuda.kube.ledger_marks import LedgerMarks
from vcuda.ledger.ledger import RESERVATION_SECONDS, Ledger, Pending, Reservation
from vcuda.ledger.recount import ObservedPods, recount
from vcuda.quota.model import Charge, NamespaceQuota, Usage
from vcuda.quota.well_known import STORABLE_SECONDS
from webhook.ledger import reservations as own_reservations
from webhook.ledger.reservations import Demand, Plan, ReplicaReservation, plan_reservation


@pytest.mark.parametrize("scenario", scenarios.ALL, ids=lambda scenario: scenario.__name__)
def test_nothing_admits_too_much_and_nothing_stays_charged(scenario: scenarios.Scenario) -> None:
    scenarios.play(scenario, ReservationWorld())


# Each of these functions breaks the rule that `MUTANTS` has for it. The scenarios must detect this.

spend, send, confirmed = ReplicaReservation.spend, ReplicaReservation.send, ReplicaReservation.confirmed
observe, flushed, start = ReplicaReservation.observe, ReplicaReservation.flushed, ReplicaReservation.__init__


def spent_without_room(reservation: ReplicaReservation, uid: str, asked: Pending, created: float) -> bool:
    reservation._left[asked.model] = asked.charge
    return spend(reservation, uid, asked, created)


def counted_from_the_answer(reservation: ReplicaReservation, answered: float) -> None:
    confirmed(reservation, answered)
    reservation._until = reservation._clock() + RESERVATION_SECONDS


def sent_with_the_next(
    reservation: ReplicaReservation, ledger: Ledger, charges: Mapping[str, Charge], *terms: Any
) -> Ledger:
    sent = send(reservation, ledger, charges, *terms)
    reservation._left = {model: charges.get(model, Charge()) for model in reservation._left}
    return sent


def sent_with_the_old(
    reservation: ReplicaReservation, ledger: Ledger, charges: Mapping[str, Charge], *terms: Any
) -> Ledger:
    left = {**reservation._left}
    sent = send(reservation, ledger, charges, *terms)
    reservation._left = left
    return sent


def flushed_without_spent(reservation: ReplicaReservation, ledger: Ledger) -> Ledger:
    return msgspec.structs.replace(flushed(reservation, ledger), pending=ledger.pending)


def confirmed_without_later_charges(reservation: ReplicaReservation, answered: float) -> None:
    reservation.spent = {}
    confirmed(reservation, answered)


def undiminished(reservation: ReplicaReservation) -> dict[str, Charge]:
    return {**reservation._reserved}


def blind_to_its_removal(reservation: ReplicaReservation, ledger: Ledger) -> None:
    missing = {} if reservation.replica in ledger.reserved else {reservation.replica: Reservation({}, -1)}
    observe(reservation, msgspec.structs.replace(ledger, reserved={**ledger.reserved, **missing}))


def started_as_the_same(reservation: ReplicaReservation, *clock: Any) -> None:
    start(reservation, *clock)
    reservation.replica = "the same"


def planned_without_others(ledger: Ledger, quota: NamespaceQuota, demand: Demand, _others: object) -> Plan:
    return plan_reservation(msgspec.structs.replace(ledger, reserved={}), quota, demand)


write = LedgerStore.write


def failed_if_unanswered(store: LedgerStore, *ledger: Any) -> Stored:
    try:
        return write(store, *ledger)
    except Unavailable as error:
        raise Conflict(409, "the write has failed") from error


def written_without_mark(
    store: LedgerStore, namespace: str, ledger: Ledger, replaced: Stored, *timeout: float
) -> Stored:
    unmarked = msgspec.structs.replace(ledger, waiting=replaced.ledger.waiting)
    return write(store, namespace, unmarked, replaced, *timeout)


def recounted_without_seen(ledger: Ledger, observed: ObservedPods, *expired: Any, **since: Any) -> Ledger:
    return recount(ledger, msgspec.structs.replace(observed, seen=()), *expired, **since)


reservations = ChargeAges.reservations


def reservations_as(**changed: float) -> Callable[..., Overdue]:
    """Return a version of `ChargeAges.reservations` that sees these values in each reservation."""

    def expired(ages: ChargeAges, namespace: str, ledger: Ledger, *now: Any) -> Overdue:
        reserved = {replica: msgspec.structs.replace(each, **changed) for replica, each in ledger.reserved.items()}
        return reservations(ages, namespace, msgspec.structs.replace(ledger, reserved=reserved), *now)

    return expired


check_lost = LedgerMarks.check_lost


def lost_without_lease(marks: LedgerMarks, namespace: str, lost: Reservation) -> None:
    check_lost(marks, namespace, msgspec.structs.replace(lost, seconds=0))


def uncounted(*_: object) -> Charge:
    return Charge()


def nothing_expired(*_: object) -> Overdue:
    return Overdue()


total_usage = Ledger.total_usage


def total_without_reservations(ledger: Ledger) -> Usage:
    return total_usage(msgspec.structs.replace(ledger, reserved={}))


def planned_without_total(ledger: Ledger, quota: NamespaceQuota, demand: Demand, _others: object) -> Plan:
    return plan_reservation(ledger, msgspec.structs.replace(quota, total=None), demand)


class Broken(NamedTuple):
    """Breaks a rule: it sets attribute ``name`` of ``where`` to ``value``. ``scenario`` must fail with ``wrong``."""

    where: object
    name: str
    value: object
    scenario: scenarios.Scenario
    wrong: str


OVER, LOST, STAYS = "and the limit is", "and the ledger counts", "more is charged than"

MUTANTS = {
    "reservations of other replicas count as used": Broken(
        Ledger, "reserved_of", uncounted, scenarios.others_take_all_that_is_left, OVER
    ),
    "a charge must fit the rest of the reservation": Broken(
        ReplicaReservation, "spend", spent_without_room, scenarios.others_take_all_that_is_left, OVER
    ),
    "a reservation expires": Broken(
        own_reservations, "RESERVATION_SECONDS", math.inf, scenarios.spent_past_its_time, LOST
    ),
    "a reservation counts from when its write was sent": Broken(
        ReplicaReservation, "confirmed", counted_from_the_answer, scenarios.its_time_counts_from_before_the_write, LOST
    ),
    "an object created after the reservation has expired is not admitted": Broken(
        own_reservations, "CREATED_SECONDS", math.inf, scenarios.clocks_that_stood_still, LOST
    ),
    "a write may be lost": Broken(
        ReplicaReservation,
        "send",
        sent_with_the_next,
        scenarios.the_next_reservation_is_larger_and_that_write_is_lost,
        LOST,
    ),
    "a write may land": Broken(
        ReplicaReservation, "send", sent_with_the_old, scenarios.the_next_reservation_is_smaller, LOST
    ),
    "a reservation admits only under the limits that sized it": Broken(
        ReplicaReservation, "is_by", lambda *_: True, scenarios.the_limit_is_lowered, OVER
    ),
    "a reservation that was not written admits nothing": Broken(
        ReplicaReservation,
        "is_by",
        lambda *_: True,
        scenarios.the_limit_is_lowered_while_another_replica_writes_first,
        OVER,
    ),
    "a flush writes the admitted charges": Broken(
        ReplicaReservation, "flushed", flushed_without_spent, scenarios.what_was_spent_is_in_the_next_write, LOST
    ),
    "a flush keeps the charges that were admitted during it": Broken(
        ReplicaReservation,
        "confirmed",
        confirmed_without_later_charges,
        scenarios.created_while_a_write_is_under_way,
        LOST,
    ),
    "an admitted charge uses up its room": Broken(
        ReplicaReservation, "_remaining", undiminished, scenarios.others_write_first, LOST
    ),
    "a reservation is within the limit": Broken(
        own_reservations, "_room", lambda *_: 1000, scenarios.a_burst_just_below_the_limit, OVER
    ),
    "all reservations together are within the limit": Broken(
        own_reservations,
        "plan_reservation",
        planned_without_others,
        scenarios.little_room_beside_what_others_reserve,
        "more than the limit is charged",
    ),
    "all models count toward the total": Broken(
        Ledger, "total_usage", lambda ledger: ledger.usage("P100"), scenarios.both_models_use_up_the_total, OVER
    ),
    "reservations of other models count toward the total": Broken(
        Ledger, "total_usage", total_without_reservations, scenarios.others_take_all_that_is_left_of_the_total, OVER
    ),
    "a reservation is within the total": Broken(
        own_reservations, "plan_reservation", planned_without_total, scenarios.a_burst_just_below_the_total, OVER
    ),
    "a reservation admits only under the total that sized it": Broken(
        ReplicaReservation, "is_by", lambda *_: True, scenarios.the_total_is_lowered, OVER
    ),
    "a write without an answer may land": Broken(
        LedgerStore, "write", failed_if_unanswered, scenarios.a_write_of_unknown_outcome_lands_late, LOST
    ),
    "the counter shows whether a write has landed": Broken(
        own_reservations, "Reservation", lambda charges, _: Reservation(charges, 0), scenarios.others_write_first, OVER
    ),
    "a replica stops using a removed reservation": Broken(
        ReplicaReservation, "observe", blind_to_its_removal, scenarios.its_reservation_was_reaped, "counted twice"
    ),
    "each start of a process is a new replica": Broken(
        ReplicaReservation, "__init__", started_as_the_same, scenarios.another_process_has_another_id, LOST
    ),
    "a stored pod is no longer pending": Broken(
        recounter, "recount", recounted_without_seen, scenarios.others_take_all_that_is_left, STAYS
    ),
    "a pending charge expires": Broken(ChargeAges, "pending", nothing_expired, scenarios.never_stored, STAYS),
    "a pending charge outlasts the storable time": Broken(
        recounter,
        "RecountTiming",
        functools.partial(RecountTiming, storable_seconds=69),
        scenarios.stored_at_the_last_moment,
        LOST,
    ),
    "only a LIST proves a pod absent": Broken(
        LedgerStore, "stored_uids", lambda *_: set(), scenarios.stored_where_the_leader_has_not_seen_it, LOST
    ),
    "a replica reserves nothing while another one waits": Broken(
        own_reservations, "GIVE_WAY_SECONDS", 0, scenarios.who_waits_is_given_what_others_reserve, "never gets room"
    ),
    "a waiting replica sets a mark": Broken(
        LedgerStore, "write", written_without_mark, scenarios.who_waits_is_given_what_others_reserve, "never gets room"
    ),
    "a reservation is reaped only after it has expired": Broken(
        ChargeAges,
        "reservations",
        reservations_as(seconds=0),
        scenarios.reaped_when_what_it_spent_last_is_no_longer_stored,
        LOST,
    ),
    "a reservation is reaped only after the storable time": Broken(
        charge_ages,
        "MARGIN_SECONDS",
        -STORABLE_SECONDS,
        scenarios.reaped_when_what_it_spent_last_is_no_longer_stored,
        LOST,
    ),
    "a reservation is reaped only after a margin": Broken(
        charge_ages, "MARGIN_SECONDS", 0, scenarios.reaped_when_what_it_spent_last_is_no_longer_stored, LOST
    ),
    "a renewed reservation is not reaped": Broken(
        ChargeAges,
        "reservations",
        reservations_as(counter=0),
        scenarios.renewed_for_longer_than_it_could_stand_by_itself,
        LOST,
    ),
    "a reservation is reaped only by a later LIST": Broken(
        ObservedPods, "after", lambda _, watched, __: watched, scenarios.reaped_by_a_count_of_that_moment, LOST
    ),
    "a dead replica is reaped": Broken(
        ChargeAges, "reservations", nothing_expired, scenarios.reaped_by_a_count_of_that_moment, STAYS
    ),
    "a lost ledger stays closed for the reservation time longer": Broken(
        LedgerMarks, "check_lost", lost_without_lease, scenarios.the_ledger_is_lost_and_it_does_not_know, OVER
    ),
}


@pytest.mark.parametrize("broken", MUTANTS.values(), ids=MUTANTS)
def test_every_rule_is_needed(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broken.where, broken.name, broken.value)
    with pytest.raises(AssertionError, match=broken.wrong):
        scenarios.play(broken.scenario, ReservationWorld())
