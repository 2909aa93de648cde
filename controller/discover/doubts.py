"""Reports nodes whose GPU model is in doubt, for example because two sources disagree, in Events and in the log."""

import hashlib
from collections.abc import Callable, Mapping

import msgspec
import structlog

from vcuda.discovery.discovered import Doubt
from vcuda.kube import Event, InvolvedObject, Kube, post_event_or_log
from vcuda.kube.informers import ObservedNode

COMPONENT = "vcuda-controller"
REASON = "GPUModelInDoubt"

EVENT_SECONDS = 300.0  # Minimum seconds between two Events that report the same doubt about the GPU model of a node.
RENEWAL_SECONDS = 3700.0
"""Seconds until an Event about an unchanged doubt is written again. By then the API server has deleted the old one."""


class _LastEvent(msgspec.Struct, frozen=True):
    digest: str
    at: float


class DoubtReports:
    """Writes Events about nodes whose GPU model is in doubt, at most one per node and kind of doubt in 5 minutes."""

    def __init__(self, kube: Kube, clock: Callable[[], float]) -> None:
        self._kube = kube
        self._clock = clock
        self._log = structlog.get_logger()
        self._logged: dict[str, dict[Doubt, _LastEvent]] = {}

    def report(self, node: ObservedNode, doubts: Mapping[Doubt, str]) -> float | None:
        """Write an Event about each doubt that is new or due again. Return the seconds to the next Event, or None."""
        now, delays = self._clock(), []
        logged = self._logged.setdefault(node.metadata.name, {}) if doubts else {}
        for doubt, text in doubts.items():
            digest, last = hashlib.blake2b(text.encode(), digest_size=4).hexdigest(), logged.get(doubt)
            apart = RENEWAL_SECONDS if last and last.digest == digest else EVENT_SECONDS
            if last is None or now - last.at >= apart:
                last, apart = _LastEvent(digest, now), RENEWAL_SECONDS
                logged[doubt] = last
                self._post(node, doubt, text, digest)
            delays.append(last.at + apart - now)
        return min(delays, default=None)

    def forget(self, name: str) -> None:
        self._logged.pop(name, None)

    def _post(self, node: ObservedNode, doubt: Doubt, text: str, digest: str) -> None:
        subject = InvolvedObject("v1", "Node", node.metadata.name, "", node.metadata.uid)
        # The Event's name depends only on the node and the doubt, so that a new leader does not repeat the Event.
        event = Event(subject, f"model-{doubt}-{digest}", REASON, text, COMPONENT, type="Warning")
        post_event_or_log(self._kube, event)
        self._log.warning("GPU model of a node in doubt", node=node.metadata.name, doubt=doubt, message=text)
