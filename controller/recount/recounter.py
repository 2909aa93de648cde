"""Recounts each ledger from the stored pods and claims, and releases the charges of deleted pods.

Only the leading controller recounts ledgers regularly.
"""

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

import msgspec
import structlog

from controller.claims import ClaimInformer
from controller.metrics import RecountMetrics
from controller.pods import PodInformer
from controller.recount.charge_ages import ChargeAges, Overdue, RecountTiming, Watch
from controller.recount.team_allotments import TeamAllotments
from controller.workqueue import Reconciler, WorkQueue
from vcuda import errors
from vcuda.kube import OPENING_SECONDS, Kube, LedgerStore, NamedLedger, NodeInformer, QuotaInformer, Stored
from vcuda.ledger.ledger import LOST, Ledger, Reservation, charges_by_model, is_older
from vcuda.ledger.recount import Expired, ObservedPods, recount
from vcuda.ledger.report import NamespaceUse, report
from vcuda.quota.model import NamespaceQuota

MAX_ATTEMPTS = 5
"""Maximum attempts to recount and write a ledger. An attempt fails if a webhook replica writes the ledger meanwhile."""

RETRY_SECONDS = 2.0
"""Seconds until the first retry after a ledger could not be recounted."""

CONFLICT_RETRY_SECONDS = 0.1
"""Seconds until the retry if all attempts to write a recounted ledger conflicted. The delay is short, because pending
charges accumulate until the recounted ledger is written."""

GROWTH_SECONDS = 3.0
"""Seconds between two recounts of a ledger with free quota, if pods were only added. Such a recount frees no quota, so
no pod waits for it. Rare recounts cause few write conflicts with webhook replicas."""

FEW_PENDING_BYTES = 2048
"""If the pending charges of a ledger have fewer bytes, they are at most about 80, and a recount is not urgent."""

MANY_PENDING_BYTES = 3072
"""If the pending charges of a ledger have more bytes, they are more than about 130, a quarter of the maximum. Then the
ledger is recounted every `CROWDED_SECONDS`, because the watches lag while so many pods are created."""

CROWDED_SECONDS = 0.25
"""Seconds between two recounts of a ledger with many pending charges. At 400 pods a second, such a ledger could be full
within the usual interval of one second."""

AWAIT_PODS_AGAIN_SECONDS = 0.5
"""Seconds until a ledger is recounted again, if the watches do not show yet why a claim has lost its devices."""


