"""Tests of the first ledger of a namespace.

A replica creates a ledger that is closed: it admits nothing. The replica then creates a mark (a ConfigMap that records
that there was a ledger), and opens the ledger at once. Other replicas must wait.
"""

import contextlib
from collections.abc import Callable

import pytest
import structlog

from tests.api_double import ApiDouble, Delivery, Late, Script, delivered, lost_reply, lost_request, preceded_by
from tests.builders import stored_pod
from tests.recounting import NOBODY, Recounting
from tests.replicas import LEDGER, POD, Clock, Replica, kinds
from tests.unit.test_ledger_lost import LOST_SECONDS, MARK, is_lost
from vcuda.errors import LedgerLost, Unavailable
from vcuda.ledger.ledger import Admitted, Ledger
from vcuda.quota.model import Charge

OPENING = ["GET", "POST", "POST", "LIST", "LIST", "PUT"]
"""The API calls by which a replica opens a ledger.

They read the ledger, create it closed, create its mark, LIST pods and claims, and write the open ledger
with the first charge.
"""

FOUR = Charge(400, 0, 400)


def test_the_first_pod_of_a_namespace_is_admitted_at_once_by_six_calls(api: ApiDouble, replica: Replica) -> None:
    for namespace in (f"team-{number}" for number in range(500)):
        api.forget_calls()
        assert isinstance(replica.charge("a", namespace=namespace), Admitted)
        assert api.calls == OPENING
        assert isinstance(replica.charge("b", namespace=namespace), Admitted)
        assert api.calls == [*OPENING, "PUT"]


def test_a_rejection_also_opens_the_ledger(api: ApiDouble, replica: Replica) -> None:
    api.store(POD, stored_pod({"tencent.com/vcuda-core": 400}))
    assert kinds(replica.charge(uid) for uid in "ab") == ["Rejected"] * 2
    listed = ["LIST", "LIST"]
    assert api.calls == [*OPENING, *listed, "GET", *listed], "each rejection counts the stored objects"


def test_reads_and_dry_runs_create_no_ledger(api: ApiDouble, replica: Replica) -> None:
    assert isinstance(replica.charge("a", dry_run=True), Admitted)
    assert replica.usage() == {}
    assert api.calls == ["GET", "GET", "LIST", "LIST"] * 2


def at_call(number: int, *deliveries: Delivery) -> Delivery:
    """Return a network that uses ``deliveries`` for the calls from number ``number`` on, one for each call."""
    return Script(*[delivered] * number, *deliveries, methods=("GET", "LIST", "POST", "PUT", "PATCH", "DELETE"))


@pytest.mark.parametrize("delivery", [lost_request, lost_reply])
@pytest.mark.parametrize("number", range(len(OPENING)), ids=[f"{n} {each}" for n, each in enumerate(OPENING)])
def test_a_lost_call_does_not_close_the_ledger_for_long(
    api: ApiDouble, replica: Replica, clock: Clock, number: int, delivery: Delivery
) -> None:
    api.deliver, before = at_call(number, delivery), clock.now
    try:
        assert isinstance(replica.charge("a", deadline=clock.now + 5), Admitted)
    except Unavailable:
        assert OPENING[number] in {"GET", "LIST"}, "the outcome of the write must be checked by a read"
    assert isinstance(replica.charge("a", deadline=clock.now + 5), Admitted)
    assert replica.uids() == ["a"]
    assert clock.now < before + 1


@pytest.mark.parametrize("number", range(len(OPENING)))
def test_a_write_that_lands_late_changes_nothing(
    api: ApiDouble, replica: Replica, other: Replica, clock: Clock, number: int
) -> None:
    late = Late()
    api.deliver = at_call(number, late)
    with contextlib.suppress(Unavailable):
        replica.charge("a", deadline=clock.now + 5)
    api.deliver = delivered
    decisions = [each.charge(uid, deadline=clock.now + 5) for each, uid in ((replica, "b"), (other, "c"))]
    before = other.uids()
    late.land()
    assert (kinds(decisions), other.uids()) == (["Admitted"] * 2, before)


def lives_on(api: ApiDouble, other: Replica, clock: Clock) -> None:
    """Act as another replica: open the ledger (after a wait if it is lost), and use up the quota with one pod."""
    for attempt in range(3):
        try:
            assert isinstance(other.charge("x", charge=FOUR, deadline=clock.now + 5), Admitted)
            break
        except LedgerLost as lost:
            assert attempt < 2
            clock.pass_by(lost.left)
    api.store(POD, stored_pod({"tencent.com/vcuda-core": 400}, uid="x"))


def drained(api: ApiDouble, other: Replica, clock: Clock) -> None:
    lives_on(api, other, clock)
    other.store.drop("team-a", str(other.store.read("team-a").version))


def filled_again(api: ApiDouble, other: Replica, clock: Clock) -> None:
    """Delete the first pod of the namespace. Admit a second pod, which is not stored yet."""
    drained(api, other, clock)
    api.remove(POD)
    assert isinstance(other.charge("y", charge=FOUR, deadline=clock.now + 5), Admitted)


@pytest.mark.parametrize("number", range(len(OPENING)), ids=[f"{n} {each}" for n, each in enumerate(OPENING)])
@pytest.mark.parametrize("meanwhile", [lives_on, drained, filled_again])
def test_a_replica_suspended_while_it_opens_a_ledger_admits_nothing_by_its_old_view(
    number: int, meanwhile: Callable[[ApiDouble, Replica, Clock], None]
) -> None:
    api, clock = ApiDouble(), Clock()
    replica, other = Replica(api, clock), Replica(api, clock)
    api.deliver = at_call(number, preceded_by(lambda: meanwhile(api, other, clock)))
    for _ in range(3):
        try:
            assert not isinstance(replica.charge("a", deadline=clock.now + 3 * LOST_SECONDS), Admitted)
        except LedgerLost as lost:
            clock.pass_by(lost.left)


