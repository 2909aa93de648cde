"""Tests of `kubectl gpuquota doctor` on an installed system, whose pods have addresses as if a kubelet ran them."""

import json
import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.builders import MODEL, POOL
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import ENFORCED, LEASES, SYSTEM_NAMESPACE
from tests.e2e.manifests.balancer import Balancer, balancing
from tests.e2e.manifests.operations import TEAM, commands, installed, run as run_script
from tests.e2e.manifests.system import CLIENT, System, apply
from tests.e2e.stage import delete_pods, own_address
from tests.gpuquota import run
from tests.integration.reviews import card_pod
from tests.processes import ControllerProcess, eventually

pytestmark = [pytest.mark.usefixtures("plane"), pytest.mark.timeout(300), pytest.mark.one_version]

PODS = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/pods"
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{SYSTEM_NAMESPACE}/deployments"
MODELS = ("M40", "P100", "A100")
HTTPS = 8443
OPTIONAL = ("vcuda-scheduler", "vcuda-extender-certs", "vcuda-scheduler-certs")
"""The names of optional parts that an earlier test may have applied to the same cluster."""

Clinic = tuple[System, ControllerProcess, Balancer]


@pytest.fixture(scope="module")
def clinic(admin: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clinic]:
    """A healthy installation, where the doctor finds no fault. The third value is the address of its webhook pods."""
    parts = "deployments,cronjobs,serviceaccounts"
    admin.kubectl("-n", SYSTEM_NAMESPACE, "delete", "--ignore-not-found", parts, *OPTIONAL)
    for model in MODELS:
        admin.create_node(f"doctor-{model.lower()}", {MODEL: model, POOL: "public"}, {"tencent.com/vcuda-core": "800"})
    with (
        installed(admin, tmp_path_factory.mktemp("doctor") / "system", "client-certificates") as (system, controller),
        balancing(own_address(), HTTPS) as pods,
    ):
        for port in system.balancer.endpoints():
            pods.add(port)
        # Pods of an earlier test may be bound to a node that is deleted by now. Kubernetes deletes such pods a minute
        # later, and then a healthy installation would have pods that are not ready.
        delete_pods(admin, SYSTEM_NAMESPACE)
        run_pods(admin)
        yield system, controller, pods
    for model in MODELS:
        admin.delete_node(f"doctor-{model.lower()}")


def run_pods(admin: Cluster) -> None:
    """Set the pods of both Deployments to ready, as a kubelet does, until no pod has an older template.

    All pods have the address of this machine.
    """
    for name in ("vcuda-webhook", "vcuda-controller"):
        eventually(partial(is_rolled_out, admin, name), partial(pods_of, admin, name), timeout=60)


def is_rolled_out(admin: Cluster, name: str) -> bool:
    """Set the pods of the Deployment to ready, and return whether the controller manager has completed its rollout."""
    # The Deployment has minReadySeconds, so a pod is available only if its status says since when it is ready.
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = {"phase": "Running", "podIP": own_address(), "conditions": [ready]}
    pods = pods_of(admin, name)
    for pod in pods:
        if pod["status"]["phase"] != "Running":
            admin.set_pod_status(SYSTEM_NAMESPACE, pod["metadata"]["name"], status)
    deployment = admin.rest.get(f"{DEPLOYMENTS}/{name}")
    told, replicas = deployment["status"], deployment["spec"]["replicas"]
    counts = [len(pods), *(told.get(count) for count in ("replicas", "updatedReplicas", "availableReplicas"))]
    return told.get("observedGeneration") == deployment["metadata"]["generation"] and counts == [replicas] * 4


def pods_of(admin: Cluster, deployment: str) -> list[Json]:
    selector = f"app.kubernetes.io/name={deployment}"
    pods = admin.rest.get(PODS, labelSelector=selector)["items"]
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def doctor(cluster: Cluster) -> tuple[int, dict[str, list[Json]]]:
    """Return the exit status of the command, and the findings that are not ok, by check."""
    path = f"{Path(cluster.kubectl_program).parent}{os.pathsep}{os.environ['PATH']}"
    told = run("--kubeconfig", str(cluster.kubeconfig), "doctor", "-o", "json", env={"PATH": path})
    assert told.exception is None or isinstance(told.exception, SystemExit), told.exception
    found: dict[str, list[Json]] = {}
    for each in json.loads(told.stdout):
        if each["state"] != "ok":
            found.setdefault(each["check"], []).append(each)
    return told.exit_code, found


@contextmanager
def suspended(controller: ControllerProcess) -> Iterator[None]:
    controller.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        controller.process.send_signal(signal.SIGCONT)


