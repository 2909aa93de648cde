"""Tests that each rule of reservations is needed: if the rule is broken, a scenario must fail.

To break a rule, a test replaces one function or class of the product with a version that does less.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import pytest

from controller.settle import charge_ages, settler
from controller.settle.charge_ages import ChargeAges, Overdue, SettleTiming
from tests import reservation_scenarios as scenarios
from tests.reservation_world import ReservationWorld
from vcuda.errors import Conflict, Unavailable
from vcuda.kube import LedgerStore, Stored
from vcuda.kube.ledger_marks import LedgerMarks
from vcuda.ledger.ledger import LEASE_SECONDS, Ledger, Pending, Reservation
from vcuda.ledger.settle import ObservedPods, settle
from vcuda.quota.model import Charge, NamespaceQuota
from vcuda.quota.terms import STORABLE_SECONDS
from webhook.ledger import leases, namespace_ledger
from webhook.ledger.leases import Demand, Plan, ReservationLease, plan


@pytest.mark.parametrize("scenario", scenarios.ALL, ids=lambda scenario: scenario.__name__)
def test_nothing_admits_too_much_and_nothing_stays_charged(scenario: scenarios.Scenario) -> None:
    scenarios.play(scenario, ReservationWorld())


# Each of these reservation classes breaks one rule, which a test must notice.


class GrantsWithoutRoom(ReservationLease):
    """A broken rule: a replica admits a charge that is larger than the rest of its reservation."""

    def grant(self, uid: str, asked: Pending, created: float) -> bool:
        self._left[asked.model] = asked.charge
        return super().grant(uid, asked, created)


class LeasedFromTheAnswer(ReservationLease):
    """A broken rule: the lease is counted from the answer to a write, and not from the time when the write was sent."""

    def confirmed(self, answered: float) -> None:
        super().confirmed(answered)
        self._until = self._clock() + LEASE_SECONDS


class GrantsFromTheNext(ReservationLease):
    """A broken rule: a replica admits charges from its next reservation while the write of that reservation may still
    fail.
    """

    def send(self, ledger: Ledger, charges: Mapping[str, Charge], *terms: Any) -> Ledger:
        sent = super().send(ledger, charges, *terms)
        self._left = {model: charges.get(model, Charge()) for model in self._left}
        return sent


class GrantsFromTheOld(ReservationLease):
    """A broken rule: during a write, a replica admits charges from its old reservation, which this write replaces."""

    def send(self, ledger: Ledger, charges: Mapping[str, Charge], *terms: Any) -> Ledger:
        left = {**self._left}
        sent = super().send(ledger, charges, *terms)
        self._left = left
        return sent


class WritesNoGranted(ReservationLease):
    """A broken rule: a replica writes its next reservation, but not the charges that it admitted from the last one."""

    def flushed(self, ledger: Ledger) -> Ledger:
        return msgspec.structs.replace(super().flushed(ledger), pending=ledger.pending)


class ForgetsLaterGrants(ReservationLease):
    """A broken rule: a replica forgets the charges that it admitted during a write."""

    def confirmed(self, answered: float) -> None:
        self.granted = {}
        super().confirmed(answered)


class GrantsTwice(ReservationLease):
    """A broken rule: a replica does not subtract admitted charges from its reservation, so the room is used twice."""

    def _remaining(self) -> dict[str, Charge]:
        return {**self._reserved}


class KeepsReaped(ReservationLease):
    """A broken rule: a replica keeps using its reservation after the leader has removed it from the ledger."""

    def observe(self, ledger: Ledger) -> None:
        missing = {} if self.holder in ledger.reserved else {self.holder: Reservation({}, -1)}
        super().observe(msgspec.structs.replace(ledger, reserved={**ledger.reserved, **missing}))


class SameHolder(ReservationLease):
    """A broken rule: each replica has the same id as every other replica."""

    def __init__(self, *clock: Any) -> None:
        super().__init__(*clock)
        self.holder = "the same"


# Each of these functions of a replica or of the leader breaks one rule, which a test must notice.


def planned_without_others(ledger: Ledger, quota: NamespaceQuota, demand: Demand) -> Plan:
    return plan(msgspec.structs.replace(ledger, reserved={}), quota, demand)


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


def settled_without_seen(ledger: Ledger, observed: ObservedPods, *expired: Any, **since: Any) -> Ledger:
    return settle(ledger, msgspec.structs.replace(observed, seen=()), *expired, **since)


reservations = ChargeAges.reservations


def reservations_as(**changed: float) -> Callable[..., Overdue]:
    """Return a version of ``reservations`` that acts as if each reservation had these values."""

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


class Broken(NamedTuple):
    """A broken rule: ``value`` replaces the attribute ``name`` of ``where``. Then ``scenario`` must fail with
    ``wrong``.
    """

    rule: str
    where: object
    name: str
    value: object
    scenario: scenarios.Scenario
    wrong: str


def lease(rule: str, broken: type[ReservationLease], scenario: scenarios.Scenario, wrong: str) -> Broken:
    return Broken(rule, namespace_ledger, "ReservationLease", broken, scenario, wrong)


OVER, LOST, STAYS = "and the limit is", "and the ledger counts", "more is charged than"

MUTANTS = (
    Broken(
        "reservations of other replicas count as used",
        Ledger,
        "reserved_of",
        uncounted,
        scenarios.others_take_all_that_is_left,
        OVER,
    ),
    lease(
        "a charge must fit the rest of the reservation", GrantsWithoutRoom, scenarios.others_take_all_that_is_left, OVER
    ),
    Broken("a lease expires", leases, "LEASE_SECONDS", math.inf, scenarios.granted_past_its_time, LOST),
    lease(
        "a lease counts from when its write was sent",
        LeasedFromTheAnswer,
        scenarios.its_time_counts_from_before_the_write,
        LOST,
    ),
    Broken(
        "an object created after the lease is not admitted",
        leases,
        "CREATED_SECONDS",
        math.inf,
        scenarios.clocks_that_stood_still,
        LOST,
    ),
    lease(
        "a write may be lost", GrantsFromTheNext, scenarios.the_next_reservation_is_larger_and_that_write_is_lost, LOST
    ),
    lease("a write may land", GrantsFromTheOld, scenarios.the_next_reservation_is_smaller, LOST),
    Broken(
        "a reservation admits only under the limits that sized it",
        ReservationLease,
        "is_by",
        lambda *_: True,
        scenarios.the_limit_is_lowered,
        OVER,
    ),
    Broken(
        "a reservation that was not written admits nothing",
        ReservationLease,
        "is_by",
        lambda *_: True,
        scenarios.the_limit_is_lowered_while_another_replica_writes_first,
        OVER,
    ),
    lease(
        "a flush writes the admitted charges", WritesNoGranted, scenarios.what_was_granted_is_in_the_next_write, LOST
    ),
    lease(
        "a flush keeps the charges that were admitted during it",
        ForgetsLaterGrants,
        scenarios.created_while_a_write_is_under_way,
        LOST,
    ),
    lease("an admitted charge uses up its room", GrantsTwice, scenarios.others_write_first, LOST),
    Broken(
        "a reservation is within the limit",
        leases,
        "_room",
        lambda *_: 1000,
        scenarios.a_burst_just_below_the_limit,
        OVER,
    ),
    Broken(
        "all reservations together are within the limit",
        namespace_ledger,
        "plan",
        planned_without_others,
        scenarios.little_room_beside_what_others_reserve,
        "more than the limit is charged",
    ),
    Broken(
        "a write without an answer may land",
        LedgerStore,
        "write",
        failed_if_unanswered,
        scenarios.a_write_of_unknown_outcome_lands_late,
        LOST,
    ),
    Broken(
        "the counter shows whether a write has landed",
        leases,
        "Reservation",
        lambda charges, _: Reservation(charges, 0),
        scenarios.others_write_first,
        OVER,
    ),
    lease(
        "a replica stops using a removed reservation",
        KeepsReaped,
        scenarios.its_reservation_was_reaped,
        "counted twice",
    ),
    lease("each start of a process is a new replica", SameHolder, scenarios.another_process_has_another_id, LOST),
    Broken(
        "a stored pod is no longer pending",
        settler,
        "settle",
        settled_without_seen,
        scenarios.others_take_all_that_is_left,
        STAYS,
    ),
    Broken("a pending charge expires", ChargeAges, "pending", nothing_expired, scenarios.never_stored, STAYS),
    Broken(
        "a pending charge outlasts the storable time",
        settler,
        "SettleTiming",
        functools.partial(SettleTiming, pending_ttl=69),
        scenarios.stored_at_the_last_moment,
        LOST,
    ),
    Broken(
        "only a LIST proves a pod absent",
        LedgerStore,
        "stored_uids",
        lambda *_: set(),
        scenarios.stored_where_the_leader_has_not_seen_it,
        LOST,
    ),
    Broken(
        "a replica reserves nothing while another one waits",
        leases,
        "GIVE_WAY_SECONDS",
        0,
        scenarios.who_waits_is_given_what_others_reserve,
        "never gets room",
    ),
    Broken(
        "a waiting replica sets a mark",
        LedgerStore,
        "write",
        written_without_mark,
        scenarios.who_waits_is_given_what_others_reserve,
        "never gets room",
    ),
    Broken(
        "a reservation is reaped only after its lease",
        ChargeAges,
        "reservations",
        reservations_as(seconds=0),
        scenarios.reaped_when_what_it_granted_last_is_no_longer_stored,
        LOST,
    ),
    Broken(
        "a reservation is reaped only after the storable time",
        charge_ages,
        "MARGIN_SECONDS",
        -STORABLE_SECONDS,
        scenarios.reaped_when_what_it_granted_last_is_no_longer_stored,
        LOST,
    ),
    Broken(
        "a reservation is reaped only after a margin",
        charge_ages,
        "MARGIN_SECONDS",
        0,
        scenarios.reaped_when_what_it_granted_last_is_no_longer_stored,
        LOST,
    ),
    Broken(
        "a renewed reservation is not reaped",
        ChargeAges,
        "reservations",
        reservations_as(counter=0),
        scenarios.renewed_for_longer_than_it_could_stand_by_itself,
        LOST,
    ),
    Broken(
        "a reservation is reaped only by a later LIST",
        ObservedPods,
        "after",
        lambda _, watched, __: watched,
        scenarios.reaped_by_a_count_of_that_moment,
        LOST,
    ),
    Broken(
        "a dead replica is reaped",
        ChargeAges,
        "reservations",
        nothing_expired,
        scenarios.reaped_by_a_count_of_that_moment,
        STAYS,
    ),
    Broken(
        "a lost ledger stays closed for a lease longer",
        LedgerMarks,
        "check_lost",
        lost_without_lease,
        scenarios.the_ledger_is_lost_and_it_does_not_know,
        OVER,
    ),
)


@pytest.mark.parametrize("broken", MUTANTS, ids=lambda broken: broken.rule)
def test_every_rule_is_needed(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broken.where, broken.name, broken.value)
    with pytest.raises(AssertionError, match=broken.wrong):
        scenarios.play(broken.scenario, ReservationWorld())
