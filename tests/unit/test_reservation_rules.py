"""What each rule of reservations is for: what it keeps from happening, and does happen once it is broken."""

import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import NamedTuple

import pytest

from controller.settler import Settler
from tests.reservation_world import LIMITS, ReservationWorld
from vcuda.kube import LedgerStore
from vcuda.ledger import ledger
from vcuda.quota.model import Charge, Limit
from webhook import leases
from webhook.ledger_client import NamespaceLedger
from webhook.leases import ReservationLease

A, B = 0, 1
Scenario = Callable[[ReservationWorld], None]


def others_take_all_that_is_left(world: ReservationWorld) -> None:
    """What one replica has reserved is no room to others, and it grants no more than that."""
    world.reserve(A)
    world.ask(B, 60)
    world.through()
    world.ask(A, 10)
    world.through()


def late_grant(world: ReservationWorld, seconds: float) -> None:
    """A replica that stood still grants as late as it can, and crashes before it has written that down."""
    world.reserve(A)
    world.pause(A)
    began = world.time.now
    world.pass_by(int(began) + seconds - began)
    world.ask(A, 3)
    world.resume(A)
    world.pause(A)


def reaped_when_what_it_granted_last_is_no_longer_stored(world: ReservationWorld) -> None:
    """Its time and the deadline of its last pods pass one after the other, and clocks differ."""
    late_grant(world, 10)
    world.crash(A)
    for seconds in (3, 58, 5, 7.5, 0.7, 0.4, 0.4, 0.4, 0.4, 0.4, 5):
        world.pass_by(seconds)
        world.settle()
        world.ask(B, 60)
        world.through()


def granted_past_its_time(world: ReservationWorld) -> None:
    late_grant(world, 12)
    world.crash(A)
    world.pass_by(74.5)
    world.settle()
    world.ask(B, 60)
    world.through()


def its_time_counts_from_before_the_write(world: ReservationWorld) -> None:
    """The answer comes eight seconds after the API server has written it."""
    world.reserve(A)
    world.ask(A, 1)
    world.pass_by(0.11)
    [put] = world.wire.open
    put.arrive()
    landed = int(world.time.now)
    world.store_some()
    world.settle()
    world.pass_by(8)
    world.answer(put)
    world.pause(A)
    world.pass_by(landed + 12 - world.time.now)
    world.ask(A, 3)
    world.resume(A)
    world.crash(A)
    world.pass_by(landed + 86.9 - world.time.now)
    world.settle()
    world.ask(B, 60)
    world.through()


def clocks_that_stood_still(world: ReservationWorld) -> None:
    """The machine was suspended for longer than the lease, and its own clocks do not tell."""
    world.reserve(A)
    world.suspend(A, 40)
    world.ask(A, 3)
    world.crash(A)
    world.pass_by(48)
    world.settle()
    world.ask(B, 60)
    world.through()


def the_next_reservation_is_larger_and_that_write_is_lost(world: ReservationWorld) -> None:
    world.reserve(A, 4)
    world.ask(A, 12)
    world.pass_by(0.1)
    world.ask(A, 12)


def the_next_reservation_is_smaller(world: ReservationWorld) -> None:
    """It lands, and what was granted while it was under way has to be in it."""
    world.reserve(A, 20)
    world.pass_by(1.1)
    [put] = world.wire.open
    world.ask(A, 4)
    put.arrive()
    world.check()


def created_while_a_write_is_under_way(world: ReservationWorld) -> None:
    world.reserve(A, 20)
    world.ask(A, 1)
    world.pass_by(0.11)
    assert world.wire.open
    world.ask(A, 2)
    world.go_on()
    world.pass_by(1.2)
    world.go_on()


