"""Tests of the manifests: few rights, memory limits, safe updates and drains, and consistent timeouts."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from controller.garbage.node.names import VM_DIRECTORIES
from tests import rendered as manifests
from tests.integration.overlays import every_overlay, flags
from tests.kubectl import kubectl
from tests.pod_security import offences
from tests.rendered import Json, composed, container, label, one, ours, overlay_of, pod_spec, pod_specs, rendered
from vcuda.quota.well_known import LEDGER_NAMESPACE
from vcuda.requests.schemes import SCHEMES
from vcuda.x509 import service_names

pytestmark = pytest.mark.slow

GUNICORN_GRACE = 10
"""Seconds that the webhook adds to --drain-seconds for gunicorn's graceful_timeout. See `webhook.server.server`."""


@every_overlay
def test_our_programs_accept_the_flags_of_the_manifests(overlay: Path) -> None:
    workloads = ours(rendered(overlay))
    assert {label(workload) for workload in workloads} >= {"Deployment/vcuda-webhook", "Deployment/vcuda-controller"}
    assert all(flags(workload) for workload in workloads)


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
"""For each scheme: the DaemonSet of its node agent, with the nodeSelector of the vendor's own DaemonSet."""

every_agent = pytest.mark.parametrize("scheme", AGENTS)


def test_every_scheme_with_directories_has_a_node_agent() -> None:
    assert AGENTS.keys() == VM_DIRECTORIES.keys() == {each.name for each in SCHEMES if each.pod_directory}


@pytest.fixture
def with_agent(scheme: str, tmp_path: Path) -> list[Json]:
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
    """A load balancer stops using a replica after its readiness probe has failed. The drain must last longer."""
    webhook = one(base, "Deployment", "vcuda-webhook")
    program, seconds = container(webhook)["lifecycle"]["preStop"]["exec"]["command"]
    drain, probe = flags(webhook)["drain_seconds"], container(webhook)["readinessProbe"]
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
    """Some clusters permit the system's priority classes only in namespaces with a ResourceQuota for these classes."""
    found = rendered(overlay)
    assert not [each for each in found if each["kind"] == "PriorityClass"]
    allowed = set()
    for quota in (each for each in found if each["kind"] == "ResourceQuota"):
        [scope] = quota["spec"]["scopeSelector"]["matchExpressions"]
        allowed |= {(quota["metadata"]["namespace"], value) for value in scope["values"]}
    for each, spec in pod_specs(found):
        assert (each["metadata"]["namespace"], spec.get("priorityClassName")) in allowed, label(each)


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
"""Maximum seconds from the placement of a pod to its binding, without the wait for the pod's volumes."""


def test_the_cards_of_a_pod_stay_allocated_while_the_scheduler_waits_for_its_volumes() -> None:
    objects = overlay_of("scheduler")
    [profile] = scheduler_config(objects)["profiles"]
    [plugin] = profile["pluginConfig"]
    assert plugin["name"] == "VolumeBinding"
    timeout = flags(one(objects, "Deployment", "vcuda-controller"))["allocation_timeout"]
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
    """If a generated ConfigMap had the name of the Lease, kustomize would add a hash to this name in the Role."""
    objects = overlay_of("scheduler")
    election = scheduler_config(objects)["leaderElection"]
    role = one(objects, "Role", "vcuda-scheduler")
    assert role["metadata"]["namespace"] == election["resourceNamespace"]
    needed = {"verbs": ["get", "update"], "resourceNames": [election["resourceName"]]}
    assert needed.items() <= role["rules"][-1].items()
