"""Replicas that grant from reservations never admit more than the quota, whatever befalls them and their calls."""

import asyncio
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.api_double import ApiDouble, Delivery, Effect, Late, delivered, lost_reply, lost_request
from tests.builders import stored_pod
from tests.replicas import LEDGER, Clock, Replica, asked
from tests.waiting import PATIENT
from vcuda.errors import Conflict, LedgerLost, NotFound, Unavailable
from vcuda.ledger.ledger import MARGIN_SECONDS, STORABLE_SECONDS, Admitted, Refused, settle
from vcuda.quota.model import Charge, Limit, NamespaceQuota

CARDS = 60
QUOTA = NamespaceQuota({"M40": Limit(100 * CARDS)})
CARD = Charge(100, 0, 100)
FATES = st.lists(
    st.sampled_from(["ok", "lost request", "lost reply", "late", "land", "overtaken", "settled", "beside", "slow"]),
    max_size=4,
).map(tuple)
REPLICA = st.integers(0, 1)
STEPS = st.one_of(
    st.tuples(st.just("ask"), REPLICA, st.integers(1, 24), FATES),
    st.tuples(st.just("flush"), REPLICA, FATES),
    st.tuples(st.just("store"), st.integers(1, 30)),
    st.tuples(st.just("end"), st.integers(1, 30)),
    st.tuples(st.just("settle")),
    st.tuples(st.just("pass by"), st.sampled_from([0.1, 0.3, 1.1, 9, 11, 40, STORABLE_SECONDS + 1, 90])),
    st.tuples(st.just("crash"), REPLICA),
    st.tuples(st.just("lose")),
    st.tuples(st.just("land")),
)
Step = tuple[Any, ...]


class World:
    """Two replicas over one API server, what they answered, and what is stored."""

    def __init__(self) -> None:
        self.api, self.clock, self.late = ApiDouble(), Clock(), Late()
        self.api.date = lambda: datetime.fromtimestamp(self.clock.now, UTC)
        self.replicas = [Replica(self.api, self.clock), Replica(self.api, self.clock)]
        self.store = Replica(self.api, self.clock).store
        # By uid, when the API server asked first: it stores what was granted within a minute and a bit, or never.
        self.asked: dict[str, float] = {}
        self.granted: set[str] = set()
        self.stored: set[str] = set()
        self.since: dict[object, float] = {}
        self.beside: list[asyncio.Future[None]] = []
        self._fates: list[str] = []
        self._replica = 0

    async def take(self, step: Step) -> None:
        name, *given_ = step
        *arguments, self._fates = [*given_[:-1], list(given_[-1])] if name in {"ask", "flush"} else [*given_, []]
        self._replica = arguments[0] if name in {"ask", "flush"} else 0
        self.api.deliver = self._deliver
        await getattr(self, name.replace(" ", "_"))(*arguments)
        self.api.deliver = delivered
        await asyncio.gather(*self.beside)
        self.check()

    async def ask_beside(self) -> None:
        """Pods are created while a write is under way; what is not granted from the reservation waits for it."""
        self.beside = [asyncio.ensure_future(self.ask(self._replica, 1)) for _ in range(6)]
        await asyncio.sleep(0)

    async def ask(self, replica: int, number: int) -> None:
        """So many pods are created one after the other; each of them once."""
        for _ in range(number):
            uid = f"uid-{len(self.asked)}"
            self.asked[uid] = self.clock.now
            request = asked(uid, quota=QUOTA, deadline=self.clock.now + PATIENT, created=float(int(self.clock.now)))
            try:
                decision = await self.replicas[replica].ledgers.charge(request)
            except (Unavailable, LedgerLost):
                continue
            if isinstance(decision, Admitted):
                self.granted.add(uid)
            if isinstance(decision, Refused) and not decision.shortage.rests_on_pending:
                assert self.live() + self.unsettled() >= CARDS, "refused though there is room"

    async def flush(self, replica: int) -> None:
        await self.replicas[replica].ledgers.flush()

    async def store_(self, number: int) -> None:
        for uid in sorted(self.storable())[:number]:
            self.stored.add(uid)
            self.api.store(
                f"/api/v1/namespaces/team-a/pods/{uid}", {**stored_pod({"tencent.com/vcuda-core": 100}, uid)}
            )

    async def end(self, number: int) -> None:
        for uid in sorted(self.stored)[:number]:
            self.stored.remove(uid)
            self.granted.remove(uid)
            self.api.remove(f"/api/v1/namespaces/team-a/pods/{uid}")

    async def settle(self) -> None:
        """The leader settles by a LIST, drops what was never stored, and the reservations of replicas that are gone."""
        try:
            stored = await asyncio.to_thread(self.store.read, "team-a")
        except (LedgerLost, Unavailable):
            return
        if stored.version is None:
            return
        ledger, now = stored.ledger, self.clock.now
        ages = {uid: uid for uid in ledger.pending} | {(h, each.counter): h for h, each in ledger.reserved.items()}
        self.since = {key: self.since.get(key, now) for key in ages}
        old = STORABLE_SECONDS + MARGIN_SECONDS
        overdue = {uid for uid in ledger.pending if now > self.since[uid] + old}
        reaped = {h for h, each in ledger.reserved.items() if now > self.since[h, each.counter] + each.seconds + old}
        try:
            view = await asyncio.to_thread(self.store.count_pods, "team-a")
            settled = settle(ledger, view, overdue - set(view.seen), reaped=reaped)
            if settled is not ledger:
                await asyncio.to_thread(self.store.write, "team-a", settled, stored)
        except (Conflict, Unavailable, NotFound):
            return

    async def pass_by(self, seconds: float) -> None:
        self.clock.pass_by(seconds)
        if seconds >= STORABLE_SECONDS:
            self.late = Late()  # no call lands so long after it was sent

    async def crash(self, replica: int) -> None:
        self.replicas[replica] = Replica(self.api, self.clock)

    async def lose(self) -> None:
        if LEDGER in self.api.objects:
            self.api.remove(LEDGER)

    async def land(self) -> None:
        self.late.land()

    def storable(self) -> set[str]:
        waiting = self.granted - self.stored
        return {uid for uid in waiting if self.clock.now <= self.asked[uid] + STORABLE_SECONDS}

    def live(self) -> int:
        return len(self.stored) + len(self.storable())

    def unsettled(self) -> int:
        """Return how many cards a settlement would still release."""
        return CARDS

    def check(self) -> None:
        assert self.live() <= CARDS

    def _deliver(self, method: str, timeout: float, effect: Effect) -> bytes:
        fate = self._fates.pop(0) if self._fates else "ok"
        fates: dict[str, Delivery] = {"lost request": lost_request, "lost reply": lost_reply, "late": self.late}
        befores: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "land": self.land,
            "settled": self.settle,
            "beside": self.ask_beside,
            "overtaken": lambda: self.ask(1 - self._replica, 3),
        }
        if fate in befores:
            self._fates, kept = [], self._fates
            asyncio.run_coroutine_threadsafe(befores[fate](), self.loop).result(PATIENT)
            self._fates = kept
        answer = fates.get(fate, delivered)(method, timeout, effect)
        if fate == "slow":
            self._fates, kept = [], self._fates
            asyncio.run_coroutine_threadsafe(self.settle(), self.loop).result(PATIENT)
            self._fates = kept
            self.clock.pass_by(8)
        return answer

    async def run(self, steps: list[Step]) -> None:
        self.loop = asyncio.get_running_loop()
        for step in steps:
            await self.take(("store_", *step[1:]) if step[0] == "store" else step)
        await self.land()
        self.check()


