"""What has to be proven before a charge is released, a ledger dropped or a count believed."""

from __future__ import annotations

from tests.api_double import ApiDouble
from tests.builders import LABELS, stored_pod
from tests.replicas import Replica
from tests.settling import Settling
from vcuda.kube import LedgerStore
from vcuda.ledger.ledger import Ledger, Pending
from vcuda.placement.placement import Nodes
from vcuda.quota.model import Charge

CARD = {"tencent.com/vcuda-core": 100}
ONE = Charge(100, 0, 100)
COUNTED = "102"
POD = "/api/v1/namespaces/team-a/pods/train-0"
NOBODY = "{}"
MALFORMED = "team-a: {quota: {M40: four}}"
PENDING = Ledger({}, COUNTED, {"uid-1": Pending("M40", ONE)})


class Overdue(Settling):
    """Settling, long after every pending charge was first seen."""

    def settle(self) -> None:
        """Settle once."""
        self.settler._first_seen = dict.fromkeys(("uid-1",), self.settler._clock() - 500)
        super().settle()


def test_an_overdue_charge_whose_pod_is_not_stored_is_released(api: ApiDouble, replica: Replica) -> None:
    Overdue(api, replica, PENDING).settle()
    assert replica.uids() == []


def test_an_overdue_charge_is_kept_where_etcd_has_the_pod_that_the_watch_has_not_brought(
    api: ApiDouble, replica: Replica
) -> None:
    settling = Overdue(api, replica, PENDING)
    api.store(POD, {"metadata": {"name": "train-0", "uid": "uid-1"}})
    settling.settle()
    assert replica.uids() == ["uid-1"]


def test_a_ledger_that_limits_nobody_stays_while_a_pod_may_still_be_on_its_way(
    api: ApiDouble, replica: Replica
) -> None:
    Settling(api, replica, PENDING, document=NOBODY).settle()
    assert replica.uids() == ["uid-1"]
    assert "DELETE" not in api.calls


def test_beside_a_document_that_was_malformed_before_the_leader_began_charges_are_settled_all_the_same(
    api: ApiDouble, replica: Replica
) -> None:
    """The replicas may have the last good one still, and charge by it."""
    ledger = Ledger({"M40": Charge(400, 0, 400)}, COUNTED, {"uid-1": Pending("M40", ONE)})
    Settling(api, replica, ledger, stored_pod(CARD, "uid-1"), document=MALFORMED).settle()
    settled = replica.store.read("team-a").ledger
    assert (settled.committed, settled.pending) == ({"M40": ONE}, {})


def test_beside_a_malformed_document_no_ledger_is_made_and_none_dropped(api: ApiDouble, replica: Replica) -> None:
    settling = Settling(api, replica, Ledger({"M40": ONE}, COUNTED), stored_pod(CARD), document=MALFORMED)
    settling.settle()
    assert (replica.store.read("team-a").ledger.committed, api.calls) == ({"M40": ONE}, ["GET"])


def test_a_count_is_no_newer_than_the_list_that_it_was_made_from(api: ApiDouble) -> None:
    """Else what is stored at the next version would count as seen."""
    api.store(POD, stored_pod(CARD))
    [page] = api.list_pages("/api/v1/namespaces/team-a/pods")
    view = LedgerStore(api.kube, "vcuda-quota", lambda: Nodes(LABELS)).look("team-a")
    assert (view.resource_version, view.committed) == (page.resource_version, {"M40": ONE})
