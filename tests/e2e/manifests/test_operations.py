"""Runs the exact commands of docs/install.md, docs/upgrade.md and docs/operations.md."""

from http import HTTPStatus
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.installation import LEDGERS, SYSTEM_NAMESPACE
from tests.e2e.ledgers import await_published
from tests.e2e.manifests.operations import NOTHING, SOON, TEAM, commands, installed, run
from tests.e2e.manifests.system import kubectl_k
from tests.integration.reviews import card_pod
from tests.rendered import container

JOBS = f"/apis/batch/v1/namespaces/{SYSTEM_NAMESPACE}/jobs"
FIRST_JOBS = ("vcuda-certs-first", "vcuda-extender-certs-first", "vcuda-scheduler-certs-first")


@pytest.mark.one_version
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("plane")
def test_deleted_ledgers_are_rebuilt_from_the_pods_and_enforce_the_quota(admin: Cluster, tmp_path: Path) -> None:
    with installed(admin, tmp_path / "system", **SOON) as (system, _):
        admin.create(card_pod("first", TEAM))
        admin.create(card_pod("second", TEAM))
        counted = admin.await_object(
            LEDGERS, f"gpu-ledger-{TEAM}", lambda found: '"pending":{}' in found["data"]["ledger"]
        )
        [deletion] = commands("Backup and restore")
        run(system, deletion.partition("\n")[0])
        again = admin.await_object(
            LEDGERS, f"gpu-ledger-{TEAM}", lambda found: '"cores":200' in found["data"]["ledger"]
        )
        assert again["metadata"]["uid"] != counted["metadata"]["uid"]
        rejected = admin.try_create(card_pod("over", TEAM, cards=2))
        assert rejected.status == HTTPStatus.FORBIDDEN
        assert "M40 in namespace team-a, requested: 2 cards, used: 2 (0 pending), limited: 2" in rejected.message


@pytest.mark.one_version
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("plane")
def test_an_upgrade_and_a_rollback_work_while_the_first_jobs_wait_for_their_image(
    admin: Cluster, tmp_path: Path
) -> None:
    """The page's last command, `rollout status`, is left out. Without a kubelet, it would wait forever."""
    [upgrade], rollback = commands("Upgrade with kustomize"), commands("Roll back")
    deletion, application, status = upgrade.replace("\\\n", "").splitlines()
    assert status.startswith("kubectl -n vcuda-quota rollout status ")
    with installed(admin, tmp_path / "system", "scheduler") as (system, _):
        file = tmp_path / "system" / "manifests" / "base" / "kustomization.yaml"
        file.write_text(file.read_text().replace("newTag: 0.1.0", "newTag: another"))
        rejected = kubectl_k(admin, "apply", "--server-side", "--force-conflicts", "-k", system.kustomization)
        for name in FIRST_JOBS:
            assert f'Job.batch "{name}" is invalid: spec.template: ' in rejected.stderr
        run(system, f"{deletion}\n{application}")
        for name in FIRST_JOBS:
            assert container(admin.rest.get(f"{JOBS}/{name}"))["image"] == "vcuda-quota:another"
        # The documented rollback checks out an earlier commit. Instead, the test edits the image in the file.
        (checkout, *again), ledgers = rollback[1].replace("\\\n", "").splitlines(), rollback[2]
        assert (checkout, again) == ("git checkout COMMIT", [deletion, application, status])
        file.write_text(file.read_text().replace("newTag: another", "newTag: 0.1.0"))
        run(system, f"{deletion}\n{application}\n{ledgers}")
        for name in FIRST_JOBS:
            assert container(admin.rest.get(f"{JOBS}/{name}"))["image"] == "vcuda-quota:0.1.0"
        run(system, deletion)  # an apply cannot change the image of an existing Job


_, UNINSTALL, CHECK = commands("Uninstall")
PREPARE, DELETE = UNINSTALL.splitlines()
[WITHOUT_PYTHON] = commands("Uninstall without Python")


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("plane")
@pytest.mark.parametrize(
    "order",
    [(PREPARE, DELETE), (WITHOUT_PYTHON, DELETE), (f"{DELETE} --wait=false", PREPARE, DELETE)],
    ids=["the command first", "without Python", "the objects first"],
)
def test_the_uninstall_blocks_no_pod_and_leaves_nothing(admin: Cluster, tmp_path: Path, order: tuple[str, ...]) -> None:
    """The page's check must also find objects that components created outside our namespaces."""
    first, *others = order
    with installed(admin, tmp_path / "system", "scheduler", "evict-violations") as (system, controller):
        admin.create(card_pod("charged", TEAM))
        await_published(admin, TEAM)
        run(system, first)
        # On a real cluster, the first command also deletes the controller's pod. Here the test must end the controller.
        assert controller.terminate() == 0, controller.output()
        system.balancer.disconnect()
        admin.create(card_pod("goes-on", TEAM, cards=8))
        for command in others:
            run(system, command)
        for command in CHECK.splitlines():
            assert NOTHING in run(system, command), command
        assert {pod["metadata"]["name"] for pod in admin.pods(TEAM)} == {"charged", "goes-on"}
