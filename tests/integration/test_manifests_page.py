"""Tests of the component `page`: a Service for the usage page, which only a proxy may reach."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import kubernetes_validate  # type: ignore[import-untyped]  # the package has no types
import pytest
import yaml

from controller.ui.leading import SERVICE
from tests.integration.overlays import flags as flags_of
from tests.pod_security import offences
from tests.rendered import MANIFESTS, SYSTEM_NAMESPACE, Json, composed, container, label, one, pod_spec, rendered
from vcuda.quota.well_known import USAGE_NAME

pytestmark = pytest.mark.slow

EXAMPLES = MANIFESTS / "examples" / "page"
VERSIONS = ("1.30", "1.37")
"""The oldest and the newest Kubernetes version that the project supports."""

GATEWAY_API = "gateway.networking.k8s.io/v1"


def example(name: str) -> list[Json]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


@pytest.fixture
def page(tmp_path: Path) -> list[Json]:
    return rendered(composed(tmp_path, ["page"]))


def flags(objects: Sequence[Json]) -> Json:
    return flags_of(one(objects, "Deployment", "vcuda-controller"))


def port(objects: Sequence[Json], name: str) -> int:
    ports = container(one(objects, "Deployment", "vcuda-controller"))["ports"]
    [found] = [each["containerPort"] for each in ports if each["name"] == name]
    return int(found)


def test_without_the_component_the_page_is_on_the_loopback_address_and_has_no_service(base: list[Json]) -> None:
    assert flags(base)["ui_address"] == ("127.0.0.1", 8088)
    assert flags(base)["ui_advertise"] is None
    assert not [each for each in base if each["metadata"]["name"] in (SERVICE, "vcuda-quota-viewer")]


def test_the_leader_writes_the_slice_of_a_service_without_a_selector_at_the_port_of_the_page(page: list[Json]) -> None:
    service = one(page, "Service", SERVICE)
    assert "selector" not in service["spec"]
    assert [each["name"] for each in service["spec"]["ports"]] == ["http"]
    found = flags(page)
    assert found["ui_address"] == ("0.0.0.0", port(page, "page"))  # noqa: S104  # a network policy protects the port
    assert found["ui_advertise"] == ("192.0.2.1", port(page, "page"))
    assert found["ui_hosts"] == (f"{SERVICE}.{SYSTEM_NAMESPACE}.svc",)


def test_the_account_may_write_that_slice_and_create_slices_in_its_namespace_and_nothing_else(page: list[Json]) -> None:
    role = one(page, "Role", SERVICE)
    assert role["metadata"]["namespace"] == SYSTEM_NAMESPACE
    kind = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"]}
    assert role["rules"] == [
        {**kind, "resourceNames": [SERVICE], "verbs": ["get", "patch", "delete"]},
        {**kind, "verbs": ["create"]},
    ]


def test_the_viewers_role_reads_the_published_usage_and_is_bound_to_nobody(page: list[Json]) -> None:
    role = one(page, "ClusterRole", "vcuda-quota-viewer")
    [rule] = role["rules"]
    assert rule == {
        "apiGroups": [""],
        "resources": ["configmaps"],
        "resourceNames": [USAGE_NAME],
        "verbs": ["get", "list"],
    }
    bindings = [each for each in page if each["kind"].endswith("Binding") and "roleRef" in each]
    assert role["metadata"]["name"] not in {each["roleRef"]["name"] for each in bindings}


def test_only_the_pods_of_the_example_s_proxy_reach_the_page(page: list[Json]) -> None:
    policies = [each for each in page if each["kind"] == "NetworkPolicy"]
    controller = one(page, "Deployment", "vcuda-controller")["spec"]["template"]["metadata"]["labels"]
    admitting = [
        (each["metadata"]["name"], rule)
        for each in policies
        if each["spec"]["podSelector"].get("matchLabels", {}).items() <= controller.items()
        for rule in each["spec"].get("ingress", [])
        if each["metadata"]["namespace"] == SYSTEM_NAMESPACE
    ]
    [(name, rule)] = admitting
    assert name == SERVICE
    assert rule["ports"] == [{"protocol": "TCP", "port": "page"}]
    [peer] = rule["from"]
    proxy = one(example("oauth2-proxy.yaml"), "Deployment", "oauth2-proxy")
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": proxy["metadata"]["namespace"]}
    assert peer["podSelector"]["matchLabels"] == proxy["spec"]["template"]["metadata"]["labels"]


# Tests of the example manifests for a proxy in front of the usage page


def proxy_flags() -> dict[str, str]:
    deployment = one(example("oauth2-proxy.yaml"), "Deployment", "oauth2-proxy")
    parts = (each.partition("=") for each in container(deployment)["args"])
    return {name: value for name, _, value in parts}


def test_the_proxy_routes_to_the_service_under_the_name_that_the_page_knows(page: list[Json]) -> None:
    found, service = proxy_flags(), one(page, "Service", SERVICE)
    upstream = urlsplit(found["--upstream"])
    assert upstream.hostname in flags(page)["ui_hosts"]
    assert upstream.port or service["spec"]["ports"][0]["port"] == 80
    assert found["--pass-host-header"] == "false"


def test_the_proxy_admits_nobody_without_a_session() -> None:
    assert [name for name in proxy_flags() if name.startswith(("--skip-auth", "--trusted-ip", "--skip-jwt"))] == []
    assert proxy_flags()["--email-domain"] != "*"


def test_the_proxy_is_restricted() -> None:
    objects = example("oauth2-proxy.yaml")
    deployment = one(objects, "Deployment", "oauth2-proxy")
    assert offences(pod_spec(deployment)) == set()
    assert container(deployment)["securityContext"]["readOnlyRootFilesystem"] is True
    assert pod_spec(deployment)["automountServiceAccountToken"] is False
    labels = one(objects, "Namespace", "oauth2-proxy")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.iterdir()))
def test_the_examples_are_valid(name: str, version: str) -> None:
    """No Kubernetes release has schemas of the Gateway API, so the next test checks the references of its objects."""
    for each in example(name):
        if each["apiVersion"] != GATEWAY_API:
            kubernetes_validate.validate(each, version, strict=True)


def test_the_ingress_and_the_gateway_route_the_host_of_the_proxy_to_its_service() -> None:
    objects = [each for path in EXAMPLES.iterdir() for each in example(path.name)]
    host = urlsplit(proxy_flags()["--redirect-url"]).hostname
    service = one(objects, "Service", "oauth2-proxy")
    [port] = service["spec"]["ports"]
    ingress, gateway, route = (one(objects, kind, "vcuda-page") for kind in ("Ingress", "Gateway", "HTTPRoute"))
    assert {each["metadata"]["namespace"] for each in (ingress, gateway, route)} == {service["metadata"]["namespace"]}
    [rule] = ingress["spec"]["rules"]
    [path] = rule["http"]["paths"]
    assert rule["host"] == host
    assert path["backend"] == {"service": {"name": label(service).partition("/")[2], "port": {"name": port["name"]}}}
    [listener] = gateway["spec"]["listeners"]
    assert {gateway["apiVersion"], route["apiVersion"]} == {GATEWAY_API}
    assert (listener["hostname"], route["spec"]["hostnames"]) == (host, [host])
    assert route["spec"]["parentRefs"] == [{"name": gateway["metadata"]["name"]}]
    [backends] = [each["backendRefs"] for each in route["spec"]["rules"]]
    assert backends == [{"name": service["metadata"]["name"], "port": port["port"]}]
