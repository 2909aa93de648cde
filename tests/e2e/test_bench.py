"""What is measured, and what ours is measured beside, does what it is measured for."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import cpu, creates, go, scale
from bench.arrangements import FLASK_PIN, GO_IDLE, GO_PIN, IN_GO, Arranged, arranged
from bench.plane import Plane, gpu_pod
from tests.builders import held_to
from tests.e2e.cluster import Cluster, Json
from tests.e2e.dra import require_dra, served
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


def test_a_cluster_of_pods_claims_and_slices_is_stored_settled_and_measured(cluster: Cluster) -> None:
    """Where the API server serves no claims, it is the pods alone."""
    sizes = ("--namespaces", "6", "--pods", "100", "--claims", "120", "--slices", "12", "--events", "12")
    done = CliRunner().invoke(scale.main, [*sizes, "--seconds", "0.5", "-o", "json"], catch_exceptions=False)
    figures = json.loads(done.stdout)
    always = {"settled_seconds", "controller_peak_mib", "pod_end_seconds", "webhook_mib", "largest_ledger_bytes"}
    of_claims = {"claim_end_seconds", "claim_event_ms", "slice_event_ms", "webhook_slice_event_ms"}
    assert figures.keys() >= always
    assert (figures.keys() & of_claims) == (of_claims if served(cluster) else set())


def test_creates_of_claims_are_charged_and_measured_beside_those_of_pods(cluster: Cluster) -> None:
    require_dra(cluster)
    options = ("--only", "claims-ours-1", "--rounds", "1", "--seconds", "0.5", "-o", "json")
    done = CliRunner().invoke(creates.main, options, catch_exceptions=False)
    [arrangement] = json.loads(done.stdout).items()
    assert arrangement[0] == "claims-ours-1"
    assert all(case["refused"] == 0 and case["by_process"]["webhook"] > 0 for case in arrangement[1].values())
