"""Tests that the Helm chart renders the same objects as kustomize, and names the values that it rejects."""

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.charted import (
    KUSTOMIZED_SCHEDULER,
    charted,
    is_of_a_hook,
    objects,
    rejection,
    setting_of,
    unlike,
    whole_chart,
)
from tests.helm import CHART, NEWEST, helm
from tests.rendered import WORKLOADS, Json, images, one, pod_spec, pod_template
from tests.tables import cases
from tools.chart.__main__ import HEADER, templates
from tools.chart.features import COMPONENTS, EXCLUSIVE, NEEDED, identity_of, render
from vcuda import __version__

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

VERSIONS = pytest.mark.parametrize("name", ["helm", "helm3"])
ROOT = CHART.parents[1]
DIGEST = f"sha256:{'0' * 64}"


def combinations() -> list[tuple[str, ...]]:
    """Return each component, each pair, and the two largest sets, without the sets that the chart rejects."""
    fork = "node-agent-nvidia-vcuda"
    largest = (COMPONENTS.keys() - left_out for left_out in ({"hami", fork}, {"scheduler", fork}))
    chosen = [set(), *({each} for each in COMPONENTS), *map(set, itertools.combinations(COMPONENTS, 2)), *largest]
    whole = [{*each, *(NEEDED[name] for name in each if name in NEEDED)} for each in chosen]
    allowed = [each for each in whole if not any(both <= each for both in EXCLUSIVE)]
    return sorted({tuple(name for name in COMPONENTS if name in each) for each in allowed})


@pytest.mark.parametrize("components", combinations(), ids=lambda each: "+".join(each) or "base")
def test_the_chart_gives_each_object_that_kustomize_gives(components: tuple[str, ...]) -> None:
    settings = (KUSTOMIZED_SCHEDULER, *map(setting_of, components))
    assert unlike(charted(*settings), render(*components)) == {}


def test_the_commands_of_the_page_render() -> None:
    """docs/install.md must have one command that enables HAMi, cert-manager and Prometheus together."""
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8").replace("\\\n", "")
    found = [re.findall(r"--set (\S+)", command) for command in re.findall(r"^helm install .*$", page, re.MULTILINE)]
    usual = "hami.enabled=true,certManager.enabled=true,prometheus.enabled=true"
    assert usual in [setting for settings in found for setting in settings]
    for settings in found:
        assert charted(*settings)


