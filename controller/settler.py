"""Settles the ledgers: recounts what stored pods take, and releases what has gone. Only the leader runs this."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec
import structlog

from controller.metrics import SettleMetrics
from controller.pods import PodInformer
from controller.workqueue import WorkQueue
from vcuda.errors import Conflict, NotFound, UnreadableLedger, VcudaError
from vcuda.k8s_types import Pod
from vcuda.kube import Kube, LedgerStore, NamedLedger, NodeInformer, QuotaInformer, Stored, segment
from vcuda.ledger.ledger import Ledger, NamespaceUse, ObservedPods, is_older, report, settle

SPACING = 1.0
"""Seconds between two settlements of one namespace, at least."""

TRIES = 5
"""How often one settlement is tried when the replicas write first."""


OVERTAKEN = 0.1
"""Seconds after which a settlement that the replicas were ahead of every time, so that nothing was written, has another
turn: while it waits charges pile up that their pods have made good."""


class Times(msgspec.Struct, frozen=True):
    """Seconds.

    After ``storable`` a pod that was admitted can no longer be stored: well past the API server's own timeouts. A
    settlement that failed is tried again after ``retry``. Every ``full_pass`` all namespaces are looked at, to mend
    what events should have.
    """

    storable: float = 120.0
    retry: float = 2.0
    full_pass: float = 600.0


_POD = msgspec.json.Decoder(Pod)


class Settler:
    """Keeps every ledger true to the pods that are stored.

    ``on_report`` gets each namespace's report after it was looked at, and None where it is no longer limited.
    ``others`` names namespaces that are to be looked at though they may have no quota, no ledger and no vcuda pods.
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
        times: Times | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.due = WorkQueue(SPACING, clock)
        self.pods = PodInformer(kube, nodes.keys, self.due.add, clock)
        self.ledgers = store.reflector(self.due.add)
        self._kube = kube
        self._store = store
        self._quota = quota
        self._nodes = nodes
        self._metrics = metrics
        self._on_report = on_report
        self._others = others
        self._times = times or Times()
        self._clock = clock
        self._first_seen: dict[str, float] = {}
        self._log = structlog.get_logger()

    def run(self) -> None:
        """Settle whatever falls due until `due` is closed."""
        while (namespace := self.due.next()) is not None:
            started = self._clock()
            try:
                self._settle(namespace)
            except Conflict:
                self.due.retry(namespace, OVERTAKEN)
            except VcudaError as error:
                self._log.warning("not settled", namespace=namespace, error=str(error))
                self.due.add(namespace, self._times.retry)
            self._metrics.settled(self._clock() - started)

    def add_all(self) -> None:
        """Let every namespace be due that is known."""
        for namespace in self.known_namespaces():
            self.due.add(namespace)

    def audit(self) -> None:
        """Compare every ledger that is at rest with the pods; log, count and mend what differs."""
        for namespace in self.known_namespaces():
            known = self.ledgers.get(self._store.key(namespace))
            if known and not self.due.holds(namespace) and self._differs(known):
                self._metrics.mended.inc()
                self._log.warning("ledger differs from the pods; mending", namespace=namespace)
            self.due.add(namespace)

    def _differs(self, known: NamedLedger) -> bool:
        view = self.pods.view(known.namespace, self._nodes.current())
        try:
            ledger = known.read().ledger
        except UnreadableLedger:
            return False  # to settle it will fail, and say so
        newer = not is_older(view.resource_version, ledger.pod_resource_version)
        return newer and view.committed != ledger.committed

    def known_namespaces(self) -> Iterable[str]:
        """Return every namespace that has a quota, a ledger or vcuda pods, and the others."""
        quota = self._quota.current()
        named = quota.namespaces if quota else ()
        with_ledger = (ledger.namespace for ledger in self.ledgers.snapshot().values())
        return {*named, *with_ledger, *self.pods.namespaces(), *self._others()}

    def _settle(self, namespace: str) -> None:
        quota = self._quota.current()
        known = self.ledgers.get(self._store.key(namespace))
        stored = known.read() if known else None
        if quota is None:
            # Malformed since before this process began. The replicas may have the last good one, and go on charging.
            if stored:
                self._bring_up_to_date(namespace, stored)
            return
        limits = quota.for_namespace(namespace)
        if limits is None:
            self._on_report(namespace, None)
            if stored and stored.version:
                self._wind_up(namespace, stored, stored.version)
            return
        nodes = self._nodes.current()
        if stored is None and self.pods.pods(namespace):
            stored = self._store.read(namespace)
        ledger = stored.ledger if stored else Ledger()
        if stored:
            ledger = self._bring_up_to_date(namespace, stored)
        self._on_report(namespace, report(namespace, limits, ledger, self.pods.pods(namespace), nodes))

    def _bring_up_to_date(self, namespace: str, stored: Stored) -> Ledger:
        """Settle the ledger as the watch has brought it; where that was out of date, as it is now.

        Under load the replicas write many times a second, and what the watch brings is old when it comes.
        """
        for _ in range(TRIES - 1):
            try:
                return self._attempt(namespace, stored)
            except Conflict:
                stored = self._store.read(namespace)
        return self._attempt(namespace, stored)

    def _attempt(self, namespace: str, stored: Stored) -> Ledger:
        ledger = self._settled(namespace, stored.ledger)
        self._keep(namespace, ledger, stored)
        return ledger

    def _keep(self, namespace: str, ledger: Ledger, stored: Stored) -> None:
        if ledger is not stored.ledger or stored.version is None:
            self._store.write(namespace, ledger, stored.version)
            self._metrics.released(len(stored.ledger.pending) - len(ledger.pending))

    def _settled(self, namespace: str, ledger: Ledger) -> Ledger:
        quota = self._quota.current()
        counted_since = quota.version if quota else ""
        return settle(ledger, self._view(namespace, ledger), self._absent(namespace, ledger), counted_since)

    def _view(self, namespace: str, ledger: Ledger) -> ObservedPods:
        """Return what the watch has seen of a namespace's pods; where the ledger's count is newer, what etcd has.

        A webhook that counts pods may do so at a later version than a quiet watch has come to, and the API server tells
        that nothing has changed once a minute at best: until then the view would say nothing about the ledger.
        """
        view = self.pods.view(namespace, self._nodes.current())
        if not is_older(view.resource_version, ledger.pod_resource_version):
            return view
        newest = self._store.look(namespace)
        return msgspec.structs.replace(newest, seen={*newest.seen, *view.seen})

    def _wind_up(self, namespace: str, stored: Stored, version: str) -> None:
        """Drop a ledger that limits nobody any more, but not before its last pending charge is settled.

        A new ledger counts the pods that are stored by then: it would miss one that is still on its way.
        """
        ledger = self._settled(namespace, stored.ledger)
        if ledger.pending:
            self._keep(namespace, ledger, stored)
            return
        try:
            self._store.delete(namespace, version)
        except NotFound:
            return
        self._log.info("ledger dropped: the namespace is no longer limited", namespace=namespace)

    def _absent(self, namespace: str, ledger: Ledger) -> set[str]:
        """Return the pending uids that are proven never to have been stored.

        How long a charge has been pending is measured from when this leader first saw it, on its own clock: the clock
        of the replica that wrote it may be wrong.
        """
        now = self._clock()
        self._first_seen = {
            uid: at for uid, at in self._first_seen.items() if uid in ledger.pending or at > now - self._times.full_pass
        }
        overdue = set()
        for uid in ledger.pending:
            left = self._first_seen.setdefault(uid, now) + self._times.storable - now
            if left > 0:
                self.due.add(namespace, left)
            else:
                overdue.add(uid)
        absent = overdue - self._stored_now(namespace) if overdue else overdue
        for uid in absent:
            self._log.info("charge of a pod that was never stored", namespace=namespace, uid=uid)
        return absent

    def _stored_now(self, namespace: str) -> set[str]:
        """Return the uids of the pods that etcd has: a LIST without a resourceVersion is a quorum read."""
        pods = f"/api/v1/namespaces/{segment(namespace)}/pods"
        return {_POD.decode(raw).metadata.uid for page in self._kube.list_pages(pods) for raw in page.items}
