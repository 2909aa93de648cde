"""Labels each node with the GPU model that its device plugins, DRA drivers or GPU feature discovery report.

The leader checks a node after each change of the node, of its ResourceSlices, or of ``gpu_models`` in the quota
ConfigMap. `vcuda.discovery.discovered` decides which model the node has. A label that an operator wrote is never
changed. A label that the controller wrote is changed to another model only if all checks during 5 minutes have found
this model, no pod uses a GPU of the node, and the model's source is at least as reliable as the label's source.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from http import HTTPStatus

import msgspec
import structlog

from controller.discover.doubts import DoubtReports, ModelWarnings
from controller.pods import PodInformer
from controller.workqueue import Reconciler
from vcuda import errors, k8s_types
from vcuda.discovery.discovered import Doubt, Found, Record, find_model
from vcuda.discovery.sources import PRODUCT, PublishedCards, published_cards
from vcuda.k8s_types import Decoder
from vcuda.kube import MERGE_PATCH, DeviceInformer, Kube, NodeInformer, QuotaInformer, segment
from vcuda.placement.device_plugins import DISCOVERED, MAX_RECORD
from vcuda.placement.observed_nodes import ObservedNode
from vcuda.requests.resources import GpuResources

LOOK_SECONDS = 5.0  # Minimum seconds between two checks of one node, because the labels of a node may change often.
UNCHANGED_SECONDS = 300.0
"""A newly reported GPU model replaces a node's label only if it is reported for this many seconds without a break."""
BETTER_SOURCE_SECONDS = 60.0
"""Seconds for which a node without a model label waits for a better source than the label of its cloud. The programs
that name the model of a new node start one after the other."""
REWRITE_SECONDS = 60.0  # Minimum seconds between two writes of one node's label, if somebody removes the label again.
HELD_SECONDS = 60.0
"""Seconds until the next check of a node whose model label must stay, for example because pods use its GPUs."""
REST_SECONDS = 300.0  # After the API server has answered 403 Forbidden, no label is written for this many seconds.
PERIOD_SECONDS = 15.0
# Seconds for which the set of nodes with used GPUs is cached, because thousands of checks may need it at the same time.
IN_USE_SECONDS = 1.0

ALL = ""
"""The key of the work queue that means all nodes. Every other key is the name of one node."""

_NODE = Decoder(k8s_types.Node)


class NodeState(msgspec.Struct, frozen=True):
    """The state of one node for the metrics and the usage page."""

    source: str
    """The source of the model label: ``label`` if an operator wrote it; empty if the node has no model label."""
    doubts: frozenset[Doubt]
    """The reasons to doubt the node's GPU model."""
    model: str
    """The GPU model by which the quota counts the node; empty if there is none."""
    cards: float | None
    """The number of the node's cards; None if it is unknown."""


