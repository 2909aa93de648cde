"""Tests of claims on a real node. A DRA driver publishes four cards, and the kubelet prepares the pods' claims."""

import os
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, Json
from tests.e2e.dra import NVIDIA, VERSION, about
from tests.processes import eventually
from tests.real.lives import LIFE, Lives
from tests.real.node import CARDS, NAME, Node
from tests.real.pods import IGNORES_TERM, container, pod, run
from tests.real.release import Release, processes
from tools.component import Component

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

ROOT = f"/apis/{VERSION}"
ONE_CARD = {"devices": {"requests": [{"name": "card", "exactly": {"deviceClassName": NVIDIA}}]}}


@pytest.fixture(scope="module")
def driver(cluster: Cluster, node: Node, release: Release) -> Iterator[Component]:
    """The DRA driver and its DeviceClass. The controller has named the model of the driver's devices."""
    expression = f'device.driver == "{NVIDIA}" && device.attributes["{NVIDIA}"].type == "gpu"'
    cluster.create({**about("DeviceClass", NVIDIA), "spec": {"selectors": [{"cel": {"expression": expression}}]}})
    program, log = Path(os.environ["NODE_TOOLS"]) / "real-node", node.directory / "driver.log"
    command = (program, "claims", cluster.kubeconfig, NAME, "NVIDIA H100 80GB HBM3", *CARDS)

    def published() -> bool:
        slices = cluster.rest.get(f"{ROOT}/resourceslices")["items"]
        return any(len(each["spec"]["devices"]) == len(CARDS) for each in slices)

    with Component("driver", tuple(map(str, command)), log, published, 60).started() as driver:
        assert release.pods("vcuda-controller")
        yield driver
    cluster.delete(f"{ROOT}/deviceclasses/{NVIDIA}")


def claimed_pod(name: str, source: Json) -> Json:
    holder = container(IGNORES_TERM, 0)
    holder["resources"] = {"claims": [{"name": "gpu"}]}
    claims = [{"name": "gpu", **source}]
    return pod(name, LIFE, holder, resourceClaims=claims, terminationGracePeriodSeconds=5)


def test_a_claim_is_allocated_prepared_charged_and_released_with_its_container(
    cluster: Cluster, release: Release, driver: Component
) -> None:
    cluster.create({**about("ResourceClaimTemplate", "one", LIFE), "spec": {"spec": ONE_CARD}})
    uid = run(cluster, claimed_pod("claims", {"resourceClaimTemplateName": "one"}))["metadata"]["uid"]
    release.await_charged(LIFE, 1)
    eventually(lambda: processes(uid))
    [claim] = cluster.rest.get(f"{ROOT}/namespaces/{LIFE}/resourceclaims")["items"]
    [allocated] = claim["status"]["allocation"]["devices"]["results"]
    assert f" prepared {claim['metadata']['uid']} {allocated['device']}" in driver.log.read_text()
    lives = Lives(release, uid)
    lives.follow(lambda: cluster.rest.send("DELETE", f"/api/v1/namespaces/{LIFE}/pods/claims").ok())
    assert lives.container > 3
    assert f" unprepared {claim['metadata']['uid']}" in driver.log.read_text()


def test_a_claim_of_more_cards_than_the_quota_is_rejected(cluster: Cluster, driver: Component) -> None:
    assert driver.running
    request = {"name": "cards", "exactly": {"deviceClassName": NVIDIA, "count": 5}}
    claim = {**about("ResourceClaim", "five", LIFE), "spec": {"devices": {"requests": [request]}}}
    answer = cluster.try_create(claim)
    assert answer.status == HTTPStatus.FORBIDDEN
    assert "H100 in namespace team-life, requested: 5 cards" in answer.message
