"""Scenarios of webhook replicas that admit from reservations. Each ends when a bug would admit more than the quota.

In most scenarios, replica A has reserved quota, and a bug would let replica B use the same quota.
"""

from collections.abc import Callable, Sequence

from tests.reservation_subjects import LIMITS
from tests.reservation_world import ReservationWorld
from vcuda.quota.model import Charge, Limit
from webhook.ledger.reservations import RATE_SECONDS, WRITE_SECONDS

Scenario = Callable[[ReservationWorld], None]

A, B = 0, 1


def others_take_all_that_is_left(world: ReservationWorld) -> None:
    """Replica B must not use the quota that replica A reserved, and A must not admit more than this quota."""
    world.reserve(A)
    world.ask(B, 60)
    world.go_on()
    world.ask(A, 20)
    world.go_on()


def recounted_and_filled(world: ReservationWorld) -> None:
    """A leader recounts the ledger. Then replica B gets requests for 60 cards, which is more than the free quota."""
    world.recount()
    world.ask(B, 60)
    world.through()


def spend_late(world: ReservationWorld, seconds: float) -> None:
    """Replica A makes a reservation, admits pods ``seconds`` later, and then cannot write their charges."""
    world.reserve(A)
    world.pause(A)
    began = world.time.now
    world.pass_by(int(began) + seconds - began)
    world.ask(A, 3)
    world.resume(A)
    world.pause(A)


def others_try_again_and_again(world: ReservationWorld) -> None:
    """No earlier pod can still be stored. Then, several times, a leader recounts and replica B requests all quota."""
    for seconds in (3, 58, 5, 7.5, 0.7, 0.4, 0.4, 0.4, 0.4, 0.4, 5, 5, 5):
        world.pass_by(seconds)
        recounted_and_filled(world)


def reaped_when_what_it_spent_last_is_no_longer_stored(world: ReservationWorld) -> None:
    """Replica A's reservation expires before the deadline of the last pods that A admitted. The clocks differ."""
    spend_late(world, 10)
    world.crash(A)
    others_try_again_and_again(world)


def the_ledger_is_lost_and_it_does_not_know(world: ReservationWorld) -> None:
    world.reserve(A)
    world.pause(A)
    lost = world.time.now
    world.lose()
    world.ask(B, 1)
    world.through()
    world.pass_by(lost + 9.5 - world.time.now)
    world.ask(A, 3)
    world.resume(A)
    assert world.spent
    world.crash(A)
    others_try_again_and_again(world)


def spent_past_its_time(world: ReservationWorld) -> None:
    world.behind = 2
    spend_late(world, 12)
    world.crash(A)
    world.pass_by(74.9)
    recounted_and_filled(world)


def its_time_counts_from_before_the_write(world: ReservationWorld) -> None:
    """Replica A gets the answer to its write eight seconds late, and the clocks of two API server replicas differ."""
    world.behind = 2
    world.reserve(A)
    written(world)
    world.ask(A, 1)
    world.pass_by(WRITE_SECONDS * 2.2)
    [put] = world.writes(A)
    put.arrive()
    landed = int(world.time.now)
    world.store_some()
    world.recount()
    world.pass_by(8)
    world.answer(put)
    world.pause(A)
    world.pass_by(landed + 12 - world.time.now)
    world.ask(A, 3)
    world.resume(A)
    world.crash(A)
    world.pass_by(landed + 86.9 - world.time.now)
    recounted_and_filled(world)


def written(world: ReservationWorld, size: str = "card") -> None:
    """Let replica A write the ledger again, so that the last write is A's."""
    for _ in range(2):
        world.ask(A, 1, size=size)
        world.flush(A)
        world.through(world.replicas[A])


def clocks_that_stood_still(world: ReservationWorld) -> None:
    """Replica A's machine is suspended for longer than a reservation lasts. A's own clocks do not show this."""
    world.reserve(A)
    world.suspend(A, 40)
    world.ask(A, 3)
    world.crash(A)
    world.pass_by(48)
    recounted_and_filled(world)


def the_next_reservation_is_larger_and_that_write_is_lost(world: ReservationWorld) -> None:
    world.reserve(A, 4)
    world.ask(A, 12)
    world.flush(A)
    world.ask(A, 12)


def the_next_reservation_is_smaller(world: ReservationWorld) -> None:
    """Replica A writes a smaller reservation. Until the answer, A may admit only what fits the old and new one."""
    world.reserve(A, 20)
    written(world)
    [put] = world.idle(A)
    world.ask(A, 4)
    put.arrive()
    world.check()


