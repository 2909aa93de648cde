"""Tests that the system works after `kubectl apply`, although nobody has labelled the nodes with their models.

It finds the models in the labels of GPU feature discovery and in the annotations of HAMi.
"""

import json
import os
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest
import yaml

from examples.discovery import A100_PRODUCT, features, hami
from tests.builders import MODEL, vcuda_pod
from tests.e2e.cluster import Cluster, Json
from tests.e2e.conftest import require
from tests.e2e.installation import await_enforced
from tests.e2e.manifests.audit import AuditLog
from tests.e2e.manifests.system import System, applied
from tests.e2e.quota_config import QuotaConfigMap
from tests.gpuquota import run
from tests.processes import ControllerProcess, eventually
from tools.control_plane import ControlPlane
from vcuda.placement.device_plugins import DISCOVERED

pytestmark = pytest.mark.one_version

BY_PRODUCT, BY_ROW, MISSPELT = TEAMS = "team-product", "team-row", "team-misspelt"
T4_PRODUCT = "NVIDIA-Tesla-T4"
GPU = "nvidia.com/gpu"
QUOTA = {
    "gpu_quota": json.dumps(
        {
            BY_PRODUCT: {"quota": {T4_PRODUCT: 2}},
            BY_ROW: {"quota": {"A100": 1}},
            MISSPELT: {"quota": {"A10O": 1}},
        }
    ),
    "gpu_models": "A100: [NVIDIA-A100-*GB]\n",
}
CONTROLLER = "system:serviceaccount:vcuda-quota:vcuda-controller"


@pytest.fixture(scope="module")
def system(admin: Cluster, plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """The base manifests, and nodes with the labels of GPU feature discovery. One node also has annotations of HAMi.

    One more node only has the label of its cloud, and another has neither labels nor annotations.
    """
    require(plane, "kube-scheduler")
    for name, product, count in (("d-a100", A100_PRODUCT, "1"), ("d-t4", "Tesla-T4", "2")):
        admin.create_node(name, features(product, count)["labels"], {GPU: count})
    shares = hami("NVIDIA L40S")
    admin.create_node("d-hami", features("Tesla-T4")["labels"], {GPU: "10"})
    admin.rest.merge_patch("/api/v1/nodes/d-hami", {"metadata": {"annotations": shares["annotations"]}})
    admin.create_node("d-gke", {"cloud.google.com/gke-accelerator": "nvidia-l4"}, {GPU: "1"})
    admin.create_node("d-none", {}, {GPU: "1"})
    with applied(admin, tmp_path_factory.mktemp("system")) as found:
        yield found
    for name in ("d-a100", "d-t4", "d-hami", "d-gke", "d-none"):
        admin.delete_node(name)


@pytest.fixture(scope="module")
def controller(admin: Cluster, system: System) -> Iterator[ControllerProcess]:
    with system.serving(1), system.controller() as process:
        process.await_synced()
        for namespace in TEAMS:
            admin.create_namespace(namespace)
        manifest = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"namespace": "kube-system", "name": "gpuquota", "labels": {"quota.vcuda.io/config": "true"}},
            "data": QUOTA,
        }
        path = system.directory / "gpuquota.yaml"
        path.write_text(yaml.safe_dump(manifest))
        admin.kubectl("apply", "-f", str(path))
        for namespace in TEAMS:
            await_enforced(admin, namespace)
        yield process
        QuotaConfigMap(admin.rest, "kube-system", "gpuquota").delete()
        for namespace in TEAMS:
            admin.delete_namespace(namespace)


def asking(namespace: str, name: str, cards: int = 1) -> Json:
    return vcuda_pod({GPU: str(cards)}, metadata={"name": name, "namespace": namespace})


def label_of(node: Json) -> str | None:
    label: str | None = node["metadata"]["labels"].get(MODEL)
    return label


