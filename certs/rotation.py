"""Runs a rotation: reads the state, takes the next step of the plan or waits for it, until nothing is due."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Protocol

from certs import steps
from certs.plan import plan, published, served_everywhere
from certs.state import Problem, State, fingerprint
from vcuda.errors import ApiError, Conflict, Forbidden, Unavailable, VcudaError

POLL_SECONDS = 2.0

# Several times the steps of any rotation. After so many, another program must be undoing them.
MAX_STEPS = 100

# Consecutive requests that may fail, because another writer was first or the API server did not answer. With the waits
# between them they take longer than an API server needs to read all roles after a start (AuthorizerGrace).
MAX_ATTEMPTS = 12


class RotationStore(Protocol):
    """The place of the state: a cluster, or a copy of it."""

    def read(self, now: Callable[[], datetime]) -> State: ...

    def write(self, write: steps.Write) -> None:
        """Make one write. Raises Conflict if the object has changed since it was read, or another VcudaError."""


class Clock(Protocol):
    """The wall clock and the monotonic clock."""

    def now(self) -> datetime:
        """The wall clock, UTC."""

    def monotonic(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


class DryRunStore:
    """A copy of the state, and a clock that jumps ahead instead of waiting. The cluster is not changed."""

    def __init__(self, state: State, now: datetime) -> None:
        self._state = state
        self._now = now
        self._elapsed = 0.0

    def read(self, now: Callable[[], datetime]) -> State:
        del now
        return self._state

    def write(self, write: steps.Write) -> None:
        self._state = steps.after(self._state, write)

    def now(self) -> datetime:
        return self._now

    def monotonic(self) -> float:
        return self._elapsed

    def sleep(self, seconds: float) -> None:
        """Advance the time, and have every endpoint read the Secret."""
        self._elapsed += seconds
        self._now += timedelta(seconds=seconds)
        leaf = self._state.serving.leaf
        # Endpoints serve the new leaf after a wait, as they do after kubelet's update. No endpoint becomes ready.
        if leaf is not None:
            followed = (replace(one, leaf=leaf.certificate, fault="") for one in self._state.endpoints)
            self._state = replace(self._state, endpoints=tuple(followed))


@dataclass(slots=True)
class Observations:
    """Since when this run has seen conditions at every reading, in seconds of a clock that does not jump.

    ``forbidden``: the configurations that this run was not allowed to write.
    """

    # The CA Secret's annotations have such times by the wall clocks of earlier runs. The plan requires both.
    _since: dict[str, float] = field(default_factory=dict)
    forbidden: dict[str, Problem] = field(default_factory=dict)

    def with_read_only(self, state: State) -> State:
        """Return the state with the forbidden configurations as read-only."""
        found = ((one, self.forbidden.get(str(one))) for one in state.configurations)
        return replace(state, configurations=tuple(replace(one, read_only=why) if why else one for one, why in found))

    def observe(self, state: State, now: datetime, monotonic: float) -> steps.SeenFor:
        """Note the conditions in ``state``, and return for how long they have held."""
        signing = {"next": state.authorities.next_ca, "current": state.authorities.current}
        names = {slot: fingerprint(one.certificate) for slot, one in signing.items() if one}
        holding = {name for slot, name in names.items() if published(state, signing[slot])}
        if served_everywhere(state, now) and "current" in names:
            holding.add(f"served {names['current']}")
        self._since = {name: self._since.get(name, monotonic) for name in holding}
        return steps.SeenFor(
            next_ca=self._held(names.get("next"), monotonic),
            current=self._held(names.get("current"), monotonic),
            served=self._held(f"served {names.get('current')}", monotonic),
        )

    def _held(self, name: str | None, monotonic: float) -> timedelta:
        return timedelta(seconds=monotonic - self._since.get(name or "", monotonic))


@dataclass(frozen=True, slots=True)
class Rotation:
    """A run that may wait for ``budget`` in all. ``told`` is called before each step, and once for each wait."""

    store: RotationStore
    policy: steps.RotationPolicy
    budget: timedelta
    clock: Clock
    told: Callable[[steps.Step | steps.Wait], None]
    longest_sleep: float = POLL_SECONDS

    def run(self) -> steps.End:
        """Take steps until nothing is due, a person is needed, or the next wait is beyond the budget.

        Raises VcudaError.
        """
        deadline = self.clock.monotonic() + self.budget.total_seconds()
        observations, faults, taken, last = Observations(), 0, 0, ""
        while taken < MAX_STEPS:
            try:
                decision, state = self._decide(observations)
                if isinstance(decision, steps.Done | steps.StepRefused):
                    return _ended(decision, state)
                if isinstance(decision, steps.Wait):
                    if decision.reason != last:
                        self.told(decision)
                    last = decision.reason
                    if not self._wait(decision, deadline):
                        return _ended(decision, state)
                else:
                    taken += 1
                    self._take(decision, state, observations)
                faults = 0
            except (Conflict, Unavailable):
                faults += 1
                if faults >= MAX_ATTEMPTS:
                    raise
                # The run that lost waits while the other goes on, so that two runs do not collide in every write.
                self.clock.sleep(min(faults * 0.2, 2.0))
        text = f"after {MAX_STEPS} steps there is still something to do, so something else undoes them"
        return steps.StepRefused((Problem(text, self.policy.commands.dry_run),))

    def _decide(self, observations: Observations) -> tuple[steps.Decision, State]:
        state = observations.with_read_only(self.store.read(self.clock.now))
        now = self.clock.now()
        seen = observations.observe(state, now, self.clock.monotonic())
        return plan(state, now, self.policy, seen), state

    def _take(self, step: steps.Step, state: State, observations: Observations) -> None:
        # Make the write of the step. A configuration that must not be written does not block the steps of the others.
        self.told(step)
        try:
            self.store.write(steps.write_of(step, state, self.clock.now(), self.policy))
        except Forbidden as error:
            if not isinstance(step, steps.SetBundles | steps.RegisterWebhooks):
                raise
            text = f"{step.configuration} may not be written: {explained(error)}"
            observations.forbidden[step.configuration] = Problem(text, self.policy.commands.allow)

    def _wait(self, decision: steps.Wait, deadline: float) -> bool:
        left = deadline - self.clock.monotonic()
        due = max(0.0, (decision.until - self.clock.now()).total_seconds()) if decision.until else POLL_SECONDS
        if due > left:
            return False
        self.clock.sleep(min(due, self.longest_sleep))
        return True


def _ended(decision: steps.End, state: State) -> steps.End:
    # The end of the run. Configurations that it could not write need a person in any case.
    if not state.read_only():
        return decision
    others = decision.problems if isinstance(decision, steps.StepRefused) else ()
    return steps.StepRefused(tuple(dict.fromkeys((*others, *state.read_only()))))


def explained(error: VcudaError) -> str:
    """Return the text of the error, after the rejected request if there was one."""
    return f"{error.request}: {error}" if isinstance(error, ApiError) and error.request else str(error)
