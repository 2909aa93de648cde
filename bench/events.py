"""Measures the CPU time in which the controller decodes one watch event about a pod. The target is at most 25 µs.

``python -m bench events`` prints the measured values next to the target, and checks nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from bench.cpu import median
from controller.pods import PodInformer
from tests.api_double import ApiDouble
from tests.builders import LABELS, held_to
from tests.e2e.cluster import Json
from vcuda.cli import aligned
from vcuda.kube.watch import read_event

EVENTS, ROUNDS = 2_000, 15
TARGET = "under 25 µs"


def main() -> None:
    informer = PodInformer(ApiDouble().kube, LABELS, lambda _: None)
    rows = [("event of a pod", "bytes", "CPU", "target")]
    for name, line in lines().items():
        seconds = median(reading(informer, line), ROUNDS, EVENTS)
        rows.append((name, str(len(line)), f"{seconds * 1e6:.1f} µs", TARGET))
    print("\n".join(aligned(rows)))


def reading(informer: PodInformer, line: bytes) -> Callable[[], object]:
    """Return a function that decodes one watch event, given as a line of JSON, as the controller does."""
    return lambda: informer.decode(read_event(line, "watch").raw)


def lines() -> dict[str, bytes]:
    """Return watch events about pods as lines of JSON. The key is the text in the first column of the table."""
    gpu, plain = {"tencent.com/vcuda-core": "10", "tencent.com/vcuda-memory": "4"}, {"cpu": "2", "memory": "4Gi"}
    return {
        "just created, requests a share": line("ADDED", running(gpu, bound=False)),
        "runs, placed by gpu-manager": line("MODIFIED", running(gpu, bound=True)),
        "runs, requests no GPU": line("MODIFIED", running(plain, bound=True)),
    }


def line(kind: str, pod: Json) -> bytes:
    """Return a watch event about the pod as a line of JSON. ``kind``: the type of the event, such as ADDED."""
    return msgspec.json.encode({"type": kind, "object": pod})


def running(limits: Json, *, bound: bool) -> Json:
    """Return a pod with these resource limits and all fields that an API server sends.

    If the pod is bound to a node, its phase is Running. Otherwise it is Pending.
    """
    predicate = {"tencent.com/predicate-time": "1700000000000000000", "tencent.com/predicate-node": "gpu-7"}
    given = {**predicate, "tencent.com/predicate-gpu-idx-0": "3", "tencent.com/gpu-assigned": "true"}
    token = {"name": "kube-api-access-x7k2p", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}
    conditions = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    metadata = {
        "name": "train-6d4b75cb6d-x7k2p",
        "generateName": "train-6d4b75cb6d-",
        "namespace": "team-a",
        "uid": "0f9f3a4e-6a55-4c49-8c6e-5c9f0a8f7c11",
        "resourceVersion": "123456789",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {"app": "train", "pod-template-hash": "6d4b75cb6d"},
        "annotations": {"quota.vcuda.io/model": "M40", **(given if bound else {})},
        "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "train", "uid": "1", "controller": True}
        ],
        "managedFields": [_fields("kube-controller-manager"), _fields("kube-scheduler"), _fields("kubelet")],
    }
    container = {
        "name": "main",
        "image": "registry.example.com/train:1",
        "command": ["python", "-m", "train"],
        "env": [{"name": f"SETTING_{number}", "value": "x" * 20} for number in range(8)],
        "resources": {"limits": limits, "requests": limits},
        "volumeMounts": [token],
        "terminationMessagePath": "/dev/termination-log",
        "imagePullPolicy": "IfNotPresent",
    }
    spec = {
        "containers": [container],
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "schedulerName": "default-scheduler",
        "affinity": held_to("M40"),
        **({"nodeName": "gpu-7"} if bound else {}),
    }
    status = {
        "phase": "Running" if bound else "Pending",
        "conditions": [
            {"type": each, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"} for each in conditions
        ],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


def _fields(manager: str) -> Json:
    names = [f"f:field{number}" for number in range(20)]
    fields: Json = {"f:spec": {name: {"f:value": {}, "f:name": {}} for name in names}}
    return {"manager": manager, "operation": "Update", "apiVersion": "v1", "fieldsType": "FieldsV1", "fieldsV1": fields}


if __name__ == "__main__":
    main()
