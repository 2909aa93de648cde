"""Tests of shared ledgers when other replicas write first, API calls are lost, or a deadline passes."""

import asyncio
import time
from collections.abc import Callable

import pytest

from tests.api_double import ApiDouble, Delivery, Late, Script, before, delivered, lost_reply, lost_request, preceded_by
from tests.replicas import CARD, LEDGER, Clock, Gate, Replica, asked, kinds
from tests.tables import cases
from tests.waiting import PATIENT
from vcuda.errors import Unavailable, UnreadableLedger
from vcuda.ledger.ledger import Admitted
from vcuda.quota.model import Charge
from webhook.ledger.charging import Decision, PutOff
from webhook.ledger.namespace_ledger import TOO_MANY, UNSURE

# Tests with other writers


def test_a_conflict_reads_and_decides_again(api: ApiDouble, replica: Replica, other: Replica) -> None:
    replica.charge("a")
    other.charge("x", charge=Charge(200, 0, 200))
    api.forget_calls()
    assert isinstance(replica.charge("b"), Admitted)
    assert api.calls == ["PUT", "GET", "PUT"]
    assert replica.counted("conflicts_total") == 1
    assert sorted(replica.uids()) == ["a", "b", "x"]


def test_endless_conflicts_are_answered_busy_at_the_deadline(api: ApiDouble, replica: Replica, clock: Clock) -> None:
    replica.charge("a", deadline=clock.now + 1)
    api.deliver = before("PUT", lambda: api.store(LEDGER, api.objects[LEDGER]), times=10_000)
    assert replica.charge("b", deadline=clock.now + 1) == TOO_MANY
    assert replica.uids() == ["a"]


def test_a_call_past_its_deadline_is_answered_busy_without_an_api_call(
    api: ApiDouble, replica: Replica, clock: Clock
) -> None:
    assert replica.charge("a", deadline=clock.now) == TOO_MANY
    assert api.calls == []


# Tests with lost calls


@pytest.mark.parametrize("opened", [False, True], ids=["creating", "replacing"])
@cases(
    "deliveries, calls",
    the_reply_was_lost=([lost_reply], ["WRITE", "GET"]),
    the_request_was_lost=([lost_request], ["WRITE", "GET", "WRITE"]),
    request_lost_then_reply_lost=([lost_request, lost_reply], ["WRITE", "GET", "WRITE", "GET"]),
)
def test_a_write_without_an_answer_is_found_by_uid(
    api: ApiDouble, replica: Replica, deliveries: list[Callable[..., bytes]], calls: list[str], opened: bool
) -> None:
    if opened:
        replica.charge("x")
    api.forget_calls()
    api.deliver = Script(*deliveries)
    assert isinstance(replica.charge("a"), Admitted)
    assert replica.uids().count("a") == 1
    assert replica.usage()["M40"].used == (CARD + CARD if opened else CARD)
    assert replica.counted("unsure_total") == len(deliveries)
    if opened:
        made = [call.replace("PUT", "WRITE") for call in api.calls]
        assert made[: len(calls)] == calls


def failing(writes: Script, reads: Script) -> Delivery:
    return lambda method, timeout, effect: (reads if method == "GET" else writes)(method, timeout, effect)


def test_a_write_that_lands_after_the_check_is_found_by_a_conflict(api: ApiDouble, replica: Replica) -> None:
    late = Late()
    replica.charge("x")
    api.deliver = Script(late, preceded_by(late.land))
    assert isinstance(replica.charge("a"), Admitted)
    assert replica.uids() == ["x", "a"]
    assert replica.counted("conflicts_total") == 1


def test_a_write_that_lands_late_after_another_was_made_changes_nothing(api: ApiDouble, replica: Replica) -> None:
    late = Late()
    replica.charge("x")
    api.deliver = Script(late)
    assert kinds(replica.charge(uid) for uid in "abcd") == ["Admitted"] * 3 + ["PutOff"]
    late.land()
    assert replica.uids() == ["x", "a", "b", "c"]


def test_the_last_card_is_not_rejected_to_the_pod_that_has_it(api: ApiDouble, replica: Replica) -> None:
    """The write of the charge for the last card got no answer. The retry finds a full ledger with the pod's uid."""
    replica.charge("x", charge=Charge(300, 0, 300))
    api.deliver = Script(lost_reply)
    assert isinstance(replica.charge("a"), Admitted)


