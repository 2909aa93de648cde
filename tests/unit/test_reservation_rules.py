"""What each rule of reservations is for: what it keeps from happening, and does happen once it is broken."""

import inspect
import textwrap
from types import FunctionType
from typing import NamedTuple

import pytest

from controller.settle.charge_ages import ChargeAges
from controller.settle.settler import Settler
from tests import reservation_scenarios as scenarios
from tests.reservation_world import ReservationWorld
from vcuda.kube.ledger_marks import LedgerMarks
from vcuda.ledger import ledger, settle as settling
from webhook.ledger import leases
from webhook.ledger.leases import ReservationLease
from webhook.ledger.namespace_ledger import NamespaceLedger


@pytest.mark.parametrize("scenario", scenarios.ALL, ids=lambda scenario: scenario.__name__)
def test_nothing_admits_too_much_and_nothing_stays_charged(scenario: scenarios.Scenario) -> None:
    scenarios.play(scenario, ReservationWorld())


class Broken(NamedTuple):
    """One rule broken: the function of this class or module that has ``old`` has ``new`` instead.

    Then this scenario goes wrong.
    """

    rule: str
    where: object
    old: str
    new: str
    scenario: scenarios.Scenario


MUTANTS = [
    Broken(
        "SYNC",
        ledger.Ledger,
        "+ terminating + reserved, pend",
        "+ terminating, pend",
        scenarios.others_take_all_that_is_left,
    ),
    Broken(
        "GRANT without room",
        ReservationLease,
        "if not left.covers(asked.charge):",
        "if False:",
        scenarios.others_take_all_that_is_left,
    ),
    Broken(
        "GRANT without a lease", ReservationLease, "self._clock() > self._until or", "", scenarios.granted_past_its_time
    ),
    Broken(
        "GRANT by a lease from the answer",
        ReservationLease,
        "sent.at + LEASE_SECONDS",
        "self._clock() + LEASE_SECONDS",
        scenarios.its_time_counts_from_before_the_write,
    ),
    Broken(
        "GRANT without the API server's time",
        ReservationLease,
        "or created > self._created_until",
        "",
        scenarios.clocks_that_stood_still,
    ),
    Broken(
        "GRANT from the new reservation",
        ReservationLease,
        "left.minimum(after)",
        "after",
        scenarios.the_next_reservation_is_larger_and_that_write_is_lost,
    ),
    Broken(
        "GRANT from the old reservation",
        ReservationLease,
        "left.minimum(after)",
        "left",
        scenarios.the_next_reservation_is_smaller,
    ),
    Broken(
        "GRANT under another quota",
        NamespaceLedger,
        "not self._lease.is_by(_terms(request, self._shared.store))",
        "not self._terms",
        scenarios.the_limit_is_lowered,
    ),
    Broken(
        "GRANT by a quota whose reservation was not written",
        ReservationLease,
        "self._terms == terms and (self._sent is None or self._sent.terms == terms)",
        "True",
        scenarios.the_limit_is_lowered_while_another_replica_writes_first,
    ),
    Broken(
        "FLUSH without what was granted",
        ReservationLease,
        "{**self.granted, **ledger.pending}",
        "ledger.pending",
        scenarios.what_was_granted_is_in_the_next_write,
    ),
    Broken(
        "FLUSH forgets what was granted meanwhile",
        ReservationLease,
        "if uid not in sent.uids",
        "if False",
        scenarios.created_while_a_write_is_under_way,
    ),
    Broken(
        "FLUSH counts what was granted as left",
        ReservationLease,
        "for each in self.granted.values():",
        "for each in ():",
        scenarios.others_write_first,
    ),
    Broken(
        "FLUSH without SYNC",
        leases,
        "min(wanted, room // max(PART_OF_ROOM * replicas, PART_OF_REPLICA))",
        "wanted",
        scenarios.a_burst_just_below_the_limit,
    ),
    Broken(
        "FLUSH beside others' reservations",
        leases,
        "ledger.usage(model).used, mean",
        "ledger.usage(model).used - ledger.usage(model).reserved, mean",
        scenarios.little_room_beside_what_others_reserve,
    ),
    Broken(
        "UNKNOWN as failed",
        NamespaceLedger,
        "self._unanswered = _Unanswered(ledger, replaced)",
        "pass",
        scenarios.a_write_of_unknown_outcome_lands_late,
    ),
    Broken(
        "UNKNOWN without the counter",
        ReservationLease,
        "own.counter == sent.reservation.counter",
        "own",
        scenarios.others_write_first,
    ),
    Broken("LOSTRES", ReservationLease, "if own is None:", "if False:", scenarios.its_reservation_was_reaped),
    Broken(
        "NEWID", ReservationLease, "secrets.token_urlsafe(9)", "'the same'", scenarios.another_process_has_another_id
    ),
    Broken(
        "SETTLE without dropping what was seen",
        settling,
        "if uid not in seen}",
        "}",
        scenarios.others_take_all_that_is_left,
    ),
    Broken(
        "GONE never",
        Settler,
        "if not over.keys:",
        "if True:",
        scenarios.never_stored,
    ),
    Broken(
        "GONE too early",
        ChargeAges,
        "first[uid].at + self._timing.pending_ttl",
        "first[uid].at + 69",
        scenarios.stored_at_the_last_moment,
    ),
    Broken(
        "GONE without a LIST",
        Settler,
        "set(over.keys) - self._store.stored_uids(namespace)",
        "set(over.keys)",
        scenarios.stored_where_the_leader_has_not_seen_it,
    ),
    Broken(
        "waiting is not heeded",
        ReservationLease,
        "self._give_way_until = self._clock() + GIVE_WAY_SECONDS",
        "pass",
        scenarios.who_waits_is_given_what_others_reserve,
    ),
    Broken(
        "waiting is not told",
        NamespaceLedger,
        "ledger = self._ask_for_room(ledger)",
        "pass",
        scenarios.who_waits_is_given_what_others_reserve,
    ),
    Broken(
        "REAP after the deadline alone",
        ChargeAges,
        "max(renewed[replica][1] + each.seconds, watch.began)",
        "max(renewed[replica][1], watch.began)",
        scenarios.reaped_when_what_it_granted_last_is_no_longer_stored,
    ),
    Broken(
        "REAP after the lease alone",
        ChargeAges,
        "watch.began) + wait",
        "watch.began)",
        scenarios.reaped_when_what_it_granted_last_is_no_longer_stored,
    ),
    Broken(
        "REAP without a margin",
        ChargeAges,
        "wait = self._timing.pending_ttl + MARGIN_SECONDS",
        "wait = self._timing.pending_ttl",
        scenarios.reaped_when_what_it_granted_last_is_no_longer_stored,
    ),
    Broken(
        "REAP though renewed",
        ChargeAges,
        "since if counter == each.counter else now",
        "since",
        scenarios.renewed_for_longer_than_it_could_stand_by_itself,
    ),
    Broken(
        "REAP by an earlier LIST",
        Settler,
        "self._listed(namespace, ledger) if reaped else self._observed(namespace, ledger)",
        "self._observed(namespace, ledger)",
        scenarios.reaped_by_a_count_of_that_moment,
    ),
    Broken(
        "REAP never",
        Settler,
        "for replica in over.keys:",
        "over = Overdue()\n        for replica in over.keys:",
        scenarios.reaped_by_a_count_of_that_moment,
    ),
    Broken(
        "LOSS after the deadline alone",
        LedgerMarks,
        "lost.seconds + self._storable_seconds",
        "self._storable_seconds",
        scenarios.the_ledger_is_lost_and_it_does_not_know,
    ),
]


def break_rule(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have that function run another text, for everybody who has it by now; no file is touched."""
    functions = [each for each in vars(broken.where).values() if inspect.isfunction(each)]
    [function] = [each for each in functions if broken.old in inspect.getsource(each)]
    source = textwrap.dedent(inspect.getsource(function).replace(broken.old, broken.new))
    made: dict[str, FunctionType] = {}
    exec(compile(source, broken.rule, "exec"), function.__globals__, made)  # noqa: S102  # our own text, but for the rule
    monkeypatch.setattr(function, "__code__", made[function.__name__].__code__)


@pytest.mark.parametrize("broken", MUTANTS, ids=lambda broken: broken.rule)
def test_every_rule_is_needed(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    break_rule(broken, monkeypatch)
    with pytest.raises(AssertionError):
        scenarios.play(broken.scenario, ReservationWorld())
