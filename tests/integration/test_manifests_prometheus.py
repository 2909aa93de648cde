"""The alerts say what to do, and Prometheus is led to every part; that the metrics exist is tried on running parts."""

from __future__ import annotations

import json

import pytest

from tests.rendered import MANIFESTS, Json, container, label, one, ours, rendered

OVERLAY = MANIFESTS / "overlays" / "prometheus"
PARTS = {"vcuda-webhook": "Deployment", "vcuda-controller": "Deployment", "vcuda-node": "DaemonSet"}


@pytest.fixture
def objects() -> list[Json]:
    return rendered(OVERLAY)


def test_every_alert_says_what_is_wrong_and_what_to_do_in_a_line_each(objects: list[Json]) -> None:
    [group] = one(objects, "PrometheusRule", "vcuda-quota")["spec"]["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(names) == len(set(names)) > 10
    for rule in group["rules"]:
        assert rule["annotations"].keys() == {"summary", "runbook"}, rule
        assert all(text and "\n" not in text for text in rule["annotations"].values()), rule
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule


@pytest.mark.parametrize("name", PARTS)
def test_every_part_is_scraped_at_a_port_that_it_has(objects: list[Json], name: str) -> None:
    monitor, service = one(objects, "ServiceMonitor", name), one(objects, "Service", name)
    workload = one(objects, PARTS[name], name)
    namespaces = {each["metadata"]["namespace"] for each in (monitor, service, workload)}
    assert len(namespaces) == 1
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert service["spec"]["selector"].items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    [endpoint] = monitor["spec"]["endpoints"]
    [port] = service["spec"]["ports"]
    assert endpoint["port"] == port["name"]
    assert port["targetPort"] in {each["name"] for each in container(workload)["ports"]}


def test_no_part_of_ours_is_left_out(objects: list[Json]) -> None:
    serving = {label(each) for each in ours(objects) if "ports" in container(each)}
    assert serving == {f"{kind}/{name}" for name, kind in PARTS.items()}


@pytest.mark.parametrize("name", ["vcuda-controller", "vcuda-node"])
def test_the_network_policies_let_prometheus_in_where_nobody_else_is(objects: list[Json], name: str) -> None:
    policy = one(objects, "NetworkPolicy", f"{name}-metrics")["spec"]
    workload = one(objects, PARTS[name], name)
    assert policy["podSelector"]["matchLabels"].items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    [rule] = policy["ingress"]
    assert [each["port"] for each in rule["ports"]] == [each["name"] for each in container(workload)["ports"]]


def test_the_dashboard_is_one_that_grafana_can_load(objects: list[Json]) -> None:
    """Whole JSON, ids of its own for the panels, none over another, every query of the data source that is chosen."""
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
