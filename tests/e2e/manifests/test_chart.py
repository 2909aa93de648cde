"""Tests that install, upgrade, roll back and uninstall a Helm release while pods are created. No object remains."""

import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path

import pytest
import yaml

from tests.builders import MODEL
from tests.e2e.cluster import Cluster
from tests.e2e.installation import SYSTEM_NAMESPACE
from tests.e2e.ledgers import await_published
from tests.e2e.manifests.balancer import balancing
from tests.e2e.manifests.operations import NOTHING, TEAM, apply_again, commands, installed, limit, run
from tests.e2e.manifests.release import Release, empty_cluster
from tests.e2e.manifests.system import NODE, System, kubectl_k, reachable
from tests.e2e.quota_config import QuotaConfigMap
from tests.e2e.steady import creating, share
from tests.helm import templated
from tests.integration.reviews import card_pod
from tests.match_conditions import declared
from tests.processes import SCRIPTS
from tests.rendered import container

DEPLOYMENT = f"/apis/apps/v1/namespaces/{SYSTEM_NAMESPACE}/deployments/vcuda-webhook"
JOBS = f"/apis/batch/v1/namespaces/{SYSTEM_NAMESPACE}/jobs"
REGISTRATION = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/vcuda-quota"
CONTROLLER = DEPLOYMENT.replace("vcuda-webhook", "vcuda-controller")
VERSIONS = pytest.mark.parametrize("name", ["helm", "helm3"])
NAMESPACES = (SYSTEM_NAMESPACE, "vcuda-quota-ledgers", "vcuda-quota-node")
PINNED = "quota.vcuda.io/model"
PACE = 10
"""The number of pods that are created per second."""
MORE = 2 * PACE
"""The number of pods that are created after each change of the Helm release."""


@pytest.fixture
def admin(assets: Path | None, tmp_path: Path) -> Iterator[Cluster]:
    with empty_cluster(assets, tmp_path / "plane") as cluster:
        yield cluster


@pytest.mark.timeout(400)
@VERSIONS
def test_no_create_fails_during_the_life_of_a_release_and_its_uninstall_leaves_nothing(
    admin: Cluster, tmp_path: Path, name: str
) -> None:
    """Only /mutate sets the annotation that every pod must have. So no pod was admitted without the webhook."""
    admin.create_node(NODE, {MODEL: "M40"})
    with balancing() as balancer:
        release = Release(admin, balancer, tmp_path, name)
        told = release.install()
        assert "kubectl -n vcuda-quota rollout status deployment/vcuda-webhook" in told
        with release.system.serving(2), release.system.controller(storable_seconds="2") as controller:
            controller.await_synced()
            limit(admin)
            # Enough for all creates. A pod that is pinned to a model whose quota was just used up would be rejected.
            QuotaConfigMap(admin.rest, "kube-system", "gpuquota").write(f"{TEAM}: {{quota: {{M40: 100}}}}").ok()
            bundles = bundles_of(admin)
            assert all(bundles)
            with creating(admin, TEAM, share, PACE) as creates:
                release.upgrade("image.tag=another", "webhook.replicas=4", "evictViolations.enabled=true")
                creates.await_more(MORE)
                assert bundles_of(admin) == bundles
                release.run("rollback vcuda-quota 1")
                creates.await_more(MORE)
                assert bundles_of(admin) == bundles
            await_published(admin, TEAM)
            models = [pod["metadata"].get("annotations", {}).get(PINNED) for pod in admin.pods(TEAM)]
            assert all(models)
            assert len(models) == creates.succeeded
            balancer.disconnect()
            uninstall(admin, release)


def bundles_of(admin: Cluster) -> list[str]:
    return [hook["clientConfig"].get("caBundle", "") for hook in admin.rest.get(REGISTRATION).get("webhooks", [])]


