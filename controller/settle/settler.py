"""Settles the ledgers: recounts what stored pods take, and releases what has gone. Only the leader runs this."""

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec
import structlog

from controller.claims import ClaimInformer
from controller.metrics import SettleMetrics
from controller.pods import PodInformer
from controller.settle.charge_ages import ChargeAges, Overdue, SettleTiming, Watch
from controller.workqueue import Reconciler, WorkQueue
from vcuda import errors
from vcuda.kube import OPENING_SECONDS, Kube, LedgerStore, NamedLedger, NodeInformer, QuotaInformer, Stored
from vcuda.ledger.ledger import LOST, Ledger, Reservation, is_older
from vcuda.ledger.report import NamespaceUse, report
from vcuda.ledger.settle import Expired, ObservedPods, settle
from vcuda.quota.model import NamespaceQuota

MAX_ATTEMPTS = 5
"""How often one settlement is tried when the replicas write first."""

RETRY_SECONDS = 2.0
"""After which a settlement that failed is tried again, at first."""

CONFLICT_RETRY_SECONDS = 0.1
"""After which a settlement that the replicas were ahead of every time, so that nothing was written, has another turn:
while it waits charges pile up whose pods are stored by now."""


GROWTH_SECONDS = 3.0
"""Between two settlements of a ledger with room, to which pods have only been added: what is pending is charged as much
as what is committed, so that nobody waits for it, and replicas that charge are not to be in its way."""


FEW_PENDING_BYTES = 2048
"""Less than this is written of up to some 80 pending charges."""

MANY_PENDING_BYTES = 3072
"""More than this of more than some 130, which is a quarter of what a namespace may have: what watches bring comes late
where so many pods are created."""

CROWDED_SECONDS = 0.25
"""Between two settlements of a ledger with many pending: at 400 pods a second it would else be full before the next."""


AWAIT_PODS_AGAIN_SECONDS = 0.5
"""Between two settlements of a ledger whose claims lost devices before the watch of pods showed why."""


