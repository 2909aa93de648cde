"""The webhooks that ours is measured beside do what they are measured for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import cpu, go
from bench.arrangements import FLASK_PIN, GO_IDLE, GO_PIN, IN_GO, Arranged, arranged
from bench.plane import Plane, gpu_pod
from tests.builders import held_to
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import make_certificates


@contextmanager
def running(cluster: Cluster, directory: Path, name: str) -> Iterator[Arranged]:
    """The arrangement, on the cluster of these tests; a test without Go is skipped, saying so."""
    if name in IN_GO and not go.installed():
        pytest.skip("there is no go on PATH to build bench/webhook.go with")
    make_certificates(directory)
    program = go.build(directory) if name in IN_GO else None
    with arranged(Plane(cluster, directory), name, program) as arrangement:
        yield arrangement


def created(cluster: Cluster, namespace: str) -> Json:
    pod = gpu_pod()
    return cluster.create({**pod, "metadata": {**pod["metadata"], "namespace": namespace}})


@pytest.mark.parametrize(("name", "processes"), [(GO_PIN, 1), (FLASK_PIN, 2)])
def test_a_webhook_that_only_pins_pins_every_pod_and_its_workers_are_counted(
    cluster: Cluster, namespace: str, tmp_path: Path, name: str, processes: int
) -> None:
    with running(cluster, tmp_path, name) as arrangement:
        pod = created(cluster, namespace)
        [webhook] = arrangement.processes["webhook"]
        assert len([*cpu.family(webhook)]) == processes
        assert cpu.by_name(arrangement.processes).keys() == {"kube-apiserver", "etcd", "webhook"}
    assert pod["spec"]["affinity"] == held_to("M40")
    assert pod["metadata"]["annotations"] == {"quota.vcuda.io/model": "M40"}


def test_a_webhook_that_does_nothing_leaves_the_pod_as_it_is(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
    with running(cluster, tmp_path, GO_IDLE):
        pod = created(cluster, namespace)
    assert "affinity" not in pod["spec"]
    assert "annotations" not in pod["metadata"]
