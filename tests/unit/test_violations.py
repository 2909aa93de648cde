"""Pods beyond their quota: the newest are found, as few as suffice; each is told of once; who is evicted, and when."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from controller.metrics import EvictionMetrics, ViolationsCollector
from controller.violations import Evictor, Violation, ViolationKind, ViolationWatcher, find_violations
from tests.api_double import ApiDouble, Delivery, Script, lost_reply, lost_request
from tests.builders import LABELS, MODEL, Manifest, held_to, nodes, vcuda_pod, view
from tests.replicas import Clock
from vcuda.allocations.stored_pods import StoredPod, read_stored
from vcuda.errors import ApiError, Conflict, HeldByBudget, NotFound, Unavailable, VcudaError
from vcuda.kube import LedgerStore, NodeInformer, QuotaInformer, QuotaPlace
from vcuda.kube.client import refusal
from vcuda.placement.placement import Nodes
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota, fits, total

AT = nodes(**{"gpu-1": {MODEL: "P100"}})
FOUR = NamespaceQuota({"M40": Limit(400)})


def pod(name: str, cores: int = 100, age: int = 1, **fields: object) -> StoredPod:
    """Return one on M40, created ``age`` hours ago, with cores and a whole card's memory for each card."""
    given = {"model": "M40", "node": "", "live": True, "charge": Charge(cores, 0, cores), **fields}
    created = f"2026-01-01T{23 - age:02}:00:00Z"
    return StoredPod(uid=f"uid-{name}", namespace="team-a", name=name, created=created, **given)  # type: ignore[arg-type]  # the fields of a test


def found(*pods: StoredPod, quota: NamespaceQuota = FOUR, at: Nodes = AT) -> list[tuple[str, str]]:
    """Return the name of each pod that is found, and what is wrong with it."""
    return [(finding.pod.name, finding.kind.value) for finding in find_violations("team-a", quota, pods, at)]


def over(*names: str) -> list[tuple[str, str]]:
    return [(name, "over-quota") for name in names]


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        pytest.param([], [], id="none"),
        pytest.param([pod("a", 200, 2), pod("b", 200, 1)], [], id="full, and within"),
        pytest.param([pod("a", 200, 3), pod("b", 200, 2), pod("c", 100, 1)], over("c"), id="the newest"),
        pytest.param([pod("c", 300, 1), pod("b", 200, 2), pod("a", 200, 3)], over("c"), id="in any order"),
        pytest.param([pod("a", 300, 3), pod("b", 200, 2), pod("c", 200, 1)], over("c", "b"), id="the two newest"),
        pytest.param([pod("big", 400, 2), pod("small", 1, 1)], over("small"), id="a bigger one that is older stays"),
        pytest.param(
            [pod("a", 300, 3), pod("b", 200, 2), pod("c", 100, 1)], over("b"), id="a newer one that fits stays"
        ),
        pytest.param([pod("big", 500, 2), pod("small", 100, 1)], over("big"), id="alone beyond the limit"),
        pytest.param([pod("a", 400, 2), pod("b", 400, 1, live=False)], [], id="a finished one counts for nothing"),
        pytest.param([pod("a", 400, 2), pod("b", 100, 1, terminating=True)], [], id="the newest goes already"),
        pytest.param([pod("a", 100, 2, terminating=True), pod("b", 400, 1)], [], id="an older one goes already"),
        pytest.param(
            [pod("a", 400, 3), pod("b", 100, 2), pod("c", 100, 1, terminating=True)], over("b"), id="one goes of two"
        ),
        pytest.param(
            [pod("held", 300, 2), pod("runs", 200, 1, model=None, node="gpu-1")],
            [("runs", "not-allowed")],
            id="the model of its node is not allowed",
        ),
        pytest.param([pod("a", model="A100")], [("a", "not-allowed")], id="the model it is held to is not allowed"),
        pytest.param([pod("a", model="A100", terminating=True)], [], id="not allowed, and goes already"),
        pytest.param(
            [pod("a", 900, model=None), pod("b", model=None, node="gone", age=2), pod("c", 400)],
            [("a", "unpinned"), ("b", "unpinned")],
            id="held to none and on none that is known",
        ),
        pytest.param([pod("a", model=None, terminating=True), pod("b", model=None, live=False)], [], id="none, ended"),
    ],
)
def test_what_is_found(pods: list[StoredPod], expected: list[tuple[str, str]]) -> None:
    assert found(*pods) == expected


