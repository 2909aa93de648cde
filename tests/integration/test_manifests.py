"""Tests that every overlay renders, is valid on every supported Kubernetes version, and has its components' objects."""

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import kubernetes_validate  # type: ignore[import-untyped]  # the package has no types
import pytest
import yaml
from kubernetes_validate import utils

from tests.integration.overlays import every_overlay
from tests.kubectl import find_kubectl
from tests.match_conditions import declared
from tests.rendered import (
    BASE,
    EVERY,
    MANIFESTS,
    Json,
    composed,
    container,
    copied,
    images,
    label,
    one,
    ours,
    pod_spec,
    rendered,
)

pytestmark = pytest.mark.slow

SUPPORTED = ("1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
VERSIONS = sorted({version for version in map(utils.major_minor, utils.all_versions()) if version >= SUPPORTED[0]})
"""The Kubernetes versions whose schemas the tests use: supported versions, and newer ones."""

NO_SCHEMA = ("cert-manager.io/", "gateway.networking.k8s.io/", "monitoring.coreos.com/")
"""The API groups of other projects. No Kubernetes release has schemas of the kinds in them."""

PART_OF = ("app.kubernetes.io/part-of", "vcuda-quota")
"""The label of all our objects. docs/upgrade.md uses it to check whether an uninstall has left objects."""

AGENTS = ("node-agent-gpu-manager", "node-agent-hami", "node-agent-vgpu-manager")
OPTIONS = {
    *("client-certificates", "evict-violations", *AGENTS, "node-agent-nvidia-vcuda"),
    *("page", "require-client-certificate"),
}
"""The components without an overlay of the same name."""

BESIDE_ANY = ("cert-manager", "prometheus", *sorted(OPTIONS - {"node-agent-nvidia-vcuda"}))
TOGETHER = {"hami": ("hami", *BESIDE_ANY), "scheduler": ("scheduler", *BESIDE_ANY)}
"""The largest sets of components. `hami` excludes `scheduler`, and two node agents exclude each other."""


@functools.cache
def known(document: str, version: str) -> bool:
    """Return whether a Kubernetes version has the kind of an object. Raises ValidationError if it lacks a field."""
    try:
        kubernetes_validate.validate(json.loads(document), version, strict=True)
    except utils.SchemaNotFoundError:
        return False
    return True


def unknown(objects: Sequence[Json], version: str) -> set[str]:
    """Return the objects whose kinds a Kubernetes version lacks. Raises ValidationError if an object is invalid."""
    own = [each for each in objects if not each["apiVersion"].startswith(NO_SCHEMA)]
    assert len(own) > len(objects) / 2
    return {label(each) for each in own if not known(json.dumps(registered(each)), version)}


def registered(found: Json) -> Json:
    """Return the object. If it is a webhook configuration, add its webhooks, as `vcuda-certs` registers them."""
    return {**found, "webhooks": declared(found)} if found["kind"].endswith("WebhookConfiguration") else found


every_version = pytest.mark.parametrize("version", VERSIONS)


def test_there_is_a_kubectl_that_renders_the_manifests() -> None:
    """Without a kubectl that renders, only this test fails. The other tests that need one are skipped."""
    assert find_kubectl()[1] == ""


def test_there_is_a_schema_of_every_supported_version() -> None:
    """A new release of the package of schemas may lack old Kubernetes versions."""
    assert set(SUPPORTED) <= set(VERSIONS)


@every_version
@every_overlay
def test_every_supported_kubernetes_knows_all_objects_of_every_overlay(overlay: Path, version: str) -> None:
    assert unknown(rendered(overlay), version) == set()


every_choice = pytest.mark.parametrize("chosen", TOGETHER.values(), ids=TOGETHER)


@every_choice
def test_components_can_be_combined_in_any_order(tmp_path: Path, chosen: tuple[str, ...]) -> None:
    """Only the order of flags may differ."""
    orders = (chosen, tuple(reversed(chosen)))
    one_way, other_way = (rendered(composed(tmp_path / order[0], order)) for order in orders)
    assert {version for version in VERSIONS if unknown(one_way, version)} == set()
    for workload in (*ours(one_way), *ours(other_way)):
        args = container(workload)["args"]
        names = [flag.partition("=")[0] for flag in args]
        assert len(names) == len(set(names)), label(workload)
        args.sort()
    assert by_name(one_way) == by_name(other_way)


def by_name(objects: Sequence[Json]) -> list[Json]:
    return sorted(objects, key=lambda each: (label(each), each["metadata"].get("namespace", "")))


def test_every_component_has_an_overlay_or_is_an_option_of_one() -> None:
    components = {found.parent.name for found in MANIFESTS.glob("components/*/kustomization.yaml")}
    assert components - {overlay.name for overlay in EVERY} == OPTIONS


@pytest.mark.parametrize("chosen", [*EVERY, *sorted(OPTIONS)], ids=lambda each: each if each in OPTIONS else each.name)
def test_every_object_has_the_label_that_an_uninstall_is_checked_by(tmp_path: Path, chosen: Path | str) -> None:
    objects = rendered(chosen if isinstance(chosen, Path) else composed(tmp_path, [chosen]))
    assert {label(each) for each in objects if PART_OF not in each["metadata"].get("labels", {}).items()} == set()


# Tests of the ways to set the container image


NAME, TAG = "registry.example.com:5000/team/quota", "1.2.3"
CHOSEN = [{"name": "vcuda-quota", "newName": NAME, "newTag": TAG}]


def named_in_the_base(manifests: Path, overlay: Path) -> Path:
    file = manifests / "base" / "kustomization.yaml"
    file.write_text(json.dumps({**yaml.safe_load(file.read_text()), "images": CHOSEN}))
    return manifests / overlay.relative_to(MANIFESTS)


def named_on_top(manifests: Path, overlay: Path) -> Path:
    content = {"resources": [f"../{overlay.relative_to(MANIFESTS)}"], "images": CHOSEN}
    (manifests / "on-top").mkdir()
    (manifests / "on-top" / "kustomization.yaml").write_text(json.dumps(content))
    return manifests / "on-top"


@every_overlay
@pytest.mark.parametrize("name", [named_in_the_base, named_on_top], ids=lambda name: name.__name__)
def test_everything_runs_the_image_that_is_named(
    tmp_path: Path, overlay: Path, name: Callable[[Path, Path], Path]
) -> None:
    found = images(rendered(name(copied(tmp_path), overlay)))
    assert found == dict.fromkeys(images(rendered(overlay)), f"{NAME}:{TAG}")


def test_everything_runs_the_image_that_is_named_with_the_components(tmp_path: Path) -> None:
    both = composed(tmp_path, ["scheduler", "evict-violations"])
    file = both / "kustomization.yaml"
    file.write_text(json.dumps({**json.loads(file.read_text()), "images": CHOSEN}))
    assert set(images(rendered(both)).values()) == {f"{NAME}:{TAG}"}


# Tests of the component evict-violations


def flags(controller: Json) -> list[str]:
    """Remove the flags from the container of a Deployment, and return them."""
    args: list[str] = pod_spec(controller)["containers"][0].pop("args")
    return args


def test_the_component_for_evictions_adds_two_flags_and_one_right(tmp_path: Path) -> None:
    base, chosen = rendered(BASE), rendered(composed(tmp_path, ["evict-violations"]))
    added = [each for each in chosen if label(each) not in set(map(label, base))]
    assert sorted(map(label, added)) == [
        "ClusterRole/vcuda-evict-violations",
        "ClusterRoleBinding/vcuda-evict-violations",
    ]
    role = one(added, "ClusterRole", "vcuda-evict-violations")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]}]
    before, after = (one(objects, "Deployment", "vcuda-controller") for objects in (base, chosen))
    assert flags(after) == [*flags(before), "--evict-violations", "--violations-period=600"]
    assert after == before


