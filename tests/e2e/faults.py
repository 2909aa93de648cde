"""The faults of the chaos test, in a schedule of ticks (periods of `TICK` seconds), which is repeated in cycles.

The faults affect our programs and the control plane.
"""

import itertools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from tests.e2e.chaos import Callers, Controllers, Victim
from tests.e2e.dra import claims_path
from tests.e2e.held_clock import HeldClock
from tests.e2e.installation import LEDGERS, ledger_path
from tests.e2e.observer import AWAY, TOTAL
from tests.e2e.quota_config import TEAMS, QuotaConfigMap
from tests.e2e.rest import Json, Rest
from tests.processes import WebhookProcess
from tools.component import Component
from tools.control_plane import ControlPlane
from vcuda.kube.team_store import team_ledger_name

TICK = 2.0
CYCLE = 38
"""The number of ticks of a cycle. Each cycle has the same faults, but other namespaces."""

STOPPED, STOPS = 20, range(11, 13)
"""STOPPED: the number of ticks for which a replica is suspended. STOPS: the ticks at which suspensions begin.

A suspension is long enough for the leader to reap (remove) the replica's reservation. Only a leader that runs for the
whole time can do that. So no tick in `LEADER_DIES` is within this time.
"""

LEADER_DIES = (2, 7, 36)
APISERVERS_DIE, ETCD_DIES = ((4, 37), (6,)), (35,)
REPLICA_DIES = range(1, CYCLE, 3)
LEDGERS_GO = (5, 10, 33, 34)
TEAM_LEDGERS_GO = (9, 18, 24, 31, 33)
"""The ticks at which the ledger of a team is deleted, if it exists already. After the first and the last of these
ticks, the ledger of a namespace of the team is deleted too."""

EDITS = range(1, CYCLE, 6)
SWEEPS = (10, 20, 35)
"""The ticks at which all objects in the roomy namespace (the one with a large quota) are deleted."""

FULL = (26, 35)
"""Between these two ticks the callers delete nothing in the roomy namespace (the namespace with a large quota).

So its quota is used up when the suspended replicas resume.
"""

LESS = 0.7
"""The factor by which the fault "limit edited" lowers all limits for a while."""