def a_write_of_unknown_outcome_lands_late(world: ReservationWorld) -> None:
    """It reserves less than before, and whoever went by what is read meanwhile would grant more."""
    world.reserve(A, 80, size="fifth")
    world.pause(A)
    world.pass_by(0.95)
    world.resume(A)
    world.ask(A, 4, size="fifth")
    world.pass_by(0.11)
    [put] = world.wire.open
    world.give_up(put, lands=True)
    world.ask(A, 12, size="fifth")
    world.pass_by(0.11)
    for call in [call for call in world.wire.open if call.method == "GET"]:
        world.answer(call)
    world.wire.land()
    for _ in range(2):
        world.answer(world.wire.open[0])
        world.pass_by(0.03)
    world.ask(A, 8, size="fifth")


def what_was_granted_is_in_the_next_write(world: ReservationWorld) -> None:
    world.reserve(A)
    world.ask(A, 2)
    world.pass_by(0.11)
    world.go_on()
    world.pass_by(1.2)
    world.go_on()


def others_write_first(world: ReservationWorld) -> None:
    """A write that lost to another has not landed, whatever stands in the ledger of the one before."""
    world.reserve(A)
    world.ask(A, 2)
    world.pass_by(0.11)
    [put] = world.wire.open
    world.ask(B, 1)
    world.through(world.replicas[B])
    world.answer(put)
    world.pass_by(0.11)
    world.answer(world.wire.open[0])
    world.ask(A, 5)
    world.through()
    world.pass_by(1.2)
    world.go_on()


def another_process_has_another_id(world: ReservationWorld) -> None:
    world.reserve(A)
    world.ask(A, 2)
    world.crash(A)
    world.ask(A, 12)
    world.through()
    world.pass_by(0.01)
    world.ask(A, 1)
    world.through()


def the_limit_is_lowered(world: ReservationWorld) -> None:
    world.reserve(A)
    world.set_limits({**LIMITS, "M40": Limit(1000)})
    world.ask(A, 3)
    world.through()


def a_burst_just_below_the_limit(world: ReservationWorld) -> None:
    """It would reserve by its rate for more than there is room."""
    world.reserve(A, 96, size="half")
    world.ask(A, 30, size="half")
    world.through()


def little_room_beside_what_others_reserve(world: ReservationWorld) -> None:
    world.reserve(A, 99, size="fifth")
    for number in (150, 24, 1):
        world.ask(B, number, size="fifth")
        world.through(world.replicas[B])
        world.pass_by(0.004)
        world.through(world.replicas[B])
        world.store_some()
    for replica in (A, B):
        world.ask(replica, 30, size="fifth")


def its_reservation_was_reaped(world: ReservationWorld) -> None:
    """What it had granted was counted by that, and is not counted twice when it comes back."""
    late_grant(world, 9)
    world.store_some()
    for _ in range(2):
        world.pass_by(50)
        world.settle()
    assert not world.ledger().reserved
    world.resume(A)
    world.go_on()
    world.pass_by(0.2)
    world.go_on()
    assert world.ledger().usage("M40").used == Charge(100 * len(world.stored), 0, 100 * len(world.stored))


def reaped_by_a_count_of_that_moment(world: ReservationWorld) -> None:
    """The watch that the leader has is as old as the reservation."""
    late_grant(world, 9)
    world.store_some()
    world.crash(A)
    world.pass_by(90)
    world.settle(look=False)


def renewed_for_longer_than_it_could_stand_by_itself(world: ReservationWorld) -> None:
    for _ in range(10):
        world.reserve(A, 4, size="fifth")
        world.pass_by(9.9)
    world.reserve(A, 12, size="fifth")
    world.ask(A, 2, size="fifth")


def who_waits_is_given_what_others_reserve(world: ReservationWorld) -> None:
    """For what is larger than what is left beside that; those others go on creating pods meanwhile."""
    world.reserve(A, 100, size="fifth")
    world.ask(B, 29)
    world.go_on()
    for _ in range(2):
        world.ask(B, 1, size="eight")
        world.go_on()
        world.ask(A, 2, size="fifth")
        world.pass_by(0.11)
        world.go_on()
    assert [each.size for each in world.subjects.values() if each.before >= 0].count("eight") == 1


