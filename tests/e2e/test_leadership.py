"""Tests of leadership. When the leader of the controllers crashes or stops, a standby becomes the leader.

A leader with an outdated list of pods releases no charge of a stored pod.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from controller.cli import run
from controller.manager import Leader, RunOptions
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import (
    LEASE,
    LEASES,
    PROMPTLY,
    SYSTEM_NAMESPACE,
    USAGE,
    Installation,
    candidate,
    controlling,
    drop_lease,
    limited_team,
)
from tests.e2e.ledgers import await_committed, await_published, await_unpublished, committed
from tests.integration.reviews import card_pod
from tests.processes import ControllerProcess, eventually
from vcuda.errors import Unavailable
from vcuda.kube import Kube, Params, Stream

pytestmark = [pytest.mark.slow, pytest.mark.one_version]

Pair = tuple[ControllerProcess, ControllerProcess]
ENTRY = {"quota": {"M40": 4}}
LEASE_SECONDS = 8


@pytest.fixture
def pair(installation: Installation) -> Iterator[Pair]:
    """A leader and a standby. Their Lease is as short as a busy machine permits."""
    flags = ("--lease-seconds", str(LEASE_SECONDS), "--identity")
    with controlling(installation, *flags, "first") as first, candidate(installation, *flags, "second") as second:
        yield first, second
    drop_lease(installation.cluster)


def lease_spec(cluster: Cluster) -> Json:
    return dict(cluster.rest.get(f"{LEASES}/{LEASE}")["spec"])


def await_holder(cluster: Cluster, holder: str, timeout: float) -> Json:
    return cluster.await_object(LEASES, LEASE, lambda lease: lease["spec"]["holderIdentity"] == holder, timeout)


def test_the_standby_becomes_leader_when_the_lease_of_a_killed_leader_expires(
    cluster: Cluster, installation: Installation, pair: Pair
) -> None:
    leader, successor = pair
    with limited_team(installation, ENTRY) as namespace:
        for name in ("gone", "stays"):
            cluster.create(card_pod(name, namespace))
        await_committed(installation, namespace, M40=200)
        leader.kill()
        cluster.delete_pod(namespace, "gone")
        cluster.create(card_pod("new", namespace))
        assert committed(installation.ledger(namespace)) == {"M40": 200}
        successor.await_synced()
        await_committed(installation, namespace, PROMPTLY, M40=200)
        assert lease_spec(cluster)["leaseTransitions"] == 1
        assert {pod["metadata"]["name"] for pod in cluster.pods(namespace)} == {"stays", "new"}


def test_a_standby_recounts_the_ledgers_while_the_leader_is_silent(
    cluster: Cluster, installation: Installation
) -> None:
    """The leader is suspended for less than the duration of its Lease, so afterwards it is still the leader."""
    with (
        controlling(installation, "--identity", "first", "--lease-seconds", "600") as leader,
        candidate(installation, "--identity", "second", "--lease-seconds", "600") as standby,
        limited_team(installation, ENTRY) as namespace,
    ):
        for name in ("gone", "stays"):
            cluster.create(card_pod(name, namespace))
        await_committed(installation, namespace, M40=200)
        eventually(lambda: standby.get("/readyz").status == HTTPStatus.OK)
        leader.process.send_signal(signal.SIGSTOP)
        cluster.delete_pod(namespace, "gone")
        await_committed(installation, namespace, M40=100)
        leader.process.send_signal(signal.SIGCONT)
        standby.await_log("the leader renews the Lease again")
        assert lease_spec(cluster)["holderIdentity"] == "first"
        assert standby.logs("this replica leads now") == []
    drop_lease(cluster)


def test_a_leader_that_stops_releases_its_lease_at_once(cluster: Cluster, installation: Installation) -> None:
    """Without the release, the Lease would expire after ten minutes. The standby reads it every second."""
    with (
        controlling(installation, "--identity", "first", "--lease-seconds", "600") as leader,
        candidate(installation, "--identity", "second", "--lease-seconds", "600") as successor,
    ):
        assert leader.terminate() == 0
        assert leader.logs("the Lease was released")
        await_holder(cluster, "second", timeout=10)
        successor.await_synced()


def test_the_next_leader_removes_the_objects_of_a_namespace_without_a_limit(
    cluster: Cluster, installation: Installation
) -> None:
    """A ConfigMap of the same name that somebody else created must stay."""
    with installation.free_team() as strange, installation.free_team() as former:
        cluster.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": strange, "name": USAGE}})
        with controlling(installation) as leader, installation.quota.limited(**{former: ENTRY}):
            await_published(cluster, former)
            leader.kill()
        with controlling(installation):
            await_unpublished(cluster, former)
            assert cluster.rest.get(f"/api/v1/namespaces/{strange}/configmaps/{USAGE}")


@dataclass(frozen=True)
class StaleKube(Kube):
    """A client that lists the pods of the old resourceVersion ``version``, and cannot watch pods."""

    version: str = field(default="", kw_only=True)

    def get(self, path: str, params: Params | None = None, timeout: float = 10, most: int = 2**20) -> bytes:
        """Get an object or a page. The first page of a LIST of pods is that of the old resourceVersion."""
        if path == "/api/v1/pods" and "continue" not in (params or {}):
            params = {**(params or {}), "resourceVersion": self.version, "resourceVersionMatch": "Exact"}
        return super().get(path, params, timeout, most)

    def stream(
        self, path: str, params: Params | None = None, *, connect_timeout: float = 10, read_timeout: float
    ) -> Stream:
        """Raise an error for a watch of pods. Open any other stream."""
        if path == "/api/v1/pods":
            raise Unavailable("this test allows no watch of pods")
        return super().stream(path, params, connect_timeout=connect_timeout, read_timeout=read_timeout)


@contextmanager
def stale_leader(installation: Installation, version: str) -> Iterator[Leader]:
    """Run a leader in this process that only knows the pods of the resourceVersion ``version``."""
    connected = Kube.connect(installation.cluster.kubeconfig, pool_size=16)
    kube = StaleKube(connected.sender, version=version)
    place = f"{installation.quota.namespace}/{installation.quota.name}"
    faults: list[str] = []
    registry, on_fault = CollectorRegistry(), partial(faults.append, "a loop")
    given = ["--quota-configmap", place, "--system-namespace", SYSTEM_NAMESPACE, "--webhook-service", ""]
    options = msgspec.structs.replace(
        RunOptions(**run.make_context("run", given).params),
        storable_seconds=1,
        max_terminating_seconds=0,  # no kubelet reports here that a deleted pod has ended
    )
    leader = Leader(kube, options, registry, on_fault=on_fault)
    leader.watch()
    leader.lead()
    try:
        yield leader
    finally:
        leader.stop()
        for reflector in leader.reflectors().values():
            reflector.join(20)
        kube.close()
    assert faults == []


def test_a_leader_with_an_outdated_list_of_pods_keeps_the_charges_of_all_stored_pods(
    cluster: Cluster, installation: Installation
) -> None:
    """The leader still releases the charge of a pod that was never stored."""
    with installation.team({"quota": {"M40": 5}}) as namespace:
        with controlling(installation):
            cluster.create(card_pod("first", namespace))
            old = cluster.rest.get("/api/v1/pods")["metadata"]["resourceVersion"]
            for name in ("second", "third"):
                cluster.create(card_pod(name, namespace))
            counted = await_committed(installation, namespace, M40=300)
        cluster.create(card_pod("fourth", namespace))
        assert cluster.try_create(card_pod("fourth", namespace)).status == HTTPStatus.CONFLICT
        with stale_leader(installation, old) as leader:
            recounted = await_committed(installation, namespace, M40=400)
            seen = [pod.name for pod in leader.recounter.pods.pods(namespace)]
            assert (leader.recounter.pods.reflector.resource_version, seen) == (old, ["first"])
        assert int(recounted.pod_resource_version) > int(counted.pod_resource_version)
        cluster.create(card_pod("fifth", namespace))
        assert cluster.try_create(card_pod("sixth", namespace)).is_over_quota
