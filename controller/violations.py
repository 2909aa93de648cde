"""Pods that their namespace's quota would not let in as it is now: found, told of, and evicted where that is asked for.

They are there where a namespace was limited after its pods were created, where a limit was lowered, and where pods were
created while the webhook was not asked. They are told of by Event, metric and on the usage page. Only those are evicted
that have been beyond the quota for a whole period, at every look in between.
"""

import datetime
import enum
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import msgspec
import structlog

from controller.metrics import EvictionMetrics
from controller.workqueue import Reconciler
from vcuda.allocations.given_cards import find_other_card
from vcuda.allocations.stored_pods import StoredPod
from vcuda.errors import ApiError, Conflict, HeldByBudget, NotFound, VcudaError
from vcuda.kube import Kube, LedgerStore, NodeInformer, QuotaInformer, objects, segment
from vcuda.ledger.ledger import NO_LIMIT, NamespaceUse
from vcuda.placement.placement import Nodes
from vcuda.quota.model import UNASKED_NAMESPACES, Charge, Limit, Mode, NamespaceQuota, cards, fits, mebibytes, total

COMPONENT = "vcuda-controller"
BEYOND_QUOTA = "BeyondQuota"
NOT_COUNTED = "NotCounted"
OTHER_MODEL = "OtherModelAllocated"
EVICTED = "EvictedOverQuota"
PUT_OFF = "EvictionPutOff"
DELETED = "DeletedOverQuota"

NOT_COUNTED_MESSAGE = (
    "the GPU quota of namespace {} does not count this pod: it is held to no GPU model and runs on no node that has "
    "one; it was created before the quota was enforced, so create it anew to have it counted"
)

REPORT_GRACE_SECONDS = 1.0
"""From a report to the look at it: a pod may be seen before the edit of the quota that let it in."""

EVICTION_TIMEOUT_SECONDS = 30.0
"""How long an eviction may take. The API server itself tries one that conflicts, as where the name is another pod's by
now, 20 times and half a second apart, before it says so (``EvictionsRetry`` in Kubernetes)."""


class ViolationKind(enum.StrEnum):
    """What is wrong with a pod: no model to count it by, one not allowed, over the limit, another's card."""

    UNPINNED = "unpinned"
    NOT_ALLOWED = "not-allowed"
    OVER_QUOTA = "over-quota"
    OTHER_MODEL = "other-model"


class Violation(msgspec.Struct, frozen=True):
    """A pod that the quota would not let in, and why.

    ``evictable``: the quota is enforced, and without the pod the namespace uses less of it. A mirror pod is not: its
    static pod runs on, and kubelet shows it anew, as the newest of all.
    """

    kind: ViolationKind
    pod: StoredPod
    message: str
    evictable: bool


def find_violations(
    namespace: str, quota: NamespaceQuota, pods: Iterable[StoredPod], nodes: Nodes
) -> Sequence[Violation]:
    """Return what is wrong with a namespace's pods, the newest pod first.

    A pod is beyond the limit where it does not fit beside the older ones that do. So the newest go, without them the
    rest is within the limit, and each of them would be too much for it. Finished pods count for nothing. One that is
    terminating is never found, and leaves its place to the others already. Of those within the limit, whoever was given
    a card of another model than it is charged to is only told of.
    """
    by_model: dict[str | None, list[StoredPod]] = {}
    for pod in sorted(pods, key=_age):
        if pod.live:
            by_model.setdefault(pod.model_on(nodes), []).append(pod)
    found = [each for model, held in by_model.items() for each in _violations(namespace, quota, model, held)]
    beyond = {violation.pod.uid for violation in found}
    within = (pod for held in by_model.values() for pod in held if pod.uid not in beyond and not pod.terminating)
    found.extend(
        Violation(ViolationKind.OTHER_MODEL, pod, str(other), evictable=False)
        for pod in within
        if (other := find_other_card(pod, nodes))
    )
    return sorted(found, key=lambda violation: _age(violation.pod), reverse=True)


def _age(pod: StoredPod) -> tuple[str, str, str]:
    # RFC 3339 in UTC, as the API server writes it, sorts as text, to the second; the name decides within one.
    return pod.created, pod.name, pod.uid


