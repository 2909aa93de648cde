"""The first steps of a user with the applied manifests. Every program runs with the flags and token of its workload."""

import http.client
import json
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http import HTTPStatus

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.builders import MODEL, POOL
from tests.e2e import dra
from tests.e2e.cluster import Cluster
from tests.e2e.installation import SYSTEM_NAMESPACE
from tests.e2e.manifests.audit import AuditLog
from tests.e2e.manifests.operations import EXAMPLE, TEAM, limit
from tests.e2e.manifests.system import NODE, System, applied, user_of
from tests.integration.reviews import card_pod
from tests.processes import PATIENCE, ControllerProcess, NodeProcess, WebhookProcess
from tests.rendered import MANIFESTS, one, ours, rendered

OF_THE_API_SERVER = "apiserver_admission_webhook_rejection_count"


@pytest.fixture(scope="module")
def system(admin: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with applied(admin, tmp_path_factory.mktemp("system"), "node-agent-gpu-manager") as system:
        yield system


@pytest.fixture(scope="module")
def node(admin: Cluster) -> Iterator[str]:
    admin.create_node(NODE, {MODEL: "M40", POOL: "public"}, {"tencent.com/vcuda-core": "1600"})
    yield NODE
    admin.delete_node(NODE)


@pytest.fixture(scope="module")
def webhook(system: System, node: str) -> Iterator[WebhookProcess]:
    assert node
    with system.serving(1) as [process]:
        yield process


@pytest.fixture(scope="module")
def controller(system: System, webhook: WebhookProcess) -> Iterator[ControllerProcess]:
    assert webhook.url
    with system.controller() as process:
        process.await_synced()
        yield process


@pytest.fixture(scope="module")
def agent(system: System, node: str) -> Iterator[NodeProcess]:
    assert node
    with system.node_agent() as process:
        yield process


@pytest.fixture(scope="module")
def quota(admin: Cluster, controller: ControllerProcess) -> Iterator[None]:
    assert controller.port
    limit(admin)
    yield
    admin.kubectl("delete", "-f", str(EXAMPLE))
    admin.delete_namespace(TEAM)


def test_the_first_certificates_are_made_before_any_webhook_runs(admin: Cluster, system: System) -> None:
    """The first Job has only the rights of its account."""
    done = system.rotate(timeout="0s")
    assert done.returncode == 0, done.stdout + done.stderr
    assert admin.rest.get(f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets/vcuda-webhook-tls")["type"] == (
        "kubernetes.io/tls"
    )


@pytest.mark.usefixtures("quota")
def test_a_pod_within_quota_is_pinned_and_one_beyond_it_is_rejected_with_the_reason(admin: Cluster) -> None:
    pods = (MANIFESTS / "examples" / "demo" / "pods.yaml").read_text()
    assert "name: whole-card" in pods
    created = admin.create(card_pod("whole-card", TEAM))
    assert created["metadata"]["annotations"]["quota.vcuda.io/model"] == "M40"
    refused = admin.try_create(card_pod("too-many", TEAM, cards=3))
    assert refused.status == HTTPStatus.FORBIDDEN
    assert "exceeded GPU quota: M40 in namespace team-a, requested: 3 cards" in refused.message
    assert "can never fit" in refused.message
    admin.delete_pod(TEAM, "whole-card")


@pytest.mark.usefixtures("quota")
def test_a_claim_within_quota_is_pinned_and_one_beyond_it_is_rejected_with_the_reason(admin: Cluster) -> None:
    dra.require_dra(admin)
    created = admin.create(dra.claim(TEAM, "card"))
    [asked] = created["spec"]["devices"]["requests"]
    assert "productName" in asked["exactly"]["selectors"][0]["cel"]["expression"]
    refused = admin.try_create(dra.claim(TEAM, "too-many", dra.request(count=9)))
    assert refused.status == HTTPStatus.FORBIDDEN
    assert "exceeded GPU quota: M40 in namespace team-a, requested: 9 cards" in refused.message
    admin.delete(f"{dra.claims_path(TEAM)}/card")


@pytest.mark.usefixtures("quota")
def test_an_edit_of_the_quota_is_checked_and_other_configmaps_are_not(admin: Cluster, system: System) -> None:
    bad = {"metadata": {"namespace": "kube-system", "name": "gpuquota"}, "data": {"gpu_quota": "{team-a: 8}"}}
    refused = admin.rest.try_merge_patch("/api/v1/namespaces/kube-system/configmaps/gpuquota", bad)
    assert refused.status == HTTPStatus.UNPROCESSABLE_ENTITY
    assert "team-a" in refused.message
    with without_endpoints(system):
        admin.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": TEAM, "name": "another"}})


@contextmanager
def without_endpoints(system: System) -> Iterator[None]:
    ports = system.balancer.disconnect()
    try:
        yield
    finally:
        for port in ports:
            system.balancer.add(port)


def test_only_users_who_may_forward_ports_reach_the_usage_page(controller: ControllerProcess) -> None:
    port = controller.await_log("serving the usage page")["port"]
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        connection.request("GET", "/")
        assert connection.getresponse().status == HTTPStatus.OK


# Metrics


@pytest.mark.usefixtures("quota")
def test_every_metric_that_alerts_and_dashboard_name_is_exported(
    admin: Cluster, system: System, webhook: WebhookProcess, controller: ControllerProcess, agent: NodeProcess
) -> None:
    with without_endpoints(system):
        assert admin.try_create(card_pod("waits", TEAM)).status == HTTPStatus.INTERNAL_SERVER_ERROR
    exported = families(webhook.get("/metrics").body) | families(controller.get("/metrics").body)
    exported |= families(agent.get("/metrics").body)
    used = named_metrics()
    assert len(used) > 15
    assert used - exported == {OF_THE_API_SERVER}
    text = admin.kubectl("get", "--raw", "/metrics").stdout
    assert f'{OF_THE_API_SERVER}{{error_type="calling_webhook_error",name="validate.quota.vcuda.io"' in text


def families(text: bytes) -> set[str]:
    """Return all names that samples of the metrics in ``text`` can have. The text is in Prometheus' format."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    return {
        f"{family.name}{suffix}"
        for family in text_string_to_metric_families(text.decode())
        for suffix in suffixes[family.type]
    }


def named_metrics() -> set[str]:
    """Return the names of the metrics in the PromQL expressions of the alerts and of the dashboard."""
    objects = rendered(MANIFESTS / "overlays" / "prometheus")
    [group] = one(objects, "PrometheusRule", "vcuda-quota")["spec"]["groups"]
    dashboard = json.loads(one(objects, "ConfigMap", "vcuda-quota-dashboard")["data"]["vcuda-quota.json"])
    expressions = [rule["expr"] for rule in group["rules"]]
    expressions += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return {name for each in expressions for name in re.findall(r"\b(?:vcuda|apiserver)_[a-z_]+", each)}


# Rights


@pytest.mark.usefixtures("quota", "agent")
def test_no_part_made_a_request_without_the_right_to_it(system: System, audit_log: AuditLog) -> None:
    users = {user_of(each) for each in ours(system.objects)}
    assert {user for user in users if not audit_log.requests(user)} == set()
    assert {user: audit_log.refused(user) for user in users} == {user: set() for user in users}