def uninstall(admin: Cluster, release: Release, namespaces: Sequence[str] = NAMESPACES) -> None:
    """Run the page's uninstall command, act as the kubelet for the hook's Job, and run the page's check."""
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
    """Run the command of the hook's Job with the rights of its account. Set its pod's status to succeeded."""
    path, selector = f"/api/v1/namespaces/{namespace}/pods", "batch.kubernetes.io/job-name=vcuda-uninstall"
    [pod] = admin.await_collection(path, lambda pods: len(pods) == 1, labelSelector=selector)
    account = admin.kubeconfig_for_token(admin.service_account_token(namespace, "vcuda-uninstall"))
    program, *arguments = pod["spec"]["containers"][0]["args"]
    command = (SCRIPTS / program, *arguments, f"--kubeconfig={account}")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    admin.create(card_pod("while-it-is-uninstalled", TEAM, cards=8))
    assert system.cluster.finish_pod(namespace, pod["metadata"]["name"])


@pytest.mark.one_version
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
            rejected = admin.try_create(card_pod("too-many", TEAM, cards=1))
            assert (rejected.status, "exceeded quota" in rejected.message) == (HTTPStatus.FORBIDDEN, True)
            await_published(admin, TEAM)
            ledgers = admin.rest.get("/api/v1/namespaces/gpu-books/configmaps")["items"]
            assert f"gpu-ledger-{TEAM}" in {each["metadata"]["name"] for each in ledgers}
            # The quota entry "*" limits all namespaces without their own entry, except the namespaces of vcuda quota.
            assert not {f"gpu-ledger-{name}" for name in own} & {each["metadata"]["name"] for each in ledgers}
        found = {each["metadata"]["name"] for each in admin.rest.get("/api/v1/namespaces")["items"]}
        assert found & {*own, *NAMESPACES} == {*own}
        balancer.disconnect()
        uninstall(admin, release, own)


@pytest.mark.one_version
def test_a_namespace_of_somebody_else_is_not_taken_over(admin: Cluster, tmp_path: Path) -> None:
    admin.create_namespace("gpu-parts", {"team": "a"})
    with balancing() as balancer:
        release = Release(admin, balancer, tmp_path, "helm")
        done = release.try_run(f"install vcuda-quota {release.chart}", "--set=namespaces.system=gpu-parts")
    assert "namespace gpu-parts exists and does not belong to release vcuda-quota: name another one" in done.stderr
    assert admin.rest.send("GET", "/api/v1/namespaces/vcuda-quota-ledgers").status == HTTPStatus.NOT_FOUND


MISSING = {
    "prometheus.enabled=true": "prometheus.namespace: namespace monitoring does not exist",
    "page.enabled=true,page.ingress.enabled=true,page.ingress.host=gpu.example.com": (
        "page.proxy.namespace: namespace oauth2-proxy does not exist"
    ),
    "quota.namespace=gpu-limits": "quota.namespace: namespace gpu-limits does not exist",
}


@pytest.mark.one_version
def test_a_missing_namespace_is_reported_before_anything_is_applied(admin: Cluster, tmp_path: Path) -> None:
    with balancing() as balancer:
        release = Release(admin, balancer, tmp_path, "helm")
        for settings, told in MISSING.items():
            done = release.try_run(f"install vcuda-quota {release.chart}", f"--set={settings}")
            assert told in done.stderr
    assert admin.rest.send("GET", f"/api/v1/namespaces/{SYSTEM_NAMESPACE}").status == HTTPStatus.NOT_FOUND


@pytest.mark.one_version
def test_an_upgrade_changes_the_images_and_runs_a_new_first_job(admin: Cluster, tmp_path: Path) -> None:
    with balancing() as balancer:
        release = Release(admin, balancer, tmp_path, "helm")
        release.install()
        upgrade, _ = commands("Upgrade with Helm")[0].replace("\\\n", "").replace("NEW", "another").splitlines()
        run(release.system, upgrade)
        assert container(admin.rest.get(DEPLOYMENT))["image"] == "vcuda-quota:another"
        assert container(admin.rest.get(f"{JOBS}/vcuda-certs-first-2"))["image"] == "vcuda-quota:another"
        run(release.system, commands("Roll back")[0])
        assert container(admin.rest.get(DEPLOYMENT))["image"] == "vcuda-quota:0.1.0"


