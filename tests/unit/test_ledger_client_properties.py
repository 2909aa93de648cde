"""Replicas that share a ledger never admit more than the quota, nor refuse what fits beside what is stored.

Whatever befalls their calls, and however they race.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings, strategies as st

from tests.api_double import ApiDouble, Delivery, Effect, Late, delivered, lost_reply, lost_request
from tests.builders import stored_pod
from tests.replicas import LEDGER, POD, Clock, Replica, asked
from tests.waiting import PATIENT
from vcuda.errors import LedgerLost, Unavailable, VcudaError
from vcuda.kube import Stored
from vcuda.ledger.ledger import Admitted, Refused
from vcuda.ledger.settle import ObservedPods, settle
from vcuda.quota.model import Charge, Limit, NamespaceQuota
from vcuda.quota.terms import STORABLE_SECONDS
from webhook.ledger.ledgers import ChargeRequest, PutOff, RetryLater

LIMIT = 500


class Step(NamedTuple):
    """One replica is asked for one pod. ``fates`` befall the calls of this step in order; then all get through.

    Before it ``seconds`` pass, and the ledger may be ``lost``.
    """

    replica: int
    pod: int
    dry_run: bool
    fates: tuple[str, ...]
    seconds: float = 0
    lost: bool = False


FATES = (
    "ok",
    "lost request",
    "lost reply",
    "late",
    "land",
    "overtaken",
    "settled",
    "dropped",
    "deleted",
    "stored",
    "stored",
)
STEPS = st.builds(
    Step,
    st.integers(0, 1),
    st.integers(0, 11),
    st.sampled_from([False, False, False, True]),
    st.lists(st.sampled_from(FATES), max_size=8).map(tuple),
    st.sampled_from([0, 0, 0, 40, 80]),
    st.sampled_from([False] * 5 + [True]),
)


def cores_of(pod: int) -> int:
    return (50, 100, 200)[pod % 3]


class Replicas:
    """Two replicas over one store; what they answered, beside what is stored."""

    def __init__(self) -> None:
        self.api, self.clock = ApiDouble(), Clock()
        self.replicas = [Replica(self.api, self.clock), Replica(self.api, self.clock)]
        self.store = self.replicas[0].store
        self.leader = Replica(self.api, self.clock).store
        # Cores, and when they were asked for.
        self.granted: dict[str, tuple[int, float]] = {}
        self.lost: dict[str, tuple[int, float]] = {}
        # Cores of the pods that are there, and the most that there were at once since the last one was asked for.
        self.stored: dict[str, int] = {}
        self._most_stored = 0
        self.late = Late()
        self._numbered = 0

    def take(self, step: Step) -> None:
        """Ask once, with these fates; whatever is answered must be true."""
        if step.seconds:
            self.clock.pass_by(step.seconds)
            self.late = Late()  # no call lands so long after it was sent
        if step.lost:
            self._delete()
        fates = iter(step.fates)

        def deliver(method: str, timeout: float, effect: Effect) -> bytes:
            return self._fate(next(fates, "ok"), step)(method, timeout, effect)

        self.api.deliver = deliver
        if f"uid-{step.pod}" not in self.stored:  # nobody is asked about a pod again that is there
            self.ask(step.replica, f"uid-{step.pod}", cores_of(step.pod), dry_run=step.dry_run)
        self.api.deliver = delivered

    def ask(self, replica: int, uid: str, cores: int, *, dry_run: bool = False) -> None:
        arrived, self._most_stored = self.clock.now, sum(self.stored.values())
        asked_for = request(uid, cores, dry_run=dry_run, deadline=arrived + PATIENT)
        try:
            decision = asyncio.run(self.replicas[replica].ledgers.charge(asked_for))
        except (Unavailable, LedgerLost):
            return
        if isinstance(decision, Admitted) and not dry_run:
            self.granted[uid] = cores, arrived
            assert uid in self.pending(), "granted, and not written down"
        if isinstance(decision, Refused):
            assert uid not in self.granted, "refused what it has"
            assert self._most_stored + cores > LIMIT, "refused though an exact count leaves room"

    def read(self) -> Stored | None:
        before, self.api.deliver = self.api.deliver, delivered
        try:
            return self.store.read("team-a")
        except LedgerLost:
            return None
        finally:
            self.api.deliver = before

    def pending(self) -> dict[str, int]:
        """Return what is stored: cores by uid."""
        stored = self.read()
        return {uid: each.charge.cores for uid, each in stored.ledger.pending.items()} if stored else {}

    def check(self) -> None:
        """Every pod that was granted is charged, once and as it is; never more than the limit.

        Those that were granted in a ledger that is lost are charged nowhere, and may be stored all the same.
        """
        pending, now = self.pending(), self.clock.now
        on_their_way = {uid: cores for uid, (cores, _) in self.granted.items() if uid not in self.stored}
        assert on_their_way.items() <= pending.items()
        storable = {uid: cores for uid, (cores, at) in self.lost.items() if now < at + STORABLE_SECONDS}
        assert sum({**storable, **pending, **self.stored}.values()) <= LIMIT

    def _fate(self, fate: str, step: Step) -> Delivery:
        named: dict[str, Callable[[], Delivery]] = {
            "ok": lambda: delivered,
            "lost request": lambda: lost_request,
            "lost reply": lambda: lost_reply,
            "late": lambda: self.late,
            "land": lambda: self._after(self.late.land),
            "overtaken": lambda: self._after(lambda: self._overtake(1 - step.replica)),
            "settled": lambda: self._after(self._settle),
            "dropped": lambda: self._after(self._drop),
            "deleted": lambda: self._after(self._delete),
            "stored": lambda: self._after(self._store),
        }
        return named[fate]()

    def _after(self, first: Callable[[], None]) -> Delivery:
        def deliver(_method: str, _timeout: float, effect: Effect) -> bytes:
            before, self.api.deliver = self.api.deliver, delivered
            first()
            self.api.deliver = before
            return effect()

        return deliver

    def _overtake(self, other: int) -> None:
        """The other replica gets in between with a pod of its own."""
        self._numbered += 1
        self.ask(other, f"other-{self._numbered}", 100)

    def _store(self) -> None:
        """The oldest pod that was granted, and may still be stored, is."""
        storable = {uid: cores for uid, (cores, at) in self.granted.items() if self.clock.now < at + STORABLE_SECONDS}
        for uid in [uid for uid in storable if uid not in self.stored][:1]:
            self.stored[uid] = storable[uid]
            limits = {"nvidia.com/vcuda-core": storable[uid], "nvidia.com/vcuda-memory": 1}
            self.api.store(f"{POD}{uid}", stored_pod(limits, uid))
            self._most_stored = max(self._most_stored, sum(self.stored.values()))

    def _settle(self) -> None:
        """The controller releases the oldest pod that was granted: it has come and gone."""
        stored = self.read()
        uid = next((uid for uid in stored.ledger.pending if uid in self.granted), None) if stored else None
        if stored is None or uid is None or stored.version is None:
            return
        if self.stored.pop(uid, 0):
            self.api.remove(f"{POD}{uid}")
        counted = self.store.count_pods("team-a")
        view = ObservedPods("1000000", counted.committed, {*counted.seen, uid})
        try:
            self.store.write("team-a", settle(stored.ledger, view), stored)
        except VcudaError as error:
            raise AssertionError("nobody writes in between") from error
        del self.granted[uid]

    def _drop(self) -> None:
        """The controller drops the ledger, if nothing is charged in it."""
        stored = self.read()
        if stored and stored.version and not stored.ledger.pending:
            self.leader.drop("team-a", stored.version)

    def _delete(self) -> None:
        """Somebody deletes the ledger by hand."""
        if LEDGER in self.api.objects:
            self.api.remove(LEDGER)
            self.lost |= self.granted
            self.granted = {}


def request(uid: str, cores: int, **fields: object) -> ChargeRequest:
    return asked(uid, charge=Charge(cores, 0, cores), quota=NamespaceQuota({"M40": Limit(LIMIT)}), **fields)


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(STEPS, min_size=1, max_size=15))
@example(steps=[Step(0, 0, False, ("ok",) * 5 + ("late",)), Step(1, 2, False, ()), Step(0, 2, False, ("land",))])
@example(steps=[*(Step(0, pod, False, ()) for pod in (2, 5)), Step(1, 8, False, (), lost=True), Step(1, 8, False, ())])
@example(
    steps=[*(Step(0, pod, False, ()) for pod in (2, 5)), Step(1, 8, False, (), lost=True), Step(1, 8, False, (), 80)]
)
def test_never_over_the_limit_and_each_uid_once(steps: list[Step]) -> None:
    replicas = Replicas()
    for step in steps:
        replicas.take(step)
        replicas.check()
    replicas.late.land()  # what is still on its way
    replicas.check()


class Network:
    """One call at a time reaches the API server; every so many are lost on their way, or their answers are."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._count = 0
        self._lock = threading.Lock()

    def __call__(self, method: str, timeout: float, effect: Effect) -> bytes:
        with self._lock:
            self._count += 1
            lost = self._every and self._count % self._every == 0 and method != "LIST"
            if not lost:
                return effect()
            return (lost_reply if self._count // self._every % 2 else lost_request)(method, timeout, effect)


@pytest.mark.parametrize("every", [0, 7, 3], ids=["nothing is lost", "one call in 7", "one call in 3"])
def test_two_replicas_and_many_callers_fill_the_quota_exactly(every: int) -> None:
    """Every caller comes again, under the same uid, until it has yes or no."""
    replicas = Replicas()
    replicas.api.deliver = Network(every)

    async def caller(number: int) -> Admitted | Refused | PutOff:
        while True:
            began = replicas.clock.now
            try:
                decision = await replicas.replicas[number % 2].ledgers.charge(request(f"uid-{number}", 25))
            except Unavailable:
                continue
            except LedgerLost as lost:  # its creation got no answer, and it is not there
                replicas.clock.pass_by(max(began + lost.left - replicas.clock.now, 0))  # all wait at the same time
                continue
            if not isinstance(decision, RetryLater):
                return decision

    async def callers() -> list[Admitted | Refused | PutOff]:
        return await asyncio.gather(*map(caller, range(60)))

    granted = {f"uid-{number}" for number, got in enumerate(asyncio.run(callers())) if isinstance(got, Admitted)}
    assert granted == replicas.pending().keys()
    assert len(granted) * 25 == LIMIT