@pytest.mark.parametrize("delivery", [lost_reply, lost_request])
def test_a_write_that_cannot_be_checked_admits_and_rejects_nothing(
    api: ApiDouble, replica: Replica, delivery: Callable[..., bytes]
) -> None:
    replica.charge("x")
    api.deliver = failing(Script(delivery), Script(lost_request, methods=("GET",)))
    assert replica.charge("a") == UNSURE
    assert isinstance(replica.charge("a"), Admitted), "the API server repeats the call"
    assert replica.uids() == ["x", "a"]


def test_an_unknown_outcome_stays_unknown_after_a_conflict(api: ApiDouble, replica: Replica) -> None:
    """The conflict may come from the write that got no answer."""
    late = Late()
    replica.charge("x")
    api.deliver = failing(Script(late, preceded_by(late.land)), Script(delivered, lost_request, methods=("GET",)))
    assert replica.charge("a") == UNSURE


def test_a_write_whose_outcome_stays_unknown_decides_nothing(api: ApiDouble, replica: Replica, clock: Clock) -> None:
    replica.charge("x", deadline=clock.now + 1)
    api.deliver = Script(*[lost_request] * 10_000)
    assert replica.charge("a", deadline=clock.now + 1) == UNSURE


@pytest.mark.parametrize("method", ["GET", "LIST", "GET after a conflict"])
def test_an_unreachable_api_server_is_an_error_if_no_own_write_may_land(
    api: ApiDouble, replica: Replica, other: Replica, method: str
) -> None:
    """A conflict proves that the charge was not stored, so the caller may get the error."""
    if method == "GET after a conflict":
        replica.charge("x")
        other.charge("y")
    api.deliver = Script(lost_request, methods=(method.partition(" ")[0],))
    with pytest.raises(Unavailable):
        replica.charge("a")
    assert isinstance(replica.charge("a"), Admitted), "the next call is not delayed"


@pytest.mark.parametrize(
    ("text", "advice"),
    [("{", "Delete this ConfigMap, and the ledger is rebuilt"), ('{"format": 1}', "Update all components")],
    ids=["damaged", "written by another release"],
)
def test_an_unreadable_ledger_is_never_used(api: ApiDouble, replica: Replica, text: str, advice: str) -> None:
    replica.charge("a")
    api.store(LEDGER, {"metadata": {"name": "gpu-ledger-team-a"}, "data": {"ledger": text}})
    for _ in range(2):
        with pytest.raises(UnreadableLedger, match=advice):
            replica.charge("b")


# Tests of callers that stop waiting for their answers


def test_a_caller_cancelled_during_the_write_of_its_group_does_not_affect_the_others(
    api: ApiDouble, replica: Replica
) -> None:
    """The charge of the cancelled caller is also written, so the pod is admitted if the API server repeats the call."""

    async def leave() -> list[Decision]:
        first = asyncio.create_task(replica.ledgers.charge(asked("x")))
        gate = Gate(api)
        callers = [asyncio.create_task(replica.ledgers.charge(asked(uid))) for uid in "abc"]
        assert await asyncio.to_thread(gate.arrived.wait, PATIENT)
        callers[1].cancel()
        gate.opened.set()
        return [await first, await callers[0], await callers[2]]

    assert kinds(asyncio.run(leave())) == ["Admitted"] * 3
    assert sorted(replica.uids()) == ["a", "b", "c", "x"]
    assert isinstance(replica.charge("b"), Admitted)
    assert isinstance(replica.charge("d"), PutOff)


def test_a_deadline_during_the_write_of_a_charge_has_an_unknown_outcome(api: ApiDouble, replica: Replica) -> None:
    replica.charge("x")

    async def come_late() -> Decision:
        gate = Gate(api)
        caller = asyncio.create_task(replica.ledgers.charge(asked("a", deadline=time.monotonic() + 0.3)))
        assert await asyncio.to_thread(gate.arrived.wait, PATIENT)
        decision = await caller
        gate.opened.set()
        return decision

    assert asyncio.run(come_late()) == UNSURE
    assert isinstance(replica.charge("a"), Admitted), "the API server repeats the call"
    assert replica.uids() == ["x", "a"]
