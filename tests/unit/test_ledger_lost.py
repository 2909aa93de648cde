"""A ledger that is gone: nothing is charged until no pod that was charged in it can be stored any more."""

import pytest

from tests.api_double import ApiDouble, Delivery, Effect, Script, delivered, lost_reply, lost_request
from tests.builders import LABELS, stored_pod
from tests.replicas import LEDGER, POD, Clock, Replica, kinds
from tests.unit.test_settler import ONE, PENDING, TWO, Settling
from vcuda.errors import LedgerLost, NotFound, UnreadableLedger
from vcuda.kube import LedgerStore
from vcuda.ledger.ledger import LEASE_SECONDS, MARGIN_SECONDS, STORABLE_SECONDS, Admitted, Ledger, Refused
from vcuda.placement.placement import Nodes

MARK = "/api/v1/namespaces/vcuda-quota/configmaps/gpu-ledger-opened.uid-of-team-a"
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
        with pytest.raises(LedgerLost):
            replica.usage()
        clock.pass_by(seconds)
    api.store(POD, stored_pod({"tencent.com/vcuda-core": 300}))
    assert kinds(replica.charge(uid, deadline=clock.now + 5) for uid in "ab") == ["Admitted", "Refused"]
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


#NEW


def test_the_leader_makes_it_anew_where_there_are_pods(api: ApiDouble, replica: Replica, clock: Clock) -> None:
    settling = Settling(api, replica, Ledger({"M40": TWO}), stored_pod({"tencent.com/vcuda-core": 100}))
    api.remove(LEDGER)
    settling.relist()
    with pytest.raises(LedgerLost) as lost:
        settling.settle()
    clock.pass_by(lost.value.left)
    settling.settle()
    assert replica.store.read("team-a").ledger.committed == {"M40": ONE}


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
