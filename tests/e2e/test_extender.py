"""Tests of the extender with a real kube-scheduler: every pod that fits is bound, and no card is allocated twice."""

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import pytest

from controller.extender.journal import KEY, name_of
from tests.builders import container, pod
from tests.e2e.card_check import CORES, INDEX, MEMORY, fits_somewhere, over, taken, wanted
from tests.e2e.cluster import Cluster, Json, is_bound
from tests.e2e.installation import (
    CLIENT_NAME,
    SYSTEM_NAMESPACE,
    Installation,
    candidate,
    controlling,
    drop_lease,
    tenant_of,
)
from tests.e2e.second_scheduler import NAME, Credentials, config_file, scheduling
from tests.processes import ControllerProcess
from tools.component import Component
from tools.control_plane import ControlPlane
from tools.ports import free_ports

NODES, CARDS, CARD_MEMORY = 5, 8, 64
PODS = 200
PATIENCE = 150.0
"""Maximum seconds to wait for the scheduler. It retries a pod after an error within 90 seconds."""
WAKE_SECONDS = 10.0

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("scheduler"), pytest.mark.timeout(400)]


class Site(NamedTuple):
    """How a test serves the extender, and how the scheduler calls it.

    ``flags``: the flags of a controller that serves the extender.
    """

    url: str
    flags: tuple[str | Path, ...]
    credentials: Credentials


@pytest.fixture
def site(installation: Installation) -> Site:
    [port] = free_ports(1)
    certificates = ("--extender-cert-dir", installation.ca.parent, "--extender-client-ca", installation.ca)
    flags = ("--extender-address", f"127.0.0.1:{port}", *certificates, "--extender-client-name", CLIENT_NAME)
    return Site(f"https://127.0.0.1:{port}", (*flags, "--lease-seconds", "6"), Credentials.beside(installation.ca))


@pytest.fixture
def gpu_nodes(create_node: Callable[..., str]) -> list[str]:
    capacity = {CORES: str(CARDS * 100), MEMORY: str(CARDS * CARD_MEMORY)}
    return [create_node(f"cards-{number}", capacity=capacity) for number in range(NODES)]


@pytest.fixture
def extended(control_plane: ControlPlane, site: Site, tmp_path: Path) -> Iterator[Component]:
    config = config_file(control_plane, site.url, site.credentials, tmp_path)
    with scheduling(control_plane, f"--config={config}") as scheduler:
        yield scheduler


@contextmanager
def leading(installation: Installation, site: Site) -> Iterator[ControllerProcess]:
    with controlling(installation, *site.flags) as leader:
        leader.await_log("serving extender")
        yield leader


@pytest.fixture
def serving(installation: Installation, site: Site) -> Iterator[ControllerProcess]:
    with leading(installation, site) as leader:
        yield leader


def limited(name: str, cores: int, blocks: int) -> Json:
    amounts = {CORES: str(cores), MEMORY: str(blocks)}
    return container({key: amount for key, amount in amounts.items() if amount != "0"} or None, name=name)


def share(cores: int, blocks: int, name: str, scheduler: str = NAME) -> Json:
    """Return a pod with one container, which requests these cores (100 per card) and blocks of memory (256 MiB)."""
    return pod(limited("main", cores, blocks), metadata={"name": name}, schedulerName=scheduler)


def mixed(seed: int, count: int) -> list[Json]:
    """Return random pods with one to three containers, each of which requests a share, whole cards, or no card."""
    rng = random.Random(seed)  # noqa: S311  # each run has equal pods, because the seed is fixed
    shapes = [(5, 2), (10, 4), (25, 16), (30, 8), (50, 40), (75, 30), (90, 60), (100, 0), (200, 0), (300, 0), (0, 0)]
    weights = [4, 4, 4, 4, 3, 3, 2, 4, 2, 1, 1]
    asked = [rng.choices(shapes, weights, k=rng.choice((1, 1, 1, 2, 3))) for _ in range(count)]
    return [
        pod(
            *(limited(f"c{index}", *amounts) for index, amounts in enumerate(each)),
            metadata={"name": f"mixed-{number}"},
            schedulerName=NAME,
        )
        for number, each in enumerate(asked)
    ]


def create_all(cluster: Cluster, namespace: str, pods: list[Json]) -> None:
    def create(manifest: Json) -> None:
        cluster.create({**manifest, "metadata": {**manifest["metadata"], "namespace": namespace}})

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(create, pods))