def created_while_a_write_is_under_way(world: ReservationWorld) -> None:
    world.reserve(A, 20)
    written(world)
    world.ask(A, 1)
    assert world.flush(A)
    world.ask(A, 2)
    world.go_on()
    world.idle(A)
    world.go_on()


def a_write_of_unknown_outcome_lands_late(world: ReservationWorld) -> None:
    """Replica A writes a smaller reservation and gets no answer. A then reads the ledger before the write arrives.

    If A relied on this content, A would admit too much.
    """
    world.reserve(A, 80, size="twentieth")
    written(world, "twentieth")
    world.pause(A)
    world.pass_by(RATE_SECONDS * 1.1)
    world.ask(A, 4, size="twentieth")
    world.resume(A)
    world.pass_by(0.5)
    world.flush(A)
    [put] = world.writes(A)
    world.give_up(put, lands=True)
    world.ask(A, 30, size="twentieth")
    for call in [call for call in world.flush(A) if call.method == "GET"]:
        world.answer(call)
    world.wire.land()
    for _ in range(2):
        world.pass_by(0.03)
        world.answer(world.wire.of(world.replicas[A])[0])
    world.pass_by(0.03)
    world.ask(A, 30, size="twentieth")


def what_was_spent_is_in_the_next_write(world: ReservationWorld) -> None:
    world.reserve(A)
    world.ask(A, 2)
    world.flush(A)
    world.go_on()
    world.idle(A)
    world.go_on()


def others_write_first(world: ReservationWorld) -> None:
    """Replica A's write is rejected because replica B wrote first. A's reservation in the ledger is unchanged."""
    world.reserve(A)
    written(world)
    world.ask(A, 2)
    [put] = world.flush(A)
    world.ask(B, 1)
    world.through(world.replicas[B])
    world.answer(put)
    [get] = world.flush(A)
    world.answer(get)
    world.ask(A, 60)
    world.check()
    world.through()
    world.idle(A)
    world.go_on()


def another_process_has_another_id(world: ReservationWorld) -> None:
    world.reserve(A)
    world.ask(A, 2)
    world.crash(A)
    world.ask(A, 12)
    world.through()
    world.pass_by(0.01)
    world.ask(A, 1)
    world.through()


def the_limit_is_lowered(world: ReservationWorld) -> None:
    world.reserve(A)
    world.set_limits({**LIMITS, "M40": Limit(1000)})
    world.ask(A, 3)
    world.through()


def the_limit_is_lowered_while_another_replica_writes_first(world: ReservationWorld) -> None:
    """Replica A made its reservation before the limit was lowered."""
    world.reserve(A, 5)
    world.set_limits({**LIMITS, "M40": Limit(500)})
    for _ in range(4):
        world.go_on()
    world.ask_again("uid-5", B)
    world.ask(A, 4)
    world.go_on()
    world.ask(A)


def a_burst_just_below_the_limit(world: ReservationWorld) -> None:
    """By its recent demand, replica A would reserve more than the free quota."""
    world.reserve(A, 96, size="half")
    world.ask(A, 30, size="half")
    world.through()


TOTAL = Limit(4500)
"""A limit of all models together that is below each limit of a model."""


def both_models_use_up_the_total(world: ReservationWorld) -> None:
    world.set_limits(LIMITS, TOTAL)
    for replica, model in ((A, "M40"), (B, "P100")):
        world.ask(replica, 40, model)
        world.go_on()


def others_take_all_that_is_left_of_the_total(world: ReservationWorld) -> None:
    """Replica A has reserved quota of one model. B requests another model, and must not exceed the total with it."""
    world.set_limits(LIMITS, TOTAL)
    world.reserve(A)
    world.ask(B, 60, "P100")
    world.go_on()
    world.ask(A, 20)
    world.go_on()


def a_burst_just_below_the_total(world: ReservationWorld) -> None:
    """The model's own limit would permit a larger reservation than the limit of all models together."""
    world.set_limits(LIMITS, TOTAL)
    world.reserve(A, 87, size="half")
    world.ask(A, 30, size="half")
    world.through()


def the_total_is_lowered(world: ReservationWorld) -> None:
    world.set_limits(LIMITS, TOTAL)
    world.reserve(A)
    world.set_limits(LIMITS, Limit(1000))
    world.ask(A, 3)
    world.through()


