"""Replicas that share a ledger never admit more than the quota, whatever befalls their calls and however they race."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tests.api_double import ApiDouble, Delivery, Effect, Late, delivered, lost_reply, lost_request
from tests.builders import LABELS
from tests.replicas import no_pause
from tests.waiting import PATIENT
from vcuda.errors import Unavailable, VcudaError
from vcuda.kube import LedgerStore
from vcuda.ledger.ledger import Admitted, ObservedPods, Refused, settle
from vcuda.placement.placement import Nodes
from vcuda.quota.model import Charge, Limit, NamespaceQuota
from webhook.ledger_client import ClusterLedgers
from webhook.ledgers import ChargeRequest, RetryLater
from webhook.metrics import LedgerMetrics

LIMIT = 500
LEDGER = "/api/v1/namespaces/vcuda-quota/configmaps/gpu-ledger-team-a"


class Step(NamedTuple):
    """One replica is asked for one pod. ``fates`` befall the calls of this step in order; then all get through."""

    replica: int
    pod: int
    dry_run: bool
    fates: tuple[str, ...]


FATES = ("ok", "lost request", "lost reply", "late", "land", "overtaken", "settled")
STEPS = st.builds(
    Step,
    st.integers(0, 1),
    st.integers(0, 11),
    st.sampled_from([False, False, False, True]),
    st.lists(st.sampled_from(FATES), max_size=6).map(tuple),
)


def cores_of(pod: int) -> int:
    return (50, 100, 200)[pod % 3]


class Replicas:
    """Two replicas over one store; what they answered, beside what is stored."""

    def __init__(self) -> None:
        self.api = ApiDouble()
        store = LedgerStore(self.api.kube, "vcuda-quota", lambda: Nodes(LABELS))
        self.store = store
        self.replicas = [ClusterLedgers(store, LedgerMetrics(CollectorRegistry()), sleep=no_pause) for _ in range(2)]
        self.granted: dict[str, int] = {}
        self.ended = 0
        self._late = Late()
        self._numbered = 0

    def take(self, step: Step) -> None:
        """Ask once, with these fates; whatever is answered must be true."""
        fates = iter(step.fates)

        def deliver(method: str, timeout: float, effect: Effect) -> bytes:
            return self._fate(next(fates, "ok"), step)(method, timeout, effect)

        self.api.deliver = deliver
        self.ask(step.replica, f"uid-{step.pod}", cores_of(step.pod), dry_run=step.dry_run)
        self.api.deliver = delivered

    def ask(self, replica: int, uid: str, cores: int, *, dry_run: bool = False) -> None:
        try:
            decision = asyncio.run(self.replicas[replica].charge(self.request(uid, cores, dry_run=dry_run)))
        except Unavailable:
            return
        if isinstance(decision, Admitted) and not dry_run:
            self.granted[uid] = cores
            assert uid in self.pending(), "granted, and not written down"
        if isinstance(decision, Refused) and uid in self.granted:
            raise AssertionError("refused what it has")

    def pending(self) -> dict[str, int]:
        """Return what is stored: cores by uid."""
        before, self.api.deliver = self.api.deliver, delivered
        ledger = self.store.read("team-a").ledger
        self.api.deliver = before
        return {uid: pending.charge.cores for uid, pending in ledger.pending.items()}

    def check(self) -> None:
        """Every pod that was granted is charged, once and as it is; never more than the limit."""
        pending = self.pending()
        assert self.granted.items() <= pending.items()
        assert sum(pending.values()) <= LIMIT

    def end(self) -> None:
        """Let what is still on its way land."""
        self._late.land()

    def _fate(self, fate: str, step: Step) -> Delivery:
        named: dict[str, Callable[[], Delivery]] = {
            "ok": lambda: delivered,
            "lost request": lambda: lost_request,
            "lost reply": lambda: lost_reply,
            "late": lambda: self._late,
            "land": lambda: self._after(self._late.land),
            "overtaken": lambda: self._after(lambda: self._overtake(1 - step.replica)),
            "settled": lambda: self._after(self._settle),
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

    def _settle(self) -> None:
        """The controller releases the oldest pod that was granted: it has come and gone."""
        stored = self.store.read("team-a")
        uid = next((uid for uid in stored.ledger.pending if uid in self.granted), None)
        if uid is None or stored.version is None:
            return
        view = ObservedPods("1000000", {}, {uid})
        try:
            self.store.write("team-a", settle(stored.ledger, view, ()), stored.version)
        except VcudaError as error:
            raise AssertionError("nobody writes in between") from error
        del self.granted[uid]

    def request(self, uid: str, cores: int, *, dry_run: bool = False) -> ChargeRequest:
        quota = NamespaceQuota({"M40": Limit(LIMIT)})
        deadline = time.monotonic() + PATIENT
        return ChargeRequest("team-a", uid, "M40", Charge(cores, 0, cores), quota, deadline, dry_run=dry_run)


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(STEPS, min_size=1, max_size=15))
@example(steps=[Step(0, 0, False, ("ok", "late")), Step(1, 2, False, ()), Step(0, 2, False, ("land",))])
def test_never_over_the_limit_and_each_uid_once(steps: list[Step]) -> None:
    replicas = Replicas()
    for step in steps:
        replicas.take(step)
        replicas.check()
    replicas.end()
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

    async def caller(number: int) -> Admitted | Refused:
        request = replicas.request(f"uid-{number}", 25)
        while True:
            try:
                decision = await replicas.replicas[number % 2].charge(request)
            except Unavailable:
                continue
            if not isinstance(decision, RetryLater):
                return decision

    async def callers() -> list[Admitted | Refused]:
        return await asyncio.gather(*map(caller, range(60)))

    granted = {f"uid-{number}" for number, got in enumerate(asyncio.run(callers())) if isinstance(got, Admitted)}
    assert granted == replicas.pending().keys()
    assert len(granted) * 25 == LIMIT
