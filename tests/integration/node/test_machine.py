"""A state machine of hypothesis: random sequences of events on a real disk.

The node agent never deletes the directory of an existing pod, and finally deletes all other directories.
"""

import contextlib
import tempfile
from itertools import count
from pathlib import Path

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from controller.garbage.node.names import KeepReason, MustStay
from tests.integration.node.disk import GRACE, HOUR, Agent, Disk, Snapshot, snapshot, uid
from tests.integration.node.steps import Killed, Steps
from vcuda.errors import Unavailable

pytestmark = pytest.mark.slow

which_pod = st.integers(0, 2)


class Node(RuleBasedStateMachine):
    """A node whose pods are created and deleted while a node agent runs.

    The agent may be killed at any step, and calls may fail. The API server's cache is late. The API server or the
    kubelet's directory may be unavailable. The wall clock may change.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        base = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="vm-directories-")))
        self.disk = Disk(base)
        self.disk.furnish()
        self.kubelet = self.disk.kubelet
        self.stack.enter_context(self.disk.untouched())
        self.steps = Steps(self.stack.enter_context(pytest.MonkeyPatch.context()))
        # Maps each existing pod to the content that its directory had when the pod was created.
        self.there: dict[str, Snapshot] = {}
        self.api: set[str] = set()
        self.fresh = count()
        self.agent = Agent(self.disk)
        self.confirm()

    def confirm(self) -> None:
        """From now on, let LISTs return the stored pods, even if the API server's cache has an earlier state."""
        self.disk.pods.live = self.api

    @rule(kubelet=st.booleans())
    def a_pod_starts(self, kubelet: bool) -> None:
        name = uid(next(self.fresh))
        self.api.add(name)
        if kubelet:
            (self.kubelet / name).mkdir()
        self.there[name] = snapshot(self.disk.make(name, age=0))

    @rule(which=which_pod, api=st.booleans(), kubelet=st.booleans())
    def a_pod_ends(self, which: int, api: bool, kubelet: bool) -> None:
        name = uid(which)
        if api:
            self.api.discard(name)
        if kubelet and (self.kubelet / name).exists():
            (self.kubelet / name).rmdir()
        if name not in self.api and not (self.kubelet / name).exists():
            self.there.pop(name, None)

    @rule()
    def the_cache_catches_up(self) -> None:
        self.disk.pods.uids = set(self.api)

    @rule(seconds=st.sampled_from([1.0, 60.0, GRACE, HOUR]))
    def time_passes(self, seconds: float) -> None:
        self.disk.clocks.advance(seconds)

    @rule(seconds=st.sampled_from([-1e8, -HOUR, HOUR, 1e8]))
    def the_wall_clock_is_set(self, seconds: float) -> None:
        self.disk.clocks.wall += seconds

    @rule(cache=st.booleans())
    def it_sweeps_while_the_api_server_is_away(self, cache: bool) -> None:
        away = Unavailable("connection refused")
        self.disk.pods.live_error = away
        self.disk.pods.error = MustStay(KeepReason.PODS_UNKNOWN) if cache else None
        before = self.disk.names()
        self.agent.sweep()
        if cache:
            assert self.disk.names() == before
        self.disk.pods.live_error = self.disk.pods.error = None

    @rule()
    def it_sweeps_without_sight_of_kubelets_directory(self) -> None:
        away = self.kubelet.rename(self.kubelet.with_name("away"))
        before = self.disk.names()
        self.agent.sweep()
        assert self.disk.names() == before
        away.rename(self.kubelet)

    @rule(times=st.integers(1, 3))
    def it_sweeps(self, times: int) -> None:
        for _ in range(times):
            self.disk.clocks.advance(60)
            self.agent.sweep()

    @rule(point=st.integers(0, 8))
    def it_is_killed_in_a_sweep_and_started_again(self, point: int) -> None:
        self.steps.stop(point, Killed())
        with contextlib.suppress(Killed):
            self.agent.sweep()
        self.steps.go_on()
        self.agent = Agent(self.disk)
        self.the_cache_catches_up()

    @rule(point=st.integers(0, 8))
    def a_step_of_a_sweep_fails(self, point: int) -> None:
        self.steps.stop(point, OSError(16, "Device or resource busy"))
        self.agent.sweep()
        self.steps.go_on()

    @invariant()
    def the_directories_of_pods_that_exist_are_whole(self) -> None:
        for name, made in self.there.items():
            found = self.disk.root / name
            assert snapshot(found) == made

    def teardown(self) -> None:
        try:
            for _ in range(4):
                self.the_cache_catches_up()
                self.disk.clocks.advance(2 * HOUR)
                self.agent.sweep()
            assert self.disk.names() == set(self.there)
        finally:
            self.stack.close()


def test_no_directory_of_an_existing_pod_is_ever_deleted_and_every_other_finally_is() -> None:
    run_state_machine_as_test(Node, settings=settings(max_examples=40, stateful_step_count=40))