class ModelLabels:
    """Keeps every node's GPU model label up to date.

    ``writes``: True if the controller may write labels and Events. ``clock``: returns seconds.
    """

    def __init__(
        self,
        kube: Kube,
        nodes: NodeInformer,
        devices: DeviceInformer,
        pods: PodInformer,
        quota: QuotaInformer,
        *,
        writes: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reconciler = Reconciler(
            "discover",
            self._reconcile,
            failure="the node could not be labelled with its GPU model",
            retry_seconds=REWRITE_SECONDS / 2,
            min_interval=LOOK_SECONDS,
            key_name="node",
            clock=clock,
        )
        self._queue = self.reconciler.queue
        self._kube = kube
        self._nodes = nodes
        self._devices = devices
        self._pods = pods
        self._resources = quota.resources
        # If --model-label is the label of NVIDIA's GPU feature discovery, the controller must not write it.
        self._writes = writes and nodes.keys.model != PRODUCT
        self._reports = DoubtReports(kube, clock) if writes else None
        self._clock = clock
        self._log = structlog.get_logger()
        self._known: GpuResources | None = None
        self._published: PublishedCards = {}
        self._devices_are_stale = True
        self._states: dict[str, NodeState] = {}
        # `_since`: for each node whose sources report another model than its label, that model and when it was first
        # found. `_written`: for each node, when the controller last wrote the label.
        self._since: dict[str, tuple[str, float]] = {}
        self._written: dict[str, float] = {}
        self._rests_until = 0.0
        self._in_use: tuple[float, Collection[str]] | None = None
        self._warnings = ModelWarnings(quota, nodes)
        nodes.follow(lambda old, new: self._queue.add((new or old or k8s_types.Node()).metadata.name))

    def add_all(self) -> None:
        """Queue a check of the nodes whose model may differ after a change of the quota ConfigMap."""
        self._queue.add(ALL)

    def devices_changed(self) -> None:
        """Queue a check of the nodes whose ResourceSlices have changed."""
        self._devices_are_stale = True
        self._queue.add(ALL)

    def counts(self) -> tuple[Mapping[str, int], Mapping[Doubt, int]]:
        """Count the nodes by the source of their model label, and by each kind of doubt about their model."""
        states = [*self._states.copy().values()]
        by_source = Counter(state.source for state in states if state.source)
        return by_source, Counter(doubt for state in states for doubt in state.doubts)

    def cards(self) -> Mapping[str, float | None]:
        """Return the number of cards of each GPU model; None for a model if it is unknown for one of its nodes."""
        found: dict[str, list[float | None]] = {}
        for state in self._states.copy().values():
            if state.model:
                found.setdefault(state.model, []).append(state.cards)
        return {model: None if None in counts else sum(filter(None, counts)) for model, counts in found.items()}

    def _reconcile(self, name: str) -> float | None:
        if name == ALL:
            self._add_changed()
            self._warnings.check()
            return PERIOD_SECONDS
        if self._known is None:
            # Read the ResourceSlices first. Without them, a less reliable source of the model could decide the label.
            self._add_changed()
        node = self._nodes.reflector.get(("", name))
        if node is None:
            for kept in (self._states, self._since, self._written):
                kept.pop(name, None)
            if self._reports:
                self._reports.forget(name)
            return None
        label, published, known = self._nodes.keys.model, self._published.get(name, {}), self._resources()
        found = find_model(node.labels, label, node.registers, node.facts, published=published, known=known)
        delay, held = self._label(node, found)
        doubts = {**found.doubts, **({Doubt.HELD: held} if held else {})}
        if delay is not None and found.label is None:
            doubts.pop(Doubt.NO_MODEL, None)  # a source may still appear
        self._states[name] = NodeState(
            found.source if found.label else "",
            frozenset(doubts),
            found.model(known.models),
            found.cards(node.facts, known, published),
        )
        renewal = self._reports.report(node, doubts) if self._reports else None
        return min((each for each in (delay, renewal) if each is not None), default=None)

    def _add_changed(self) -> None:
        known, before = self._resources(), self._published
        if self._devices_are_stale:
            self._devices_are_stale = False
            self._published = published_cards(self._devices.slices())
        everyone = self._known is None or not known.counts_like(self._known)
        self._known = known
        if self._published is before and not everyone:
            return
        for key in self._nodes.reflector.snapshot():
            if everyone or self._published.get(key.name) != before.get(key.name):
                self._queue.add(key.name)

    def _label(self, node: ObservedNode, found: Found) -> tuple[float | None, str]:
        """Write a node's model label if needed. Return the seconds to the next check, and why the label must stay."""
        name, record = node.metadata.name, found.wanted
        if found.differs(self._resources().models):
            if (left := self._seconds_left(name, found, UNCHANGED_SECONDS)) > 0:
                return left, ""
            if held := found.why_held(in_use=name in self._nodes_in_use()):
                return HELD_SECONDS, held
        elif found.may_improve():
            if (left := self._seconds_left(name, found, BETTER_SOURCE_SECONDS)) > 0:
                return left, ""
        else:
            self._since.pop(name, None)
            record = found.wanted if found.is_missing() else found.confirmed
        return self._write(node, record) if record and self._writes else None, ""

    def _seconds_left(self, name: str, found: Found, seconds: float) -> float:
        """Return the seconds until the same model, or none, has been reported for ``seconds`` without a break."""
        model = found.wanted.model if found.wanted else ""
        if name not in self._since or self._since[name][0] != model:
            self._since[name] = model, self._clock()
        return self._since[name][1] + seconds - self._clock()

    def _nodes_in_use(self) -> Collection[str]:
        now = self._clock()
        if self._in_use is None or now - self._in_use[0] >= IN_USE_SECONDS:
            self._in_use = now, self._pods.nodes_in_use()
        return self._in_use[1]

    def _write(self, node: ObservedNode, record: Record) -> float | None:
        """Write a node's model label, and the annotation with its source, unless a user has changed them meanwhile.

        If the label cannot be written now, return the seconds to wait, otherwise None. Raises VcudaError.
        """
        name, now = node.metadata.name, self._clock()
        if (wait := max(self._written.get(name, -REWRITE_SECONDS) + REWRITE_SECONDS, self._rests_until) - now) > 0:
            return wait
        path, key = f"/api/v1/nodes/{segment(name)}", self._nodes.keys.model
        try:
            stored = _NODE.decode(self._kube.get(path))
            before = stored.labels.get(key), stored.annotations.get(DISCOVERED, "")[:MAX_RECORD]
            if before != (node.labels.get(key), node.facts.record):
                return LOOK_SECONDS  # The node watch is behind the API server. Check the node again later.
            # The resourceVersion makes the patch fail with a Conflict if an operator changes the node after the read.
            version = stored.metadata.resource_version
            changed = {"labels": {key: record.model}, "annotations": {DISCOVERED: str(record)}}
            body = {"metadata": {"resourceVersion": version, **changed}}
            self._kube.patch(path, msgspec.json.encode(body), MERGE_PATCH)
        except errors.NotFound:
            return None
        except errors.ApiError as error:
            if error.status == HTTPStatus.FORBIDDEN:
                self._rests_until = now + REST_SECONDS
            raise
        self._written[name] = now
        self._log.info("node labelled with its GPU model", node=name, model=record.model, source=record.source)
        return None
