"""Reports nodes whose GPU model is in doubt, for example because two sources disagree, and quotas of missing models."""

import hashlib
import math
from collections.abc import Callable, Mapping

import structlog

from vcuda.discovery.discovered import Doubt
from vcuda.kube import Event, InvolvedObject, Kube, NodeInformer, QuotaInformer, post_event_or_log
from vcuda.placement.missing_models import model_warnings
from vcuda.placement.observed_nodes import ObservedNode

COMPONENT = "vcuda-controller"
REASON = "GPUModelInDoubt"

EVENT_SECONDS = 300.0  # Minimum seconds between two Events that report the same doubt about the GPU model of a node.
RENEWAL_SECONDS = 3700.0
"""Seconds until an Event about an unchanged doubt is written again. By then the old Event has expired."""


class DoubtReports:
    """Writes Events about nodes whose GPU model is in doubt, at most one per node and kind of doubt in 5 minutes."""

    def __init__(self, kube: Kube, clock: Callable[[], float]) -> None:
        self._kube = kube
        self._clock = clock
        self._log = structlog.get_logger()
        # `_logged`: for each node and doubt, the digest of the message of the last Event, and its time.
        self._logged: dict[str, dict[Doubt, tuple[str, float]]] = {}

    def report(self, node: ObservedNode, doubts: Mapping[Doubt, str]) -> float | None:
        """Write an Event about each doubt that is new or due again. Return the seconds until the next, or None."""
        now, delays = self._clock(), []
        logged = self._logged.setdefault(node.metadata.name, {}) if doubts else {}
        for doubt, text in doubts.items():
            digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
            before, at = logged.get(doubt, ("", -math.inf))
            apart = RENEWAL_SECONDS if before == digest else EVENT_SECONDS
            if now - at >= apart:
                at, apart = now, RENEWAL_SECONDS
                logged[doubt] = digest, now
                self._post(node, doubt, text, digest)
            delays.append(at + apart - now)
        return min(delays, default=None)

    def forget(self, name: str) -> None:
        self._logged.pop(name, None)

    def _post(self, node: ObservedNode, doubt: Doubt, text: str, digest: str) -> None:
        subject = InvolvedObject("v1", "Node", node.metadata.name, "", node.metadata.uid)
        # The Event's name depends only on the node and the doubt, so that a new leader does not write the Event again.
        event = Event(subject, f"model-{doubt}-{digest}", REASON, text, COMPONENT, type="Warning")
        post_event_or_log(self._kube, event)
        self._log.warning("GPU model of a node in doubt", node=node.metadata.name, doubt=doubt, message=text)


class ModelWarnings:
    """Logs each warning once. If a warning no longer applies and later applies again, it is logged again."""

    def __init__(self, quota: QuotaInformer, nodes: NodeInformer) -> None:
        self._quota = quota
        self._nodes = nodes
        self._log = structlog.get_logger()
        self._logged: frozenset[str] | None = None

    def check(self) -> None:
        """Log new warnings. The first check logs nothing, because the controller may be about to label the nodes."""
        if self._logged is None:
            self._logged = frozenset()
            return
        quota, models = self._quota.current(), self._nodes.current().models
        found = model_warnings(quota.models if quota else (), models)
        for warning in found:
            if warning not in self._logged:
                self._log.warning("quota cannot be used", why=warning)
        self._logged = frozenset(found)
