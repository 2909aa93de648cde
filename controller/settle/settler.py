"""Settles the ledgers: recounts them from the stored pods, and releases the charges of deleted ones. Only the leader
does this."""

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
from vcuda.ledger.report import NamespaceUse
from vcuda.ledger.reporting import report
from vcuda.ledger.settle import Expired, ObservedPods, settle
from vcuda.quota.model import NamespaceQuota

MAX_ATTEMPTS = 5
"""Attempts of one settlement while replicas write first."""

RETRY_SECONDS = 2.0
"""Seconds until the first retry of a failed settlement."""

CONFLICT_RETRY_SECONDS = 0.1
"""Seconds until the retry of a settlement that lost every write to replicas. Meanwhile the charges of stored pods pile
up."""


GROWTH_SECONDS = 3.0
"""Seconds between two settlements of a ledger with room, if pods have only been added. Pending charges count as much as
committed ones, so no caller waits for a settlement, and fewer settlements disturb the replicas less."""


FEW_PENDING_BYTES = 2048
"""A ledger with fewer bytes of pending charges has at most some 80 of them."""

MANY_PENDING_BYTES = 3072
"""A ledger with more bytes has more than some 130 pending charges, a quarter of what a namespace may have. Watches lag
when so many pods are created."""

CROWDED_SECONDS = 0.25
"""Seconds between two settlements of a ledger with many pending charges, which could be full soon: at 400 pods a second
within the usual second."""


AWAIT_PODS_AGAIN_SECONDS = 0.5
"""Seconds between two settlements of a ledger whose claims lost devices before the pod watch showed why."""