@dataclass(frozen=True)
class Havoc:
    """Causes all faults of the chaos test, and counts them.

    ``killable``: the replicas that are killed. ``stoppable``: the replicas that are suspended. ``clock``: the clock of
    the last of them, which stops with that replica, but resumes later. ``quota``: the quota ConfigMap, whose entries
    are ``entries``.
    """

    planes: Sequence[ControlPlane]
    killable: Sequence[Victim[WebhookProcess]]
    stoppable: Sequence[Victim[WebhookProcess]]
    clock: HeldClock
    managers: Controllers
    callers: Callers
    quota: QuotaConfigMap
    done: Counter[str] = field(default_factory=Counter)
    threads: ThreadPoolExecutor = field(default_factory=ThreadPoolExecutor)
    entries: Mapping[str, Json] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", self.quota.document())

    @property
    def faults(self) -> set[str]:
        return {name for name, _, _ in self._schedule() if name}

    @property
    def _rest(self) -> Rest:
        return self.quota.rest

    def wreak(self, over: Callable[[float], bool]) -> None:
        """Cause faults until ``over`` is true for the elapsed seconds. Then resume all suspended processes."""
        started = time.monotonic()
        for tick in itertools.count():
            time.sleep(max(started + tick * TICK - time.monotonic(), 0))
            if over(time.monotonic() - started):
                break
            for name, ticks, act in self._schedule():
                if tick % CYCLE in ticks:
                    with suppress(*AWAY):
                        self.done[name] += act(tick) is not False
            self.managers.mend()
        for victim in self.stoppable:
            victim.signal(signal.SIGCONT)
        self.clock.release()
        for component in (self.planes[0].etcd, *(plane.apiserver for plane in self.planes)):
            component.await_ready()
        self.threads.shutdown()

    def _schedule(self) -> Iterator[tuple[str, Sequence[int], Callable[[int], object]]]:
        """Yield each fault: its name, the ticks of a cycle at which it occurs, and the function that causes it."""
        yield "replica killed", REPLICA_DIES, lambda tick: self.killable[tick // 3 % len(self.killable)].kill()
        yield "leader killed", LEADER_DIES, lambda _: self.managers.kill_leader()
        for first, victim in zip(STOPS, self.stoppable, strict=True):
            yield "", (first,), partial(self._stop, victim)
            name = "clock stopped" if victim is self.stoppable[-1] else "replica stopped"
            yield name, (first + STOPPED,), partial(self._resume, victim)
            yield "", (first + STOPPED + 1,), partial(self._resume_whole, victim)
        yield "", (STOPS[-1] + STOPPED + 2,), lambda _: self.clock.release()
        for plane, ticks in zip(self.planes, APISERVERS_DIE, strict=True):
            yield f"{plane.apiserver.name} killed", ticks, partial(restart, plane.apiserver)
        etcd = self.planes[0].etcd
        yield f"{etcd.name} killed", ETCD_DIES, partial(restart, etcd)
        yield "ledger deleted", LEDGERS_GO, self._delete_ledger
        yield "ledger of a team deleted", TEAM_LEDGERS_GO, self._delete_team_ledger
        yield "limit edited", EDITS, lambda tick: self._edit(LESS if tick % (2 * EDITS.step) == EDITS[0] else 1)
        yield "", FULL[:1], lambda _: self.callers.keep.set()
        yield "", FULL[1:], lambda _: self.callers.keep.clear()
        yield "swept", SWEEPS, lambda _: self.threads.submit(self._sweep, self.callers.present()[0])

    def _stop(self, victim: Victim[WebhookProcess], _tick: int) -> None:
        if victim is self.stoppable[-1]:
            self.clock.hold()
        victim.signal(signal.SIGSTOP)

    def _resume(self, victim: Victim[WebhookProcess], tick: int) -> None:
        """Resume a suspended replica. If it has the test clock, resume only its worker process.

        Its arbiter process resumes one tick later, because an arbiter kills a worker that was silent for too long.
        """
        if victim is self.stoppable[-1]:
            os.kill(victim.current().worker(), signal.SIGCONT)
        else:
            self._resume_whole(victim, tick)

    def _resume_whole(self, victim: Victim[WebhookProcess], _tick: int) -> None:
        victim.signal(signal.SIGCONT)

    def _delete_ledger(self, tick: int) -> bool:
        """Delete a ledger and its finalizer, as an admin can do. Each tick in `LEDGERS_GO` is for another namespace."""
        present = self.callers.present()
        path = ledger_path(present[-1 - LEDGERS_GO.index(tick % CYCLE) % len(present)])
        self._rest.merge_patch(path, {"metadata": {"finalizers": None}})
        return bool(self._rest.send("DELETE", path).ok())

    def _delete_team_ledger(self, _tick: int) -> bool:
        present = {*self.callers.present()}
        [team] = [name for name, entry in self._teams.items() if present >= {*entry["namespaces"]}]
        return bool(self._rest.send("DELETE", f"{LEDGERS}/{team_ledger_name(team)}").ok())

    @property
    def _teams(self) -> Mapping[str, Json]:
        teams: Mapping[str, Json] = json.loads(self.quota.further[TEAMS])
        return teams

    def _edit(self, part: float) -> bool:
        """Multiply all limits of the quota by ``part``. Without a webhook replica that checks the edit, this fails."""
        entries, teams = (
            {name: scaled(each, part) for name, each in all_.items()} for all_ in (self.entries, self._teams)
        )
        edited = replace(self.quota, further={TEAMS: json.dumps(teams)})
        return bool(edited.write(json.dumps(entries)).ok())

    def _sweep(self, namespace: str) -> None:
        with suppress(*AWAY):
            self._rest.send("DELETE", f"/api/v1/namespaces/{namespace}/pods", {"gracePeriodSeconds": 0})
            if self.callers.claims:
                self._rest.send("DELETE", claims_path(namespace))


def scaled(entry: Json, part: float) -> Json:
    """Return an entry of the quota, or a team, with all its limits multiplied by ``part``."""
    limits = {model: round(cards * part, 1) for model, cards in entry["quota"].items()}
    in_total = {TOTAL: round(entry[TOTAL] * part, 1)} if TOTAL in entry else {}
    return {**entry, "quota": limits, **in_total}


def restart(component: Component, _tick: int) -> None:
    """Kill a component of the control plane with SIGKILL, and start it again. Do not wait until it is ready."""
    component.kill()
    component.launch()
