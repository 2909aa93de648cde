"""Tests that vcuda-certs registers the webhooks only after a replica has answered, and restores changed ones."""

import base64
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path

import pytest
import yaml

from tests.builders import MODEL
from tests.e2e.cluster import Cluster, Json, administering
from tests.e2e.installation import SYSTEM_NAMESPACE
from tests.e2e.ledgers import await_published
from tests.e2e.manifests.operations import EXAMPLE, REGISTERED, TEAM, commands, installed, run
from tests.e2e.manifests.system import CERTIFICATES, NODE, WEBHOOKS, System, applied, apply, kubectl_k, port_of
from tests.e2e.manifests.test_apply import define_kinds_of_others
from tests.e2e.stage import CORE, SERVING_SECRET
from tests.integration.reviews import card_pod, gpu_pod
from tests.match_conditions import declared
from tests.rendered import MANIFESTS, rendered
from tools.control_plane import Settings, running_control_plane
from vcuda.tls import OURS, WRITTEN_BY
from vcuda.x509 import make_authority, make_leaf, service_names

pytestmark = pytest.mark.timeout(240)

ADMISSION = "/apis/admissionregistration.k8s.io/v1"
MUTATING = f"{ADMISSION}/mutatingwebhookconfigurations/00-vcuda-quota"
VALIDATING = f"{ADMISSION}/validatingwebhookconfigurations/vcuda-quota"
NAMES = {
    MUTATING: ["mutate.quota.vcuda.io", "mutate-claims.quota.vcuda.io"],
    VALIDATING: ["validate.quota.vcuda.io", "config.quota.vcuda.io", "validate-claims.quota.vcuda.io"],
}
NOT_YET = "no replica serves a certificate of the CA in the serving Secret yet, so no webhook is registered"


@pytest.fixture
def directory(admin: Cluster, tmp_path: Path) -> Iterator[Path]:
    admin.create_node(NODE, {MODEL: "M40"})
    yield tmp_path
    admin.delete_node(NODE)


def registered(cluster: Cluster) -> Mapping[str, list[str]]:
    return {path: [hook["name"] for hook in hooks(cluster, path)] for path in NAMES}


def hooks(cluster: Cluster, path: str) -> list[Json]:
    found: list[Json] = cluster.rest.get(path).get("webhooks", [])
    return found


def privileged_pod(namespace: str) -> Json:
    pod = gpu_pod("root", namespace, {"cpu": "1"})
    [container] = pod["spec"]["containers"]
    return {**pod, "spec": {**pod["spec"], "containers": [{**container, "securityContext": {"privileged": True}}]}}


def test_no_pod_is_rejected_before_a_replica_has_answered(admin: Cluster, directory: Path) -> None:
    with applied(admin, directory) as system, admin.fresh_namespace() as team:
        for after_certificates in (False, True):
            if after_certificates:
                done = system.rotate(timeout="0s")
                assert (done.returncode, NOT_YET in done.stdout) == (0, True), done.stdout + done.stderr
            assert registered(admin) == {MUTATING: [], VALIDATING: []}
            for namespace in (team, "default"):
                for pod in (card_pod("train", namespace, cards=9), privileged_pod(namespace)):
                    assert admin.try_create(pod, dryRun="All").status == HTTPStatus.CREATED
        with system.serving(1):
            assert registered(admin) == NAMES