def _violations(
    namespace: str, quota: NamespaceQuota, model: str | None, held: Sequence[StoredPod]
) -> Iterator[Violation]:
    """Yield what is wrong with the pods on one model, given oldest first."""
    # Were one that terminates in the way of others here, each eviction would take one more pod with it, as the one that
    # goes still holds its card.
    staying = [pod for pod in held if not pod.terminating]
    if model is None:
        message = f"the GPU quota of namespace {namespace} does not count it: it is held to no model and runs on none"
        yield from (Violation(ViolationKind.UNPINNED, pod, message, evictable=False) for pod in staying)
        return
    limit = quota.limits.get(model)
    kind = ViolationKind.NOT_ALLOWED if limit is None else ViolationKind.OVER_QUOTA
    used = total(pod.charge for pod in held)
    allowed = ", ".join(quota.limits) or "none"
    not_allowed = f"namespace {namespace} may not use GPU model {model}; the models that it may use: {allowed}"
    for pod in _beyond(limit or NO_LIMIT, staying):
        message = _over(namespace, model, limit, used, pod) if limit else not_allowed
        if pod.mirror:
            message += f"; it shows a static pod, which only its manifest on node {pod.node} can end"
        yield Violation(kind, pod, message, evictable=quota.mode == Mode.ENFORCE and not pod.mirror)


def _beyond(limit: Limit, pods: Sequence[StoredPod]) -> Iterator[StoredPod]:
    used = Charge()
    for pod in pods:
        if fits(limit, used, pod.charge):
            used += pod.charge
        else:
            yield pod


def _over(namespace: str, model: str, limit: Limit, used: Charge, pod: StoredPod) -> str:
    where = f"{model} in namespace {namespace}"
    takes = f"this pod takes {cards(pod.charge.cores)}"
    figures = f"used: {cards(used.cores)}, limited: {cards(limit.cores)}"
    if used.cores <= limit.cores:
        where = f"memory of {where}"
        takes = f"this pod takes {mebibytes(pod.charge.memory_under(limit))}"
        figures = f"used: {mebibytes(used.memory_under(limit))}, limited: {mebibytes(limit.memory or 0)}"
    return f"beyond GPU quota: {where}, {figures}; {takes} and does not fit beside the older ones"


class EvictionOutcome(enum.StrEnum):
    """What became of an eviction: done, against a PodDisruptionBudget, of a pod that has gone meanwhile, or failed.

    One that a budget held up too often ends as a deletion.
    """

    EVICTED = "evicted"
    BUDGET = "budget"
    DELETED = "deleted"
    GONE = "gone"
    FAILED = "failed"


