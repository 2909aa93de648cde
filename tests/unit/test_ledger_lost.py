"""A ledger that is gone: nothing is charged until no pod that was charged in it can be stored any more."""

import pytest

from tests.api_double import ApiDouble, Delivery, Effect, Script, delivered, lost_reply, lost_request
from tests.builders import LABELS, stored_pod
from tests.replicas import LEDGER, POD, Clock, Replica, kinds
from tests.settling import ONE, PENDING, TWO, Settling
from vcuda.errors import LedgerLost, UnreadableLedger
from vcuda.kube import LedgerStore
from vcuda.ledger.ledger import LEASE_SECONDS, MARGIN_SECONDS, Admitted, Ledger
from vcuda.placement.nodes import Nodes
from vcuda.quota.terms import STORABLE_SECONDS

MARK = "/api/v1/namespaces/vcuda-quota/configmaps/gpu-ledger-opened.team-a"
TEAM = "/api/v1/namespaces/team-a"

LOST_SECONDS = STORABLE_SECONDS + LEASE_SECONDS + MARGIN_SECONDS
"""A replica that does not know of the loss may grant from its reservation for a lease."""


def test_a_lost_ledger_says_for_how_long_nothing_is_admitted_and_is_then_counted_from_the_pods(
    api: ApiDouble, replica: Replica, clock: Clock
) -> None:
    replica.charge("on its way", deadline=clock.now + 1)
    api.remove(LEDGER)
    for seconds, left in ((60, "86 s"), (26, "26 s")):
        with pytest.raises(LedgerLost, match=f"the ledger of namespace team-a was lost; .* for {left}; then it is"):
            replica.charge("a", deadline=clock.now + 5)
        api.forget_calls()
        for ask in (replica.usage, lambda: replica.charge("a", deadline=clock.now + 5)):
            with pytest.raises(LedgerLost):
                ask()
        assert api.calls == ["GET", "GET"]
        clock.pass_by(seconds)
    api.store(POD, stored_pod({"tencent.com/vcuda-core": 300}))
    assert kinds(replica.charge(uid, deadline=clock.now + 5) for uid in "ab") == ["Admitted", "PutOff"]
    assert replica.uids() == ["a"]


@pytest.mark.parametrize("replaced", ["never", "by a namespace of its name", "after it was made anew"])
def test_how_long_is_counted_for_each_loss_by_itself(
    api: ApiDouble, replica: Replica, other: Replica, clock: Clock, replaced: str
) -> None:
    """A replica that saw one loss, and not that the ledger came back, has seen nothing of the next."""
    replica.charge("a", deadline=clock.now + 1)
    api.remove(LEDGER)
    with pytest.raises(LedgerLost):
        replica.charge("b", deadline=clock.now + 5)
    with pytest.raises(LedgerLost):
        other.charge("b", deadline=clock.now + 5)
    clock.pass_by(LOST_SECONDS)
    if replaced == "by a namespace of its name":
        api.store(TEAM, {"metadata": {"name": "team-a", "uid": "uid-of-another"}})
    if replaced == "after it was made anew":
        other.charge("c", deadline=clock.now + 5)
        api.remove(LEDGER)
        with pytest.raises(LedgerLost):
            replica.charge("b", deadline=clock.now + 5)
    else:
        assert isinstance(replica.charge("b", deadline=clock.now + 5), Admitted)


def test_a_ledger_that_came_back_and_was_lost_again_while_nobody_looked_is_lost_anew(
    api: ApiDouble, replica: Replica, other: Replica, clock: Clock
) -> None:
    replica.charge("a", deadline=clock.now + 1)
    kept = api.objects[LEDGER]
    api.remove(LEDGER)
    with pytest.raises(LedgerLost):
        replica.charge("b", deadline=clock.now + 5)
    api.store(LEDGER, kept)
    clock.pass_by(LOST_SECONDS - 2)
    assert kinds(other.charge(uid, deadline=clock.now + 5) for uid in "cde") == ["Admitted"] * 3
    api.remove(LEDGER)
    clock.pass_by(2)
    with pytest.raises(LedgerLost):
        replica.charge("f", deadline=clock.now + 5)
    clock.pass_by(LOST_SECONDS)
    assert isinstance(replica.charge("f", deadline=clock.now + 5), Admitted)


def test_a_ledger_is_missed_in_a_namespace_that_was_made_anew(api: ApiDouble, replica: Replica, clock: Clock) -> None:
    """A create that was under way when the namespace was deleted may be stored in the one made after it."""
    replica.charge("a", deadline=clock.now + 1)
    api.store(TEAM, {"metadata": {"name": "team-a", "uid": "uid-of-another"}})
    assert isinstance(replica.charge("b", deadline=clock.now + 5), Admitted), "no wait: its ledger is there"
    api.remove(LEDGER)
    with pytest.raises(LedgerLost):
        replica.charge("c", deadline=clock.now + 5)


