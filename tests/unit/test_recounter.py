"""Tests of the controller's recounter, which counts ledgers from stored objects."""

import json
import uuid

import msgspec
import pytest

from controller.recount.recounter import MANY_PENDING_BYTES, MAX_ATTEMPTS
from tests.api_double import ApiDouble, Effect, delivered
from tests.builders import held_to, stored_pod
from tests.quota_map import store_quota
from tests.recounting import CARD, COUNTED, FAR, HALF, LISTED, ONE, POD, TWO, Recounting
from tests.replicas import LEDGER, Replica
from tests.tables import cases
from vcuda.errors import LedgerLost
from vcuda.ledger.ledger import Ledger, Pending, Reservation
from vcuda.quota.model import Charge

# Tests of the resync, which is the periodic pass over all ledgers


@pytest.mark.parametrize("committed", [{"M40": TWO}, {}, {"P100": ONE}], ids=["too high", "too low", "another model"])
def test_drift_is_logged_counted_and_corrected(api: ApiDouble, replica: Replica, committed: dict[str, Charge]) -> None:
    recounting = Recounting(api, replica, Ledger(committed, COUNTED), stored_pod(CARD))
    assert recounting.resync() == [("the ledger differs from the stored pods and is recounted", "team-a")]
    assert recounting.counted("drifts_total") == 1
    recounting.run()
    assert replica.store.read("team-a").ledger.committed == {"M40": ONE}


@cases(
    "ledger, calls",
    the_ledger_agrees_with_the_pods=(Ledger({"M40": ONE}, LISTED), []),
    the_ledger_is_newer_than_every_observation=(Ledger({"M40": TWO}, FAR), ["LIST", "LIST"]),
)
def test_a_correct_ledger_is_not_written(api: ApiDouble, replica: Replica, ledger: Ledger, calls: list[str]) -> None:
    recounting = Recounting(api, replica, ledger, stored_pod(CARD))
    assert recounting.resync() == []
    recounting.run()
    assert (recounting.counted("drifts_total"), api.calls) == (0, calls)


def test_a_model_that_tenants_invent_is_in_no_ledger_and_report_until_a_quota_names_it(
    api: ApiDouble, replica: Replica
) -> None:
    """Tenants can invent any number of names. An edit of the quota decides which models are counted."""
    invented = [
        {**stored_pod(CARD, f"uid-{name}", affinity=held_to(name)), "metadata": {"uid": f"uid-{name}", "name": name}}
        for name in ("invented-1", "invented-2")
    ]
    recounting = Recounting(api, replica, Ledger({}, COUNTED), stored_pod(CARD), *invented)
    recounting.recount()
    assert replica.store.read("team-a").ledger.committed == {"M40": ONE}
    [use] = recounting.reports
    assert use
    assert [model.model for model in use.models] == ["M40"]
    assert use.unpinned == ("invented-1", "invented-2")
    store_quota(api, json.dumps({"team-a": {"quota": {"M40": 4, "invented-1": 1}}}))
    recounting.relist()
    recounting.recount()
    assert replica.store.read("team-a").ledger.committed == {"M40": ONE, "invented-1": ONE}


