"""Tests in which a tenant stores objects with more levels than our decoders read. Every part handles all others."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from controller.plugin.kubectl import Kubectl
from controller.plugin.rejections import read_rejections
from controller.seen_events import REASON
from controller.ui.events import ReportedEvents
from tests.builders import MODEL
from tests.e2e.cluster import Cluster, administering
from tests.e2e.dra import about, claim, request, served, template
from tests.e2e.installation import Installation, await_enforced, controlling, installed
from tests.e2e.ledgers import await_committed
from tests.e2e.nested import nest
from tests.integration.reviews import card_pod
from tests.processes import ControllerProcess, serving
from tools.control_plane import running_control_plane
from vcuda.claims.names import API_PATH
from vcuda.kube import Kube
from vcuda.quota.rejections import OVER_QUOTA

pytestmark = pytest.mark.one_version

NODE = "nested-m40"


@pytest.fixture(scope="module")
def cluster(assets: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a control plane for these tests only, so that the watches of other tests do not deliver these objects."""
    with (
        running_control_plane(assets, tmp_path_factory.mktemp("nested") / "control-plane") as plane,
        administering(plane) as admin,
    ):
        admin.create_node(NODE, {MODEL: "M40"})
        yield admin


@pytest.fixture
def installation(cluster: Cluster, tmp_path: Path) -> Iterator[Installation]:
    with installed(cluster, tmp_path) as running:
        yield running


def event(namespace: str, name: str) -> dict[str, object]:
    involved = {"kind": "Job", "apiVersion": "batch/v1", "namespace": namespace, "name": name}
    fields = {"involvedObject": involved, "reason": REASON, "message": f"{OVER_QUOTA}: M40", "type": "Warning"}
    return {**about("Event", name, namespace), "apiVersion": "v1", **fields}


def store_nested(cluster: Cluster, kube: Kube, namespace: str) -> None:
    """Store a nested object of each kind that our components read."""
    core = f"/api/v1/namespaces/{namespace}"
    cluster.bind(card_pod("nested", namespace), NODE)
    kube.post(f"{core}/configmaps", msgspec.json.encode({"metadata": {"name": "nested"}}))
    kube.post(f"{core}/events", msgspec.json.encode(event(namespace, "nested")))
    for path in ("pods", "configmaps", "events"):
        nest(kube, f"{core}/{path}/nested")
    nest(kube, f"/api/v1/nodes/{NODE}")
    nest(kube, f"/api/v1/namespaces/{namespace}")
    if served(cluster):
        home = f"{API_PATH}/namespaces/{namespace}"
        cluster.create(template(namespace, "nested", request()))
        cluster.create(claim(namespace, "nested", request()))
        for path in ("resourceclaimtemplates", "resourceclaims"):
            nest(kube, f"{home}/{path}/nested", "resource.k8s.io/v1")


@contextmanager
def leading(installation: Installation) -> Iterator[ControllerProcess]:
    with controlling(installation) as controller:
        yield controller
        assert "object left out" not in controller.output()


def test_nested_objects_stop_no_part_and_the_first_quota_of_their_namespace_takes_effect(
    cluster: Cluster, installation: Installation, kube: Kube
) -> None:
    with installation.free_team() as namespace, installation.free_team() as other:
        with leading(installation):
            await_enforced(cluster, namespace, enforced=False)
            store_nested(cluster, kube, namespace)
            cluster.bind(card_pod("train", other), NODE)
        entries = {each: {"quota": {"M40": 1}} for each in (namespace, other)}
        with leading(installation), installation.quota.limited(**entries):
            for each in (namespace, other):
                await_enforced(cluster, each)
                await_committed(installation, each, M40=100)
                assert cluster.try_create(card_pod("second", each)).is_over_quota
            with serving(*installation.flags, ca=installation.ca) as again:
                again.await_ready()
            cluster.delete_pod(namespace, "nested")
            await_committed(installation, namespace)
            cluster.create(card_pod("third", namespace))


def test_the_page_and_the_plugin_list_the_rejections_next_to_a_nested_event(cluster: Cluster, kube: Kube) -> None:
    page = ReportedEvents(kube)
    plugin = Kubectl((cluster.kubectl_program, f"--kubeconfig={cluster.kubeconfig}"))
    with cluster.fresh_namespace() as namespace:
        events = f"/api/v1/namespaces/{namespace}/events"
        for name in ("nested", "plain"):
            kube.post(events, msgspec.json.encode(event(namespace, name)))
        nest(kube, f"{events}/nested")
        assert {each.name for each in read_rejections(plugin, namespace)} == {"nested", "plain"}
        page.read()
        assert {"nested", "plain"} <= {each.name for each in page.current().rejections or ()}
