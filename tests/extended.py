"""Runs the allocator of the scheduler extender, which chooses cards for pods, with a test double of the API server."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Self

import msgspec
from prometheus_client import CollectorRegistry

from controller.extender.allocator import Allocator
from controller.extender.cache import CardCache
from controller.extender.journal import Journal, name_of
from controller.extender.metrics import ExtenderMetrics
from controller.extender.protocol import BindingArgs, ExtenderArgs
from tests.api_double import ApiDouble
from tests.builders import LABELS, Manifest, vcuda_pod
from vcuda.allocations.cards import Share
from vcuda.allocations.stored_pods import StoredPod, read_stored
from vcuda.errors import ApiError
from vcuda.k8s_types import Node, NodeStatus, ObjectMeta, Pod

SYSTEM = "vcuda-quota"
JOURNAL = f"/api/v1/namespaces/{SYSTEM}/configmaps/{name_of('n1')}"
UNBOUND_SECONDS = 300
NO_CARD = "1 whole vcuda cards needed, 0 free"
CORES, MEMORY = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
CARD_BLOCKS = 64
"""The memory of each card in blocks of 256 MiB: 16 GiB."""


def limits(cores: int) -> Mapping[str, int]:
    """Return resource limits of ``cores`` hundredths of a card, and of the same fraction of a card's memory."""
    return {CORES: cores, MEMORY: cores * CARD_BLOCKS // 100}


def gpu_node(name: str, cards: int) -> Node:
    return Node(ObjectMeta(name=name), NodeStatus({CORES: str(cards * 100), MEMORY: str(cards * CARD_BLOCKS)}))


def seen(stored: Mapping[str, Any]) -> StoredPod:
    found = read_stored(msgspec.convert(stored, Pod), LABELS)
    assert found is not None
    return found


class Leader:
    """The extender in a controller process that is the leader, or wrongly believes so. Processes share only the API
    server.

    ``seconds``: the time of the process's clock, which a test sets. All nodes have model M40.
    """

    def __init__(self, api: ApiDouble, cards: Mapping[str, int] | None = None) -> None:
        self.api = api
        self.seconds = 0.0
        self.cache = CardCache(now=lambda: self.seconds)
        self.allocator = Allocator(
            api.kube,
            self.cache,
            Journal(api.kube, SYSTEM),
            ExtenderMetrics(CollectorRegistry()),
            unbound_seconds=UNBOUND_SECONDS,
            model_of=lambda _: "M40",
            now=lambda: int(self.seconds * 10**9),
            clock=lambda: self.seconds,
        )
        for name, count in (cards or {"n1": 2}).items():
            self.cache.node_changed(None, gpu_node(name, count))

    def leads(self) -> Self:
        """Start as a new leader: list the pods, read the journals of the nodes, and create missing journals."""
        self.lists()
        self.allocator.load()
        self.allocator.tidy()
        return self

    def lists(self) -> None:
        """Deliver the stored state of all pods to the watch."""
        for path in self.api.objects:
            if "/pods/" in path:
                self.sees(path.rpartition("/")[2])

    def sees(self, name: str, before: Mapping[str, Any] | None = None) -> None:
        """Deliver the stored pod to the watch. If the pod is not stored, deliver its deletion."""
        now = seen(self.api.objects[pod_path(name)]) if pod_path(name) in self.api.objects else None
        self.cache.pod_changed(seen(before) if before else None, now)

    def place(self, name: str, node: str = "n1", cores: int = 60) -> None:
        """Let the extender place a pod on this node, and deliver the pod to the watch. Store a missing pod first."""
        if pod_path(name) not in self.api.objects:
            store_pod(self.api, name, cores)
        answer = self.filter(as_stored(self.api, name), [node])
        assert answer["NodeNames"] == [node], answer
        self.sees(name)

    def filter(self, pod: Mapping[str, Any], names: Iterable[str] = ("n1",)) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(
            self.allocator.filter(ExtenderArgs(msgspec.convert(pod, Pod), tuple(names)))
        )
        return answer

    def bind(self, name: str, node: str) -> str:
        """Return the extender's answer to a bind request: the error, or an empty text."""
        return self.allocator.bind(BindingArgs("team-a", name, f"uid-{name}", node))


def forbidden(*_: object) -> bytes:
    raise ApiError(403, "it is forbidden: 100% sure")


def pod_path(name: str) -> str:
    return f"/api/v1/namespaces/team-a/pods/{name}"


def on_card(*cards: int, node: str = "n1") -> Mapping[str, str]:
    return {"tencent.com/predicate-node": node, "tencent.com/predicate-gpu-idx-0": ",".join(map(str, cards))}


def store_pod(api: ApiDouble, name: str, cores: int, **fields: Any) -> Manifest:
    """Store a pod, and return it with its resourceVersion, as the scheduler sends it to the extender."""
    manifest = vcuda_pod(limits(cores), metadata={"name": name, "namespace": "team-a", "uid": f"uid-{name}"}, **fields)
    api.store(pod_path(name), manifest)
    return as_stored(api, name)


def as_stored(api: ApiDouble, name: str) -> Manifest:
    found: Manifest = json.loads(json.dumps(api.objects[pod_path(name)]))
    return found


def journaled(api: ApiDouble) -> dict[str, dict[str, list[Share]]]:
    stored = (each for path, each in api.objects.items() if "/configmaps/gpu-placements." in path)
    found = (json.loads(each["data"]["placements"]) for each in stored)
    return {
        node["node"]: {
            entry["name"]: [Share(*share) for shares in entry["shares"].values() for share in shares]
            for entry in node["placements"]
        }
        for node in found
    }


def shares(api: ApiDouble, name: str) -> list[Share]:
    return [share for node in journaled(api).values() for share in node.get(name, ())]
