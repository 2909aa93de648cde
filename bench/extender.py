"""Measures how long the scheduler extender takes to place a pod on one of 1,000 nodes with eight cards each.

20,000 pods already use cards of the nodes. These pods are only in the extender's cache. The new pods are stored in a
real API server, and each placement is one write, as in a cluster. As from kube-scheduler, the requests have only the
names of the nodes. ``python -m bench.extender`` prints the measured values next to a target, and checks nothing. On a
busy machine, only the CPU times are reliable.
"""

from __future__ import annotations

import http.client
import json
import random
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
from prometheus_client import CollectorRegistry

from bench.plane import SYSTEM_NAMESPACE, Plane, running_plane
from controller.extender.allocator import Allocator
from controller.extender.cache import CardCache
from controller.extender.journal import Journal, JournalEntry, NodeJournal
from controller.extender.metrics import ExtenderMetrics
from controller.extender.service import Listening, create_application, serve_extender, verbs_of
from controller.extender.strategy import Placement, bin_pack
from tests.builders import LABELS, container, pod, view
from tests.e2e.cluster import Json
from vcuda.allocations.cards import CardRequest, Cards, read_card_request
from vcuda.allocations.stored_pods import read_stored
from vcuda.cli import aligned
from vcuda.k8s_types import Node, NodeStatus, ObjectMeta, Pod
from vcuda.kube import Kube
from vcuda.tls import ServingCertificate

NODES, CARDS, CARD_MEMORY, PODS = 1_000, 8, 64, 20_000
CALLS = 600
CORES, MEMORY = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
TARGET = "p99 under 20 ms"

SHARE = {CORES: "25", MEMORY: "16"}
WHOLE = {CORES: "100"}
NOWHERE = {CORES: "800"}
"""The limits of a pod that fits no node: it requests eight whole cards, but other pods use some cards of each node."""


class Named(msgspec.Struct, rename="pascal"):
    """The part of the scheduler's filter request that is decoded. ``pod``: the pod to place."""

    pod: Pod


class Taken(NamedTuple):
    """The milliseconds that one filter request took.

    ``wall``: the elapsed time.
    ``cpu``: the CPU time of this process, which runs both the extender and its client.
    """

    wall: float
    cpu: float


def gpu_pod(name: str, limits: dict[str, str]) -> Json:
    metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "resourceVersion": "1"}
    return pod(container(limits), metadata=metadata)


def filled() -> tuple[CardCache, list[str]]:
    """Return the extender's cache with all nodes and their pods in it, and the names of the nodes."""
    cache, names = CardCache(), [f"gpu-node-{number:04}.example.internal" for number in range(NODES)]
    capacity = {CORES: str(CARDS * 100), MEMORY: str(CARDS * CARD_MEMORY)}
    for name in names:
        cache.node_changed(None, Node(ObjectMeta(name=name), NodeStatus(capacity)))
    rng = random.Random(3)  # noqa: S311  # With a fixed seed, each run has equal pods.
    for name in names:
        cache.load(NodeJournal(name))
    for number in range(PODS):
        manifest = gpu_pod(f"stored-{number}", {CORES: rng.choice(("10", "20", "30", "40")), MEMORY: "8"})
        node = names[number % NODES]
        manifest["spec"]["nodeName"] = node
        journal = cache.journal(node)
        assert journal
        entry = placed(manifest, node, cache)
        cache.load(msgspec.structs.replace(journal, entries={**journal.entries, entry.uid: entry}))
        cache.pod_changed(None, read_stored(view(manifest), LABELS))
    return cache, names


def placed(manifest: Json, node: str, cache: CardCache) -> JournalEntry:
    """Allocate cards of this node to the pod, and return the pod's entry in the journal of the node."""
    request = read_card_request(view(manifest))
    assert isinstance(request, CardRequest)
    cards = cache.node_without(node, ())
    assert isinstance(cards, Cards)
    choice = bin_pack(request, [node], {node: cards})
    assert isinstance(choice, Placement), (node, cards)
    metadata = manifest["metadata"]
    return JournalEntry(metadata["uid"], metadata["namespace"], metadata["name"], choice.assignment.shares, 1)


@contextmanager
def extending(plane: Plane, cache: CardCache) -> Iterator[Callable[[bytes], Taken]]:
    """Run the scheduler extender. Yield a function that sends a filter request and returns the time to the answer.

    All requests use one connection. After each answer, the pod is added to the extender's cache.
    """
    kube = Kube.connect(plane.cluster.kubeconfig)
    metrics = ExtenderMetrics(CollectorRegistry())
    journal = Journal(kube, SYSTEM_NAMESPACE)
    allocator = Allocator(kube, cache, journal, metrics, unbound_seconds=300, model_of=lambda _: None)
    verbs = verbs_of(allocator)
    certificate = ServingCertificate(plane.certificates)
    server = serve_extender(Listening(("127.0.0.1", 0), certificate), create_application(verbs, metrics))
    context = ssl.create_default_context(cafile=str(plane.ca))
    with closing(http.client.HTTPSConnection("127.0.0.1", server.port, context=context)) as connection:

        def call(body: bytes) -> Taken:
            started, worked = time.perf_counter(), time.process_time()
            connection.request("POST", "/scheduler/predicates", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            read = answer.read()
            taken = Taken((time.perf_counter() - started) * 1000, (time.process_time() - worked) * 1000)
            error = json.loads(read)["Error"]
            assert answer.status == http.HTTPStatus.OK, read
            assert not error, error
            name = msgspec.json.decode(body, type=Named).pod.metadata.name
            stored = plane.cluster.rest.get(f"/api/v1/namespaces/default/pods/{name}")
            cache.pod_changed(None, read_stored(view(stored), LABELS))
            return taken

        yield call
    server.stop()
    kube.close()


def bodies(plane: Plane, kind: str, limits: dict[str, str], names: list[str]) -> Iterator[bytes]:
    """Create pods with these limits, and yield the scheduler's filter request for each pod."""
    for number in range(CALLS):
        manifest = gpu_pod(f"{kind}-{number}", limits)
        metadata = {"name": f"{kind}-{number}", "namespace": "default"}
        stored = plane.cluster.create({**manifest, "metadata": metadata})
        yield msgspec.json.encode({"Pod": stored, "Nodes": None, "NodeNames": names})


def percentile(values: Iterable[float], share: float) -> str:
    """Return a percentile of these milliseconds as text. ``share``: the percentile as a fraction, for example 0.99."""
    ordered = sorted(values)
    return f"{ordered[min(int(len(ordered) * share), len(ordered) - 1)]:.1f} ms"


def main() -> None:
    cache, names = filled()
    rows = [("filter, 1,000 nodes by name, 20,000 pods", "p50", "p90", "p99", "target", "CPU p50", "CPU p99")]
    with running_plane() as plane, extending(plane, cache) as call:
        for kind, limits in (("share", SHARE), ("whole", WHOLE), ("nowhere", NOWHERE)):
            taken = [call(body) for body in bodies(plane, kind, limits, names)]
            walls, cpus = [each.wall for each in taken], [each.cpu for each in taken]
            half, most, nearly_all = (percentile(walls, share) for share in (0.5, 0.9, 0.99))
            worked = (percentile(cpus, 0.5), percentile(cpus, 0.99))
            rows.append((f"{kind}, {limits[CORES]} cores", half, most, nearly_all, TARGET, *worked))
    print(f"One process served the requests, with writes to {urlsplit(plane.cluster.server).netloc}.")
    print("\n".join(aligned(rows)))


if __name__ == "__main__":
    main()
