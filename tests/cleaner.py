"""Runs the controller's loop that removes stale GPU allocations and locks, with a double of the API server."""

from collections.abc import Mapping
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from controller.garbage.stale_gc import EVERYTHING, PatchRemover, Remove, StaleAllocationGc
from controller.metrics import GarbageMetrics
from controller.pods import PodInformer
from examples.allocations import NODE, allocated_pod
from tests.api_double import ApiDouble
from tests.builders import LABELS
from vcuda.kube import NodeInformer
from vcuda.requests.schemes import GPU_MANAGER

START = 1_700_000_000.0
TIMEOUT = 300.0
POD = "/api/v1/namespaces/team-a/pods/train-0"
NODES = "/api/v1/nodes"
EVENTS = "/api/v1/namespaces/{}/events/"
LOCK = "hami.io/mutex.lock"
END = "end"
"""A key that `Cleaner.serve` adds to the loop's queue. The queue returns this key after all others that are due."""


class Cleaner:
    """The loop, with a clock that the test sets (``now``). Its informers see changes when the test calls `watch`."""

    def __init__(self, api: ApiDouble, remove: Remove | None = None) -> None:
        self.api = api
        self.now = START
        self.registry = CollectorRegistry()
        nodes = NodeInformer(api.kube, LABELS)
        pods = PodInformer(api.kube, LABELS, lambda _: None)
        remove = remove or PatchRemover(api.kube, GarbageMetrics(self.registry)).remove

        def clock() -> float:
            return self.now

        self.gc = StaleAllocationGc(api.kube, pods, nodes, remove, TIMEOUT, wall=clock, clock=clock)
        assert self.gc.reconciler.queue.next() == EVERYTHING, "the first turn, at which nothing is seen yet"
        self._reflectors = (nodes.reflector, pods.reflector)

    def watch(self) -> None:
        for reflector in self._reflectors:
            reflector.relist()

    def serve(self) -> list[dict[str, Any]]:
        """Process all due keys of the loop's queue. Return the logged lines."""
        served = [END]
        with structlog.testing.capture_logs() as logs:
            while served:
                self.gc.reconciler.queue.add(END, interval=0.0)
                served = list(iter(lambda: str(self.gc.reconciler.queue.next()), END))
                for name in served:
                    self.gc.reconciler.turn(name)
        return [{**line} for line in logs]

    def removed(self, rule: str) -> float:
        labels = {"scheme": "hami" if rule.startswith("lock") else "gpu-manager", "rule": rule}
        return self.registry.get_sample_value("vcuda_gc_annotations_total", labels) or 0.0

    def events(self, namespace: str = "team-a") -> list[Mapping[str, Any]]:
        prefix = EVENTS.format(namespace)
        return [stored for path, stored in self.api.objects.items() if path.startswith(prefix)]


def store(cleaner: Cleaner, **fields: Any) -> None:
    """Store a pod whose cards were allocated at `START`, and its node. The informers see both."""
    cleaner.api.store(f"{NODES}/{NODE}", {"metadata": {"name": NODE}})
    cleaner.api.store(POD, allocated_pod(GPU_MANAGER, START, **fields))
    cleaner.watch()


def lock(cleaner: Cleaner, value: str) -> None:
    cleaner.api.store(f"{NODES}/{NODE}", {"metadata": {"name": NODE, "uid": "uid-n", "annotations": {LOCK: value}}})
    cleaner.watch()


def marks_on(api: ApiDouble, path: str = POD) -> dict[str, str]:
    found: dict[str, str] = api.objects[path]["metadata"].get("annotations", {})
    return found


def bind(cleaner: Cleaner) -> None:
    pod = cleaner.api.objects[POD]
    cleaner.api.store(POD, {**pod, "spec": {**pod["spec"], "nodeName": NODE}})