@pytest.mark.one_version
@VERSIONS
def test_a_release_that_kubectl_has_overwritten_is_restored_by_the_documented_command(
    admin: Cluster, tmp_path: Path, name: str
) -> None:
    """A person has run the command for kustomize on an installation with Helm."""
    with balancing() as balancer:
        release = Release(admin, balancer, tmp_path, name)
        release.install("image.repository=registry.example/vcuda-quota", "controller.replicas=3")
        assert image_and_replicas(admin) == ("registry.example/vcuda-quota:0.1.0", 3)
        kubectl_k(admin, "apply", "-k", reachable(tmp_path / "kustomize", (), balancer.port))
        assert image_and_replicas(admin) == ("vcuda-quota:0.1.0", 2)
        plain = release.try_run(f"upgrade vcuda-quota {release.chart}", "--reuse-values")
        assert ('conflict with "kubectl-client-side-apply"' in plain.stderr) == (name == "helm")
        apply_again(release.system)
        assert image_and_replicas(admin) == ("registry.example/vcuda-quota:0.1.0", 3)
        release.upgrade("image.repository=registry.example/vcuda-quota", "image.tag=new")
        run(release.system, commands("Roll back")[0])
        assert image_and_replicas(admin) == ("registry.example/vcuda-quota:0.1.0", 3)


@pytest.mark.one_version
@VERSIONS
def test_certificates_are_rotated_after_an_upgrade_has_labelled_their_objects(
    admin: Cluster, tmp_path: Path, name: str
) -> None:
    """Helm sets the label app.kubernetes.io/managed-by of every object of a release to Helm."""
    with balancing() as balancer:
        release = Release(admin, balancer, tmp_path, name)
        release.install("clientCertificates.enabled=true")
        first = release.system.rotate("vcuda-client-certs-first", timeout="10s")
        assert first.returncode == 0, first.stdout + first.stderr
        release.upgrade("clientCertificates.enabled=true", "controller.replicas=3")
        again = release.system.rotate("vcuda-client-certs-first", timeout="10s")
        assert again.returncode == 0, again.stdout + again.stderr


def image_and_replicas(admin: Cluster) -> tuple[str, int]:
    found = admin.rest.get(CONTROLLER)
    return container(found)["image"], found["spec"]["replicas"]


@pytest.mark.timeout(400)
@VERSIONS
def test_helm_takes_over_an_installation_with_kustomize_without_a_failed_create(
    admin: Cluster, tmp_path: Path, name: str
) -> None:
    """Only /mutate sets the annotation that every pod must have. So no pod was admitted without the webhook."""
    [page] = commands("From kustomize to Helm")
    admin.create_node(NODE, {MODEL: "M40"})
    with installed(admin, tmp_path / "system") as (system, controller):
        (tmp_path / "release").mkdir()
        release = Release(admin, system.balancer, tmp_path / "release", name)
        bundles = bundles_of(admin)
        with creating(admin, TEAM, share, PACE) as creates:
            run(release.system, page)
            creates.await_more(MORE)
        assert bundles_of(admin) == bundles
        assert container(admin.rest.get(CONTROLLER))["image"] == "REGISTRY/vcuda-quota:0.1.0"
        models = [pod["metadata"].get("annotations", {}).get(PINNED) for pod in admin.pods(TEAM)]
        assert all(models)
        assert len(models) == creates.succeeded
        upgrade, _ = commands("Upgrade with Helm")[0].replace("\\\n", "").splitlines()
        run(release.system, upgrade.replace("NEW", "new,controller.replicas=3"))
        assert image_and_replicas(admin) == ("REGISTRY/vcuda-quota:new", 3)
        system.balancer.disconnect()
        controller.terminate()
        uninstall(admin, release)


@pytest.mark.one_version
@VERSIONS
def test_the_webhooks_of_a_chart_that_contained_them_are_registered_again_by_the_job_of_the_upgrade(
    admin: Cluster, tmp_path: Path, name: str
) -> None:
    with balancing() as balancer:
        release = Release(admin, balancer, tmp_path, name)
        file = release.chart / "templates" / "registration.yaml"
        newer = file.read_text()
        objects = [found for found in yaml.safe_load_all(templated(chart=release.chart).stdout) if found]
        older = [found for found in objects if found["kind"].endswith("WebhookConfiguration")]
        file.write_text(yaml.safe_dump_all([{**found, "webhooks": declared(found)} for found in older]))
        release.install()
        assert len(bundles_of(admin)) == 3
        file.write_text(newer)
        release.upgrade()
        assert bundles_of(admin) == []
        with release.system.serving(1):
            assert all(bundles := bundles_of(admin))
            assert len(bundles) == 3
