"""Labels the namespaces that have no limit, so that the webhook is not called for their pods.

The webhook's configuration skips namespaces with the label ``quota.vcuda.io/enforced: "false"``, and covers all others.
So the webhook is called for the first pod of a new namespace even if this controller does not run.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator

import msgspec
import structlog

from controller import workqueue
from vcuda import errors, k8s_types
from vcuda.k8s_types import Decoder
from vcuda.kube import MERGE_PATCH, Kube, QuotaInformer, Reflector, segment
from vcuda.registration import PROBE

ENFORCED_LABEL = "quota.vcuda.io/enforced"
EXEMPT = "false"
# A newly limited namespace has this label value until a dry run has shown that the API server calls the webhook for its
# pods. A new leader finds the label, and repeats the dry run.
TAKING_EFFECT = "taking-effect"

# The policy PROBE_POLICY (manifests/base/policies.yaml) rejects a ConfigMap named PROBE in each namespace for whose
# pods the API server calls the webhook. So a dry run that creates the ConfigMap shows whether the webhook is called.
PROBE_POLICY = "in-effect.quota.vcuda.io"
PROBE_INTERVAL_SECONDS = 0.5
RETRY_SECONDS = 2.0
MAX_PROBES = 10
"""The most namespaces that are probed to find out whether the API server evaluates policies."""


class NamespaceLabels:
    """Sets the label ``quota.vcuda.io/enforced`` of every namespace as the quota document requires.

    ``on_change``: called with the name of each new or deleted namespace, and of each namespace whose label has changed.
    A namespace that this process sees for the first time counts as new.
    """

    def __init__(self, kube: Kube, quota: QuotaInformer, on_change: Callable[[str], None]) -> None:
        # Labels change without a minimum interval, because a namespace is limited only after its label has changed.
        self.reconciler = workqueue.Reconciler(
            "label", self._reconcile, failure="namespace not labelled", retry_seconds=RETRY_SECONDS, min_interval=0.0
        )
        self.reflector = Reflector(kube, "/api/v1/namespaces", _kept, on_event=self._on_event)
        self._kube = kube
        self._quota = quota
        self._on_change = on_change
        self._log = structlog.get_logger()

    def add_all(self) -> None:
        for namespace in self.reflector.snapshot().values():
            self.reconciler.queue.add(namespace.metadata.name)

    def is_taking_effect(self, name: str) -> bool:
        """Return True if the namespace is limited, but the API server may not call the webhook for its pods yet."""
        return _value(self.reflector.get(("", name))) is not None

    def is_evaluated(self) -> bool:
        """Return False if a limited namespace shows that the API server does not evaluate policy `PROBE_POLICY`."""
        return is_evaluated(self._kube, self._limited())

    def _limited(self) -> Iterator[str]:
        quota = self._quota.current()
        for namespace in self.reflector.snapshot().values():
            name = namespace.metadata.name
            limited = quota and quota.for_namespace(name) and _value(namespace) != EXEMPT
            if limited and not namespace.metadata.deletion_timestamp:
                yield name

    def _reconcile(self, name: str) -> float | None:
        quota, namespace = self._quota.current(), self.reflector.get(("", name))
        # Before the quota document is read, the namespaces' labels stay as the previous leader left them. A namespace
        # that is being deleted needs no label, because no pod can be created in it.
        if quota is None or namespace is None or namespace.metadata.deletion_timestamp:
            return None
        value = _value(namespace)
        if quota.for_namespace(name) is None:
            # Before a namespace is labelled as unlimited, compare the watched quota document with the stored document,
            # because the watch may not have delivered a new limit of the namespace yet.
            if value != EXEMPT and self._quota.stored_version() == quota.version:
                self._label(name, EXEMPT)
        elif value == EXEMPT:
            self._label(name, TAKING_EFFECT)
        elif value is not None:
            if not self._is_in_effect(name):
                return PROBE_INTERVAL_SECONDS
            self._label(name, None)
        return None

    def _label(self, name: str, value: str | None) -> None:
        # If `value` is None, the merge patch (RFC 7396) removes the label.
        body = msgspec.json.encode({"metadata": {"labels": {ENFORCED_LABEL: value}}})
        try:
            self._kube.patch(f"/api/v1/namespaces/{segment(name)}", body, MERGE_PATCH)
        except errors.NotFound:
            self._log.debug("namespace no longer exists", namespace=name)
            return
        self._log.info("namespace labelled" if value else "namespace unlabelled", namespace=name, value=value)

    def _is_in_effect(self, name: str) -> bool:
        """Return True if the API server already applies the namespace's label, so that it calls the webhook."""
        with contextlib.suppress(errors.ApiError):
            return _probed(self._kube, name)
        return False

    def _on_event(self, old: k8s_types.K8sObject | None, new: k8s_types.K8sObject | None) -> None:
        changed = new or old
        if changed and not (old and new and _value(old) == _value(new)):
            self.reconciler.queue.add(changed.metadata.name)
            self._on_change(changed.metadata.name)


def is_evaluated(kube: Kube, limited: Iterable[str]) -> bool:
    """Return False if a limited namespace shows that the API server does not evaluate policy `PROBE_POLICY`.

    If the probe is rejected for another reason, for example because the namespace is being deleted, the next namespace
    is probed, at most `MAX_PROBES` in all. Raises the last ApiError if every probe was rejected for another reason.
    """
    failure: errors.ApiError | None = None
    for name in itertools.islice(limited, MAX_PROBES):
        try:
            return _probed(kube, name)
        except errors.ApiError as error:
            failure = error
    if failure:
        raise failure
    return True


def _probed(kube: Kube, name: str) -> bool:
    """Return True if policy `PROBE_POLICY` rejects the probe. Raises ApiError if anything else rejects it."""
    probe = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": PROBE, "namespace": name}}
    path = f"/api/v1/namespaces/{segment(name)}/configmaps"
    try:
        kube.post(path, msgspec.json.encode(probe), {"dryRun": "All"})
    except errors.ApiError as error:
        # The API server reports a Conflict (the ConfigMap exists) only after all policies have admitted the probe.
        if PROBE_POLICY not in error.message and not isinstance(error, errors.Conflict):
            raise
        return PROBE_POLICY in error.message
    return False


_NAMESPACE = Decoder(k8s_types.K8sObject)


def _kept(raw: bytes) -> k8s_types.K8sObject:
    """Return a namespace without annotations and unrelated labels, because these may be large."""
    metadata = _NAMESPACE.decode(raw).metadata
    labels = {key: value for key, value in (metadata.labels or {}).items() if key == ENFORCED_LABEL}
    kept = k8s_types.ObjectMeta(name=metadata.name, deletion_timestamp=metadata.deletion_timestamp, labels=labels)
    return k8s_types.K8sObject(kept)


def _value(namespace: k8s_types.K8sObject | None) -> str | None:
    return namespace.labels.get(ENFORCED_LABEL) if namespace else None
