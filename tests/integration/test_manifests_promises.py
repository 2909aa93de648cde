"""Properties of the manifests on which a platform team relies.

They are few rights, memory limits, consistent timeouts, and no effect on namespaces without a quota.
"""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import pytest
import yaml

from certs.cli import main as certs_cli
from certs.client import client as certs_client
from certs.parsing import CLIENT_CA_KEY, MANAGED_BY, OURS
from controller.cli import main as controller_cli
from controller.garbage.node.names import VM_DIRECTORIES
from controller.settle.labels import PROBE, PROBE_POLICY
from tests import rendered as manifests
from tests.kubectl import kubectl
from tests.pod_security import offences
from tests.rendered import (
    BASE,
    EVERY,
    Json,
    composed,
    container,
    label,
    one,
    ours,
    overlay_of,
    pod_spec,
    pod_specs,
    rendered,
)
from vcuda import __version__
from vcuda.quota.model import LEDGER_NAMESPACE
from vcuda.requests.schemes import SCHEMES
from vcuda.x509 import service_names
from webhook.cli import main as webhook_cli

PROGRAMS = {"vcuda-webhook": webhook_cli, "vcuda-controller": controller_cli, "vcuda-certs": certs_cli}
GUNICORN_GRACE = 10
"""Seconds for which the server still waits for requests in progress after --drain-seconds. See
`webhook.server.server`.
"""

every_overlay = pytest.mark.parametrize("overlay", EVERY, ids=lambda overlay: overlay.name)


@pytest.fixture
def base() -> list[Json]:
    return rendered(BASE)


def flags(workload: Json) -> dict[str, object]:
    """Parse the arguments of a container with the command line of our program. Raises UsageError if a flag
    is unknown.
    """
    # In a cluster, kubelet replaces the variables of the downward API in the arguments. Here the test replaces them.
    program, command, *rest = [each.replace("$(POD_IP)", "192.0.2.1") for each in container(workload)["args"]]
    group = PROGRAMS[program]
    assert isinstance(group, click.Group)
    named = group.commands[command]
    if isinstance(named, click.Group):
        command, *rest = rest
        named = named.commands[command]
    return dict(named.make_context(command, rest).params)


@every_overlay
def test_our_programs_accept_the_flags_of_the_manifests(overlay: Path) -> None:
    workloads = ours(rendered(overlay))
    assert {label(workload) for workload in workloads} >= {"Deployment/vcuda-webhook", "Deployment/vcuda-controller"}
    assert all(flags(workload) for workload in workloads)


@every_overlay
def test_every_image_of_ours_is_of_this_version(overlay: Path) -> None:
    assert {container(workload)["image"] for workload in ours(rendered(overlay))} == {f"vcuda-quota:{__version__}"}


# Tests of the pods' rights, and of their Pod Security levels


