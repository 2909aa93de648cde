"""Nobody waits for a back-off: who was refused gets its pods as soon as quota is free, and nobody else is woken."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.builders import MODEL
from tests.e2e.cluster import Cluster
from tests.e2e.control_plane import ControlPlane
from tests.e2e.controller_process import await_committed, limited_team
from tests.e2e.installation import Installation
from tests.e2e.rest import Json
from tests.integration.reviews import card_pod
from tests.processes import ControllerProcess, WebhookProcess

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("controller_manager")]

RETRIED = "quota.vcuda.io/retried-at"
WITHIN = 9.0
"""Seconds from quota being free to the pod being stored: fewer than until the owner would try again by itself."""

REFUSALS = 12
"""The back-off doubles from 5 ms, so after so many the next try is 10 s away; some time on it would be 16 minutes."""

CROWD = 500
FREED = 3


@pytest.fixture
def hasty_controller_manager(control_plane: ControlPlane) -> Iterator[None]:
    """The controller manager without its limit of 20 requests a second, which a crowd would wait for."""
    usual = control_plane.controller_manager
    assert usual is not None
    usual.stop()
    hasty = replace(usual, command=(*usual.command, "--kube-api-qps=1000", "--kube-api-burst=2000"))
    try:
        hasty.start()
        yield
    finally:
        hasty.stop()
        usual.start()


def workload(kind: str, namespace: str, name: str) -> Json:
    """One that wants one pod of one card."""
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": card_pod("", namespace)["spec"]}
    spec: Json = {"selector": {"matchLabels": labels}, "replicas": 1, "template": template}
    if kind == "StatefulSet":
        spec["serviceName"] = name
    if kind == "DaemonSet":
        del spec["replicas"]
    if kind == "Job":
        spec = {"template": {**template, "spec": {**template["spec"], "restartPolicy": "Never"}}}
    version = "batch/v1" if kind == "Job" else "apps/v1"
    return {"apiVersion": version, "kind": kind, "metadata": {"namespace": namespace, "name": name}, "spec": spec}


def await_refusals(webhook: WebhookProcess, namespace: str, count: int) -> None:
    """Return once the webhook has refused so many pods of ``namespace``."""
    refused = set()

    def is_last(line: Json) -> bool:
        if line.get("namespace") == namespace and line["outcome"] == "over-quota":
            refused.add(line["uid"])
        return len(refused) == count

    webhook.await_log("admission", is_last)


def await_pods(cluster: Cluster, namespace: str, timeout: float, wanted: Callable[[set[str]], bool]) -> float:
    """Await that the names of the pods in ``namespace`` are as wanted; return the seconds it took."""
    began = time.monotonic()
    cluster.await_collection(
        f"/api/v1/namespaces/{namespace}/pods",
        lambda pods: wanted({pod["metadata"]["name"] for pod in pods}),
        timeout,
    )
    return time.monotonic() - began


def free_a_card(cluster: Cluster, _: Installation, namespace: str) -> None:
    """End the pod that holds the one card."""
    cluster.delete_pod(namespace, "holder")


def raise_the_limit(_: Cluster, installation: Installation, namespace: str) -> None:
    """Allow one card more."""
    installation.quota.limit(**{namespace: {"quota": {"M40": 2}}})


@pytest.mark.parametrize("make_room", [free_a_card, raise_the_limit])
@pytest.mark.usefixtures("controller")
def test_a_deployment_deep_in_its_back_off_gets_its_pod_before_it_would_try_again(
    cluster: Cluster, installation: Installation, make_room: Callable[[Cluster, Installation, str], None]
) -> None:
    with limited_team(installation, {"quota": {"M40": 1}}) as namespace:
        cluster.create(card_pod("holder", namespace))
        await_committed(installation, namespace, M40=100)
        cluster.create(workload("Deployment", namespace, "train"))
        await_refusals(installation.replica, namespace, REFUSALS)
        make_room(cluster, installation, namespace)
        seconds = await_pods(cluster, namespace, WITHIN, lambda names: any(name.startswith("train") for name in names))
        print(f"{make_room.__name__}: the pod was stored {seconds:.1f} s later, after {REFUSALS} refusals")
        [replica_set] = cluster.rest.get(f"/apis/apps/v1/namespaces/{namespace}/replicasets")["items"]
        assert RETRIED in replica_set["metadata"]["annotations"]


@pytest.mark.parametrize("kind", ["StatefulSet", "DaemonSet", "Job"])
@pytest.mark.usefixtures("controller")
def test_workloads_that_tell_of_a_refusal_by_events_alone_are_found_too(
    cluster: Cluster, installation: Installation, create_node: Callable[..., str], kind: str
) -> None:
    """A Job waits 10 s after its first refusal already; the others' back-off doubles as a ReplicaSet's does."""
    create_node("nudge-m40", {MODEL: "M40"})
    with limited_team(installation, {"quota": {"M40": 1}}) as namespace:
        cluster.create(card_pod("holder", namespace))
        await_committed(installation, namespace, M40=100)
        cluster.create(workload(kind, namespace, "train"))
        await_refusals(installation.replica, namespace, 1 if kind == "Job" else REFUSALS)
        cluster.await_collection(f"/api/v1/namespaces/{namespace}/events", bool, fieldSelector="reason=FailedCreate")
        cluster.delete_pod(namespace, "holder")
        seconds = await_pods(cluster, namespace, WITHIN, lambda names: any(name.startswith("train") for name in names))
        print(f"{kind}: the pod was stored {seconds:.1f} s after quota was free")


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("hasty_controller_manager")
def test_a_crowd_of_refused_deployments_does_not_stampede(
    cluster: Cluster, installation: Installation, controller: ControllerProcess
) -> None:
    """Quota for three pods is freed, and about three owners are told; their own retries go on beside that."""
    with limited_team(installation, {"quota": {"M40": FREED}}) as namespace:
        replica_sets = f"/apis/apps/v1/namespaces/{namespace}/replicasets"
        for number in range(FREED):
            cluster.create(card_pod(f"holder-{number}", namespace))
        await_committed(installation, namespace, M40=100 * FREED)
        began = time.monotonic()
        for number in range(CROWD):
            cluster.create(workload("Deployment", namespace, f"train-{number}"))
        cluster.await_collection(
            replica_sets, lambda owners: len(owners) == CROWD and all(map(was_refused, owners)), 90
        )
        refused = time.monotonic() - began
        calls = admissions(installation.replica)
        for number in range(FREED):
            cluster.delete_pod(namespace, f"holder-{number}")
        seconds = await_pods(cluster, namespace, 30, lambda names: len(names) == FREED and all_trains(names))
        await_committed(installation, namespace, M40=100 * FREED)
        told = [
            owner for owner in cluster.rest.get(replica_sets)["items"] if RETRIED in owner["metadata"]["annotations"]
        ]
        nudges = [line for line in controller.logs("nudged") if f"/{namespace}/" in line["owner"]]
        print(
            f"{CROWD} Deployments refused after {refused:.0f} s; quota for {FREED} pods freed: all stored after "
            f"{seconds:.1f} s, {len(told)} owners nudged, {len(nudges)} nudges, "
            f"{admissions(installation.replica) - calls:.0f} admission calls meanwhile"
        )
        # None at all where their own retries were faster; that somebody is told is what the tests above are for.
        assert len(told) <= len(nudges) <= 2 * FREED


def all_trains(names: set[str]) -> bool:
    """Whether all pods are the workloads' own."""
    return all(name.startswith("train") for name in names)


def was_refused(owner: Json) -> bool:
    """Whether the owner's condition says that its pod was refused."""
    return "exceeded GPU quota" in json.dumps(owner["status"].get("conditions", []))


def admissions(webhook: WebhookProcess) -> float:
    """How many reviews the webhook has answered."""
    return webhook.metric("vcuda_admissions_total")
