"""Runs the component of the leader that writes the model label of nodes, with an API server double."""

from collections.abc import Mapping
from typing import Any

import structlog

from controller.discover.doubts import REASON
from controller.discover.model_labels import LOOK_SECONDS, ModelLabels
from controller.pods import PodInformer
from examples.discovery import NAME
from tests.api_double import ApiDouble
from tests.builders import LABELS, MODEL, Manifest
from tests.quota_map import store_quota
from vcuda.kube import DeviceInformer, NodeInformer, QuotaInformer, QuotaSource
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.device_plugins import DISCOVERED

PATH = f"/api/v1/nodes/{NAME}"
END = "end"
NOTHING: Manifest = {}


class Labeller:
    """The leader's component that labels nodes, with an API server double. The test sets the time and starts checks."""

    def __init__(self, api: ApiDouble, *, writes: bool = True, keys: NodeLabels = LABELS) -> None:
        self.api = api
        self.now = 1000.0
        self.quota = QuotaInformer(api.kube, QuotaSource(), frozenset())
        self.write_quota("{}")
        self.nodes = NodeInformer(api.kube, keys, resources=self.quota.resources)
        self.pods = PodInformer(api.kube, keys, lambda _: None, lambda: self.now)
        self.devices = DeviceInformer(api.kube, self.devices_changed)
        self.duty = ModelLabels(
            api.kube,
            self.nodes,
            self.devices,
            self.pods,
            self.quota,
            writes=writes,
            clock=lambda: self.now,
        )
        self.duty.add_all()

    def write_quota(self, quota: str, models: str = "{}") -> None:
        store_quota(self.api, quota, gpu_models=models)
        self.quota.reflector.relist()

    def devices_changed(self) -> None:
        self.duty.devices_changed()

    def store(self, manifest: Manifest, path: str = PATH) -> None:
        """Store the node, and deliver it to the watches. The label and annotation that the leader wrote are kept."""
        known = self.api.objects.get(path, NOTHING).get("metadata", NOTHING)
        metadata = {**manifest["metadata"]}
        for part, key in (("labels", MODEL), ("annotations", DISCOVERED)):
            if key in known.get(part, {}):
                metadata[part] = {key: known[part][key], **metadata[part]}
        self.api.store(path, {**manifest, "metadata": metadata})
        self.look(0)

    def change(self, manifest: Manifest) -> None:
        """Store a changed node, let the minimum time between two checks of a node pass, and check the node."""
        self.store(manifest)
        self.look()

    def look(self, seconds: float = LOOK_SECONDS) -> list[Mapping[str, Any]]:
        """Let time pass, deliver stored objects to the watches, and check all due nodes. Return the log entries."""
        self.now += seconds
        queue, served = self.duty.reconciler.queue, [END]
        with structlog.testing.capture_logs() as logs:
            self.nodes.reflector.relist()
            self.pods.reflector.relist()
            while served:
                queue.add(END, interval=0)
                served = list(iter(lambda: str(queue.next()), END))
                for key in served:
                    self.duty.reconciler.turn(key)
        return [*logs]

    @property
    def label(self) -> str | None:
        label: str | None = self.metadata["labels"].get(MODEL)
        return label

    @property
    def metadata(self) -> Manifest:
        found: Manifest = self.api.objects[PATH]["metadata"]
        return found

    def events(self) -> list[str]:
        prefix = "/api/v1/namespaces/default/events/"
        stored = [each for path, each in self.api.objects.items() if path.startswith(prefix)]
        assert all(each["reason"] == REASON for each in stored)
        return [each["message"] for each in stored]

    def doubts(self) -> dict[str, int]:
        return {str(doubt): count for doubt, count in self.duty.counts()[1].items()}
