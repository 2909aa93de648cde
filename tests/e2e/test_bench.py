"""What is measured, and what ours is measured beside, does what it is measured for."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import cpu, creates, go, hooks, scale
from bench.arrangements import CLAIMS_OURS, FLASK_PIN, GO_IDLE, GO_PIN, IN_GO, OURS_1, Arranged, arranged
from bench.plane import LEDGER_NAMESPACE, Plane, gpu_pod, running_plane
from tests.builders import held_to
from tests.e2e.cluster import Cluster, Json
from tests.e2e.dra import CONSUMABLE_CAPACITY, require_feature, served
from tests.e2e.installation import make_certificates

pytestmark = pytest.mark.one_version


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


@pytest.mark.parametrize("name", [OURS_1, CLAIMS_OURS])
def test_ours_charges_what_is_created_with_its_own_rights_and_under_its_policies(cluster: Cluster, name: str) -> None:
    """Where something else wrote the ledgers the policies would refuse it, and nothing would be created."""
    if name == CLAIMS_OURS:
        require_feature(cluster, CONSUMABLE_CAPACITY)
    options = ("--only", name, "--rounds", "1", "--seconds", "0.5", "-o", "json")
    done = CliRunner().invoke(creates.main, options, catch_exceptions=False)
    [(measured, cases)] = json.loads(done.stdout).items()
    assert measured == name
    assert all(case["refused"] == 0 and case["by_process"]["webhook"] > 0 for case in cases.values())


def test_our_policies_are_in_effect_while_ours_is_measured_and_no_longer() -> None:
    with running_plane() as plane:
        ledger = {"namespace": LEDGER_NAMESPACE, "name": "gpu-ledger-a"}
        forged = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": ledger}
        for _ in range(2):
            with hooks.policies_in_effect(plane.cluster, "default"):
                assert plane.cluster.try_create(forged, dryRun="All").status == HTTPStatus.FORBIDDEN
            assert plane.cluster.try_create(forged, dryRun="All").status == HTTPStatus.CREATED