def never_stored(world: ReservationWorld) -> None:
    world.ask(B, 2)
    world.through()
    world.pass_by(80)


def stored_at_the_last_moment(world: ReservationWorld) -> None:
    world.ask(B, 2)
    world.through()
    world.settle()
    world.pass_by(70)
    world.settle()


def stored_where_the_leader_has_not_seen_it(world: ReservationWorld) -> None:
    stored_at_the_last_moment(world)
    world.store_some()
    world.pass_by(10)
    world.settle(look=False)


SCENARIOS: list[Scenario] = [
    others_take_all_that_is_left,
    reaped_when_what_it_granted_last_is_no_longer_stored,
    granted_past_its_time,
    its_time_counts_from_before_the_write,
    clocks_that_stood_still,
    the_next_reservation_is_larger_and_that_write_is_lost,
    the_next_reservation_is_smaller,
    a_write_of_unknown_outcome_lands_late,
    what_was_granted_is_in_the_next_write,
    others_write_first,
    created_while_a_write_is_under_way,
    another_process_has_another_id,
    the_limit_is_lowered,
    a_burst_just_below_the_limit,
    little_room_beside_what_others_reserve,
    its_reservation_was_reaped,
    reaped_by_a_count_of_that_moment,
    renewed_for_longer_than_it_could_stand_by_itself,
    who_waits_is_given_what_others_reserve,
    never_stored,
    stored_at_the_last_moment,
    stored_where_the_leader_has_not_seen_it,
]


def play(scenario: Scenario) -> None:
    with ReservationWorld() as world:
        scenario(world)
        world.come_to_rest()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_nothing_admits_too_much_and_nothing_stays_charged(scenario: Scenario) -> None:
    play(scenario)


class Broken(NamedTuple):
    """One rule broken: in this class or module ``old`` is replaced by ``new``, and the scenario goes wrong."""

    rule: str
    where: object
    old: str
    new: str
    scenario: Scenario


