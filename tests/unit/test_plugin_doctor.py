"""Tests of `kubectl gpuquota doctor`, which checks a whole installation and says what to do about each fault."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from examples.discovery import A100, hami, node
from tests.faults import JOB, expect_fault, findings, removed
from tests.gpuquota import run
from tests.installed import (
    CRON_JOB,
    DEPLOYMENTS,
    LEASE,
    LEDGERS,
    NOW,
    OF_POLICY,
    OF_VALIDATING,
    SYSTEM,
    Installed,
    Json,
    pod,
    spec,
)
from tests.quota_map import QUOTA
from tests.rbac import RBAC
from tests.tables import cases
from vcuda.errors import ApiError, Forbidden, NotFound, Unavailable, VcudaError


@pytest.fixture
def api(installed: Installed) -> Installed:
    return installed


@pytest.mark.usefixtures("api")
def test_a_healthy_installation_has_an_ok_line_for_each_check() -> None:
    assert {each["check"]: (each["state"], each["action"]) for each in findings(0)} == dict.fromkeys(
        (
            *("registration", "webhook", "controller", "rights", "versions", "certificates"),
            *("quota", "namespaces", "models", "nodes", "ledgers"),
        ),
        ("ok", ""),
    )
    shown = run("doctor").stdout
    for text in (
        "24 webhook configurations, policies and bindings are as declared and in effect",
        "all 2 replicas answer, each at its own address",
        "vcuda-controller-0-x leads, and renewed its Lease",
        "tls.crt expires in 89 days",
        "ConfigMap kube-system/gpuquota is in force, last changed at 2026-11-20T10:00:00Z",
        "1 of 5 namespaces are limited",
    ):
        assert text in shown


def served(number: int, page: str, answer: bytes | VcudaError) -> Callable[[Installed], None]:
    return lambda api: api.pages.update({f"{number}/{page}": answer})


def rolled_out(name: str, *conditions: tuple[str, str, str], **status: int) -> Callable[[Installed], None]:
    found = [{"type": kind, "status": state, "message": message} for kind, state, message in conditions]
    return lambda api: api.objects[f"{DEPLOYMENTS}/{name}"]["status"].update(conditions=found, **status)


def stored(name: str, manifest: Json) -> Callable[[Installed], None]:
    return lambda api: api.store_pod(name.rpartition("-")[0], name, manifest)


def waiting(reason: str, message: str) -> Json:
    state = {"waiting": {"reason": reason, "message": message}}
    return pod(phase="Pending", podIP=None, conditions=[], containerStatuses=[{"state": state}])


def account(api: Installed, name: str) -> Json:
    metadata: Json = api.objects[f"{SYSTEM}/serviceaccounts/{name}"]["metadata"]
    return metadata


def set_arguments(api: Installed, *arguments: str) -> None:
    [container] = api.objects[f"{DEPLOYMENTS}/vcuda-webhook"]["spec"]["template"]["spec"]["containers"]
    container["args"] = ["vcuda-webhook", "serve", *arguments]


def reads_quota(api: Installed, place: str) -> None:
    set_arguments(api, f"--quota-configmap={place}")


OF_CERT_MANAGER = {"cert-manager.io/inject-ca-from": "vcuda-quota/ca"}
BAD_IMAGE = waiting("ImagePullBackOff", "no such image")
NO_CLIENT_CERTIFICATE = "the server has asked for the client to provide credentials"
CALL_FAILED = Unavailable('failed calling webhook "config.quota.vcuda.io": connection refused')


@cases(
    "damage, check, text, action",
    policy_deleted=(removed(OF_POLICY), "registration", "ledgers.quota.vcuda.io does not exist", JOB),
    webhook_removed=(lambda api: api.objects[OF_VALIDATING].pop("webhooks"), "registration", "has no webhooks", JOB),
    not_called=(lambda api: setattr(api, "probe", None), "registration", "does not call webhook", "Enable this"),
    not_evaluated=(lambda api: setattr(api, "policy", None), "registration", "does not evaluate", "Enable this"),
    untrusted=(
        lambda api: setattr(api, "probe", ApiError(500, "x509: unknown authority")),
        *("registration", "does not trust the webhook's certificate", JOB),
    ),
    call_fails=(
        lambda api: setattr(api, "probe", CALL_FAILED),
        *("registration", "cannot call the webhook", "describe pods -l app.kubernetes.io/name=vcuda-webhook"),
    ),
    replica_silent=(
        served(1, "readyz", Unavailable("error trying to reach service: connection refused")),
        *("webhook", "pod vcuda-webhook-1 does not answer: error trying to reach service", "describe pods"),
    ),
    replica_not_ready=(
        served(0, "readyz", Unavailable("the quota has not been read yet (HTTP 503)")),
        *("webhook", "pod vcuda-webhook-0 does not answer: the quota has not been read yet", "describe pods"),
    ),
    image_missing=(stored("vcuda-webhook-1", BAD_IMAGE), "webhook", "ImagePullBackOff no such image", "describe pods"),
    replica_missing=(removed(f"{SYSTEM}/pods/vcuda-webhook-1"), "webhook", "1 of 2 pods", "describe deployment"),
    deployment_missing=(removed(f"{DEPLOYMENTS}/vcuda-webhook"), "webhook", "does not exist", "helm upgrade"),
    scaled_to_zero=(
        lambda api: api.objects[f"{DEPLOYMENTS}/vcuda-webhook"]["spec"].update(replicas=0),
        *("webhook", "has 0 replicas", "scale deployment/vcuda-webhook --replicas=3"),
    ),
    controller_scaled_to_zero=(
        lambda api: api.objects[f"{DEPLOYMENTS}/vcuda-controller"]["spec"].update(replicas=0),
        *("controller", "has 0 replicas", "scale deployment/vcuda-controller --replicas=2"),
    ),
    rollout_stuck=(
        rolled_out(
            *("vcuda-webhook", ("Progressing", "True", "progressing"), ("ReplicaFailure", "True", "no PriorityClass")),
            updatedReplicas=0,
        ),
        *("webhook", "0 of 2 pods of Deployment vcuda-webhook have its current template: no PriorityClass"),
        "kubectl -n vcuda-quota describe deployment/vcuda-webhook",
    ),
    rollout_overdue=(
        rolled_out("vcuda-controller", ("Progressing", "False", "has timed out progressing"), updatedReplicas=1),
        *("controller", "1 of 2 pods of Deployment vcuda-controller have its current template: has timed out"),
        "describe deployment/vcuda-controller",
    ),
    rollout_not_begun=(
        rolled_out("vcuda-webhook", observedGeneration=1),
        *("webhook", "the last change of Deployment vcuda-webhook has not been rolled out yet", "describe deployment"),
    ),
    unavailable=(
        rolled_out("vcuda-controller", availableReplicas=1),
        *("controller", "1 of 2 pods of Deployment vcuda-controller are available", "describe deployment"),
    ),
    controller_pending=(
        stored("vcuda-controller-1", waiting("CrashLoopBackOff", "back-off")),
        *("controller", "CrashLoopBackOff", "describe pods -l app.kubernetes.io/name=vcuda-controller"),
    ),
    no_lease=(removed(LEASE), "controller", "no controller holds Lease vcuda-quota/vcuda-controller", "describe pods"),
    old_lease=(lambda api: api.renew_lease(NOW - timedelta(hours=1)), "controller", "has not renewed", "describe pods"),
    no_ledger_rights=(
        removed(f"{RBAC}/namespaces/vcuda-quota-ledgers/rolebindings/vcuda-webhook"),
        *("rights", "vcuda-webhook must be allowed to get, create, update configmaps in namespace vcuda-quota-ledgers"),
        "helm upgrade",
    ),
    no_cluster_rights=(
        removed(f"{RBAC}/clusterrolebindings/vcuda-webhook"),
        *("rights", "ServiceAccount vcuda-webhook must be allowed to list nodes; list pods", "helm upgrade"),
    ),
    no_role=(
        removed(f"{RBAC}/clusterroles/vcuda-controller"),
        *("rights", "ServiceAccount vcuda-controller must be allowed to list pods; patch namespaces", "kubectl apply"),
    ),
    no_lease_rights=(
        removed(f"{RBAC}/namespaces/vcuda-quota/roles/vcuda-controller"),
        *("rights", "update leases in namespace vcuda-quota", "helm upgrade"),
    ),
    no_quota_rights=(
        removed(f"{RBAC}/namespaces/kube-system/rolebindings/vcuda-webhook-quota"),
        *("rights", "list configmaps in namespace kube-system", "helm upgrade"),
    ),
    system_terminating=(
        lambda api: api.label("vcuda-quota", "false", deletionTimestamp="2026-11-20T10:00:00Z"),
        *("rights", "namespace vcuda-quota is being deleted", "kubectl wait --for=delete namespace/vcuda-quota "),
    ),
    service_missing=(
        lambda api: setattr(api, "probe", Unavailable(f'{CALL_FAILED}: service "vcuda-webhook" not found')),
        *("registration", "cannot call the webhook", "Apply the manifests of this release again"),
    ),
    required_too_early=(
        lambda api: setattr(api, "probe", Unavailable(f"failed calling webhook: {NO_CLIENT_CERTIFICATE}")),
        *("registration", f"cannot call the webhook: failed calling webhook: {NO_CLIENT_CERTIFICATE}"),
        'Follow "An API server lacks the client certificate" in docs/troubleshooting.md',
    ),
    no_account=(
        removed(f"{SYSTEM}/serviceaccounts/vcuda-webhook"),
        *("rights", "ServiceAccount vcuda-webhook does not exist, so the API server rejects every request"),
        "helm upgrade. Then restart its pods: kubectl -n vcuda-quota rollout restart deployment/vcuda-webhook",
    ),
    old_tokens=(
        lambda api: account(api, "vcuda-controller").update(creationTimestamp=f"{NOW:%FT%TZ}"),
        *("rights", "vcuda-controller was created again, so tokens of older pods are invalid"),
        "rollout restart deployment/vcuda-controller",
    ),
    no_certs_account=(
        removed(f"{SYSTEM}/serviceaccounts/vcuda-certs"),
        *("rights", "ServiceAccount vcuda-certs does not exist", "helm upgrade"),
    ),
    no_certs_role=(
        removed(f"{RBAC}/namespaces/vcuda-quota/roles/vcuda-certs"),
        *("rights", "vcuda-certs must be allowed to get secrets in namespace vcuda-quota", "helm upgrade"),
    ),
    no_certs_cluster_role=(
        removed(f"{RBAC}/clusterroles/vcuda-certs"),
        *("rights", "vcuda-certs must be allowed to list validatingwebhookconfigurations", "helm upgrade"),
    ),
    ledgers_terminating=(
        lambda api: api.label("vcuda-quota-ledgers", "false", deletionTimestamp="2026-11-20T10:00:00Z"),
        *("ledgers", "namespace vcuda-quota-ledgers is being deleted, so no ledger", "Remove the finalizers"),
    ),
    ledgers_gone=(
        lambda api: (
            [api.remove(path) for path in [*api.objects] if "vcuda-quota-ledgers" in path],
            api.rejected.update({"/namespaces/vcuda-quota-ledgers": NotFound(404, "not found")}),
        ),
        *("ledgers", "namespace vcuda-quota-ledgers does not exist, so no ledger", "helm upgrade"),
    ),
    two_images=(
        stored("vcuda-webhook-1", pod("vcuda-quota:2")),
        *("versions", "pod vcuda-webhook-1 has vcuda-quota:2", "rollout status deployment/vcuda-webhook"),
    ),
    old_cron_job=(
        lambda api: api.objects[CRON_JOB]["spec"]["jobTemplate"]["spec"]["template"].update(spec=spec("vcuda-quota:0")),
        *("versions", "CronJob vcuda-certs has vcuda-quota:0", "rollout status deployment/vcuda-webhook"),
    ),
    malformed=(lambda api: api.quota("{team-a: 8}"), "quota", "is malformed, and the last good", "Correct"),
    no_quota=(
        lambda api: (api.remove(QUOTA), api.label("team-a", "false")),
        *("quota", "no namespace is limited, although these namespaces had limits: team-a", "Create it again. Or: Set"),
    ),
    other_quota=(
        lambda api: reads_quota(api, "kube-system/other"),
        *("quota", "vcuda-webhook uses ConfigMap kube-system/other, and this command reads ConfigMap kube-system/gpu"),
        "chart's value quota.name",
    ),
    unlabelled_quota=(
        lambda api: api.quota("team-a: {quota: {A100: 1}}", labels={}),
        *("quota", "edits are not checked", "kubectl -n kube-system label configmap gpuquota"),
    ),
    older_quota=(
        lambda api: api.serve(1, vcuda_quota_config_valid=0),
        *("quota", "pod vcuda-webhook-1 uses an older quota", "kubectl -n vcuda-quota logs vcuda-webhook-1"),
    ),
    exempt=(lambda api: api.label("team-a", "false"), "namespaces", "exempts them from the quota: team-a", "logs -l"),
    taking_effect=(
        lambda api: api.label("team-a", "taking-effect"),
        *("namespaces", "the quota is not in effect there yet: team-a", "logs -l"),
    ),
    not_exempt=(lambda api: api.label("free", None), "namespaces", "lack the label", "logs -l"),
    no_node=(
        lambda api: api.quota("team-a: {quota: {A100: 1, H100: 1}}"),
        *("models", "no node has GPU model H100", "kubectl gpuquota nodes"),
    ),
    no_model=(
        lambda api: api.store("/api/v1/nodes/h2", node(hami(A100), name="h2")),
        *("nodes", "these GPU nodes have no model: h2", "kubectl label node h2 gaia.tencent.com/gpu-model=MODEL"),
    ),
    scheduler_deployment_deleted=(
        lambda api: set_arguments(api, "--scheduler-name=vcuda-scheduler"),
        *("scheduler", "Deployment vcuda-quota/vcuda-scheduler does not exist", "helm upgrade"),
    ),
)
def test_a_fault_has_one_line_that_says_what_to_do(
    api: Installed, damage: Callable[[Installed], Any], check: str, text: str, action: str
) -> None:
    damage(api)
    expect_fault(check, text, action)


@cases(
    "rejected, checks",
    policies=("/validatingadmissionpolicies/", "registration"),
    pods_proxy=("/proxy/", "webhook"),
    lease=("/leases/", "controller"),
    rights=("/subjectaccessreviews", "rights"),
    accounts=("/serviceaccounts/", "rights certificates"),
    images=("/cronjobs/", "versions certificates"),
    secret=("/secrets/", "certificates"),
)
def test_what_cannot_be_read_is_unknown_and_no_guess_is_shown(api: Installed, rejected: str, checks: str) -> None:
    api.rejected[rejected] = Forbidden(403, "is forbidden: no permission")
    found = [each for each in findings(1) if each["state"] != "ok"]
    assert {(each["check"], each["state"]) for each in found} == {(check, "unknown") for check in checks.split()}
    assert all("no permission" in each["text"] and "this permission" in each["action"] for each in found)


def test_a_replica_that_protects_its_metrics_still_answers(api: Installed) -> None:
    api.pages["0/metrics"] = ApiError(401, "a client certificate is required")
    findings(0)


def test_the_ca_bundle_is_not_blamed_for_an_expired_certificate(api: Installed) -> None:
    api.probe = ApiError(500, "x509: certificate has expired or is not yet valid: current time is after …")
    [found] = [each for each in findings(1) if each["state"] != "ok"]
    assert (found["check"], JOB in found["action"]) == ("registration", True)
    assert found["text"].endswith("cannot be called, because the webhook's certificate has expired")


def test_an_unexplained_failure_of_the_probe_is_unknown(api: Installed) -> None:
    api.probe = Unavailable("etcdserver: request timed out")
    assert [each["check"] for each in findings(1) if each["state"] == "unknown"] == ["registration"]


def test_a_cluster_that_does_not_answer_ends_the_command(api: Installed) -> None:
    api.rejected["/version"] = Unavailable("connection refused")
    told = run("doctor")
    assert (told.exit_code, told.stdout, "connection refused" in told.stderr) == (1, "", True)


@cases(
    "answer, text, action",
    nobody_ready=(Unavailable("not read"), "no ready replica has an earlier quota", "set the failurePolicy to Fail"),
    forbidden=(
        Forbidden(403, "no permission"),
        "ConfigMap kube-system/gpuquota is malformed: ",
        "Correct the document",
    ),
)
def test_the_last_good_quota_is_claimed_only_if_a_replica_is_ready(
    api: Installed, answer: VcudaError, text: str, action: str
) -> None:
    api.quota("{team-a: 8}")
    api.pages |= {f"{number}/readyz": answer for number in range(2)}
    [found] = [each for each in findings(1) if each["check"] == "quota"]
    assert (text in found["text"], action in found["action"], "last good" in found["text"]) == (True, True, False)
    api.pages["1/readyz"] = b"ok"
    [found] = [each for each in findings(1) if each["check"] == "quota"]
    assert "last good quota is in force" in found["text"]


def test_a_label_that_is_wrong_because_of_another_quota_is_not_just_waited_for(api: Installed) -> None:
    reads_quota(api, "kube-system/other")
    api.label("team-a", "false")
    [found] = [each for each in findings(1) if each["check"] == "namespaces"]
    assert ("exempts them" in found["text"], "value quota.name" in found["action"]) == (True, True)


def test_tokens_of_an_account_from_an_hour_ago_have_been_replaced(api: Installed) -> None:
    account(api, "vcuda-webhook")["creationTimestamp"] = f"{NOW - timedelta(hours=2):%FT%TZ}"
    findings(0)


def test_the_teams_of_the_quota_are_named(api: Installed) -> None:
    api.quota('{team-a: {quota: {M40: 8}}, "*": {}}', "vision: {namespaces: ['vision-*'], quota: {M40: 8}}")
    assert any(each["text"].endswith("It limits team vision, team-a, *") for each in findings(1))


def test_without_a_quota_and_ledgers_no_namespace_is_limited_and_nothing_is_wrong(api: Installed) -> None:
    api.remove(QUOTA)
    api.remove(f"{LEDGERS}/gpu-ledger-team-a")
    api.label("team-a", "false")
    [found] = [each for each in findings(0) if each["check"] == "quota"]
    assert "no namespace is limited" in found["text"]
