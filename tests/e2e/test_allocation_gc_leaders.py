"""Stale allocations and who leads: one removes, another takes over where it was killed, a dry run only tells."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from examples.allocations import RECORDED
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import Installation, controlling, two_candidates
from tests.e2e.stale_objects import REASON, Allocated, is_allocated

pytestmark = pytest.mark.one_version

PODS = 400
MIDWAY = 40
"""Pods that are free when the leader is killed."""

LEASE_SECONDS = 8
CALLERS = 8


def stale_pods(cluster: Cluster, namespace: str, count: int) -> list[Allocated]:
    pods = [Allocated(f"stale-{number}", RECORDED[number % len(RECORDED)], "no-such-node") for number in range(count)]
    with ThreadPoolExecutor(CALLERS) as callers:
        list(callers.map(lambda pod: pod.create(cluster, namespace), pods))
    return pods


def freed(found: list[Json]) -> list[Json]:
    return [pod for pod in found if not any(is_allocated(pod, scheme) for scheme in RECORDED)]


def writes_since(cluster: Cluster, path: str, version: str, count: int) -> Counter[str]:
    """How often each pod was written since that version, from the watch's history; it has at least ``count`` events."""
    written: Counter[str] = Counter()
    for event in cluster.rest.watch(path, 1, resourceVersion=version):
        written[event["object"]["metadata"]["name"]] += 1
    assert written.total() >= count
    return written


def test_the_next_leader_does_the_rest_once(cluster: Cluster, installation: Installation, namespace: str) -> None:
    """A crash between a patch and its Event costs that one Event, and nothing else."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    pods = stale_pods(cluster, namespace, PODS)
    version = cluster.rest.get(path)["metadata"]["resourceVersion"]
    with two_candidates(installation, LEASE_SECONDS) as (first, second):
        cluster.await_collection(path, lambda found: len(freed(found)) >= MIDWAY)
        first.kill()
        left = PODS - len(freed(cluster.pods(namespace)))
        assert left > 0, "the leader was done before it was killed"
        second.await_synced()
        cluster.await_collection(path, lambda found: len(freed(found)) == PODS)
        assert second.terminate() == 0
        done = [line["name"] for line in second.logs("stale allocation removed")]
    assert writes_since(cluster, path, version, PODS) == Counter({pod.name: 1 for pod in pods})
    assert len(done) == len(set(done)) == left
    told = Counter(event["involvedObject"]["name"] for event in cluster.events(namespace) if event["reason"] == REASON)
    assert set(told.values()) == {1}
    assert len(told) >= PODS - 1


def test_a_dry_run_tells_and_writes_nothing(cluster: Cluster, installation: Installation, namespace: str) -> None:
    [pod] = stale_pods(cluster, namespace, 1)
    before = cluster.pods(namespace)
    with controlling(installation, "--dry-run") as controller:
        line = controller.await_log(
            "stale allocation found; a dry run removes nothing", lambda found: found["namespace"] == namespace
        )
        assert (line["name"], line["scheme"], line["rule"]) == (pod.name, pod.scheme.name, "node-gone")
        assert controller.terminate() == 0
    assert cluster.pods(namespace) == before
    assert cluster.events(namespace) == []
