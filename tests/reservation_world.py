"""Runs the real code of webhook replicas that admit from reservations, and of leaders that recount ledgers.

`ReservationWorld` also records which pods and claims are stored, and which may still be stored, to check the ledger.
"""

import asyncio
import contextlib
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any, Self

import msgspec
from prometheus_client import CollectorRegistry

from tests import builders
from tests.api_double import Api, ApiDouble
from tests.quota_map import QUOTA, store_quota
from tests.replicas import LEDGER
from tests.reservation_subjects import LIMITS, TEAM, Subject
from tests.stepped import DriftingClock, OpenCall, SteppedLoop, TrueTime, Wire, WireExecutor
from tests.watching import catch_up, unwatched_recounter
from vcuda.allocations.stored_claims import ClaimCharge, StoredClaim
from vcuda.errors import LedgerLost, Unavailable, VcudaError
from vcuda.kube import LedgerStore, Reflector
from vcuda.ledger.ledger import Admitted, Ledger, charges_by_model
from vcuda.ledger.text import read_ledger
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import Charge, Grant, Limit, NamespaceQuota, fits, total
from vcuda.quota.well_known import STORABLE_SECONDS
from webhook.ledger.charging import ChargeRequest, Decision
from webhook.ledger.ledgers import ClusterLedgers
from webhook.ledger.reservations import RATE_SECONDS
from webhook.metrics import LedgerMetrics

CALL_SECONDS = 8.0
"""The seconds for which the API server waits for an answer to /validate."""


class ReplicaProcess:
    """A webhook process, which can be paused and can crash."""

    def __init__(self, world: "ReservationWorld", rate: float) -> None:
        self.clock = DriftingClock(world.time, rate)
        self.loop = SteppedLoop(self.clock.now)
        self.paused = False
        self.ahead = 0.0
        """Seconds by which the process's clock for dated quota grants is ahead."""
        self._registry = CollectorRegistry()
        # The wire delivers all API calls of the process, from any of the process's threads.
        names = [each.name for each in fields(ClusterLedgers) if each.type is Executor]
        executors: dict[str, Any] = {name: WireExecutor(world.wire, self) for name in names}
        self.ledgers = ClusterLedgers(
            world.store(self.clock),
            LedgerMetrics(self._registry),
            self.clock.now,
            asyncio.sleep,
            self.clock.now,
            **executors,
        )

    @property
    def spent(self) -> float:
        return self._registry.get_sample_value("vcuda_ledger_spent_total") or 0

    def flush(self) -> None:
        self._flushing = self.loop.create_task(self.ledgers.flush())

    def close(self) -> None:
        self._closing = self.loop.create_task(self.ledgers.close())

    def run(self) -> None:
        if not self.paused:
            self.loop.run_until_idle()


class Leader:
    """A controller that believes it is the leader. It knows the objects that were stored at its last `look`."""

    def __init__(self, world: "ReservationWorld", rate: float) -> None:
        self._wire = world.wire
        clock = DriftingClock(world.time, rate)
        kube = world.api.kube
        self._recounter, quota, nodes = unwatched_recounter(kube, world.store(clock), clock=clock.now)
        self._reflectors: list[Reflector[Any]] = [
            quota.reflector,
            self._recounter.ledgers,
            self._recounter.pods.reflector,
        ]
        if world.claims:
            self._reflectors.append(self._recounter.claims.reflector)
        nodes.reflector.relist()
        self.look()

    def look(self) -> None:
        for reflector in self._reflectors:
            catch_up(reflector)

    def recount(self) -> None:
        """Start to recount, unless this leader is already recounting."""
        if not self._wire.of(self):
            self._wire.run(self, self._recount)

    def _recount(self) -> None:
        with contextlib.suppress(VcudaError):
            self._recounter.recount(TEAM)