def free_cores(world: ReservationWorld) -> int:
    return LIMITS["M40"].most_cores - int(world.ledger().usage("M40").used.cores)


def little_room_beside_what_others_reserve(world: ReservationWorld) -> None:
    world.reserve(A, 90, size="fifth")
    for number in (free_cores(world) // 20 - 1, 1):
        world.ask(B, number, size="fifth")
        world.go_on(world.replicas[B])
        world.store_some()
        assert free_cores(world) >= 0, "more than the limit is charged"
    for replica in (A, B):
        world.ask(replica, 60, size="fifth")


def its_reservation_was_reaped(world: ReservationWorld) -> None:
    """Replica A's reservation expired, and the leader counted A's pods. When A continues, they must not count twice."""
    spend_late(world, 9)
    world.store_some()
    for _ in range(2):
        world.pass_by(50)
        world.recount()
    assert not world.ledger().reserved
    world.resume(A)
    world.go_on()
    world.flush(A)
    world.go_on()
    stored = Charge(100 * len(world.stored), 0, 100 * len(world.stored))
    assert world.ledger().usage("M40").used == stored, "a spent charge is counted twice"


def reaped_by_a_count_of_that_moment(world: ReservationWorld) -> None:
    """Replica A's reservation expires, but the leader's watches have delivered nothing since A made it."""
    spend_late(world, 9)
    world.store_some()
    world.crash(A)
    world.pass_by(90)
    world.recount(look=False)


def renewed_for_longer_than_it_could_stand_by_itself(world: ReservationWorld) -> None:
    for _ in range(10):
        world.reserve(A, 4, size="fifth")
        world.pass_by(9.9)
    world.reserve(A, 12, size="fifth")
    world.ask(A, 2, size="fifth")


def who_waits_is_given_what_others_reserve(world: ReservationWorld) -> None:
    """Replica B gets a pod that needs the quota in replica A's reservation, while A continues to admit pods."""
    world.reserve(A, 100, size="twentieth")
    world.ask(B, free_cores(world) // 100)
    world.go_on()
    world.ask(B, free_cores(world) // 5, size="twentieth")
    world.go_on()
    for _ in range(2):
        world.ask(B, 1, size="five")
        world.go_on()
        world.ask(A, 2, size="twentieth")
        world.flush(A)
        world.go_on()
        world.flush(A)
        world.go_on()
    admitted = [each.size for each in world.subjects.values() if each.before >= 0]
    assert admitted.count("five") == 1, "the waiting pod never gets room"


def never_stored(world: ReservationWorld) -> None:
    world.ask(B, 2)
    world.through()
    world.pass_by(80)


def stored_at_the_last_moment(world: ReservationWorld) -> None:
    world.ask(B, 2)
    world.through()
    world.recount()
    world.pass_by(70)
    world.recount()


def stored_where_the_leader_has_not_seen_it(world: ReservationWorld) -> None:
    stored_at_the_last_moment(world)
    world.store_some()
    world.pass_by(10)
    world.recount(look=False)


def play(scenario: Scenario, world: ReservationWorld) -> None:
    """Run a scenario, then let all API calls succeed for a while. The ledger must charge just the stored objects."""
    with world:
        scenario(world)
        world.come_to_rest()


ALL: Sequence[Scenario] = [
    others_take_all_that_is_left,
    reaped_when_what_it_spent_last_is_no_longer_stored,
    spent_past_its_time,
    the_ledger_is_lost_and_it_does_not_know,
    its_time_counts_from_before_the_write,
    clocks_that_stood_still,
    the_next_reservation_is_larger_and_that_write_is_lost,
    the_next_reservation_is_smaller,
    a_write_of_unknown_outcome_lands_late,
    what_was_spent_is_in_the_next_write,
    others_write_first,
    created_while_a_write_is_under_way,
    another_process_has_another_id,
    the_limit_is_lowered,
    the_limit_is_lowered_while_another_replica_writes_first,
    a_burst_just_below_the_limit,
    both_models_use_up_the_total,
    others_take_all_that_is_left_of_the_total,
    a_burst_just_below_the_total,
    the_total_is_lowered,
    little_room_beside_what_others_reserve,
    its_reservation_was_reaped,
    reaped_by_a_count_of_that_moment,
    renewed_for_longer_than_it_could_stand_by_itself,
    who_waits_is_given_what_others_reserve,
    never_stored,
    stored_at_the_last_moment,
    stored_where_the_leader_has_not_seen_it,
]
