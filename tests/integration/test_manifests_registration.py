"""Tests of the webhook registrations in the manifests, and of the certificates that they need."""

from pathlib import Path

import pytest

from certs.client import client as certs_client
from certs.parsing import CLIENT_CA_KEY
from controller.recount.labels import PROBE_POLICY
from tests import rendered as manifests
from tests.integration.overlays import every_overlay, flags
from tests.rendered import BASE, Json, composed, container, label, one, overlay_of, pod_spec, rendered
from vcuda.registration import PROBE
from vcuda.tls import OURS, WRITTEN_BY

pytestmark = pytest.mark.slow

GITOPS = {
    "argocd.argoproj.io/hook": "Sync",
    "kustomize.toolkit.fluxcd.io/force": "enabled",
    "helm.toolkit.fluxcd.io/driftDetection": "disabled",
}


def test_the_webhook_is_called_for_all_namespaces_except_system_own_and_exempt_ones(base: list[Json]) -> None:
    """The policy shows the controller where the webhook is called, so both must select the same namespaces."""
    own = [each["metadata"]["name"] for each in base if each["kind"] == "Namespace"]
    left_out = {"kubernetes.io/metadata.name": ["kube-system", *own], "quota.vcuda.io/enforced": ["false"]}
    selector = {"matchExpressions": [{"key": k, "operator": "NotIn", "values": v} for k, v in left_out.items()]}
    for name in ("mutate.quota.vcuda.io", "validate.quota.vcuda.io"):
        assert manifests.webhooks(base)[name]["namespaceSelector"] == selector
    policy = one(base, "ValidatingAdmissionPolicy", PROBE_POLICY)["spec"]["matchConstraints"]
    assert policy["namespaceSelector"] == selector
    assert [rule["resourceNames"] for rule in policy["resourceRules"]] == [[PROBE]]


@every_overlay
def test_no_label_exempts_a_pod_and_no_overlay_changes_the_reviewed_pods(overlay: Path) -> None:
    hooks, base = manifests.webhooks(rendered(overlay)), manifests.webhooks(rendered(BASE))
    for name in ("mutate.quota.vcuda.io", "validate.quota.vcuda.io"):
        assert "objectSelector" not in hooks[name]
        assert hooks[name]["matchConditions"] == base[name]["matchConditions"]


@every_overlay
def test_validating_webhooks_fail_closed_and_mutating_ones_are_optional(overlay: Path) -> None:
    hooks = manifests.webhooks(rendered(overlay))
    policies = {name: hook["failurePolicy"] for name, hook in hooks.items()}
    assert policies == {
        "mutate.quota.vcuda.io": "Ignore",
        "mutate-claims.quota.vcuda.io": "Ignore",
        "validate.quota.vcuda.io": "Fail",
        "validate-claims.quota.vcuda.io": "Fail",
        "config.quota.vcuda.io": "Fail",
    }
    assert {hook["timeoutSeconds"] for hook in hooks.values()} == {5}
    assert {hook["sideEffects"] for hook in hooks.values()} == {"NoneOnDryRun"}
    assert hooks["mutate.quota.vcuda.io"]["reinvocationPolicy"] == "IfNeeded"


def test_the_webhook_is_called_only_for_configmaps_with_the_label(base: list[Json]) -> None:
    hook = manifests.webhooks(base)["config.quota.vcuda.io"]
    assert hook["objectSelector"] == {"matchLabels": {"quota.vcuda.io/config": "true"}}


@every_overlay
def test_an_apply_does_not_change_the_ca_bundles(overlay: Path) -> None:
    assert all("caBundle" not in hook["clientConfig"] for hook in manifests.webhooks(rendered(overlay)).values())