def test_of_one_second_the_order_is_the_same_each_time() -> None:
    pods = [pod(name, 300) for name in ("b", "a", "c")]
    assert found(*pods) == found(*reversed(pods)) == over("c", "b")


@pytest.mark.parametrize(
    ("limit", "pods", "expected"),
    [
        pytest.param(Limit(0), [pod("a", 1)], over("a"), id="a hard block"),
        pytest.param(
            Limit(400, 4000),
            [pod("a", 50, 2, charge=Charge(50, 3000)), pod("b", 50, 1, charge=Charge(50, 1001))],
            over("b"),
            id="memory",
        ),
        pytest.param(
            Limit(400, 4000),
            [pod("a", 300, 2), pod("b", 50, 1, charge=Charge(50, 1000))],
            [],
            id="memory of whole cards is their share of the limit",
        ),
    ],
)
def test_what_is_found_under_a_limit(limit: Limit, pods: list[StoredPod], expected: list[tuple[str, str]]) -> None:
    assert found(*pods, quota=NamespaceQuota({"M40": limit})) == expected


def one(*pods: StoredPod, quota: NamespaceQuota = FOUR) -> Violation:
    """Return the one finding."""
    [finding] = find_violations("team-a", quota, pods, AT)
    return finding


@pytest.mark.parametrize(
    ("finding", "message"),
    [
        pytest.param(
            one(pod("a", 300, 2), pod("b", 200, 1)),
            "beyond GPU quota: M40 in namespace team-a, used: 5 cards, limited: 4 cards; this pod takes 2 cards and"
            " does not fit beside the older ones",
            id="cores",
        ),
        pytest.param(
            one(
                pod("a", charge=Charge(50, 3000), age=2),
                pod("b", charge=Charge(50, 2000)),
                quota=NamespaceQuota({"M40": Limit(400, 4000)}),
            ),
            "beyond GPU quota: memory of M40 in namespace team-a, used: 5000 MiB, limited: 4000 MiB; this pod takes"
            " 2000 MiB and does not fit beside the older ones",
            id="memory",
        ),
        pytest.param(
            one(pod("a", model="P100")),
            "namespace team-a may not use GPU model P100; the models that it may use: M40",
            id="not allowed",
        ),
        pytest.param(
            one(pod("a", model="P100"), quota=NamespaceQuota({})),
            "namespace team-a may not use GPU model P100; the models that it may use: none",
            id="none allowed",
        ),
        pytest.param(
            one(pod("a", model=None)),
            "the GPU quota of namespace team-a does not count it: it is held to no model and runs on none",
            id="unpinned",
        ),
    ],
)
def test_what_is_said(finding: Violation, message: str) -> None:
    assert finding.message == message


@pytest.mark.parametrize("mode", Mode)
def test_only_a_quota_that_enforces_has_pods_evicted_and_never_one_that_it_does_not_count(mode: Mode) -> None:
    quota = NamespaceQuota({"M40": Limit(0)}, mode=mode)
    pods = [pod("a"), pod("b", model="P100"), pod("c", model=None)]
    evictable = {finding.kind: finding.evictable for finding in find_violations("team-a", quota, pods, AT)}
    enforced = mode == Mode.ENFORCE
    assert evictable == {
        ViolationKind.OVER_QUOTA: enforced,
        ViolationKind.NOT_ALLOWED: enforced,
        ViolationKind.UNPINNED: False,
    }