class Recounter:
    """Recounts every ledger: makes its charges agree with the stored pods and claims.

    ``on_report``: called with a namespace and its usage after each recount. The usage of a namespace without a limit
    is None.
    ``further``: returns further namespaces to recount, which may have no quota, no ledger and no GPU pods.
    ``exists``: returns True if a namespace exists. A deleted namespace is no longer limited.
    """

    def __init__(
        self,
        kube: Kube,
        store: LedgerStore,
        quota: QuotaInformer,
        nodes: NodeInformer,
        *,
        metrics: RecountMetrics,
        on_report: Callable[[str, NamespaceUse | None], None],
        further: Callable[[], Iterable[str]] = tuple,
        exists: Callable[[str], bool] = lambda _: True,
        timing: RecountTiming | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._quota = quota
        self._nodes = nodes
        self._metrics = metrics
        self._on_report = on_report
        self._further = further
        self._exists = exists
        self._clock = clock
        self._timing = timing or RecountTiming()
        self._ages = ChargeAges(self._timing)
        # `_unlimited_since`: for each namespace with a ledger but no limit, when this process first saw this state.
        self._unlimited_since: dict[str, float] = {}
        # `_with_room`: the namespaces that had free quota at their last recount. No pod there waits for quota.
        self._with_room: set[str] = set()
        # `_unreadable`: by namespace, the version of a damaged ledger that will be deleted, and when it was found.
        self._unreadable: dict[str, tuple[str, float]] = {}
        self._log = structlog.get_logger()
        self.reconciler = self._queue("recount", self._reconcile)
        self.queue = self.reconciler.queue
        metrics.lag.set_function(self.queue.lag)
        # Namespaces without a limit have their own queue, because thousands of namespaces may lose their limits
        # together. The release of quota in limited namespaces must not wait for the deletion of their ledgers.
        self.unlimited = self._queue("unlimited", lambda each: self._recount_or_retry(each, self.unlimited.queue))
        self._watch(kube)
        # `reconcilers`: the loops that a standby also runs while the leader does not renew its Lease.
        self.reconcilers = (self.reconciler, self.teams.reconciler)

    def _queue(self, name: str, handle: Callable[[str], None]) -> Reconciler:
        return Reconciler(name, handle, failure="not recounted", retry_seconds=RETRY_SECONDS, clock=self._clock)

    def _watch(self, kube: Kube) -> None:
        self.pods = PodInformer(
            kube,
            self._nodes.keys,
            self.queue.add,
            self._clock,
            self._timing.max_terminating_seconds,
            on_growth=self._add_grown,
            resources=self._store.resources,
        )
        self.claims = ClaimInformer(kube, self._store, self.pods, self.queue.add, self._clock)
        self.ledgers = self._store.reflector(self.queue.add, self._add_charged)
        self.teams = TeamAllotments(self._store, self._quota, self._seems_to_exist, self.ledgers, self._clock)

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
        self.teams.add_all()

    def resync(self) -> None:
        """Queue a recount of every namespace. Log and count each ledger that differs from the stored pods (drift)."""
        for namespace in self.known_namespaces():
            known = self.ledgers.get(self._store.key(namespace))
            # A ledger that is queued or was just recounted may briefly differ from the stored pods without being wrong.
            active = self.queue.is_active(namespace) or self.unlimited.queue.is_active(namespace)
            if known and not active and self._differs(known):
                self._metrics.drift.inc()
                self._log.warning("the ledger differs from the stored pods and is recounted", namespace=namespace)
            self.queue.add(namespace)
        self.teams.add_all()

    def _differs(self, known: NamedLedger) -> bool:
        try:
            ledger = known.read().ledger
            if ledger.lost:
                return False
            observed = self.pods.observed(known.namespace, self._nodes.current())
            claims = self.claims.observed(known.namespace, observed.extended, ledger.longest_claim_grace)
        except (errors.UnreadableLedger, errors.Unavailable):
            return False  # The recount of the ledger will report the same error.
        newer = not msgspec.structs.replace(observed, claims=claims).is_older(ledger)
        same = observed.committed == ledger.committed and (claims is None or claims.committed == ledger.claimed)
        return newer and not same

    def known_namespaces(self) -> Iterable[str]:
        """Return the namespaces with a quota, a ledger, GPU pods or ResourceClaims, and those of ``further``."""
        quota = self._quota.current()
        named = quota.named if quota else ()
        with_ledger = (ledger.namespace for ledger in self.ledgers.snapshot().values())
        return {*named, *with_ledger, *self.pods.namespaces(), *self.claims.namespaces(), *self._further()}

    def _reconcile(self, namespace: str) -> None:
        if self._quota.current() is None or self._limits(namespace):
            self._recount_or_retry(namespace, self.queue)
        else:
            self.unlimited.queue.add(namespace)

    def _recount_or_retry(self, namespace: str, queue: WorkQueue) -> None:
        with self._metrics.seconds.time():
            try:
                self.recount(namespace)
            except errors.Conflict:
                queue.retry(namespace, CONFLICT_RETRY_SECONDS)
            except errors.LedgerLost as lost:
                # A new ledger is closed, so nothing can be charged to it. The webhook replica that creates the first
                # ledger of a namespace opens it immediately. So try again soon, before reporting a lost ledger.
                if lost.missing < OPENING_SECONDS:
                    queue.add(namespace, OPENING_SECONDS)
                    return
                self._log.warning("ledger lost", namespace=namespace, error=str(lost))
                self._report_lost(namespace)
                queue.retry(namespace, lost.left)

    def _limits(self, namespace: str) -> NamespaceQuota | None:
        quota = self._quota.current()
        return quota.for_namespace(namespace) if quota and self._seems_to_exist(namespace) else None

    def _seems_to_exist(self, namespace: str) -> bool:
        # A namespace with a pod or claim exists, even if the watch of namespaces has not delivered it yet.
        return bool(self._exists(namespace) or self.pods.pods(namespace) or self.claims.claims(namespace))

    def recount(self, namespace: str) -> None:
        """Recount the ledger of a namespace, and report the usage of the namespace.

        Raises Conflict if every attempt to write conflicted. Raises LedgerLost, UnreadableLedger or another VcudaError.
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
            # This process has read no valid quota document since its start. Webhook replicas may still charge pods by
            # an earlier valid document, so recount an existing ledger.
            if stored:
                self._recount_newest(namespace, stored)
            return
        if limits := self._limits(namespace):
            self._unlimited_since.pop(namespace, None)
            self._recount_limited(namespace, limits, stored)
            return
        self._with_room.discard(namespace)
        self.teams.usages.record(namespace, None, {})
        self._on_report(namespace, None)
        if stored:
            stored = self.teams.assign(namespace, stored)
            since = self._unlimited_since.setdefault(namespace, self._clock())
            self._drop_or_recount(
                namespace, stored, "the namespace is no longer limited", since + self._timing.uncertain
            )
        else:
            self._unlimited_since.pop(namespace, None)
            self._store.finish_drop(namespace)

    def _recount_limited(self, namespace: str, limits: NamespaceQuota, stored: Stored | None) -> None:
        pods = self.pods.pods(namespace)
        if stored is None and (pods or self.claims.claims(namespace)):
            stored = self._opened(namespace)
        if stored:
            stored = self._recount_newest(namespace, stored)
        if stored and stored.deleting:
            why = "a user deleted the ledger, and a new ledger is created"
            # Without a ledger and without a mark, the namespace would be missing in a count of its team.
            if self._drop_or_recount(namespace, stored, why) and (pods or self.claims.claims(namespace)):
                stored = self._recount_newest(namespace, self._opened(namespace))
        self._report(namespace, limits, stored.ledger if stored else Ledger())

    def _report_lost(self, namespace: str) -> None:
        """Report the usage of the stored pods and claims, but no free quota, because the ledger is lost."""
        if limits := self._limits(namespace):
            observed = self.pods.observed(namespace, self._nodes.current())
            claims = self.claims.charges(namespace, observed.extended)
            claimed = charges_by_model(each for _, taken in claims for each in taken.charges.items())
            lost = Ledger(observed.committed, claimed=claimed, reserved={LOST: Reservation({}, 0)})
            self._report(namespace, limits, lost)

    def _report(self, namespace: str, limits: NamespaceQuota, ledger: Ledger) -> None:
        pods, nodes = self.pods.pods(namespace), self._nodes.current()
        claims = self.claims.charges(namespace, self.pods.extended_claims(namespace, nodes))
        unstored = self._ages.unstored(namespace, ledger, self._clock())
        self._look_again(namespace, unstored)
        use = report(namespace, limits, ledger, pods, nodes, claims=claims, unstored=unstored.keys)
        use = replace(use, team=self.teams.report(namespace, limits, ledger))
        (self._with_room.add if use.has_room else self._with_room.discard)(namespace)
        self._on_report(namespace, use)

    def _opened(self, namespace: str) -> Stored:
        """Return the stored ledger. If it is closed (admits nothing yet) and may open now, count pods and open it."""
        if not (stored := self._store.open(namespace)).opens:
            return stored
        return self._store.write(namespace, stored.ledger, stored)

    def _recount_newest(self, namespace: str, stored: Stored) -> Stored:
        """Recount and write the ledger ``stored``. After a conflict, read the ledger again, and recount that version.

        Under load, the replicas write a ledger many times a second, so a ledger from the watch is often outdated.
        """
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                stored = self.teams.assign(namespace, stored)
                stored = self._write(namespace, self._recounted(namespace, stored.ledger), stored)
                return self.teams.cover(namespace, stored)
            except errors.Conflict:
                if attempt == MAX_ATTEMPTS:
                    raise
                stored = self._opened(namespace)
        raise AssertionError  # the last attempt returns or raises

    def _write(self, namespace: str, ledger: Ledger, stored: Stored) -> Stored:
        if ledger is stored.ledger:
            return stored
        watch = self._watching()
        written = self._store.write(namespace, ledger, stored)
        self._ages.written(namespace, watch)
        self._metrics.released.inc(len(stored.ledger.pending) - len(ledger.pending))
        return written

    def _recounted(self, namespace: str, ledger: Ledger) -> Ledger:
        quota, watch, now = self._quota.current(), self._watching(), self._clock()
        pending = self._ages.pending(namespace, ledger, watch, now)
        ended = self._ages.terminating(namespace, ledger, now)
        gone = self._ages.reservations(namespace, ledger, watch, now)
        self._look_again(namespace, pending, ended, gone)
        absent = self._absent(namespace, ledger, pending.keys, watch)
        self._log_expired(namespace, absent, ended.keys, gone.keys)
        observed = self._listed(namespace, ledger) if gone.keys else self._observed(namespace, ledger)
        since = {quota.version if quota else "", self.pods.since if ledger.committed else ""}
        newest = max(since, key=lambda version: int(version or 0))
        return recount(ledger, observed, Expired(absent.keys(), absent, ended.keys, gone.keys), counted_since=newest)

    def _observed(self, namespace: str, ledger: Ledger) -> ObservedPods:
        """Return the pods and claims from the watches, or from LISTs if the ledger is newer than the watches."""
        counted_as_now, observed = self.pods.counts_as_now, self.pods.observed(namespace, self._nodes.current())
        if counted_as_now and not is_older(observed.resource_version, ledger.pod_resource_version):
            return msgspec.structs.replace(observed, claims=self.claims.as_new_as(ledger, namespace, observed.extended))
        # A LIST is needed in two cases. In the first case, the quota, a DeviceClass or the cards of a node have
        # changed, and the pod watch has not computed all charges again. In the second case, a webhook replica has
        # counted the pods at a later version than the watch, because a quiet watch gets only one bookmark a minute.
        return self._listed(namespace, ledger)

    def _listed(self, namespace: str, ledger: Ledger) -> ObservedPods:
        """List the pods and claims. Add the deletions seen by the watches, because a LIST does not show deletions."""
        observed = self.pods.observed(namespace, self._nodes.current())
        claims = self.claims.observed(namespace, observed.extended, ledger.longest_claim_grace)
        watched = msgspec.structs.replace(observed, claims=claims)
        return self._store.count_pods(namespace).after(watched, ledger)

    def _drop_or_recount(self, namespace: str, stored: Stored, why: str, due: float = -math.inf) -> bool:
        """Delete the ledger at the time ``due`` if stored pods account for all of its charges. Otherwise recount it.

        Return True if the ledger was deleted.
        """
        # A ledger with pending, terminating or reserved charges must stay. A new ledger would be counted from the
        # stored pods, and would lack admitted pods that are not stored yet, and deleted pods that may still run.
        ledger = stored.ledger
        # Delete an empty ledger without a recount, because many ledgers may be deleted together. In a quiet cluster,
        # the watches may be older than a ledger, and a recount then needs two LISTs.
        if not ledger.is_empty or self.pods.observed(namespace, self._nodes.current()).vanished:
            ledger = self._recounted(namespace, ledger)
        if ledger.pending or ledger.terminating or ledger.reserved or stored.version is None:
            self._write(namespace, ledger, stored)
            return False
        # Wait until `due`, because a webhook replica that has not read the new quota yet would create the ledger again.
        if (left := due - self._clock()) > 0:
            self.unlimited.queue.add(namespace, left)
            return False
        with contextlib.suppress(errors.NotFound):
            self._store.drop(namespace, stored.version)
            self._ages.forget(namespace)
            self.teams.changed(ledger, None)
            self._log.info("ledger deleted", namespace=namespace, why=why)
        return True

    def _drop_unreadable(self, namespace: str) -> None:
        """Delete an unreadable ledger if a user has asked for this, and no pod charged to it can still be stored."""
        known = self.ledgers.get(self._store.key(namespace))
        if known is None or not known.deleting:
            return
        # While a ledger is unreadable, no webhook replica can add a charge to the ledger.
        version, now = known.config_map.metadata.resource_version, self._clock()
        first, since = self._unreadable.get(namespace, ("", now))
        since = since if first == version else now
        self._unreadable[namespace] = version, since
        if (left := since + self._timing.uncertain - now) > 0:
            self.queue.add(namespace, left)
            return
        self._store.drop(namespace, version)
        self._unreadable.pop(namespace, None)
        self._log.warning("damaged ledger deleted", namespace=namespace)

    def reservation_ages(self) -> Mapping[str, float]:
        return self._ages.reservation_ages(self._clock())

    def record_ages(self) -> None:
        """Record since when the watches have run, and when the charges of each ledger were first seen.

        A standby calls this method regularly. So if the standby recounts a ledger later, it already knows these ages.
        """
        self._ages.record_all(self.ledgers.snapshot().values(), self._watching(), self._clock())

    def _watching(self) -> Watch:
        return self._ages.watching(self.pods.since, self.claims.since, self._clock())

    def _absent(self, namespace: str, ledger: Ledger, uids: Collection[str], watch: Watch) -> Mapping[str, int]:
        """Of ``uids`` (of expired pending charges), return those whose pods are not stored and can never be stored.

        Each uid comes with the seconds for which the pod's containers may still run: 0 if the pod was never stored.
        """
        if not uids:
            return {}
        # A LIST without a resourceVersion is a quorum read of etcd. So a pod that is missing in the LIST is not stored.
        absent, now = set(uids) - self._store.stored_uids(namespace), self._clock()
        return {uid: self._ages.seconds_unseen(namespace, ledger, uid, watch, now) for uid in absent}

    def _log_expired(
        self, namespace: str, absent: Mapping[str, int], ended: Collection[str], replicas: Collection[str]
    ) -> None:
        for uid, seconds in absent.items():
            event = "keeping the charge of a pod that may run" if seconds else "releasing the charge of an unstored pod"
            self._log.info(event, namespace=namespace, uid=uid, may_run_seconds=seconds)
        for key in ended:
            self._log.info("releasing the charge of a pod deleted before it ended", namespace=namespace, uid=key)
        for each in replicas:
            self._log.info("releasing the reservation of a replica that has ended", namespace=namespace, replica=each)

    def _look_again(self, namespace: str, *expiring: Overdue) -> None:
        """Queue the namespace again for the time when the next of its charges expires."""
        for each in expiring:
            if each.next_in is not None:
                self.queue.add(namespace, each.next_in)
        if self.claims.awaits_pods(namespace):
            self.queue.add(namespace, AWAIT_PODS_AGAIN_SECONDS)
