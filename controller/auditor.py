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

from controller.due import DueQueue
from controller.evictions import COMPONENT, Evicts, subject_of
from vcuda.audit import Finding, Kind, audit
from vcuda.errors import ApiError, VcudaError
from vcuda.kube import Event, Kube, NodeWatch, QuotaWatch, post_event
from vcuda.objects import UNDECODABLE
from vcuda.quota import Mode
from vcuda.stored_pods import StoredPod
from vcuda.usage import NamespaceUse

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
        quota: QuotaWatch,
        nodes: NodeWatch,
        pods: Callable[[str], Iterable[StoredPod]],
        *,
        period: float,
        evictor: Evicts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.due = DueQueue(SPACING, clock)
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
        """Write an Event on each pod, once; those that are held to no model have theirs from `controller.unpinned`."""
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