def test_a_mirror_pod_is_told_of_and_not_evicted() -> None:
    """Its static pod would run on, and be shown anew."""
    finding = one(pod("static", 500, node="gpu-1", mirror=True))
    assert not finding.evictable
    assert finding.message.endswith("; it shows a static pod, which only its manifest on node gpu-1 can end")


def pod_lists() -> st.SearchStrategy[list[StoredPod]]:
    """Pods of three models or none, of all ages, some finished, some terminating."""
    charges = st.builds(Charge, st.integers(0, 300), st.integers(0, 2000), st.integers(0, 300))
    one_pod = st.builds(
        pod,
        st.just("a"),
        age=st.integers(0, 23),
        charge=charges,
        model=st.sampled_from(["M40", "P100", "A100", None]),
        node=st.sampled_from(["", "gpu-1"]),
        live=st.sampled_from([True, True, True, False]),
        terminating=st.sampled_from([False, False, True]),
    )
    return st.lists(one_pod, max_size=8).map(named)


def named(pods: Sequence[StoredPod]) -> list[StoredPod]:
    """Return the pods, each with a name of its own."""
    return [msgspec.structs.replace(each, name=f"p{at}", uid=f"uid-p{at}") for at, each in enumerate(pods)]


def quotas() -> st.SearchStrategy[NamespaceQuota]:
    """One or two models, with or without a limit of memory."""
    limits = st.builds(Limit, st.sampled_from([0, 100, 400, 900]), st.sampled_from([None, 0, 1000, 5000]))
    return st.dictionaries(st.sampled_from(["M40", "P100"]), limits).map(NamespaceQuota)


def charge_on(model: str, pods: Sequence[StoredPod]) -> Charge:
    return total(each.charge for each in pods if each.model_on(AT) == model)


@given(quotas(), pod_lists())
def test_without_what_is_found_the_rest_fits_with_any_one_back_it_does_not_and_the_older_stay(
    quota: NamespaceQuota, pods: list[StoredPod]
) -> None:
    findings = [f for f in find_violations("team-a", quota, pods, AT) if f.kind != ViolationKind.UNPINNED]
    evicted = {finding.pod.uid for finding in findings}
    staying = [each for each in pods if each.live and not each.terminating]
    kept = [each for each in staying if each.uid not in evicted]
    for model in ("M40", "P100", "A100"):
        limit = quota.limits.get(model, Limit(0))
        used = charge_on(model, kept)
        assert fits(limit, Charge(), used)
        for gone in (f.pod for f in findings if f.pod.model_on(AT) == model):
            older = [each for each in kept if (each.created, each.name) < (gone.created, gone.name)]
            assert not fits(limit, charge_on(model, older), gone.charge)
            assert not fits(limit, used, gone.charge)


@given(quotas(), pod_lists())
def test_while_those_that_are_evicted_end_no_other_pod_is_found(quota: NamespaceQuota, pods: list[StoredPod]) -> None:
    found_now = find_violations("team-a", quota, pods, AT)
    gone = {finding.pod.uid for finding in found_now if finding.evictable}
    after = [msgspec.structs.replace(each, terminating=each.terminating or each.uid in gone) for each in pods]
    left = {finding.pod.uid for finding in find_violations("team-a", quota, after, AT)}
    assert left == {finding.pod.uid for finding in found_now} - gone


@pytest.mark.parametrize(
    ("metadata", "terminating"), [({}, False), ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, True)]
)
def test_a_pod_whose_deletion_was_accepted_is_terminating(metadata: dict[str, str], terminating: bool) -> None:
    manifest = vcuda_pod(metadata={"uid": "u", **metadata})
    stored = read_stored(view(manifest), LABELS)
    assert stored
    assert stored.terminating is terminating


