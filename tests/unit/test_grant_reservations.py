"""Tests of replicas that admit from reservations (quota that a replica holds in advance) when a grant ends.

A grant is temporary quota. After its end, no charge may use the larger limit.
"""

from collections.abc import Iterator

import pytest

from tests.reservation_scenarios import A, B
from tests.reservation_subjects import CARDS
from tests.reservation_world import ReservationWorld
from vcuda.quota.model import Grant, Limit
from vcuda.quota.times import UTC, Times

GRANT_SECONDS = 20.0


@pytest.fixture
def world() -> Iterator[ReservationWorld]:
    """Return a test world (replicas, leaders and a double of the API server) in which a grant ends in one second.

    The grant doubles the limit. Without the grant, the stored pods exceed the limit. The size of replica A's
    reservation is from the larger limit.
    """
    with ReservationWorld() as world:
        end = world.time.now + GRANT_SECONDS
        world.grants = (Grant({"M40": Limit(100 * CARDS)}, Times(UTC, end=end)),)
        world.ask(B, CARDS)
        world.go_on()
        world.store_some()
        world.recount()
        world.pass_by(end - 1 - world.time.now)
        world.reserve(A)
        assert world.ledger().reserved
        world.pass_by(end - 1 - world.time.now)
        yield world


def end_grant(world: ReservationWorld, later: float = 0) -> None:
    """Advance the time of the world to ``later`` seconds after the end of the grant."""
    [grant] = world.grants
    world.pass_by(grant.times.end + later - world.time.now)


def admitted_by(world: ReservationWorld, replica: int, number: int) -> int:
    """Create ``number`` pods through this replica. Return the number of admitted pods."""
    before = len(world.storable())
    world.ask(replica, number)
    world.go_on()
    return len(world.storable()) - before


def test_a_reservation_admits_nothing_after_the_grant_that_sized_it_has_ended(world: ReservationWorld) -> None:
    spent = world.spent
    assert admitted_by(world, A, 1) == 1
    assert world.spent == spent + 1
    end_grant(world)
    assert [admitted_by(world, replica, 3) for replica in (A, B)] == [0, 0]
    assert world.spent == spent + 1


@pytest.mark.parametrize("seconds", [0.5, 2.0, 5.0])
def test_a_slow_clock_admits_too_much_only_for_the_error_of_the_clock(world: ReservationWorld, seconds: float) -> None:
    world.replicas[A].ahead = -seconds
    end_grant(world)
    assert admitted_by(world, B, 3) == 0
    end_grant(world, later=seconds)
    assert admitted_by(world, A, 3) == 0


def test_a_reservation_sized_by_an_ended_grant_is_released(world: ReservationWorld) -> None:
    end_grant(world)
    assert admitted_by(world, A, 1) == 0
    for _ in range(5):
        world.pass_by(1)
        world.go_on()
    assert world.ledger().reserved == {}


def test_a_grant_that_begins_admits_at_once(world: ReservationWorld) -> None:
    end_grant(world)
    assert admitted_by(world, A, 1) == 0
    world.limits_since = world.time.now + 5
    world.grants = (Grant({"M40": Limit(100 * CARDS)}, Times(UTC, start=world.limits_since)),)
    world.pass_by(4.5)
    assert admitted_by(world, A, 1) == 0
    world.pass_by(0.5)
    assert admitted_by(world, A, 1) == 1
