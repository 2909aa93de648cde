"""A state machine test of deletions, restarts and changes of the leader in any order.

The ledger must charge every GPU that the kubelet may still use.
"""

import math
import os

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.running_world import CLAIMS, PODS, RunningWorld, TrueClaim, TruePod

pytestmark = pytest.mark.slow

GRACES = st.sampled_from([600, 60, 30, 0])
COLLECTIONS = st.sampled_from([PODS, CLAIMS])
WHICH = st.integers(0, 9)
BOUND = 5
"""The maximum number of steps until a pod is bound: three steps of the pod and two of its claim."""


class RunningMachine(RuleBasedStateMachine):
    """Simulates deletions of pods. Each rule is one step of one process, such as the leader or the kubelet."""

    @initialize(graces=st.lists(GRACES, min_size=2, max_size=4))
    def start(self, graces: list[int]) -> None:
        """Start with some running pods that the leader has already counted."""
        self.world = RunningWorld()
        self.number = 0
        for number, grace in enumerate(graces):
            self.create(grace, claimed=number % 2 == 0, steps=BOUND)
        self.world.leader.hear_all()
        self.world.recount()

    # Steps that tenants and Kubernetes make

    @rule(grace=GRACES, claimed=st.booleans(), steps=st.integers(0, BOUND))
    def create(self, grace: int, *, claimed: bool, steps: int) -> None:
        """Create a pod, by up to five ``steps``: admit it, store it, admit its claim, store the claim, bind the pod."""
        self.number += 1
        self._go_on(TruePod(f"pod-{self.number}", grace, f"claim-{self.number}" if claimed else ""), steps)

    @rule(which=WHICH, steps=st.integers(1, 4))
    def go_on(self, which: int, steps: int) -> None:
        """Do some more of the steps that bind a pod."""
        coming = [pod for pod in self.world.pods.values() if self._is_coming(pod)]
        if coming:
            self._go_on(coming[which % len(coming)], steps)

    def _is_coming(self, pod: TruePod) -> bool:
        return self.world.may_be_stored(pod) or (pod.stored and pod.runs_until == -math.inf)

    def _go_on(self, pod: TruePod, steps: int) -> None:
        for _ in range(steps):
            if pod.uid not in self.world.pods:
                if not self.world.admit(pod):
                    return
            elif not pod.stored:
                self.world.store(pod)
            elif pod.claim and pod.claim not in self.world.claims:
                self.world.admit_claim(TrueClaim(pod.claim))
            elif pod.claim and not self.world.claims[pod.claim].stored:
                if not self.world.may_be_stored(self.world.claims[pod.claim]):
                    return
                self.world.store(self.world.claims[pod.claim])
            else:
                self.world.bind(pod)
                return

    @rule(which=WHICH, steps=st.integers(0, 2))
    def end(self, which: int, steps: int) -> None:
        """End the containers of a pod. Then the claim controller does some steps to release the pod's claim."""
        if running := self._running():
            pod = running[which % len(running)]
            self.world.end(pod)
            self._let_claim_go(pod, steps)

    @rule(which=WHICH, steps=st.integers(0, 2))
    def delete_by_force(self, which: int, steps: int) -> None:
        """Delete a pod in any state by force. Then the claim controller does some steps to release its claim."""
        stored = self._running() or [pod for pod in self.world.pods.values() if pod.stored]
        if stored:
            pod = stored[which % len(stored)]
            self.world.delete(pod)
            self._let_claim_go(pod, steps)

    @rule(which=WHICH, steps=st.integers(1, 2))
    def let_claim_go(self, which: int, steps: int) -> None:
        """Let the claim controller do more steps to release the claim of a pod that was deleted or has ended."""
        over = [pod for pod in self.world.pods.values() if not self._is_coming(pod) and pod not in self._running()]
        if over:
            self._let_claim_go(over[which % len(over)], steps)

    def _running(self) -> list[TruePod]:
        return [pod for pod in self.world.pods.values() if pod.stored and pod.runs_until == math.inf]

    def _let_claim_go(self, pod: TruePod, steps: int) -> None:
        claim = self.world.claims.get(pod.claim)
        for _ in range(steps):
            if claim and claim.stored and claim.reserved:
                self.world.leave(claim, pod)
            elif claim and claim.stored:
                self.world.delete_claim(claim)

    # Steps of this project's processes

    @rule(collection=COLLECTIONS | st.none(), number=st.integers(1, 4), standby=st.booleans())
    def hear(self, collection: str | None, number: int, *, standby: bool) -> None:
        """Let a watch of the leader or the standby deliver some events, or let both watches deliver all events."""
        replica = self.world.standby if standby else self.world.leader
        if collection:
            replica.hear(collection, number)
        else:
            replica.hear_all()

    @rule(looks=st.booleans(), standby=st.booleans())
    def recount(self, *, looks: bool, standby: bool) -> None:
        """Let the leader or the standby recount the ledger by the events that its watches have delivered."""
        (self.world.standby if standby else self.world.leader).recount(looks=looks)

    @rule()
    def hand_over(self) -> None:
        self.world.hand_over()

    @rule(missed=COLLECTIONS | st.none())
    def lose_sight(self, missed: str | None) -> None:
        """Let another leader start after a crash, or let one of the leader's watches miss events."""
        if missed:
            self.world.leader.miss(missed)
        else:
            self.world.change_leader()

    @rule(seconds=st.sampled_from([1, 6, 25, 80, 350]))
    def pass_by(self, seconds: int) -> None:
        self.world.pass_by(seconds)

    @precondition(lambda self: hasattr(self, "world"))
    @invariant()
    def counts_what_may_run(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        """Let a long time pass. After that, only stored objects may still be charged."""
        if not hasattr(self, "world"):
            return
        for _ in range(4):
            self.world.now += 700
            self.world.standby.hear_all()
            self.world.leader.hear_all()
            self.world.leader.recount(looks=True)
        assert self.world.used() == self.world.held()


EXAMPLES = int(os.environ.get("MACHINE_EXAMPLES", "50"))
"""The number of random examples that the state machine of this file tries. `make fuzz` sets a larger number."""


def test_no_order_of_events_hides_a_gpu_that_a_container_may_use() -> None:
    run_state_machine_as_test(RunningMachine, settings=settings(max_examples=EXAMPLES, stateful_step_count=30))