def test_the_rotation_finds_the_configurations_the_service_and_the_secret(base: list[Json]) -> None:
    """The pods of the Job and the CronJob differ in one point: the Job waits longer for a webhook replica."""
    job, cron_job = one(base, "Job", "vcuda-certs-first"), one(base, "CronJob", "vcuda-certs")
    waits = container(job)["args"].pop()
    assert waits == "--timeout=25m"
    assert pod_spec(job) == pod_spec(cron_job)
    found = flags(job)
    for each in base:
        if each["kind"].endswith("WebhookConfiguration"):
            assert found["selector"].items() <= each["metadata"]["labels"].items()
    service = one(base, "Service", str(found["service"]))
    assert service["metadata"]["namespace"] == found["namespace"]
    assert [port["name"] for port in service["spec"]["ports"]] == [found["port_name"]]
    [volume] = pod_spec(one(base, "Deployment", "vcuda-webhook"))["volumes"]
    assert volume["secret"]["secretName"] == found["serving_secret"]
    assert volume["secret"]["optional"] is False
    for hook in manifests.webhooks(base).values():
        called = hook["clientConfig"]["service"]
        assert (called["namespace"], called["name"]) == (found["namespace"], found["service"])
        assert called["port"] == service["spec"]["ports"][0]["port"]


def test_gitops_tools_report_no_first_job_as_missing_and_replace_it_when_its_image_changes(tmp_path: Path) -> None:
    """Kubernetes deletes the first Jobs when they have finished, and permits no change of their image."""
    components = ["scheduler", "client-certificates"]
    jobs = [each for each in rendered(composed(tmp_path, components)) if each["kind"] == "Job"]
    assert len(jobs) == 4
    for job in jobs:
        assert job["metadata"]["annotations"].items() >= GITOPS.items(), label(job)


def test_the_extenders_rotation_requires_no_configuration() -> None:
    """The extender has no webhook configuration, because the scheduler reads the extender's CA from a file."""
    objects = overlay_of("scheduler")
    for kind, name in (("CronJob", "vcuda-extender-certs"), ("Job", "vcuda-extender-certs-first")):
        assert flags(one(objects, kind, name))["unregistered"] is True
    assert not [
        hook
        for hook in manifests.webhooks(objects).values()
        if hook["clientConfig"]["service"]["name"] == "vcuda-extender"
    ]


def test_the_client_certificate_is_issued_with_rights_for_its_names_only(tmp_path: Path) -> None:
    """The manifests create empty Secrets and an empty ConfigMap, so the ServiceAccount needs no right to create any."""
    objects = rendered(composed(tmp_path, ["client-certificates"]))
    job, cron_job = one(objects, "Job", "vcuda-client-certs-first"), one(objects, "CronJob", "vcuda-client-certs")
    assert pod_spec(job) == pod_spec(cron_job)
    program, group, command, *rest = container(job)["args"]
    assert (program, group) == ("vcuda-certs", "client")
    found = certs_client.commands[command].make_context(command, rest).params
    rules = one(objects, "Role", "vcuda-client-certs")["rules"]
    names = {"Secret": [found["ca_secret"], found["secret"]], "ConfigMap": [found["configmap"]]}
    assert [rule["resourceNames"] for rule in rules] == [*names.values()]
    assert {verb for rule in rules for verb in rule["verbs"]} == {"get", "patch"}
    for written in (one(objects, kind, name) for kind in names for name in names[kind]):
        assert written["metadata"]["labels"].items() >= {WRITTEN_BY: OURS}.items()
        assert "data" not in written


def test_the_webhook_uses_the_cas_that_the_rotation_publishes_and_the_name_that_it_issues(tmp_path: Path) -> None:
    objects = rendered(composed(tmp_path, ["client-certificates", "require-client-certificate"]))
    webhook = one(objects, "Deployment", "vcuda-webhook")
    issued = certs_client.commands["rotate"].make_context("rotate", []).params
    mounts = {each["name"]: each["mountPath"] for each in container(webhook)["volumeMounts"]}
    config_maps = {each.get("configMap", {}).get("name"): each["name"] for each in pod_spec(webhook)["volumes"]}
    path = mounts[config_maps[issued["configmap"]]]
    args = container(webhook)["args"]
    assert f"--client-ca={path}/{CLIENT_CA_KEY}" in args
    assert f"--client-name={issued['name']}" in args
