"""Publishes each namespace's usage where its people can read it: ConfigMap ``gpu-quota-usage``."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import msgspec
import structlog

from controller.workqueue import WorkQueue
from vcuda.errors import ApiError, NotFound, VcudaError
from vcuda.k8s_types import ConfigMap
from vcuda.kube import MERGE_PATCH, Kube, Reflector, segment
from vcuda.ledger.ledger import NamespaceUse

NAME = "gpu-quota-usage"
KEY = "usage.json"
LABELS = {"app.kubernetes.io/managed-by": "vcuda-quota", "quota.vcuda.io/usage": "true"}

SPACING = 1.0
"""Seconds between two writes of one namespace's report, at least."""

RETRY = 5.0
"""Seconds after which a report that could not be written is tried again."""

NAMESPACE_TERMINATING = "NamespaceTerminating"
"""The cause of a 403 where the namespace is being deleted (``corev1.NamespaceTerminatingCause``)."""

_CONFIG_MAP = msgspec.json.Decoder(ConfigMap)


class Published(msgspec.Struct, frozen=True):
    """A report as it is stored."""

    namespace: str
    text: str


class Publisher:
    """Keeps the last report of every limited namespace, and holds what is published to it.

    What is published is watched: a report that somebody changes or deletes comes back, and one that an earlier leader
    left behind is withdrawn.
    """

    def __init__(self, kube: Kube) -> None:
        self.due = WorkQueue(SPACING)
        self.published = Reflector(
            kube,
            "/api/v1/configmaps",
            _read_published,
            params={"fieldSelector": f"metadata.name={NAME}"},
            on_event=lambda old, new: self._add(new or old),
        )
        self._kube = kube
        self._lock = threading.Lock()
        self._reports: dict[str, NamespaceUse | None] = {}
        self._log = structlog.get_logger()

    def report(self, namespace: str, use: NamespaceUse | None) -> None:
        """Take a report over; None takes the namespace's ConfigMap away."""
        with self._lock:
            changed = namespace not in self._reports or self._reports[namespace] != use
            self._reports[namespace] = use
        if changed:
            self.due.add(namespace)

    def reports(self) -> Mapping[str, NamespaceUse]:
        """Return the newest report of every limited namespace."""
        with self._lock:
            return {namespace: use for namespace, use in self._reports.items() if use}

    def published_in(self) -> set[str]:
        """Return the namespaces in which a report is published."""
        return {key.namespace for key in self.published.snapshot()}

    def run(self) -> None:
        """Write what changed until `due` is closed."""
        while (namespace := self.due.next()) is not None:
            try:
                self._publish(namespace)
            except VcudaError as error:
                self._log.warning("usage not published", namespace=namespace, error=str(error))
                self.due.add(namespace, RETRY)

    def _publish(self, namespace: str) -> None:
        with self._lock:
            if namespace not in self._reports:
                return  # the first look at it is still to come
            use = self._reports[namespace]
        published = self.published.get((namespace, NAME))
        if use is None:
            if published:
                self._withdraw(namespace)
            return
        text = msgspec.json.format(msgspec.json.encode(use.shortened()), indent=2).decode()
        if published and published.text == text:
            return
        try:
            self._write(namespace, {KEY: text})
        except ApiError as error:
            if not is_without_home(error):
                raise
            self._log.debug("no usage published: the namespace is gone or going", namespace=namespace)

    def _write(self, namespace: str, data: dict[str, str]) -> None:
        """Change the ConfigMap, or create it where there is none."""
        collection = f"/api/v1/namespaces/{segment(namespace)}/configmaps"
        body = msgspec.json.encode({"metadata": {"labels": LABELS}, "data": data})
        try:
            self._kube.patch(f"{collection}/{NAME}", body, MERGE_PATCH)
        except NotFound:
            metadata = {"name": NAME, "namespace": namespace, "labels": LABELS}
            created = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
            self._kube.post(collection, msgspec.json.encode(created))

    def _withdraw(self, namespace: str) -> None:
        try:
            self._kube.delete(f"/api/v1/namespaces/{segment(namespace)}/configmaps/{NAME}")
        except NotFound:
            return
        self._log.info("usage withdrawn: the namespace is no longer limited", namespace=namespace)

    def _add(self, published: Published | None) -> None:
        if published:
            self.due.add(published.namespace)


def is_without_home(error: ApiError) -> bool:
    """Return whether nothing can be created in a namespace: it does not exist, or is being deleted.

    The cause is what the API server's admission plugin NamespaceLifecycle gives with its 403.
    """
    return error.has_cause(NAMESPACE_TERMINATING) or isinstance(error, NotFound)


def _read_published(raw: bytes) -> Published | None:
    """Return a report that is published; None for a ConfigMap of that name that is somebody else's."""
    config_map = _CONFIG_MAP.decode(raw)
    if not LABELS.items() <= (config_map.metadata.labels or {}).items():
        return None
    return Published(config_map.metadata.namespace, (config_map.data or {}).get(KEY, ""))
