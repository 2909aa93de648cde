"""Publishes each namespace's usage where its people can read it: ConfigMap ``gpu-quota-usage``."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from urllib.parse import quote

import msgspec
import structlog

from controller.due import DueQueue
from vcuda.errors import NotFound, VcudaError
from vcuda.kube import MERGE_PATCH, Kube
from vcuda.usage import NamespaceUse

NAME = "gpu-quota-usage"
KEY = "usage.json"
LABELS = {"app.kubernetes.io/managed-by": "vcuda-quota", "quota.vcuda.io/usage": "true"}

SPACING = 1.0
"""Seconds between two writes of one namespace's report, at least."""

RETRY = 5.0
"""Seconds after which a report that could not be written is tried again."""


class Publisher:
    """Keeps the last report of every limited namespace, and writes those that change."""

    def __init__(self, kube: Kube) -> None:
        self.due = DueQueue(SPACING)
        self._kube = kube
        self._lock = threading.Lock()
        self._reports: dict[str, NamespaceUse] = {}
        self._written: dict[str, NamespaceUse] = {}
        self._log = structlog.get_logger()

    def report(self, namespace: str, use: NamespaceUse | None) -> None:
        """Take a report over; None takes the namespace's ConfigMap away."""
        with self._lock:
            if use is None:
                known = self._reports.pop(namespace, None) or self._written.get(namespace)
                changed = known is not None
            else:
                changed = self._reports.get(namespace) != use
                self._reports[namespace] = use
        if changed:
            self.due.add(namespace)

    def reports(self) -> Mapping[str, NamespaceUse]:
        """Return the newest report of every limited namespace."""
        with self._lock:
            return dict(self._reports)

    def run(self) -> None:
        """Write what changed until `due` is closed."""
        while (namespace := self.due.next()) is not None:
            use = self.reports().get(namespace)
            try:
                self._publish(namespace, use)
            except VcudaError as error:
                self._log.warning("usage not published", namespace=namespace, error=str(error))
                self.due.add(namespace, RETRY)

    def _publish(self, namespace: str, use: NamespaceUse | None) -> None:
        if use is None:
            self._withdraw(namespace)
            return
        if self._written.get(namespace) == use:
            return
        text = msgspec.json.format(msgspec.json.encode(use), indent=2).decode()
        try:
            self._write(namespace, {KEY: text})
        except NotFound:
            self._log.debug("namespace does not exist", namespace=namespace)
        self._written[namespace] = use

    def _write(self, namespace: str, data: dict[str, str]) -> None:
        """Change the ConfigMap, or create it where there is none."""
        collection = f"/api/v1/namespaces/{quote(namespace)}/configmaps"
        body = msgspec.json.encode({"metadata": {"labels": LABELS}, "data": data})
        try:
            self._kube.patch(f"{collection}/{NAME}", body, MERGE_PATCH)
        except NotFound:
            metadata = {"name": NAME, "namespace": namespace, "labels": LABELS}
            created = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
            self._kube.post(collection, msgspec.json.encode(created))

    def _withdraw(self, namespace: str) -> None:
        self._written.pop(namespace, None)
        try:
            self._kube.delete(f"/api/v1/namespaces/{quote(namespace)}/configmaps/{NAME}")
        except NotFound:
            return
        self._log.info("usage withdrawn: the namespace is no longer limited", namespace=namespace)
