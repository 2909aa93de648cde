"""Installs, upgrades, rolls back and uninstalls a Helm release while pods are created. No object remains at the end."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.builders import MODEL
from tests.e2e.cluster import Cluster, administering
from tests.e2e.installation import SYSTEM_NAMESPACE
from tests.e2e.ledgers import await_published
from tests.e2e.manifests.balancer import Balancer, balancing
from tests.e2e.manifests.operations import NOTHING, TEAM, commands, limit, run
from tests.e2e.manifests.system import NODE, System
from tests.e2e.quota_config import QuotaConfigMap
from tests.e2e.steady import creating, share
from tests.helm import CHART, program
from tests.integration.reviews import card_pod
from tests.processes import SCRIPTS
from tests.rendered import container
from tools.control_plane import Settings, running_control_plane

DEPLOYMENT = f"/apis/apps/v1/namespaces/{SYSTEM_NAMESPACE}/deployments/vcuda-webhook"
JOBS = f"/apis/batch/v1/namespaces/{SYSTEM_NAMESPACE}/jobs"
REGISTRATION = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/vcuda-quota"
NAMESPACES = (SYSTEM_NAMESPACE, "vcuda-quota-ledgers", "vcuda-quota-node")
PINNED = "quota.vcuda.io/model"
PACE = 10
"""The number of pods that are created per second."""
MORE = 2 * PACE
"""The number of pods that are created after each change of the Helm release."""


@pytest.fixture
def admin(assets: Path | None, tmp_path: Path) -> Iterator[Cluster]:
    """An empty cluster. Helm does not adopt objects that it did not create, so none may exist."""
    # This flag makes the API server call a Service by its DNS name, which can resolve to this machine.
    settings = Settings(apiserver_flags=("--enable-aggregator-routing=false",), own_identities=True)
    with running_control_plane(assets, tmp_path / "plane", settings) as plane, administering(plane) as cluster:
        yield cluster


class Release:
    """A Helm release of a copy of the chart, whose webhook is called at a port of this machine."""

    def __init__(self, admin: Cluster, balancer: Balancer, directory: Path, name: str) -> None:
        self._admin, self._helm, self._directory = admin, program(name), directory
        self.chart = reachable(directory, balancer.port)
        self.system = System(admin, balancer, directory / "rendered", directory)

    def run(self, command: str, *options: str) -> str:
        done = self.try_run(command, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def try_run(self, command: str, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (self._helm, *command.split(), "--namespace=kube-system", *options),
            env={**os.environ, "KUBECONFIG": str(self._admin.kubeconfig), "HOME": str(self._directory)},
            capture_output=True,
            text=True,
            check=False,
            timeout=110,
        )

    def install(self, *settings: str) -> str:
        told = self.run(f"install vcuda-quota {self.chart}", *(f"--set={each}" for each in settings))
        target = self._directory / "rendered"
        target.mkdir()
        (target / "all.yaml").write_text(self.run("get manifest vcuda-quota"))
        (target / "kustomization.yaml").write_text(json.dumps({"resources": ["all.yaml"]}))
        return told

    def upgrade(self, *settings: str) -> None:
        self.run(f"upgrade vcuda-quota {self.chart}", *(f"--set={each}" for each in settings))


def reachable(directory: Path, port: int) -> Path:
    """Return a copy of the chart whose webhooks are called at ``port`` of this machine.

    See `tests.e2e.manifests.system.reachable`.
    """
    chart = Path(shutil.copytree(CHART, directory / "chart"))
    registration, workloads = (chart / "templates" / f"{name}.yaml" for name in ("registration", "workloads"))
    registration.write_text(registration.read_text().replace("port: 443", f"port: {port}"))
    named = r"(kind: Service\nmetadata:\n(?:  .*\n)*?  name: vcuda-webhook\n(?:  .*\n)*)spec:\n(?:  .*\n)*"
    text, changed = re.subn(
        named, r"\g<1>spec: {type: ExternalName, externalName: localhost}" + "\n", workloads.read_text()
    )
    assert changed == 1
    workloads.write_text(text)
    return chart


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["helm", "helm3"])
def test_no_create_fails_during_the_life_of_a_release_and_its_uninstall_leaves_nothing(
    admin: Cluster, tmp_path: Path, name: str
) -> None:
    """Every pod has the annotation that only /mutate sets. So no pod was admitted without the webhook."""
    admin.create_node(NODE, {MODEL: "M40"})
    with balancing() as balancer:
        release = Release(admin, balancer, tmp_path, name)
        told = release.install()
        assert "kubectl -n vcuda-quota rollout status deployment/vcuda-webhook" in told
        with release.system.serving(2), release.system.controller(storable_seconds="2") as controller:
            controller.await_synced()
            limit(admin)
            bundles = bundles_of(admin)
            assert all(bundles)
            with creating(admin, TEAM, share, PACE) as creates:
                release.upgrade("image.tag=another", "webhook.replicas=4", "enforceAudit.enabled=true")
                creates.await_more(MORE)
                assert bundles_of(admin) == bundles
                release.run("rollback vcuda-quota 1")
                creates.await_more(MORE)
                assert bundles_of(admin) == bundles
            await_published(admin, TEAM)
            models = [pod["metadata"].get("annotations", {}).get(PINNED) for pod in admin.pods(TEAM)]
            assert models == ["M40"] * creates.succeeded
            balancer.disconnect()
            uninstall(admin, release)


def bundles_of(admin: Cluster) -> list[str]:
    return [hook["clientConfig"].get("caBundle", "") for hook in admin.rest.get(REGISTRATION)["webhooks"]]


def uninstall(admin: Cluster, release: Release, namespaces: Sequence[str] = NAMESPACES) -> None:
    """Run the page's uninstall command, and act as the kubelet of the hook's Job. Then run the page's check."""
    command, _, check = commands("Uninstall")
    assert command == "helm uninstall vcuda-quota --namespace kube-system\n"
    with ThreadPoolExecutor(1) as pool:
        typed = pool.submit(release.run, "uninstall vcuda-quota")
        run_hook(admin, release.system, namespaces[0])
        typed.result()
    for namespace in namespaces:
        # No kubelet runs here, so the test itself must delete the pods at once.
        admin.kubectl("delete", "pods", "--all", f"--namespace={namespace}", "--grace-period=0", "--force")
        admin.await_gone("/api/v1/namespaces", namespace)
    for line in check.splitlines():
        assert NOTHING in run(release.system, line), line


