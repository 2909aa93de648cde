"""Tests of the component `page` on a real API server.

The Service of the usage page routes to the leader. Users with ClusterRole vcuda-quota-viewer can read all usage.
"""

import http.client
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from http import HTTPStatus

import pytest

from controller.ui.leading import SERVICE
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import MANIFESTS, USAGE, Installation, candidate, controlling, drop_lease, limited_team
from tests.e2e.ledgers import await_published
from tests.e2e.stage import SLICES, own_address
from tests.processes import SCRIPTS, ControllerProcess, eventually
from tools.ports import free_ports
from vcuda.kube.endpoints import MANAGED_BY, SERVICE_NAME

pytestmark = [pytest.mark.slow, pytest.mark.one_version]

RBAC = MANIFESTS.parent / "components" / "page" / "rbac.yaml"
LEASE_SECONDS = 8
ENTRY = {"quota": {"M40": 4}}


@pytest.fixture(scope="module")
def with_page(cluster: Cluster, account: Cluster) -> Iterator[Cluster]:
    """A client with the controller's account, which also has the rights of the component `page`."""
    cluster.kubectl("apply", "-f", str(RBAC))
    yield account
    cluster.kubectl("delete", "-f", str(RBAC))
    cluster.delete(f"{SLICES}/{SERVICE}")
    drop_lease(cluster)


def flags_of(identity: str, address: str) -> tuple[str, ...]:
    own = ("--identity", identity, "--lease-seconds", str(LEASE_SECONDS))
    return (*own, "--ui-address", address, "--ui-advertise", address)


def routes(found: list[Json]) -> list[str]:
    return [
        f"{ip}:{port['port']}"
        for each in found
        for endpoint in each["endpoints"]
        for ip in endpoint["addresses"]
        for port in each["ports"]
    ]


def await_routed(cluster: Cluster, address: str) -> Json:
    selector = f"{SERVICE_NAME}={SERVICE}"
    [found] = cluster.await_collection(SLICES, lambda slices: routes(slices) == [address], labelSelector=selector)
    return dict(found)


def status_of(address: str) -> int:
    with closing(http.client.HTTPConnection(address, timeout=20)) as connection:
        connection.request("GET", "/", headers={"Host": f"{SERVICE}.vcuda-quota.svc"})
        return connection.getresponse().status


@pytest.mark.parametrize("end", [ControllerProcess.terminate, ControllerProcess.kill], ids=["leaves", "is-killed"])
def test_the_service_of_the_page_routes_to_the_next_leader_after_the_end_of_the_leader(
    cluster: Cluster, own: Installation, with_page: Cluster, end: Callable[[ControllerProcess], object]
) -> None:
    first, second = (f"{own_address()}:{port}" for port in free_ports(2))
    host = ("--ui-host", f"{SERVICE}.vcuda-quota.svc")
    rights = with_page.kubeconfig
    with (
        controlling(own, *flags_of("first", first), *host, kubeconfig=rights) as leader,
        candidate(own, *flags_of("second", second), *host, kubeconfig=rights) as successor,
    ):
        found = await_routed(cluster, first)
        assert found["metadata"]["labels"][MANAGED_BY] == "vcuda-quota"
        assert [port["name"] for port in found["ports"]] == ["http"]
        eventually(lambda: status_of(first) == HTTPStatus.OK)
        assert status_of(second) == HTTPStatus.SERVICE_UNAVAILABLE
        end(leader)
        assert await_routed(cluster, second)["metadata"]["uid"] == found["metadata"]["uid"]
        successor.await_synced()
        eventually(lambda: status_of(second) == HTTPStatus.OK)


def test_a_viewer_sees_the_usage_of_every_namespace_and_no_other_configmap(
    cluster: Cluster, own: Installation, with_page: Cluster
) -> None:
    with controlling(own, kubeconfig=with_page.kubeconfig), limited_team(own, ENTRY) as team:
        await_published(cluster, team)
        cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"namespace": team, "name": "viewer"}})
        viewer = Cluster(cluster.control_plane, cluster.service_account_token(team, "viewer"))
        try:
            account = f"{team}:viewer"
            cluster.kubectl(
                *("create", "clusterrolebinding", "e2e-viewer", "--clusterrole=vcuda-quota-viewer"),
                f"--serviceaccount={account}",
            )
            path = f"/api/v1/namespaces/{team}/configmaps"
            eventually(lambda: viewer.rest.send("GET", f"{path}/{USAGE}").status == HTTPStatus.OK)
            command = (SCRIPTS / "kubectl-gpuquota", f"--kubeconfig={viewer.kubeconfig}", "-A", "-o", "json")
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
            assert done.returncode == 0, done.stderr
            assert team in {each["namespace"] for each in json.loads(done.stdout)}
            rejected = [("GET", path), ("GET", f"{path}/kube-root-ca.crt"), ("DELETE", f"{path}/{USAGE}")]
            assert {viewer.rest.send(*each).status for each in rejected} == {HTTPStatus.FORBIDDEN}
        finally:
            viewer.close()
            cluster.delete("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/e2e-viewer")