# The watcher, beside an API server double

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

    def make_anew(self, name: str) -> None:
        """Store another pod under the name of one."""
        found = self.objects[f"{PODS}/{name}"]
        self.store(f"{PODS}/{name}", {**found, "metadata": {**found["metadata"], "uid": f"other-{name}"}})

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


class Watched:
    """A watcher with a clock that stands still, and watches that see what is stored when they are told to."""

    def __init__(self, api: Cluster, *, enforce: bool = True, system: frozenset[str] = frozenset()) -> None:
        self.api = api
        self.clock = Clock()
        self.pods: list[StoredPod] = []
        self.nodes = NodeInformer(api.kube, LABELS)
        self.quota = QuotaInformer(api.kube, QuotaPlace(), system)
        self.registry = CollectorRegistry()
        store = LedgerStore(api.kube, "vcuda-quota", self.nodes.current)
        evictor = Evictor(api.kube, store, self.quota, self.nodes, EvictionMetrics(self.registry))
        self.watcher = ViolationWatcher(
            api.kube,
            self.quota,
            self.nodes,
            lambda _: self.pods,
            period=PERIOD,
            evictor=evictor if enforce else None,
            clock=self.clock.monotonic,
        )
        self.registry.register(ViolationsCollector(self.watcher.counts))
        self.watch()

    def watch(self) -> None:
        """Let the watches come to what is stored now."""
        self.quota.reflector.relist()
        self.see_pods()

    def see_pods(self) -> None:
        """Let the watch of pods come to what is stored now."""
        found = [read_stored(view(each), LABELS) for path, each in self.api.objects.items() if path.startswith(PODS)]
        self.pods = [pod for pod in found if pod]

    def look(self, after: float = 0.0) -> list[Any]:
        """Look once, so many seconds later; return what was logged."""
        self.clock.now += after
        with structlog.testing.capture_logs() as logs:
            self.watcher.reconcile("team-a")
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
    watched = Watched(api, enforce=False)
    for _ in range(3):
        watched.look(PERIOD)
    assert api.told() == [("new", "BeyondQuota"), ("newest", "BeyondQuota")]
    assert api.calls.count("POST") == 2
    assert watched.counted("pods", namespace="team-a", finding="over-quota") == 2
    found = watched.watcher.ongoing()
    assert [each.violation.pod.name for each in found] == ["newest", "new"]
    assert all(each.at.endswith("Z") for each in found)
    [event] = [found for path, found in api.objects.items() if "/events/newest." in path]
    assert (event["type"], event["involvedObject"]["uid"]) == ("Warning", "uid-newest")
    assert "beyond GPU quota: M40 in namespace team-a, used: 4 cards, limited: 2 cards" in event["message"]


@pytest.mark.parametrize("raised", [True, False], ids=["the limit is raised", "the quota goes"])
def test_what_is_mended_is_found_no_longer(api: Cluster, raised: bool) -> None:
    watched = Watched(api, enforce=False)
    watched.look()
    if raised:
        api.limit({"quota": {"M40": 4}})
    else:
        api.remove(QUOTA)
    watched.watch()
    watched.look()
    assert watched.watcher.ongoing() == []
    assert watched.counted("pods", namespace="team-a", finding="over-quota") is None


def test_a_namespace_that_was_never_limited_is_left_alone(api: Cluster) -> None:
    api.remove(QUOTA)
    watched = Watched(api)
    watched.look()
    assert (watched.watcher.ongoing(), api.told()) == ([], [])


def test_a_pod_that_is_held_to_no_model_is_told_of_once_in_its_own_words_and_never_evicted(api: Cluster) -> None:
    api.limit({"quota": {"M40": 4}})
    api.add("free", hour=9, affinity={})
    watched = Watched(api)
    for _ in range(3):
        watched.look(PERIOD)
    assert watched.counted("pods", namespace="team-a", finding="unpinned") == 1
    assert (api.told(), api.evicted(), api.calls.count("POST")) == ([("free", "NotCounted")], [], 1)
    [event] = [found for path, found in api.objects.items() if "/events/free." in path]
    assert (event["type"], event["involvedObject"]["uid"]) == ("Warning", "uid-free")
    assert "the GPU quota of namespace team-a does not count this pod" in event["message"]