class Evictor:
    """Evicts what etcd says is beyond the quota that etcd has; what the watches say only tells where to look.

    One pod at a time, by the Eviction API, so that PodDisruptionBudgets hold: always, or for ``delete_after`` tries of
    a pod, which is deleted then.
    """

    def __init__(
        self,
        kube: Kube,
        store: LedgerStore,
        quota: QuotaInformer,
        nodes: NodeInformer,
        metrics: EvictionMetrics,
        *,
        delete_after: int | None = None,
    ) -> None:
        self._kube = kube
        self._store = store
        self._quota = quota
        self._nodes = nodes
        self._metrics = metrics
        self._delete_after = delete_after
        self._log = structlog.get_logger()

    def evict_newest(self, namespace: str, tries: Mapping[str, int]) -> str | None:
        """Try to evict the newest of these pods that is beyond the quota; return its uid, None where none is.

        ``tries``: how often each was tried before, by uid.

        Raises VcudaError, or what decoding raises, where it cannot be judged.
        """
        violation = self._newest(namespace, tries)
        if violation is None:
            return None
        outcome = self.evict(violation, tries[violation.pod.uid])
        self._metrics.evictions.labels(outcome.value).inc()
        return violation.pod.uid

    def _newest(self, namespace: str, uids: Collection[str]) -> Violation | None:
        quota = self._quota.current()
        limits = quota.for_namespace(namespace) if quota else None
        # A system namespace's pods are created without asking us: the next would stand in the place of each.
        if quota is None or limits is None or namespace in quota.system | UNASKED_NAMESPACES:
            return None
        _, pods = self._store.pods(namespace)
        # One that was just raised may not have come yet; or the one stored is malformed, and the last good one stays in
        # force. Either way the pods are judged by a quota that nobody wants any more.
        if self._quota.stored_version() != quota.version:
            self._log.warning("nothing evicted: the quota in force is not the one that is stored", namespace=namespace)
            return None
        found = find_violations(namespace, limits, pods, self._nodes.current())
        return next((each for each in found if each.evictable and each.pod.uid in uids), None)

    def evict(self, violation: Violation, tries: int = 0) -> EvictionOutcome:
        """Evict this very pod, tried so often before, and tell; whatever comes of it, nothing is raised."""
        # Told after the fact, so that no Event is ever untrue; who crashes in between leaves none.
        pod, subject, uid = violation.pod, _involved(violation.pod), violation.pod.uid[:8]
        log = self._log.bind(namespace=pod.namespace, pod=pod.name, uid=pod.uid, why=violation.message)
        try:
            self._send(pod)
        except HeldByBudget as error:
            if self._delete_after and tries + 1 >= self._delete_after:
                return self._delete(violation, tries + 1)
            log.info("eviction put off by a PodDisruptionBudget", budget=error.why)
            why = f"not evicted for now, as a PodDisruptionBudget does not allow it ({error.why}): {violation.message}"
            put_off = objects.Event(subject, f"eviction-put-off-{uid}", PUT_OFF, why, COMPONENT, type="Warning")
            objects.post_event_or_log(self._kube, put_off)
            return EvictionOutcome.BUDGET
        except (NotFound, Conflict):
            return EvictionOutcome.GONE
        except VcudaError as error:
            log.warning("eviction failed", error=str(error))
            return EvictionOutcome.FAILED
        log.info("evicted")
        why = f"evicted: {violation.message}"
        evicted = objects.Event(subject, f"evicted-{uid}", EVICTED, why, COMPONENT, type="Warning")
        objects.post_event_or_log(self._kube, evicted)
        return EvictionOutcome.EVICTED

    def _delete(self, violation: Violation, tries: int) -> EvictionOutcome:
        """Delete the pod, with its own grace period: a budget of the tenant's own would keep it for ever."""
        pod, subject = violation.pod, _involved(violation.pod)
        log = self._log.bind(namespace=pod.namespace, pod=pod.name, uid=pod.uid, tries=tries)
        path = f"/api/v1/namespaces/{segment(pod.namespace)}/pods/{segment(pod.name)}"
        try:
            self._kube.delete(path, msgspec.json.encode({"preconditions": {"uid": pod.uid}}))
        except (NotFound, Conflict):
            return EvictionOutcome.GONE
        except VcudaError as error:
            log.warning("deletion failed", error=str(error))
            return EvictionOutcome.FAILED
        log.info("deleted", why=violation.message)
        why = f"deleted, as PodDisruptionBudgets have not allowed its eviction {tries} times: {violation.message}"
        deleted = objects.Event(subject, f"deleted-{pod.uid[:8]}", DELETED, why, COMPONENT, type="Warning")
        objects.post_event_or_log(self._kube, deleted)
        return EvictionOutcome.DELETED

    def _send(self, pod: StoredPod) -> None:
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": pod.namespace},
            # Where the name is another pod's by now the API server answers with 409.
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }
        path = f"/api/v1/namespaces/{segment(pod.namespace)}/pods/{segment(pod.name)}/eviction"
        self._kube.post(path, msgspec.json.encode(body), timeout=EVICTION_TIMEOUT_SECONDS)


def _involved(pod: StoredPod) -> objects.InvolvedObject:
    return objects.InvolvedObject("v1", "Pod", pod.name, pod.namespace, pod.uid)


class ViolationOptions(msgspec.Struct, frozen=True):
    """``period``: seconds until what was found is looked at again. ``evict``: what is then still there is evicted.

    ``delete_after``: how often that is tried before a pod is deleted that a PodDisruptionBudget holds; None: always.
    """

    period: float = 60.0
    evict: bool = False
    delete_after: int | None = None


class OngoingViolation(msgspec.Struct, frozen=True):
    """What was found at every look since ``since`` (monotonic seconds), which was at ``at`` (RFC 3339)."""

    violation: Violation
    since: float
    at: str


