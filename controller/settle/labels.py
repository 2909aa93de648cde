"""Labels the namespaces that have no limit, so that nobody is asked about their pods.

The webhook's configuration leaves out namespaces whose label says "false", and asks about all others: about a new one
from its first pod on, whether this controller runs or not.
"""

from collections.abc import Callable

import msgspec
import structlog

from controller import workqueue
from vcuda import errors, k8s_types
from vcuda.kube import MERGE_PATCH, Kube, QuotaInformer, Reflector, segment

ENFORCED_LABEL = "quota.vcuda.io/enforced"
EXEMPT = "false"
# A namespace that becomes limited has this value until the API server is known to ask about its pods. It stands in the
# label, so that the next leader goes on where this one ends.
TAKING_EFFECT = "taking-effect"

# The policy of manifests/base/policies.yaml that refuses a ConfigMap of this name wherever the webhook is asked.
PROBE, PROBE_POLICY = "gpu-quota-probe", "in-effect.quota.vcuda.io"
PROBE_INTERVAL_SECONDS = 0.5
RETRY_SECONDS = 2.0


class NamespaceLabels:
    """Holds every namespace's label to what the quota document says; ``"*"`` means all but the system's own.

    ``on_change`` is called with the name of each namespace that is new, or new to this process, that is gone, or whose
    label has changed.
    """

    def __init__(self, kube: Kube, quota: QuotaInformer, on_change: Callable[[str], None]) -> None:
        # Without a least interval: a namespace that becomes limited is not until its label has changed.
        self.reconciler = workqueue.Reconciler(
            "label", self._reconcile, failure="namespace not labelled", retry_seconds=RETRY_SECONDS, min_interval=0.0
        )
        self.reflector = Reflector(kube, "/api/v1/namespaces", _kept, on_event=self._on_event)
        self._kube = kube
        self._quota = quota
        self._on_change = on_change
        self._log = structlog.get_logger()

    def add_all(self) -> None:
        """Look at every namespace again: the quota document has changed."""
        for namespace in self.reflector.snapshot().values():
            self.reconciler.queue.add(namespace.metadata.name)

    def is_taking_effect(self, name: str) -> bool:
        """Return whether the API server may not yet ask about the pods of a namespace that is limited."""
        return _value(self.reflector.get(("", name))) is not None

    def _reconcile(self, name: str) -> float | None:
        quota, namespace = self._quota.current(), self.reflector.get(("", name))
        # Before the document is read no namespace is let out: what an earlier leader set still holds.
        # In one that is being deleted no pod can be created any more.
        if quota is None or namespace is None or namespace.metadata.deletion_timestamp:
            return None
        value = _value(namespace)
        if quota.for_namespace(name) is None:
            # By the document that etcd has alone: the watch may not have brought the one that limits a new namespace.
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
            self._log.debug("namespace is gone", namespace=name)
            return
        self._log.info("namespace labelled" if value else "namespace unlabelled", namespace=name, value=value)

    def _is_asked_about(self, name: str) -> bool:
        """Return whether the API server goes by the label as it is now: its policies read the labels as webhooks do."""
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
    """Return what is kept of a namespace: its other labels and its annotations may be large."""
    metadata = _NAMESPACE.decode(raw).metadata
    labels = {key: value for key, value in (metadata.labels or {}).items() if key == ENFORCED_LABEL}
    kept = k8s_types.ObjectMeta(name=metadata.name, deletion_timestamp=metadata.deletion_timestamp, labels=labels)
    return k8s_types.K8sObject(kept)


def _value(namespace: k8s_types.K8sObject | None) -> str | None:
    return namespace.labels.get(ENFORCED_LABEL) if namespace else None