@pytest.mark.usefixtures("controller")
def test_nodes_are_labelled_with_their_product_or_with_the_model_of_the_quotas_row(admin: Cluster) -> None:
    labelled = admin.await_object("/api/v1/nodes", "d-t4", lambda node: label_of(node) is not None)
    assert label_of(labelled) == T4_PRODUCT
    assert labelled["metadata"]["annotations"][DISCOVERED] == f"{T4_PRODUCT} from gpu-feature-discovery"
    # `gpu_models` names this product A100. If the controller labels the node before it reads this, the label is the
    # product's name. Both names then mean the same model.
    assert label_of(admin.await_object("/api/v1/nodes", "d-a100", lambda node: label_of(node) is not None)) in (
        A100_PRODUCT,
        "A100",
    )


@pytest.mark.usefixtures("controller")
@pytest.mark.parametrize(
    ("namespace", "model", "node", "cards"), [(BY_PRODUCT, T4_PRODUCT, "d-t4", 2), (BY_ROW, "A100", "d-a100", 1)]
)
def test_a_pod_within_quota_is_bound_to_a_node_of_its_model_and_one_beyond_it_rejected(
    admin: Cluster, namespace: str, model: str, node: str, cards: int
) -> None:
    created = admin.create(asking(namespace, "train", cards))
    assert created["metadata"]["annotations"]["quota.vcuda.io/model"] == model
    assert admin.await_bound(namespace, "train")["spec"]["nodeName"] == node
    rejected = admin.try_create(asking(namespace, "more"))
    assert rejected.status == HTTPStatus.FORBIDDEN
    assert f"exceeded quota: {model} in namespace {namespace}, requested: 1 card, used: {cards}" in rejected.message


@pytest.mark.usefixtures("controller")
def test_the_register_of_hami_overrides_a_label_and_an_event_reports_the_conflict(admin: Cluster) -> None:
    labelled = admin.await_object("/api/v1/nodes", "d-hami", lambda node: label_of(node) is not None)
    assert labelled["metadata"]["annotations"][DISCOVERED].endswith(" from hami")
    [event] = admin.await_events("default", "involvedObject.name=d-hami")
    assert event["reason"] == "GPUModelInDoubt"
    assert "GPU feature discovery reports NVIDIA-Tesla-T4" in event["message"]
    described = admin.kubectl("describe", "node", "d-hami").stdout
    assert "GPUModelInDoubt" in described


@pytest.mark.usefixtures("controller")
def test_a_node_that_only_its_cloud_names_is_labelled_and_a_node_that_nobody_names_is_reported(admin: Cluster) -> None:
    labelled = admin.await_object("/api/v1/nodes", "d-gke", lambda node: label_of(node) is not None, timeout=90)
    assert labelled["metadata"]["annotations"][DISCOVERED] == "NVIDIA-L4 from cloud-label"
    [event] = admin.await_events("default", "involvedObject.name=d-none")
    assert event["message"].startswith(f"the node offers {GPU}, but no source names its GPU model")
    assert "d-none: the node offers" in gpuquota(admin, "nodes")[1]


def test_the_nodes_and_a_model_that_no_node_has_are_shown(admin: Cluster, controller: ControllerProcess) -> None:
    warning = "no node has GPU model A10O; did you mean A100?"
    # Until the controller has labelled the node and read `gpu_models`, the warning names other models.
    controller.await_log("quota cannot be used", lambda line: line["why"] == warning)
    eventually(lambda: "did you mean A100?" in gpuquota(admin, "-n", MISSPELT)[1])
    table, warnings = gpuquota(admin, "nodes")
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines() if line}
    assert rows["d-a100"][:3] == ["A100", "1", "15360"]
    assert rows["d-t4"][:5] == [T4_PRODUCT, "2", "15360", "gpu-feature-discovery", GPU]
    assert warning in warnings


def gpuquota(admin: Cluster, *arguments: str) -> tuple[str, str]:
    path = f"{Path(admin.kubectl_program).parent}{os.pathsep}{os.environ['PATH']}"
    told = run("--kubeconfig", str(admin.kubeconfig), *arguments, env={"PATH": path})
    return told.stdout, told.stderr


def test_the_controller_made_no_request_without_the_right_to_it(
    controller: ControllerProcess, audit_log: AuditLog
) -> None:
    assert controller.process.poll() is None
    assert audit_log.requests(CONTROLLER)
    assert audit_log.rejected(CONTROLLER) == set()
