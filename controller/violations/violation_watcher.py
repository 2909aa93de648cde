"""Reports the pods and claims that the current quota would not admit, and evicts such pods if evictions are enabled.

Events, a metric and the usage page report these pods and claims. A pod is evicted only if all checks during a whole
period have found that the pod exceeds the quota.
"""

import enum
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from controller.metrics import EvictionMetrics
from controller.pods import pod_path
from controller.recount.grants import NOTICE_SECONDS
from controller.violations.violations import PricedClaim, StoredObject, Violation, ViolationKind, find_violations
from controller.workqueue import Reconciler
from vcuda import k8s_types
from vcuda.allocations.stored_claims import charged_by_pods
from vcuda.allocations.stored_pods import StoredPod
from vcuda.claims.names import API_VERSION
from vcuda.errors import ApiError, Conflict, HeldByBudget, NotFound, VcudaError
from vcuda.kube import Kube, LedgerStore, NodeInformer, QuotaInformer, events
from vcuda.ledger.report import NamespaceUse
from vcuda.quota.model import Mode, NamespaceQuota
from vcuda.quota.times import shown_time

COMPONENT = "vcuda-controller"
BEYOND_QUOTA = "BeyondQuota"
NOT_COUNTED = "NotCounted"
OTHER_MODEL = "OtherModelAllocated"
EVICTED = "EvictedOverQuota"
PUT_OFF = "EvictionPutOff"
GRANT_ENDS = "GrantEnds"

NOT_COUNTED_MESSAGE = (
    "the GPU quota of namespace {} does not count this pod, because the pod is pinned to no known GPU model and does "
    "not run on a node with a model. The pod was created before the quota was enforced, or before its model was "
    "renamed. Recreate the pod to have it counted."
)

REPORT_GRACE_SECONDS = 1.0
"""Seconds from a usage report to the check of its namespace for violations. Without this delay, a pod that a raised
quota admits could look like a violation, because the quota watch may be slower than the pod watch."""

EVICTION_TIMEOUT_SECONDS = 30.0
"""The timeout of an eviction request, in seconds. If a newer pod has the name of the pod to evict, the API server tries
20 times at intervals of half a second (``EvictionsRetry`` in Kubernetes), and then reports a conflict."""


class EvictionOutcome(enum.StrEnum):
    """The outcomes of an attempt to evict a pod.

    BUDGET: a PodDisruptionBudget rejected the eviction.
    GONE: the pod no longer exists.
    """

    EVICTED = "evicted"
    BUDGET = "budget"
    GONE = "gone"
    FAILED = "failed"


