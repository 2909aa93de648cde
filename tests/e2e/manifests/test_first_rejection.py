"""Runs the exact commands of docs/first-rejection.md, from an empty cluster to the first rejection."""

from collections.abc import Iterator

import pytest

from examples.discovery import features, hami
from tests.builders import MODEL
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import require
from tests.e2e.installation import await_enforced
from tests.e2e.ledgers import await_published
from tests.e2e.manifests.operations import DOCS, REGISTERED, commands, rejected_run, run
from tests.e2e.manifests.system import System, applied
from tests.e2e.quota_config import QuotaConfigMap
from tests.e2e.test_mixed_cluster import hami_scheduler
from tools.control_plane import ControlPlane

TEAM = "team-mixed"
NODES = ("mixed-hami", "mixed-plain")
PAGE = (DOCS / "first-rejection.md").read_text(encoding="utf-8")


@pytest.fixture
def system(admin: Cluster, plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    require(plane, "kube-scheduler")
    directory = tmp_path_factory.mktemp("first-rejection")
    shares, cards = hami("NVIDIA L40S"), features("Tesla-T4", "2")
    admin.create_node("mixed-hami", {}, {"nvidia.com/gpu": "10"})
    admin.rest.merge_patch("/api/v1/nodes/mixed-hami", {"metadata": {"annotations": shares["annotations"]}})
    admin.create_node("mixed-plain", cards["labels"], {"nvidia.com/gpu": "2"})
    admin.kubectl("delete", REGISTERED, "-l", "app.kubernetes.io/part-of=vcuda-quota")
    with (
        hami_scheduler(plane, directory),
        applied(admin, directory / "system", "hami") as found,
        found.serving(1),
        found.controller() as controller,
    ):
        controller.await_synced()
        for name in NODES:
            admin.await_object("/api/v1/nodes", name, lambda node: MODEL in node["metadata"]["labels"])
        yield found
        QuotaConfigMap(admin.rest, "kube-system", "gpuquota").delete()
        admin.delete_namespace(TEAM)
    for name in NODES:
        admin.delete_node(name)


@pytest.mark.timeout(240)
def test_the_page_leads_from_an_empty_cluster_to_the_first_rejection(admin: Cluster, system: System) -> None:
    [install] = commands("Install vcuda quota on a cluster with HAMi")
    assert "kubectl apply -k manifests/overlays/hami\n" in install  # the fixture has applied the overlay of HAMi
    [nodes] = commands("Look at the models of your nodes")
    listed = {row for row in rows(run(system, nodes)) if row[0] in NODES}
    assert len(listed) == len(NODES)
    assert listed <= rows(PAGE)
    limit, usage = commands("Limit a namespace")
    run(system, limit)
    await_enforced(admin, TEAM)
    await_published(admin, TEAM)
    assert "T4" in run(system, usage)
    [create] = commands("Create two pods that fit")
    bound = {row for row in rows(run(system, create)) if row[0] in ("train", "infer")}
    assert bound == {("infer", "mixed-hami", "hami-scheduler"), ("train", "mixed-plain", "default-scheduler")}
    assert bound <= rows(PAGE)
    [reject] = commands("See the first rejection")
    assert "exceeded quota: T4 in namespace team-mixed, requested: 1 card, used: 1" in rejected_run(system, reject)


def rows(printed: str) -> set[tuple[str, ...]]:
    return {tuple(line.split()) for line in printed.splitlines() if line.strip()}
