"""Tests of pods that users create with kubectl, on a real API server and scheduler.

The webhook pins a pod (limits it to nodes of one GPU model), rejects it, or leaves it unchanged.
"""

import json
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.builders import MODEL, POOL, container, held_to, required, requirement, term
from tests.e2e.cluster import Cluster, Json
from tests.e2e.installation import Installation, await_nodes
from tests.integration.reviews import card_pod, gpu_pod, with_spec
from vcuda.requests.schemes import SCHEMES

Team = Callable[[Json], str]

NODES = {
    "gpu-m40": {MODEL: "M40", POOL: "public"},
    "gpu-p100": {MODEL: "P100", POOL: "public"},
    "gpu-mixed": {MODEL: "M40", POOL: "mixed"},
}
"""The labels of the nodes, by name of the node. The third node is in a pool that most teams may not use."""

SHARES = {
    scheme.name: {
        **({scheme.count: "1"} if scheme.count else {}),
        scheme.cores: "50",
        scheme.memory: str(4096 // scheme.memory_unit),
    }
    for scheme in SCHEMES
}
"""A container's limits for half a card with 4 GiB of memory, in each scheme (the resource names of one vendor)."""

M40, NEVER = "exceeded quota: M40 in namespace {}", "larger than the GPU quota: M40 in namespace {}"
NO_MODEL = "this pod may use no GPU model in namespace {}: M40 is excluded by"
NO_NODE = "which leaves no node in the namespace's pools public"

FORGED = {
    "tencent.com/predicate-time": "1700000000000000000",
    "tencent.com/predicate-node": "gpu-mixed",
    "tencent.com/predicate-gpu-idx-0": "0",
    "tencent.com/gpu-assigned": "true",
    "hami.io/vgpu-devices-allocated": "GPU-0,NVIDIA,4096,50:;",
    "nvidia.com/pre-allocated": "main[0_GPU-0_50_4096]",
}


@pytest.fixture(scope="module", autouse=True)
def nodes(cluster: Cluster, installation: Installation) -> Iterator[None]:
    capacity = {resource: "100000" for limits in SHARES.values() for resource in limits}
    for name, labels in NODES.items():
        cluster.create_node(name, labels, capacity)
    await_nodes(installation, *NODES.values())
    yield
    for name in NODES:
        cluster.delete_node(name)


def kubectl_create(cluster: Cluster, *pods: Json, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    manifest = {"apiVersion": "v1", "kind": "List", "items": pods}
    return cluster.kubectl("create", "-f", "-", "-o", "json", *options, stdin=json.dumps(manifest), check=False)


@pytest.mark.usefixtures("scheduler")
@pytest.mark.parametrize("limits", SHARES.values(), ids=SHARES.keys())
def test_a_pod_of_every_scheme_lands_on_a_node_of_its_teams_model_and_pool(
    cluster: Cluster, team: Team, limits: Json
) -> None:
    """Each team may use one model in one pool, and only one node has both."""
    targets = {team({"pool": [labels[POOL]], "quota": {labels[MODEL]: 1}}): node for node, labels in NODES.items()}
    created = kubectl_create(cluster, *(gpu_pod("train", namespace, limits) for namespace in targets))
    assert created.returncode == 0, created.stderr
    for namespace, node in targets.items():
        pod = cluster.pod(namespace)
        assert pod["spec"]["affinity"] == held_to(NODES[node][MODEL], NODES[node][POOL])
        assert pod["metadata"]["annotations"]["quota.vcuda.io/model"] == NODES[node][MODEL]
        assert cluster.await_bound(namespace)["spec"]["nodeName"] == node


@pytest.mark.parametrize(
    ("cards", "spec", "message"),
    [
        pytest.param(3, {}, f"{NEVER}, requested: 3 cards, used: 0 (0 pending), limited: 2, can never fit", id="over"),
        pytest.param(1, {"nodeName": "gpu-mixed"}, f"{NO_MODEL} the pod's node selection, {NO_NODE}", id="elsewhere"),
    ],
)
def test_kubectl_shows_why_a_pod_is_rejected(
    cluster: Cluster, team: Team, cards: int, spec: Json, message: str
) -> None:
    namespace = team({"pool": ["public"], "quota": {"M40": 2}})
    rejected = kubectl_create(cluster, with_spec(card_pod("train", namespace, cards), **spec))
    denied = f'admission webhook "mutate.quota.vcuda.io" denied the request: {message.format(namespace)}'
    assert rejected.stderr == f'Error from server (Forbidden): error when creating "STDIN": {denied}\n'
    assert cluster.pods(namespace) == []


def test_a_malformed_request_is_rejected_with_the_path_of_every_fault(cluster: Cluster, team: Team) -> None:
    namespace = team({"quota": {"M40": 8}})
    pod = gpu_pod("train", namespace, {"tencent.com/vcuda-core": "150"})
    pod["spec"]["containers"].append(container({"tencent.com/vcuda-core": "50"}, name="shared"))
    shown = kubectl_create(cluster, pod).stderr
    limits = "* spec.containers[{}].resources.limits[tencent.com/vcuda-core]: "
    assert f"{limits.format(0)}150 is more than one card but not whole cards; write 100 or 200" in shown
    assert f"{limits.format(1)}a share of a card needs memory" in shown


@pytest.mark.usefixtures("scheduler")
def test_pods_of_an_unlimited_namespace_are_unchanged(cluster: Cluster, installation: Installation) -> None:
    with installation.free_team() as namespace:
        pod = gpu_pod("train", namespace, {"tencent.com/vcuda-core": "6400"}, annotations=FORGED)
        assert kubectl_create(cluster, pod).returncode == 0
        kept = cluster.pod(namespace)
        assert kept["metadata"]["annotations"] == FORGED
        assert "affinity" not in kept["spec"]
        assert installation.charged(namespace) == {}


@pytest.mark.usefixtures("scheduler")
def test_a_preset_node_name_becomes_an_affinity_and_the_scheduler_binds_the_pod_there(
    cluster: Cluster, team: Team
) -> None:
    namespace = team({"quota": {"P100": 1, "M40": 1}})
    created = kubectl_create(cluster, with_spec(card_pod("train", namespace), nodeName="gpu-mixed"))
    assert "nodeName" not in json.loads(created.stdout)["spec"]
    assert cluster.await_bound(namespace)["spec"]["nodeName"] == "gpu-mixed"
    on_its_node = term(requirement(MODEL, "In", "M40"), fields=[requirement("metadata.name", "In", "gpu-mixed")])
    assert cluster.pod(namespace)["spec"]["affinity"] == required(on_its_node)
    cluster.await_events(namespace, "reason=Scheduled")


def test_a_dry_run_shows_the_decision_and_charges_nothing(
    cluster: Cluster, installation: Installation, team: Team
) -> None:
    namespace = team({"quota": {"M40": 1}})
    dry_run = ("--dry-run=server",)
    shown = kubectl_create(cluster, card_pod("train", namespace), options=dry_run)
    assert json.loads(shown.stdout)["spec"]["affinity"] == held_to("M40")
    assert installation.charged(namespace) == {}
    created = kubectl_create(cluster, card_pod("train", namespace))
    nearly = f"the GPU quota is nearly used up: M40 in namespace {namespace}, 1 card of 1 card"
    assert (created.returncode, created.stderr) == (0, f"Warning: {nearly}\n")
    assert installation.charged(namespace) == {"M40": 100}
    assert "exceeded quota" in kubectl_create(cluster, card_pod("another", namespace), options=dry_run).stderr


def test_pods_with_generated_names_are_charged_under_the_uid_they_are_stored_with(
    cluster: Cluster, installation: Installation, team: Team
) -> None:
    namespace = team({"quota": {"M40": 2}})
    pod = card_pod("", namespace)
    pod["metadata"] = {"namespace": namespace, "generateName": "train-"}
    answers = [kubectl_create(cluster, pod) for _ in range(3)]
    assert [answer.returncode for answer in answers] == [0, 0, 1]
    assert installation.ledger(namespace).pending.keys() == {one["metadata"]["uid"] for one in cluster.pods(namespace)}


@pytest.mark.usefixtures("scheduler")
def test_a_manifest_copied_from_a_running_pod_is_admitted_charged_and_scheduled(
    cluster: Cluster, installation: Installation, team: Team
) -> None:
    """The copied manifest still has the nodeName, the uid and the allocation of the pod that it was copied from."""
    namespace = team({"pool": ["public"], "quota": {"M40": 2}})
    cluster.create(card_pod("train", namespace))
    node = cluster.await_bound(namespace)["spec"]["nodeName"]
    cluster.rest.merge_patch(f"/api/v1/namespaces/{namespace}/pods/train", {"metadata": {"annotations": FORGED}})
    live = json.loads(cluster.kubectl("get", "pod", "train", "-n", namespace, "-o", "json").stdout)
    live["metadata"]["name"] = "copy"
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(live))
    copy = cluster.pod(namespace, "copy")
    assert not FORGED.keys() & copy["metadata"]["annotations"].keys()
    assert cluster.await_bound(namespace, "copy")["spec"]["nodeName"] == node
    pods = cluster.pods(namespace)
    assert installation.ledger(namespace).pending.keys() == {pod["metadata"]["uid"] for pod in pods}
    assert installation.charged(namespace) == {"M40": 200}


def test_applying_a_stored_pod_again_is_no_new_charge(cluster: Cluster, installation: Installation, team: Team) -> None:
    namespace = team({"quota": {"M40": 1}})
    for _ in range(2):
        cluster.apply(card_pod("train", namespace))
    assert installation.charged(namespace) == {"M40": 100}


def test_kubectl_shows_a_warning_if_the_quota_only_warns(
    cluster: Cluster, installation: Installation, team: Team
) -> None:
    namespace = team({"mode": "warn", "quota": {"M40": 1}})
    created = kubectl_create(cluster, card_pod("train", namespace, 2))
    assert created.stderr == (
        f"Warning: {NEVER.format(namespace)}, requested: 2 cards, used: 0 (0 pending), "
        "limited: 1, can never fit; the object is admitted, because this quota only warns\n"
    )
    assert installation.charged(namespace) == {"M40": 200}