class Settler:
    """Keeps every ledger true to the pods that are stored.

    ``on_report`` gets each namespace's report after it was looked at, and None where it is no longer limited.
    ``others`` names namespaces that are to be looked at though they may have no quota, no ledger and no vcuda pods.
    ``exists`` tells whether there is a namespace of this name: one that was deleted is not limited any more.
    """

    def __init__(
        self,
        kube: Kube,
        store: LedgerStore,
        quota: QuotaInformer,
        nodes: NodeInformer,
        *,
        metrics: SettleMetrics,
        on_report: Callable[[str, NamespaceUse | None], None],
        others: Callable[[], Iterable[str]] = tuple,
        exists: Callable[[str], bool] = lambda _: True,
        timing: SettleTiming | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.reconciler = Reconciler(
            "settle", self._reconcile, failure="not settled", retry_seconds=RETRY_SECONDS, clock=clock
        )
        self.queue = self.reconciler.queue
        # Those without a limit have turns of their own: thousands may go at once, and what is freed elsewhere is not to
        # wait until the ledger of each is deleted.
        self.unlimited = Reconciler(
            "unlimited", self._reconcile_unlimited, failure="not settled", retry_seconds=RETRY_SECONDS, clock=clock
        )
        self._timing = timing or SettleTiming()
        self._ages = ChargeAges(self._timing)
        self.pods = PodInformer(
            kube,
            nodes.keys,
            self.queue.add,
            clock,
            self._timing.max_terminating,
            on_growth=self._add_grown,
            resources=store.resources,
        )
        self.claims = ClaimInformer(kube, store, self.pods, self.queue.add, clock)
        self.ledgers = store.reflector(self.queue.add, self._add_charged)
        self._store = store
        self._quota = quota
        self._nodes = nodes
        self._metrics = metrics
        metrics.lag.set_function(self.queue.lag)
        self._on_report = on_report
        self._others = others
        self._exists = exists
        self._clock = clock
        # By namespaces without a limit that have a ledger, since when that is known.
        self._unlimited_since: dict[str, float] = {}
        # The namespaces in which there was room at the last look: there nobody waits for some.
        self._with_room: set[str] = set()
        # By namespaces whose damaged ledger is to be deleted: its version, and since when it is known.
        self._unreadable: dict[str, tuple[str, float]] = {}
        self._log = structlog.get_logger()

    def _add_grown(self, namespace: str) -> None:
        self.queue.add(namespace, interval=GROWTH_SECONDS if namespace in self._with_room else None)

    def _add_charged(self, namespace: str, pending_bytes: int) -> None:
        if pending_bytes < FEW_PENDING_BYTES:
            self._add_grown(namespace)
        else:
            self.queue.add(namespace, interval=CROWDED_SECONDS if pending_bytes > MANY_PENDING_BYTES else None)

    def add_all(self) -> None:
        """Let every namespace be due that is known."""
        for namespace in self.known_namespaces():
            self.queue.add(namespace)

    def full_resync(self) -> None:
        """Compare every ledger that is at rest with the pods; log, count and mend what differs."""
        for namespace in self.known_namespaces():
            known = self.ledgers.get(self._store.key(namespace))
            # A ledger with a turn to come, or one just now, may differ for a moment: events are at work on it.
            active = self.queue.is_active(namespace) or self.unlimited.queue.is_active(namespace)
            if known and not active and self._differs(known):
                self._metrics.drift.inc()
                self._log.warning("ledger differs from the pods; mending", namespace=namespace)
            self.queue.add(namespace)

    def _differs(self, known: NamedLedger) -> bool:
        observed = self.pods.observed(known.namespace, self._nodes.current())
        try:
            ledger = known.read().ledger
        except errors.UnreadableLedger:
            return False  # to settle it will fail, and say so
        if ledger.lost:
            return False
        claims = self.claims.observed(known.namespace, observed.extended)
        newer = not msgspec.structs.replace(observed, claims=claims).is_older(ledger)
        same = observed.committed == ledger.committed and (claims is None or claims.committed == ledger.claimed)
        return newer and not same

    def known_namespaces(self) -> Iterable[str]:
        """Return every namespace that has a quota, a ledger or vcuda pods, and the others."""
        quota = self._quota.current()
        named = quota.namespaces if quota else ()
        with_ledger = (ledger.namespace for ledger in self.ledgers.snapshot().values())
        return {*named, *with_ledger, *self.pods.namespaces(), *self.claims.namespaces(), *self._others()}

    def _reconcile(self, namespace: str) -> None:
        if self._quota.current() is None or self._limits(namespace):
            self._settle_or_retry(namespace, self.queue)
        else:
            self.unlimited.queue.add(namespace)

    def _reconcile_unlimited(self, namespace: str) -> None:
        self._settle_or_retry(namespace, self.unlimited.queue)

    def _settle_or_retry(self, namespace: str, queue: WorkQueue) -> None:
        with self._metrics.seconds.time():
            try:
                self.settle(namespace)
            except errors.Conflict:
                queue.retry(namespace, CONFLICT_RETRY_SECONDS)
            except errors.LedgerLost as lost:
                # Each is closed when it is made; a replica that makes the first one of a namespace opens it at once.
                if lost.missing < OPENING_SECONDS:
                    queue.add(namespace, OPENING_SECONDS)
                    return
                self._log.warning("ledger lost", namespace=namespace, error=str(lost))
                self._report_lost(namespace)
                queue.retry(namespace, lost.left)

    def _limits(self, namespace: str) -> NamespaceQuota | None:
        quota = self._quota.current()
        return quota.for_namespace(namespace) if quota and self._is_there(namespace) else None

    def _is_there(self, namespace: str) -> bool:
        # Where a pod is there is a namespace, though the watch of namespaces may not have brought it yet.
        return bool(self._exists(namespace) or self.pods.pods(namespace) or self.claims.claims(namespace))

    def settle(self, namespace: str) -> None:
        """Settle one namespace's ledger and report its usage.

        Raises Conflict where the replicas were ahead every time, LedgerLost, UnreadableLedger, and other VcudaErrors.
        """
        quota = self._quota.current()
        known = self.ledgers.get(self._store.key(namespace))
        try:
            stored = known.read() if known else None
        except errors.UnreadableLedger:
            self._drop_unreadable(namespace)
            raise
        if stored and (lost := stored.ledger.lost):
            self._store.check_lost(namespace, lost)
            stored = self._opened(namespace)
        if quota is None:
            # Malformed since before this process began. The replicas may have the last good one, and go on charging.
            if stored:
                self._settle_newest(namespace, stored)
            return
        if limits := self._limits(namespace):
            self._unlimited_since.pop(namespace, None)
            self._settle_limited(namespace, limits, stored)
            return
        self._with_room.discard(namespace)
        self._on_report(namespace, None)
        if stored:
            since = self._unlimited_since.setdefault(namespace, self._clock())
            self._drop_or_settle(
                namespace, stored, "the namespace is no longer limited", since + self._timing.uncertain
            )
        else:
            self._unlimited_since.pop(namespace, None)
            self._store.finish_drop(namespace)

    def _settle_limited(self, namespace: str, limits: NamespaceQuota, stored: Stored | None) -> None:
        pods = self.pods.pods(namespace)
        if stored is None and (pods or self.claims.claims(namespace)):
            stored = self._opened(namespace)
        if stored:
            stored = self._settle_newest(namespace, stored)
        if stored and stored.deleting:
            self._drop_or_settle(namespace, stored, "its deletion was asked for, and it is made anew")
        self._report(namespace, limits, stored.ledger if stored else Ledger())

    def _report_lost(self, namespace: str) -> None:
        """Report what stored pods and claims use, and that nothing else may be used until the ledger is made anew."""
        if limits := self._limits(namespace):
            observed = self.pods.observed(namespace, self._nodes.current())
            claims = self.claims.observed(namespace, observed.extended)
            claimed = claims.committed if claims else {}
            lost = Ledger(observed.committed, claimed=claimed, reserved={LOST: Reservation({}, 0)})
            self._report(namespace, limits, lost)

    def _report(self, namespace: str, limits: NamespaceQuota, ledger: Ledger) -> None:
        pods, nodes = self.pods.pods(namespace), self._nodes.current()
        claims = self.claims.charges(namespace, self.pods.extended_claims(namespace, nodes))
        use = report(namespace, limits, ledger, pods, nodes, claims=claims)
        (self._with_room.add if use.has_room else self._with_room.discard)(namespace)
        self._on_report(namespace, use)

    def _opened(self, namespace: str) -> Stored:
        """Return the ledger as it is now; one that was lost, and nobody else has made anew, is counted and opened."""
        stored = self._store.open(namespace)
        return self._store.write(namespace, stored.ledger, stored) if stored.opens else stored

    def _settle_newest(self, namespace: str, stored: Stored) -> Stored:
        """Settle the ledger as the watch has brought it; where that was out of date, as it is now.

        Under load the replicas write many times a second, and what the watch brings is old when it comes.
        """
        for _ in range(MAX_ATTEMPTS - 1):
            try:
                return self._write(namespace, self._settled(namespace, stored.ledger), stored)
            except errors.Conflict:
                stored = self._opened(namespace)
        return self._write(namespace, self._settled(namespace, stored.ledger), stored)

    def _write(self, namespace: str, ledger: Ledger, stored: Stored) -> Stored:
        if ledger is stored.ledger:
            return stored
        watch = self._watching()
        written = self._store.write(namespace, ledger, stored)
        self._ages.written(namespace, watch)
        self._metrics.released.inc(len(stored.ledger.pending) - len(ledger.pending))
        return written

    def _settled(self, namespace: str, ledger: Ledger) -> Ledger:
        quota = self._quota.current()
        since = {quota.version if quota else "", self.pods.since if ledger.committed else ""}
        unsure = self._absent(namespace, ledger)
        ended, reaped = self._ended(namespace, ledger), self._abandoned(namespace, ledger)
        observed = self._listed(namespace, ledger) if reaped else self._observed(namespace, ledger)
        newest = max(since, key=lambda version: int(version or 0))
        return settle(ledger, observed, Expired(unsure.keys(), unsure, ended, reaped), counted_since=newest)

    def _observed(self, namespace: str, ledger: Ledger) -> ObservedPods:
        """Return what the watch has seen of a namespace's pods; where the ledger's count is newer, what etcd has."""
        observed = self.pods.observed(namespace, self._nodes.current())
        counted_by_older = is_older(observed.config_version, self._store.config_version)
        if self.claims.awaits_pods(namespace):
            self.queue.add(namespace, AWAIT_PODS_AGAIN_SECONDS)
        if not (is_older(observed.resource_version, ledger.pod_resource_version) or counted_by_older):
            return msgspec.structs.replace(observed, claims=self.claims.as_new_as(ledger, namespace, observed.extended))
        # What units are worth has changed, and the list of all pods by that is not there yet. Or a webhook that counts
        # pods has done so at a later version than a quiet watch has come to, and the API server
        # sends a bookmark once a minute at best: until then the watch would say nothing about the ledger.
        return self._listed(namespace, ledger)

    def _listed(self, namespace: str, ledger: Ledger) -> ObservedPods:
        """Return what etcd has, with what the watches had seen before that."""
        observed = self.pods.observed(namespace, self._nodes.current())
        claims = self.claims.observed(namespace, observed.extended, ledger.longest_claim_grace)
        watched = msgspec.structs.replace(observed, claims=claims)
        return self._store.count_pods(namespace).after(watched, ledger)

    def _drop_or_settle(self, namespace: str, stored: Stored, why: str, due: float = -math.inf) -> None:
        """Delete a ledger in which nothing is charged that pods do not show, when that is ``due``; else settle it."""
        # One that is made anew counts the pods stored by then, and would miss one that is still on its way, or one that
        # is gone and may still run.
        ledger = stored.ledger
        # Where nothing was ever charged, or all has gone, no count would tell more. Many are dropped at once, and each
        # count is two LISTs, as the watch of a quiet cluster is behind a count that a replica has made.
        if not ledger.is_empty or self.pods.observed(namespace, self._nodes.current()).vanished:
            ledger = self._settled(namespace, ledger)
        if ledger.pending or ledger.terminating or ledger.reserved or stored.version is None:
            self._write(namespace, ledger, stored)
            return
        # Replicas that have not heard yet would make it anew, and so would an edit that is taken back.
        if (left := due - self._clock()) > 0:
            self.unlimited.queue.add(namespace, left)
            return
        with contextlib.suppress(errors.NotFound):
            self._store.drop(namespace, stored.version)
            self._log.info("ledger dropped", namespace=namespace, why=why)

    def _drop_unreadable(self, namespace: str) -> None:
        """Delete a damaged ledger whose deletion was asked for, once no pod that is charged in it can be stored."""
        known = self.ledgers.get(self._store.key(namespace))
        if known is None or not known.deleting:
            return
        # Nobody charges in it meanwhile, as nobody can read it.
        version, now = known.config_map.metadata.resource_version, self._clock()
        first, since = self._unreadable.get(namespace, ("", now))
        since = since if first == version else now
        self._unreadable[namespace] = version, since
        if (left := since + self._timing.uncertain - now) > 0:
            self.queue.add(namespace, left)
            return
        self._store.drop(namespace, version)
        self._unreadable.pop(namespace, None)
        self._log.warning("damaged ledger dropped", namespace=namespace)

    def reservation_ages(self) -> Mapping[str, float]:
        """Return by namespace for how many seconds its oldest reservation has not been renewed."""
        return self._ages.reservation_ages(self._clock())

    def _watching(self) -> Watch:
        return self._ages.watching(self.pods.since, self.claims.since, self._clock())

    def _abandoned(self, namespace: str, ledger: Ledger) -> Collection[str]:
        """Return the replicas that are gone and whose reservation may be removed."""
        over = self._ages.reservations(namespace, ledger, self._watching(), self._clock())
        self._look_again(namespace, over)
        for replica in over.keys:
            self._log.info("reservation of a replica that is gone", namespace=namespace, holder=replica)
        return over.keys

    def _absent(self, namespace: str, ledger: Ledger) -> Mapping[str, int]:
        """Return the pending uids that are not stored and never will be, and for how many seconds each may still run.

        Those are 0 for a pod that was never stored.
        """
        watch = self._watching()
        over = self._ages.pending(namespace, ledger, watch, self._clock())
        self._look_again(namespace, over)
        if not over.keys:
            return {}
        # A LIST without a resourceVersion is a quorum read: what it lacks is in no API server's etcd.
        absent = set(over.keys) - self._store.stored_uids(namespace)
        unseen = {uid: self._ages.seconds_unseen(namespace, ledger, uid, watch, self._clock()) for uid in absent}
        for uid, seconds in unseen.items():
            what = "charge of a pod that may have run unseen" if seconds else "charge of a pod that was never stored"
            self._log.info(what, namespace=namespace, uid=uid, may_run_seconds=seconds)
        return unseen

    def _ended(self, namespace: str, ledger: Ledger) -> Collection[str]:
        """Return the terminating keys whose time is over."""
        over = self._ages.terminating(namespace, ledger, self._clock())
        self._look_again(namespace, over)
        for key in over.keys:
            self._log.info("charge of a pod that was gone before it ended", namespace=namespace, uid=key)
        return over.keys

    def _look_again(self, namespace: str, over: Overdue) -> None:
        if over.next_in is not None:
            self.queue.add(namespace, over.next_in)