@pytest.mark.parametrize("flags", [("--server-side",), ()], ids=["server-side", "client-side"])
def test_an_apply_keeps_the_registered_webhooks_and_a_replace_removes_them_until_the_next_run(
    admin: Cluster, directory: Path, flags: tuple[str, ...]
) -> None:
    with applied(admin, directory) as system, system.serving(1):
        # The first apply may change objects, because it takes over fields from an earlier apply in the other mode
        # (client-side or server-side). The second apply must change nothing.
        apply(admin, system.kustomization, *flags, *(("--force-conflicts",) if flags else ()))
        before = {path: admin.rest.get(path) for path in NAMES}
        apply(admin, system.kustomization, *flags)
        assert {path: admin.rest.get(path) for path in NAMES} == before
        text = kubectl_k(admin, "kustomize", system.kustomization).stdout
        objects = [each for each in yaml.safe_load_all(text) if each["kind"].endswith("WebhookConfiguration")]
        (directory / "registration.yaml").write_text(yaml.safe_dump_all(objects))
        done = kubectl_k(admin, "replace", "-f", directory / "registration.yaml")
        assert done.returncode == 0, done.stderr
        assert registered(admin) == {MUTATING: [], VALIDATING: []}
        system.register()
        assert {path: hooks(admin, path) for path in NAMES} == {
            path: found["webhooks"] for path, found in before.items()
        }


@pytest.mark.one_version
@pytest.mark.parametrize("prepared", [True, False])
def test_webhooks_of_older_manifests_stay_registered_if_the_record_of_the_last_apply_is_removed(
    admin: Cluster, tmp_path: Path, *, prepared: bool
) -> None:
    """Older manifests contained the webhooks, so `kubectl apply` of newer manifests would remove them."""
    with applied(admin, tmp_path) as system:
        declaring = [each for each in system.objects if each["kind"].endswith("WebhookConfiguration")]
        for each in declaring:
            each["webhooks"] = declared(each)
        admin.kubectl("delete", REGISTERED, "-l", "app.kubernetes.io/part-of=vcuda-quota")
        admin.apply(*declaring)
        assert registered(admin) == NAMES
        if prepared:
            [record] = commands("Upgrade from before 24 November 2026")
            run(system, record)
        apply(admin, system.kustomization)
        assert registered(admin) == (NAMES if prepared else {MUTATING: [], VALIDATING: []})
        admin.kubectl("delete", REGISTERED, "-l", "app.kubernetes.io/part-of=vcuda-quota")


def put(admin: Cluster, path: str, field: str, value: object) -> None:
    admin.rest.json_patch(path, [{"op": "add", "path": field, "value": value}])


def _foreign_ca() -> bytes:
    return make_authority(datetime.now(UTC)).certificate_pem()


LOST: dict[str, Callable[[Cluster], object]] = {
    "ValidatingWebhookConfiguration vcuda-quota does not exist": lambda admin: admin.delete(VALIDATING),
    "MutatingWebhookConfiguration 00-vcuda-quota does not exist": lambda admin: admin.delete(MUTATING),
    "ValidatingAdmissionPolicy claims.quota.vcuda.io does not exist": lambda admin: admin.delete(
        f"{ADMISSION}/validatingadmissionpolicies/claims.quota.vcuda.io"
    ),
    "ValidatingAdmissionPolicyBinding in-effect.quota.vcuda.io does not exist": lambda admin: admin.delete(
        f"{ADMISSION}/validatingadmissionpolicybindings/in-effect.quota.vcuda.io"
    ),
    "ValidatingWebhookConfiguration vcuda-quota lacks or changes the webhooks validate.quota.vcuda.io": (
        lambda admin: admin.rest.json_patch(VALIDATING, [{"op": "remove", "path": "/webhooks/0"}])
    ),
    "ValidatingWebhookConfiguration vcuda-quota has webhooks whose caBundles have no common CA": lambda admin: put(
        admin, VALIDATING, "/webhooks/0/clientConfig/caBundle", base64.b64encode(_foreign_ca()).decode()
    ),
    "ValidatingAdmissionPolicy claims.quota.vcuda.io differs from the manifests in validations": lambda admin: put(
        admin,
        f"{ADMISSION}/validatingadmissionpolicies/claims.quota.vcuda.io",
        "/spec/validations/0/expression",
        "true",
    ),
}
"""For each deleted or changed object, the text that reports it."""
FIRST_JOB = f"/apis/batch/v1/namespaces/{SYSTEM_NAMESPACE}/jobs/{CERTIFICATES}"
OFTEN = (
    sys.executable,
    "-c",
    "from controller import cli, registration as r; r.INTERVAL_SECONDS = r.INCOMPLETE_SECONDS = 0.5; cli.main()",
)
"""A controller that checks the registration twice a second instead of once a minute."""


