"""Tests of ledgers that replicas share.

A replica decides charges in groups, by the ledger that it remembers. One write (compare-and-swap) for each group proves
that the remembered ledger was current.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime

import pytest
from msgspec import structs

from tests.api_double import ApiDouble
from tests.builders import ONE_CARD, stored_pod
from tests.quota_map import QUOTA
from tests.replicas import CARD, LEDGER, POD, Clock, Replica, asked, kinds, together
from tests.waiting import PATIENT
from vcuda.errors import Unavailable
from vcuda.ledger.ledger import MAX_PENDING, Admitted, Ledger, Pending, Rejected
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Usage
from vcuda.requests.resources import GpuResources
from webhook.ledger.charging import PutOff
from webhook.ledger.namespace_ledger import CACHED_USAGE_SECONDS


def test_a_group_is_one_write(api: ApiDouble, replica: Replica) -> None:
    decisions = together(api, replica, asked("a"), [asked("b"), asked("c"), asked("d")])
    assert kinds(decisions) == ["Admitted"] * 4
    assert replica.uids() == ["a", "b", "c", "d"]
    assert [call for call in api.calls if call in ("POST", "PUT")] == ["POST", "POST", "PUT", "PUT"], (
        "expected writes of the ledger, its mark, the first charge and the group"
    )
    assert replica.counted("batch_charges_sum") == 4
    assert replica.counted("batch_charges_count") == 2


def test_a_group_is_decided_in_order_each_charge_with_those_before_it(api: ApiDouble, replica: Replica) -> None:
    """A charge that does not fit does not stop the group. A later charge that is smaller is admitted."""
    rest = [asked("b", charge=CARD + CARD), asked("c", charge=CARD + CARD), asked("d"), asked("e")]
    decisions = together(api, replica, asked("a"), rest)
    assert kinds(decisions) == ["Admitted", "Admitted", "PutOff", "Admitted", "PutOff"]
    assert sorted(replica.uids()) == ["a", "b", "d"]
    assert [d.usage.used.cores for d in decisions if isinstance(d, Admitted)] == [100, 300, 400]


def test_a_call_that_is_repeated_in_its_own_group_is_charged_once(api: ApiDouble, replica: Replica) -> None:
    decisions = together(api, replica, asked("a"), [asked("b"), asked("b"), asked("b")])
    assert kinds(decisions) == ["Admitted"] * 4
    assert replica.uids() == ["a", "b"]


def test_a_dry_run_and_a_late_call_in_a_group_do_not_affect_the_others(api: ApiDouble, replica: Replica) -> None:
    dry, late = asked("b", charge=Charge(300, 0, 300), dry_run=True), asked("late", deadline=time.monotonic())
    decisions = together(api, replica, asked("a"), [dry, late, asked("c", charge=Charge(300, 0, 300))])
    assert kinds(decisions) == ["Admitted", "Admitted", "RetryLater", "Admitted"]
    assert replica.uids() == ["a", "c"]


def test_namespaces_have_separate_ledgers(replica: Replica) -> None:
    decisions = [replica.charge(uid, namespace=f"team-{uid[0]}") for uid in ("a1", "b1", "a2", "a3", "a4", "a5")]
    assert kinds(decisions) == ["Admitted"] * 5 + ["PutOff"]
    assert replica.usage("team-b") == {"M40": Usage(CARD, CARD)}


def test_after_a_write_the_next_group_needs_no_read(api: ApiDouble, replica: Replica) -> None:
    """/mutate also reads the ledger. That read does not replace the ledger that the replica remembers."""
    replica.charge("a")
    replica.usage()
    api.forget_calls()
    assert kinds(replica.charge(uid) for uid in "bcd") == ["Admitted"] * 3
    assert api.calls == ["PUT"] * 3


@pytest.mark.parametrize(("uid", "dry_run"), [("a", False), ("b", True)], ids=["a repeated call", "a dry run"])
def test_an_admission_without_a_write_is_confirmed_by_a_read(
    api: ApiDouble, replica: Replica, uid: str, dry_run: bool
) -> None:
    """Without a write, no compare-and-swap proves that the remembered ledger is current. So the replica reads it."""
    replica.charge("a")
    api.forget_calls()
    assert isinstance(replica.charge(uid, dry_run=dry_run), Admitted)
    assert api.calls == ["GET"]


def test_a_call_that_is_repeated_after_its_charge_was_released_is_charged_again(replica: Replica) -> None:
    replica.charge("a")
    replica.store.write("team-a", Ledger({"M40": Charge(400)}, "7"), replica.store.open("team-a"))
    assert isinstance(replica.charge("a"), PutOff)
    assert isinstance(replica.charge("a", dry_run=True), PutOff)


def test_a_rejection_is_confirmed_by_one_fresh_read(api: ApiDouble, replica: Replica) -> None:
    """The controller may have released charges since the replica last read the ledger."""
    for uid in "abcd":
        replica.charge(uid)
    api.forget_calls()
    assert isinstance(replica.charge("e"), PutOff)
    assert api.calls == ["GET", "LIST", "LIST", "GET"], (
        "expected a read, a count of the stored objects, and a second read"
    )
    replica.store.write("team-a", Ledger({}, "7"), replica.store.open("team-a"))
    api.forget_calls()
    assert isinstance(replica.charge("e"), Admitted)
    assert api.calls == ["GET", "PUT"]
    assert replica.uids() == ["e"]


def test_a_group_with_a_rejection_is_decided_again_as_a_whole(api: ApiDouble, replica: Replica, other: Replica) -> None:
    """If one charge of a group is rejected, the charges that fit the remembered ledger are decided again too."""
    replica.charge("a")
    other.charge("x", charge=Charge(200, 0, 200))
    decisions = together(api, replica, asked("b"), [asked("c"), asked("d", charge=Charge(300, 0, 300))])
    assert kinds(decisions) == ["Admitted", "PutOff", "PutOff"]
    assert sorted(replica.uids()) == ["a", "b", "x"]


def test_too_many_pending_charges_are_busy_and_not_remembered(replica: Replica) -> None:
    quota = NamespaceQuota({"M40": Limit(10_000)})
    share = Pending("M40", Charge(1, 1))
    crowded = Ledger(pending={f"uid-{number}": share for number in range(MAX_PENDING)})
    replica.charge("a", quota=quota)
    replica.store.write("team-a", crowded, replica.store.open("team-a"))
    assert kinds(replica.charge("b", quota=quota) for _ in range(2)) == ["RetryLater", "RetryLater"]
    replica.store.write("team-a", Ledger(), replica.store.open("team-a"))
    assert isinstance(replica.charge("b", quota=quota), Admitted)


def test_a_ledger_that_does_not_exist_yet_is_not_remembered(api: ApiDouble, replica: Replica) -> None:
    """Without a stored ledger, no write conflict shows charges of others. So the replica must count the pods again."""
    assert isinstance(replica.charge("a", dry_run=True), Admitted)
    assert LEDGER not in api.objects
    api.store(POD, stored_pod({"tencent.com/vcuda-core": 400}))
    assert isinstance(replica.charge("b"), Rejected)


def test_a_deleted_ledger_is_recreated_at_once(api: ApiDouble, replica: Replica) -> None:
    """The new ledger includes the charges of pods that were created while there was no ledger."""
    replica.charge("a")
    replica.store.drop("team-a", str(replica.store.read("team-a").version))
    api.store(POD, stored_pod({"tencent.com/vcuda-core": 300}))
    assert kinds(replica.charge(uid) for uid in "bc") == ["Admitted", "PutOff"]
    assert replica.uids() == ["b"]


@pytest.mark.parametrize("remembers", [True, False], ids=["a replica that wrote the ledger", "a replica that has not"])
def test_pods_from_the_time_without_a_quota_count_even_if_the_ledger_stayed(
    api: ApiDouble, replica: Replica, other: Replica, remembers: bool
) -> None:
    """Pods from a time without a quota have no charge. The old ledger is still stored, as no leader deleted it."""
    replica.charge("a")
    api.store(POD, stored_pod({"tencent.com/vcuda-core": 300}))
    edited = json.loads(api.store(QUOTA, {}))["metadata"]["resourceVersion"]
    asked, before = replica if remembers else other, api.objects[LEDGER]
    assert isinstance(asked.charge("b", counted_since=edited, dry_run=True), PutOff)
    assert api.objects[LEDGER] is before
    assert isinstance(asked.charge("b", counted_since=edited), PutOff)
    assert asked.store.read("team-a").ledger.committed == {"M40": Charge(300, 0, 300)}, (
        "the read ledger must be kept for the next decision"
    )
    api.forget_calls()
    assert isinstance(asked.charge("c", counted_since=edited), PutOff)
    assert api.calls == ["GET", "LIST", "LIST", "GET"], "expected LISTs for the rejection only"


def test_nothing_is_decided_while_a_due_count_fails(api: ApiDouble, replica: Replica) -> None:
    """The replica has not read the newest quota ConfigMap with the values of GPU units, so it must not count pods."""
    replica.charge("a")
    api.store(POD, stored_pod({"tencent.com/vcuda-core": 300}))
    edited = json.loads(api.store(QUOTA, {}))["metadata"]["resourceVersion"]
    replica.store.resources = lambda: GpuResources(version=edited)
    before = replica.store.read("team-a")
    by_newer = structs.replace(before.ledger, config_version=f"{int(edited) + 1}")
    stored = replica.store.write("team-a", by_newer, before)
    with pytest.raises(Unavailable, match="newer quota ConfigMap than this replica has read"):
        replica.charge("b", counted_since=edited)
    assert replica.store.read("team-a") == stored
    replica.store.resources = lambda: GpuResources(version=by_newer.config_version)
    assert isinstance(replica.charge("b", counted_since=by_newer.config_version), PutOff)


def test_a_pod_that_was_pending_during_the_count_is_not_counted_twice(api: ApiDouble, replica: Replica) -> None:
    replica.charge("a")
    api.store(POD, stored_pod(ONE_CARD, uid="a"))
    edited = json.loads(api.store(QUOTA, {}))["metadata"]["resourceVersion"]
    assert isinstance(replica.charge("b", counted_since=edited), Admitted)
    ledger = replica.store.read("team-a").ledger
    assert (ledger.committed, list(ledger.pending)) == ({"M40": CARD}, ["b"])


@pytest.mark.parametrize("opened", [False, True], ids=["no ledger yet", "a ledger"])
def test_a_dry_run_is_decided_and_writes_nothing(api: ApiDouble, replica: Replica, opened: bool) -> None:
    if opened:
        replica.charge("x")
    before = dict(api.objects)
    decisions = [replica.charge(str(cores), charge=Charge(cores, 0, cores), dry_run=True) for cores in (300, 500)]
    assert kinds(decisions) == ["Admitted", "Rejected"]
    assert api.objects == before


def test_cached_usage_may_be_a_moment_old_and_usage_is_current(
    api: ApiDouble, replica: Replica, other: Replica, clock: Clock
) -> None:
    replica.charge("a", deadline=clock.now + 1)
    other.charge("x", deadline=clock.now + 1)
    api.forget_calls()
    assert asyncio.run(replica.ledgers.cached_usage("team-a")) == {"M40": Usage(CARD, CARD)}
    assert api.calls == []
    assert replica.usage() == {"M40": Usage(CARD + CARD, CARD + CARD)}
    other.charge("y", deadline=clock.now + 1)
    clock.now += CACHED_USAGE_SECONDS
    assert asyncio.run(replica.ledgers.cached_usage("team-a"))["M40"].used.cores == 300


@pytest.mark.parametrize("fields", [{"grace": 600}, {"dry_run": True}], ids=["may run for long", "a dry run"])
def test_a_pod_with_a_long_grace_period_is_never_admitted_from_a_reservation(
    api: ApiDouble, replica: Replica, clock: Clock, fields: Mapping[str, object]
) -> None:
    """If a watch misses the deletion of a pod with a long grace period, only the ledger keeps the pod's charge."""
    api.date = lambda: datetime.fromtimestamp(clock.now, UTC)
    given = {"quota": NamespaceQuota({"M40": Limit(10_000)}), "deadline": clock.now + PATIENT, "created": clock.now}

    async def spent() -> list[float | None]:
        for uid in map(str, range(8)):
            await replica.ledgers.charge(asked(uid, **given))
        before = replica.counted("spent_total")
        await replica.ledgers.charge(asked("last", **given, **fields))
        return [before, replica.counted("spent_total")]

    before, after = asyncio.run(spent())
    assert before
    assert after == before


def test_a_charge_admitted_from_a_reservation_is_used_at_once(api: ApiDouble, replica: Replica, clock: Clock) -> None:
    api.date = lambda: datetime.fromtimestamp(clock.now, UTC)
    limit = NamespaceQuota({"M40": Limit(10_000)}, total=Limit(10_000))
    totals = []

    async def under_load() -> Mapping[str, Usage]:
        for uid in map(str, range(8)):
            if replica.counted("spent_total"):
                break
            request = asked(uid, quota=limit, deadline=clock.now + PATIENT, created=clock.now)
            decision = await replica.ledgers.charge(request)
            assert isinstance(decision, Admitted)
            totals.append(decision.total_usage and decision.total_usage.used)
        api.forget_calls()
        clock.now += CACHED_USAGE_SECONDS
        return await replica.ledgers.cached_usage("team-a")

    assert asyncio.run(under_load())["M40"].used == Charge(500, 0, 500)
    assert totals == [CARD * number for number in range(1, 6)]
    assert api.calls == []