def test_another_leader_says_nothing_twice(api: Cluster) -> None:
    api.add("free", hour=9, affinity={})
    for _ in range(2):
        Watched(api, enforce=False).look()
    assert [name for name, _ in api.told()] == ["free", "new", "newest"]
    assert api.calls.count("POST") == 6


def test_a_pod_made_again_under_its_name_is_told_anew(api: Cluster) -> None:
    api.add("free", hour=9, affinity={})
    watched = Watched(api, enforce=False)
    watched.look()
    for name in ("free", "newest"):
        api.make_anew(name)
    watched.see_pods()
    watched.look()
    assert [name for name, _ in api.told()] == ["free", "free", "new", "newest", "newest"]


ALL_THREE = ["free", "new", "newest"]


@pytest.mark.parametrize(
    ("mode", "enforce", "system", "told"),
    [
        pytest.param("enforce", False, frozenset(), ALL_THREE, id="without the flag"),
        pytest.param("warn", True, frozenset(), ALL_THREE, id="a quota that only warns"),
        pytest.param("audit", True, frozenset(), [], id="one that only audits tells nobody either"),
        # Nobody is asked when a pod is created there, so the next would only come in its place.
        pytest.param("enforce", True, frozenset({"team-a"}), ALL_THREE, id="a system namespace"),
    ],
)
def test_who_is_not_to_be_evicted_is_counted_all_the_same(
    api: Cluster, mode: str, enforce: bool, system: frozenset[str], told: list[str]
) -> None:
    api.limit({"quota": {"M40": 2}, "mode": mode})
    api.add("free", hour=9, affinity={})
    watched = Watched(api, enforce=enforce, system=system)
    for _ in range(5):
        watched.look(PERIOD)
    assert ([name for name, _ in api.told()], api.evicted()) == (told, [])
    assert watched.counted("pods", namespace="team-a", finding="over-quota") == 2


def test_the_newest_beyond_the_quota_is_evicted_after_a_period_one_at_each_look(api: Cluster) -> None:
    watched = Watched(api)
    watched.look()
    watched.look(PERIOD - 1)
    assert api.evicted() == []
    watched.look(1)
    assert api.evicted() == ["newest"]
    watched.see_pods()
    for _ in range(4):
        watched.look(PERIOD)
        watched.see_pods()
    assert api.evicted() == ["newest", "new"]
    assert watched.counted("evictions_total", outcome="evicted") == 2
    assert ("newest", "EvictedOverQuota") in api.told()
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "newest", "namespace": "team-a"}}
    assert api.evictions[0] == {**body, "deleteOptions": {"preconditions": {"uid": "uid-newest"}}}


def test_a_look_in_between_that_finds_nothing_begins_the_period_anew(api: Cluster) -> None:
    watched = Watched(api)
    watched.look()
    watched.pods, seen = [], watched.pods
    watched.look(PERIOD / 2)
    watched.pods = seen
    watched.look(PERIOD / 2)
    watched.look(PERIOD - 1)
    assert api.evicted() == []
    watched.look(1)
    assert api.evicted() == ["newest"]


def test_one_that_was_found_before_the_quota_was_enforced_has_a_period_from_then_on(api: Cluster) -> None:
    api.limit({"quota": {"M40": 2}, "mode": "warn"})
    watched = Watched(api)
    watched.look()
    api.limit({"quota": {"M40": 2}})
    watched.watch()
    watched.look(PERIOD)
    assert api.evicted() == []
    watched.look(PERIOD)
    assert api.evicted() == ["newest"]