def await_healthy(cluster: Cluster) -> None:
    eventually(lambda: doctor(cluster) == (0, {}), lambda: str(doctor(cluster)), timeout=60)


@pytest.mark.usefixtures("clinic")
def test_a_healthy_installation_has_no_findings(admin: Cluster) -> None:
    await_healthy(admin)


def test_replicas_that_do_not_answer_are_named_each_with_the_command_to_look_at_them(
    admin: Cluster, clinic: Clinic
) -> None:
    system, _, pods = clinic
    away = pods.disconnect()
    status, found = doctor(admin)
    assert (status, {*found}) == (1, {"webhook"}), found
    assert [each["state"] for each in found["webhook"]] == ["wrong"] * 3
    assert all("does not answer" in each["text"] and "describe pods" in each["action"] for each in found["webhook"])
    for port in away:
        pods.add(port)
    called = system.balancer.disconnect()
    eventually(lambda: "registration" in doctor(admin)[1])
    [registration] = doctor(admin)[1]["registration"]
    assert "cannot call the webhook" in registration["text"]
    for port in called:
        system.balancer.add(port)
    await_healthy(admin)


def test_a_replica_of_another_image_and_a_pod_that_is_gone_are_found(admin: Cluster, clinic: Clinic) -> None:
    system, _, _ = clinic
    template = {"containers": [{"name": "controller", "image": "vcuda-quota:another"}]}
    admin.rest.send(
        "PATCH",
        f"{DEPLOYMENTS}/vcuda-controller",
        {"spec": {"template": {"spec": template}}},
        content_type="application/strategic-merge-patch+json",
    ).ok()
    _, found = doctor(admin)
    assert any("Deployment vcuda-controller has vcuda-quota:another" in each["text"] for each in found["versions"])
    apply(admin, system.kustomization, "--server-side", "--force-conflicts")
    run_pods(admin)
    await_healthy(admin)


def test_a_deleted_policy_is_found_until_the_manifests_are_applied_again(admin: Cluster, clinic: Clinic) -> None:
    system, _, _ = clinic
    admin.kubectl("delete", "validatingadmissionpolicybinding", "claims.quota.vcuda.io")
    status, found = doctor(admin)
    assert (status, {*found}) == (1, {"registration"}), found
    [finding] = found["registration"]
    assert "ValidatingAdmissionPolicyBinding claims.quota.vcuda.io does not exist" in finding["text"]
    assert "create job --from=cronjob/vcuda-certs" in finding["action"]
    apply(admin, system.kustomization, "--server-side", "--force-conflicts")
    await_healthy(admin)


def test_missing_rights_are_found_until_the_manifests_are_applied_again(admin: Cluster, clinic: Clinic) -> None:
    system, _, _ = clinic
    admin.kubectl("-n", f"{SYSTEM_NAMESPACE}-ledgers", "delete", "rolebinding", "vcuda-webhook")
    admin.kubectl("delete", "clusterrolebinding", "vcuda-webhook")
    eventually(lambda: "list nodes" in str(doctor(admin)[1].get("rights")), lambda: str(doctor(admin)))
    [finding] = doctor(admin)[1]["rights"]
    lacking = "get, create, update configmaps in namespace vcuda-quota-ledgers; list nodes; list pods"
    assert finding["text"] == f"ServiceAccount vcuda-webhook must be allowed to {lacking}"
    apply(admin, system.kustomization, "--server-side", "--force-conflicts")
    await_healthy(admin)


def test_a_cron_job_of_certificates_that_cannot_run_is_found_and_the_command_resumes_it(
    admin: Cluster, clinic: Clinic
) -> None:
    system, _, _ = clinic
    suspend = '{"spec":{"suspend":true}}'
    admin.kubectl("-n", SYSTEM_NAMESPACE, "patch", "cronjob", "vcuda-certs", "-p", suspend)
    [finding] = doctor(admin)[1]["certificates"]
    assert "CronJob vcuda-quota/vcuda-certs is suspended" in finding["text"]
    admin.kubectl(*shlex.split(finding["action"])[1:])
    await_healthy(admin)
    admin.kubectl("-n", SYSTEM_NAMESPACE, "delete", "cronjob,serviceaccount", "vcuda-certs")
    _, found = doctor(admin)
    assert {*found} == {"certificates", "rights"}, found
    assert "ServiceAccount vcuda-certs does not exist" in found["rights"][0]["text"]
    apply(admin, system.kustomization, "--server-side", "--force-conflicts")
    await_healthy(admin)


