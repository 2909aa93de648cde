"""Tests of two controllers that compete for the Lease in virtual time. Calls fail or are late, but only one leads."""

import heapq
import itertools
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings, strategies as st

from controller.elector import Elector, LeaseTiming
from tests.api_double import ApiDouble, Effect
from tests.waiting import PATIENT
from vcuda.errors import Unavailable, VcudaError

pytestmark = pytest.mark.slow


class World:
    """A virtual clock for several threads. It runs one thread at a time, in the order of their wake-up times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._paused = threading.Semaphore(0)
        self._fault: BaseException | None = None

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time, next(self._order), action))

    def sleep(self, seconds: float) -> None:
        mine = threading.Semaphore(0)
        self.at(self.now + seconds, lambda: self._wait_for(mine.release))
        self._paused.release()
        assert mine.acquire(timeout=PATIENT)

    def spawn(self, body: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                body()
            except BaseException as fault:  # noqa: BLE001  # run() raises this error again
                self._fault = self._fault or fault
            self._paused.release()

        thread = threading.Thread(target=guarded, daemon=True)
        self.at(self.now, lambda: self._wait_for(thread.start))

    def run(self) -> None:
        while self._due:
            self.now, _, action = heapq.heappop(self._due)
            action()
        if self._fault:
            raise self._fault

    def _wait_for(self, begin: Callable[[], None]) -> None:
        begin()
        assert self._paused.acquire(timeout=PATIENT)


FATES = ("ok", "slow", "rejected", "lost request", "lost reply", "late", "write lost", "last moment")
"""Outcomes of a call. ``late``: it arrives after its sender has given up. ``write lost``: only reads arrive."""


class Phase(NamedTuple):
    """A number of consecutive calls of the API server with the same outcome."""

    fate: str
    calls: int


class Life(NamedTuple):
    """A candidate for the Lease. Its start and stop are multiples of the lease duration."""

    phases: tuple[Phase, ...]
    start: float
    stops: float | None


class Network:
    """A Lease candidate's connection to the API server. It delays or loses calls as the test requires."""

    def __init__(self, world: World, phases: Iterable[Phase]) -> None:
        self._world = world
        self._fates = itertools.chain.from_iterable([phase.fate] * phase.calls for phase in phases)

    def deliver(self, method: str, timeout: float, effect: Effect) -> bytes:
        fate = next(self._fates, "ok")
        if fate == "write lost":
            fate = "last moment" if method == "GET" else "lost request"
        match fate:
            case "ok":
                return effect()
            case "slow":
                return self._there_and_back(timeout * 0.4, effect, timeout * 0.5)
            case "last moment":
                return self._there_and_back(timeout * 0.1, effect, timeout * 0.9)
            case "lost reply":
                self._there_and_back(timeout * 0.5, effect, timeout * 0.5)
            case "late":
                self._world.at(self._world.now + timeout * 3, lambda: _ignoring_rejection(effect))
                self._world.sleep(timeout)
            case "lost request":
                self._world.sleep(timeout)
        raise Unavailable(fate)

    def _there_and_back(self, there: float, effect: Effect, back: float) -> bytes:
        self._world.sleep(there)
        try:
            return effect()
        finally:
            self._world.sleep(back)


def _ignoring_rejection(effect: Effect) -> None:
    with suppress(VcudaError):
        effect()


class _Through(ApiDouble):
    """A client of the API server for one candidate, over the candidate's connection."""

    def __init__(self, shared: ApiDouble, network: Network) -> None:
        super().__init__()
        self.objects = shared.objects
        self.deliver = network.deliver
        self._shared = shared

    def store(self, path: str, manifest: object) -> bytes:
        return self._shared.store(path, manifest)  # type: ignore[arg-type]  # as there


class Election:
    """Two candidates for one Lease. ``leaders``: the candidates that act as leaders now."""

    def __init__(self, timing: LeaseTiming, horizon: float) -> None:
        self.world = World()
        self.leaders: list[str] = []
        self.led_at_the_end: list[str] = []
        self._api = ApiDouble()
        self._timing = timing
        self._horizon = horizon

    def hold(self, lives: Iterable[Life]) -> None:
        self.world.at(self._horizon - 1, lambda: self.led_at_the_end.extend(self.leaders))
        for number, life in enumerate(lives):
            self.world.spawn(lambda number=number, life=life: self._live(number, life))  # type: ignore[misc]  # no types
        self.world.run()

    def _live(self, number: int, life: Life) -> None:
        """Run a candidate. When its process has ended, start it again, as Kubernetes restarts a container."""
        self.world.sleep(life.start * self._timing.lease_duration)
        api = _Through(self._api, Network(self.world, life.phases))
        stops = [life.stops * self._timing.lease_duration] if life.stops is not None else []
        for run, until in enumerate([*stops, self._horizon, self._horizon]):
            while self.world.now < until:
                self._candidate(f"candidate-{number}-{run}-{self.world.now}", api, until)
                self.world.sleep(0.25)

    def _candidate(self, identity: str, api: _Through, until: float) -> None:
        def wait(seconds: float) -> bool:
            self.world.sleep(seconds)
            return self.world.now >= until

        elector = Elector(
            api.kube, ("system", "lease"), identity, timing=self._timing, wait=wait, clock=lambda: self.world.now
        )
        if not elector.acquire():
            return
        self.leaders.append(identity)
        assert len(self.leaders) == 1, f"{self.leaders} believe they lead at {self.world.now}"
        told_to_stop = elector.hold()
        self.leaders.remove(identity)
        if told_to_stop:
            elector.release()


PHASES = st.builds(Phase, st.sampled_from(FATES), st.integers(1, 14))
LIVES = st.builds(Life, st.lists(PHASES, max_size=8).map(tuple), st.floats(0, 1), st.none() | st.floats(0.5, 6))


@pytest.mark.parametrize("lease_seconds", [5, 30])
@settings(max_examples=60)
@given(lives=st.tuples(LIVES, LIVES))
@example(lives=(Life((Phase("ok", 8), Phase("rejected", 8), Phase("write lost", 8)), 0, None), Life((), 0.01, None)))
@example(lives=(Life((Phase("ok", 1), Phase("last moment", 1), Phase("rejected", 9)), 0, None), Life((), 0.1, None)))
def test_there_are_never_two_leaders_and_finally_one(lease_seconds: int, lives: tuple[Life, Life]) -> None:
    election = Election(LeaseTiming.of(lease_seconds), horizon=lease_seconds * 30.0)
    election.hold(lives)
    assert len(election.led_at_the_end) == 1


@pytest.mark.parametrize("calls", range(1, 15))
@pytest.mark.parametrize("last", ["write lost", "lost request", "last moment", "late"])
@pytest.mark.parametrize("lease_seconds", [5, 30])
def test_a_leader_cut_off_has_stopped_when_another_leads(lease_seconds: int, last: str, calls: int) -> None:
    """The calls of the leader fail immediately at first, and time out later."""
    cut_off = (Phase("ok", 6), Phase("rejected", calls), Phase(last, 20))
    election = Election(LeaseTiming.of(lease_seconds), horizon=lease_seconds * 6.0)
    election.hold((Life(cut_off, 0, None), Life((), 0.02, None)))
    assert len(election.led_at_the_end) == 1