class Settler:
    """Keeps every ledger in line with the stored pods and claims.

    ``on_report``: gets the report of a namespace after each settlement; None if the namespace is no longer limited.
    ``others``: returns further namespaces to look at, without a quota, a ledger or vcuda pods.
    ``exists``: returns whether a namespace exists. A deleted namespace is no longer limited.
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
        # Namespaces without a limit have their own queue. Thousands of them may appear at once, and a release of quota
        # elsewhere must not wait until all their ledgers are deleted.
        self.unlimited = Reconciler(
            "unlimited",
            lambda namespace: self._settle_or_retry(namespace, self.unlimited.queue),
            failure="not settled",
            retry_seconds=RETRY_SECONDS,
            clock=clock,
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
        # For namespaces without a limit that have a ledger: since when that is known.
        self._unlimited_since: dict[str, float] = {}
        # Namespaces that had room at their last settlement, so that no caller waits for a release.
        self._with_room: set[str] = set()
        # For namespaces whose damaged ledger will be deleted: its version, and since when it is known.
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
        for namespace in self.known_namespaces():
            self.queue.add(namespace)

    def full_resync(self) -> None:
        """Compare every ledger without a pending turn with the pods, report drift, and make every namespace due."""
        for namespace in self.known_namespaces():
            known = self.ledgers.get(self._store.key(namespace))
            # A ledger with a current or coming turn may differ for a moment, because its events are not settled yet.
            active = self.queue.is_active(namespace) or self.unlimited.queue.is_active(namespace)
            if known and not active and self._differs(known):
                self._metrics.drift.inc()
                self._log.warning("ledger differs from the stored pods; settling it", namespace=namespace)
            self.queue.add(namespace)

    def _differs(self, known: NamedLedger) -> bool:
        observed = self.pods.observed(known.namespace, self._nodes.current())
        try:
            ledger = known.read().ledger
        except errors.UnreadableLedger:
            return False  # its settlement will fail and report that
        if ledger.lost:
            return False
        claims = self.claims.observed(known.namespace, observed.extended)
        newer = not msgspec.structs.replace(observed, claims=claims).is_older(ledger)
        same = observed.committed == ledger.committed and (claims is None or claims.committed == ledger.claimed)
        return newer and not same

    def known_namespaces(self) -> Iterable[str]:
        """Return every namespace with a quota, a ledger or vcuda pods, and the other namespaces to look at."""
        quota = self._quota.current()
        named = quota.namespaces if quota else ()
        with_ledger = (ledger.namespace for ledger in self.ledgers.snapshot().values())
        return {*named, *with_ledger, *self.pods.namespaces(), *self.claims.namespaces(), *self._others()}

    def _reconcile(self, namespace: str) -> None:
        if self._quota.current() is None or self._limits(namespace):
            self._settle_or_retry(namespace, self.queue)
        else:
            self.unlimited.queue.add(namespace)

    def _settle_or_retry(self, namespace: str, queue: WorkQueue) -> None:
        with self._metrics.seconds.time():
            try:
                self.settle(namespace)
            except errors.Conflict:
                queue.retry(namespace, CONFLICT_RETRY_SECONDS)
            except errors.LedgerLost as lost:
                # A new ledger is closed. The replica that creates the first ledger of a namespace opens it at once.
                if lost.missing < OPENING_SECONDS:
                    queue.add(namespace, OPENING_SECONDS)
                    return
                self._log.warning("ledger lost", namespace=namespace, error=str(lost))
                self._report_lost(namespace)
                queue.retry(namespace, lost.left)

    def _limits(self, namespace: str) -> NamespaceQuota | None:
        quota = self._quota.current()
        # A namespace with a pod exists, even if the namespace watch has not delivered it yet.
        exists = self._exists(namespace) or self.pods.pods(namespace) or self.claims.claims(namespace)
        return quota.for_namespace(namespace) if quota and exists else None

    def settle(self, namespace: str) -> None:
        """Settle one namespace's ledger and report its usage.

        Raises Conflict if replicas wrote first every time. Raises LedgerLost, UnreadableLedger, or another VcudaError.
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
            # The quota has been malformed since before this process started. Replicas may still charge by the last good
            # document.
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
            self._drop_or_settle(namespace, stored, "a user deleted it; it is created again")
        self._report(namespace, limits, stored.ledger if stored else Ledger())

    def _report_lost(self, namespace: str) -> None:
        """Report the usage of stored pods and claims. The rest of the quota is closed until the ledger is rebuilt."""
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
        """Return the current ledger. A lost ledger that no replica has rebuilt is counted and opened."""
        stored = self._store.open(namespace)
        return self._store.write(namespace, stored.ledger, stored) if stored.opens else stored

    def _settle_newest(self, namespace: str, stored: Stored) -> Stored:
        """Settle the ledger that the watch delivered, or after a conflict the current one.

        Under load the replicas write many times a second, so a delivered ledger is often out of date.
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
        """Return the observation of the watch, or of a LIST if the count of the ledger is newer."""
        counted_as_now, observed = self.pods.counts_as_now, self.pods.observed(namespace, self._nodes.current())
        if self.claims.awaits_pods(namespace):
            self.queue.add(namespace, AWAIT_PODS_AGAIN_SECONDS)
        if counted_as_now and not is_older(observed.resource_version, ledger.pod_resource_version):
            return msgspec.structs.replace(observed, claims=self.claims.as_new_as(ledger, namespace, observed.extended))
        # Either the quota, a DeviceClass or a register of cards has changed the charges, and the watch has not decoded
        # the pods again yet. Or a replica counted the pods at a later version than a quiet watch has reached. The API
        # server sends a bookmark only once a minute. Until then the watch could not settle the ledger.
        return self._listed(namespace, ledger)

    def _listed(self, namespace: str, ledger: Ledger) -> ObservedPods:
        """Return a LIST of the pods and claims, with the earlier observations of the watches."""
        observed = self.pods.observed(namespace, self._nodes.current())
        claims = self.claims.observed(namespace, observed.extended, ledger.longest_claim_grace)
        watched = msgspec.structs.replace(observed, claims=claims)
        return self._store.count_pods(namespace).after(watched, ledger)

    def _drop_or_settle(self, namespace: str, stored: Stored, why: str, due: float = -math.inf) -> None:
        """Delete the ledger at ``due`` if the stored pods show all of its charges; otherwise settle it."""
        # A new ledger would count only the pods stored by then. It would miss a pod that may still be stored, and a
        # deleted pod that may still run.
        ledger = stored.ledger
        # An empty ledger needs no count. Many ledgers may be dropped at once, and a count costs two LISTs, because the
        # watch of a quiet cluster is behind a count that a replica made.
        if not ledger.is_empty or self.pods.observed(namespace, self._nodes.current()).vanished:
            ledger = self._settled(namespace, ledger)
        if ledger.pending or ledger.terminating or ledger.reserved or stored.version is None:
            self._write(namespace, ledger, stored)
            return
        # A replica that does not know the new quota yet would create the ledger again, and so would a reverted edit.
        if (left := due - self._clock()) > 0:
            self.unlimited.queue.add(namespace, left)
            return
        with contextlib.suppress(errors.NotFound):
            self._store.drop(namespace, stored.version)
            self._log.info("ledger dropped", namespace=namespace, why=why)

    def _drop_unreadable(self, namespace: str) -> None:
        """Delete a damaged ledger that a user has deleted, once no pod that was charged in it can still be stored."""
        known = self.ledgers.get(self._store.key(namespace))
        if known is None or not known.deleting:
            return
        # No replica can read the ledger, so none charges in it meanwhile.
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
        """Return for each namespace the seconds since its oldest reservation was renewed."""
        return self._ages.reservation_ages(self._clock())

    def _watching(self) -> Watch:
        return self._ages.watching(self.pods.since, self.claims.since, self._clock())

    def _abandoned(self, namespace: str, ledger: Ledger) -> Collection[str]:
        """Return the dead replicas whose reservation may be removed."""
        over = self._ages.reservations(namespace, ledger, self._watching(), self._clock())
        self._look_again(namespace, over)
        for replica in over.keys:
            self._log.info("releasing the reservation of a replica that has ended", namespace=namespace, holder=replica)
        return over.keys

    def _absent(self, namespace: str, ledger: Ledger) -> Mapping[str, int]:
        """Return the pending uids that are not stored and never will be, each with the seconds for which it may still
        run.

        The seconds are 0 for a pod that was never stored.
        """
        watch = self._watching()
        over = self._ages.pending(namespace, ledger, watch, self._clock())
        self._look_again(namespace, over)
        if not over.keys:
            return {}
        # A LIST without a resourceVersion is a quorum read: an object that it lacks is not stored.
        absent = set(over.keys) - self._store.stored_uids(namespace)
        unseen = {uid: self._ages.seconds_unseen(namespace, ledger, uid, watch, self._clock()) for uid in absent}
        for uid, seconds in unseen.items():
            event = "keeping the charge of a pod that may run" if seconds else "releasing the charge of an unstored pod"
            self._log.info(event, namespace=namespace, uid=uid, may_run_seconds=seconds)
        return unseen

    def _ended(self, namespace: str, ledger: Ledger) -> Collection[str]:
        """Return the terminating keys whose seconds have passed."""
        over = self._ages.terminating(namespace, ledger, self._clock())
        self._look_again(namespace, over)
        for key in over.keys:
            self._log.info("releasing the charge of a pod deleted before it ended", namespace=namespace, uid=key)
        return over.keys

    def _look_again(self, namespace: str, over: Overdue) -> None:
        if over.next_in is not None:
            self.queue.add(namespace, over.next_in)
