"""What docs/operations.md has operators type, typed as it stands there."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.installation import SYSTEM_NAMESPACE, await_enforced, await_published, ledger_path
from tests.e2e.manifests.system import System, applied, kubectl_k
from tests.integration.reviews import card_pod
from tests.kubectl import kubectl
from tests.processes import ControllerProcess
from tests.rendered import MANIFESTS, container

TEAM = "team-a"
OPERATIONS = MANIFESTS.parent / "docs" / "operations.md"
JOBS = f"/apis/batch/v1/namespaces/{SYSTEM_NAMESPACE}/jobs"
FIRST_JOBS = ("vcuda-certs-first", "vcuda-extender-certs-first", "vcuda-scheduler-certs-first")
NOTHING = "No resources found"


def commands(heading: str) -> list[str]:
    section = OPERATIONS.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def run(system: System, script: str) -> str:
    """Run the commands with a shell, for the directory that was applied; what they print."""
    kubectl()  # there is one, or this is skipped
    system.directory.mkdir(exist_ok=True)
    home = {"HOME": str(system.directory), "KUBECONFIG": str(system.cluster.kubeconfig)}
    typed = script.replace("manifests/base", str(system.kustomization))
    done = subprocess.run(
        ("sh", "-ec", typed),
        cwd=system.directory,
        env={**os.environ, **home},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextmanager
def installed(admin: Cluster, directory: Path, *components: str) -> Iterator[tuple[System, ControllerProcess]]:
    """Everything applied and running, with the example's quota in force in a fresh namespace of its own."""
    directory.mkdir()
    registered = "mutatingwebhookconfigurations,validatingwebhookconfigurations"
    admin.kubectl("delete", registered, "-l", "app.kubernetes.io/part-of=vcuda-quota")  # with the CA of an earlier one
    with applied(admin, directory, *components) as system, system.serving(1), system.controller() as controller:
        controller.await_synced()
        admin.create_namespace(TEAM)
        try:
            await_enforced(admin, TEAM, enforced=False)
            admin.kubectl("apply", "-f", str(MANIFESTS / "examples" / "gpuquota.yaml"))
            await_enforced(admin, TEAM)
            yield system, controller
        finally:
            admin.kubectl("delete", "configmap", "gpuquota", "-n", "kube-system", "--ignore-not-found")
            admin.delete_namespace(TEAM)
            admin.await_gone("/api/v1/namespaces", TEAM)


@pytest.mark.usefixtures("plane")
def test_ledgers_that_are_deleted_come_back_from_the_pods_and_hold_the_quota(admin: Cluster, tmp_path: Path) -> None:
    with installed(admin, tmp_path / "system") as (system, _):
        admin.create(card_pod("first", TEAM))
        admin.create(card_pod("second", TEAM))
        collection, _, name = ledger_path(TEAM).rpartition("/")
        counted = admin.await_object(collection, name, lambda found: '"pending":{}' in found["data"]["ledger"])
        [deletion] = commands("Backup and restore")
        run(system, deletion.partition("\n")[0])
        again = admin.await_object(collection, name, lambda found: '"cores":200' in found["data"]["ledger"])
        assert again["metadata"]["uid"] != counted["metadata"]["uid"]
        refused = admin.try_create(card_pod("over", TEAM, cards=2))
        assert refused.status == HTTPStatus.FORBIDDEN
        assert "M40 in namespace team-a, requested: 2 cards, used: 2 (0 pending), limited: 2" in refused.message


@pytest.mark.usefixtures("plane")
def test_an_upgrade_to_another_image_goes_through_while_the_first_jobs_still_wait_for_theirs(
    admin: Cluster, tmp_path: Path
) -> None:
    """As no kubelet runs here, they never end, and `rollout status`, the last command, would wait for ever."""
    [upgrade] = commands("Upgrade")
    deletion, application, status = upgrade.replace("\\\n", "").splitlines()
    assert status.startswith("kubectl -n vcuda-quota rollout status ")
    with applied(admin, tmp_path / "system", "scheduler") as system:
        file = tmp_path / "system" / "manifests" / "base" / "kustomization.yaml"
        file.write_text(file.read_text().replace("newTag: 0.1.0", "newTag: another"))
        refused = kubectl_k(admin, "apply", "--server-side", "--force-conflicts", "-k", system.kustomization)
        for name in FIRST_JOBS:
            assert f'Job.batch "{name}" is invalid: spec.template: ' in refused.stderr
        run(system, f"{deletion}\n{application}")
        for name in FIRST_JOBS:
            assert container(admin.rest.get(f"{JOBS}/{name}"))["image"] == "vcuda-quota:another"
        run(system, deletion)  # with this image they would be in the way of whoever applies the manifests next


@pytest.mark.usefixtures("plane")
def test_the_uninstall_stops_nobody_on_its_way_and_leaves_nothing(admin: Cluster, tmp_path: Path) -> None:
    """Once the first command is through, no webhook is needed to create a pod; the rest goes with its controller.

    With the components that bring objects outside our own namespaces: the check has to see these too.
    """
    uninstall, check, _ = commands("Uninstall")
    first, second, third = re.split(r"^(?=# [23]\.)", uninstall, flags=re.MULTILINE)
    with installed(admin, tmp_path / "system", "scheduler", "enforce-audit") as (system, controller):
        admin.create(card_pod("charged", TEAM))
        await_published(admin, TEAM)
        run(system, first)
        for port in system.balancer.endpoints():
            system.balancer.remove(port)
        system.balancer.hang_up()
        admin.create(card_pod("goes-on", TEAM, cards=8))
        run(system, second)
        assert (system.directory / "gpuquota-kept.yaml").stat().st_size
        assert controller.terminate() == 0, controller.output()
        run(system, third)
        for command in check.splitlines():
            assert NOTHING in run(system, command), command
        assert {pod["metadata"]["name"] for pod in admin.pods(TEAM)} == {"charged", "goes-on"}