@pytest.mark.one_version
def test_everything_that_is_deleted_or_weakened_of_the_registration_is_reported_until_it_is_restored(
    admin: Cluster, tmp_path: Path
) -> None:
    """The documented commands to restore it are an apply of the manifests, and a run of the CronJob vcuda-certs."""
    with installed(admin, tmp_path / "system", program=OFTEN) as (system, controller):
        for text, delete in LOST.items():

            def reported(use: Json, text: str = text) -> bool:
                return bool(use["unregistered"] == text)

            await_published(admin, TEAM, lambda use: not use["unregistered"])
            kind, name = text.split()[:2]
            assert controller.metric("vcuda_registration_missing", kind=kind, name=name) == 0
            delete(admin)
            await_published(admin, TEAM, reported)
            assert controller.metric("vcuda_registration_missing", kind=kind, name=name) == 1
            shown = run(system, f"kubectl gpuquota -n {TEAM}")
            assert f"{TEAM} (not in effect)" in shown
            assert f"quotas are not in effect: {text}" in shown
            # While this Job runs, nobody needs to do anything. By default, the Job stays until its pods are released.
            admin.rest.send("DELETE", FIRST_JOB, {"propagationPolicy": "Background"})
            found = status(system)
            assert (found.returncode, name in found.stdout) == (1, True), found.stdout
            apply(admin, system.kustomization, "--server-side", "--force-conflicts")
            system.register()
        await_published(admin, TEAM, lambda use: not use["unregistered"])
        assert status(system).returncode == 0, status(system).stdout


@pytest.mark.one_version
def test_disabled_admission_plugins_are_reported_instead_of_a_quota_that_takes_effect_for_ever(
    assets: Path | None, tmp_path: Path
) -> None:
    disabled = ("ValidatingAdmissionPolicy", "ValidatingAdmissionWebhook")
    flags = ("--enable-aggregator-routing=false", f"--disable-admission-plugins={','.join(disabled)}")
    settings = Settings(apiserver_flags=flags, own_identities=True)
    (tmp_path / "system").mkdir()
    with (
        ExitStack() as stack,
        running_control_plane(assets, tmp_path / "control-plane", settings) as plane,
        administering(plane) as admin,
        applied(admin, tmp_path / "system") as system,
        system.controller(OFTEN),
    ):
        # These webhooks never take effect, so they are registered without a wait for that.
        assert system.rotate(timeout="0s").returncode == 0
        webhook = stack.enter_context(system.webhook())
        webhook.await_ready()
        system.balancer.add(port_of(webhook))
        system.renew()
        admin.create_namespace(TEAM)
        admin.kubectl("apply", "-f", str(EXAMPLE))
        texts = [f"AdmissionPlugin {plugin} is disabled" for plugin in disabled]
        await_published(admin, TEAM, lambda use: all(text in use["unregistered"] for text in texts))
        assert f"{TEAM} (not in effect)" in run(system, f"kubectl gpuquota -n {TEAM}")


def status(system: System) -> subprocess.CompletedProcess[str]:
    return system.certs("status", endpoint=f"127.0.0.1:{system.balancer.port}")


def test_the_job_of_a_release_registers_the_webhooks_that_the_release_declares(admin: Cluster, directory: Path) -> None:
    with applied(admin, directory) as system, system.serving(1):
        declare(admin, lambda text: text.replace("timeoutSeconds: 5", "timeoutSeconds: 7"))
        system.register()
        assert {hook["timeoutSeconds"] for hook in hooks(admin, VALIDATING)} == {7}
        assert registered(admin) == NAMES