@dataclass(eq=False)
class Evictor:
    """Evicts pods beyond the quota. Before each eviction, the pods and claims are listed and checked again.

    Pods are evicted one at a time with the Eviction API, which respects PodDisruptionBudgets.
    """

    kube: Kube
    store: LedgerStore
    quota: QuotaInformer
    nodes: NodeInformer
    metrics: EvictionMetrics

    def evict_newest(self, namespace: str, uids: Collection[str]) -> str | None:
        """Try to evict the newest pod in ``uids`` that is still beyond the quota. Return its uid, or None.

        Raises VcudaError or a decoding error if the pods cannot be listed and checked.
        """
        found = self._newest(namespace, uids)
        if found is None:
            return None
        pod, why = found
        outcome = self.evict(pod, why)
        self.metrics.evictions.labels(outcome.value).inc()
        return pod.uid

    def _newest(self, namespace: str, uids: Collection[str]) -> tuple[StoredPod, str] | None:
        quota = self.quota.current()
        limits = quota.for_namespace(namespace) if quota else None
        # Evict no pod of a system namespace. The webhook is not called there, so it could not reject a replacement pod.
        if quota is None or limits is None or namespace in quota.system:
            return None
        pods = self.store.list_pods(namespace).charged
        nodes = self.nodes.current()
        # List the pods before the claims, because claims that are charged to their pods must be left out.
        _, claims = self.store.priced_claims(namespace, charged_by_pods(pods, nodes))
        # Evict nothing under an outdated quota: the watch may not have delivered a raised quota yet, or the stored
        # quota is malformed, so that an earlier quota is in use.
        if self.quota.stored_version() != quota.version:
            structlog.get_logger().warning(
                "no pod evicted, because the stored quota is not in force", namespace=namespace
            )
            return None
        found = (each for each in find_violations(namespace, limits, pods, nodes, claims) if each.evictable)
        wanted = ((each.stored, each.message) for each in found if each.stored.uid in uids)
        return next(((pod, why) for pod, why in wanted if isinstance(pod, StoredPod)), None)

    def evict(self, pod: StoredPod, why: str) -> EvictionOutcome:
        """Evict this pod, and write an Event with the reason ``why``. Errors are logged, not raised."""
        # The Event is written after the eviction, so it never reports an eviction that failed. If the process crashes
        # after the eviction, there is no Event.
        subject, uid = _involved(pod), pod.uid[:8]
        log = structlog.get_logger().bind(namespace=pod.namespace, pod=pod.name, uid=pod.uid, why=why)
        try:
            self._send(pod)
        except HeldByBudget as error:
            log.info("a PodDisruptionBudget forbids the eviction", budget=error.why)
            message = f"this pod is not evicted yet, because a PodDisruptionBudget forbids it ({error.why}): {why}"
            put_off = events.Event(subject, f"eviction-put-off-{uid}", PUT_OFF, message, COMPONENT, type="Warning")
            events.post_event_or_log(self.kube, put_off)
            return EvictionOutcome.BUDGET
        except (NotFound, Conflict):
            return EvictionOutcome.GONE
        except VcudaError as error:
            log.warning("eviction failed", error=str(error))
            return EvictionOutcome.FAILED
        log.info("evicted")
        message = f"this pod was evicted: {why}"
        evicted = events.Event(subject, f"evicted-{uid}", EVICTED, message, COMPONENT, type="Warning")
        events.post_event_or_log(self.kube, evicted)
        return EvictionOutcome.EVICTED

    def _send(self, pod: StoredPod) -> None:
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace},
            # The uid in the request protects a newer pod of the same name: the API server answers 409 if the uid
            # differs.
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }
        path = f"{pod_path(pod.namespace, pod.name)}/eviction"
        self.kube.post(path, msgspec.json.encode(body), timeout=EVICTION_TIMEOUT_SECONDS)


def kind_of(stored: StoredObject) -> str:
    return "Pod" if isinstance(stored, StoredPod) else "ResourceClaim"


def _involved(stored: StoredObject) -> events.InvolvedObject:
    version = "v1" if isinstance(stored, StoredPod) else API_VERSION
    return events.InvolvedObject(version, kind_of(stored), stored.name, stored.namespace, stored.uid)


class OngoingViolation(msgspec.Struct, frozen=True):
    """A violation, and when it was first found. ``since``: in monotonic seconds. ``at``: this time in RFC 3339."""

    violation: Violation
    since: float
    at: str