def bound_with_cards(stored: list[Json]) -> list[Json]:
    """Return the bound pods that request cards. The annotation of each pod must name its node."""
    with_cards = [
        each for each in stored if is_bound(each) and any(wanted(one)[0] for one in each["spec"]["containers"])
    ]
    for each in with_cards:
        assert each["metadata"]["annotations"]["tencent.com/predicate-node"] == each["spec"]["nodeName"]
    return with_cards


def why_not(stored: Json) -> str:
    conditions = stored["status"].get("conditions", [])
    return next((each["message"] for each in conditions if each["type"] == "PodScheduled" and "message" in each), "")


def undecided(stored: list[Json], nodes: list[str]) -> dict[str, str]:
    """Return the messages of unbound pods, by name, for each pod that fits on a node or whose message has no reason."""
    used = taken(stored, CARD_MEMORY)
    return {
        each["metadata"]["name"]: why_not(each)
        for each in stored
        if not is_bound(each)
        and ("available" not in why_not(each) or fits_somewhere(each, used, nodes, CARDS, CARD_MEMORY))
    }


def await_decisions(cluster: Cluster, namespace: str, nodes: list[str], count: int) -> list[Json]:
    """Return the pods when each is bound, or has a status with the reason why it is not.

    Until then, assert in every state that no card is over-allocated.
    """
    left: dict[str, str] = {}

    def decided(stored: list[Json]) -> bool:
        nonlocal left
        assert over(taken(stored, CARD_MEMORY), nodes, CARDS, CARD_MEMORY) == []
        left = undecided(stored, nodes)
        return len(stored) == count and not left

    try:
        return cluster.await_pods(namespace, decided, PATIENCE)
    except TimeoutError as error:
        raise TimeoutError(f"not decided after {PATIENCE:g} s: {left}") from error


def wake(cluster: Cluster, node: str, value: str = "true") -> None:
    cluster.rest.merge_patch(f"/api/v1/nodes/{node}", {"metadata": {"labels": {"e2e.vcuda.io/changed": value}}})


@contextmanager
def waking(cluster: Cluster, node: str) -> Iterator[None]:
    """Change a label of the node every few seconds, until the ``with`` block ends."""
    ended = threading.Event()

    def change() -> None:
        for number in itertools.count():
            wake(cluster, node, str(number))
            if ended.wait(WAKE_SECONDS):
                return

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        try:
            yield
        finally:
            ended.set()
        changing.result()


MIXED, SHARES = mixed(7, PODS), [share(20, 12, f"share-{each}") for each in range(PODS)]


@pytest.mark.usefixtures("extended")
@pytest.mark.parametrize("manifests", [MIXED, SHARES], ids=["mixed", "shares"])
def test_200_pods_at_once_are_bound_if_they_fit_and_the_rest_show_the_reason(
    cluster: Cluster, serving: ControllerProcess, gpu_nodes: list[str], namespace: str, manifests: list[Json]
) -> None:
    """The mixed pods do not all fit. The pods with equal shares all fit, and fill every card completely."""
    create_all(cluster, namespace, manifests)
    stored = await_decisions(cluster, namespace, gpu_nodes, PODS)
    bound = len(bound_with_cards(stored))
    assert serving.metric("vcuda_extender_bindings_total", outcome="bound") == bound
    rejected = any("cards needed" in why_not(each) or "Insufficient" in why_not(each) for each in stored)
    assert (0 < bound < PODS and rejected) if manifests is MIXED else bound == PODS


@pytest.mark.one_version
@pytest.mark.usefixtures("extended")
def test_after_the_leader_is_killed_the_next_one_continues_and_no_card_is_allocated_twice(
    cluster: Cluster, installation: Installation, site: Site, gpu_nodes: list[str], namespace: str
) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(controlling(installation, *site.flags, "--identity", "first"))
        first.await_log("serving extender")
        second = stack.enter_context(candidate(installation, *site.flags, "--identity", "second"))
        create_all(cluster, namespace, mixed(8, PODS))
        cluster.await_pods(namespace, lambda stored: sum(map(is_bound, stored)) >= 25, PATIENCE)
        first.kill()
        before = sum(map(is_bound, cluster.pods(namespace)))
        second.await_log("serving extender")
        # The first leader has placed pods that it could not bind. When their cards become free, the scheduler tries
        # other pods only after an event of a node, or after five minutes. Real nodes often send events.
        with waking(cluster, gpu_nodes[0]):
            stored = await_decisions(cluster, namespace, gpu_nodes, PODS)
        assert before < sum(map(is_bound, stored))
    drop_lease(cluster)


