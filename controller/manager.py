"""Everything the leading controller does, put together; it ends with the process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from controller.auditor import Auditing, Auditor, UnpinnedPods
from controller.certificates import CertificateWatch
from controller.evictions import Evictor
from controller.extender.publish import delete_published
from controller.extender.service import Extender, Listening
from controller.labels import NamespaceLabels
from controller.metrics import AuditCollector, AuditMetrics, GarbageMetrics, SettleMetrics, UsageCollector
from controller.publisher import Publisher
from controller.retrier import Nudger
from controller.settler import SPACING, Settler, Times
from controller.stale_gc import AllocationGc, Garbage, Removing, Reporting
from controller.workqueue import WorkQueue, spawn
from vcuda.kube import Kube, LedgerStore, NodeInformer, QuotaInformer, QuotaPlace, Reflector
from vcuda.ledger.ledger import NamespaceUse
from vcuda.placement.affinity import NodeLabels
from vcuda.quota.model import SYSTEM_NAMESPACES

PATIENCE = 5.0
"""Seconds that a stop waits for the loops, so that a write that is on its way comes to its end."""


class Leader:
    """The leader's watches and loops. ``start`` returns at once; ``on_fault`` hears of a loop that ended by a fault."""

    def __init__(
        self,
        kube: Kube,
        place: QuotaPlace,
        system_namespace: str,
        labels: NodeLabels,
        registry: CollectorRegistry,
        *,
        on_fault: Callable[[], None],
        times: Times | None = None,
        garbage: Garbage | None = None,
        auditing: Auditing | None = None,
        listening: Listening | None = None,
        webhook_service: str = "",
    ) -> None:
        self._kube = kube
        self._system_namespace = system_namespace
        self._on_fault = on_fault
        self._loops: list[threading.Thread] = []
        self._times = times or Times()
        self._stopping = threading.Event()
        self._log = structlog.get_logger()
        system = SYSTEM_NAMESPACES | {system_namespace}
        self.quota = QuotaInformer(kube, place, system, self._quota_changed)
        self.models_changed = WorkQueue(SPACING)
        self.nodes = NodeInformer(kube, labels, lambda: self.models_changed.add("nodes"))
        store = LedgerStore(kube, system_namespace, self.nodes.current)
        self.publisher = Publisher(kube)
        self.nudger = Nudger(kube, self.quota, self.nodes)
        self.namespaces = NamespaceLabels(kube, self.quota, self._arrived)
        self.settler = Settler(
            kube,
            store,
            self.quota,
            self.nodes,
            metrics=SettleMetrics(registry),
            on_report=self._report,
            others=self._others,
            times=self._times,
        )
        self.unpinned = UnpinnedPods(kube, self.settler.pods.pods)
        garbage = garbage or Garbage()
        sweep = Reporting() if garbage.dry_run else Removing(kube, GarbageMetrics(registry))
        self.garbage = AllocationGc(kube, self.settler.pods, self.nodes, sweep, garbage.timeout)
        registry.register(UsageCollector(self.publisher.reports))
        auditing, evictions = auditing or Auditing(), AuditMetrics(registry)
        evictor = Evictor(kube, store, self.quota, self.nodes, evictions) if auditing.enforce else None
        stored = self.settler.pods.pods
        self.auditor = Auditor(kube, self.quota, self.nodes, stored, period=auditing.period, evictor=evictor)
        registry.register(AuditCollector(self.auditor.counts))
        self.certificates = CertificateWatch(kube, system_namespace, webhook_service) if webhook_service else None
        if self.certificates:
            registry.register(self.certificates)
        self.extender: Extender | None = None
        if listening:
            pods, nodes = self.settler.pods, self.nodes
            self.extender = Extender(
                kube, system_namespace, listening, pods, nodes, registry=registry, on_fault=on_fault
            )

    def reflectors(self) -> Mapping[str, Reflector[Any]]:
        """Return the watches by the name of what they follow."""
        return {
            "configmaps": self.quota.reflector,
            "nodes": self.nodes.reflector,
            "namespaces": self.namespaces.reflector,
            "pods": self.settler.pods.reflector,
            "ledgers": self.settler.ledgers,
            "usage": self.publisher.published,
        }

    @property
    def synced(self) -> bool:
        """Whether everything has been listed once, by a consistent LIST made since this process leads."""
        return all(reflector.synced.is_set() for reflector in self.reflectors().values())

    @property
    def ready(self) -> bool:
        """Whether everything has been listed, and the extender, where there is one, answers."""
        return self.synced and (self.extender is None or self.extender.serving)

    def start(self) -> None:
        """Start watching; the loops begin when everything has been listed."""
        if self.extender:
            self.extender.take()
        for reflector in self.reflectors().values():
            reflector.start()
        self._spawn("main", self._main)

    def stop(self) -> None:
        """End the watches and the loops; these have `PATIENCE` seconds to finish what they are about."""
        self._stopping.set()
        if self.extender:
            self.extender.stop()
        for queue in self._queues():
            queue.close()
        for reflector in self.reflectors().values():
            reflector.stop()
        deadline = time.monotonic() + PATIENCE
        for loop in tuple(self._loops):
            loop.join(max(0.0, deadline - time.monotonic()))

    def trouble(self) -> str | None:
        """Return what a restart may mend, or None: a watch whose thread has ended, a loop that is stuck."""
        if not all(reflector.alive for reflector in self.reflectors().values()):
            return "a watch has ended"
        return "the removal of stale allocations is stuck" if self.garbage.stuck() else None

    def _main(self) -> None:
        started = time.process_time()
        for reflector in self.reflectors().values():
            while not reflector.synced.wait(1.0):
                if self._stopping.is_set():
                    return
        self._log.info("synced", cpu_seconds=round(time.process_time() - started, 2))
        for name, loop in (
            ("settle", self.settler.run),
            ("models", self._follow_models),
            ("publish", self.publisher.run),
            ("label", self.namespaces.run),
            ("nudge", self.nudger.run),
            ("garbage", self.garbage.run),
            ("unpinned", self.unpinned.run),
            ("audit", self.auditor.run),
        ):
            self._spawn(name, loop)
        if watch := self.certificates:
            self._spawn("certificates", lambda: watch.run(self._stopping))
        if self.extender:
            self.extender.serve()
        self._quota_changed()
        self._withdraw_cards()
        while not self._stopping.wait(self._times.full_pass):
            self.settler.audit()
            self._withdraw_cards()

    def _spawn(self, name: str, loop: Callable[[], None]) -> None:
        self._loops.append(spawn(name, loop, self._on_fault))

    def _queues(self) -> Iterator[Any]:
        yield from (self.settler.due, self.publisher.due, self.namespaces.due, self.nudger.due)
        yield from (self.models_changed, self.unpinned.due, self.garbage.due, self.auditor.due)

    def _quota_changed(self) -> None:
        self.settler.add_all()
        self.namespaces.add_all()

    def _follow_models(self) -> None:
        """Settle every namespace when nodes change their model: it is that of the pods there that are held to none."""
        while self.models_changed.next() is not None:
            self.settler.add_all()

    def _others(self) -> Iterable[str]:
        """Return the namespaces that ``"*"`` limits, and those where a report is published, limited or not."""
        quota = self.quota.current()
        names = (key.name for key in self.namespaces.reflector.snapshot())
        return self.publisher.published_in() | {name for name in names if quota and quota.for_namespace(name)}

    def _arrived(self, namespace: str) -> None:
        """Publish in a namespace that was made, or made again, though nothing changed but that."""
        self.settler.due.add(namespace)
        self.publisher.due.add(namespace)

    def _withdraw_cards(self) -> None:
        """Delete the figures of an extender that was, if there is none now: models would be chosen by them for ever.

        At every full pass, as the one before us may have written them while it ended.
        """
        if self.extender is None or not self.extender.publishes:
            delete_published(self._kube, self._system_namespace)

    def _report(self, namespace: str, use: NamespaceUse | None) -> None:
        self.publisher.report(namespace, use)
        self.nudger.report(namespace, use)
        self.unpinned.report(namespace, use)
        self.auditor.report(namespace, use)