class ViolationWatcher:
    """Looks at a namespace after each report on it, and every ``period`` seconds while something is wrong there.

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
        evictor: Evictor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reconciler = Reconciler("audit", self.reconcile, failure="not audited", clock=clock)
        self._kube = kube
        self._quota = quota
        self._nodes = nodes
        self._pods = pods
        self._period = period
        self._evictor = evictor
        self._clock = clock
        self._lock = threading.Lock()
        self._ongoing: dict[str, Mapping[str, OngoingViolation]] = {}
        self._told: dict[str, set[tuple[str, ViolationKind]]] = {}
        self._tried: dict[str, tuple[float, int]] = {}
        self._log = structlog.get_logger()

    def report(self, namespace: str, _use: NamespaceUse | None) -> None:
        """Let a namespace be looked at: something has changed there, or it is no longer limited."""
        self.reconciler.queue.add(namespace, REPORT_GRACE_SECONDS)

    def ongoing(self) -> Sequence[OngoingViolation]:
        """Return everything that is wrong now, by namespace, the newest pod first."""
        with self._lock:
            return [each for _, found in sorted(self._ongoing.items()) for each in found.values()]

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Return how many pods there are of each namespace and kind of violation."""
        return Counter((each.violation.pod.namespace, each.violation.kind.value) for each in self.ongoing())

    def reconcile(self, namespace: str) -> float | None:
        """Look at one namespace, tell, and evict at most one pod; return in how many seconds to look again.

        Raises VcudaError, or what decoding raises.
        """
        quota = self._quota.current()
        limits = quota.for_namespace(namespace) if quota else None
        found = find_violations(namespace, limits, self._pods(namespace), self._nodes.current()) if limits else ()
        ongoing = self._update_ongoing(namespace, found)
        if limits is None or not ongoing:
            self._told.pop(namespace, None)
            return None
        if limits.mode != Mode.AUDIT:
            self._tell(namespace, found)
        # The next one at once, which the queue's interval keeps a second apart: each is judged without those before.
        return 0.0 if self._evict(namespace, ongoing) else self._period

    def _update_ongoing(self, namespace: str, found: Iterable[Violation]) -> Mapping[str, OngoingViolation]:
        """Take over what was found, by uid; what was found before just so goes on since then."""
        before = self._ongoing.get(namespace, {})
        ongoing = {violation.pod.uid: self._since(before.get(violation.pod.uid), violation) for violation in found}
        for uid in before.keys() - ongoing.keys():
            self._tried.pop(uid, None)
        with self._lock:
            self._ongoing.pop(namespace, None)
            if ongoing:
                self._ongoing[namespace] = ongoing
        return ongoing

    def _since(self, before: OngoingViolation | None, violation: Violation) -> OngoingViolation:
        # The message is no part of it: its figures change with every other pod of the namespace.
        if before and (before.violation.kind, before.violation.evictable) == (violation.kind, violation.evictable):
            return msgspec.structs.replace(before, violation=violation)
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return OngoingViolation(violation, self._clock(), now)

    def _tell(self, namespace: str, found: Iterable[Violation]) -> None:
        """Write an Event on each pod, once while this process leads."""
        violations = {(each.pod.uid, each.kind): each for each in found}
        told = self._told.setdefault(namespace, set())
        told.intersection_update(violations)
        for key in violations.keys() - told:
            self._post(violations[key])
            told.add(key)

    def _post(self, violation: Violation) -> None:
        pod = violation.pod
        log = self._log.bind(namespace=pod.namespace, pod=pod.name, uid=pod.uid)
        try:
            objects.post_event(self._kube, event_of(violation))
        except ApiError as error:
            log.warning("event refused", error=str(error))  # and would be refused again
            return
        if violation.kind == ViolationKind.UNPINNED:
            log.info("told that a pod is not counted")
        elif violation.kind == ViolationKind.OTHER_MODEL:
            log.info("told that a pod has a card of another model", why=violation.message)
        else:
            log.info("told that a pod is beyond its quota", finding=violation.kind.value, why=violation.message)

    def _evict(self, namespace: str, ongoing: Mapping[str, OngoingViolation]) -> bool:
        """Try to evict one pod, of those found for a period and not tried within it; return whether one was tried."""
        due_since = self._clock() - self._period
        evictable = {uid: each.since for uid, each in ongoing.items() if each.violation.evictable}
        tries = {uid: (since, *self._tried.get(uid, (since, 0))) for uid, since in evictable.items()}
        due = {uid: count for uid, (since, at, count) in tries.items() if max(since, at) <= due_since}
        tried = self._evictor.evict_newest(namespace, due) if due and self._evictor else None
        if tried is None:
            return False
        self._tried[tried] = (self._clock(), due[tried] + 1)
        return True


def event_of(violation: Violation) -> objects.Event:
    """Return the Event that tells of a violation."""
    # A part of the uid: a pod that is made again under its name is told anew.
    subject, uid = _involved(violation.pod), violation.pod.uid[:8]
    if violation.kind == ViolationKind.UNPINNED:
        message = NOT_COUNTED_MESSAGE.format(subject.namespace)
        return objects.Event(subject, f"not-counted-{uid}", NOT_COUNTED, message, "vcuda-quota", type="Warning")
    if violation.kind == ViolationKind.OTHER_MODEL:
        about = f"{violation.kind}-{uid}"
        return objects.Event(subject, about, OTHER_MODEL, violation.message, COMPONENT, type="Warning")
    return objects.Event(subject, f"{violation.kind}-{uid}", BEYOND_QUOTA, violation.message, COMPONENT, type="Warning")
