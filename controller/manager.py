"""Builds and runs the leader's duties: `recount`, `retry`, `violations`, `garbage`, `discover` and `extender`."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from controller import certificates, metrics, registration, workqueue
from controller.discover.metrics import ModelNodesCollector
from controller.discover.model_labels import ModelLabels
from controller.extender import service
from controller.garbage import stale_gc
from controller.recount import charge_ages, publisher, recounter
from controller.recount.grants import KEY as GRANTS, GrantFollower
from controller.recount.labels import NamespaceLabels
from controller.retry import claim_retrier, retrier
from controller.violations.violation_watcher import Evictor, ViolationWatcher
from vcuda import kube as k8s
from vcuda.allocations.stored_claims import ClaimCharge, StoredClaim
from vcuda.cli import ClusterOptions
from vcuda.kube.metrics import UnreadCollector
from vcuda.ledger.report import NamespaceUse
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.missing_models import model_warnings
from vcuda.quota.well_known import SYSTEM_NAMESPACES

OFFERS = "offers"
"""The queue of changed GPU models has this key if the resources that nodes offer have changed."""
SYNC_POLL_SECONDS = 0.1
SILENCE_SECONDS = 3.0
"""If a standby has not seen the leader renew the Lease for this many seconds, the standby recounts the ledgers."""
STANDBY_POLL_SECONDS = 0.5
STOP_TIMEOUT_SECONDS = 5.0  # When the leader stops, its loops get this many seconds to finish current writes.


Address = tuple[str, int]


class RunOptions(ClusterOptions, frozen=True, kw_only=True):
    """The values of the options of `vcuda-controller run`, which docs/reference.md explains."""

    identity: str | None
    lease_seconds: int
    resync_seconds: int
    allocation_timeout: int
    dry_run: bool
    discover: bool
    evict_violations: bool
    violations_period: int
    status_address: Address
    ui_address: Address | None
    ui_hosts: tuple[str, ...]
    ui_advertise: Address | None
    ui_docs_url: str
    ui_grafana_url: str
    extender_address: Address | None
    extender_cert_dir: Path | None
    extender_client_ca: Path | None
    extender_client_name: str
    extender_advertise: Address | None
    webhook_service: str


class Leader:
    """The watches and loops of a replica, which is first a standby and then perhaps the leader.

    A standby has all watches, so that it knows which objects were deleted before it leads. Its queues stay empty. If
    the leader stops renewing the Lease, the standby only recounts ledgers, which any process may do (docs/ledger.md).

    ``on_fault``: called if a loop fails, or if the extender cannot start.
    """

    def __init__(
        self,
        kube: k8s.Kube,
        options: RunOptions,
        registry: CollectorRegistry,
        *,
        on_fault: Callable[[], None],
        listening: service.Listening | None = None,
    ) -> None:
        self._kube = kube
        self._on_fault = on_fault
        self._threads: list[threading.Thread] = []
        self._timing = charge_ages.RecountTiming(
            options.storable_seconds, options.resync_seconds, options.max_terminating_seconds
        )
        self._stopping = threading.Event()
        self._leading = threading.Event()
        self._standby: threading.Thread | None = None
        self._log = structlog.get_logger()
        devices = self._watch_policy(options)
        self._keep_ledgers(options, registry)
        usages = self.recounter.teams.usages
        self.publisher = publisher.Publisher(kube, teams=usages)
        self.retrier = retrier.Retrier(kube, self.quota, self.nodes, teams=usages)
        self.claim_retrier = claim_retrier.ClaimRetrier(kube, lambda: self.dra.served, usages)
        self.grants = GrantFollower(self.quota, self.recounter.known_namespaces, self.recounter.queue.add)
        self.model_labels = ModelLabels(
            kube, self.nodes, devices, self.recounter.pods, self.quota, writes=options.discover
        )
        self.dra = k8s.ServedWatches(kube, {**devices.reflectors(), "resourceclaims": self.recounter.claims.reflector})
        self._remove_stale_allocations(options, registry)
        self._find_violations(options, registry)
        self._check_installation(options, registry)
        self.extender = self._extender(options, listening, registry) if listening else None
        found = self.model_labels
        registry.register(metrics.UsageCollector(self.publisher.reports, self.recounter.reservation_ages))
        registry.register(ModelNodesCollector(found.counts, found.cards, self.nodes.current, self.quota.current))
        registry.register(UnreadCollector(self.reflectors))

    def _watch_policy(self, options: RunOptions) -> k8s.DeviceInformer:
        """Watch the quota, the nodes, and the devices of DRA drivers. Return the informer of the devices."""
        own = {options.system_namespace, options.ledger_namespace, options.node_namespace}
        source = k8s.QuotaSource(*options.quota_configmap, options.quota_key)
        self.quota = k8s.QuotaInformer(self._kube, source, SYSTEM_NAMESPACES | own, self._quota_changed)
        # A pod that the webhook pinned to no GPU model is charged for the model of its node. So a change of a node may
        # change charges in any namespace. Hundreds of nodes may change together. A queue combines these changes.
        self._models = workqueue.Reconciler(
            "models",
            lambda of: self._models_changed() if of != OFFERS else self._offers_changed(),
            failure="the ledgers were not recounted after a change of GPU models",
            key_name="of",
        )
        labels, changed = NodeLabels(options.model_label, options.pool_label), self._models.queue.add
        self.nodes = k8s.NodeInformer(
            self._kube, labels, lambda: changed("nodes"), self.quota.resources, lambda: changed(OFFERS)
        )
        # When a DRA driver publishes other devices, the charges of ResourceClaims may change in every namespace.
        devices = k8s.DeviceInformer(self._kube, self._devices_changed)
        self.claim_policies = k8s.ClaimPolicies(self.quota, self.nodes, devices)
        return devices

    def _keep_ledgers(self, options: RunOptions, registry: CollectorRegistry) -> None:
        self._store = k8s.LedgerStore(
            self._kube,
            options.ledger_namespace,
            self.nodes.current,
            self.claim_policies.resources,
            claim_price=self.claim_policies.price,
            storable_seconds=self._timing.storable_seconds,
        )
        self.namespaces = NamespaceLabels(self._kube, self.quota, self._namespace_changed)
        self.recounter = recounter.Recounter(
            self._kube,
            self._store,
            self.quota,
            self.nodes,
            metrics=metrics.RecountMetrics(registry),
            on_report=self._report,
            further=self._reported_namespaces,
            exists=lambda namespace: self.namespaces.reflector.get(("", namespace)) is not None,
            timing=self._timing,
        )

    def _remove_stale_allocations(self, options: RunOptions, registry: CollectorRegistry) -> None:
        remove = stale_gc.report_only
        if not options.dry_run:
            remove = stale_gc.PatchRemover(self._kube, metrics.GarbageMetrics(registry)).remove
        pods, timeout = self.recounter.pods, options.allocation_timeout
        self.garbage = stale_gc.StaleAllocationGc(self._kube, pods, self.nodes, remove, timeout)

    def _find_violations(self, options: RunOptions, registry: CollectorRegistry) -> None:
        evictions = metrics.EvictionMetrics(registry)
        evictor = Evictor(self._kube, self._store, self.quota, self.nodes, evictions)
        self.violations = ViolationWatcher(
            self._kube,
            self.quota,
            self.nodes,
            self.recounter.pods.pods,
            claims=self.charged_claims,
            period=options.violations_period,
            evictor=evictor if options.evict_violations else None,
        )
        registry.register(metrics.ViolationsCollector(self.violations.counts))

    def _check_installation(self, options: RunOptions, registry: CollectorRegistry) -> None:
        namespace, checked = options.system_namespace, options.webhook_service
        self.certificates = certificates.CertificateWatch(self._kube, namespace, checked) if checked else None
        self.registration = registration.RegistrationWatch(
            self._kube, self.namespaces.is_evaluated, self.recounter.add_all
        )
        if self.certificates:
            registry.register(self.certificates)
            registry.register(self.registration)

    def _extender(
        self, options: RunOptions, listening: service.Listening, registry: CollectorRegistry
    ) -> service.Extender:
        return service.Extender(
            self._kube,
            options.system_namespace,
            listening,
            self.recounter.pods,
            self.nodes,
            unbound_seconds=options.allocation_timeout,
            max_terminating_seconds=self._timing.max_terminating_seconds,
            registry=registry,
            on_fault=self._on_fault,
        )

    def charged_claims(self, namespace: str) -> Iterable[tuple[StoredClaim, ClaimCharge]]:
        """Return the claims of a namespace with their charges, except claims whose pod is charged instead."""
        extended = self.recounter.pods.extended_claims(namespace, self.nodes.current())
        return self.recounter.claims.charges(namespace, extended)

    def reflectors(self) -> Mapping[str, k8s.Reflector[Any]]:
        return {**self._always(), **self.dra.running()}

    def _always(self) -> Mapping[str, k8s.Reflector[Any]]:
        return {
            "configmaps": self.quota.reflector,
            "nodes": self.nodes.reflector,
            "namespaces": self.namespaces.reflector,
            "pods": self.recounter.pods.reflector,
            "ledgers": self.recounter.ledgers,
            "teams": self.recounter.teams.ledgers,
            "usage": self.publisher.published,
        }

    @property
    def synced(self) -> bool:
        """True if each watch of a served API has received a consistent LIST since this process became the leader."""
        return self.dra.is_ready and all(reflector.synced.is_set() for reflector in self._always().values())

    @property
    def ready(self) -> bool:
        return self.synced and (self.extender is None or self.extender.serving or not self._leading.is_set())

    def watch(self, is_silent: Callable[[], bool] = lambda: False) -> None:
        """Start the watches, as a standby. While ``is_silent`` returns True, the leader does not renew its Lease."""
        for reconciler in self._reconcilers():
            reconciler.queue.hold()
        for reflector in self._always().values():
            reflector.start()
        self.dra.start()
        for reconciler in self.recounter.reconcilers:
            self._spawn(reconciler.name, reconciler.run)
        self._standby = self._spawn("standby", lambda: self._stand_by(is_silent))

    def lead(self) -> None:
        """Begin the work of the leader, as soon as every watch has received its first list."""
        self._leading.set()
        self._spawn("main", self._main)

    def stop(self) -> None:
        """End the watches and the loops. All loops together get `STOP_TIMEOUT_SECONDS` to finish current writes."""
        self._stopping.set()
        # The extender must not place pods by outdated data, so it is stopped before the watches.
        if self.extender:
            self.extender.stop()
        for reconciler in self._reconcilers():
            reconciler.stop()
        self.dra.stop()
        for reflector in self._always().values():
            reflector.stop()
        deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        for thread in tuple(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))

    def trouble(self) -> str | None:
        """Return a fault that a restart may repair, such as an ended watch or a stuck loop; None without a fault."""
        # Only the loop of `garbage` is checked, because it works at regular intervals. The other loops work only after
        # events, so an idle loop could not be distinguished from a stuck loop.
        if not all(reflector.alive for reflector in self.reflectors().values()):
            return "a watch of Kubernetes objects has ended"
        return "the loop that removes stale allocations is stuck" if self.garbage.is_stuck() else None

    def _stand_by(self, is_silent: Callable[[], bool]) -> None:
        acts = False
        while not self._leading.wait(STANDBY_POLL_SECONDS) and not self._stopping.is_set():
            if not self.synced:
                continue
            self.recounter.pods.list_again()
            if acts == is_silent():
                if not acts:
                    self.recounter.record_ages()
                continue
            acts = not acts
            if acts:
                self._log.warning("the leader does not renew the Lease, so this standby recounts the ledgers")
                for reconciler in self.recounter.reconcilers:
                    reconciler.queue.release()
                self.recounter.add_all()
            else:
                self._log.info("the leader renews the Lease again")
                for reconciler in self.recounter.reconcilers:
                    reconciler.queue.hold()

    def _main(self) -> None:
        if not self._await_lists():
            return
        for reconciler in self._reconcilers():
            reconciler.queue.release()
            if reconciler not in self.recounter.reconcilers:
                self._spawn(reconciler.name, reconciler.run)
        if watch := self.certificates:
            self._spawn("certificates", lambda: watch.run(self._stopping))
            self._spawn("registration", lambda: self.registration.run(self._stopping))
        if self.extender:
            self.extender.serve()
        self._quota_changed()
        self.garbage.add_all()
        while not self._stopping.wait(self._timing.resync_seconds):
            self.recounter.resync()

    def _await_lists(self) -> bool:
        """Wait until every watch has received its first list. Return False if this process stops before."""
        # If a ledger was recounted from an incomplete list, the charges of stored pods would be released.
        started = time.process_time()
        if self._standby:
            self._standby.join()
        while not self.synced:
            if self._stopping.wait(SYNC_POLL_SECONDS):
                return False
        self._log.info("every watch has received its first list", cpu_seconds=round(time.process_time() - started, 2))
        return True

    def _spawn(self, name: str, loop: Callable[[], None]) -> threading.Thread:
        thread = workqueue.spawn(name, loop, self._on_fault)
        self._threads.append(thread)
        return thread

    def _reconcilers(self) -> tuple[workqueue.Reconciler, ...]:
        duties = (
            self.recounter,
            self.publisher,
            self.namespaces,
            self.retrier,
            self.claim_retrier,
            self.garbage,
            self.model_labels,
        )
        first = (self._models, self.grants.reconciler, self.recounter.unlimited, self.violations.reconciler)
        return (*first, self.retrier.models, self.recounter.teams.reconciler, *(each.reconciler for each in duties))

    def _devices_changed(self) -> None:
        self._models.queue.add("devices")
        self.model_labels.devices_changed()

    def _models_changed(self) -> None:
        # A new DeviceClass may turn an extended resource into a GPU resource. So the pods must be listed again, because
        # this process does not keep pods without GPU resources.
        self.recounter.pods.list_again()
        self.recounter.add_all()
        self.retrier.models_changed(self.recounter.known_namespaces())

    def _offers_changed(self) -> None:
        # If the quota requires nodes, a pod is rejected until a node offers the pod's resources.
        quota = self.quota.current()
        names = {name: quota.for_namespace(name) for name in self.recounter.known_namespaces()} if quota else {}
        self.retrier.models_changed([name for name, limits in names.items() if limits and limits.require_nodes])

    def _quota_changed(self) -> None:
        self._models_changed()
        self.namespaces.add_all()
        self.grants.reconciler.queue.add(GRANTS)
        self.model_labels.add_all()

    def _reported_namespaces(self) -> Iterable[str]:
        """Return the namespaces with a quota (possibly from the entry ``"*"`` for all) or a published usage report."""
        quota = self.quota.current()
        names = (key.name for key in self.namespaces.reflector.snapshot())
        return self.publisher.published_in() | {name for name in names if quota and quota.for_namespace(name)}

    def _namespace_changed(self, namespace: str) -> None:
        # A new namespace needs a usage report. The report of a deleted namespace is deleted. If a label of a namespace
        # has changed, its report may change.
        self.recounter.queue.add(namespace)
        self.publisher.reconciler.queue.add(namespace)

    def _report(self, namespace: str, use: NamespaceUse | None) -> None:
        if not self._leading.is_set():
            return  # The next leader reports what a standby has recounted.
        if use and self.namespaces.is_taking_effect(namespace):
            use = replace(use, taking_effect=True)
        if use:
            limited = [each.model for each in use.models]
            warnings = model_warnings(limited, self.nodes.current().models)
            use = replace(use, warnings=(*use.warnings, *warnings), unregistered=self.registration.text)
        self.publisher.report(namespace, use)
        self.retrier.report(namespace, use)
        self.claim_retrier.report(namespace, use)
        self.violations.report(namespace, use)
