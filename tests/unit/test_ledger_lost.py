"""Tests of a lost ledger: its ConfigMap was deleted, or etcd was restored to an earlier state.

New charges wait until each pod in the lost ledger is stored or can no longer be stored.
"""

from collections.abc import Callable

import pytest

from tests.api_double import ApiDouble, Delivery, Script, delivered, lost_reply, lost_request, preceded_by
from tests.builders import LABELS, stored_pod
from tests.recounting import ONE, PENDING, TWO, Recounting
from tests.replicas import LEDGER, POD, Clock, Replica, kinds
from vcuda.errors import LedgerLost, UnreadableLedger
from vcuda.kube import LedgerStore
from vcuda.ledger.ledger import MARGIN_SECONDS, RESERVATION_SECONDS, Admitted, Ledger
from vcuda.placement.nodes import Nodes
from vcuda.quota.well_known import STORABLE_SECONDS

MARK = "/api/v1/namespaces/vcuda-quota/configmaps/gpu-ledger-opened.team-a"
TEAM = "/api/v1/namespaces/team-a"

LOST_SECONDS = STORABLE_SECONDS + RESERVATION_SECONDS + MARGIN_SECONDS
"""The number of seconds after which a lost ledger may be opened, so that it admits pods again.

It includes one lease, because a replica that does not know of the loss may still admit from its reservation.
"""


def is_lost(replica: Replica, clock: Clock) -> bool:
    """Return whether one more charge is rejected because the ledger is lost."""
    try:
        replica.charge("another", deadline=clock.now + 5)
    except LedgerLost:
        return True
    return False


def test_a_lost_ledger_admits_nothing_for_a_stated_time_and_is_then_counted_from_the_pods(
    api: ApiDouble, replica: Replica, clock: Clock
) -> None:
    replica.charge("on its way", deadline=clock.now + 1)
    api.remove(LEDGER)
    for seconds, left in ((60, "86 s"), (26, "26 s")):
        with pytest.raises(LedgerLost, match=f"the ledger of namespace team-a was lost. .* for {left}, and then the"):
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


@pytest.mark.parametrize("replaced", ["never", "by a namespace of its name", "after it was recreated"])
def test_the_wait_is_measured_separately_for_each_loss(
    api: ApiDouble, replica: Replica, other: Replica, clock: Clock, replaced: str
) -> None:
    """The ledger may be recreated and lost again, and this replica noticed only the first loss."""
    replica.charge("a", deadline=clock.now + 1)
    api.remove(LEDGER)
    assert is_lost(replica, clock)
    assert is_lost(other, clock)
    clock.pass_by(LOST_SECONDS)
    if replaced == "by a namespace of its name":
        api.store(TEAM, {"metadata": {"name": "team-a", "uid": "uid-of-another"}})
    if replaced == "after it was recreated":
        other.charge("c", deadline=clock.now + 5)
        api.remove(LEDGER)
        assert is_lost(replica, clock)
    else:
        assert isinstance(replica.charge("b", deadline=clock.now + 5), Admitted)


def test_a_ledger_recreated_and_lost_again_unseen_is_a_new_loss(
    api: ApiDouble, replica: Replica, other: Replica, clock: Clock
) -> None:
    replica.charge("a", deadline=clock.now + 1)
    kept = api.objects[LEDGER]
    api.remove(LEDGER)
    assert is_lost(replica, clock)
    api.store(LEDGER, kept)
    clock.pass_by(LOST_SECONDS - 2)
    assert kinds(other.charge(uid, deadline=clock.now + 5) for uid in "cde") == ["Admitted"] * 3
    api.remove(LEDGER)
    clock.pass_by(2)
    assert is_lost(replica, clock)
    clock.pass_by(LOST_SECONDS)
    assert isinstance(replica.charge("f", deadline=clock.now + 5), Admitted)


