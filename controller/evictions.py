"""Evicts pods that are beyond their quota: one at a time, by the Eviction API, so that PodDisruptionBudgets hold."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Protocol

import msgspec
import structlog

from controller.metrics import AuditMetrics
from controller.violations import Finding, audit
from vcuda.allocations.stored_pods import StoredPod
from vcuda.errors import Conflict, HeldByBudget, NotFound, VcudaError
from vcuda.kube import Event, InvolvedObject, Kube, LedgerStore, NodeInformer, QuotaInformer, post_event, segment
from vcuda.quota.model import UNASKED_NAMESPACES

COMPONENT = "vcuda-controller"
EVICTED = "EvictedOverQuota"
PUT_OFF = "EvictionPutOff"

EVICTION_TIMEOUT = 30.0
"""How long an eviction may take, in seconds. The API server itself tries one that conflicts, as where the name is
another pod's by now, 20 times and half a second apart, before it says so (``EvictionsRetry`` in Kubernetes)."""


class Outcome(enum.StrEnum):
    """What became of an eviction: done, against a PodDisruptionBudget, of a pod that has gone meanwhile, or failed."""

    EVICTED = "evicted"
    BUDGET = "budget"
    GONE = "gone"
    FAILED = "failed"


class Attempt(msgspec.Struct, frozen=True):
    """One eviction that was asked for."""

    uid: str
    outcome: Outcome


class Evicts(Protocol):
    """Who may evict."""

    def evict_newest(self, namespace: str, uids: Collection[str]) -> Attempt | None:
        """Evict the newest of these pods that is beyond the quota; None where none of them is."""


class Evictor:
    """Evicts what etcd says is beyond the quota that etcd has; what the watches say only tells where to look."""

    def __init__(
        self, kube: Kube, store: LedgerStore, quota: QuotaInformer, nodes: NodeInformer, metrics: AuditMetrics
    ) -> None:
        self._kube = kube
        self._store = store
        self._quota = quota
        self._nodes = nodes
        self._metrics = metrics
        self._log = structlog.get_logger()

    def evict_newest(self, namespace: str, uids: Collection[str]) -> Attempt | None:
        """Evict one pod; see `Evicts`. Raises VcudaError, or what decoding raises, where it cannot be judged."""
        finding = self._judged(namespace, uids)
        if finding is None:
            return None
        outcome = self._evict(finding)
        self._metrics.evictions.labels(outcome.value).inc()
        return Attempt(finding.pod.uid, outcome)

    def _judged(self, namespace: str, uids: Collection[str]) -> Finding | None:
        """Return the newest of these pods that is beyond the quota, by consistent reads.

        Where the quota in force is not the document that is stored, nobody is: one that was just raised has not come
        yet, or it is malformed, and the last good one stays in force. In a system namespace nobody is either: its pods
        are created without asking us, so the next would stand in the place of each.
        """
        quota = self._quota.current()
        limits = quota.for_namespace(namespace) if quota else None
        if quota is None or limits is None or namespace in quota.system | UNASKED_NAMESPACES:
            return None
        _, pods = self._store.pods(namespace)
        if self._quota.stored_version() != quota.version:
            self._log.warning("nothing evicted: the quota in force is not the one that is stored", namespace=namespace)
            return None
        found = audit(namespace, limits, pods, self._nodes.current())
        return next((finding for finding in found if finding.evictable and finding.pod.uid in uids), None)

    def _evict(self, finding: Finding) -> Outcome:
        pod = finding.pod
        log = self._log.bind(namespace=pod.namespace, pod=pod.name, uid=pod.uid, why=finding.message)
        try:
            self._send(pod)
        except HeldByBudget as error:
            log.info("eviction put off by a PodDisruptionBudget", budget=error.why)
            self._tell_put_off(finding, error.why)
            return Outcome.BUDGET
        except (NotFound, Conflict):
            return Outcome.GONE
        except VcudaError as error:
            log.warning("eviction failed", error=str(error))
            return Outcome.FAILED
        log.info("evicted")
        self._tell_evicted(finding)
        return Outcome.EVICTED

    def _send(self, pod: StoredPod) -> None:
        """Ask for the eviction of this very pod: Conflict where the name is another's by now."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }
        path = f"/api/v1/namespaces/{segment(pod.namespace)}/pods/{segment(pod.name)}/eviction"
        self._kube.post(path, msgspec.json.encode(body), timeout=EVICTION_TIMEOUT)

    def _tell_evicted(self, finding: Finding) -> None:
        """Write the Event after the fact, so that it is never untrue; who crashes in between leaves none."""
        subject = subject_of(finding.pod)
        told = f"evicted-{subject.uid[:8]}"
        self._post(Event(subject, told, EVICTED, f"evicted: {finding.message}", COMPONENT, type="Warning"))

    def _tell_put_off(self, finding: Finding, why: str) -> None:
        subject = subject_of(finding.pod)
        told = f"eviction-put-off-{subject.uid[:8]}"
        message = f"not evicted for now, as a PodDisruptionBudget does not allow it ({why}): {finding.message}"
        self._post(Event(subject, told, PUT_OFF, message, COMPONENT, type="Warning"))

    def _post(self, event: Event) -> None:
        try:
            post_event(self._kube, event)
        except VcudaError as error:
            self._log.warning("event not written", pod=event.subject.name, error=str(error))


def subject_of(pod: StoredPod) -> InvolvedObject:
    """Return a pod as the subject of an Event."""
    return InvolvedObject("v1", "Pod", pod.name, pod.namespace, pod.uid)
