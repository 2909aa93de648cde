"""The Helm chart renders the same objects as kustomize, and rejects wrong values with their names."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from tests.helm import APIS, CHART, NEWEST, helm, templated
from tests.rendered import Json, images, one, pod_spec
from tests.tables import cases
from tools import install_yaml
from tools.chart.__main__ import HEADER, templates
from tools.chart.features import COMPONENTS, Identity, Objects, identity_of, render
from tools.chart.names import Names
from vcuda import __version__

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

VERSIONS = pytest.mark.parametrize("name", ["helm", "helm3"])
KUSTOMIZED_SCHEDULER = "scheduler.image=registry.k8s.io/kube-scheduler:v1.31.0"
NEEDS = {"require-client-certificate": "client-certificates"}
"""Components of the chart that are accepted only together with another component, by name."""
ROOT = CHART.parents[1]
EXCLUDED = ({"node-agent-gpu-manager", "node-agent-nvidia-vcuda"}, {"hami", "scheduler"})


def setting_of(component: str) -> str:
    return f"{COMPONENTS[component].removeprefix('.Values.')}=true"


def combinations() -> list[tuple[str, ...]]:
    """Return each component, each pair, and the two largest sets, except sets that the chart rejects."""
    fork = "node-agent-nvidia-vcuda"
    largest = (COMPONENTS.keys() - left_out for left_out in ({"hami", fork}, {"scheduler", fork}))
    chosen = [set(), *({each} for each in COMPONENTS), *map(set, itertools.combinations(COMPONENTS, 2)), *largest]
    whole = [{*each, *(NEEDS[name] for name in each if name in NEEDS)} for each in chosen]
    allowed = [each for each in whole if not any(both <= each for both in EXCLUDED)]
    return sorted({tuple(name for name in COMPONENTS if name in each) for each in allowed})


def objects(text: str) -> dict[Identity, Json]:
    return {identity_of(found): found for found in yaml.safe_load_all(text) if found}


def charted(*settings: str, name: str = "helm") -> dict[Identity, Json]:
    return {each: found for each, found in whole_chart(*settings, name=name).items() if not is_of_a_hook(found)}


def whole_chart(*settings: str, name: str = "helm") -> dict[Identity, Json]:
    done = templated(settings, name=name)
    assert done.returncode == 0, done.stderr
    return objects(done.stdout)


def is_of_a_hook(found: Json) -> bool:
    return "helm.sh/hook" in found["metadata"].get("annotations", {})


def rejection(*settings: str, name: str = "helm", apis: Sequence[str] = APIS) -> str:
    done = templated(settings, name=name, apis=apis)
    assert done.returncode != 0, done.stdout
    return done.stderr


def unlike(one: Objects, other: Objects) -> Mapping[Identity, tuple[Json | None, Json | None]]:
    return {each: (one.get(each), other.get(each)) for each in {*one, *other} if one.get(each) != other.get(each)}


@pytest.mark.parametrize("components", combinations(), ids=lambda each: "+".join(each) or "base")
def test_the_chart_gives_each_object_that_kustomize_gives(components: tuple[str, ...]) -> None:
    settings = (KUSTOMIZED_SCHEDULER, *map(setting_of, components))
    assert unlike(charted(*settings), render(*components)) == {}


def test_the_commands_of_the_page_render() -> None:
    """docs/install.md must have a command that enables HAMi, cert-manager and Prometheus together."""
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
    """If this test fails, run `make chart`, which writes the templates."""
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


def test_the_values_of_a_deployment_reach_it(tmp_path: Path) -> None:
    own = {
        "replicas": 5,
        "resources": {"limits": {"memory": "2Gi"}},
        "extraArgs": ["--log-level=debug"],
        "nodeSelector": {"role": "system"},
        "tolerations": [{"operator": "Exists"}],
    }
    (tmp_path / "values.yaml").write_text(json.dumps({"webhook": own, "controller": own}))
    done = helm("template", "vcuda-quota", CHART, "--namespace=kube-system", "--values", tmp_path / "values.yaml")
    assert done.returncode == 0, done.stderr
    found = [*objects(done.stdout).values()]
    for name in ("vcuda-webhook", "vcuda-controller"):
        deployment = one(found, "Deployment", name)
        spec = pod_spec(deployment)
        [container] = spec["containers"]
        assert deployment["spec"]["replicas"] == 5
        assert container["resources"]["limits"] == {"memory": "2Gi"}
        assert container["args"][-1] == "--log-level=debug"
        assert (spec["nodeSelector"], spec["tolerations"]) == ({"role": "system"}, [{"operator": "Exists"}])


def test_the_page_that_alerts_lead_to_can_be_named() -> None:
    page = "https://docs.example.com/a/troubleshooting.html"
    found = charted("prometheus.enabled=true", f"prometheus.runbookBase={page}")
    [group] = one([*found.values()], "PrometheusRule", "vcuda-quota")["spec"]["groups"]
    assert {rule["annotations"]["runbook_url"].partition("#")[0] for rule in group["rules"]} == {page}


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


OTHER_NAMES = Names("gpu-parts", "gpu-books", "gpu-agents", "gpu-limits", "cards")
"""Names of namespaces and of the quota ConfigMap that differ from the names in the manifests."""
NAMED = (
    f"namespaces.system={OTHER_NAMES.system}",
    f"namespaces.ledgers={OTHER_NAMES.ledgers}",
    f"namespaces.nodeAgent={OTHER_NAMES.node_agent}",
    f"quota.namespace={OTHER_NAMES.quota_namespace}",
    f"quota.name={OTHER_NAMES.quota}",
)
OF_OTHERS = re.compile(
    r"^vcuda-quota:|^vcuda-quota(-apiserver| CA)$|=vcuda-quota-apiserver$|\"uid\": \"vcuda-quota\""
    r"|^vcuda-quota(-dashboard|-viewer|-node-critical-pods|-critical-pods)$|\.name\('vcuda-quota'\)"
    r"|the controller of vcuda-quota: |ValidatingWebhookConfiguration vcuda-quota;|kubectl gpuquota"
)
"""Texts that contain ``vcuda-quota`` but name no namespace. They are the same in every installation."""
NAME_KEYS = {"name", "resourceNames", "app.kubernetes.io/part-of"}
"""Keys of mappings under which the text ``vcuda-quota`` names an object that is not a namespace."""


def texts(value: Json | list[Json] | str, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from texts(each, name)
    elif isinstance(value, list):
        for each in value:
            yield from texts(each, key)
    elif isinstance(value, str):
        yield key, value


def old_names(found: Sequence[Json]) -> list[tuple[str, str]]:
    others = [each for manifest in found if manifest["kind"] != "Namespace" for each in texts(manifest)]
    named = [
        (key, text) for key, text in others if not (key in NAME_KEYS and text in ("vcuda-quota", "00-vcuda-quota"))
    ]
    spaces = [("Namespace", each["metadata"]["name"]) for each in found if each["kind"] == "Namespace"]
    return [
        (key, text) for key, text in (*named, *spaces) if re.search("vcuda-quota|gpuquota", OF_OTHERS.sub("", text))
    ]


@pytest.mark.parametrize("excluded", ["hami", "scheduler"])
def test_no_manifest_has_an_old_namespace_if_others_are_named(excluded: str, tmp_path: Path) -> None:
    fork = "node-agent-nvidia-vcuda"
    components = [name for name in COMPONENTS if name not in (excluded, fork)]
    install_yaml.write("vcuda-quota:0.1.0", tuple(components), tmp_path / "install.yaml", names=OTHER_NAMES)
    chart = whole_chart(*NAMED, KUSTOMIZED_SCHEDULER, *map(setting_of, components))
    for found in (chart, objects((tmp_path / "install.yaml").read_text())):
        assert old_names([*found.values()]) == []
    assert old_names([*render(*components).values()])


def test_one_file_has_the_same_objects_as_the_chart_if_namespaces_are_named(tmp_path: Path) -> None:
    file = tmp_path / "install.yaml"
    install_yaml.write("vcuda-quota:0.1.0", ("prometheus",), file, names=OTHER_NAMES)
    assert unlike(objects(file.read_text()), charted(*NAMED, "prometheus.enabled=true")) == {}


def test_one_file_has_the_same_objects_with_the_image_that_was_named(tmp_path: Path) -> None:
    image, file = "registry.example/vcuda-quota:1.2.3", tmp_path / "install.yaml"
    arguments = [f"--image={image}", "--component=hami", "--component=prometheus", f"--output={file}"]
    assert CliRunner().invoke(install_yaml.main, arguments).exit_code == 0
    written = objects(file.read_text())
    assert set(images([*written.values()]).values()) == {image}
    plain = objects(file.read_text().replace(image, "vcuda-quota:0.1.0"))
    assert unlike(plain, render("hami", "prometheus")) == {}
    assert next(iter(written)).kind == "Namespace"