def test_the_documented_label_lets_the_job_write_secrets_of_an_older_commit(admin: Cluster, directory: Path) -> None:
    [command] = commands("Upgrade from before 30 November 2026")
    with applied(admin, directory) as system, system.serving(1):
        for name in ("vcuda-webhook-ca", "vcuda-webhook-tls"):
            labels = {WRITTEN_BY: None, "app.kubernetes.io/managed-by": OURS}
            admin.rest.merge_patch(f"{CORE}/secrets/{name}", {"metadata": {"labels": labels}})
        done = system.rotate(timeout="0s", endpoint=f"127.0.0.1:{system.balancer.port}")
        assert (done.returncode, "was not created by vcuda-certs" in done.stdout) == (1, True), done.stdout
        run(system, command)
        system.register()


def declare(cluster: Cluster, change: Callable[[str], str]) -> None:
    text = change(cluster.rest.get(VALIDATING)["metadata"]["annotations"][WEBHOOKS])
    cluster.rest.merge_patch(VALIDATING, {"metadata": {"annotations": {WEBHOOKS: text}}})


WRONG = {
    "7": "must be a list of webhooks",
    "[7]": "each webhook must have a name",
    "a: [": "not YAML",
    "[{name: validate.quota.vcuda.io, clientConfig: {url: https://example.com}}]": "must name a Service",
    "[{name: validate.quota.vcuda.io, clientConfig: {service: {namespace: vcuda-quota, name: vcuda-webhook}}}]": (
        "webhooks[0].sideEffects"
    ),
}


def test_a_declaration_that_the_api_server_would_reject_is_named_and_changes_nothing(
    admin: Cluster, directory: Path
) -> None:
    with applied(admin, directory) as system, system.serving(1):
        good = hooks(admin, VALIDATING)
        for text, words in WRONG.items():
            declare(admin, lambda _, text=text: text)  # type: ignore[misc]
            done = system.rotate(timeout="0s", endpoint=f"127.0.0.1:{system.balancer.port}")
            assert (done.returncode, words in done.stdout) == (1, True), done.stdout + done.stderr
            assert f"annotation {WEBHOOKS} of " in done.stdout
            assert hooks(admin, VALIDATING) == good


@pytest.mark.one_version
def test_with_cert_manager_the_webhooks_are_registered_with_its_ca_and_nothing_is_issued(
    admin: Cluster, directory: Path
) -> None:
    define_kinds_of_others(admin, rendered(MANIFESTS / "overlays" / "cert-manager"))
    with applied(admin, directory, "cert-manager") as system:
        done = system.rotate(timeout="0s")
        assert (done.returncode, NOT_YET in done.stdout) == (0, True), done.stdout + done.stderr
        with issued_by_cert_manager(admin) as bundle, system.webhook() as replica:
            replica.await_ready()
            system.balancer.add(port_of(replica))
            system.register()
            assert registered(admin) == NAMES
            assert {hook["clientConfig"]["caBundle"] for path in NAMES for hook in hooks(admin, path)} == {bundle}
            assert "Done: all declared webhooks are registered" in system.renew().stdout
    assert admin.rest.send("GET", f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets/vcuda-webhook-ca").status == (
        HTTPStatus.NOT_FOUND
    )


@contextmanager
def issued_by_cert_manager(cluster: Cluster) -> Iterator[str]:
    """Write the serving Secret as cert-manager does. Yield the CA of its certificate in the form of a caBundle."""
    now = datetime.now(UTC)
    authority = make_authority(now)
    leaf = make_leaf(authority, service_names("vcuda-webhook", SYSTEM_NAMESPACE), now)
    data = {"ca.crt": authority.certificate_pem(), "tls.crt": leaf.certificate_pem(), "tls.key": leaf.key_pem()}
    encoded = {key: base64.b64encode(text).decode() for key, text in data.items()}
    annotations = {"cert-manager.io/certificate-name": "vcuda-webhook"}
    metadata = {"namespace": SYSTEM_NAMESPACE, "name": "vcuda-webhook-tls", "annotations": annotations}
    about = {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls"}
    cluster.create({**about, "metadata": metadata, "data": encoded})
    yield encoded["ca.crt"]
    cluster.delete(SERVING_SECRET)
