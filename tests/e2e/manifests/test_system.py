"""Tests of a user's first steps with the applied manifests. Each program has the flags and token of its workload."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.builders import MODEL, POOL
from tests.e2e.cluster import Cluster
from tests.e2e.manifests.operations import TEAM, example_quota
from tests.e2e.manifests.system import NODE, System, applied
from tests.integration.reviews import card_pod
from tests.processes import Server
from tests.rendered import MANIFESTS, one, rendered

OF_THE_API_SERVER = "apiserver_admission_webhook_rejection_count"


Running = tuple[System, tuple[Server, ...]]


@pytest.fixture(scope="module")
def running(admin: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The running system: a webhook, a controller and a node agent. The example quota is in force."""
    admin.create_node(NODE, {MODEL: "M40", POOL: "public"}, {"tencent.com/vcuda-core": "1600"})
    with (
        applied(admin, tmp_path_factory.mktemp("system"), "node-agent-gpu-manager") as system,
        system.serving(1) as [webhook],
        system.controller() as controller,
        system.node_agent() as agent,
    ):
        controller.await_synced()
        with example_quota(admin):
            yield system, (webhook, controller, agent)
    admin.delete_node(NODE)


@contextmanager
def without_endpoints(system: System) -> Iterator[None]:
    ports = system.balancer.disconnect()
    try:
        yield
    finally:
        for port in ports:
            system.balancer.add(port)


def test_every_metric_that_alerts_and_dashboard_name_is_exported(admin: Cluster, running: Running) -> None:
    with without_endpoints(running[0]):
        assert admin.try_create(card_pod("waits", TEAM)).status == HTTPStatus.INTERNAL_SERVER_ERROR
    exported = {name for process in running[1] for name in families(process.get("/metrics").body)}
    used = named_metrics()
    assert len(used) > 15
    assert used - exported == {OF_THE_API_SERVER}
    text = admin.kubectl("get", "--raw", "/metrics").stdout
    assert f'{OF_THE_API_SERVER}{{error_type="calling_webhook_error",name="validate.quota.vcuda.io"' in text


def families(text: bytes) -> set[str]:
    """Return all names that samples of the metrics in ``text`` (in Prometheus' format) may have."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    return {
        f"{family.name}{suffix}"
        for family in text_string_to_metric_families(text.decode())
        for suffix in suffixes[family.type]
    }


def named_metrics() -> set[str]:
    objects = rendered(MANIFESTS / "overlays" / "prometheus")
    [group] = one(objects, "PrometheusRule", "vcuda-quota")["spec"]["groups"]
    dashboard = json.loads(one(objects, "ConfigMap", "vcuda-quota-dashboard")["data"]["vcuda-quota.json"])
    expressions = [rule["expr"] for rule in group["rules"]]
    expressions += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return {name for each in expressions for name in re.findall(r"\b(?:vcuda|apiserver)_[a-z_]+", each)}
