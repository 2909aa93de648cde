"""A state machine for Hypothesis: webhook replicas admit from reservations and leaders recount, in any order."""

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.reservation_subjects import LIMITS, SIZES
from tests.reservation_world import ReservationWorld
from vcuda.quota.model import Limit

replicas, leaders, which = st.integers(0, 2), st.integers(0, 1), st.integers(0, 20)
models, sizes = st.sampled_from(sorted(LIMITS)), st.sampled_from(sorted(SIZES))
limits = st.builds(Limit, st.integers(5, 90).map(lambda n: n * 100), st.none())


class ReservationMachine(RuleBasedStateMachine):
    """Each rule is a step of a process, or an API call's outcome. `ReservationWorld` then checks the invariants."""

    def __init__(self, make_world: Callable[[], ReservationWorld] = ReservationWorld) -> None:
        super().__init__()
        self.world = make_world()

    @initialize(reserving=st.sets(replicas, max_size=2), number=st.integers(4, 20), model=models, size=sizes)
    def start(self, reserving: set[int], number: int, model: str, size: str) -> None:
        for replica in sorted(reserving):
            self.world.reserve(replica, number, model, size)

    @rule(replica=replicas, number=st.integers(1, 12), model=models, size=sizes, claim=st.booleans())
    def ask(self, replica: int, number: int, model: str, size: str, *, claim: bool) -> None:
        self.world.ask(replica, number, model, size, claim=claim)

    @rule(replica=replicas, number=st.integers(4, 20), model=models, size=sizes)
    def reserve(self, replica: int, number: int, model: str, size: str) -> None:
        self.world.reserve(replica, number, model, size)

    @rule(replica=replicas)
    def flush(self, replica: int) -> None:
        self.world.flush(replica)

    @precondition(lambda self: len(self.world.subjects) > 60)
    @rule()
    def lose(self) -> None:
        self.world.lose()

    @rule(replica=replicas, which=which)
    def ask_again(self, replica: int, which: int) -> None:
        uids = list(self.world.subjects)
        self.world.ask_again(uids[-1 - which % len(uids)], replica)

    @precondition(lambda self: self.world.wire.open)
    @rule(which=which, fate=st.sampled_from(["answer", "answer", "arrive", "lose", "lose, and land later"]))
    def call(self, which: int, fate: str) -> None:
        call = self.world.wire.open[which % len(self.world.wire.open)]
        if fate == "answer":
            self.world.answer(call)
        elif fate == "arrive":
            call.arrive()
        else:
            self.world.give_up(call, lands="land" in fate)
        self.world.check()

    @rule(replica=replicas)
    def go_on(self, replica: int) -> None:
        self.world.through(self.world.replicas[replica])

    @precondition(lambda self: self.world.wire.late)
    @rule()
    def land(self) -> None:
        self.world.wire.land()
        self.world.check()

    @rule(most=st.integers(1, 30))
    def store(self, most: int) -> None:
        self.world.store_some(most)

    @rule(most=st.integers(1, 30))
    def end(self, most: int) -> None:
        self.world.end(most)

    @rule(seconds=st.sampled_from([0.05, 0.11, 0.3, 1.1, 4, 9.5, 11, 66, 76, 88]))
    def pass_by(self, seconds: float) -> None:
        self.world.pass_by(seconds)

    @rule(replica=replicas, seconds=st.sampled_from([9, 30, 90]))
    def suspend(self, replica: int, seconds: float) -> None:
        self.world.suspend(replica, seconds)

    @rule(replica=replicas)
    def pause_or_resume(self, replica: int) -> None:
        (self.world.resume if self.world.replicas[replica].paused else self.world.pause)(replica)

    @rule(replica=replicas, lands=st.booleans())
    def crash(self, replica: int, *, lands: bool) -> None:
        self.world.crash(replica, lands=lands)

    @rule(leader=leaders)
    def look(self, leader: int) -> None:
        self.world.leaders[leader].look()

    @rule(leader=leaders, through=st.booleans(), look=st.booleans())
    def recount(self, leader: int, *, through: bool, look: bool) -> None:
        if through:
            self.world.recount(leader, look=look)
        else:
            self.world.leaders[leader].recount()

    @rule(model=models, limit=limits)
    def set_limit(self, model: str, limit: Limit) -> None:
        self.world.set_limits({**self.world.limits, model: limit}, self.world.total)

    @rule(total=st.none() | limits)
    def set_total(self, total: Limit | None) -> None:
        self.world.set_limits(self.world.limits, total)

    def teardown(self) -> None:
        with self.world:
            if not self.world.over:
                self.world.come_to_rest()
