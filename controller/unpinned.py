"""Tells the owners of pods that no quota counts: they slipped in before their namespace was limited.

Such a pod is held to no model by its spec and runs on no node that has one, so there is nothing to charge it to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import structlog

from controller.due import DueQueue
from vcuda.errors import ApiError, VcudaError
from vcuda.kube import Event, Kube, Subject, post_event
from vcuda.quota import Mode
from vcuda.stored_pods import StoredPod
from vcuda.usage import NamespaceUse

REASON = "NotCounted"
MESSAGE = (
    "the GPU quota of namespace {} does not count this pod: it is held to no GPU model and runs on no node that has "
    "one; it was created before the quota was enforced, so create it anew to have it counted"
)

SPACING = 1.0
"""Seconds between two looks at one namespace, at least."""

RETRY = 5.0
"""Seconds after which an Event that could not be written is tried again."""


class UnpinnedPods:
    """Writes one Event on each pod that a report names as unpinned, once while this process leads.

    ``pods`` returns the vcuda pods of a namespace as they are now.
    """

    def __init__(self, kube: Kube, pods: Callable[[str], Iterable[StoredPod]]) -> None:
        self.due = DueQueue(SPACING)
        self._kube = kube
        self._pods = pods
        self._lock = threading.Lock()
        self._named: dict[str, frozenset[str]] = {}
        self._told: dict[str, set[str]] = {}
        self._log = structlog.get_logger()

    def report(self, namespace: str, use: NamespaceUse | None) -> None:
        """Take note of whom a report names. A quota that only audits tells nobody."""
        named = frozenset(use.unpinned) if use and use.mode != Mode.AUDIT else frozenset()
        with self._lock:
            before = self._named.pop(namespace, frozenset())
            if named:
                self._named[namespace] = named
        if named or before:
            self.due.add(namespace)

    def run(self) -> None:
        """Write Events until `due` is closed."""
        while (namespace := self.due.next()) is not None:
            try:
                self._tell(namespace)
            except VcudaError as error:
                self._log.warning("event not written", namespace=namespace, error=str(error))
                self.due.add(namespace, RETRY)

    def _tell(self, namespace: str) -> None:
        with self._lock:
            named = self._named.get(namespace, frozenset())
        pods = {pod.uid: pod.name for pod in self._pods(namespace) if pod.name in named}
        told = self._told.setdefault(namespace, set())
        told.intersection_update(pods)
        for uid in pods.keys() - told:
            self._post(namespace, pods[uid], uid)
            told.add(uid)
        if not told:
            del self._told[namespace]

    def _post(self, namespace: str, name: str, uid: str) -> None:
        """Write the Event; one that is refused would be refused again."""
        # A part of the uid: a pod that is made again under its name is told anew.
        told = f"not-counted-{uid[:8]}"
        subject = Subject("v1", "Pod", name, namespace, uid)
        event = Event(subject, told, REASON, MESSAGE.format(namespace), "vcuda-quota", type="Warning")
        try:
            post_event(self._kube, event)
        except ApiError as error:
            self._log.warning("event refused", namespace=namespace, pod=name, error=str(error))
        else:
            self._log.info("told that a pod is not counted", namespace=namespace, pod=name, uid=uid)
