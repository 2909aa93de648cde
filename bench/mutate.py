"""Compares how many /mutate requests per second vcuda quota's webhook and a webhook that does nothing can answer.

Both webhooks have the same settings. In one run, load is sent to one webhook after the other.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from pathlib import Path

import msgspec

from bench import load, servers
from bench.plane import write_certificates
from vcuda.cli import aligned
from vcuda.placement.patches import PinSettings
from webhook.check.files import read_cluster
from webhook.check.standalone import standalone_service

ROUNDS, SECONDS, CONNECTIONS = 7, 2.0, 8

QUOTA = "team-a: {pool: [public], quota: {M40: 100000, P100: 100000}}\n"
NODES = "\n---\n".join(
    f"{{kind: Node, metadata: {{name: {model}-{number}, labels: {{gaia.tencent.com/gpu-model: {model}, "
    f"gaia.tencent.com/gpu-pool: public}}}}}}"
    for model in ("M40", "P100")
    for number in range(50)
)


def review(limits: dict[str, str]) -> bytes:
    """Return a typical pod's AdmissionReview as the API server sends it: with defaults, environment and a volume."""
    container = {
        "name": "main",
        "image": "registry.example.com/team-a/train:1.2.3",
        "env": [{"name": f"SETTING_{n}", "value": "x" * 40} for n in range(20)],
        "resources": {"limits": limits, "requests": limits},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "terminationMessagePath": "/dev/termination-log",
        "imagePullPolicy": "IfNotPresent",
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "train-", "namespace": "team-a", "labels": {"app": "train"}, "annotations": {}},
        "spec": {
            "containers": [container],
            "volumes": [{"name": "data", "emptyDir": {}}],
            "restartPolicy": "Always",
            "schedulerName": "default-scheduler",
            "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"}],
        },
        "status": {},
    }
    request = {
        "uid": "0df28fbd-5f5f-11e8-bc74-36e6bb280816",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": "team-a",
        "operation": "CREATE",
        "userInfo": {
            "username": "system:serviceaccount:kube-system:replicaset-controller",
            "groups": ["system:authenticated"],
        },
        "object": pod,
        "dryRun": False,
    }
    return msgspec.json.encode({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request})


def main() -> None:
    bodies = {
        "vcuda pod": review({"tencent.com/vcuda-core": "100"}),
        "other pod": review({"cpu": "1", "memory": "1Gi"}),
    }
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_certificates(directory)
        quota, nodes = directory / "quota.yaml", directory / "nodes.yaml"
        quota.write_text(QUOTA)
        nodes.write_text(NODES)
        make_service = functools.partial(standalone_service, read_cluster(quota, nodes, PinSettings()))
        with servers.idle(directory) as idle, servers.alone(directory, make_service) as ours:
            rows = [
                row
                for name, body in bodies.items()
                for row in _compare(name, idle.url, ours.url, directory / "ca.crt", body)
            ]
    heading = ("/mutate", "webhook", "requests/s", "p50 ms", "p99 ms", "of doing nothing")
    print("\n".join(aligned([heading, *rows])))


def _compare(name: str, idle: str, ours: str, ca: Path, body: bytes) -> list[tuple[str, ...]]:
    """Send load to one webhook after the other in each round. Return table rows with medians over the rounds.

    Both webhooks are measured in every round, because the machine may be slower for a minute.
    """

    def measure(url: str) -> load.Result:
        request = load.post(f"{url}/mutate?timeout=10s", body)
        return load.run(url, ca, [request] * CONNECTIONS, seconds=SECONDS)

    pairs = [(measure(idle), measure(ours)) for _ in range(ROUNDS)]
    ratio = statistics.median(mine.rate / nothing.rate for nothing, mine in pairs)
    labels = (("doing nothing", ""), ("ours", f"{ratio:.2f}"))
    return [(name, who, *_medians([pair[i] for pair in pairs]), share) for i, (who, share) in enumerate(labels)]


def _medians(results: list[load.Result]) -> tuple[str, str, str]:
    rate, p50, p99, *_ = (statistics.median(column) for column in zip(*results, strict=True))
    return f"{rate:.0f}", f"{p50:.2f}", f"{p99:.2f}"
