"""Prepares the deletion of vcuda quota, which afterwards rejects no request. Every namespace can then be deleted.

The order matters. If a webhook is registered but does not answer, the API server rejects pods. So the webhook
configurations are deleted first. The policies reject the removal of the objects that they protect, so the bindings of
the policies are deleted next. Then the webhook and the controller lose their write permissions. Without these
permissions, they cannot restore the finalizers, usage reports and labels, which are removed last.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from controller.recount.labels import ENFORCED_LABEL
from vcuda import errors
from vcuda.k8s_types import K8sStruct
from vcuda.kube import MERGE_PATCH, Kube, segment
from vcuda.kube.ledger_store import NAMESPACE_LABEL
from vcuda.quota.well_known import USAGE_NAME as REPORT

OURS = {"labelSelector": "app.kubernetes.io/part-of=vcuda-quota"}
WRITERS = ("vcuda-webhook", "vcuda-controller")
"""The service accounts that write ledgers, reports and labels. The bindings of their roles have the same names."""

PAUSE_SECONDS = 1.0

_ADMISSION = "/apis/admissionregistration.k8s.io/v1"
_RBAC = "/apis/rbac.authorization.k8s.io/v1"
# The validating webhooks are deleted before the mutating webhooks. A validating webhook rejects pods for which no
# mutating webhook has chosen a GPU model.
_REJECTING = ("validatingwebhookconfigurations", "mutatingwebhookconfigurations", "validatingadmissionpolicybindings")

_NO_FINALIZERS = b'{"metadata": {"finalizers": null}}'
_NO_LABEL = msgspec.json.encode({"metadata": {"labels": {ENFORCED_LABEL: None}}})


class _Metadata(K8sStruct, frozen=True):
    name: str
    finalizers: tuple[str, ...] | None = None


class _Kept(K8sStruct, frozen=True):
    metadata: _Metadata


_DECODER = msgspec.json.Decoder(_Kept)


@dataclass(frozen=True, slots=True)
class Uninstall:
    """Removes the webhook configurations, policy bindings, finalizers, labels and usage reports of vcuda quota."""

    kube: Kube
    ledger_namespace: str
    report: Callable[[str], None]
    """A function that receives one line of text for each object that is deleted or changed."""
    sleep: Callable[[float], None] = time.sleep
    monotonic: Callable[[], float] = time.monotonic
    """A function that returns monotonic time in seconds."""

    def run(self, seconds: float) -> None:
        """Delete all objects that reject requests or that block the deletion of a namespace. May be called again.

        ``seconds``: how long to retry. The API server still applies a deleted policy for a few seconds.

        Raises VcudaError if the API server still rejects a change after this time, or if the webhook or the controller
        still writes removed objects again.
        """
        deadline = self.monotonic() + seconds
        for resource in _REJECTING:
            for found in self._list(f"{_ADMISSION}/{resource}", OURS):
                self._delete(f"{_ADMISSION}/{resource}/{segment(found.metadata.name)}")
        for name in WRITERS:
            self._delete(f"{_RBAC}/namespaces/{segment(self.ledger_namespace)}/rolebindings/{name}")
            self._delete(f"{_RBAC}/clusterrolebindings/{name}")
        # A write that was admitted before the deletions may still be stored later. So two successive passes must find
        # nothing to remove.
        if not (self._clean_by(deadline) and self._clean_by(deadline)):
            text = "finalizers, usage reports or labels were written again after their removal; run the command again"
            raise errors.Unavailable(text)

    def _clean_by(self, deadline: float) -> bool:
        """Call `_clean` until it finds nothing to remove. Return False if the deadline passes first."""
        while True:
            self.sleep(PAUSE_SECONDS)
            try:
                found = self._clean()
            except (errors.Forbidden, errors.Conflict, errors.Unavailable):
                found = True
                if self.monotonic() > deadline:
                    raise
            if not found or self.monotonic() > deadline:
                return not found

    def _clean(self) -> bool:
        """Remove finalizers of ledgers, labels of namespaces, and usage reports. Return True if any was removed."""
        ledgers = f"/api/v1/namespaces/{segment(self.ledger_namespace)}/configmaps"
        kept = [each for each in self._list(ledgers, {"labelSelector": NAMESPACE_LABEL}) if each.metadata.finalizers]
        for found in kept:
            self._patch(f"{ledgers}/{segment(found.metadata.name)}", _NO_FINALIZERS)
        labelled = [*self._list("/api/v1/namespaces", {"labelSelector": ENFORCED_LABEL})]
        for found in labelled:
            self._patch(f"/api/v1/namespaces/{segment(found.metadata.name)}", _NO_LABEL)
        # Search all namespaces for usage reports, because a namespace without `ENFORCED_LABEL` may have one, too.
        names = [segment(found.metadata.name) for found in self._list("/api/v1/namespaces", {})]
        reported = [name for name in names if self._delete(f"/api/v1/namespaces/{name}/configmaps/{REPORT}")]
        return bool(kept or labelled or reported)

    def _list(self, path: str, params: dict[str, str]) -> Iterator[_Kept]:
        for page in self.kube.list_pages(path, params):
            yield from map(_DECODER.decode, page.items)

    def _delete(self, path: str) -> bool:
        try:
            self.kube.delete(path)
        except errors.NotFound:
            return False
        self.report(f"{path} deleted")
        return True

    def _patch(self, path: str, patch: bytes) -> None:
        try:
            self.kube.patch(path, patch, MERGE_PATCH)
        except errors.NotFound:
            return  # Another client has deleted the object.
        self.report(f"{path} patched")