def test_a_read_closes_a_namespace_whose_ledger_is_lost(api: ApiDouble, replica: Replica, clock: Clock) -> None:
    """Else its age would never be known where /mutate puts off every pod."""
    replica.charge("a", deadline=clock.now + 1)
    api.remove(LEDGER)
    with pytest.raises(LedgerLost):
        replica.usage()
    assert LEDGER in api.objects
    clock.pass_by(LOST_SECONDS)
    assert replica.usage() == {}
    assert isinstance(replica.charge("b", deadline=clock.now + 5), Admitted)


@pytest.mark.parametrize("delivery", [lost_reply, lost_request])
@pytest.mark.parametrize("number", range(3))
def test_a_write_without_an_answer_when_its_time_is_over_is_made_good(
    api: ApiDouble, replica: Replica, clock: Clock, number: int, delivery: Delivery
) -> None:
    replica.charge("a", deadline=clock.now + 1)
    api.remove(LEDGER)
    for _ in range(2):
        with pytest.raises(LedgerLost):
            replica.charge("b", deadline=clock.now + 5)
        clock.pass_by(LOST_SECONDS / 2)
    api.deliver = Script(*[delivered] * number, delivery)
    assert isinstance(replica.charge("b", deadline=clock.now + 5), Admitted)
    assert replica.uids() == ["b"]


def test_one_that_another_replica_is_making_is_awaited_and_not_lost(api: ApiDouble, replica: Replica) -> None:
    """It is marked first, then made."""
    replica.charge("a")
    made, slept = api.objects.pop(LEDGER), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        api.store(LEDGER, made)

    store = LedgerStore(api.kube, "vcuda-quota", lambda: Nodes(LABELS), clock=lambda: 1.0, sleep=sleep)
    assert list(store.read("team-a").ledger.pending) == ["a"]
    assert len(slept) == 1


def test_a_ledger_that_another_replica_creates_first_is_read(api: ApiDouble, replica: Replica) -> None:
    replica.charge("a")
    made = api.objects[LEDGER]
    api.remove(LEDGER)

    def overtaken(_method: str, _timeout: float, effect: Effect) -> bytes:
        api.store(LEDGER, made)
        return effect()

    api.deliver = Script(overtaken)
    assert list(replica.store.read("team-a").ledger.pending) == ["a"]


# etcd set back to an earlier state


def test_a_ledger_that_has_gone_back_is_lost(api: ApiDouble, replica: Replica, other: Replica, clock: Clock) -> None:
    replica.charge("a", deadline=clock.now + 1)
    restore = api.backup()
    assert kinds(replica.charge(uid, deadline=clock.now + 5) for uid in "bcd") == ["Admitted"] * 3
    restore()
    for each in (replica, other):
        with pytest.raises(LedgerLost):
            each.charge("e", deadline=clock.now + 5)
    clock.pass_by(LOST_SECONDS)
    assert isinstance(replica.charge("e", deadline=clock.now + 5), Admitted)
    assert replica.uids() == ["a", "e"], "what the restored one holds is kept until it is settled"


def test_a_first_ledger_that_was_there_before_is_lost(
    api: ApiDouble, replica: Replica, other: Replica, clock: Clock
) -> None:
    restore = api.backup()
    assert kinds(replica.charge(uid, deadline=clock.now + 5) for uid in "abcd") == ["Admitted"] * 4
    restore()
    for each in (replica, other):
        with pytest.raises(LedgerLost):
            each.charge("e", deadline=clock.now + 5)


def test_a_first_ledger_that_has_gone_back_to_before_it_was_marked_is_lost(
    api: ApiDouble, replica: Replica, other: Replica, clock: Clock
) -> None:
    backups = []

    def marked(_method: str, _timeout: float, effect: Effect) -> bytes:
        backups.append(api.backup())
        return effect()

    api.deliver = Script(delivered, marked)
    assert kinds(replica.charge(uid, deadline=clock.now + 5) for uid in "abcd") == ["Admitted"] * 4
    backups[0]()
    for each in (replica, other):
        with pytest.raises(LedgerLost):
            each.charge("e", deadline=clock.now + 5)


