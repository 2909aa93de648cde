"""The audit beside an API server double: who is told, who is evicted and when, and who never is."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry

from controller.auditor import Auditor
from controller.evictions import Evictor
from controller.metrics import AuditCollector, AuditMetrics
from tests.api_double import ApiDouble, Script, lost_request
from tests.builders import LABELS, Manifest, held_to, vcuda_pod, view
from tests.replicas import Clock
from tests.waiting import PATIENT
from vcuda.allocations.stored_pods import StoredPod, read_stored
from vcuda.errors import ApiError, Conflict, HeldByBudget, NotFound, Unavailable, VcudaError
from vcuda.kube import LedgerStore, NodeInformer, QuotaInformer, QuotaPlace
from vcuda.kube.client import refusal

QUOTA = "/api/v1/namespaces/kube-system/configmaps/gpuquota"
PODS = "/api/v1/namespaces/team-a/pods"
PERIOD = 60.0


class Cluster(ApiDouble):
    """An API server that evicts: the pod terminates, unless ``refusal`` says why not."""

    def __init__(self) -> None:
        super().__init__()
        self.evictions: list[dict[str, Any]] = []
        self.refusal: VcudaError | None = None

    def post(self, path: str, body: bytes, params: object = None, timeout: float = 10) -> bytes:
        """Create an object; an eviction creates none."""
        if not path.endswith("/eviction"):
            return super().post(path, body, params, timeout)
        self.evictions.append(json.loads(body))
        if self.refusal:
            raise self.refusal
        self.terminate(path.split("/")[-2])
        return b"{}"

    def terminate(self, name: str) -> None:
        """Accept the deletion of a pod, which still stands."""
        found = self.objects[f"{PODS}/{name}"]
        self.store(f"{PODS}/{name}", {**found, "metadata": {**found["metadata"], "deletionTimestamp": "now"}})

    def limit(self, entry: Manifest) -> None:
        """Write the quota of team-a."""
        metadata = {"name": "gpuquota", "namespace": "kube-system"}
        self.store(QUOTA, {"metadata": metadata, "data": {"gpu_quota": json.dumps({"team-a": entry})}})

    def add(self, name: str, *, hour: int, cards: int = 1, **fields: Any) -> None:
        """Store a pod of team-a that was created at this hour, pinned to M40 unless said otherwise."""
        at = {"creationTimestamp": f"2026-01-01T{hour:02}:00:00Z", "uid": f"uid-{name}"}
        pod = vcuda_pod({"tencent.com/vcuda-core": 100 * cards}, **{"affinity": held_to("M40"), **fields})
        self.store(f"{PODS}/{name}", {**pod, "metadata": {"name": name, "namespace": "team-a", **at}})

    def told(self) -> list[tuple[str, str]]:
        """Return the pod and the reason of each Event, in the order of their names."""
        events = [found for path, found in sorted(self.objects.items()) if "/events/" in path]
        return [(event["involvedObject"]["name"], event["reason"]) for event in events]

    def evicted(self) -> list[str]:
        """Return the names of the pods whose eviction was asked for, one for each time."""
        return [eviction["metadata"]["name"] for eviction in self.evictions]


class Audited:
    """An auditor with a clock that stands still, and watches that see what is stored when they are told to."""

    def __init__(self, api: Cluster, *, enforce: bool = True, system: frozenset[str] = frozenset()) -> None:
        self.api = api
        self.clock = Clock()
        self.pods: list[StoredPod] = []
        self.nodes = NodeInformer(api.kube, LABELS)
        self.quota = QuotaInformer(api.kube, QuotaPlace(), system)
        self.registry = CollectorRegistry()
        store = LedgerStore(api.kube, "vcuda-quota", self.nodes.current)
        evictor = Evictor(api.kube, store, self.quota, self.nodes, AuditMetrics(self.registry))
        self.auditor = Auditor(
            api.kube,
            self.quota,
            self.nodes,
            lambda _: self.pods,
            period=PERIOD,
            evictor=evictor if enforce else None,
            clock=self.clock.monotonic,
        )
        self.registry.register(AuditCollector(self.auditor.counts))
        self.watch()

    def watch(self) -> None:
        """Let the watches come to what is stored now."""
        self.quota.reflector.start()
        assert self.quota.reflector.synced.wait(PATIENT)
        self.quota.reflector.stop()
        self.quota.reflector.join(PATIENT)
        self.see_pods()

    def see_pods(self) -> None:
        """Let the watch of pods come to what is stored now."""
        found = [read_stored(view(each), LABELS) for path, each in self.api.objects.items() if path.startswith(PODS)]
        self.pods = [pod for pod in found if pod]

    def look(self, after: float = 0.0) -> list[Any]:
        """Look once, so many seconds later; return what was logged."""
        self.clock.now += after
        with structlog.testing.capture_logs() as logs:
            self.auditor.look("team-a")
        return [line["event"] for line in logs]

    def counted(self, name: str, **labels: str) -> float | None:
        """The value of a metric."""
        return self.registry.get_sample_value(f"vcuda_audit_{name}", labels)


@pytest.fixture
def api() -> Cluster:
    """Return a cluster in which team-a may use two M40, and uses four: the two newest are beyond that."""
    cluster = Cluster()
    cluster.limit({"quota": {"M40": 2}})
    for hour, name in enumerate(("oldest", "old", "new", "newest")):
        cluster.add(name, hour=hour)
    return cluster


def test_each_pod_beyond_the_quota_is_told_once_and_counted(api: Cluster) -> None:
    audited = Audited(api, enforce=False)
    for _ in range(3):
        audited.look(PERIOD)
    assert api.told() == [("new", "BeyondQuota"), ("newest", "BeyondQuota")]
    assert api.calls.count("POST") == 2
    assert audited.counted("pods", namespace="team-a", finding="over-quota") == 2
    found = audited.auditor.findings()
    assert [known.finding.pod.name for known in found] == ["newest", "new"]
    assert all(known.at.endswith("Z") for known in found)
    [event] = [found for path, found in api.objects.items() if "/events/newest." in path]
    assert (event["type"], event["involvedObject"]["uid"]) == ("Warning", "uid-newest")
    assert "beyond GPU quota: M40 in namespace team-a, used: 4 cards, limited: 2 cards" in event["message"]


def test_in_a_system_namespace_pods_are_told_and_none_is_evicted(api: Cluster) -> None:
    """Nobody is asked when one is created there, so the next would only come in its place."""
    audited = Audited(api, system=frozenset({"team-a"}))
    for _ in range(3):
        audited.look(PERIOD)
    assert (len(api.told()), api.evicted()) == (2, [])


def test_what_is_mended_is_found_no_longer(api: Cluster) -> None:
    audited = Audited(api, enforce=False)
    audited.look()
    api.limit({"quota": {"M40": 4}})
    audited.quota = audited.auditor._quota = QuotaInformer(api.kube, QuotaPlace(), frozenset())
    audited.watch()
    audited.look()
    assert audited.auditor.findings() == []
    assert audited.counted("pods", namespace="team-a", finding="over-quota") is None


def test_a_namespace_that_is_not_limited_has_no_findings(api: Cluster) -> None:
    api.remove(QUOTA)
    audited = Audited(api)
    audited.look()
    assert audited.auditor.findings() == []


def test_a_pod_that_is_held_to_no_model_is_reported_and_neither_told_twice_nor_evicted(api: Cluster) -> None:
    """Its Event is that of `controller.violations`."""
    api.limit({"quota": {"M40": 4}})
    api.add("free", hour=9, affinity={})
    audited = Audited(api)
    for _ in range(3):
        audited.look(PERIOD)
    assert audited.counted("pods", namespace="team-a", finding="unpinned") == 1
    assert (api.told(), api.evicted()) == ([], [])


def test_without_the_flag_nobody_is_evicted(api: Cluster) -> None:
    audited = Audited(api, enforce=False)
    for _ in range(5):
        audited.look(PERIOD)
    assert api.evicted() == []


@pytest.mark.parametrize(("mode", "told"), [("warn", ["new", "newest"]), ("audit", [])])
def test_a_quota_that_does_not_enforce_has_nobody_evicted_and_one_that_audits_tells_nobody(
    api: Cluster, mode: str, told: list[str]
) -> None:
    api.limit({"quota": {"M40": 2}, "mode": mode})
    audited = Audited(api)
    for _ in range(5):
        audited.look(PERIOD)
    assert api.evicted() == []
    assert [name for name, _ in api.told()] == told
    assert audited.counted("pods", namespace="team-a", finding="over-quota") == 2


def test_the_newest_beyond_the_quota_is_evicted_after_a_period_one_at_each_look(api: Cluster) -> None:
    audited = Audited(api)
    audited.look()
    audited.look(PERIOD - 1)
    assert api.evicted() == []
    audited.look(1)
    assert api.evicted() == ["newest"]
    audited.see_pods()
    for _ in range(4):
        audited.look(PERIOD)
        audited.see_pods()
    assert api.evicted() == ["newest", "new"]
    assert audited.counted("evictions_total", outcome="evicted") == 2
    assert ("newest", "EvictedOverQuota") in api.told()
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "newest", "namespace": "team-a"}}
    assert api.evictions[0] == {**body, "deleteOptions": {"preconditions": {"uid": "uid-newest"}}}


def test_a_look_in_between_that_finds_nothing_begins_the_period_anew(api: Cluster) -> None:
    audited = Audited(api)
    audited.look()
    audited.pods, seen = [], audited.pods
    audited.look(PERIOD / 2)
    audited.pods = seen
    audited.look(PERIOD / 2)
    audited.look(PERIOD - 1)
    assert api.evicted() == []
    audited.look(1)
    assert api.evicted() == ["newest"]


def test_one_that_was_found_before_the_quota_was_enforced_has_a_period_from_then_on(api: Cluster) -> None:
    api.limit({"quota": {"M40": 2}, "mode": "warn"})
    audited = Audited(api)
    audited.look()
    api.limit({"quota": {"M40": 2}})
    audited = changed(audited, QuotaInformer(api.kube, QuotaPlace(), frozenset()))
    audited.look(PERIOD)
    assert api.evicted() == []
    audited.look(PERIOD)
    assert api.evicted() == ["newest"]


def changed(audited: Audited, quota: QuotaInformer) -> Audited:
    """Let the auditor go by what this watch sees now, and its evictor too."""
    evictor = audited.auditor._evictor
    assert isinstance(evictor, Evictor)
    audited.quota = audited.auditor._quota = evictor._quota = quota
    audited.watch()
    return audited


def newest_gone(api: Cluster) -> None:
    api.remove(f"{PODS}/newest")
    api.remove(f"{PODS}/new")


def newest_made_anew(api: Cluster) -> None:
    """Both have successors of their names, which are not those that were found."""
    for name in ("new", "newest"):
        found = api.objects[f"{PODS}/{name}"]
        api.store(f"{PODS}/{name}", {**found, "metadata": {**found["metadata"], "uid": f"other-{name}"}})


def older_gone(api: Cluster) -> None:
    api.remove(f"{PODS}/oldest")
    api.terminate("old")


def quota_raised(api: Cluster) -> None:
    api.limit({"quota": {"M40": 4}})


def quota_malformed(api: Cluster) -> None:
    api.store(QUOTA, {"metadata": {"name": "gpuquota", "namespace": "kube-system"}, "data": {"gpu_quota": "{"}})


def quota_gone(api: Cluster) -> None:
    api.remove(QUOTA)


@pytest.mark.parametrize(
    "change", [newest_gone, newest_made_anew, older_gone, quota_raised, quota_malformed, quota_gone]
)
def test_what_etcd_has_counts_and_not_what_the_watches_saw(api: Cluster, change: Callable[[Cluster], None]) -> None:
    audited = Audited(api)
    audited.look()
    change(api)
    for _ in range(3):
        audited.look(PERIOD)
    assert api.evicted() == []


CAUSE = {"reason": "DisruptionBudget", "message": "The disruption budget pdb needs 1 healthy pods and has 1 currently"}
STATUS = {
    "message": "Cannot evict pod as it would violate the pod's disruption budget.",
    "details": {"causes": [CAUSE]},
}


def test_a_budget_is_told_holds_up_no_other_pod_and_is_asked_again_a_period_later(api: Cluster) -> None:
    api.refusal = refusal("POST /eviction", 429, json.dumps(STATUS).encode())
    assert isinstance(api.refusal, HeldByBudget)
    audited = Audited(api)
    audited.look()
    audited.look(PERIOD)
    audited.look()
    audited.look()
    assert api.evicted() == ["newest", "new"]
    assert audited.counted("evictions_total", outcome="budget") == 2
    assert ("newest", "EvictionPutOff") in api.told()
    api.refusal = None
    audited.look(PERIOD)
    assert api.evicted() == ["newest", "new", "newest"]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        pytest.param(STATUS, HeldByBudget, id="a budget"),
        pytest.param({"message": "too many requests"}, Unavailable, id="a busy server"),
        pytest.param(
            {"message": "busy", "details": {"retryAfterSeconds": 1}}, Unavailable, id="a busy server's details"
        ),
        pytest.param([], Unavailable, id="no Status"),
    ],
)
def test_a_429_is_a_budget_s_only_where_it_says_so(body: object, kind: type[VcudaError]) -> None:
    error = refusal("POST /eviction", 429, json.dumps(body).encode())
    assert type(error) is kind
    assert "(HTTP 429)" in str(error)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        pytest.param(NotFound(404, "not found"), "gone", id="gone"),
        pytest.param(Conflict(409, "the UID in the precondition does not match"), "gone", id="another pod"),
        pytest.param(ApiError(403, "pods/eviction is forbidden"), "failed", id="no right"),
        pytest.param(Unavailable("more than one PodDisruptionBudget (HTTP 500)"), "failed", id="two budgets"),
    ],
)
def test_a_refused_eviction_is_counted_and_not_told_as_one(api: Cluster, error: VcudaError, outcome: str) -> None:
    api.refusal = error
    audited = Audited(api)
    audited.look()
    audited.look(PERIOD)
    audited.look()
    assert audited.counted("evictions_total", outcome=outcome) == 2
    assert {reason for _, reason in api.told()} == {"BeyondQuota"}
    assert audited.counted("evictions_total", outcome="evicted") is None


def test_where_the_pods_cannot_be_listed_nobody_is_evicted(api: Cluster) -> None:
    audited = Audited(api)
    audited.look()
    api.deliver = Script(lost_request, methods=("LIST",))
    with pytest.raises(Unavailable):
        audited.look(PERIOD)
    assert api.evicted() == []
    audited.look()
    assert api.evicted() == ["newest"]


def test_an_event_that_is_refused_is_not_tried_again_and_holds_up_nothing(api: Cluster) -> None:
    def refused(*_: Any) -> bytes:
        raise ApiError(422, "metadata.name: too long")

    api.deliver = Script(refused)
    audited = Audited(api)
    assert sorted(audited.look()) == ["event refused", "told that a pod is beyond its quota"]
    assert audited.look() == []


def test_a_look_that_fails_is_tried_again(api: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in ("SPACING", "GRACE", "RETRY"):
        monkeypatch.setattr(f"controller.auditor.{seconds}", 0.0)
    audited = Audited(api, enforce=False)
    looked = audited.auditor.look

    def look(namespace: str) -> None:
        looked(namespace)
        audited.auditor.due.close()

    monkeypatch.setattr(audited.auditor, "look", look)
    api.deliver = Script(lost_request, lost_request)
    audited.auditor.report("team-a", None)
    with structlog.testing.capture_logs() as logs:
        audited.auditor.run()
    assert [line["event"] for line in logs][:2] == ["not audited", "not audited"]
    assert len(api.told()) == 2


def test_while_something_is_wrong_a_namespace_falls_due_each_period(api: Cluster) -> None:
    audited = Audited(api, enforce=False)
    audited.look()
    assert audited.auditor.due.holds("team-a")
    audited.clock.now += PERIOD
    assert audited.auditor.due.next() == "team-a"
