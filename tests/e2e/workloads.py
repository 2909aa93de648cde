"""Workloads whose controllers create pods, for tests in which the pods are rejected and retried later."""

from collections.abc import Callable

from tests.e2e.cluster import Cluster, Json
from tests.integration.reviews import card_pod
from tools.component import Component

RETRIED = "quota.vcuda.io/retried-at"
API_VERSIONS = {"ReplicationController": "v1", "Job": "batch/v1"}
KINDS = ("ReplicaSet", "ReplicationController", "StatefulSet", "DaemonSet", "Job")
"""The kinds of workloads in these tests. Deployment is missing, because a ReplicaSet owns the pods of a Deployment."""


def workload(kind: str, namespace: str, name: str = "train", *, replicas: int = 1, pod: Json | None = None) -> Json:
    """Return a workload (an object that owns pods) with ``replicas`` pods. By default, each requests one card."""
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


def check_retried(cluster: Cluster, manager: Component | None, namespace: str, free: Callable[[], None]) -> None:
    """Create a workload of every kind in `KINDS`, and wait until its pods were rejected.

    Then call ``free``, which releases quota. Our controller must make each workload retry.
    """
    assert manager is not None
    created = [cluster.create(workload(kind, namespace, kind.lower())) for kind in KINDS]
    await_rejected(cluster, namespace)
    # Kubernetes' controller manager would also make the workloads retry after some time, so it is stopped here.
    with manager.away():
        free()
        for each in created:
            cluster.await_object(cluster.path_of(each), each["metadata"]["name"], was_told)


def await_rejected(cluster: Cluster, namespace: str) -> None:
    cluster.await_events(
        namespace,
        "reason=FailedCreate",
        lambda events: {event["involvedObject"]["kind"] for event in events} >= {*KINDS},
    )
    for kind in ("ReplicaSet", "ReplicationController"):
        path = cluster.path_of(workload(kind, namespace))
        cluster.await_collection(path, lambda found: all("conditions" in each["status"] for each in found))
    # A DaemonSet's Event precedes its status, but our controller sees the missing pod only in the status.
    path = cluster.path_of(workload("DaemonSet", namespace))
    cluster.await_collection(path, lambda found: all(each["status"]["desiredNumberScheduled"] for each in found))


def was_told(found: Json) -> bool:
    return RETRIED in found["metadata"].get("annotations", {})