@VERSIONS
def test_helm_3_and_helm_4_find_no_fault_in_the_chart(name: str) -> None:
    done = helm("lint", "--strict", f"--kube-version={NEWEST}", CHART, name=name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert unlike(charted(name=name), render()) == {}


def test_the_templates_are_those_of_the_manifests() -> None:
    """If this test fails, run `make chart`, which writes the templates of the chart."""
    written = {path.name: path.read_text() for path in (CHART / "templates").glob("*.yaml")}
    generated = {name: text for name, text in written.items() if text.startswith(HEADER)}
    assert generated == templates()


def test_the_chart_and_the_base_have_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    base = yaml.safe_load((CHART.parent / "base" / "kustomization.yaml").read_text())
    assert [image["newTag"] for image in base["images"]] == [__version__]


def test_every_component_has_a_value() -> None:
    components = {path.parent.name for path in CHART.parent.glob("components/*/kustomization.yaml")}
    assert COMPONENTS.keys() == components
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for place in COMPONENTS.values():
        section, key = place.removeprefix(".Values.").split(".")
        assert values[section][key] is False


@cases(
    "settings, told",
    two_agents_for_one_directory=(
        ("nodeAgent.gpuManager=true", "nodeAgent.nvidiaVcuda=true"),
        "nodeAgent.gpuManager and nodeAgent.nvidiaVcuda exclude each other",
    ),
    two_schedulers=(
        ("hami.enabled=true", "scheduler.enabled=true"),
        "scheduler.enabled and hami.enabled exclude each other",
    ),
    no_certificates=(
        ("clientCertificates.required=true",),
        "clientCertificates.required needs clientCertificates.enabled",
    ),
    an_ingress_without_a_page=(("page.ingress.enabled=true",), "page.ingress.enabled needs page.enabled"),
    an_ingress_without_a_name=(
        ("page.enabled=true", "page.ingress.enabled=true"),
        "page.ingress.host is required with page.ingress.enabled",
    ),
    an_address_that_no_proxy_reaches=(
        ("page.enabled=true", "controller.extraArgs[0]=--dry-run", "controller.extraArgs[1]=--ui-address=127.0.0.1:1"),
        "controller.extraArgs[1] and page.enabled exclude each other: page.enabled sets --ui-address",
    ),
    a_link_that_runs_a_script=(("page.docsUrl=javascript:alert(1)",), "page/docsUrl"),
    a_link_without_a_scheme=(("page.grafanaUrl=grafana.example.com",), "page/grafanaUrl"),
    a_page_with_an_address_for_a_name=(("page.ingress.host=10.0.0.1",), "page/ingress/host"),
    a_page_with_a_name_that_cannot_be=(("page.ingress.host=https://gpu.example.com",), "page/ingress/host"),
    an_unknown_value_of_the_page=(("page.ingress.hosts=gpu.example.com",), "page/ingress"),
    an_impossible_namespace_of_the_proxy=(("page.proxy.namespace=Proxy",), "page/proxy/namespace"),
    one_namespace_for_two_parts=(
        ("namespaces.ledgers=vcuda-quota",),
        "namespaces.system, namespaces.ledgers and namespaces.nodeAgent must differ",
    ),
    the_quota_among_the_ledgers=(
        ("quota.namespace=vcuda-quota-ledgers",),
        "quota.namespace must not be namespaces.ledgers",
    ),
    a_namespace_of_kubernetes=(("namespaces.system=kube-system",), "kube-system"),
    an_impossible_name=(("namespaces.system=Gpu_1",), "namespaces/system"),
    an_impossible_address=(("prometheus.runbookBase=docs page#top",), "prometheus/runbookBase"),
    a_tag_and_a_digest=(("image.tag=1.2.3", f"image.digest={DIGEST}"), "image.tag and image.digest exclude each other"),
    an_impossible_digest=(("image.digest=1.2.3",), "image/digest"),
    an_impossible_priority=(("pods.priorityClassName=High!",), "pods/priorityClassName"),
    an_unknown_value=(("hami.enbaled=true",), "enbaled"),
    an_unknown_section=(("cert-manager.enabled=true",), "cert-manager"),
    a_wrong_type=(("webhook.replicas=many",), "webhook/replicas"),
    no_replica=(("webhook.replicas=0",), "webhook/replicas"),
    no_image=(("image.repository=",), "image/repository"),
    an_impossible_namespace=(("prometheus.namespace=Mon_1",), "prometheus/namespace"),
)
def test_values_that_contradict_or_do_not_exist_are_rejected_with_their_place(
    settings: tuple[str, ...], told: str
) -> None:
    for name in ("helm", "helm3"):
        assert told in rejection(*settings, name=name)


@cases(
    "setting, told",
    cert_manager=(
        "certManager.enabled=true",
        "the cluster does not serve cert-manager.io/v1: install cert-manager first",
    ),
    prometheus=(
        "prometheus.enabled=true",
        "the cluster does not serve monitoring.coreos.com/v1: install the Prometheus operator first",
    ),
)
def test_missing_kinds_of_other_projects_are_reported_in_one_line(setting: str, told: str) -> None:
    assert told in rejection(setting, apis=())


def test_kubernetes_before_1_30_is_rejected() -> None:
    done = helm("template", "vcuda-quota", CHART, "--namespace=kube-system", "--kube-version=1.29.15")
    assert "chart requires kubeVersion: >=1.30.0-0 which is incompatible with Kubernetes v1.29.15" in done.stderr


def test_a_release_in_a_namespace_that_the_chart_creates_is_rejected() -> None:
    done = helm("template", "vcuda-quota", CHART, "--namespace=vcuda-quota", f"--kube-version={NEWEST}")
    assert "install the release into another one, for example --namespace kube-system" in done.stderr


def test_the_account_of_the_uninstall_exists_only_during_it_and_may_delete_policies_and_webhooks() -> None:
    found = [*whole_chart().values()]
    hooks = [each for each in found if is_of_a_hook(each)]
    assert {each["metadata"]["annotations"]["helm.sh/hook"] for each in hooks} == {"pre-delete"}
    assert {each["metadata"]["name"] for each in hooks} == {"vcuda-uninstall"}
    assert "vcuda-uninstall" not in {each["metadata"]["name"] for each in found if not is_of_a_hook(each)}
    rules = one(hooks, "ClusterRole", "vcuda-uninstall")["rules"]
    for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration", "ValidatingAdmissionPolicyBinding"):
        names = {each["metadata"]["name"] for each in found if each["kind"] == kind}
        [rule] = [each for each in rules if f"{kind.lower()}s" in each["resources"] and "delete" in each["verbs"]]
        assert names <= set(rule["resourceNames"])


def test_the_documented_check_finds_each_object_of_the_uninstall() -> None:
    hooks = [each for each in whole_chart().values() if is_of_a_hook(each)]
    assert {each["metadata"]["labels"]["app.kubernetes.io/part-of"] for each in hooks} == {"vcuda-quota"}


def test_a_missing_namespace_of_the_ledgers_ends_the_uninstall_before_a_cluster_wide_object_is_created() -> None:
    """Helm deletes no earlier hook if it cannot create a hook."""
    hooks = [each["metadata"] for each in whole_chart().values() if is_of_a_hook(each)]
    by_ledgers: dict[bool, list[int]] = {True: [], False: []}
    for each in hooks:
        weight = int(each["annotations"].get("helm.sh/hook-weight", 0))
        by_ledgers[each.get("namespace") == "vcuda-quota-ledgers"].append(weight)
    assert max(by_ledgers[True]) < min(by_ledgers[False])


def test_the_values_of_images_reach_every_container() -> None:
    found = [
        *whole_chart(
            "image.repository=registry.example/vcuda",
            "image.tag=1.2.3",
            "image.pullPolicy=Always",
            "image.pullSecrets[0].name=secret",
            "scheduler.enabled=true",
            "clientCertificates.enabled=true",
        ).values()
    ]
    assert set(images(found).values()) == {"registry.example/vcuda:1.2.3"}
    for workload in (each for each in found if each["kind"] in ("Deployment", "DaemonSet", "Job", "CronJob")):
        spec = pod_spec(workload)
        assert spec["imagePullSecrets"] == [{"name": "secret"}]
        ours = [each for each in spec["containers"] if "kube-scheduler" not in each["image"]]
        assert {each["imagePullPolicy"] for each in ours} <= {"Always"}


def test_a_digest_replaces_the_tag_of_every_container() -> None:
    found = whole_chart(f"image.digest={DIGEST}", "image.repository=registry.example/vcuda")
    assert set(images([*found.values()]).values()) == {f"registry.example/vcuda@{DIGEST}"}


def chart_of(values: Mapping[str, object], directory: Path) -> list[Json]:
    file = directory / "values.yaml"
    file.write_text(json.dumps(values))
    done = helm("template", "vcuda-quota", CHART, "--namespace=kube-system", "--values", file)
    assert done.returncode == 0, done.stderr
    return [*objects(done.stdout).values()]


PLACED = {
    "nodeSelector": {"role": "system"},
    "tolerations": [{"key": "system", "operator": "Exists"}],
    "affinity": {"podAffinity": {}},
    "priorityClassName": "ours",
}
"""Settings of pods that a person may want for every workload."""
AGENTS = ("hami", "gpuManager", "vgpuManager")


@pytest.mark.parametrize("of_agents", [False, True], ids=["pods", "node agents"])
def test_the_settings_of_pods_reach_every_workload_and_every_job(tmp_path: Path, *, of_agents: bool) -> None:
    given = {**PLACED, "podAnnotations": {"team": "platform"}}
    values: Mapping[str, object] = {
        "pods": {} if of_agents else given,
        "nodeAgent": {**dict.fromkeys(AGENTS, True), **(given if of_agents else {})},
        "scheduler": {"enabled": True},
        "clientCertificates": {"enabled": True},
    }
    workloads = [each for each in chart_of(values, tmp_path) if each["kind"] in WORKLOADS]
    assert {each["kind"] for each in workloads} == {*WORKLOADS}
    assert "vcuda-uninstall" in {each["metadata"]["name"] for each in workloads}
    for workload in workloads:
        expected = PLACED if (workload["kind"] == "DaemonSet") == of_agents else {}
        spec, metadata = pod_spec(workload), pod_template(workload)["metadata"]
        assert {key: spec.get(key) for key in PLACED if spec.get(key) == PLACED[key]} == {
            key: value for key, value in expected.items() if key != "nodeSelector" or not of_agents
        }
        assert metadata.get("annotations") == ({"team": "platform"} if expected else None)
        if expected and of_agents:  # the vendor's own label stays
            assert PLACED["nodeSelector"].items() < spec["nodeSelector"].items()  # type: ignore[attr-defined]


def test_the_values_of_a_deployment_reach_it_and_replace_those_of_all_pods(tmp_path: Path) -> None:
    own = {
        "replicas": 5,
        "resources": {"limits": {"memory": "2Gi"}},
        "extraArgs": ["--log-level=debug"],
        **PLACED,
    }
    others = {"tolerations": [{"operator": "Exists"}], "priorityClassName": "others"}
    found = chart_of({"webhook": own, "controller": own, "pods": others}, tmp_path)
    for name in ("vcuda-webhook", "vcuda-controller"):
        deployment = one(found, "Deployment", name)
        spec = pod_spec(deployment)
        [container] = spec["containers"]
        assert deployment["spec"]["replicas"] == 5
        assert container["resources"]["limits"] == {"memory": "2Gi"}
        assert container["args"][-1] == "--log-level=debug"
        assert {key: spec[key] for key in PLACED} == PLACED


def test_the_page_that_alerts_lead_to_can_be_named() -> None:
    page = "https://docs.example.com/a/troubleshooting.html"
    found = charted("prometheus.enabled=true", f"prometheus.runbookBase={page}")
    [group] = one([*found.values()], "PrometheusRule", "vcuda-quota")["spec"]["groups"]
    assert {rule["annotations"]["runbook_url"].partition("#")[0] for rule in group["rules"]} == {page}


def test_the_label_that_prometheus_selects_reaches_every_monitor_and_rule() -> None:
    found = charted("prometheus.enabled=true", "nodeAgent.hami=true", "prometheus.labels.release=kube-prometheus-stack")
    monitoring = [each for each in found.values() if each["apiVersion"] == "monitoring.coreos.com/v1"]
    assert {each["kind"] for each in monitoring} == {"ServiceMonitor", "PrometheusRule"}
    assert {each["metadata"]["labels"].get("release") for each in monitoring} == {"kube-prometheus-stack"}


def test_the_namespace_of_prometheus_can_be_named() -> None:
    found = charted("prometheus.enabled=true", "prometheus.namespace=observability")
    assert not [each for each in found.values() if '"monitoring"' in json.dumps(each)]
    assert one([*found.values()], "ConfigMap", "vcuda-quota-dashboard")["metadata"]["namespace"] == "observability"


PAGE = ("page.enabled=true", "page.ingress.enabled=true", "page.ingress.host=gpu.example.com")


def test_the_ingress_of_the_values_is_that_of_the_example_and_routes_to_the_proxy_alone() -> None:
    example = yaml.safe_load((CHART.parent / "examples" / "page" / "ingress.yaml").read_text())
    same = ("page.ingress.className=nginx", "page.ingress.tlsSecret=gpu-example-com")
    found = charted(*PAGE, *same)
    assert unlike(found, {**render("page"), identity_of(example): example}) == {}
    assert [each for each in found.values() if each["kind"] == "Ingress"] == [example]


def test_the_values_that_the_page_of_operations_names_are_those() -> None:
    assert f"--set {','.join(PAGE)}" in (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def test_the_values_of_the_page_reach_its_objects() -> None:
    found = [
        *charted(
            *PAGE,
            "page.proxy.namespace=access",
            "page.proxy.podLabels.app=gate",
            "page.ingress.annotations.a=b",
            "page.ingress.service=gate",
            "page.docsUrl=https://docs.example.com/gpu?a=b",
            "page.grafanaUrl=https://grafana.example.com",
        ).values()
    ]
    ingress = one(found, "Ingress", "vcuda-page")
    assert (ingress["metadata"]["namespace"], ingress["metadata"]["annotations"]) == ("access", {"a": "b"})
    assert {"ingressClassName", "tls"}.isdisjoint(ingress["spec"])
    assert '"service": {"name": "gate", "port": {"name": "http"}}' in json.dumps(ingress)
    [[peer]] = [rule["from"] for rule in one(found, "NetworkPolicy", "vcuda-page")["spec"]["ingress"]]
    assert peer == {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "access"}},
        "podSelector": {"matchLabels": {"app": "gate"}},
    }
    [container] = pod_spec(one(found, "Deployment", "vcuda-controller"))["containers"]
    links = ["--ui-docs-url=https://docs.example.com/gpu?a=b", "--ui-grafana-url=https://grafana.example.com"]
    assert container["args"][-2:] == links


def test_an_upgrade_is_rendered_without_a_cluster() -> None:
    done = helm("template", "vcuda-quota", CHART, "--namespace=kube-system", "--is-upgrade", "--set=quota.name=other")
    assert done.returncode == 0, done.stderr
