"""Tests of our containers' memory while 5,000 pods come and go. The pods are gated, so they need no node."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.real.creates import creating
from tests.real.pods import gated
from tests.real.release import CONTROLLER, WEBHOOK, Release

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

PODS, TEAM = 5000, "team-many"


def test_each_container_stays_below_its_memory_limit_with_5000_pods(cluster: Cluster, release: Release) -> None:
    with creating(cluster) as answers, ThreadPoolExecutor(4) as threads:
        for _ in threads.map(lambda number: create(cluster, f"many-{number}"), range(PODS)):
            pass
        answers.await_more(200)
    for name in (WEBHOOK, CONTROLLER):
        for pod in release.pods(name):
            [status] = pod["status"]["containerStatuses"]
            peak, limit = memory(pod["metadata"]["uid"])
            print(f"\n{pod['metadata']['name']}: {peak >> 20} of {limit >> 20} MiB", end="")
            assert peak < limit
            assert status["restartCount"] == 0 or status["lastState"]["terminated"]["reason"] != "OOMKilled"
    answers.only("429")


def create(cluster: Cluster, name: str) -> None:
    while (answer := cluster.try_create(gated(name, TEAM))).may_pass_soon:
        pass
    answer.ok()


def memory(uid: str) -> tuple[int, int]:
    """Return the largest memory that the pod has used, and its memory limit, in bytes."""
    [pod] = [*Path("/sys/fs/cgroup").glob(f"memory/**/pod{uid}"), *Path("/sys/fs/cgroup").glob(f"vcuda*/**/pod{uid}")]
    old = pod / "memory.max_usage_in_bytes"
    peak, limit = (old, pod / "memory.limit_in_bytes") if old.exists() else (pod / "memory.peak", pod / "memory.max")
    return int(peak.read_text()), int(limit.read_text())