class ViolationWatcher:
    """Checks a namespace after each usage report, and every ``period`` seconds while the namespace has violations.

    ``pods``: returns the GPU pods of a namespace. ``claims``: returns the claims of a namespace with their charges,
    except claims that are charged to their pod. ``evictor``: None if violations are only reported.
    """

    def __init__(
        self,
        kube: Kube,
        quota: QuotaInformer,
        nodes: NodeInformer,
        pods: Callable[[str], Iterable[StoredPod]],
        *,
        claims: Callable[[str], Iterable[PricedClaim]] = lambda _: (),
        period: float,
        evictor: Evictor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reconciler = Reconciler("violations", self.reconcile, failure="violations not checked", clock=clock)
        self._kube = kube
        self._quota = quota
        self._nodes = nodes
        self._pods = pods
        self._claims = claims
        self._period = period
        self._evictor = evictor
        self._clock = clock
        self._lock = threading.Lock()
        self._ongoing: dict[str, Mapping[str, OngoingViolation]] = {}
        self._reported: dict[str, set[tuple[str, ViolationKind]]] = {}
        self._tried: dict[str, float] = {}
        # `_announced`: by namespace, the uid of each pod or claim with an Event GrantEnds, and the grant's end.
        self._announced: dict[str, set[tuple[str, float]]] = {}
        self._log = structlog.get_logger()

    def report(self, namespace: str, _use: NamespaceUse | None) -> None:
        self.reconciler.queue.add(namespace, REPORT_GRACE_SECONDS)

    def ongoing(self) -> Sequence[OngoingViolation]:
        """Return all current violations, sorted by namespace. In a namespace, the newest pod or claim comes first."""
        with self._lock:
            return [each for _, found in sorted(self._ongoing.items()) for each in found.values()]

    def counts(self) -> Mapping[tuple[str, str, str], int]:
        found = (each.violation for each in self.ongoing())
        return Counter((kind_of(each.stored), each.stored.namespace, each.kind.value) for each in found)

    def reconcile(self, namespace: str) -> float | None:
        """Check one namespace, report its violations, and evict at most one pod.

        Return the seconds until the next check; None if no check is needed. Raises VcudaError, or an error of decoding.
        """
        quota = self._quota.current()
        limits = quota.for_namespace(namespace) if quota else None
        found: Sequence[Violation] = ()
        if limits:
            pods, claims = tuple(self._pods(namespace)), tuple(self._claims(namespace))
            found = find_violations(namespace, limits, pods, self._nodes.current(), claims)
            self._announce(namespace, limits, {each.stored.uid for each in found}, pods, claims)
        else:
            self._announced.pop(namespace, None)
        ongoing = self._update_ongoing(namespace, found)
        if limits is None or not ongoing:
            self._reported.pop(namespace, None)
            return None
        if limits.mode != Mode.AUDIT:
            self._post_events(namespace, found)
        # After an eviction, the namespace is checked again as soon as the queue allows: after a second. So the next pod
        # is evicted only if it is beyond the quota even without the usage of the evicted pod.
        return 0.0 if self._evict(namespace, ongoing) else self._period

    def _announce(
        self,
        namespace: str,
        limits: NamespaceQuota,
        beyond: Collection[str],
        pods: Sequence[StoredPod],
        claims: Sequence[PricedClaim],
    ) -> None:
        """Write one Event for each pod and claim that will be beyond the quota when a grant ends within a day.

        A grant is a dated addition to a limit. ``beyond``: the uids of the pods and claims beyond the quota now.
        """
        until = self._quota.clock.seconds() + NOTICE_SECONDS
        ends = {each.until: each.grant.times.zone for each in limits.granted if each.until <= until}
        if limits.mode == Mode.AUDIT or not ends:
            self._announced.pop(namespace, None)
            return
        announced = self._announced.setdefault(namespace, set())
        future: dict[tuple[str, float], Violation] = {}
        named = set(beyond)
        for end in sorted(ends):
            for each in find_violations(namespace, limits.at(end), pods, self._nodes.current(), claims):
                if each.stored.uid not in named:
                    named.add(each.stored.uid)
                    future[each.stored.uid, end] = each
        announced.intersection_update(future)
        for key in future.keys() - announced:
            message = f"a GPU grant ends at {shown_time(key[1], ends[key[1]])}. {self._fate(future[key])}"
            stored, about = future[key].stored, f"grant-ends-{int(key[1])}-{key[0][:8]}"
            event = events.Event(_involved(stored), about, GRANT_ENDS, message, COMPONENT, type="Warning")
            self._try_to_post(stored, event)
            announced.add(key)

    def _fate(self, violation: Violation) -> str:
        if self._evictor and violation.evictable:
            return f"This pod will then be evicted: {violation.message}"
        what = "pod" if isinstance(violation.stored, StoredPod) else "claim"
        stays = f"This {what} stays, but then new pods and claims are rejected until the usage fits the quota"
        return f"{stays}: {violation.message}"

    def _update_ongoing(self, namespace: str, found: Iterable[Violation]) -> Mapping[str, OngoingViolation]:
        """Store and return the violations by uid. A violation that the last check also found keeps its start time."""
        before = self._ongoing.get(namespace, {})
        ongoing = {each.stored.uid: self._since(before.get(each.stored.uid), each) for each in found}
        for uid in before.keys() - ongoing.keys():
            self._tried.pop(uid, None)
        with self._lock:
            self._ongoing.pop(namespace, None)
            if ongoing:
                self._ongoing[namespace] = ongoing
        return ongoing

    def _since(self, before: OngoingViolation | None, violation: Violation) -> OngoingViolation:
        # Do not compare the messages of violations, because the numbers in them change with every pod of the namespace.
        if before and (before.violation.kind, before.violation.evictable) == (violation.kind, violation.evictable):
            return msgspec.structs.replace(before, violation=violation)
        return OngoingViolation(violation, self._clock(), k8s_types.time_now())

    def _post_events(self, namespace: str, found: Iterable[Violation]) -> None:
        """Write an Event for each new violation. While a violation lasts, this process writes no second Event."""
        violations = {(each.stored.uid, each.kind): each for each in found}
        reported = self._reported.setdefault(namespace, set())
        reported.intersection_update(violations)
        for key in violations.keys() - reported:
            self._post(violations[key])
            reported.add(key)

    def _post(self, violation: Violation) -> None:
        stored = violation.stored
        what = "pod" if isinstance(stored, StoredPod) else "claim"
        log = self._log.bind(namespace=stored.namespace, uid=stored.uid, **{what: stored.name})
        if not self._try_to_post(stored, event_of(violation)):
            return
        if violation.kind == ViolationKind.UNPINNED:
            log.info(f"reported a {what} that is not counted")
        elif violation.kind == ViolationKind.OTHER_MODEL:
            log.info(f"reported a {what} with a card of another model", why=violation.message)
        else:
            log.info(f"reported a {what} beyond its quota", finding=violation.kind.value, why=violation.message)

    def _try_to_post(self, stored: StoredObject, event: events.Event) -> bool:
        """Write an Event. Return True if the API server accepted it. Raises Unavailable if there was no answer."""
        try:
            events.post_event(self._kube, event)
        except ApiError as error:
            # Do not retry an Event that the API server rejected, because the API server would reject the retry, too.
            self._log.warning("event rejected", namespace=stored.namespace, uid=stored.uid, error=str(error))
            return False
        return True

    def _evict(self, namespace: str, ongoing: Mapping[str, OngoingViolation]) -> bool:
        """Try to evict one pod whose violation has lasted for a period. A pod is tried at most once in a period.

        Return True if an eviction was tried.
        """
        due_since = self._clock() - self._period
        evictable = {uid: each.since for uid, each in ongoing.items() if each.violation.evictable}
        due = {uid for uid, since in evictable.items() if max(since, self._tried.get(uid, since)) <= due_since}
        tried = self._evictor.evict_newest(namespace, due) if due and self._evictor else None
        if tried is None:
            return False
        self._tried[tried] = self._clock()
        return True


def event_of(violation: Violation) -> events.Event:
    stored, message = violation.stored, violation.message
    # Event names contain a part of the object's uid, so that a new pod with the same name gets its own Event.
    subject, uid = _involved(stored), stored.uid[:8]
    if violation.kind == ViolationKind.UNPINNED:
        message = NOT_COUNTED_MESSAGE.format(stored.namespace) if isinstance(stored, StoredPod) else message
        return events.Event(subject, f"not-counted-{uid}", NOT_COUNTED, message, "vcuda-quota", type="Warning")
    about = f"{violation.kind}-{uid}"
    if violation.kind == ViolationKind.OTHER_MODEL:
        return events.Event(subject, about, OTHER_MODEL, message, COMPONENT, type="Warning")
    return events.Event(subject, about, BEYOND_QUOTA, message, COMPONENT, type="Warning")
