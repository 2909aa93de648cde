"""Webhook replicas that share the ledgers of one API server double."""

import asyncio
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry

from tests.api_double import ApiDouble, Effect, delivered
from tests.builders import LABELS
from tests.waiting import PATIENT
from vcuda.kube import LedgerStore
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Usage
from webhook.ledger.charging import ChargeRequest, Decision
from webhook.ledger.ledgers import ClusterLedgers
from webhook.ledger.namespace_ledger import FLUSH_SECONDS
from webhook.metrics import LedgerMetrics

LEDGER = "/api/v1/namespaces/vcuda-quota/configmaps/gpu-ledger-team-a"
POD = "/api/v1/namespaces/team-a/pods/train-0"

FOUR = NamespaceQuota({"M40": Limit(400)})
CARD = Charge(100, 0, 100)


class Clock:
    """The time that the code under test sees. It advances only when the code sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Advance the clock. The wait for the next flush never ends, because tests flush explicitly."""
        if seconds == FLUSH_SECONDS:
            await asyncio.Event().wait()
        self.pass_by(seconds)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


async def no_pause(_seconds: float) -> None:
    """Return at once. In production, replicas pause here so that they do not call at the same moment."""


class Replica:
    """The ledgers of one webhook replica, and the counts of its metrics."""

    def __init__(self, api: ApiDouble, clock: Clock | None = None) -> None:
        self._registry = CollectorRegistry()
        # The store sleeps while it waits for another replica. No other replica acts in this test, so the sleep only
        # advances the clock.
        time_ = clock or Clock()
        self.store = LedgerStore(
            api.kube, "vcuda-quota", lambda: Nodes(LABELS), clock=time_.monotonic, sleep=time_.pass_by
        )
        metrics = LedgerMetrics(self._registry)
        self.ledgers = ClusterLedgers(
            self.store,
            metrics,
            clock.monotonic if clock else time.monotonic,
            clock.sleep if clock else no_pause,
            time_.monotonic,
        )

    def charge(self, uid: str, **fields: object) -> Decision:
        """Charge in a new event loop; the thread must not run one. A test may charge during another replica's call."""
        return asyncio.run(self.ledgers.charge(asked(uid, **fields)))

    def usage(self, namespace: str = "team-a") -> Mapping[str, Usage]:
        return asyncio.run(self.ledgers.usage(namespace))

    def counted(self, metric: str) -> float | None:
        return self._registry.get_sample_value(f"vcuda_ledger_{metric}")

    def uids(self) -> list[str]:
        return list(self.store.read("team-a").ledger.pending)


def asked(uid: str, **fields: object) -> ChargeRequest:
    """Return a request to charge one card under a limit of four, with ample time. ``fields`` replace its fields."""
    given = {"namespace": "team-a", "uid": uid, "model": "M40", "charge": CARD}
    return ChargeRequest(**{**given, "quota": FOUR, "deadline": time.monotonic() + PATIENT, **fields})  # type: ignore[arg-type]  # a test may give any fields


def kinds(decisions: Iterable[Decision]) -> list[str]:
    return [type(decision).__name__ for decision in decisions]


class Gate:
    """Blocks the first API call (of this HTTP method, if one is given) until the test releases it."""

    def __init__(self, api: ApiDouble, method: str = "") -> None:
        self.arrived, self.opened = threading.Event(), threading.Event()
        self._api = api
        self._method = method
        api.deliver = self._hold

    def _hold(self, method: str, _timeout: float, effect: Effect) -> bytes:
        if self._method not in ("", method):
            return effect()
        self._api.deliver = delivered
        self.arrived.set()
        assert self.opened.wait(PATIENT)
        return effect()


def together(api: ApiDouble, replica: Replica, first: ChargeRequest, rest: Sequence[ChargeRequest]) -> list[Decision]:
    """Send ``rest`` in order while ``first`` waits for the API server, so that the replica groups ``rest``."""

    async def arrive() -> list[Decision]:
        gate = Gate(api)
        callers = [asyncio.create_task(replica.ledgers.charge(first))]
        assert await asyncio.to_thread(gate.arrived.wait, PATIENT)
        callers += [asyncio.create_task(replica.ledgers.charge(each)) for each in rest]
        await asyncio.sleep(0)  # each request is now queued
        gate.opened.set()
        return await asyncio.gather(*callers)

    return asyncio.run(arrive())