def test_the_base_evicts_no_pod_and_has_no_right_to_evict() -> None:
    base = rendered(BASE)
    assert "--evict-violations" not in flags(one(base, "Deployment", "vcuda-controller"))
    rules = [rule for each in base for rule in each.get("rules", []) if "resources" in rule]
    assert not any("pods/eviction" in rule["resources"] or "*" in rule["resources"] for rule in rules)


# Tests of the component prometheus


PARTS = {"vcuda-webhook": "Deployment", "vcuda-controller": "Deployment", "vcuda-node": "DaemonSet"}


@pytest.fixture
def objects(tmp_path: Path) -> list[Json]:
    return rendered(composed(tmp_path, ["node-agent-gpu-manager", "prometheus"]))


def workload_of(objects: Sequence[Json], name: str) -> Json:
    [found] = [
        each
        for each in objects
        if each["kind"] == PARTS[name]
        and each["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"] == name
    ]
    return found


def test_every_alert_has_a_line_with_the_problem_and_one_with_the_remedy(objects: list[Json]) -> None:
    [group] = one(objects, "PrometheusRule", "vcuda-quota")["spec"]["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(names) == len(set(names)) > 10
    for rule in group["rules"]:
        assert rule["annotations"].keys() == {"summary", "runbook", "runbook_url"}, rule
        assert all(text and "\n" not in text for text in rule["annotations"].values()), rule
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule


def sections(page: Path) -> dict[str, str]:
    _, *parts = re.split(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in parts[::2]]
    return dict(zip(anchors, parts[1::2], strict=True))


def runbooks(objects: Sequence[Json]) -> dict[str, tuple[str, str]]:
    [group] = one(objects, "PrometheusRule", "vcuda-quota")["spec"]["groups"]
    found = ((rule["alert"], rule["annotations"]["runbook_url"].partition("#")) for rule in group["rules"])
    return {alert: (page, section) for alert, (page, _, section) in found}


def test_every_alert_leads_to_a_section_of_the_documentation_that_names_it(objects: list[Json]) -> None:
    text = sections(MANIFESTS.parent / "docs" / "troubleshooting.md")
    for alert, (page, section) in runbooks(objects).items():
        assert page == "docs/troubleshooting.md"
        assert alert in text.get(section, ""), f"{alert}: #{section}"


def test_one_annotation_changes_the_page_that_all_alerts_lead_to(tmp_path: Path) -> None:
    target = composed(tmp_path, ["prometheus"])
    file = target.parent / "components" / "prometheus" / "rules.yaml"
    usual, own = "quota.vcuda.io/runbooks: docs/troubleshooting.md", "https://docs.example.com/troubleshooting.html"
    file.write_text(file.read_text().replace(usual, f"quota.vcuda.io/runbooks: {own}"))
    found = runbooks(rendered(target))
    assert {page for page, _ in found.values()} == {own}
    assert found["VcudaLedgerLost"] == (own, "a-lost-ledger")


@pytest.mark.parametrize("name", PARTS)
def test_prometheus_scrapes_every_part_at_an_existing_port(objects: list[Json], name: str) -> None:
    monitor, service = one(objects, "ServiceMonitor", name), one(objects, "Service", name)
    workload = workload_of(objects, name)
    namespaces = {each["metadata"]["namespace"] for each in (monitor, service, workload)}
    assert len(namespaces) == 1
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    [endpoint] = monitor["spec"]["endpoints"]
    [port] = service["spec"]["ports"]
    assert endpoint["port"] == port["name"]
    assert port["targetPort"] in {each["name"] for each in container(workload)["ports"]}


def test_every_part_is_scraped(objects: list[Json]) -> None:
    serving = {label(each) for each in ours(objects) if "ports" in container(each)}
    assert serving == {label(workload_of(objects, name)) for name in PARTS}


@pytest.mark.parametrize("name", ["vcuda-controller", "vcuda-node"])
def test_the_network_policies_admit_prometheus_to_otherwise_closed_ports(objects: list[Json], name: str) -> None:
    policy = one(objects, "NetworkPolicy", f"{name}-metrics")["spec"]
    workload = workload_of(objects, name)
    assert policy["podSelector"]["matchLabels"].items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    [rule] = policy["ingress"]
    assert [each["port"] for each in rule["ports"]] == [each["name"] for each in container(workload)["ports"]]


def test_grafana_can_load_the_dashboard(objects: list[Json]) -> None:
    """Panels must have unique ids and must not overlap. Every query must use the chosen data source."""
    dashboard = json.loads(one(objects, "ConfigMap", "vcuda-quota-dashboard")["data"]["vcuda-quota.json"])
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert {target["datasource"]["uid"] for panel in panels for target in panel["targets"]} == {"${datasource}"}


def test_the_dashboard_shows_the_used_part_of_each_limit_and_of_each_total(objects: list[Json]) -> None:
    dashboard = json.loads(one(objects, "ConfigMap", "vcuda-quota-dashboard")["data"]["vcuda-quota.json"])
    [panel] = [each for each in dashboard["panels"] if each["title"] == "Used of the quota"]
    assert [
        [name for name in ("limit_cards", "total_limit_cards") if f"vcuda_quota_{name}" in target["expr"]]
        for target in panel["targets"]
    ] == [["limit_cards"], ["total_limit_cards"]]


def test_our_mutating_webhook_is_called_before_those_of_hami_and_vgpu_manager() -> None:
    """Webhooks are called in the order of the configurations' names. HAMi's rejects a nodeName, which ours replaces."""
    [found] = [each for each in rendered(BASE) if each["kind"] == "MutatingWebhookConfiguration"]
    names = ["hami-webhook", "hami-dra-webhook", "vgpu-manager-webhook", found["metadata"]["name"]]
    assert min(names) == found["metadata"]["name"]
    assert declared(found)[0]["reinvocationPolicy"] == "IfNeeded"