@pytest.mark.one_version
def test_a_binding_is_for_one_version_of_one_pod_and_brings_its_annotations_with_it(
    cluster: Cluster, namespace: str
) -> None:
    """The annotations name the cards. The extender relies on the API server to store them together with the binding."""
    create_all(cluster, namespace, [share(60, 8, "late", "nobody")])
    path = f"/api/v1/namespaces/{namespace}/pods/late"
    old = cluster.pod(namespace, "late")
    new = cluster.rest.merge_patch(path, {"metadata": {"labels": {"new": "version"}}})
    another = {"metadata": {**new["metadata"], "uid": new["metadata"]["uid"][::-1]}}
    for sent in (old, another):
        assert cluster.rest.send("POST", f"{path}/binding", as_sent(sent, "n1")).status == HTTPStatus.CONFLICT
    assert not is_bound(cluster.pod(namespace, "late"))
    cluster.rest.send("POST", f"{path}/binding", as_sent(new, "n1")).ok()
    bound = cluster.pod(namespace, "late")
    assert (bound["spec"]["nodeName"], bound["metadata"]["annotations"]) == ("n1", WRITTEN)


WRITTEN = {"tencent.com/predicate-gpu-idx-0": "3"}


def as_sent(placed: Json, node: str) -> Json:
    keys = ("name", "namespace", "uid", "resourceVersion")
    metadata = {**{key: placed["metadata"][key] for key in keys}, "annotations": WRITTEN}
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    return {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}


@pytest.mark.one_version
@pytest.mark.usefixtures("extended")
def test_annotations_by_tenants_neither_free_nor_block_a_card(
    cluster: Cluster, installation: Installation, site: Site, namespace: str, create_node: Callable[..., str]
) -> None:
    """The tenant forges annotations of small pods, and edits those of a running pod. Both attacks once succeeded."""
    node = create_node("tenant-0", capacity={CORES: "800", MEMORY: "512"})
    pods, index = f"/api/v1/namespaces/{namespace}/pods", f"{INDEX}0"
    forged = {"tencent.com/predicate-time": "9" * 19, "tencent.com/predicate-node": node}
    tiny = [share(5, 1, f"tiny-{card}", "nobody") for card in range(8)]
    for card, each in enumerate(tiny):
        each["metadata"]["annotations"] = {**forged, index: str(card)}
    with tenant_of(cluster, namespace) as tenant:
        create_all(tenant, namespace, [share(60, 8, "mine"), *tiny])
        with leading(installation, site):
            [card] = cards_of(cluster.await_bound(namespace, "mine", timeout=PATIENCE))
            tenant.rest.merge_patch(f"{pods}/mine", {"metadata": {"annotations": {**forged, index: str(7 - card)}}})
        with leading(installation, site):
            create_all(cluster, namespace, [share(100, 0, f"whole-{number}") for number in range(7)])
            stored = cluster.await_pods(namespace, lambda found: sum(map(is_bound, found)) == 8, PATIENCE)
            whole = [each for each in stored if each["metadata"]["name"].startswith("whole")]
            assert sorted(index for each in whole for index in cards_of(each)) == sorted({*range(8)} - {card})
            tenant.rest.merge_patch(f"{pods}/mine", {"metadata": {"annotations": dict.fromkeys((*forged, index))}})
            create_all(cluster, namespace, [share(30, 60, "waits")])
            cluster.await_object(pods, "waits", lambda found: "no card with 30 cores" in why_not(found))
            tenant.rest.send("DELETE", f"{pods}/mine", {"gracePeriodSeconds": 0}).ok()
            journals = f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/configmaps"
            # The containers of a pod that was deleted by force may run for the grace period, so its cards become free
            # only after it.
            cluster.await_object(journals, name_of(node), lambda one: '"mine"' not in one["data"][KEY], PATIENCE)
            wake(cluster, node)
            assert cards_of(cluster.await_bound(namespace, "waits", timeout=PATIENCE)) == [card]


def cards_of(bound: Json) -> list[int]:
    return [int(index) for index in bound["metadata"]["annotations"][f"{INDEX}0"].split(",")]
