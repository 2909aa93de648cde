"""Tests that the controller removes stale allocations (annotations and labels) from pods, and stale locks from nodes.

Pods with a valid allocation do not change.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.allocations import RECORDED
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import Installation, controlling
from tests.e2e.second_scheduler import PREDICATING, REJECTION, extended_scheduler, predicate
from tests.e2e.stale_objects import Allocated, await_freed, await_removal_event, is_allocated
from tests.processes import ControllerProcess
from tools.control_plane import ControlPlane
from vcuda.requests.schemes import GPU_MANAGER, HAMI, VGPU_MANAGER

pytestmark = pytest.mark.one_version

TIMEOUT = 5
NODE, OTHER = "gc-node", "gc-other"

STALE = [
    *(Allocated(f"{scheme.name}.unbound", scheme, NODE) for scheme in RECORDED),
    *(Allocated(f"{scheme.name}.node-gone", scheme, "no-such-node") for scheme in RECORDED),
    *(Allocated(f"{scheme.name}.other-node", scheme, OTHER, bound=NODE) for scheme in RECORDED),
    *(
        Allocated(f"{scheme.name}.finished", scheme, NODE, "done", bound=NODE, status="Succeeded")
        for scheme in RECORDED
    ),
    *(Allocated(f"{scheme.name}.allocating", scheme, NODE, "allocating") for scheme in (HAMI, VGPU_MANAGER)),
]
"""Pods with a stale allocation: for every scheme (the resource names of one vendor), a pod for each rule that applies.

The name of a pod is SCHEME.RULE.
"""

ALIVE = [
    *(Allocated(f"{scheme.name}.running", scheme, NODE, "done", bound=NODE, status="Running") for scheme in RECORDED),
    *(Allocated(f"{scheme.name}.starting", scheme, NODE, bound=NODE) for scheme in RECORDED),
    *(
        Allocated(f"{scheme.name}.confirmed", scheme, OTHER, "done", bound=NODE, status="Running")
        for scheme in RECORDED
    ),
    Allocated("hami.binding", HAMI, NODE, "allocating", bound=NODE),
]
"""Pods with a valid allocation. They are bound to the allocated node, or a device plugin has confirmed the allocation.
"""


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[None]:
    for name in (NODE, OTHER):
        cluster.create_node(name, capacity={"tencent.com/vcuda-core": "400"})
    yield
    for name in (NODE, OTHER):
        cluster.delete_node(name)


@pytest.fixture(scope="module")
def collector(installation: Installation, nodes: None) -> Iterator[ControllerProcess]:
    """A controller that is the leader. An allocation becomes stale if its pod is not bound within `TIMEOUT` seconds."""
    assert nodes is None
    with controlling(installation, "--allocation-timeout", str(TIMEOUT)) as running:
        yield running


@pytest.fixture(scope="module")
def littered(cluster: Cluster, collector: ControllerProcess) -> Iterator[tuple[str, list[Json]]]:
    assert collector.process.poll() is None
    namespace = cluster.create_namespace()
    alive = [pod.create(cluster, namespace) for pod in ALIVE]
    for pod in STALE:
        pod.create(cluster, namespace)
    yield namespace, alive
    cluster.delete_namespace(namespace)


# This test must be first, because the controller of the other tests would remove the allocation.
def test_a_dry_run_reports_and_writes_nothing(cluster: Cluster, installation: Installation, namespace: str) -> None:
    pod = Allocated("stale", GPU_MANAGER, "no-such-node")
    pod.create(cluster, namespace)
    before = cluster.pods(namespace)
    event = "stale allocation found; a dry run removes nothing"
    with controlling(installation, "--dry-run") as controller:
        line = controller.await_log(event, lambda found: found["namespace"] == namespace)
        assert (line["name"], line["scheme"], line["rule"]) == (pod.name, pod.scheme.name, "node-gone")
        assert controller.terminate() == 0
    assert cluster.pods(namespace) == before
    assert cluster.events(namespace) == []


@pytest.mark.parametrize("pod", STALE, ids=lambda pod: pod.name)
def test_every_rule_of_every_scheme_clears_its_pod_and_writes_an_event(
    cluster: Cluster, collector: ControllerProcess, littered: tuple[str, list[Json]], pod: Allocated
) -> None:
    namespace, _ = littered
    rule = pod.name.rpartition(".")[2]
    await_freed(cluster, namespace, pod)
    event = await_removal_event(cluster, namespace, pod.name)
    assert event["metadata"]["name"].startswith(f"{pod.name}.{pod.scheme.name}-{rule}-")
    assert event["involvedObject"]["kind"] == "Pod"
    line = collector.await_log("stale allocation removed", lambda found: found["name"] == pod.name)
    assert (line["scheme"], line["rule"]) == (pod.scheme.name, rule)
    assert collector.metric("vcuda_gc_annotations_total", scheme=pod.scheme.name, rule=rule) >= 1


def test_pods_with_a_valid_allocation_are_not_written(cluster: Cluster, littered: tuple[str, list[Json]]) -> None:
    namespace, alive = littered
    for pod in STALE:
        await_freed(cluster, namespace, pod)
    assert as_stored(cluster, namespace, alive) == [pod["metadata"] for pod in alive]


def as_stored(cluster: Cluster, namespace: str, pods: list[Json]) -> list[Json]:
    """Return the present metadata of these pods. A pod with an unchanged resourceVersion was not written."""
    stored = {found["metadata"]["name"]: found["metadata"] for found in cluster.pods(namespace)}
    return [stored[pod["metadata"]["name"]] for pod in pods]


@pytest.mark.usefixtures("collector", "scheduler")
def test_a_pod_that_gpu_admission_always_rejects_is_cleared_and_scheduled(
    cluster: Cluster, control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """The pod has gpu-admission's annotations but no node, so gpu-admission rejects it ("had been predicated!")."""
    pod = Allocated("stranded", GPU_MANAGER, NODE, own={"a/b": "stays"}, scheduler=PREDICATING)
    with extended_scheduler(control_plane, tmp_path, PREDICATING, predicate):
        pod.create(cluster, namespace)
        rejected = cluster.wait_pod(namespace, "stranded", is_rejected)
        assert is_allocated(rejected, GPU_MANAGER)
        assert "nodeName" not in rejected["spec"]
        bound = cluster.await_bound(namespace, "stranded")
    assert bound["metadata"]["annotations"] == {"a/b": "stays"}
    event = await_removal_event(cluster, namespace, "stranded")
    assert "the pod was never bound" in event["message"]


def is_rejected(pod: Json) -> bool:
    return any(REJECTION in condition.get("message", "") for condition in pod["status"].get("conditions", []))


# The next test runs the garbage collector in its own process, with a real API server.
