"""Tests of the end of a reservation (quota that a replica holds in advance).

The replica or the leader releases the reservation, or the ledger is deleted. Some writes have an unknown outcome.
"""

from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import pytest
import structlog

from tests.reservation_scenarios import A, B, written
from tests.reservation_world import ReservationWorld
from tests.tables import cases
from vcuda.kube.client import Heard
from vcuda.ledger.ledger import MARGIN_SECONDS, RESERVATION_SECONDS
from vcuda.quota.well_known import STORABLE_SECONDS


@pytest.fixture
def world() -> Iterator[ReservationWorld]:
    """Return simulated replicas and leaders. Replica A has reserved quota in advance, and was the last to write."""
    with ReservationWorld() as world:
        world.reserve(A)
        written(world)
        yield world


# Tests of a replica that stops


@pytest.mark.parametrize("others", [0, 3], ids=["alone", "while others write first"])
def test_a_replica_that_stops_writes_its_charges_and_releases_the_rest(world: ReservationWorld, others: int) -> None:
    [own] = world.ledger().reserved
    world.ask(A, 2)
    granted = {*world.storable()}
    world.close(A)
    for _ in range(others):
        calls = world.wire.of(world.replicas[A])
        world.ask(B, 1)
        world.through(world.replicas[B])
        world.answer(calls[0])
    world.go_on()
    ledger = world.ledger()
    assert own not in ledger.reserved
    assert granted <= ledger.pending.keys()


def test_a_replica_that_stops_reserves_nothing_any_more(world: ReservationWorld) -> None:
    """A replica that is stopping still answers calls."""
    world.close(A)
    world.ask(A, 20)
    world.go_on()
    assert (world.ledger().reserved, len(world.storable())) == ({}, 22)


# Tests of a deleted ledger


@pytest.mark.parametrize(("leader", "rate"), [(0, 1.01), (1, 0.99)])
def test_a_reservation_is_reaped_when_none_of_its_pods_can_be_stored_any_more(
    world: ReservationWorld, leader: int, rate: float
) -> None:
    """The leader measures the age of the reservation by its own clock, from the time when it first saw it."""
    world.crash(A)
    world.recount(leader)
    [replica] = world.ledger().reserved
    world.pass_by((RESERVATION_SECONDS + STORABLE_SECONDS + MARGIN_SECONDS) / rate - 0.1)
    world.recount(leader)
    assert world.ledger().reserved
    world.pass_by(0.2)
    with structlog.testing.capture_logs() as logs:
        world.recount(leader)
    assert world.ledger().reserved == {}
    told = [line for line in logs if line["event"] == "releasing the reservation of a replica that has ended"]
    assert [(line["namespace"], line["replica"]) for line in told] == [("team-a", replica)]


def test_the_list_that_counts_a_reaped_reservations_pods_begins_after_its_time(world: ReservationWorld) -> None:
    world.ask(A, 2)
    world.crash(A)
    world.recount()
    world.pass_by(RESERVATION_SECONDS + STORABLE_SECONDS + MARGIN_SECONDS)
    world.leaders[0].recount()
    assert [call.method for call in world.wire.open] == ["LIST"]
    assert not world.wire.open[0].arrived


# Tests of a write whose outcome is unknown


def overtaken(world: ReservationWorld) -> None:
    world.ask(B, 1)
    world.through(world.replicas[B])


def landed(world: ReservationWorld) -> None:
    world.wire.land()


@cases(
    "befalls, status",
    it_lands=(lambda _: None, HTTPStatus.OK),
    the_write_had_landed=(landed, HTTPStatus.CONFLICT),
    others_wrote_first=(overtaken, HTTPStatus.CONFLICT),
    the_ledger_was_deleted=(ReservationWorld.lose, HTTPStatus.NOT_FOUND),
)
def test_a_write_without_an_answer_is_repeated_unchanged_until_its_outcome_is_known(
    world: ReservationWorld,
    befalls: Callable[[ReservationWorld], None],
    status: HTTPStatus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[bytes] = []
    put = world.api.kube.put_heard

    def put_heard(path: str, body: bytes, *rest: Any, **more: Any) -> Heard:
        sent.append(body)
        return put(path, body, *rest, **more)

    monkeypatch.setattr(world.api, "put_heard", put_heard)
    world.ask(A, 2)
    for _ in range(3):
        [call] = world.flush(A)
        assert call.method == "PUT"
        world.give_up(call, lands=True)
    befalls(world)
    mine = len(sent) - (befalls is overtaken)
    del sent[mine:]
    world.flush(A)
    assert len({*sent}) == 1
    assert len(sent) == mine + 1
    world.go_on(world.replicas[A])
    # If the ledger was deleted, the new ledger has no pending charges. It admits nothing until the charges of the
    # deleted ledger are counted.
    known = set() if status == HTTPStatus.NOT_FOUND else set(world.storable())
    assert world.ledger().pending.keys() == known