RESERVED = [("ask", 0, 12, ()), ("flush", 0, ())]
FILLED = [*RESERVED, ("store", 30), ("settle",)]
SCENARIOS: dict[str, list[Step]] = {
    "who reserves nothing takes what another reserves": [*FILLED, ("ask", 1, 60, ()), ("ask", 0, 3, ())],
    "it grants when its time is over": [*FILLED, ("pass by", 90), ("settle",), ("ask", 1, 60, ()), ("ask", 0, 6, ())],
    "what it granted last may be stored after its time": [
        *FILLED,
        ("pass by", 9),
        ("ask", 0, 3, ()),
        ("pass by", 4),
        ("settle",),
        ("ask", 1, 60, ()),
    ],
    "a minute later, too": [
        *FILLED,
        ("pass by", 9),
        ("ask", 0, 3, ()),
        ("pass by", 67),
        ("settle",),
        ("ask", 1, 60, ()),
    ],
    "its time is counted from the answer": [
        ("ask", 0, 12, ()),
        ("flush", 0, ("slow",)),
        ("store", 30),
        ("pass by", 8),
        ("ask", 0, 3, ()),
        ("pass by", 73),
        ("settle",),
        ("ask", 1, 60, ()),
    ],
    "the ledger is lost, and it does not know": [
        *FILLED,
        ("lose",),
        ("ask", 1, 1, ()),
        ("pass by", 8),
        ("ask", 0, 3, ()),
        ("pass by", 67),
        ("ask", 1, 60, ()),
    ],
    "its next reservation is larger, and that write is lost": [
        ("ask", 0, 4, ()),
        ("flush", 0, ()),
        ("ask", 0, 12, ()),
        ("flush", 0, ("lost request", "beside")),
        ("ask", 1, 60, ()),
    ],
    "its next reservation is smaller": [
        ("ask", 0, 24, ()),
        ("flush", 0, ()),
        ("ask", 1, 12, ()),
        ("ask", 0, 1, ()),
        ("flush", 0, ("beside",)),
        ("ask", 1, 60, ()),
    ],
}


@pytest.mark.parametrize("steps", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_not_over_the_limit_when(steps: list[Step]) -> None:
    world = World()
    asyncio.run(world.run(steps))
    assert world.replicas[0].counted("granted_total"), "nothing was granted from a reservation"


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(STEPS, min_size=1, max_size=30))
def test_never_over_the_limit(steps: list[Step]) -> None:
    asyncio.run(World().run(steps))