def test_a_closed_one_that_has_gone_back_is_as_old_as_that(
    api: ApiDouble, replica: Replica, other: Replica, clock: Clock
) -> None:
    replica.charge("a", deadline=clock.now + 1)
    api.remove(LEDGER)
    with pytest.raises(LedgerLost):
        replica.charge("b", deadline=clock.now + 5)
    restore = api.backup()
    clock.pass_by(LOST_SECONDS)
    assert kinds(replica.charge(uid, deadline=clock.now + 5) for uid in "cdef") == ["Admitted"] * 4
    restore()
    for each in (replica, other):
        with pytest.raises(LedgerLost):
            each.charge("g", deadline=clock.now + 5)


@pytest.mark.parametrize("delivery", [lost_reply, lost_request])
@pytest.mark.parametrize("number", [1, 2])
def test_that_it_has_gone_back_is_not_forgotten_when_a_write_gets_no_answer(
    api: ApiDouble, replica: Replica, clock: Clock, number: int, delivery: Delivery
) -> None:
    replica.charge("a", deadline=clock.now + 1)
    restore = api.backup()
    assert kinds(replica.charge(uid, deadline=clock.now + 5) for uid in "bcd") == ["Admitted"] * 3
    restore()
    api.deliver = Script(*[delivered] * number, delivery)
    for _ in range(2):
        with pytest.raises(LedgerLost):
            replica.charge("e", deadline=clock.now + 5)


def test_who_saw_it_newer_only_long_ago_knows_of_nothing_that_is_missing(
    api: ApiDouble, replica: Replica, other: Replica, clock: Clock
) -> None:
    """Else each replica would close it once more, when first it comes to it."""
    other.charge("a", deadline=clock.now + 1)
    restore = api.backup()
    replica.charge("b", deadline=clock.now + 5)
    clock.pass_by(LOST_SECONDS)
    restore()
    assert isinstance(replica.charge("c", deadline=clock.now + 5), Admitted)


# The leader


def test_the_leader_makes_it_anew_where_there_are_pods(api: ApiDouble, replica: Replica, clock: Clock) -> None:
    settling = Settling(api, replica, Ledger({"M40": TWO}), stored_pod({"tencent.com/vcuda-core": 100}))
    api.remove(LEDGER)
    settling.relist()
    with pytest.raises(LedgerLost) as lost:
        settling.settle()
    clock.pass_by(lost.value.left)
    settling.settle()
    assert replica.store.read("team-a").ledger.committed == {"M40": ONE}


def test_while_it_is_lost_the_leader_reports_what_is_used_and_all_else_as_reserved(
    api: ApiDouble, replica: Replica, clock: Clock
) -> None:
    settling = Settling(api, replica, Ledger({"M40": TWO}), stored_pod({"tencent.com/vcuda-core": 100}))
    api.remove(LEDGER)
    settling.relist()
    figures: list[tuple[bool, float, float, float | None]] = []
    for seconds in (LOST_SECONDS, 0):
        settling.settler.reconciler.turn("team-a")
        reports, settling.reports = settling.reports, []
        figures += [
            (use.ledger_lost, m40.used, m40.reserved, m40.available) for use in reports if use for m40 in use.models
        ]
        clock.pass_by(seconds)
    assert figures == [(True, 1, 3, 0), (False, 1, 0, 3)]


# Deletions that somebody asks for


def asked_to_go(api: ApiDouble, settling: Settling) -> None:
    api.kube.delete(LEDGER)
    settling.relist()


def test_a_ledger_whose_deletion_is_asked_for_serves_until_nothing_is_pending_and_is_made_anew(
    api: ApiDouble, replica: Replica
) -> None:
    settling = Settling(api, replica, PENDING)
    asked_to_go(api, settling)
    settling.settle()
    assert isinstance(replica.charge("b"), Admitted)
    assert replica.uids() == ["uid-1", "b"]
    settling.relist()
    settling.settle()
    settling.later(500)
    settling.relist()
    settling.settle()
    assert not api.objects.keys() & {LEDGER, MARK}
    assert isinstance(replica.charge("c"), Admitted), "at once: nothing was in it"


def test_a_damaged_one_whose_deletion_is_asked_for_goes_when_no_pod_of_it_can_be_stored(
    api: ApiDouble, replica: Replica
) -> None:
    settling = Settling(api, replica, Ledger({"M40": TWO}))
    api.store(LEDGER, {**api.objects[LEDGER], "data": {"ledger": "{"}})
    asked_to_go(api, settling)
    for later, there in ((0, True), (LOST_SECONDS - 1, True), (2, False)):
        settling.later(later)
        with pytest.raises(UnreadableLedger):
            settling.settle()
        assert (LEDGER in api.objects) is there
    assert isinstance(replica.charge("a"), Admitted), "at once"