class ReservationWorld:
    """Three webhook replicas and two leaders with one API server. Their clocks run up to one percent fast or slow.

    If ``claims`` is false, pods are created instead of claims.
    """

    def __init__(self, api: Api | None = None, *, claims: bool = True) -> None:
        self.time = TrueTime()
        self.api: Api = api or ApiDouble()
        self.claims = claims
        self.api.date = lambda: datetime.fromtimestamp(int(self.time.now), UTC)
        self.wire = Wire(self.api)
        self.subjects: dict[str, Subject] = {}
        self.stored: set[str] = set()
        self._ended: set[str] = set()
        self.over = ""
        # Seconds by which the clock of the API server that a replica calls lags behind the clock of the API server that
        # stores the pod.
        self.behind = 0.0
        self._edits: list[NamespaceQuota] = []
        self.grants: tuple[Grant, ...] = ()
        # The stored objects must fit the limits at this time, because dated quota grants change the limits.
        self.limits_since = self.time.now
        self._version = ""
        self._store = self.store(DriftingClock(self.time))
        self.set_limits(LIMITS)
        self.replicas = [ReplicaProcess(self, rate) for rate in (0.99, 1.01, 1.0)]
        self.leaders = [Leader(self, rate) for rate in (1.01, 0.99)]
        self.ask(0)
        self.through()
        self.store_some()
        self.recount()
        self.pass_by(RATE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for replica in self.replicas:
            replica.loop.end()
        while self.wire.open:
            self.wire.give_up(self.wire.open[0])

    def store(self, clock: DriftingClock) -> LedgerStore:
        return LedgerStore(
            self.api.kube,
            "vcuda-quota",
            lambda: Nodes(builders.LABELS),
            claim_price=lambda: self._price if self.claims else None,
            clock=clock.now,
            sleep=self.pass_unheard,
        )

    def _price(self, claim: StoredClaim) -> ClaimCharge:
        subject = self.subjects[claim.uid]
        return ClaimCharge({subject.model: subject.charge})

    # Steps of callers

    def ask(
        self, replica: int, number: int = 1, model: str = "M40", size: str = "card", *, claim: bool = False
    ) -> None:
        for _ in range(number):
            uid = f"uid-{len(self.subjects)}"
            edit = len(self._edits) - 1
            self.subjects[uid] = Subject(uid, model, size, float(int(self.time.now)), edit, claim and self.claims)
            self.ask_again(uid, replica)

    def ask_again(self, uid: str, replica: int) -> None:
        """Let the API server call a replica for an object, maybe again. One admission is enough to store the object."""
        subject, process = self.subjects[uid], self.replicas[replica]
        quota = self._quota_at(self.time.now + process.ahead)
        deadline = process.clock.now() + CALL_SECONDS
        request = ChargeRequest(
            TEAM,
            uid,
            subject.model,
            subject.charge,
            quota,
            deadline,
            counted_since=self._version,
            created=subject.created - self.behind,
        )
        task = process.loop.create_task(process.ledgers.charge(request))
        task.add_done_callback(functools.partial(self._decided, uid))
        process.run()
        self.check()

    def _decided(self, uid: str, task: "asyncio.Task[Decision]") -> None:
        if task.cancelled() or isinstance(task.exception(), Unavailable | LedgerLost):
            return
        if isinstance(task.result(), Admitted) and self.subjects[uid].before < 0:
            self.subjects[uid] = self.subjects[uid]._replace(before=len(self._edits) - 1)

    def reserve(self, replica: int, number: int = 12, model: str = "M40", size: str = "card") -> None:
        """Create so many objects that the replica reserves quota. All objects are stored, and a leader recounts."""
        self.ask(replica, number, model, size)
        self.go_on()
        self.store_some()
        self.recount()

    def flush(self, replica: int) -> list[OpenCall]:
        """Let a replica flush its charges to the ledger now. Return its API calls that have no answer yet."""
        process = self.replicas[replica]
        process.flush()
        self._run()
        return self.wire.of(process)

    def close(self, replica: int) -> None:
        """Stop a replica gracefully. Its process runs until `crash`."""
        self.replicas[replica].close()
        self._run()

    def idle(self, replica: int) -> list[OpenCall]:
        """Let time pass until the replica releases its unused reservation. Return the API calls by which it does so."""
        self.pass_by(RATE_SECONDS * 1.1)
        self.flush(replica)
        return self.writes(replica)

    def writes(self, replica: int) -> list[OpenCall]:
        """Answer the API reads of a replica. Return the writes that it sends after these answers."""
        process = self.replicas[replica]
        while reads := [call for call in self.wire.of(process) if call.method == "GET"]:
            self.answer(reads[0])
        return self.wire.of(process)

    def go_on(self, *senders: object) -> None:
        """Three times, answer every API call and let a short time pass. So replicas that wait for others continue."""
        for _ in range(3):
            self.through(*senders)
            self.pass_by(0.03)

    def set_limits(self, limits: Mapping[str, Limit], total: Limit | None = None) -> None:
        """Edit the quota. All processes see the edit at once, but a decision in progress uses the old quota.

        ``total``: the limit of all models together.
        """
        self._edits.append(NamespaceQuota({**limits}, total=total))
        entry: dict[str, Any] = {"quota": {model: limit.most_cores // 100 for model, limit in limits.items()}}
        store_quota(self.api, json.dumps({TEAM: {**entry, **({"total": total.most_cores // 100} if total else {})}}))
        self._version = self.api.objects[QUOTA]["metadata"]["resourceVersion"]

    @property
    def limits(self) -> Mapping[str, Limit]:
        return self._edits[-1].limits

    @property
    def total(self) -> Limit | None:
        return self._edits[-1].total

    def _quota_at(self, moment: float) -> NamespaceQuota:
        return msgspec.structs.replace(self._edits[-1], grants=self.grants).at(moment)

    # Steps of the API server

    def storable(self) -> list[str]:
        granted = (each for each in self.subjects.values() if each.before >= 0 and each.uid not in self.stored)
        in_time = (each for each in granted if self.time.now <= each.created + STORABLE_SECONDS)
        return [each.uid for each in in_time if each.uid not in self._ended]

    def store_some(self, most: int = 1000) -> None:
        for uid in self.storable()[:most]:
            self.stored.add(uid)
            self.api.store(self.subjects[uid].path, self.subjects[uid].manifest)
        self.check()

    def end(self, most: int) -> None:
        for uid in sorted(self.stored)[:most]:
            self.stored.remove(uid)
            self._ended.add(uid)
            self.api.remove(self.subjects[uid].path)
        self.check()

    def through(self, *senders: object) -> None:
        """Answer every API call, including the calls that follow from the answers."""
        while calls := [call for call in self.wire.open if not senders or call.sender in senders]:
            self.answer(calls[0])

    def answer(self, call: OpenCall) -> None:
        self.wire.answer(call)
        self._run()

    def give_up(self, call: OpenCall, *, lands: bool = False) -> None:
        self.wire.give_up(call, lands=lands)
        self._run()

    # Steps of time

    def pass_by(self, seconds: float) -> None:
        self.time.now += seconds
        self._run()

    def pass_unheard(self, seconds: float) -> None:
        """Let time pass while one process sleeps. No other process runs in this time."""
        self.time.now += seconds

    def suspend(self, replica: int, seconds: float) -> None:
        """Suspend the machine of a replica. The replica's clocks do not advance during the suspension."""
        self.replicas[replica].paused = True
        self.pass_by(seconds)
        self.replicas[replica].clock.stood_still += seconds
        self.resume(replica)

    def pause(self, replica: int) -> None:
        self.replicas[replica].paused = True

    def resume(self, replica: int) -> None:
        self.replicas[replica].paused = False
        self._run()

    @property
    def spent(self) -> float:
        return sum(replica.spent for replica in self.replicas)

    def crash(self, replica: int, *, lands: bool = False) -> None:
        gone = self.replicas[replica]
        gone.loop.end()
        for call in self.wire.of(gone):
            self.wire.give_up(call, lands=lands)
        self.replicas[replica] = ReplicaProcess(self, (0.99, 1.01, 1.0)[replica])

    # Steps of leaders

    def recount(self, leader: int = 0, *, look: bool = True) -> None:
        if look:
            self.leaders[leader].look()
        self.leaders[leader].recount()
        self.through(self.leaders[leader])
        self.check()

    def lose(self) -> None:
        """Delete the ledger by hand, as a user who bypasses the finalizer and the policy that protect it."""
        if LEDGER in self.api.objects:
            self.api.remove(LEDGER)

    # Invariants

    def ledger(self) -> Ledger:
        return read_ledger(self.api.objects[LEDGER]["data"]["ledger"])

    def check(self) -> None:
        """Remember the first violation. An exception would not do, because the code under test may catch it."""
        self.over = self.over or self._wrong()
        assert not self.over, self.over

    def _wrong(self) -> str:
        held = [self.subjects[uid] for uid in (*self.stored, *self.storable())]
        newest = len(self._edits) - 1
        # An object may exceed a limit if an older quota decided about it and it was admitted after the edit. So leave
        # it out.
        counted = [each for each in held if each.edit == newest or each.before < newest]
        if self.total and _exceeds(self.total, counted, newest):
            return f"{_sum(counted)} are stored or may be, and the limit is {self.total} in total"
        for model, limit in self._quota_at(self.limits_since).limits.items():
            of_model = [each for each in held if each.model == model]
            if _exceeds(limit, [each for each in counted if each.model == model], newest):
                return f"{_sum(of_model)} of {model} are stored or may be, and the limit is {limit}"
            used = self._used(model)
            if used is not None and not used.covers(_sum(of_model)):
                return f"{_sum(of_model)} of {model} are stored or may be, and the ledger counts {used}"
        return ""

    def _used(self, model: str) -> Charge | None:
        """Return the usage by the ledger. None if the ledger is missing, or was lost and may not admit yet."""
        ledger = self.ledger() if LEDGER in self.api.objects else None
        return ledger.usage(model).used if ledger and not ledger.lost else None

    def come_to_rest(self) -> None:
        """Let every API call succeed until no process waits. The ledger must then charge exactly the stored objects."""
        for replica in range(len(self.replicas)):
            self.resume(replica)
        self.wire.land()
        for _ in range(15):
            self.through()
            self.store_some()
            for leader in range(len(self.leaders)):
                self.recount(leader)
            self.pass_by(15)
        if LEDGER in self.api.objects:
            ledger = self.ledger()
            assert (ledger.pending, ledger.terminating, ledger.reserved) == ({}, {}, {}), (
                "more is charged than is stored"
            )
            stored = charges_by_model((each.model, each.charge) for each in map(self.subjects.__getitem__, self.stored))
            used = {model: usage.used for model, usage in ledger.usages().items()}
            assert used == stored, "more is charged than is stored"

    def _run(self) -> None:
        for replica in self.replicas:
            replica.run()
        self.check()


def _exceeds(limit: Limit, counted: Sequence[Subject], newest: int) -> bool:
    return any(each.edit == newest for each in counted) and not fits(limit, Charge(), _sum(counted))


def _sum(subjects: Iterable[Subject]) -> Charge:
    return total(each.charge for each in subjects)
