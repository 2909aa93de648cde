"""Runs the controller's `ViolationWatcher`, which evicts pods beyond the quota, on a test double of the API server."""

import json
from collections.abc import Sequence
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from controller.metrics import EvictionMetrics, ViolationsCollector
from controller.violations.violation_watcher import Evictor, ViolationWatcher
from controller.violations.violations import PricedClaim
from tests.api_double import ApiDouble
from tests.builders import LABELS, Manifest, held_to, vcuda_pod, view
from tests.quota_map import store_quota
from tests.replicas import Clock
from vcuda.allocations.stored_pods import StoredPod, read_stored
from vcuda.errors import VcudaError
from vcuda.kube import LedgerStore, NodeInformer, QuotaInformer, QuotaSource

PODS = "/api/v1/namespaces/team-a/pods"
PERIOD = 60.0
NOON = 1_795_608_000.0
"""2026-11-25T12:00Z, in Unix seconds."""
HOUR = 3600.0


class Cluster(ApiDouble):
    """A test double of the API server. Evicted pods terminate. If ``rejection`` is set, evictions raise it."""

    def __init__(self) -> None:
        super().__init__()
        self.evictions: list[dict[str, Any]] = []
        self.rejection: VcudaError | None = None

    def post(self, path: str, body: bytes, params: object = None, timeout: float = 10) -> bytes:
        """Create an object, or start the eviction of a pod."""
        if not path.endswith("/eviction"):
            return super().post(path, body, params, timeout)
        self.evictions.append(json.loads(body))
        if self.rejection:
            raise self.rejection
        self.terminate(path.split("/")[-2])
        return b"{}"

    def terminate(self, name: str) -> None:
        """Set the pod's deletionTimestamp. The pod still exists."""
        self._change(name, deletionTimestamp="now")

    def make_anew(self, name: str) -> None:
        self._change(name, uid=f"other-{name}")

    def _change(self, name: str, **metadata: str) -> None:
        found = self.objects[f"{PODS}/{name}"]
        self.store(f"{PODS}/{name}", {**found, "metadata": {**found["metadata"], **metadata}})

    def limit(self, entry: Manifest) -> None:
        store_quota(self, json.dumps({"team-a": entry}))

    def add(self, name: str, *, hour: int, cards: int = 1, **fields: Any) -> None:
        """Store a pod of team-a that was created at ``hour``. By default, its node affinity requires the model M40."""
        at = {"creationTimestamp": f"2026-01-01T{hour:02}:00:00Z", "uid": f"uid-{name}"}
        pod = vcuda_pod({"tencent.com/vcuda-core": 100 * cards}, **{"affinity": held_to("M40"), **fields})
        self.store(f"{PODS}/{name}", {**pod, "metadata": {"name": name, "namespace": "team-a", **at}})

    def events(self, about: str = "") -> list[dict[str, Any]]:
        return [found for path, found in sorted(self.objects.items()) if f"/events/{about}" in path]

    def told(self) -> list[tuple[str, str]]:
        return [(event["involvedObject"]["name"], event["reason"]) for event in self.events()]

    def evicted(self) -> list[str]:
        return [eviction["metadata"]["name"] for eviction in self.evictions]


class Watched:
    """A `ViolationWatcher` under test. Its clocks advance and its informers see changes only when the test says so."""

    def __init__(
        self,
        api: Cluster,
        *,
        enforce: bool = True,
        system: frozenset[str] = frozenset(),
        unix: float = NOON,
        claims: Sequence[PricedClaim] = (),
    ) -> None:
        self.api = api
        self.clock = Clock()
        self.pods: list[StoredPod] = []
        self.registry = CollectorRegistry()
        self.unix = unix
        self.quota = QuotaInformer(api.kube, QuotaSource(), system, clock=lambda: self.unix)
        nodes, clock = NodeInformer(api.kube, LABELS), self.clock.monotonic
        store, metrics = LedgerStore(api.kube, "vcuda-quota", nodes.current), EvictionMetrics(self.registry)
        evictor = Evictor(api.kube, store, self.quota, nodes, metrics) if enforce else None
        self.watcher = ViolationWatcher(
            api.kube,
            self.quota,
            nodes,
            lambda _: self.pods,
            claims=lambda _: claims,
            period=PERIOD,
            evictor=evictor,
            clock=clock,
        )
        self.registry.register(ViolationsCollector(self.watcher.counts))
        self.watch()

    def watch(self) -> None:
        self.quota.reflector.relist()
        self.see_pods()

    def see_pods(self) -> None:
        """Pass the stored pods to the watcher, without a newer quota."""
        found = [read_stored(view(each), LABELS) for path, each in self.api.objects.items() if path.startswith(PODS)]
        self.pods = [pod for pod in found if pod]

    def look(self, after: float = 0.0) -> list[Any]:
        """Advance the clock by ``after`` seconds, and check namespace team-a once. Return the logged texts."""
        self.clock.now += after
        with structlog.testing.capture_logs() as logs:
            self.watcher.reconcile("team-a")
        return [line["event"] for line in logs]

    def counted(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"vcuda_violations_{name}", labels)


def crowded() -> Cluster:
    """Return an API server where team-a has quota for two M40 and uses four. Its two newest pods exceed the quota."""
    cluster = Cluster()
    cluster.limit({"quota": {"M40": 2}})
    for hour, name in enumerate(("oldest", "old", "new", "newest")):
        cluster.add(name, hour=hour)
    return cluster
