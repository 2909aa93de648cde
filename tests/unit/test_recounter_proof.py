"""Tests of the proof that the recounter needs before it releases a charge, deletes a ledger, or uses a count."""

import pytest

from tests.api_double import ApiDouble
from tests.builders import LABELS, stored_pod
from tests.quota_map import store_quota
from tests.recounting import CARD, COUNTED, FAR, FOUR_M40, LISTED, NOBODY, ONE, PENDING, POD, TWO, Recounting
from tests.replicas import LEDGER, Replica
from vcuda.kube import LedgerStore
from vcuda.ledger.ledger import MARGIN_SECONDS, RESERVATION_SECONDS, Ledger, Pending, Terminating
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import Charge, Usage
from vcuda.quota.well_known import STORABLE_SECONDS

ENDS_SECONDS = STORABLE_SECONDS + RESERVATION_SECONDS + MARGIN_SECONDS
"""A ledger is deleted after its limit or its namespace has been missing for this many seconds."""


MALFORMED = "team-a: {quota: {M40: four}}"


@pytest.mark.parametrize("stored", [False, True])
def test_an_overdue_charge_is_kept_only_if_a_list_has_the_pod_that_the_watch_lacks(
    api: ApiDouble, replica: Replica, stored: bool
) -> None:
    recounting = Recounting(api, replica, PENDING)
    recounting.recount()
    recounting.later(500)
    if stored:
        api.store(POD, stored_pod(CARD, "uid-1"))
    recounting.recount()
    assert replica.uids() == (["uid-1"] if stored else [])


def test_a_charge_that_no_watch_has_seen_stored_for_5_s_is_reported(api: ApiDouble, replica: Replica) -> None:
    """No event tells the recounter of the moment, so it plans another turn."""
    recounting = Recounting(api, replica, PENDING)
    recounting.take_turn()
    recounting.later(4)
    assert not recounting.is_due()
    recounting.later(1)
    assert recounting.is_due()
    recounting.recount()
    before, after = (use.models[0] for use in recounting.reports[-2:] if use)
    assert (before.pending, before.unstored, after.pending, after.unstored) == (1, 0, 1, 1)


def test_a_ledger_without_a_limit_stays_while_a_pod_may_still_be_stored(api: ApiDouble, replica: Replica) -> None:
    Recounting(api, replica, PENDING, document=NOBODY).recount()
    assert replica.uids() == ["uid-1"]
    assert "DELETE" not in api.calls


def test_charges_are_recounted_even_if_the_document_was_malformed_from_the_start(
    api: ApiDouble, replica: Replica
) -> None:
    """Replicas may still use an earlier valid document, by which they charge pods."""
    ledger = Ledger({"M40": Charge(400, 0, 400)}, COUNTED, {"uid-1": Pending("M40", ONE)})
    Recounting(api, replica, ledger, stored_pod(CARD, "uid-1"), document=MALFORMED).recount()
    recounted = replica.store.read("team-a").ledger
    assert (recounted.committed, recounted.pending) == ({"M40": ONE}, {})


def test_with_a_malformed_document_no_ledger_is_created_or_deleted(api: ApiDouble, replica: Replica) -> None:
    recounting = Recounting(api, replica, Ledger({"M40": ONE}, "106"), stored_pod(CARD), document=MALFORMED)
    recounting.recount()
    assert (replica.store.read("team-a").ledger.committed, api.calls) == ({"M40": ONE}, ["GET"])


def test_a_count_is_no_newer_than_the_list_that_it_was_made_from(api: ApiDouble) -> None:
    """If the count had a newer version than the LIST, a pod stored after the LIST would never be charged."""
    api.store(POD, stored_pod(CARD))
    [page] = api.list_pages("/api/v1/namespaces/team-a/pods")
    view = LedgerStore(api.kube, "vcuda-quota", lambda: Nodes(LABELS)).count_pods("team-a")
    assert (view.resource_version, view.committed) == (page.resource_version, {"M40": ONE})


RAN = Terminating("M40", ONE, 600)
BOUND = stored_pod(CARD, "uid-1", nodeName="gpu-1", terminationGracePeriodSeconds=600)


