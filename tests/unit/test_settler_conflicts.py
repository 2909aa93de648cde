"""Settling beside replicas that write first: it reads again, loses nothing of theirs, and leaves some for later."""

from __future__ import annotations

import pytest

from controller.settler import TRIES
from controller.workqueue import WorkQueue
from tests.api_double import ApiDouble, Effect, delivered
from tests.replicas import Replica
from tests.settling import Settling
from vcuda.ledger.ledger import Ledger
from vcuda.quota.model import Charge

HALF = Charge(50, 0, 50)
GONE = Ledger({"M40": Charge(100, 0, 100)})
"""A ledger that counts a pod of which nothing is stored any more."""


@pytest.fixture
def settling(api: ApiDouble, replica: Replica) -> Settling:
    """Return a settler that has one turn, unless that came to nothing, and whose ledger is out of date."""
    settling = Settling(api, replica, GONE)
    settling.settler.due = WorkQueue(spacing=1000.0)
    settling.settler.due.add("team-a")
    return settling


def overtake(api: ApiDouble, replica: Replica, times: int) -> list[str]:
    """Let the replica charge a pod just before each of the next writes; return their uids."""
    uids = [f"uid-{number}" for number in range(times)]
    left = iter(uids)

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


@pytest.mark.parametrize("times", range(TRIES))
def test_a_settlement_that_is_overtaken_is_tried_again_at_once(
    api: ApiDouble, replica: Replica, other: Replica, settling: Settling, times: int
) -> None:
    """What the replicas charged meanwhile stays charged; what is gone is released all the same."""
    uids = overtake(api, other, times)
    settling.run()
    assert settling.counted("seconds_count") == 1
    ledger = replica.store.read("team-a").ledger
    assert (ledger.committed, list(ledger.pending)) == ({}, uids)


def test_a_settlement_that_is_overtaken_too_often_lets_others_have_their_turn(
    api: ApiDouble, replica: Replica, other: Replica, settling: Settling
) -> None:
    """The namespace is due again, and the next turn mends it."""
    uids = overtake(api, other, TRIES)
    settling.run()
    assert settling.counted("seconds_count") == 2
    ledger = replica.store.read("team-a").ledger
    assert (ledger.committed, list(ledger.pending)) == ({}, uids)


def test_a_settlement_without_a_conflict_writes_once_and_reads_nothing(api: ApiDouble, settling: Settling) -> None:
    settling.run()
    assert api.calls == ["PUT"]


def test_after_a_conflict_the_ledger_is_read_once_and_written_again(
    api: ApiDouble, other: Replica, settling: Settling
) -> None:
    overtake(api, other, 1)
    settling.run()
    assert api.calls == ["GET", "PUT"]
