"""Tests that the controller reports stored pods beyond the quota, and evicts them if eviction is enabled."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from controller.metrics import EvictionMetrics
from controller.violations.violation_watcher import EvictionOutcome, Evictor
from tests.builders import LABELS, MODEL
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import LEDGER_NAMESPACE, Installation, controlling, limited_team
from tests.e2e.ledgers import await_committed
from tests.integration.reviews import card_pod
from tests.processes import ControllerProcess
from vcuda.allocations.stored_pods import read_stored
from vcuda.k8s_types import Pod
from vcuda.kube import Kube, LedgerStore, NodeInformer, QuotaInformer, QuotaSource

pytestmark = pytest.mark.one_version

COMPONENTS = Path(__file__).parents[2] / "manifests" / "components"
PERIOD = 2
NODE = "audit-m40"


@pytest.fixture(scope="module")
def account(cluster: Cluster, account: Cluster) -> Iterator[Cluster]:
    """A client with the controller's account. The component evict-violations gives it the right to evict pods."""
    cluster.kubectl("apply", "-f", str(COMPONENTS / "evict-violations" / "rbac.yaml"))
    yield account
    cluster.kubectl("delete", "-f", str(COMPONENTS / "evict-violations" / "rbac.yaml"))


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[str]:
    cluster.create_node(NODE, {MODEL: "M40"}, {"tencent.com/vcuda-core": "1600"})
    yield NODE
    cluster.delete_node(NODE)


def team_of_three(cluster: Cluster, own: Installation, namespace: str) -> None:
    for name in ("a-oldest", "b-middle", "c-newest"):
        start(cluster, namespace, name)
    await_committed(own, namespace, M40=300)


def start(cluster: Cluster, namespace: str, name: str) -> None:
    """Create a running pod with one card. Pods that were created in the same second are ordered by name."""
    pod = card_pod(name, namespace)
    pod["metadata"]["labels"] = {"app": name}
    cluster.bind(pod, NODE)
    cluster.run_pod(namespace, name)


def await_events(cluster: Cluster, namespace: str, reason: str, *names: str) -> list[Json]:
    """Return the Events of this reason once each of these pods has one."""
    return cluster.await_events(
        namespace, f"reason={reason}", lambda events: {event["involvedObject"]["name"] for event in events} >= {*names}
    )


def going(cluster: Cluster, namespace: str) -> set[str]:
    """Return the names of terminating pods. No kubelet runs here, so they stay, and still use their cards."""
    return {pod["metadata"]["name"] for pod in cluster.pods(namespace) if "deletionTimestamp" in pod["metadata"]}


def budget_of(namespace: str, app: str) -> Json:
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": app}}}
    metadata = {"name": "stay", "namespace": namespace}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": spec}


@pytest.mark.usefixtures("node")
class TestByDefault:
    """Tests of a controller without --evict-violations, which only reports."""

    @pytest.fixture(scope="class")
    @classmethod
    def controller(cls, own: Installation, account: Cluster) -> Iterator[ControllerProcess]:
        with controlling(own, "--violations-period", str(PERIOD), kubeconfig=account.kubeconfig) as running:
            yield running

    def test_after_a_lowered_quota_the_newest_pod_is_reported_and_not_evicted(
        self, cluster: Cluster, own: Installation, controller: ControllerProcess
    ) -> None:
        with limited_team(own, {"quota": {"M40": 3}}) as namespace:
            team_of_three(cluster, own, namespace)
            own.quota.limit(**{namespace: {"quota": {"M40": 1}}})
            events = await_events(cluster, namespace, "BeyondQuota", "b-middle", "c-newest")
            assert {event["involvedObject"]["name"] for event in events} == {"b-middle", "c-newest"}
            assert "used: 3 cards, limited: 1 card" in events[0]["message"]
            assert controller.metric("vcuda_violations_pods", namespace=namespace, finding="over-quota") == 2
            own.quota.limit(**{namespace: {"quota": {"P100": 1}}})
            await_events(cluster, namespace, "BeyondQuota", "a-oldest", "b-middle", "c-newest")
            assert controller.metric("vcuda_violations_pods", namespace=namespace, finding="not-allowed") == 3
            assert going(cluster, namespace) == set()
            assert controller.samples("vcuda_violations_evictions_total") == []