def test_a_lost_certificate_of_an_optional_part_is_found_until_it_is_renewed(admin: Cluster, clinic: Clinic) -> None:
    system, _, _ = clinic
    secret = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets/{CLIENT}-tls"
    admin.rest.merge_patch(secret, {"data": {"tls.crt": None, "tls.key": None}})
    status, found = doctor(admin)
    assert (status, {*found}) == (1, {"certificates"}), found
    [finding] = found["certificates"]
    assert f"Secret {SYSTEM_NAMESPACE}/{CLIENT}-tls has no tls.crt and no tls.key" in finding["text"]
    assert f"--from=cronjob/{CLIENT}-certs client-certs-now. Then copy it to each API server" in finding["action"]
    # The CronJob runs the same command as this Job.
    renewed = system.rotate(f"{CLIENT}-certs-first", overlap="1s")
    assert renewed.returncode == 0, renewed.stdout + renewed.stderr
    await_healthy(admin)
    admin.kubectl("-n", SYSTEM_NAMESPACE, "delete", "cronjob", f"{CLIENT}-certs")
    [finding] = doctor(admin)[1]["certificates"]
    assert f"CronJob {SYSTEM_NAMESPACE}/{CLIENT}-certs does not exist" in finding["text"]
    apply(admin, system.kustomization, "--server-side", "--force-conflicts")
    await_healthy(admin)


def test_a_stuck_rollout_is_found_with_the_reason_of_kubernetes(admin: Cluster, clinic: Clinic) -> None:
    system, _, _ = clinic
    patch = {"spec": {"template": {"spec": {"priorityClassName": "nope"}}}}
    for name in ("vcuda-webhook", "vcuda-controller"):
        admin.rest.merge_patch(f"{DEPLOYMENTS}/{name}", patch)
    eventually(lambda: str(doctor(admin)).count("no PriorityClass with name nope") == 2, timeout=60)
    removal = [{"op": "remove", "path": "/spec/template/spec/priorityClassName"}]
    for name in ("vcuda-webhook", "vcuda-controller"):
        admin.rest.json_patch(f"{DEPLOYMENTS}/{name}", removal)
    apply(admin, system.kustomization, "--server-side", "--force-conflicts")
    run_pods(admin)
    await_healthy(admin)


def test_a_namespace_of_ledgers_that_is_being_deleted_is_found_and_the_page_s_commands_repair_it(
    admin: Cluster, clinic: Clinic
) -> None:
    system, _, _ = clinic
    namespace = f"{SYSTEM_NAMESPACE}-ledgers"
    admin.create(card_pod("charged", TEAM))
    eventually(lambda: admin.kubectl("-n", namespace, "get", "configmap", f"gpu-ledger-{TEAM}"))
    admin.kubectl("delete", "namespace", namespace, "--wait=false")
    [finding] = doctor(admin)[1]["ledgers"]
    assert f"namespace {namespace} is being deleted, so no ledger can be created" in finding["text"]
    [repair] = commands("The namespace of the ledgers is being deleted")
    run_script(system, repair)
    [finding] = doctor(admin)[1]["ledgers"]
    assert f"namespace {namespace} does not exist" in finding["text"]
    apply(admin, system.kustomization, "--server-side", "--force-conflicts")
    await_healthy(admin)
    admin.create(card_pod("next", TEAM))


def test_a_namespace_that_the_quota_does_not_reach_and_an_old_lease_are_found(admin: Cluster, clinic: Clinic) -> None:
    _, controller, _ = clinic
    lease = f"{LEASES}/vcuda-controller"
    with suspended(controller):
        admin.kubectl("label", "namespace", TEAM, f"{ENFORCED}=false")
        admin.rest.merge_patch(lease, {"spec": {"renewTime": "2026-01-01T00:00:00.000000Z"}})
        status, found = doctor(admin)
        assert (status, {*found} - {"registration"}) == (1, {"namespaces", "controller"}), found
        assert f"exempts them from the quota: {TEAM}" in found["namespaces"][0]["text"]
        assert "has not renewed its Lease since 2026-01-01T00:00:00Z" in found["controller"][0]["text"]
    await_healthy(admin)


@pytest.mark.usefixtures("clinic")
def test_a_user_without_permissions_gets_no_guess(admin: Cluster) -> None:
    admin.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "nobody", "namespace": TEAM}})
    kubeconfig = admin.kubeconfig_for_token(admin.service_account_token(TEAM, "nobody"))
    told = run("--kubeconfig", str(kubeconfig), "doctor", "-o", "json")
    assert (told.exit_code, {each["state"] for each in json.loads(told.stdout)}) == (1, {"unknown"})
