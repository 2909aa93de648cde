"""Labels the namespaces that have no limit, so that the webhook is not called for their pods.

The webhook's configuration skips namespaces whose label is "false". It covers all others, so the webhook is called for
the first pod of a new namespace, whether or not this controller runs.
"""

from collections.abc import Callable

import msgspec
import structlog

from controller import workqueue
from vcuda import errors, k8s_types
from vcuda.kube import MERGE_PATCH, Kube, QuotaInformer, Reflector, segment

ENFORCED_LABEL = "quota.vcuda.io/enforced"
EXEMPT = "false"
# A namespace that becomes limited has this value until the API server is known to call the webhook for its pods. The
# label stores it, so that the next leader continues from here.
TAKING_EFFECT = "taking-effect"

# The policy of manifests/base/policies.yaml that rejects a ConfigMap of this name wherever the webhook is called.
PROBE, PROBE_POLICY = "gpu-quota-probe", "in-effect.quota.vcuda.io"
PROBE_INTERVAL_SECONDS = 0.5
RETRY_SECONDS = 2.0


class NamespaceLabels:
    """Keeps the label of every namespace in line with the quota document. ``"*"`` covers all but system namespaces.

    ``on_change``: called with the name of each namespace that is new, new to this process, or deleted, or whose label
    has changed.
    """

    def __init__(self, kube: Kube, quota: QuotaInformer, on_change: Callable[[str], None]) -> None:
        # There is no least interval, because a namespace is limited only after its label has changed.
        self.reconciler = workqueue.Reconciler(
            "label", self._reconcile, failure="namespace not labelled", retry_seconds=RETRY_SECONDS, min_interval=0.0
        )
        self.reflector = Reflector(kube, "/api/v1/namespaces", _kept, on_event=self._on_event)
        self._kube = kube
        self._quota = quota
        self._on_change = on_change
        self._log = structlog.get_logger()

    def add_all(self) -> None:
        """Check every namespace again after a change of the quota document."""
        for namespace in self.reflector.snapshot().values():
            self.reconciler.queue.add(namespace.metadata.name)

    def is_taking_effect(self, name: str) -> bool:
        """Return whether the API server may not call the webhook yet for the pods of a limited namespace."""
        return _value(self.reflector.get(("", name))) is not None

    def _reconcile(self, name: str) -> float | None:
        quota, namespace = self._quota.current(), self.reflector.get(("", name))
        # Before the document is read no label is set to "false". The labels of an earlier leader stay.
        # No pod can be created in a namespace that is being deleted.
        if quota is None or namespace is None or namespace.metadata.deletion_timestamp:
            return None
        value = _value(namespace)
        if quota.for_namespace(name) is None:
            # Only the stored document counts, because the watch may not have delivered the limit of a new namespace
            # yet.
            if value != EXEMPT and self._quota.stored_version() == quota.version:
                self._label(name, EXEMPT)
        elif value == EXEMPT:
            self._label(name, TAKING_EFFECT)
        elif value is not None:
            if not self._is_asked_about(name):
                return PROBE_INTERVAL_SECONDS
            self._label(name, None)
        return None

    def _label(self, name: str, value: str | None) -> None:
        # In a merge patch (RFC 7396) null removes the key.
        body = msgspec.json.encode({"metadata": {"labels": {ENFORCED_LABEL: value}}})
        try:
            self._kube.patch(f"/api/v1/namespaces/{segment(name)}", body, MERGE_PATCH)
        except errors.NotFound:
            self._log.debug("namespace no longer exists", namespace=name)
            return
        self._log.info("namespace labelled" if value else "namespace unlabelled", namespace=name, value=value)

    def _is_asked_about(self, name: str) -> bool:
        """Return whether the API server uses the current label. Its policies read the labels as its webhooks do."""
        probe = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": PROBE, "namespace": name}}
        path = f"/api/v1/namespaces/{segment(name)}/configmaps"
        try:
            self._kube.post(path, msgspec.json.encode(probe), {"dryRun": "All"})
        except errors.ApiError as error:
            return PROBE_POLICY in error.message
        return False

    def _on_event(self, old: k8s_types.K8sObject | None, new: k8s_types.K8sObject | None) -> None:
        changed = new or old
        if changed and not (old and new and _value(old) == _value(new)):
            self.reconciler.queue.add(changed.metadata.name)
            self._on_change(changed.metadata.name)


_NAMESPACE = msgspec.json.Decoder(k8s_types.K8sObject)


def _kept(raw: bytes) -> k8s_types.K8sObject:
    """Return the kept fields of a namespace, without its other labels and its annotations, which may be large."""
    metadata = _NAMESPACE.decode(raw).metadata
    labels = {key: value for key, value in (metadata.labels or {}).items() if key == ENFORCED_LABEL}
    kept = k8s_types.ObjectMeta(name=metadata.name, deletion_timestamp=metadata.deletion_timestamp, labels=labels)
    return k8s_types.K8sObject(kept)


def _value(namespace: k8s_types.K8sObject | None) -> str | None:
    return namespace.labels.get(ENFORCED_LABEL) if namespace else None