@pytest.mark.usefixtures("node")
class TestEnforced:
    """Tests of a controller with --evict-violations and with the rights of the manifests, which evicts pods."""

    @pytest.fixture(scope="class")
    @classmethod
    def controller(cls, own: Installation, account: Cluster) -> Iterator[ControllerProcess]:
        flags = ("--evict-violations", "--violations-period", str(PERIOD))
        with controlling(own, *flags, kubeconfig=account.kubeconfig) as running:
            yield running
            assert "system:serviceaccount" not in running.output()

    def test_the_newest_pod_is_evicted_and_no_other_while_it_terminates(
        self, cluster: Cluster, own: Installation, controller: ControllerProcess
    ) -> None:
        with limited_team(own, {"quota": {"M40": 3}}) as namespace:
            team_of_three(cluster, own, namespace)
            own.quota.limit(**{namespace: {"quota": {"M40": 2}}})
            [event] = await_events(cluster, namespace, "EvictedOverQuota", "c-newest")
            assert "beyond GPU quota: M40" in event["message"]
            assert going(cluster, namespace) == {"c-newest"}
            own.quota.limit(**{namespace: {"quota": {"M40": 1}}})
            await_events(cluster, namespace, "EvictedOverQuota", "b-middle", "c-newest")
            assert going(cluster, namespace) == {"b-middle", "c-newest"}
            controller.await_metric("vcuda_violations_evictions_total", 2, outcome="evicted")

    @pytest.mark.usefixtures("controller_manager")
    def test_a_disruption_budget_is_respected_and_the_eviction_is_retried(
        self, cluster: Cluster, own: Installation, controller: ControllerProcess
    ) -> None:
        """While the budget protects the newest pod, the controller evicts the second newest pod."""
        with limited_team(own, {"quota": {"M40": 3}}) as namespace:
            team_of_three(cluster, own, namespace)
            budget = budget_of(namespace, "c-newest")
            cluster.create(budget)
            path = cluster.path_of(budget)
            cluster.await_object(path, "stay", lambda found: found.get("status", {}).get("currentHealthy") == 1)
            own.quota.limit(**{namespace: {"quota": {"M40": 1}}})
            [put_off] = await_events(cluster, namespace, "EvictionPutOff", "c-newest")
            assert "PodDisruptionBudget" in put_off["message"]
            await_events(cluster, namespace, "EvictedOverQuota", "b-middle")
            assert going(cluster, namespace) == {"b-middle"}
            assert controller.metric("vcuda_violations_evictions_total", outcome="budget")
            cluster.rest.send("DELETE", f"{path}/stay").ok()
            await_events(cluster, namespace, "EvictedOverQuota", "b-middle", "c-newest")
            assert going(cluster, namespace) == {"b-middle", "c-newest"}


def test_an_eviction_has_the_uid_of_the_pod_that_was_checked(cluster: Cluster, namespace: str) -> None:
    """The eviction must not end a new pod that has the same name."""
    kube = Kube.connect(cluster.kubeconfig)
    nodes, quota = NodeInformer(kube, LABELS), QuotaInformer(kube, QuotaSource(), frozenset())
    metrics = EvictionMetrics(CollectorRegistry())
    evictor = Evictor(kube, LedgerStore(kube, LEDGER_NAMESPACE, nodes.current), quota, nodes, metrics)
    created = cluster.create(card_pod("train", namespace))
    stored = read_stored(msgspec.convert(created, Pod), LABELS)
    assert stored
    another = msgspec.structs.replace(stored, uid="another")
    with closing(kube):
        assert evictor.evict(another, "for the test") == EvictionOutcome.GONE
        assert [pod["metadata"]["uid"] for pod in cluster.pods(namespace)] == [stored.uid]
        assert evictor.evict(stored, "for the test") == EvictionOutcome.EVICTED
    assert going(cluster, namespace) or not cluster.pods(namespace)