def run_hook(admin: Cluster, system: System, namespace: str) -> None:
    """Run the command of the hook's Job with the rights of its account, and set the status of its pod to succeeded."""
    path, selector = f"/api/v1/namespaces/{namespace}/pods", "batch.kubernetes.io/job-name=vcuda-uninstall"
    [pod] = admin.await_collection(path, lambda pods: len(pods) == 1, labelSelector=selector)
    account = admin.kubeconfig_for_token(admin.service_account_token(namespace, "vcuda-uninstall"))
    program, *arguments = pod["spec"]["containers"][0]["args"]
    command = (SCRIPTS / program, *arguments, f"--kubeconfig={account}")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    admin.create(card_pod("while-it-is-uninstalled", TEAM, cards=8))
    assert system.cluster.finish_pod(namespace, pod["metadata"]["name"])


def test_a_release_whose_namespaces_and_quota_are_named_differently_limits_pods_and_leaves_nothing(
    admin: Cluster, tmp_path: Path
) -> None:
    own = ("gpu-parts", "gpu-books", "gpu-agents")
    settings = (f"namespaces.{key}={name}" for key, name in zip(("system", "ledgers", "nodeAgent"), own, strict=True))
    admin.create_node(NODE, {MODEL: "M40"})
    quota = QuotaConfigMap(admin.rest, admin.create_namespace("gpu-limits"), "cards")
    with balancing() as balancer:
        release = Release(admin, balancer, tmp_path, "helm")
        told = release.install(*settings, "quota.namespace=gpu-limits", "quota.name=cards")
        assert "kubectl -n gpu-parts rollout status deployment/vcuda-webhook" in told
        with release.system.serving(2), release.system.controller(storable_seconds="2") as controller:
            controller.await_synced()
            quota.limit(**{TEAM: {"quota": {"M40": 2}}, "*": {"quota": {"M40": 1}}})
            admin.create_namespace(TEAM)
            assert admin.try_create(card_pod("fits", TEAM, cards=2)).status == HTTPStatus.CREATED
            refused = admin.try_create(card_pod("too-many", TEAM, cards=1))
            assert (refused.status, "exceeded quota" in refused.message) == (HTTPStatus.FORBIDDEN, True)
            await_published(admin, TEAM)
            ledgers = admin.rest.get("/api/v1/namespaces/gpu-books/configmaps")["items"]
            assert f"gpu-ledger-{TEAM}" in {each["metadata"]["name"] for each in ledgers}
            # The quota entry "*" limits all namespaces without an entry, except our own namespaces.
            assert not {f"gpu-ledger-{name}" for name in own} & {each["metadata"]["name"] for each in ledgers}
        found = {each["metadata"]["name"] for each in admin.rest.get("/api/v1/namespaces")["items"]}
        assert found & {*own, *NAMESPACES} == {*own}
        balancer.disconnect()
        uninstall(admin, release, own)


def test_a_namespace_of_somebody_else_is_not_taken_over(admin: Cluster, tmp_path: Path) -> None:
    admin.create_namespace("gpu-parts", {"team": "a"})
    with balancing() as balancer:
        release = Release(admin, balancer, tmp_path, "helm")
        done = release.try_run(f"install vcuda-quota {release.chart}", "--set=namespaces.system=gpu-parts")
    assert "namespace gpu-parts exists and does not belong to release vcuda-quota: name another one" in done.stderr
    assert admin.rest.send("GET", "/api/v1/namespaces/vcuda-quota-ledgers").status == HTTPStatus.NOT_FOUND


def test_an_upgrade_changes_the_images_and_runs_a_new_first_job(admin: Cluster, tmp_path: Path) -> None:
    with balancing() as balancer:
        release = Release(admin, balancer, tmp_path, "helm")
        release.install()
        [command] = commands("Upgrade a Helm release")
        typed, _, options = command.strip().replace("NEW", "another").partition(" --namespace kube-system ")
        assert typed == "helm upgrade vcuda-quota manifests/chart"
        release.run(f"upgrade vcuda-quota {release.chart}", *options.split())
        assert container(admin.rest.get(DEPLOYMENT))["image"] == "vcuda-quota:another"
        assert container(admin.rest.get(f"{JOBS}/vcuda-certs-first-2"))["image"] == "vcuda-quota:another"
        release.run("rollback vcuda-quota 1")
        assert container(admin.rest.get(DEPLOYMENT))["image"] == "vcuda-quota:0.1.0"
