"""A settler beside an API server double: it has listed everything, and settles when the test says so."""

from __future__ import annotations

import json

from prometheus_client import CollectorRegistry

from controller.metrics import SettleMetrics
from controller.settler import Settler
from tests.api_double import ApiDouble
from tests.builders import LABELS, Manifest
from tests.replicas import Replica
from tests.waiting import PATIENT
from vcuda.kube import NodeInformer, QuotaInformer, QuotaPlace
from vcuda.ledger.ledger import Ledger

FOUR_M40 = json.dumps({"team-a": {"quota": {"M40": 4}}})
QUOTA = "/api/v1/namespaces/kube-system/configmaps/gpuquota"


class Settling:
    """A settler of namespace team-a, which by ``document`` may use four M40, and has this ledger and these pods."""

    def __init__(
        self, api: ApiDouble, replica: Replica, ledger: Ledger, *pods: Manifest, document: str = FOUR_M40
    ) -> None:
        metadata = {"name": "gpuquota", "namespace": "kube-system"}
        api.store(QUOTA, {"metadata": metadata, "data": {"gpu_quota": document}})
        replica.store.write("team-a", ledger, None)
        for pod in pods:
            home = {**pod["metadata"], "namespace": "team-a"}
            api.store(f"/api/v1/namespaces/team-a/pods/{home['name']}", {**pod, "metadata": home})
        self._registry = CollectorRegistry()
        quota, nodes = QuotaInformer(api.kube, QuotaPlace(), frozenset()), NodeInformer(api.kube, LABELS)
        self.settler = Settler(
            api.kube,
            replica.store,
            quota,
            nodes,
            metrics=SettleMetrics(self._registry),
            on_report=lambda *_: self.settler.due.close(),
        )
        for reflector in (quota.reflector, nodes.reflector, self.settler.ledgers, self.settler.pods.reflector):
            reflector.start()
            assert reflector.synced.wait(PATIENT)
            reflector.stop()
            reflector.join(PATIENT)
        self._forget_due()
        api.forget_calls()

    def counted(self, metric: str) -> float | None:
        """How often one of its metrics has counted."""
        return self._registry.get_sample_value(f"vcuda_settle_{metric}")

    def run(self) -> None:
        """Settle what is due until one namespace is done; it ends with that for good."""
        self.settler.run()

    def settle(self) -> None:
        """Settle the namespace once, whatever is due."""
        self.settler._settle("team-a")

    def _forget_due(self) -> None:
        """Let nothing be due: a name that is due last of all tells where that ends."""
        self.settler.due.add("end")
        for _ in iter(self.settler.due.next, "end"):
            pass
