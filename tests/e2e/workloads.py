"""Workloads whose controllers create pods, for tests in which these pods are rejected and later retried."""

import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from http import HTTPStatus

from tests.e2e.cluster import Cluster, Json
from tests.e2e.steady import in_threads
from tests.integration.reviews import card_pod, gpu_pod, on_m40
from tools.component import Component

HUNDREDTH = {"nvidia.com/vcuda-core": "1", "nvidia.com/vcuda-memory": "1"}
RETRIED = "quota.vcuda.io/retried-at"
API_VERSIONS = {"ReplicationController": "v1", "Job": "batch/v1"}
KINDS = ("ReplicaSet", "ReplicationController", "StatefulSet", "DaemonSet", "Job")
"""The kinds of objects that can own a rejected pod. A pod of a Deployment is owned by a ReplicaSet."""


def workload(kind: str, namespace: str, name: str = "train", *, replicas: int = 1, pod: Json | None = None) -> Json:
    """Return a workload (an object that owns pods) with ``replicas`` pods. By default each pod requests one card."""
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": (pod or card_pod("", namespace))["spec"]}
    spec: Json = {"selector": {"matchLabels": labels}, "replicas": replicas, "template": template}
    if kind == "ReplicationController":
        spec["selector"] = labels
    if kind == "StatefulSet":
        spec["serviceName"] = name
    if kind == "DaemonSet":
        del spec["replicas"]
    if kind == "Job":
        spec = {"template": {**template, "spec": {**template["spec"], "restartPolicy": "Never"}}}
    metadata = {"namespace": namespace, "name": name}
    return {"apiVersion": API_VERSIONS.get(kind, "apps/v1"), "kind": kind, "metadata": metadata, "spec": spec}


def creating(cluster: Cluster, namespace: str) -> AbstractContextManager[None]:
    """Create pods on M40 during the ``with`` statement, at most twenty per second, each with a hundredth of a card.

    A create that is answered with 429 does not count as a failure.
    """

    def create(stop: threading.Event) -> None:
        for number in itertools.count():
            if stop.wait(0.05):
                return
            answer = cluster.try_create(on_m40(gpu_pod(f"small-{number}", namespace, HUNDREDTH)))
            assert answer.status in (HTTPStatus.CREATED, HTTPStatus.TOO_MANY_REQUESTS), answer

    return in_threads([create])


def check_retried(cluster: Cluster, manager: Component | None, namespace: str, free: Callable[[], None]) -> None:
    """Create a workload of every kind in `KINDS`, and assert that its pods are rejected.

    Then call ``free``, which releases quota, and assert that each workload gets its pods.
    """
    assert manager is not None
    created = [cluster.create(workload(kind, namespace, kind.lower())) for kind in KINDS]
    await_refused(cluster, namespace)
    # While the controller manager is stopped, it cannot retry the workloads. So only our controller makes them retry.
    with manager.away():
        free()
        for each in created:
            cluster.await_object(cluster.path_of(each), each["metadata"]["name"], was_told)


def await_refused(cluster: Cluster, namespace: str) -> None:
    """Return when a workload of every kind in the namespace has reported that its pod was rejected."""
    cluster.await_events(namespace, "reason=FailedCreate", lambda events: kinds_told(events) >= {*KINDS})
    for kind in ("ReplicaSet", "ReplicationController"):
        path = cluster.path_of(workload(kind, namespace))
        cluster.await_collection(path, lambda found: all("conditions" in each["status"] for each in found))
    # A DaemonSet's Event is written before its status, and only the status shows that a pod is missing. So wait for the
    # status too.
    path = cluster.path_of(workload("DaemonSet", namespace))
    cluster.await_collection(path, lambda found: all(each["status"]["desiredNumberScheduled"] for each in found))


def kinds_told(events: list[Json]) -> set[str]:
    return {event["involvedObject"]["kind"] for event in events}


def was_told(found: Json) -> bool:
    return RETRIED in found["metadata"].get("annotations", {})
