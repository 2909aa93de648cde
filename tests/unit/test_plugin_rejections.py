"""Tests of `kubectl gpuquota rejections`, which lists the workloads that were rejected, by their Events."""

import json
from typing import Any

import pytest

from tests.api_double import lost_request
from tests.builders import Manifest
from tests.gpuquota import Cluster, run

DENIED = 'Error creating: admission webhook "validate.quota.vcuda.io" denied the request: '
OVER = "exceeded quota: M40 in namespace team-a, requested: 1 card, used: 8 (0 pending), limited: 8, 1 more needed"


def event(number: int, message: str, *, name: str = "train", namespace: str = "team-a", **fields: Any) -> Manifest:
    time = f"2026-01-01T00:00:{number:02}Z"
    metadata = {"name": f"{name}.{number}", "namespace": namespace, "uid": f"uid-{number}", "creationTimestamp": time}
    return {
        "metadata": metadata,
        "involvedObject": {"kind": "ReplicaSet", "namespace": namespace, "name": name},
        "reason": "FailedCreate",
        "message": message,
        "lastTimestamp": time,
        **fields,
    }


def store(cluster: Cluster, *events: Manifest) -> None:
    for each in events:
        metadata = each["metadata"]
        cluster.store(f"/api/v1/namespaces/{metadata['namespace']}/events/{metadata['name']}", each)


def test_a_workload_is_one_row_with_its_newest_reason(cluster: Cluster) -> None:
    malformed = "malformed GPU request: spec.containers[0]: 150 is more than one card but not whole cards"
    store(
        cluster,
        event(1, DENIED + malformed, count=3),
        event(2, DENIED + OVER, count=2),
        event(3, 'pods "x" is forbidden: exceeded quota: compute, requested: pods=1', name="other"),
        event(4, DENIED + OVER, namespace="team-b", name="eval"),
    )
    assert run("-n", "team-a", "rejections").stdout.splitlines() == [
        "NAMESPACE  WORKLOAD          TIMES  LAST                  REASON",
        f"team-a     ReplicaSet/train  5      2026-01-01T00:00:02Z  {OVER}",
    ]
    rows = [line.split()[:2] for line in run("rejections", "-A").stdout.splitlines()[1:]]
    assert rows == [["team-b", "ReplicaSet/eval"], ["team-a", "ReplicaSet/train"]]


def test_scripts_get_every_field(cluster: Cluster) -> None:
    store(cluster, event(1, DENIED + OVER))
    [rejection] = json.loads(run("rejections", "-n", "team-a", "-o", "json").stdout)
    assert rejection == {
        "namespace": "team-a",
        "kind": "ReplicaSet",
        "name": "train",
        "message": OVER,
        "at": "2026-01-01T00:00:01Z",
        "count": 1,
    }


@pytest.mark.usefixtures("cluster")
def test_nothing_rejected_is_an_empty_table() -> None:
    done = run("-n", "team-a", "rejections")
    assert (done.exit_code, len(done.stdout.splitlines())) == (0, 1)
    assert done.stderr == ""


def test_an_unreachable_cluster_is_reported(cluster: Cluster) -> None:
    cluster.deliver = lost_request
    done = run("-n", "team-a", "rejections")
    assert (done.exit_code, done.stderr) == (1, "Error: timed out\n")


@pytest.mark.usefixtures("cluster")
def test_an_impossible_namespace_is_bad_input() -> None:
    assert run("-n", "no_namespace", "rejections").exit_code == 2
