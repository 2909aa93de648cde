"""A rotation played through on a copy of the state: what it would do, with nothing written and nothing waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Protocol

from certs.api import Conflicted, Forbidden, Unreachable
from certs.changes import Write, after, write_of
from certs.plan import plan, published, served_everywhere
from certs.state import Problem, State, fingerprint
from certs.steps import Decision, Done, Refused, Seen, SetBundles, Step, Terms, Wait


class Rehearsal:
    """The state as it would become, and a clock that waits by jumping ahead. Endpoints follow the Secret at once.

    Endpoints follow where somebody waits for them, as they do once kubelet has; none becomes ready that is not.
    """

    def __init__(self, state: State, now: datetime) -> None:
        self._state = state
        self._now = now
        self._elapsed = 0.0

    def read(self, now: Callable[[], datetime]) -> State:
        """Return the state as it would be."""
        del now
        return self._state

    def write(self, write: Write) -> None:
        """Change the copy."""
        self._state = after(self._state, write)

    def now(self) -> datetime:
        """The time that it would be."""
        return self._now

    def monotonic(self) -> float:
        """Seconds since the start."""
        return self._elapsed

    def sleep(self, seconds: float) -> None:
        """Let the time pass, and every endpoint read the Secret."""
        self._elapsed += seconds
        self._now += timedelta(seconds=seconds)
        leaf = self._state.serving.leaf
        if leaf is not None:
            followed = (replace(one, leaf=leaf.certificate, fault="") for one in self._state.endpoints)
            self._state = replace(self._state, endpoints=tuple(followed))


POLL = 2.0
"""Seconds between two looks while something is waited for."""

MOST_STEPS = 100
"""Steps of one run, several times what any rotation takes: something undoes them, or this would go on for ever."""

PATIENCE = 10
"""Requests in a row that may come to nothing: somebody else was first, or the API server did not answer."""


class Store(Protocol):
    """Where the state is: a cluster, or a rehearsal."""

    def read(self, now: Callable[[], datetime]) -> State:
        """Return everything as it is now."""

    def write(self, write: Write) -> None:
        """Make one write, or raise ApiFault."""


class Clock(Protocol):
    """The time, twice: what the calendar says, and what passes."""

    def now(self) -> datetime:
        """The wall clock, UTC."""

    def monotonic(self) -> float:
        """Seconds that only ever grow, and never jump."""

    def sleep(self, seconds: float) -> None:
        """Let so many seconds pass."""


class SystemClock:
    """The machine's clocks."""

    def now(self) -> datetime:
        """The wall clock, UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds that never jump."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let so many seconds pass."""
        time.sleep(seconds)


@dataclass(slots=True)
class Sightings:
    """Since when this run has seen a thing at every reading, in seconds of a clock that does not jump.

    ``forbidden``: the configurations that it was not allowed to write.
    """

    _since: dict[str, float] = field(default_factory=dict)
    forbidden: dict[str, Problem] = field(default_factory=dict)

    def with_locks(self, state: State) -> State:
        """The state with those configurations locked."""
        found = ((one, self.forbidden.get(str(one))) for one in state.configurations)
        return replace(state, configurations=tuple(replace(one, locked=why) if why else one for one, why in found))

    def look(self, state: State, now: datetime, monotonic: float) -> Seen:
        """Take note of what holds in ``state``, and return for how long that has been so."""
        signing = {"following": state.authorities.following, "current": state.authorities.current}
        names = {slot: fingerprint(one.certificate) for slot, one in signing.items() if one}
        holding = {name for slot, name in names.items() if published(state, signing[slot])}
        if served_everywhere(state, now) and "current" in names:
            holding.add(f"served {names['current']}")
        self._since = {name: self._since.get(name, monotonic) for name in holding}
        return Seen(
            following=self._held(names.get("following"), monotonic),
            current=self._held(names.get("current"), monotonic),
            served=self._held(f"served {names.get('current')}", monotonic),
        )

    def _held(self, name: str | None, monotonic: float) -> timedelta:
        return timedelta(seconds=monotonic - self._since.get(name or "", monotonic))


@dataclass(frozen=True, slots=True)
class Rotation:
    """A run that may wait for ``budget`` in all. ``told`` hears of each step before, of each wait once."""

    store: Store
    terms: Terms
    budget: timedelta
    clock: Clock
    told: Callable[[Step | Wait], None]
    longest_sleep: float = POLL

    def run(self) -> Done | Refused | Wait:
        """Go on until all is done, a person is needed, or the next thing to wait for is beyond the budget.

        Raises ApiFault.
        """
        deadline = self.clock.monotonic() + self.budget.total_seconds()
        sightings, faults, steps, last = Sightings(), 0, 0, ""
        while steps < MOST_STEPS:
            try:
                decision, state = self._decide(sightings)
                if isinstance(decision, Done | Refused):
                    return _ended(decision, state)
                if isinstance(decision, Wait):
                    last = self._announce(decision, last)
                    if not self._wait(decision, deadline):
                        return _ended(decision, state)
                else:
                    steps += 1
                    self._take(decision, state, sightings)
                faults = 0
            except (Conflicted, Unreachable):
                faults += 1
                if faults >= PATIENCE:
                    raise
                self.clock.sleep(min(faults * 0.2, 2.0))
        text = f"after {MOST_STEPS} steps there is still something to do, so something else undoes them"
        return Refused((Problem(text, self.terms.commands.rehearse),))

    def _decide(self, sightings: Sightings) -> tuple[Decision, State]:
        state = sightings.with_locks(self.store.read(self.clock.now))
        now = self.clock.now()
        seen = sightings.look(state, now, self.clock.monotonic())
        return plan(state, now, self.terms, seen), state

    def _take(self, step: Step, state: State, sightings: Sightings) -> None:
        """Make the step's write. A configuration that may not be written does not keep the others from their steps."""
        self.told(step)
        try:
            self.store.write(write_of(step, state, self.clock.now(), self.terms))
        except Forbidden as error:
            if not isinstance(step, SetBundles):
                raise
            problem = Problem(f"{step.configuration} may not be written: {error}", self.terms.commands.allow)
            sightings.forbidden[step.configuration] = problem

    def _announce(self, decision: Wait, last: str) -> str:
        if decision.reason != last:
            self.told(decision)
        return decision.reason

    def _wait(self, decision: Wait, deadline: float) -> bool:
        """Sleep until the state is worth another look; False where that is after the deadline."""
        left = deadline - self.clock.monotonic()
        due = max(0.0, (decision.until - self.clock.now()).total_seconds()) if decision.until else POLL
        if due > left:
            return False
        self.clock.sleep(min(due, self.longest_sleep))
        return True


def _ended(decision: Done | Refused | Wait, state: State) -> Done | Refused | Wait:
    """How the run ends: whatever else it has come to, what it could not write is a person's to see."""
    if not state.locked():
        return decision
    others = decision.problems if isinstance(decision, Refused) else ()
    return Refused(tuple(dict.fromkeys((*others, *state.locked()))))