@pytest.mark.parametrize("number", range(len(OPENING)), ids=[f"{n} {each}" for n, each in enumerate(OPENING)])
def test_two_replicas_that_open_a_ledger_at_once_both_charge_without_a_wait(
    api: ApiDouble, replica: Replica, other: Replica, clock: Clock, number: int
) -> None:
    """One replica marks that there was a ledger, and opens the ledger. The other reads it until it is open."""
    seen: list[str] = []

    def charge() -> None:
        try:
            seen.append(kinds([other.charge("b", deadline=clock.now + 5)])[0])
        except LedgerLost:  # the replica that created the mark ConfigMap has not opened the ledger
            seen.append("lost")

    api.deliver = at_call(number, preceded_by(charge))
    assert isinstance(replica.charge("a", deadline=clock.now + 5), Admitted)
    assert isinstance(other.charge("b", deadline=clock.now + 5), Admitted)
    assert sorted(replica.uids()) == ["a", "b"]
    assert seen == ["lost" if number > OPENING.index("POST") + 1 else "Admitted"]


def test_a_replica_opens_only_the_version_that_it_marked(
    api: ApiDouble, replica: Replica, other: Replica, clock: Clock
) -> None:
    """While one replica is suspended, other replicas may open the ledger, and the ledger may be lost again."""
    api.deliver = at_call(len(OPENING) - 1, preceded_by(lambda: api.store(LEDGER, api.objects[LEDGER])))
    assert is_lost(replica, clock)
    assert is_lost(other, clock)
    clock.pass_by(LOST_SECONDS)
    assert isinstance(other.charge("a", deadline=clock.now + 5), Admitted)


def test_a_suspended_deletion_leaves_the_mark_of_a_newer_ledger(
    api: ApiDouble, replica: Replica, other: Replica, clock: Clock
) -> None:
    """The mark records that there was a ledger. Without it, nobody could tell that the newer ledger was lost."""
    replica.charge("a")
    version = str(replica.store.read("team-a").version)
    api.forget_calls()
    api.deliver = at_call(3, preceded_by(lambda: lives_on(api, other, clock)))
    replica.store.drop("team-a", version)
    assert api.calls[:4] == ["GET", "PATCH", "DELETE", "DELETE"]
    assert MARK in api.objects
    api.remove(LEDGER)
    assert is_lost(replica, clock)


def test_a_mark_that_could_not_be_deleted_is_deleted_later(api: ApiDouble, replica: Replica) -> None:
    recounting = Recounting(api, replica, Ledger({}, "103"), document=NOBODY)
    recounting.recount()
    recounting.later(LOST_SECONDS)
    api.deliver = at_call(3, lost_request)
    with pytest.raises(Unavailable):
        recounting.recount()
    assert api.objects.keys() & {LEDGER, MARK} == {MARK}
    recounting.relist()
    recounting.recount()
    assert MARK not in api.objects


# Tests of how the leader handles a closed ledger


def closed(api: ApiDouble, replica: Replica) -> Recounting:
    """Return the leader's recounter for a namespace whose new ledger is still closed (admits nothing)."""
    recounting = Recounting(api, replica, document='{"team-a": {"quota": {"M40": 4}}}')
    api.deliver = at_call(2, lost_request, lost_request, *[lost_request] * 1000)
    with pytest.raises(Unavailable):
        replica.store.open("team-a")
    api.deliver = delivered
    recounting.relist()
    api.forget_calls()
    return recounting


def test_the_leader_leaves_a_closed_ledger_to_the_replica_that_creates_it(api: ApiDouble, other: Replica) -> None:
    recounting = closed(api, other)
    with structlog.testing.capture_logs() as logs:
        recounting.recounter.reconciler.turn("team-a")
        assert recounting.resync() == []
    assert (api.calls, logs) == ([], [])
    assert isinstance(other.charge("a"), Admitted)


def test_the_leader_opens_a_ledger_that_stays_closed(
    api: ApiDouble, other: Replica, replica: Replica, clock: Clock
) -> None:
    leader = closed(api, replica)
    api.store(POD, stored_pod({"tencent.com/vcuda-core": 400}))
    leader.relist()
    with pytest.raises(LedgerLost):
        leader.recount()
    clock.pass_by(LOST_SECONDS)
    leader.recount()
    stored = other.store.read("team-a")
    assert (stored.ledger.lost, stored.ledger.committed) == (None, {"M40": FOUR})
    assert MARK in api.objects


def test_a_closed_ledger_without_a_limit_is_deleted_when_that_is_safe(
    api: ApiDouble, replica: Replica, clock: Clock
) -> None:
    replica.charge("a", deadline=clock.now + 1)
    api.remove(LEDGER)
    assert is_lost(replica, clock)
    leader = Recounting(api, replica, document=NOBODY)
    for seconds in (LOST_SECONDS - 2, 2):
        with pytest.raises(LedgerLost):
            leader.recount()
        clock.pass_by(seconds)
    for _ in range(2):
        leader.recount()
        leader.relist()
        leader.later(LOST_SECONDS)
    leader.recount()
    assert not api.objects.keys() & {LEDGER, MARK}
    assert isinstance(replica.charge("b", deadline=clock.now + 5), Admitted), (
        "at once, because nothing was charged in it"
    )