def test_a_missing_ledger_is_also_detected_in_a_recreated_namespace(
    api: ApiDouble, replica: Replica, clock: Clock
) -> None:
    """A pod whose creation was in progress may be stored in the new namespace."""
    replica.charge("a", deadline=clock.now + 1)
    api.store(TEAM, {"metadata": {"name": "team-a", "uid": "uid-of-another"}})
    assert isinstance(replica.charge("b", deadline=clock.now + 5), Admitted), (
        "there must be no wait, because the ledger exists"
    )
    api.remove(LEDGER)
    assert is_lost(replica, clock)


def test_a_read_closes_a_namespace_whose_ledger_is_lost(api: ApiDouble, replica: Replica, clock: Clock) -> None:
    """/mutate must write a closed ledger (which admits nothing) to begin the wait. An answer 429 alone would not."""
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
def test_a_write_without_an_answer_at_the_end_of_the_wait_is_repeated(
    api: ApiDouble, replica: Replica, clock: Clock, number: int, delivery: Delivery
) -> None:
    replica.charge("a", deadline=clock.now + 1)
    api.remove(LEDGER)
    for _ in range(2):
        assert is_lost(replica, clock)
        clock.pass_by(LOST_SECONDS / 2)
    api.deliver = Script(*[delivered] * number, delivery)
    assert isinstance(replica.charge("b", deadline=clock.now + 5), Admitted)
    assert replica.uids() == ["b"]


def test_a_ledger_that_another_replica_is_creating_is_awaited_and_not_lost(api: ApiDouble, replica: Replica) -> None:
    """A namespace that had a ledger and has none now has lost it only if no replica creates one within a short time."""
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
    api.deliver = Script(preceded_by(lambda: api.store(LEDGER, made)))
    assert list(replica.store.read("team-a").ledger.pending) == ["a"]


# Tests of ledgers after etcd was restored to an earlier state


def test_a_ledger_restored_to_an_older_version_is_lost(
    api: ApiDouble, replica: Replica, other: Replica, clock: Clock
) -> None:
    replica.charge("a", deadline=clock.now + 1)
    restore = api.backup()
    assert kinds(replica.charge(uid, deadline=clock.now + 5) for uid in "bcd") == ["Admitted"] * 3
    restore()
    assert all(is_lost(each, clock) for each in (replica, other))
    clock.pass_by(LOST_SECONDS)
    assert isinstance(replica.charge("e", deadline=clock.now + 5), Admitted)
    assert replica.uids() == ["a", "e"], "the charges of the restored ledger stay until it is recounted"


@pytest.mark.parametrize("writes", [0, 1], ids=["before the ledger was created", "before its mark was created"])
def test_a_first_ledger_restored_to_before_it_was_open_is_lost(
    api: ApiDouble, replica: Replica, other: Replica, clock: Clock, writes: int
) -> None:
    backups: list[Callable[[], None]] = []
    api.deliver = Script(*[delivered] * writes, preceded_by(lambda: backups.append(api.backup())))
    assert kinds(replica.charge(uid, deadline=clock.now + 5) for uid in "abcd") == ["Admitted"] * 4
    backups[0]()
    assert all(is_lost(each, clock) for each in (replica, other))


def test_the_age_of_a_closed_ledger_counts_from_its_restoration(
    api: ApiDouble, replica: Replica, other: Replica, clock: Clock
) -> None:
    replica.charge("a", deadline=clock.now + 1)
    api.remove(LEDGER)
    assert is_lost(replica, clock)
    restore = api.backup()
    clock.pass_by(LOST_SECONDS)
    assert kinds(replica.charge(uid, deadline=clock.now + 5) for uid in "cdef") == ["Admitted"] * 4
    restore()
    assert all(is_lost(each, clock) for each in (replica, other))


