"""Looks for pods that their namespace's quota would not let in, and tells of them. The leader's alone.

Told by Event, metric and on the usage page; evicted only where that was asked for, and then only pods that have been
beyond the quota for a whole period, at every look in between.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import structlog

from controller.evictions import COMPONENT, Evicts, subject_of
from controller.violations import Finding, Kind, audit
from controller.workqueue import WorkQueue
from vcuda.allocations.stored_pods import StoredPod
from vcuda.errors import ApiError, VcudaError
from vcuda.k8s_types import UNDECODABLE
from vcuda.kube import Event, InvolvedObject, Kube, NodeInformer, QuotaInformer, post_event
from vcuda.ledger.ledger import NamespaceUse
from vcuda.quota.model import Mode

REASON = "BeyondQuota"

SPACING = 1.0
"""Seconds between two looks at one namespace, at least; so between two evictions there, too."""

GRACE = 1.0
"""Seconds from a report to the look at it: a pod may be seen before the edit of the quota that let it in."""

RETRY = 5.0
"""Seconds after which a look that failed is tried again."""


class Auditing(msgspec.Struct, frozen=True):
    """``period``: seconds until what was found is looked at again. ``enforce``: what is then still there is evicted."""

    period: float = 60.0
    enforce: bool = False


class Known(msgspec.Struct, frozen=True):
    """What was found at every look since ``since`` (monotonic seconds), which was at ``at`` (RFC 3339)."""

    finding: Finding
    since: float
    at: str


class Auditor:
    """The loop. A namespace is due after each report on it, and every period while something is wrong there.

    ``pods`` returns the vcuda pods of a namespace as they are now. Without an ``evictor`` it only tells.
    """

    def __init__(
        self,
        kube: Kube,
        quota: QuotaInformer,
        nodes: NodeInformer,
        pods: Callable[[str], Iterable[StoredPod]],
        *,
        period: float,
        evictor: Evicts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.due = WorkQueue(SPACING, clock)
        self._kube = kube
        self._quota = quota
        self._nodes = nodes
        self._pods = pods
        self._period = period
        self._evictor = evictor
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, Mapping[str, Known]] = {}
        self._told: dict[str, set[tuple[str, Kind]]] = {}
        self._tried: dict[str, float] = {}
        self._log = structlog.get_logger()

    def report(self, namespace: str, _use: NamespaceUse | None) -> None:
        """Let a namespace be looked at: something has changed there, or it is no longer limited."""
        self.due.add(namespace, GRACE)

    def findings(self) -> Sequence[Known]:
        """Return everything that is wrong now, by namespace, the newest pod first."""
        with self._lock:
            return [known for _, found in sorted(self._known.items()) for known in found.values()]

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Return how many pods there are of each namespace and kind of finding."""
        return Counter((known.finding.pod.namespace, known.finding.kind.value) for known in self.findings())

    def run(self) -> None:
        """Look at whatever falls due until ``due`` is closed."""
        while (namespace := self.due.next()) is not None:
            try:
                self.look(namespace)
            except (VcudaError, *UNDECODABLE) as error:
                self._log.warning("not audited", namespace=namespace, error=str(error))
                self.due.add(namespace, RETRY)

    def look(self, namespace: str) -> None:
        """Look at one namespace, tell, and evict at most one pod. Raises VcudaError, or what decoding raises."""
        quota = self._quota.current()
        limits = quota.for_namespace(namespace) if quota else None
        found = audit(namespace, limits, self._pods(namespace), self._nodes.current()) if limits else ()
        known = self._keep(namespace, found)
        if limits is None or not known:
            self._told.pop(namespace, None)
            return
        self.due.add(namespace, self._period)
        if limits.mode != Mode.AUDIT:
            self._tell(namespace, found)
        self._evict(namespace, known)

    def _keep(self, namespace: str, found: Iterable[Finding]) -> Mapping[str, Known]:
        """Take over what was found, by uid; what was found before just so is known since then."""
        before = self._known.get(namespace, {})
        known = {finding.pod.uid: self._since(before.get(finding.pod.uid), finding) for finding in found}
        for uid in before.keys() - known.keys():
            self._tried.pop(uid, None)
        with self._lock:
            self._known.pop(namespace, None)
            if known:
                self._known[namespace] = known
        return known

    def _since(self, before: Known | None, finding: Finding) -> Known:
        if before and (before.finding.kind, before.finding.evictable) == (finding.kind, finding.evictable):
            return msgspec.structs.replace(before, finding=finding)
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return Known(finding, self._clock(), now)

    def _tell(self, namespace: str, found: Iterable[Finding]) -> None:
        """Write an Event on each pod, once; those that are held to no model have theirs from `controller.auditor`."""
        findings = {(f.pod.uid, f.kind): f for f in found if f.kind != Kind.UNPINNED}
        told = self._told.setdefault(namespace, set())
        told.intersection_update(findings)
        for key in findings.keys() - told:
            self._post(findings[key])
            told.add(key)

    def _post(self, finding: Finding) -> None:
        """Write the Event; one that is refused would be refused again."""
        subject = subject_of(finding.pod)
        told = f"{finding.kind}-{subject.uid[:8]}"
        log = self._log.bind(namespace=subject.namespace, pod=subject.name, uid=subject.uid)
        try:
            post_event(self._kube, Event(subject, told, REASON, finding.message, COMPONENT, type="Warning"))
        except ApiError as error:
            log.warning("event refused", error=str(error))
        else:
            log.info("told that a pod is beyond its quota", finding=finding.kind.value, why=finding.message)

    def _evict(self, namespace: str, known: Mapping[str, Known]) -> None:
        """Evict one pod, of those found for a period and not tried within it; then look again, for the next."""
        ripe_since = self._clock() - self._period
        ripe = {
            uid
            for uid, each in known.items()
            if each.finding.evictable and max(each.since, self._tried.get(uid, each.since)) <= ripe_since
        }
        if not ripe or self._evictor is None:
            return
        attempt = self._evictor.evict_newest(namespace, ripe)
        if attempt:
            self._tried[attempt.uid] = self._clock()
            self.due.add(namespace)


NOT_COUNTED = "NotCounted"
MESSAGE = (
    "the GPU quota of namespace {} does not count this pod: it is held to no GPU model and runs on no node that has "
    "one; it was created before the quota was enforced, so create it anew to have it counted"
)


class UnpinnedPods:
    """Writes one Event on each pod that a report names as unpinned, once while this process leads.

    ``pods`` returns the vcuda pods of a namespace as they are now.
    """

    def __init__(self, kube: Kube, pods: Callable[[str], Iterable[StoredPod]]) -> None:
        self.due = WorkQueue(SPACING)
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
        subject = InvolvedObject("v1", "Pod", name, namespace, uid)
        event = Event(subject, told, NOT_COUNTED, MESSAGE.format(namespace), "vcuda-quota", type="Warning")
        try:
            post_event(self._kube, event)
        except ApiError as error:
            self._log.warning("event refused", namespace=namespace, pod=name, error=str(error))
        else:
            self._log.info("told that a pod is not counted", namespace=namespace, pod=name, uid=uid)
