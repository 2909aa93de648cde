"""Pods for the node, and what their containers do."""

from collections.abc import Mapping

from tests.e2e.cluster import Cluster, Json
from tests.processes import eventually

IMAGE = "vcuda-quota:0.1.0"
GPU = "nvidia.com/gpu"
WAITS = "trap 'exit 0' TERM; sleep infinity & wait"
IGNORES_TERM = "trap '' TERM; while :; do sleep 1; done"
SHOWS_CARDS = f"echo cards $NVIDIA_VISIBLE_DEVICES; {WAITS}"


def container(script: str, cards: int = 1, name: str = "train", resource: str = GPU) -> Json:
    limits = {"limits": {resource: str(cards)}} if cards else {}
    return {"name": name, "image": IMAGE, "command": ["sh", "-c", script], "resources": limits}


def pod(name: str, namespace: str, *containers: Json, **spec: object) -> Json:
    # No DNS server runs here.
    fields = {"dnsPolicy": "Default", "restartPolicy": "Never", "terminationGracePeriodSeconds": 1}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"containers": containers, **fields, **spec},
    }


def gated(name: str, namespace: str, cards: int = 1) -> Json:
    """Return a pod with a scheduling gate. It is charged without a node."""
    gates = [{"name": "example.com/hold"}]
    return pod(name, namespace, container(WAITS, cards), schedulingGates=gates, terminationGracePeriodSeconds=0)


def workload(kind: str, name: str, namespace: str, template: Json, **spec: object) -> Json:
    """Return a Deployment or a Job with the pod ``template`` as its template."""
    group, labels = {"Deployment": "apps/v1", "Job": "batch/v1"}[kind], {"app": name}
    selector = {"selector": {"matchLabels": labels}} if kind == "Deployment" else {}
    pods = {"metadata": {"labels": labels}, "spec": template["spec"]}
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": group, "kind": kind, "metadata": metadata, "spec": {**selector, **spec, "template": pods}}


def is_running(found: Json) -> bool:
    return bool(found.get("status", {}).get("phase") == "Running")


def run(cluster: Cluster, manifest: Json) -> Json:
    """Create the pod, and return it when its containers run."""
    cluster.create(manifest)
    return cluster.wait_pod(manifest["metadata"]["namespace"], manifest["metadata"]["name"], is_running)


def shown_cards(cluster: Cluster, namespace: str, name: str, container: str = "train") -> list[str]:
    """Return the cards that the container printed."""

    def printed() -> str:
        return cluster.kubectl("--namespace", namespace, "logs", name, "-c", container, check=False).stdout

    eventually(lambda: "cards" in printed(), printed)
    return printed().split()[1].split(",")


def remove(cluster: Cluster, namespace: str, selector: Mapping[str, str] | None = None) -> None:
    """Delete all pods of the namespace without force, and wait until they no longer exist."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    cluster.rest.send("DELETE", path, **(selector or {})).ok()
    cluster.await_pods(namespace, lambda pods: not pods)