MUTANTS = [
    Broken("SYNC", ledger.Ledger, "+ terminating + reserved, pend", "+ terminating, pend", others_take_all_that_is_left),
    Broken("GRANT without room", ReservationLease, "if left.peak(asked.charge) != left:", "if False:", others_take_all_that_is_left),
    Broken("GRANT without a lease", ReservationLease, "self._clock() > self._until or", "", granted_past_its_time),
    Broken("GRANT by a lease from the answer", ReservationLease, "sent.at + LEASE_SECONDS", "self._clock() + LEASE_SECONDS", its_time_counts_from_before_the_write),
    Broken("GRANT without the API server's time", ReservationLease, "or created > self._created_until", "", clocks_that_stood_still),
    Broken("GRANT from the new reservation", ReservationLease, "left + after - left.peak(after)", "after", the_next_reservation_is_larger_and_that_write_is_lost),
    Broken("GRANT from the old reservation", ReservationLease, "left + after - left.peak(after)", "left", the_next_reservation_is_smaller),
    Broken("GRANT under another quota", NamespaceLedger, "self._terms != _terms(request, self._shared.store)", "not self._terms", the_limit_is_lowered),
    Broken("FLUSH without what was granted", ReservationLease, "{**self.granted, **ledger.pending}", "ledger.pending", what_was_granted_is_in_the_next_write),
    Broken("FLUSH forgets what was granted meanwhile", ReservationLease, "if uid not in sent.uids", "if False", created_while_a_write_is_under_way),
    Broken("FLUSH counts what was granted as left", ReservationLease, "for each in self.granted.values():", "for each in ():", others_write_first),
    Broken("FLUSH without SYNC", leases, "if most := min(wanted, room // (PART_OF_ROOM * (len(ledger.reserved) + 1))):", "if most := wanted:", a_burst_just_below_the_limit),
    Broken("FLUSH beside others' reservations", leases, "ledger.usage(model).used, mean", "ledger.usage(model).used - ledger.usage(model).reserved, mean", little_room_beside_what_others_reserve),
    Broken("UNKNOWN as failed", NamespaceLedger, "self._unanswered = _Unanswered(ledger, replaced)", "pass", a_write_of_unknown_outcome_lands_late),
    Broken("UNKNOWN without the counter", ReservationLease, "own.counter == sent.reservation.counter", "own", others_write_first),
    Broken("LOSTRES", ReservationLease, "if own is None:", "if False:", its_reservation_was_reaped),
    Broken("NEWID", ReservationLease, "secrets.token_urlsafe(9)", "'the same'", another_process_has_another_id),
    Broken("SETTLE without dropping what was seen", ledger, "{*observed.seen, *claims.seen, *absent}", "absent", others_take_all_that_is_left),
    Broken("GONE never", Settler, "absent, ended = overdue & ledger.pending.keys()", "absent, ended = set()", never_stored),
    Broken("GONE too early", Settler, "dict.fromkeys(ledger.pending, self._timing.pending_ttl)", "dict.fromkeys(ledger.pending, 69)", stored_at_the_last_moment),
    Broken("GONE without a LIST", Settler, "absent -= self._store.stored_uids(namespace)", "pass", stored_where_the_leader_has_not_seen_it),
    Broken("waiting is not heeded", ReservationLease, "self._give_way_until = self._clock() + GIVE_WAY_SECONDS", "pass", who_waits_is_given_what_others_reserve),
    Broken("waiting is not told", NamespaceLedger, "ledger = self._ask_for_room(ledger)", "pass", who_waits_is_given_what_others_reserve),
    Broken("REAP after the deadline alone", Settler, "renewed[holder][1] + each.seconds + seconds - now", "renewed[holder][1] + seconds - now", reaped_when_what_it_granted_last_is_no_longer_stored),
    Broken("REAP after the lease alone", Settler, "renewed[holder][1] + each.seconds + seconds - now", "renewed[holder][1] + each.seconds - now", reaped_when_what_it_granted_last_is_no_longer_stored),
    Broken("REAP without a margin", Settler, "self._timing.pending_ttl + MARGIN_SECONDS\n        left", "self._timing.pending_ttl\n        left", reaped_when_what_it_granted_last_is_no_longer_stored),
    Broken("REAP though renewed", Settler, "since if counter == each.counter else now", "since", renewed_for_longer_than_it_could_stand_by_itself),
    Broken("REAP by an earlier LIST", Settler, "self._listed(namespace) if reaped else self._observed(namespace, ledger)", "self._observed(namespace, ledger)", reaped_by_a_count_of_that_moment),
    Broken("REAP never", Settler, "if each <= 0}\n        for holder in reaped", "if False}\n        for holder in reaped", reaped_by_a_count_of_that_moment),
]


def functions_of(where: object) -> Iterator[FunctionType]:
    for each in vars(where).values():
        if inspect.isfunction(each):
            yield each


def break_rule(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the one function that has this text run another, for everybody who has it by now."""
    [function] = [each for each in functions_of(broken.where) if broken.old in inspect.getsource(each)]
    source = textwrap.dedent(inspect.getsource(function))
    [old] = {broken.old, textwrap.dedent(broken.old)} & {broken.old}
    changed = inspect.getsource(function).replace(old, broken.new)
    del source
    made: dict[str, FunctionType] = {}
    exec(compile(textwrap.dedent(changed), "broken", "exec"), function.__globals__, made)  # noqa: S102  # the text of our own function
    monkeypatch.setattr(function, "__code__", made[function.__name__].__code__)


@pytest.mark.parametrize("broken", MUTANTS, ids=lambda broken: broken.rule)
def test_every_rule_is_needed(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(broken, monkeypatch)
    with pytest.raises(AssertionError):
        play(broken.scenario)
