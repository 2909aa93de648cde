"""Runs a recounter (of ledgers) with an API server double. A test delivers watch events and sets the clock."""

import json
import time
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from controller.metrics import RecountMetrics
from tests.api_double import ApiDouble
from tests.builders import Manifest
from tests.quota_map import store_quota
from tests.replicas import Replica
from tests.watching import catch_up, unwatched_recounter
from vcuda.ledger.ledger import Ledger, Pending
from vcuda.ledger.report import NamespaceUse
from vcuda.quota.model import Charge

FOUR_M40 = json.dumps({"team-a": {"quota": {"M40": 4}}})
NOBODY = "{}"

HALF, ONE, TWO = Charge(50, 0, 50), Charge(100, 0, 100), Charge(200, 0, 200)
COUNTED, LISTED, FAR = "103", "105", "1000000"
"""Three versions: between the quota and the LIST of the pods, the version of this LIST, and one far in the future."""

POD, CARD = "/api/v1/namespaces/team-a/pods/train-0", {"tencent.com/vcuda-core": 100}
PENDING = Ledger({}, COUNTED, {"uid-1": Pending("M40", ONE)})


class Recounting:
    """A recounter of the ledger of namespace team-a, with these pods. By default, the quota permits four M40.

    Its watches have listed everything, and no recount is due. It recounts when the test calls it.
    """

    def __init__(
        self,
        api: ApiDouble,
        replica: Replica,
        ledger: Ledger | None = None,
        *pods: Manifest,
        document: str = FOUR_M40,
        gone: bool = False,
        **data: str,
    ) -> None:
        store_quota(api, document, **data)
        if ledger:
            replica.store.write("team-a", ledger, replica.store.open("team-a"))
        for pod in pods:
            home = {**pod["metadata"], "namespace": "team-a"}
            api.store(f"/api/v1/namespaces/team-a/pods/{home['name']}", {**pod, "metadata": home})
        self._registry = CollectorRegistry()
        self._ahead = 0.0
        self.goes_on = False
        self.recounter, quota, nodes = unwatched_recounter(
            api.kube,
            replica.store,
            metrics=RecountMetrics(self._registry),
            on_report=self._on_report,
            exists=lambda _: not gone,
            clock=lambda: time.monotonic() + self._ahead,
        )
        self.reports: list[NamespaceUse | None] = []
        self._reflectors = (quota.reflector, nodes.reflector, self.recounter.ledgers, self.recounter.pods.reflector)
        self.relist()
        self.recounter.queue.add("end")  # this key is due last, so it marks the end of the due namespaces
        for key in iter(self.recounter.queue.next, None):
            self.recounter.queue.served(key)
            if key == "end":
                break
        self.later(10)
        api.forget_calls()

    def counted(self, metric: str) -> float | None:
        return self._registry.get_sample_value(f"vcuda_recount_{metric}")

    def relist(self) -> None:
        for reflector in self._reflectors:
            catch_up(reflector)

    def _on_report(self, _namespace: str, use: NamespaceUse | None) -> None:
        self.reports.append(use)
        if not self.goes_on:
            self.recounter.reconciler.stop()

    def later(self, seconds: float) -> None:
        self._ahead += seconds

    def run(self) -> None:
        """Let the recounter's thread run until it has recounted one namespace."""
        self.recounter.reconciler.run()

    def recount(self) -> None:
        """Recount the namespace once, whether it is due or not."""
        self.recounter.recount("team-a")

    def resync(self) -> list[Any]:
        """Run one resync, which only queues namespaces. Return the logged warnings."""
        with structlog.testing.capture_logs() as logs:
            self.recounter.resync()
        return [(line["event"], line["namespace"]) for line in logs if line["log_level"] == "warning"]

    def take_turn(self) -> None:
        """Take the namespace from the queue, and recount its ledger. The interval until the next recount begins now."""
        self.goes_on = True
        self.recounter.queue.add("team-a")
        assert self.recounter.queue.next() == "team-a"
        self.recount()

    def is_due(self) -> bool:
        self.recounter.queue.add("end")
        return self.recounter.queue.next() == "team-a"
