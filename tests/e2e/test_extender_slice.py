"""Tests of the EndpointSlice by which the extender's Service routes to the leader, on a real API server."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from controller.advertiser import Advertiser
from controller.extender.service import SERVICE
from tests.e2e.cluster import Cluster
from tests.e2e.installation import SYSTEM_NAMESPACE, create_system_namespace
from tests.e2e.stage import SLICES
from vcuda.kube import Kube

pytestmark = pytest.mark.one_version

Lead = Callable[[str], Advertiser]


@pytest.fixture
def lead(cluster: Cluster) -> Iterator[Lead]:
    """A function that acts like a new leader: it writes this IP address into the EndpointSlice."""
    create_system_namespace(cluster)
    kube = Kube.connect(cluster.kubeconfig)

    def advertised(ip: str) -> Advertiser:
        advertiser = Advertiser(kube, SYSTEM_NAMESPACE, SERVICE, (ip, 10443), "https")
        advertiser.advertise()
        return advertiser

    with ExitStack() as stack:
        stack.callback(kube.close)
        stack.callback(cluster.delete, f"{SLICES}/{SERVICE}")
        yield advertised


def led_to(cluster: Cluster) -> list[tuple[str, list[str]]]:
    selector = f"kubernetes.io/service-name={SERVICE}"
    slices = cluster.rest.get(SLICES, labelSelector=selector)["items"]
    return [(each["addressType"], endpoint["addresses"]) for each in slices for endpoint in each["endpoints"]]


@pytest.mark.parametrize(("later", "family"), [("10.1.2.4", "IPv4"), ("fd00::4", "IPv6")])
def test_the_slice_routes_only_to_the_newest_leader(cluster: Cluster, lead: Lead, later: str, family: str) -> None:
    """An earlier leader may write the slice late. An IPv6 address needs a new slice: addressType is immutable."""
    first, second = lead("10.1.2.3"), lead(later)
    for _ in range(2):
        assert led_to(cluster) == [(family, [later])]
        first.advertise()
        assert led_to(cluster) == [("IPv4", ["10.1.2.3"])]
        second.advertise()


@pytest.mark.parametrize("ip", ["10.1.2.3", "fd00::3"])
def test_a_slice_that_already_routes_to_this_leader_is_not_written_again(cluster: Cluster, lead: Lead, ip: str) -> None:
    """The API server has added fields, so the stored EndpointSlice differs from the one that was written."""
    advertiser = lead(ip)
    before = cluster.rest.get(f"{SLICES}/{SERVICE}")
    advertiser.advertise()
    assert cluster.rest.get(f"{SLICES}/{SERVICE}") == before
    assert before["metadata"]["labels"]["endpointslice.kubernetes.io/managed-by"] == "vcuda-quota"
