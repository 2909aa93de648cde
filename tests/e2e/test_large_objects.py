"""Tests in which a tenant stores hundreds of the largest objects. Our processes stay far below their memory limits."""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.builders import MODEL
from tests.e2e.cluster import Cluster, Json, administering
from tests.e2e.dra import NVIDIA, Published, card, published, require_dra, served
from tests.e2e.installation import Installation, controlling, installed, limited_team, tenant_of
from tests.e2e.large_attackers import large_claim, large_event, large_pod, large_template, naming_pod
from tests.e2e.ledgers import await_committed
from tests.e2e.rest import Answer
from tests.e2e.steady import in_threads
from tests.integration.reviews import card_pod
from tests.processes import ControllerProcess, eventually, memory, serving
from tools.control_plane import running_control_plane

pytestmark = pytest.mark.one_version

MAX_REPLICA_MIB, MAX_CONTROLLER_MIB = 256, 256
"""Maximum memory in MiB: half of the memory limit of a webhook replica, and a quarter of that of a controller."""

GATED_PODS, TEMPLATES, CLAIMS, EVENTS = 200, 60, 30, 120
NODE = "large-a100"


@pytest.fixture(scope="module")
def cluster(assets: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane without objects of other tests.

    If the API server serves claims, the ResourceSlice of a DRA driver offers cards.
    """
    with (
        running_control_plane(assets, tmp_path_factory.mktemp("large") / "control-plane") as running,
        administering(running) as admin,
    ):
        if served(admin):
            with published(admin, Published(NVIDIA, NODE, [card(number, "A100") for number in range(8)])):
                yield admin
        else:
            admin.create_node(NODE, {MODEL: "A100"})
            yield admin


@pytest.fixture
def installation(cluster: Cluster, tmp_path: Path) -> Iterator[Installation]:
    """A new webhook replica for each test, so that the test has caused the peak of the replica's memory."""
    with installed(cluster, tmp_path) as running:
        yield running


def create_all(tenant: Cluster, manifests: list[Json]) -> None:
    with ThreadPoolExecutor(4) as many:
        for answer in many.map(tenant.try_create, manifests):
            answer.ok()


@pytest.mark.timeout(300)
def test_hundreds_of_large_pods_without_gpus_keep_a_replica_within_its_memory_at_the_first_gpu_pod(
    cluster: Cluster, installation: Installation
) -> None:
    """The replica lists all pods of the namespace before it admits the first GPU pod.

    At this time the test creates pods in another namespace.
    """
    entry = {"quota": {"A100": 8}}
    with installation.team(entry) as namespace, installation.team(entry) as other:
        with tenant_of(cluster, namespace) as tenant:
            create_all(tenant, [large_pod(namespace, number) for number in range(GATED_PODS)])
            worker = installation.replica.worker()
            with ThreadPoolExecutor(1) as first:
                admitted = first.submit(await_created, tenant, card_pod("first", namespace))
                for number in range(8):
                    cluster.create(card_pod(f"beside-{number}", other))
                admitted.result()
        assert installation.replica.worker() == worker
        assert memory(worker) <= MAX_REPLICA_MIB


def await_created(tenant: Cluster, pod: Json) -> None:
    """Create a pod. Retry while this may succeed, as the pod's controller would do."""

    def answered() -> Answer | None:
        answer = tenant.try_create(pod)
        return None if answer.may_pass_soon else answer

    answer = eventually(answered)
    assert answer
    answer.ok()


def test_large_templates_keep_replicas_within_their_memory_and_disturb_no_other_tenant(
    cluster: Cluster, installation: Installation
) -> None:
    """Small pods are sent in dry runs. Each refers a hundred times to a claim template that has 1.2 MB of CEL."""
    require_dra(cluster)
    entry = {"quota": {"A100": 8}}
    before = memory(installation.replica.worker(), "VmRSS")
    with installation.team(entry) as namespace, installation.team(entry) as other:
        with tenant_of(cluster, namespace) as tenant:
            create_all(tenant, [large_template(namespace, number) for number in range(TEMPLATES)])
            small = naming_pod(namespace, 0)
            worker = installation.replica.worker()

            def try_again_and_again(stop: threading.Event) -> None:
                while not stop.is_set():
                    tenant.try_create(small, dryRun="All")

            with in_threads([try_again_and_again] * 2):
                for number in range(8):
                    cluster.create(card_pod(f"beside-{number}", other))
            assert tenant.try_create(small, dryRun="All").status == HTTPStatus.CREATED
        assert installation.replica.worker() == worker
        assert memory(worker, "VmRSS") - before <= TEMPLATES // 2
        assert memory(worker) <= MAX_REPLICA_MIB
        installation.replica.terminate()
        with serving(*installation.flags, ca=installation.ca) as again:
            again.await_ready()
            assert memory(again.worker()) <= MAX_REPLICA_MIB


@pytest.fixture
def controller(installation: Installation) -> Iterator[ControllerProcess]:
    with controlling(installation) as running:
        yield running


# On a slow machine, a LIST of Events takes up to 10 s. The controller then waits nine times as long before its next
# LIST of the namespace.
@pytest.mark.timeout(400)
def test_large_claims_and_events_keep_the_controller_within_its_memory(
    cluster: Cluster, installation: Installation, controller: ControllerProcess
) -> None:
    """Whenever quota is released, the controller reads Events to find rejected workloads."""
    with limited_team(installation, {"quota": {"A100": 4 * CLAIMS + 8}}) as namespace:
        with tenant_of(cluster, namespace) as tenant:
            if served(cluster):
                claims = [large_claim(namespace, number) for number in range(CLAIMS)]
                create_all(tenant, claims)
                await_committed(installation, namespace, A100=400 * CLAIMS)
            create_all(tenant, [large_event(namespace, number) for number in range(EVENTS)])
            charged = {"A100": 100 + (400 * CLAIMS if served(cluster) else 0)}
            # After each released charge, the controller lists Events. The second LIST begins only after nine times the
            # duration of the first one.
            for _ in range(2):
                tenant.create(card_pod("held", namespace))
                await_committed(installation, namespace, **charged)
                wanted = listed_events(cluster) + EVENTS
                cluster.delete_pod(namespace, "held")
                eventually(partial(has_listed_events, cluster, wanted), controller.output, timeout=150)
        assert memory(controller.process.pid) <= MAX_CONTROLLER_MIB


def has_listed_events(cluster: Cluster, wanted: float) -> bool:
    return listed_events(cluster) >= wanted


def listed_events(cluster: Cluster) -> float:
    text = cluster.kubectl("get", "--raw", "/metrics").stdout
    counted = r'^apiserver_storage_list_returned_objects_total\{.*resource="events".*\} (\S+)'
    return sum(map(float, re.findall(counted, text, re.MULTILINE)))
