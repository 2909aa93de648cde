"""The rights that the manifests give the controller: enough for all its work, and none besides."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from http import HTTPStatus

import pytest

from tests.allocated import rfc3339
from tests.builders import MODEL
from tests.e2e.cluster import Cluster
from tests.e2e.control_plane import ControlPlane
from tests.e2e.controller_process import (
    await_committed,
    await_enforced,
    await_ledger,
    await_ledger_gone,
    controlling,
    limited_team,
)
from tests.e2e.installation import Installation
from tests.e2e.stale_objects import Allocated, await_freed, await_removal_event
from tests.e2e.workloads import check_nudged
from tests.integration.reviews import card_pod
from tests.processes import ControllerProcess
from vcuda.requests.schemes import HAMI, VGPU_MANAGER

USAGE = "gpu-quota-usage"
ONE = {"quota": {"M40": 1}}


@pytest.fixture(scope="module")
def controller(own: Installation, account: Cluster) -> Iterator[ControllerProcess]:
    with controlling(own, kubeconfig=account.kubeconfig) as running:
        yield running


def refusals(controller: ControllerProcess) -> list[str]:
    """What it logged of requests that its rights did not cover."""
    return [line for line in controller.output().splitlines() if "system:serviceaccount" in line]


def test_with_the_rights_of_the_manifest_a_namespace_is_led_through_its_whole_life(
    cluster: Cluster, own: Installation, controller: ControllerProcess
) -> None:
    """Labelled, opened from the pods that run, settled, proven absent, published, and cleared away."""
    with own.free_team() as namespace:
        with own.quota.limited(**{namespace: {"quota": {"M40": 2}}}):
            await_enforced(cluster, namespace)
            cluster.create(card_pod("train", namespace))
            await_committed(own, namespace, M40=100)
            assert cluster.try_create(card_pod("train", namespace)).status == HTTPStatus.CONFLICT
            await_ledger(own, namespace, lambda ledger: bool(ledger.pending))
            await_committed(own, namespace, M40=100)
            cluster.await_object(f"/api/v1/namespaces/{namespace}/configmaps", USAGE, lambda _: True)
        await_enforced(cluster, namespace, enforced=False)
        await_ledger_gone(cluster, namespace)
        cluster.await_gone(f"/api/v1/namespaces/{namespace}/configmaps", USAGE)
    assert refusals(controller) == []


def test_with_the_rights_of_the_manifest_the_pods_of_a_first_quota_are_counted(
    cluster: Cluster, own: Installation, controller: ControllerProcess, create_node: Callable[..., str]
) -> None:
    node = create_node("rbac-m40", {MODEL: "M40"})
    with own.free_team() as namespace:
        running = card_pod("runs", namespace)
        cluster.create({**running, "spec": {**running["spec"], "nodeName": node}})
        cluster.create(card_pod("waits", namespace))
        with own.quota.limited(**{namespace: ONE}):
            await_committed(own, namespace, M40=100)
            controller.await_log("told that a pod is not counted", lambda line: line["pod"] == "waits")
    assert refusals(controller) == []


@pytest.mark.usefixtures("controller", "controller_manager")
def test_with_the_rights_of_the_manifest_every_kind_of_workload_is_nudged(
    cluster: Cluster, control_plane: ControlPlane, own: Installation, create_node: Callable[..., str]
) -> None:
    create_node("rbac-m40", {MODEL: "M40"})
    with limited_team(own, {"quota": {"M40": 5}}) as namespace:
        cluster.create(card_pod("holder", namespace, cards=5))
        await_committed(own, namespace, M40=500)
        manager = control_plane.controller_manager
        check_nudged(cluster, manager, namespace, lambda: cluster.delete_pod(namespace, "holder"))


@pytest.mark.usefixtures("controller")
def test_with_the_rights_of_the_manifest_stale_allocations_and_locks_are_removed_and_told(
    cluster: Cluster, own: Installation, create_node: Callable[..., str]
) -> None:
    """The pod's node is proven gone, and so is the lock's pod; the Events are where each object's belong."""
    with own.free_team() as namespace:
        pod = Allocated("stale", VGPU_MANAGER, "no-such-node")
        pod.create(cluster, namespace)
        await_freed(cluster, namespace, pod)
        await_removal_event(cluster, namespace, pod.name)
        lock = {str(HAMI.node_lock): f"{rfc3339(time.time())},{namespace},nobody"}
        node = create_node("rbac-locked")
        cluster.rest.merge_patch(f"/api/v1/nodes/{node}", {"metadata": {"annotations": lock}})
        await_removal_event(cluster, "default", node)
        assert "annotations" not in cluster.rest.get(f"/api/v1/nodes/{node}")["metadata"]


def test_with_the_rights_of_the_manifest_a_malformed_quota_is_reported(
    cluster: Cluster, own: Installation, account: Cluster
) -> None:
    """The event is the account's own, whoever of the parts was first: a webhook with the admin's rights runs too."""
    good = own.quota.document()
    stored = own.quota.write("{team-a: 8}").ok()
    about_it = f"metadata.name=gpuquota.malformed-{stored['metadata']['resourceVersion']}"
    [event] = cluster.await_events("kube-system", about_it)
    metadata = {"namespace": "kube-system", "name": f"as-the-controller-{stored['metadata']['resourceVersion']}"}
    again = {**event, "apiVersion": "v1", "kind": "Event", "metadata": metadata}
    assert account.create(again)["reason"] == "MalformedQuota"
    own.quota.limit_anew(**good)