TWO = ("new", "newest")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda api: [api.remove(f"{PODS}/{name}") for name in TWO], id="both are gone"),
        pytest.param(lambda api: [api.make_anew(name) for name in TWO], id="both have successors of their names"),
        pytest.param(lambda api: [api.remove(f"{PODS}/oldest"), api.terminate("old")], id="the older are gone or go"),
        pytest.param(lambda api: api.limit({"quota": {"M40": 4}}), id="the limit is raised"),
        pytest.param(lambda api: api.limit({"quota": {"M40": "many"}}), id="the quota is malformed"),
        pytest.param(lambda api: api.remove(QUOTA), id="the quota is gone"),
    ],
)
def test_what_etcd_has_counts_and_not_what_the_watches_saw(api: Cluster, change: Callable[[Cluster], object]) -> None:
    watched = Watched(api)
    watched.look()
    change(api)
    for _ in range(3):
        watched.look(PERIOD)
    assert api.evicted() == []


CAUSE = {"reason": "DisruptionBudget", "message": "The disruption budget pdb needs 1 healthy pods and has 1 currently"}
STATUS = {
    "message": "Cannot evict pod as it would violate the pod's disruption budget.",
    "details": {"causes": [CAUSE]},
}


def test_a_budget_is_told_holds_up_no_other_pod_and_is_asked_again_a_period_later(api: Cluster) -> None:
    api.refusal = refusal("POST /eviction", 429, json.dumps(STATUS).encode())
    assert isinstance(api.refusal, HeldByBudget)
    watched = Watched(api)
    watched.look()
    watched.look(PERIOD)
    watched.look()
    watched.look()
    assert api.evicted() == ["newest", "new"]
    assert watched.counted("evictions_total", outcome="budget") == 2
    assert ("newest", "EvictionPutOff") in api.told()
    api.refusal = None
    watched.look(PERIOD)
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
    watched = Watched(api)
    watched.look()
    watched.look(PERIOD)
    watched.look()
    assert watched.counted("evictions_total", outcome=outcome) == 2
    assert {reason for _, reason in api.told()} == {"BeyondQuota"}
    assert watched.counted("evictions_total", outcome="evicted") is None


def test_where_the_pods_cannot_be_listed_nobody_is_evicted(api: Cluster) -> None:
    watched = Watched(api)
    watched.look()
    api.deliver = Script(lost_request, methods=("LIST",))
    with pytest.raises(Unavailable):
        watched.look(PERIOD)
    assert api.evicted() == []
    watched.look()
    assert api.evicted() == ["newest"]


def test_an_event_that_is_refused_is_not_tried_again_and_holds_up_nothing(api: Cluster) -> None:
    def refused(*_: Any) -> bytes:
        raise ApiError(422, "metadata.name: too long")

    api.deliver = Script(refused)
    watched = Watched(api)
    assert sorted(watched.look()) == ["event refused", "told that a pod is beyond its quota"]
    assert watched.look() == []


@pytest.mark.parametrize("lost", [lost_request, lost_reply])
def test_a_look_that_fails_is_tried_again(api: Cluster, lost: Delivery) -> None:
    """Of its Events, those that may not have been written are written once all the same."""
    watched = Watched(api, enforce=False)
    api.deliver = Script(lost, lost)
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            watched.watcher.reconciler.turn("team-a")
            assert watched.watcher.reconciler.queue.is_active("team-a")
    assert logs[0]["event"] == "not audited"
    assert [name for name, _ in api.told()] == ["new", "newest"]


def test_after_a_report_and_while_something_is_wrong_a_namespace_falls_due_each_period(api: Cluster) -> None:
    watched = Watched(api, enforce=False)
    watched.watcher.report("team-a", None)
    watched.clock.now += 1.0
    queue = watched.watcher.reconciler.queue
    for _ in range(3):
        assert queue.next() == "team-a"
        watched.watcher.reconciler.turn("team-a")
        watched.clock.now += PERIOD