@pytest.mark.parametrize("delivery", [lost_reply, lost_request])
@pytest.mark.parametrize("number", [1, 2])
def test_a_restored_ledger_stays_lost_when_a_write_gets_no_answer(
    api: ApiDouble, replica: Replica, clock: Clock, number: int, delivery: Delivery
) -> None:
    replica.charge("a", deadline=clock.now + 1)
    restore = api.backup()
    assert kinds(replica.charge(uid, deadline=clock.now + 5) for uid in "bcd") == ["Admitted"] * 3
    restore()
    api.deliver = Script(*[delivered] * number, delivery)
    for _ in range(2):
        assert is_lost(replica, clock)


def test_a_replica_that_saw_a_newer_version_long_ago_does_not_report_a_loss(
    api: ApiDouble, replica: Replica, other: Replica, clock: Clock
) -> None:
    """A replica forgets versions that it saw long ago. Otherwise each replica would close a restored ledger again."""
    other.charge("a", deadline=clock.now + 1)
    restore = api.backup()
    replica.charge("b", deadline=clock.now + 5)
    clock.pass_by(LOST_SECONDS)
    restore()
    assert isinstance(replica.charge("c", deadline=clock.now + 5), Admitted)


# Tests of how the leader handles a lost ledger


def test_the_leader_recreates_a_lost_ledger_if_there_are_pods(api: ApiDouble, replica: Replica, clock: Clock) -> None:
    recounting = Recounting(api, replica, Ledger({"M40": TWO}), stored_pod({"tencent.com/vcuda-core": 100}))
    api.remove(LEDGER)
    recounting.relist()
    with pytest.raises(LedgerLost) as lost:
        recounting.recount()
    clock.pass_by(lost.value.left)
    recounting.recount()
    assert replica.store.read("team-a").ledger.committed == {"M40": ONE}


def test_while_a_ledger_is_lost_the_report_has_the_usage_and_the_rest_as_reserved(
    api: ApiDouble, replica: Replica, clock: Clock
) -> None:
    recounting = Recounting(api, replica, Ledger({"M40": TWO}), stored_pod({"tencent.com/vcuda-core": 100}))
    api.remove(LEDGER)
    recounting.relist()
    figures: list[tuple[bool, float, float, float | None]] = []
    for seconds in (LOST_SECONDS, 0):
        recounting.recounter.reconciler.turn("team-a")
        reports, recounting.reports = recounting.reports, []
        figures += [
            (use.ledger_lost, m40.used, m40.reserved, m40.available) for use in reports if use for m40 in use.models
        ]
        clock.pass_by(seconds)
    assert figures == [(True, 1, 3, 0), (False, 1, 0, 3)]


# Tests of ledgers that a user deletes


def asked_to_go(api: ApiDouble, recounting: Recounting) -> None:
    api.kube.delete(LEDGER)
    recounting.relist()


def test_a_deleted_ledger_serves_until_nothing_is_pending_and_is_then_recreated(
    api: ApiDouble, replica: Replica
) -> None:
    recounting = Recounting(api, replica, PENDING)
    asked_to_go(api, recounting)
    recounting.recount()
    assert isinstance(replica.charge("b"), Admitted)
    assert replica.uids() == ["uid-1", "b"]
    recounting.relist()
    recounting.recount()
    recounting.later(500)
    recounting.relist()
    recounting.recount()
    assert not api.objects.keys() & {LEDGER, MARK}
    assert isinstance(replica.charge("c"), Admitted), "at once, because nothing was charged in it"


def test_a_deleted_damaged_ledger_is_removed_when_none_of_its_pods_can_be_stored(
    api: ApiDouble, replica: Replica
) -> None:
    recounting = Recounting(api, replica, Ledger({"M40": TWO}))
    api.store(LEDGER, {**api.objects[LEDGER], "data": {"ledger": "{"}})
    asked_to_go(api, recounting)
    for later, there in ((0, True), (LOST_SECONDS - 1, True), (2, False)):
        recounting.later(later)
        with pytest.raises(UnreadableLedger):
            recounting.recount()
        assert (LEDGER in api.objects) is there
    assert isinstance(replica.charge("a"), Admitted), "at once"
