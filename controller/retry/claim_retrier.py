"""Wakes pods whose ResourceClaim was refused for quota, as soon as some is free.

Kubernetes' claim controller, which makes the claims of templates, waits longer after each refusal, up to 16 minutes. A
change of the pod makes it try at once; the change here is the annotation that workloads get as well.
"""

import datetime
import time
from collections.abc import Callable

import msgspec
import structlog

from controller.retry.refused import LOOK_SECONDS, RefusedObject, refused_by_events
from controller.retry.retrier import REST_PER_SECOND, RETRY_ANNOTATION, FreeQuota
from controller.workqueue import Reconciler
from vcuda import errors, k8s_types
from vcuda.kube import MERGE_PATCH, Kube, segment
from vcuda.ledger.report import NamespaceUse

REASON = "FailedResourceClaimCreation"
MOST_AT_ONCE = 20  # pods of a namespace that are looked at in a turn, the longest refused first; a turn takes a second
MOST_WOKEN = 10_000  # pods of a namespace that are looked at for one increase of free quota; each has its uid kept
# The Event of a refusal may be written after the quota was freed, and the pod then waits for a turn more.
NEXT_LOOK_SECONDS = 5.0


class PodClaimStatus(k8s_types.K8sStruct, frozen=True, gc=False):
    """A claim that was made for a pod, by the name that it has in the pod."""

    name: str = ""


class PodClaim(k8s_types.K8sStruct, frozen=True, gc=False):
    """A claim that a pod uses; where it names a template, one is made for it."""

    name: str = ""
    resource_claim_template_name: str | None = None


class ClaimingSpec(k8s_types.K8sStruct, frozen=True, gc=False):
    """The claims of a pod."""

    resource_claims: tuple[PodClaim, ...] | None = None


class ClaimingStatus(k8s_types.K8sStruct, frozen=True, gc=False):
    """The claims that were made for a pod."""

    resource_claim_statuses: tuple[PodClaimStatus, ...] | None = None


class ClaimingPod(k8s_types.K8sObject, frozen=True, gc=False):
    """A pod, as far as its claims go."""

    spec: ClaimingSpec = ClaimingSpec()
    status: ClaimingStatus = ClaimingStatus()

    @property
    def waits_for_claim(self) -> bool:
        """Whether a claim is still to be made for it."""
        made = {each.name for each in self.status.resource_claim_statuses or ()}
        wanted = (each for each in self.spec.resource_claims or () if each.resource_claim_template_name)
        return self.metadata.deletion_timestamp is None and any(each.name not in made for each in wanted)


_POD = msgspec.json.Decoder(ClaimingPod)


class ClaimRetrier:
    """Watches the reports for quota that becomes free, and wakes the pods that wait for it, each once.

    ``served``: whether the API server has claims at all.
    """

    def __init__(self, kube: Kube, served: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self.reconciler = Reconciler("wake", self._reconcile, failure="waiting pods not looked at", clock=clock)
        self._kube = kube
        self._served = served
        self._free: dict[str, dict[str, FreeQuota]] = {}
        self._told: dict[str, set[str]] = {}
        self._log = structlog.get_logger()

    def report(self, namespace: str, use: NamespaceUse | None) -> None:
        """Take note of what is free; more than before makes the namespace's waiting pods due."""
        free = {model.model: FreeQuota.of(model) for model in use.models} if use else {}
        before = self._free.pop(namespace, {})
        if free:
            self._free[namespace] = free
        if any(each.exceeds(before.get(model, FreeQuota(0, 0))) for model, each in free.items()):
            self._told[namespace] = set()
            self.reconciler.queue.add(namespace)
        if not any(each.cores for each in free.values()):
            self._told.pop(namespace, None)

    def _reconcile(self, namespace: str) -> float | None:
        told = self._told.get(namespace)
        if told is None or not self._served():
            return None
        try:
            first = refused_by_events(self._kube, namespace, REASON, ("Pod",), leave_out=told)
        except errors.ListOverdue as error:
            # So that other namespaces have their turns. Kubernetes' claim controller retries by itself.
            self._log.warning("waiting pods not found in time", namespace=namespace, reason=str(error))
            self.reconciler.queue.retry(namespace, LOOK_SECONDS * REST_PER_SECOND)
            return None
        due = sorted(first, key=lambda pod: (first[pod], pod.name))
        now = due[: min(MOST_AT_ONCE, MOST_WOKEN - len(told))]
        told.update(pod.uid for pod in now)
        # Counted is who is looked at: Events that somebody makes up are not to hold up other namespaces.
        woken = [self._wake(namespace, pod) for pod in now]
        if now and len(due) > len(now):
            return 0.0
        return NEXT_LOOK_SECONDS if any(woken) else None

    def _wake(self, namespace: str, known: RefusedObject) -> bool:
        """Change the pod's annotation, if it still waits."""
        path = f"/api/v1/namespaces/{segment(namespace)}/pods/{segment(known.name)}"
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        # Events outlive their pod; another of its name is none of theirs.
        body = {"metadata": {"uid": known.uid, "annotations": {RETRY_ANNOTATION: now}}}
        try:
            if not _POD.decode(self._kube.get(path)).waits_for_claim:
                return False
            self._kube.patch(path, msgspec.json.encode(body), MERGE_PATCH)
        except (errors.NotFound, errors.Conflict):
            return False
        self._log.info("pod woken", namespace=namespace, pod=known.name)
        return True