def test_a_pod_deleted_by_force_stays_charged_through_a_change_of_leader(api: ApiDouble, replica: Replica) -> None:
    """The next leader has never seen the pod. It measures by its own clock how long the charge stays."""
    first = Recounting(api, replica, Ledger({"M40": ONE}, COUNTED), BOUND)
    first.recount()
    api.remove(POD)
    first.relist()
    first.recount()
    assert replica.store.read("team-a").ledger.terminating == {"uid-1": RAN}
    assert replica.usage()["M40"] == Usage(ONE, Charge(), ONE)
    next_leader = Recounting(api, replica)
    next_leader.recount()
    next_leader.later(599)
    next_leader.recount()
    assert replica.usage()["M40"].terminating == ONE
    next_leader.later(1)
    next_leader.relist()
    next_leader.recount()
    assert replica.usage() == {}


def test_a_pod_deleted_without_a_watch_stays_charged_for_30_s(api: ApiDouble, replica: Replica) -> None:
    recounting = Recounting(api, replica, Ledger({"M40": TWO}, COUNTED), stored_pod(CARD))
    recounting.recount()
    assert replica.usage()["M40"] == Usage(TWO, Charge(), ONE)
    recounting.relist()
    recounting.recount()
    recounting.later(30)
    recounting.relist()
    recounting.recount()
    assert replica.usage() == {"M40": Usage(ONE)}


def test_ledgers_without_a_limit_have_their_own_turns(api: ApiDouble, replica: Replica) -> None:
    """The deletion of many namespaces together must not delay the recounts of other ledgers."""
    recounting = Recounting(api, replica, Ledger({}, COUNTED), gone=True)
    recounting.recounter.reconciler.turn("team-a")
    assert (LEDGER in api.objects, recounting.recounter.unlimited.queue.next()) == (True, "team-a")
    for later, there in ((0, True), (ENDS_SECONDS - 1, True), (1, False)):
        recounting.later(later)
        recounting.recounter.unlimited.turn("team-a")
        assert (LEDGER in api.objects) is there


@pytest.mark.parametrize("gone", [True, False], ids=["namespace deleted", "limit deleted"])
def test_an_empty_ledger_is_deleted_without_a_list_even_if_it_is_newer_than_the_watches(
    api: ApiDouble, replica: Replica, gone: bool
) -> None:
    """Thousands of ledgers may be deleted at once, so each deletion must be cheap.

    The mark that there was a ledger is deleted too.
    """
    recounting = Recounting(api, replica, Ledger({}, FAR), document=NOBODY, gone=gone)
    recounting.recount()
    recounting.later(ENDS_SECONDS)
    recounting.recount()
    assert (LEDGER in api.objects, api.calls) == (False, ["GET", "PATCH", "DELETE", "DELETE"])


def test_a_limit_that_is_restored_in_time_keeps_the_ledger(api: ApiDouble, replica: Replica) -> None:
    recounting = Recounting(api, replica, Ledger({}, COUNTED), document=NOBODY)
    for document in (FOUR_M40, NOBODY, FOUR_M40):
        recounting.recount()
        recounting.later(ENDS_SECONDS - 1)
        store_quota(api, document)
        recounting.relist()
    assert LEDGER in api.objects


def test_a_ledger_with_charges_is_counted_by_a_list_before_its_deletion(api: ApiDouble, replica: Replica) -> None:
    """A pod that no watch saw may still run. If the limit is restored later, the ledger must charge the pod."""
    recounting = Recounting(api, replica, Ledger({"M40": ONE}, LISTED), document=NOBODY)
    for name in ("some", "other"):
        api.store(f"/api/v1/namespaces/team-b/pods/{name}", {"metadata": {"name": name}})
    recounting.recount()
    assert replica.usage()["M40"].terminating == ONE


def test_the_ledger_of_a_deleted_namespace_is_deleted_when_nothing_is_pending_or_may_run(
    api: ApiDouble, replica: Replica
) -> None:
    """A namespace that the watch does not show may still exist, because the watch may be late."""
    recounting = Recounting(
        api, replica, Ledger({}, COUNTED, {"uid-1": Pending("M40", ONE)}, {"uid-2": RAN}), gone=True
    )
    recounting.recount()
    recounting.later(500)
    recounting.recount()
    recounting.relist()
    assert list(replica.store.read("team-a").ledger.terminating) == ["uid-2"]
    recounting.later(100)
    recounting.recount()
    assert LEDGER not in api.objects
    assert recounting.reports == [None] * 3
