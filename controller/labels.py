"""Labels the namespaces whose pods /validate has to see, and unlabels the rest.

The webhook's configuration selects namespaces by this label, so the API server asks nobody about pods elsewhere.
"""

from collections.abc import Callable

import msgspec
import structlog

from controller.workqueue import Reconciler
from vcuda import errors, k8s_types
from vcuda.kube import MERGE_PATCH, Kube, QuotaInformer, Reflector, segment

ENFORCED_LABEL = "quota.vcuda.io/enforced"
ENFORCED = "true"
RETRY_SECONDS = 2.0


class NamespaceLabels:
    """Holds every namespace's label to what the quota document says; ``"*"`` means all but the system's own.

    ``on_change`` is called with the name of each namespace that is new, or new to this process, and that is gone.
    """

    def __init__(self, kube: Kube, quota: QuotaInformer, on_change: Callable[[str], None]) -> None:
        # Without a least interval: until the label is there no quota holds in a new namespace.
        self.reconciler = Reconciler(
            "label", self._reconcile, failure="namespace not labelled", retry_seconds=RETRY_SECONDS, min_interval=0.0
        )
        self.reflector = Reflector(
            kube, "/api/v1/namespaces", msgspec.json.Decoder(k8s_types.K8sObject).decode, on_event=self._on_event
        )
        self._kube = kube
        self._quota = quota
        self._on_change = on_change
        self._log = structlog.get_logger()

    def add_all(self) -> None:
        """Look at every namespace again: the quota document has changed."""
        for namespace in self.reflector.snapshot().values():
            self.reconciler.queue.add(namespace.metadata.name)

    def _reconcile(self, name: str) -> None:
        quota, namespace = self._quota.current(), self.reflector.get(("", name))
        # Before the document is read no label is taken away: what an earlier leader set still holds.
        if quota is None or namespace is None:
            return
        wanted = ENFORCED if quota.for_namespace(name) else None
        if namespace.labels.get(ENFORCED_LABEL) == wanted:
            return
        # In a merge patch (RFC 7396) null removes the key.
        body = msgspec.json.encode({"metadata": {"labels": {ENFORCED_LABEL: wanted}}})
        try:
            self._kube.patch(f"/api/v1/namespaces/{segment(name)}", body, MERGE_PATCH)
        except errors.NotFound:
            self._log.debug("namespace is gone", namespace=name)
            return
        self._log.info("namespace labelled" if wanted else "namespace unlabelled", namespace=name)

    def _on_event(self, old: k8s_types.K8sObject | None, new: k8s_types.K8sObject | None) -> None:
        if new and not (old and old.labels == new.labels):
            self.reconciler.queue.add(new.metadata.name)
        if (old is None) != (new is None):
            self._on_change((new or old or k8s_types.K8sObject()).metadata.name)