def test_lost_devices_are_forgotten_only_after_the_longest_grace_period_in_the_ledger(
    api: ApiDouble, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resync and the report of a lost ledger also read the claims. They must not assume the default grace period."""
    recounting = Recounting(api, replica, Ledger({}, COUNTED, claim_grace=600), stored_pod(CARD))
    graces = []
    monkeypatch.setattr(
        recounting.recounter.claims, "observed", lambda _namespace, _left_out, grace=30: graces.append(grace)
    )
    recounting.resync()
    assert graces == [600]

    def lose(_namespace: str) -> None:
        raise LedgerLost("team-a", 60, 30)

    monkeypatch.setattr(recounting.recounter, "recount", lose)
    recounting.run()
    [use] = recounting.reports
    assert use
    assert (use.ledger_lost, use.models[0].used, graces) == (True, 1, [600])


def test_a_member_that_a_team_names_is_known_before_it_has_pods(api: ApiDouble, replica: Replica) -> None:
    """Otherwise a resync would leave out its ledger and usage report until its first pod."""
    recounting = Recounting(api, replica, gpu_teams="vision: {namespaces: [vision-train, 'vision-dev-*']}")
    assert set(recounting.recounter.known_namespaces()) == {"team-a", "vision-train"}


def test_a_ledger_that_is_about_to_be_recounted_is_no_drift(api: ApiDouble, replica: Replica) -> None:
    """A ledger that waits for a recount may differ from the stored objects because of a recent event."""
    recounting = Recounting(api, replica, Ledger({"M40": TWO}, COUNTED), stored_pod(CARD))
    recounting.recounter.queue.add("team-a")
    assert recounting.resync() == []
    assert recounting.counted("drifts_total") == 0


def test_if_the_watch_is_older_than_the_count_the_pods_are_listed(api: ApiDouble, replica: Replica) -> None:
    """A replica has counted the pods at a version that the controller's watch has not reached yet."""
    recounting = Recounting(api, replica, Ledger({"M40": TWO}, "105"), stored_pod(CARD))
    api.store("/api/v1/namespaces/team-b/pods/other", {"metadata": {"name": "other"}})
    recounting.recounter.queue.add("team-a")
    recounting.run()
    assert replica.store.read("team-a").ledger.committed == {"M40": ONE}


# Tests of recounting a ledger to which replicas have written


@pytest.fixture
def recounting(api: ApiDouble, replica: Replica) -> Recounting:
    """Return a recounter whose namespace has an outdated ledger and is queued for a recount."""
    recounting = Recounting(api, replica, Ledger({"M40": ONE}))
    recounting.recounter.queue.add("team-a")
    return recounting


def overtake(api: ApiDouble, replica: Replica, times: int) -> list[str]:
    """Make the next ``times`` writes conflict: a replica charges a pod before each. Return the pods' uids."""
    left = iter(uids := [f"uid-{number}" for number in range(times)])

    def deliver(method: str, _timeout: float, effect: Effect) -> bytes:
        uid = next(left, None) if method == "PUT" else None
        if uid:
            api.deliver = delivered
            replica.charge(uid, charge=HALF)
            api.forget_calls()
            api.deliver = deliver
        return effect()

    api.deliver = deliver
    return uids


@pytest.mark.parametrize("times", range(MAX_ATTEMPTS + 1))
def test_recounting_after_a_conflict_is_retried_at_once_and_then_gives_others_a_turn(
    api: ApiDouble, replica: Replica, other: Replica, recounting: Recounting, times: int
) -> None:
    """Charges that replicas add during the conflicts stay in the ledger. Charges of deleted pods are released later."""
    uids = overtake(api, other, times)
    recounting.run()
    assert recounting.counted("seconds_count") == (1 if times < MAX_ATTEMPTS else 2)
    ledger = replica.store.read("team-a").ledger
    assert (ledger.committed, list(ledger.pending)) == ({}, uids)


@pytest.mark.parametrize(("conflicts", "calls"), [(0, ["PUT"]), (1, ["GET", "PUT"])])
def test_a_ledger_is_read_only_after_a_conflict_and_is_written_once(
    api: ApiDouble, other: Replica, recounting: Recounting, conflicts: int, calls: list[str]
) -> None:
    overtake(api, other, conflicts)
    recounting.run()
    assert api.calls == calls


CHARGED = {"uid-1": Pending("M40", ONE)}
CROWD = {str(uuid.UUID(int=number)): Pending("M40", ONE) for number in range(512)}


def told_by(pending_bytes: int) -> str:
    return "charged by many" if pending_bytes > MANY_PENDING_BYTES else "charged"


@cases(
    "written, told",
    a_replica_added_a_charge=(Ledger({"M40": ONE}, "7", CHARGED), ["charged"]),
    a_replica_added_a_charge_and_counted=(Ledger({"M40": TWO}, "7", CHARGED), ["changed"]),
    counted_again=(Ledger({"M40": ONE}, "8"), ["changed"]),
    many_pending_charges=(Ledger({"M40": ONE}, "7", CROWD), ["charged by many"]),
    ledger_deleted=(None, ["changed"]),
)
def test_charges_that_replicas_add_are_distinguished_from_other_writes(
    api: ApiDouble, replica: Replica, other: Replica, written: Ledger | None, told: list[str]
) -> None:
    heard: list[str] = []
    ledgers = replica.store.reflector(lambda _: heard.append("changed"), lambda _, size: heard.append(told_by(size)))
    other.store.write("team-a", Ledger({"M40": ONE}, "7"), other.store.open("team-a"))
    ledgers.relist()
    assert heard == ["changed"]
    heard.clear()
    if written:
        other.store.write("team-a", written, other.store.open("team-a"))
    else:
        api.remove(LEDGER)
    ledgers.relist()
    assert heard == told


def test_the_recounters_own_write_does_not_make_it_recount_again_soon(replica: Replica, other: Replica) -> None:
    heard: list[str] = []
    ledgers = replica.store.reflector(lambda _: heard.append("changed"), lambda _, size: heard.append(told_by(size)))
    other.store.write("team-a", Ledger({"M40": ONE}, "7"), other.store.open("team-a"))
    ledgers.relist()
    replica.store.write("team-a", Ledger({"M40": TWO}, "9"), replica.store.open("team-a"))
    ledgers.relist()
    assert heard == ["changed", "charged"]


@pytest.mark.parametrize(("cards", "seconds"), [(8, 3), (1, 1)], ids=["there is room", "a pod may wait for room"])
def test_a_ledger_with_room_and_only_new_pods_is_recounted_after_three_seconds(
    api: ApiDouble, replica: Replica, cards: int, seconds: float
) -> None:
    document = json.dumps({"team-a": {"quota": {"M40": cards}}})
    recounting = Recounting(api, replica, Ledger({"M40": ONE}, COUNTED), stored_pod(CARD), document=document)
    recounting.take_turn()
    replica.charge("uid-2", charge=HALF)
    recounting.recounter.ledgers.relist()
    for waited, due in ((seconds - 0.5, False), (0.5, True)):
        recounting.later(waited)
        assert recounting.is_due() is due


def test_a_ledger_with_many_pending_is_recounted_four_times_a_second(api: ApiDouble, replica: Replica) -> None:
    recounting = Recounting(api, replica, Ledger({"M40": ONE}, COUNTED), stored_pod(CARD))
    recounting.take_turn()
    stored = replica.store.open("team-a")
    replica.store.write("team-a", msgspec.structs.replace(stored.ledger, pending=CROWD), stored)
    recounting.recounter.ledgers.relist()
    for waited, due in ((0.2, False), (0.05, True)):
        recounting.later(waited)
        assert recounting.is_due() is due


def test_room_that_a_pod_has_freed_is_released_within_a_second(api: ApiDouble, replica: Replica) -> None:
    recounting = Recounting(api, replica, Ledger({"M40": ONE}, COUNTED), stored_pod(CARD))
    recounting.take_turn()
    api.remove(POD)
    recounting.recounter.pods.reflector.relist()
    recounting.later(1)
    assert recounting.is_due()


# Tests of logs and metrics


def test_each_write_of_a_replica_restarts_the_age_of_its_reservation(api: ApiDouble, replica: Replica) -> None:
    charges = {"M40": ONE}
    first, again = ({"replica": Reservation(charges, counter)} for counter in (1, 2))
    recounting = Recounting(api, replica, Ledger(reserved=first))
    for _ in range(2):
        recounting.recount()
        recounting.later(30)
    assert recounting.recounter.reservation_ages()["team-a"] >= 60
    stored = replica.store.read("team-a")
    replica.store.write("team-a", msgspec.structs.replace(stored.ledger, reserved=again), stored)
    recounting.relist()
    recounting.recount()
    assert recounting.recounter.reservation_ages()["team-a"] < 60


def test_recounting_lags_while_a_namespace_is_due(api: ApiDouble, replica: Replica) -> None:
    recounting = Recounting(api, replica, Ledger({"M40": ONE}, COUNTED), stored_pod(CARD))
    recounting.recounter.queue.add("team-a")
    recounting.later(40)
    assert (recounting.counted("lag_seconds") or 0) >= 40
    recounting.run()
    assert recounting.counted("lag_seconds") == 0
