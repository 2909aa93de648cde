"""Runs a certificate rotation: repeatedly reads the state and takes the next step, until no step is due."""

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

# A run of the rotation fails after this many steps. No rotation needs nearly as many, so another program must be
# undoing the steps.
MAX_STEPS = 100

# A run of the rotation fails after this many consecutive Conflict or Unavailable errors. Together, the retries take
# longer than an API server needs after its start to load its RBAC roles (see AuthorizerGrace).
MAX_ATTEMPTS = 12


class RotationStore(Protocol):
    """Reads and writes the objects of a rotation: in a cluster, or, for a dry run, in a copy in memory."""

    def read(self, now: Callable[[], datetime]) -> State: ...

    def write(self, write: steps.Write) -> None:
        """Make one write. Raises Conflict if the object has changed since the last `read`, or another VcudaError."""


class Clock:
    """The wall clock (in UTC) and the monotonic clock of the machine. A subclass may simulate them."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(slots=True)
class DryRunStore(Clock):
    """The store and the clock of a dry run. A write changes a copy of the state. A wait advances only the clock."""

    _state: State
    _now: datetime
    _elapsed: float = 0.0

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
        """Advance the clock, and let every endpoint in the copy serve the certificate of the serving Secret."""
        self._elapsed += seconds
        self._now += timedelta(seconds=seconds)
        leaf = self._state.serving.leaf
        # In a cluster, endpoints serve a new certificate some time after kubelet has updated the mounted Secret. The
        # readiness of the endpoints is not simulated.
        if leaf is not None:
            followed = (replace(one, leaf=leaf.certificate, fault="") for one in self._state.endpoints)
            self._state = replace(self._state, endpoints=tuple(followed))


@dataclass(slots=True)
class Observations:
    """The conditions for steps that one run has observed, and the configurations that it was forbidden to write.

    ``forbidden``: for the name of each forbidden webhook configuration, the problem to report.
    """

    # Maps each condition that is true, such as "every caBundle has the next CA", to a monotonic time: since then, every
    # read of this run has found it true. The CA Secret records such times for all runs, by the wall clock. The plan
    # takes a step when enough time has passed by both clocks.
    _since: dict[str, float] = field(default_factory=dict)
    forbidden: dict[str, Problem] = field(default_factory=dict)

    def with_read_only(self, state: State) -> State:
        """Return a copy of ``state``. It marks as read-only the configurations that this run was forbidden to write."""
        found = ((one, self.forbidden.get(str(one))) for one in state.configurations)
        return replace(state, configurations=tuple(replace(one, read_only=why) if why else one for one, why in found))

    def observe(self, state: State, now: datetime, monotonic: float) -> steps.SeenFor:
        """Record which conditions are true in ``state``. Return how long each condition was true without a break."""
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
    """One run of the rotation.

    ``budget``: the total time that the run may wait.
    ``announce``: a function that is called with each step before the step is taken, and with each new reason to wait.
    ``longest_sleep``: the maximum number of seconds between two reads of the state.
    ``simulated``: True for a dry run. The run then ends after a wait that has changed nothing.
    """

    store: RotationStore
    policy: steps.RotationPolicy
    budget: timedelta
    clock: Clock
    announce: Callable[[steps.Step | steps.Wait], None]
    longest_sleep: float = POLL_SECONDS
    simulated: bool = False

    def run(self) -> steps.End:
        """Take steps until no step is due, a person must solve a problem, or the next wait would exceed the budget.

        Raises VcudaError.
        """
        deadline = self.clock.monotonic() + self.budget.total_seconds()
        observations, faults, taken, last = Observations(), 0, 0, ""
        waited: steps.Wait | None = None
        while taken < MAX_STEPS:
            try:
                decision, state = self._decide(observations)
                if isinstance(decision, steps.Done | steps.StepRejected):
                    return _ended(decision, state)
                if isinstance(decision, steps.Wait):
                    if decision.reason != last:
                        self.announce(decision)
                    last = decision.reason
                    if (self.simulated and decision == waited) or not self._wait(decision, deadline):
                        return _ended(decision, state)
                    waited = decision
                else:
                    taken, waited = taken + 1, None
                    self._take(decision, state, observations)
                faults = 0
            except (Conflict, Unavailable):
                faults += 1
                if faults >= MAX_ATTEMPTS:
                    raise
                # Without a pause after a conflict, two simultaneous runs could conflict in every write.
                self.clock.sleep(min(faults * 0.2, 2.0))
        text = f"more steps are due after {MAX_STEPS} steps, so another program must be undoing them"
        return steps.StepRejected((Problem(text, self.policy.commands.dry_run),))

    def _decide(self, observations: Observations) -> tuple[steps.Decision, State]:
        state = observations.with_read_only(self.store.read(self.clock.now))
        now = self.clock.now()
        seen = observations.observe(state, now, self.clock.monotonic())
        return plan(state, now, self.policy, seen), state

    def _take(self, step: steps.Step, state: State, observations: Observations) -> None:
        # If the API server forbids the write of a configuration, the problem is recorded, and the run continues with
        # the other configurations.
        self.announce(step)
        try:
            self.store.write(steps.write_of(step, state, self.clock.now(), self.policy))
        except Forbidden as error:
            if not isinstance(step, steps.SetBundles):
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
    # At the end of the run, each configuration that vcuda-certs must not write is a problem for a person to solve.
    if not state.read_only():
        return decision
    before = decision.problems if isinstance(decision, steps.StepRejected) else ()
    return steps.StepRejected(tuple(dict.fromkeys((*before, *state.read_only()))))


def explained(error: VcudaError) -> str:
    """Return the error's message. If the API server rejected a request, name the request before the message."""
    return f"{error.request}: {error}" if isinstance(error, ApiError) and error.request else str(error)
