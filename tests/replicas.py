"""Webhook replicas that share the ledgers of one API server double."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from prometheus_client import CollectorRegistry

from tests.api_double import ApiDouble, Effect, delivered
from tests.builders import LABELS
from tests.waiting import PATIENT, Deadline
from vcuda.kube import LedgerStore
from vcuda.ledger.ledger import Admitted, Refused
from vcuda.placement.placement import Nodes
from vcuda.quota.model import Charge, Limit, NamespaceQuota
from webhook.ledger_client import ClusterLedgers
from webhook.ledgers import ChargeRequest, RetryLater
from webhook.metrics import LedgerMetrics

LEDGER = "/api/v1/namespaces/vcuda-quota/configmaps/gpu-ledger-team-a"
POD = "/api/v1/namespaces/team-a/pods/train-0"

FOUR = NamespaceQuota({"M40": Limit(400)})
CARD = Charge(100, 0, 100)
Decision = Admitted | Refused | RetryLater


class Clock:
    """The time that the code under test sees; it passes by sleeping only."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Replica:
    """One webhook's ledgers, and how often each of its metrics has counted."""

    def __init__(self, api: ApiDouble) -> None:
        self._registry = CollectorRegistry()
        self.store = LedgerStore(api.kube, "vcuda-quota", lambda: Nodes(LABELS))
        self.ledgers = ClusterLedgers(self.store, LedgerMetrics(self._registry))

    def charge(self, uid: str, **fields: object) -> Decision:
        return self.ledgers.charge(demand(uid, **fields))

    def counted(self, metric: str) -> float | None:
        return self._registry.get_sample_value(f"vcuda_ledger_{metric}")

    def uids(self) -> list[str]:
        return list(self.store.read("team-a").ledger.pending)


def demand(uid: str, **fields: object) -> ChargeRequest:
    """Return the charge of one card under a limit of four, with ample time; ``fields`` stand over these."""
    given = {"namespace": "team-a", "uid": uid, "model": "M40", "charge": CARD}
    return ChargeRequest(**{**given, "quota": FOUR, "deadline": Deadline(), **fields})  # type: ignore[arg-type]  # the fields of a test


def kinds(decisions: Iterable[Decision]) -> list[str]:
    return [type(decision).__name__ for decision in decisions]


class Gate:
    """Holds the first call until the test lets it through."""

    def __init__(self, api: ApiDouble) -> None:
        self.arrived, self.opened = threading.Event(), threading.Event()
        self._api = api
        api.deliver = self._hold

    def _hold(self, _method: str, _timeout: float, effect: Effect) -> bytes:
        self._api.deliver = delivered
        self.arrived.set()
        assert self.opened.wait(PATIENT)
        return effect()


def together(api: ApiDouble, replica: Replica, first: ChargeRequest, rest: Sequence[ChargeRequest]) -> list[Decision]:
    """Have the rest arrive, in order, while the first is being decided; they are the next group."""
    gate = Gate(api)
    with ThreadPoolExecutor(len(rest) + 1) as executor:
        callers: list[Future[Decision]] = [executor.submit(replica.ledgers.charge, first)]
        assert gate.arrived.wait(PATIENT)
        for each in rest:
            callers.append(executor.submit(replica.ledgers.charge, each))
            assert isinstance(each.deadline, Deadline)
            assert each.deadline.read.wait(PATIENT)
        gate.opened.set()
        return [caller.result(PATIENT) for caller in callers]