@every_overlay
def test_pods_and_their_namespace_are_restricted_except_the_node_agent(overlay: Path) -> None:
    objects = rendered(overlay)
    levels = {
        each["metadata"]["name"]: each["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        for each in objects
        if each["kind"] == "Namespace"
    }
    restricted = dict.fromkeys((manifests.SYSTEM_NAMESPACE, LEDGER_NAMESPACE), "restricted")
    assert levels == {**restricted, manifests.NODE_NAMESPACE: "privileged"}
    for workload, spec in pod_specs(objects):
        if workload["metadata"]["namespace"] == manifests.SYSTEM_NAMESPACE:
            assert offences(spec) == set(), label(workload)


AGENTS = {
    "gpu-manager": ("vcuda-node-gpu-manager", {"nvidia-device-enable": "enable"}),
    "nvidia-vcuda": ("vcuda-node-nvidia-gpu-manager", {"nvidia-device-enable": "enable"}),
    "hami": ("vcuda-node-hami", {"gpu": "on"}),
    "vgpu-manager": ("vcuda-node-vgpu-manager", {"vgpu-manager-enable": "enable"}),
}
"""For each scheme (the resource names of one vendor), the DaemonSet of its node agent.

Each has the node label by which the vendor's own DaemonSet selects nodes.
"""

every_agent = pytest.mark.parametrize("scheme", AGENTS)


def test_every_scheme_with_directories_has_a_node_agent() -> None:
    assert AGENTS.keys() == VM_DIRECTORIES.keys() == {each.name for each in SCHEMES if each.pod_directory}


@pytest.fixture
def with_agent(scheme: str, tmp_path: Path) -> list[Json]:
    """Return the objects of the base with the node agent of this scheme (the resource names of one vendor)."""
    return rendered(composed(tmp_path, [f"node-agent-{scheme}"]))


def in_the_namespace_of_agents(objects: Sequence[Json]) -> set[str]:
    return {label(each) for each in objects if each["metadata"].get("namespace") == manifests.NODE_NAMESPACE}


def test_the_base_has_no_node_agent_and_keeps_its_namespace_from_tenants(base: list[Json]) -> None:
    assert in_the_namespace_of_agents(base) == {
        "NetworkPolicy/vcuda-node",
        "ResourceQuota/vcuda-quota-node-critical-pods",
    }


@every_agent
def test_the_namespace_that_admits_privileged_pods_has_only_the_node_agent(
    with_agent: list[Json], base: list[Json]
) -> None:
    added = in_the_namespace_of_agents(with_agent) - in_the_namespace_of_agents(base)
    assert {each.partition("/")[0] for each in added} == {"DaemonSet", "ServiceAccount"}


@every_agent
def test_the_node_agent_runs_on_the_nodes_of_its_vendor(scheme: str, with_agent: list[Json]) -> None:
    name, selector = AGENTS[scheme]
    daemon_set = one(with_agent, "DaemonSet", name)
    assert flags(daemon_set)["scheme"] == scheme
    assert pod_spec(daemon_set)["nodeSelector"] == selector
    found = daemon_set["spec"]["selector"]["matchLabels"]
    assert found.items() <= daemon_set["spec"]["template"]["metadata"]["labels"].items()


def test_the_node_agents_of_two_vendors_can_be_combined_unless_they_use_one_directory(tmp_path: Path) -> None:
    separate = ["node-agent-gpu-manager", "node-agent-hami", "node-agent-vgpu-manager"]
    objects = rendered(composed(tmp_path / "separate", separate))
    selectors = [each["spec"]["selector"]["matchLabels"] for each in objects if each["kind"] == "DaemonSet"]
    assert len({tuple(each.items()) for each in selectors}) == len(separate)
    same = composed(tmp_path / "same", ["node-agent-gpu-manager", "node-agent-nvidia-vcuda"])
    done = subprocess.run((kubectl(), "kustomize", same), capture_output=True, text=True, check=False, timeout=60)
    assert "may not add resource with an already registered id: ServiceAccount" in done.stderr


@every_agent
def test_the_node_agent_is_exempt_only_for_host_directories_and_running_as_root(
    scheme: str, with_agent: list[Json]
) -> None:
    spec = pod_spec(one(with_agent, "DaemonSet", AGENTS[scheme][0]))
    capabilities = {"capabilities.add DAC_OVERRIDE", "capabilities.add FOWNER"}
    assert offences(spec) == {"hostPath", "runAsNonRoot", "runAsUser"} | capabilities


@every_agent
def test_the_node_agent_writes_only_to_the_directory_of_its_scheme(scheme: str, with_agent: list[Json]) -> None:
    daemon_set = one(with_agent, "DaemonSet", AGENTS[scheme][0])
    paths = {each["name"]: each["hostPath"]["path"] for each in pod_spec(daemon_set)["volumes"]}
    mounts = container(daemon_set)["volumeMounts"]
    assert {paths[each["name"]] for each in mounts} == set(paths.values())
    assert [each["mountPath"] for each in mounts] == [paths[each["name"]] for each in mounts]
    assert [each["mountPath"] for each in mounts if not each.get("readOnly")] == [VM_DIRECTORIES[scheme].root]
    assert {each["mountPropagation"] for each in mounts} == {"HostToContainer"}


@every_overlay
def test_root_filesystems_are_read_only_and_only_memory_is_limited(overlay: Path) -> None:
    for workload in ours(rendered(overlay)):
        found = container(workload)
        assert found["securityContext"]["readOnlyRootFilesystem"] is True, label(workload)
        assert found["resources"]["limits"].keys() == {"memory"}, label(workload)
        assert found["resources"]["requests"].keys() == {"cpu", "memory"}, label(workload)


@every_overlay
def test_no_variable_of_a_service_can_set_a_flag(overlay: Path) -> None:
    assert all(spec["enableServiceLinks"] is False for _, spec in pod_specs(rendered(overlay)))


# Tests of updates, drains and restarts of the webhook's replicas


def test_a_replica_ends_only_after_every_client_has_left_it_and_in_time(base: list[Json]) -> None:
    """A webhook replica is deleted. Its preStop hook, drain and requests in progress all end before the kubelet kills
    it.

    The drain lasts longer than the readiness probe needs to fail. So every load balancer that uses readiness has
    removed the replica by then.
    """
    webhook = one(base, "Deployment", "vcuda-webhook")
    program, seconds = container(webhook)["lifecycle"]["preStop"]["exec"]["command"]
    drain, probe = flags(webhook)["drain_seconds"], container(webhook)["readinessProbe"]
    assert isinstance(drain, float)
    assert program == "sleep"
    assert int(seconds) + drain + drain + GUNICORN_GRACE < pod_spec(webhook)["terminationGracePeriodSeconds"]
    assert probe["periodSeconds"] * probe["failureThreshold"] < drain


@pytest.mark.parametrize(("name", "replicas"), [("vcuda-webhook", 3), ("vcuda-controller", 2)])
def test_replicas_are_spread_preferred_and_drained_one_by_one(base: list[Json], name: str, replicas: int) -> None:
    deployment = one(base, "Deployment", name)
    spec = pod_spec(deployment)
    own = {"matchLabels": deployment["spec"]["selector"]["matchLabels"]}
    assert deployment["spec"]["replicas"] == replicas
    assert spec["priorityClassName"] == "system-cluster-critical"
    assert {each["topologyKey"] for each in spec["topologySpreadConstraints"]} >= {"kubernetes.io/hostname"}
    assert all(each["labelSelector"] == own for each in spec["topologySpreadConstraints"])
    budget = one(base, "PodDisruptionBudget", name)["spec"]
    assert (budget["maxUnavailable"], budget["selector"]) == (1, own)


@every_overlay
def test_there_is_no_own_priority_class_and_the_systems_classes_are_permitted(overlay: Path) -> None:
    """The manifests have no priority class of their own. They have ResourceQuotas that permit the system's classes.

    A cluster may permit these classes only in namespaces with such a ResourceQuota.
    """
    found = rendered(overlay)
    assert not [each for each in found if each["kind"] == "PriorityClass"]
    allowed = set()
    for quota in (each for each in found if each["kind"] == "ResourceQuota"):
        [scope] = quota["spec"]["scopeSelector"]["matchExpressions"]
        allowed |= {(quota["metadata"]["namespace"], value) for value in scope["values"]}
    for each, spec in pod_specs(found):
        assert (each["metadata"]["namespace"], spec.get("priorityClassName")) in allowed, label(each)


def test_an_update_stops_no_replica_before_a_new_one_is_ready(base: list[Json]) -> None:
    update = one(base, "Deployment", "vcuda-webhook")["spec"]["strategy"]["rollingUpdate"]
    assert (update["maxSurge"], update["maxUnavailable"]) == (1, 0)


def test_every_selector_matches_its_pods(base: list[Json]) -> None:
    labels = {
        label(workload): workload["spec"]["template"]["metadata"]["labels"]
        for workload, _ in pod_specs(base)
        if workload["kind"] in ("Deployment", "DaemonSet")
    }
    selectors = {
        "Deployment/vcuda-webhook": one(base, "Service", "vcuda-webhook")["spec"]["selector"],
        "Deployment/vcuda-controller": one(base, "Deployment", "vcuda-controller")["spec"]["selector"]["matchLabels"],
    }
    assert all(selector.items() <= labels[name].items() for name, selector in selectors.items())


# Tests of the webhook registrations and of the certificates


def test_the_webhook_is_called_for_all_namespaces_except_system_own_and_exempt_ones(base: list[Json]) -> None:
    """The webhook is called for all namespaces, except the system's namespaces, our own and exempt ones.

    The policy in-effect.quota.vcuda.io must select the same namespaces, because the controller uses it to find out
    whether a quota is in effect.
    """
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
    """The flags of the CronJob for certificates and of the first Job have the names and the label of the manifests.

    So the rotation finds the configurations, the Service and the Secret. The first Job waits longer for a replica.
    """
    job, cron_job = one(base, "Job", "vcuda-certs-first"), one(base, "CronJob", "vcuda-certs")
    waits = container(job)["args"].pop()
    assert waits == "--timeout=25m"
    assert pod_spec(job) == pod_spec(cron_job)
    found = flags(job)
    wanted = found["selector"]
    assert isinstance(wanted, dict)
    for each in base:
        if each["kind"].endswith("WebhookConfiguration"):
            assert wanted.items() <= each["metadata"]["labels"].items()
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


GITOPS = {
    "argocd.argoproj.io/hook": "Sync",
    "kustomize.toolkit.fluxcd.io/force": "enabled",
    "helm.toolkit.fluxcd.io/driftDetection": "disabled",
}


def test_gitops_tools_report_no_first_job_as_missing_and_replace_it_when_its_image_changes(tmp_path: Path) -> None:
    """The first Jobs have annotations by which GitOps tools ignore a deleted Job, and replace a Job whose image
    changes.

    Kubernetes deletes these Jobs when they are done, and permits no change of their image.
    """
    components = ["scheduler", "client-certificates"]
    jobs = [each for each in rendered(composed(tmp_path, components)) if each["kind"] == "Job"]
    assert len(jobs) == 4
    for job in jobs:
        assert job["metadata"]["annotations"].items() >= GITOPS.items(), label(job)


def test_the_extenders_rotation_requires_no_configuration() -> None:
    """The rotation of the scheduler extender's certificate has a flag by which it requires no webhook configuration.

    No webhook configuration exists for the extender, because the scheduler reads the CA from a file.
    """
    objects = overlay_of("scheduler")
    for kind, name in (("CronJob", "vcuda-extender-certs"), ("Job", "vcuda-extender-certs-first")):
        assert flags(one(objects, kind, name))["unregistered"] is True
    assert not [
        hook
        for hook in manifests.webhooks(objects).values()
        if hook["clientConfig"]["service"]["name"] == "vcuda-extender"
    ]


def test_the_client_certificate_is_issued_with_rights_for_its_names_only(tmp_path: Path) -> None:
    """The CronJob and the first Job of the client certificate use the same names, and have rights for these names only.

    The manifests contain the Secrets and the ConfigMap without data, so the account needs no right to create objects.
    """
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
        assert written["metadata"]["labels"].items() >= {MANAGED_BY: OURS}.items()
        assert "data" not in written


def test_the_webhook_uses_the_cas_that_the_rotation_publishes_and_the_name_that_it_issues(
    tmp_path: Path,
) -> None:
    objects = rendered(composed(tmp_path, ["client-certificates", "require-client-certificate"]))
    webhook = one(objects, "Deployment", "vcuda-webhook")
    issued = certs_client.commands["rotate"].make_context("rotate", []).params
    mounts = {each["name"]: each["mountPath"] for each in container(webhook)["volumeMounts"]}
    config_maps = {each.get("configMap", {}).get("name"): each["name"] for each in pod_spec(webhook)["volumes"]}
    path = mounts[config_maps[issued["configmap"]]]
    args = container(webhook)["args"]
    assert f"--client-ca={path}/{CLIENT_CA_KEY}" in args
    assert f"--client-name={issued['name']}" in args


# Tests of properties that only one overlay or component has


@pytest.mark.parametrize(("overlay", "schedulers"), [("gpu-manager", {}), ("hami", {"hami": "hami-scheduler"})])
def test_a_vendors_overlay_sets_its_scheduler(overlay: str, schedulers: Mapping[str, str]) -> None:
    objects = overlay_of(overlay)
    assert schedulers.keys() <= {each.name for each in SCHEMES}
    webhook = flags(one(objects, "Deployment", "vcuda-webhook"))
    assert (webhook["scheme_schedulers"], webhook["scheduler_name"]) == (schedulers, None)


def scheduler_config(objects: Sequence[Json]) -> Json:
    made = [each for each in objects if label(each).startswith("ConfigMap/vcuda-scheduler-config")]
    [config] = [each["data"]["scheduler-config.yaml"] for each in made]
    found: Json = yaml.safe_load(config)
    return found


MARGIN = 60
"""Maximum seconds that the scheduler needs for a pod in addition to the wait for its volumes.

They are the time from the placement until the wait begins, and the time from the end of the wait until the binding.
"""


def test_the_cards_of_a_pod_stay_allocated_while_the_scheduler_waits_for_its_volumes() -> None:
    objects = overlay_of("scheduler")
    [profile] = scheduler_config(objects)["profiles"]
    [plugin] = profile["pluginConfig"]
    assert plugin["name"] == "VolumeBinding"
    timeout = flags(one(objects, "Deployment", "vcuda-controller"))["allocation_timeout"]
    assert isinstance(timeout, int)
    assert plugin["args"]["bindTimeoutSeconds"] + MARGIN <= timeout


def test_with_cert_manager_vcuda_certs_registers_only_and_writes_no_secret() -> None:
    objects = overlay_of("cert-manager")
    for kind, name in (("CronJob", "vcuda-certs"), ("Job", "vcuda-certs-first")):
        assert container(one(objects, kind, name))["args"][:2] == ["vcuda-certs", "register"]
    rules = one(objects, "Role", "vcuda-certs")["rules"]
    assert {tuple(rule["verbs"]) for rule in rules if rule["resources"] == ["secrets"]} == {("get",)}
    certificate = one(objects, "Certificate", "vcuda-webhook")
    assert certificate["spec"]["secretName"] == "vcuda-webhook-tls"
    assert certificate["spec"]["dnsNames"] == list(service_names("vcuda-webhook", manifests.SYSTEM_NAMESPACE).dns)
    injected = f"{manifests.SYSTEM_NAMESPACE}/{certificate['metadata']['name']}"
    configurations = [each["metadata"] for each in objects if each["kind"].endswith("WebhookConfiguration")]
    assert [each["annotations"]["cert-manager.io/inject-ca-from"] for each in configurations] == [injected] * 2


def test_the_second_scheduler_has_the_right_to_its_configured_lease() -> None:
    """The second scheduler's RBAC rule names the Lease in the scheduler's configuration.

    No generated ConfigMap may have the name of the Lease. Otherwise kustomize would add the hash of that ConfigMap to
    the name in the rule.
    """
    objects = overlay_of("scheduler")
    election = scheduler_config(objects)["leaderElection"]
    role = one(objects, "Role", "vcuda-scheduler")
    assert role["metadata"]["namespace"] == election["resourceNamespace"]
    needed = {"verbs": ["get", "update"], "resourceNames": [election["resourceName"]]}
    assert needed.items() <= role["rules"][-1].items()
