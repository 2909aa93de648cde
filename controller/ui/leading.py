"""The usage page of one replica: it stands by, and shows the leader's figures once it is the leader."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from controller import stale_gc
from controller.certificates import ServedCertificate
from controller.httpd import Server
from controller.manager import Leader
from controller.ui.app import Standing, create_app
from controller.ui.events import EventInformer, merge_by_workload, read_refusal, read_removal
from controller.ui.feed import MAX_LISTENERS, Feed
from controller.ui.model import CapacityInformer, PodRow, rounded
from controller.ui.page import Views
from controller.ui.snapshot import Certificate, ModelCards, PodFinding, RefusedWorkload, Source
from vcuda.allocations.stored_pods import StoredPod, charges_of
from vcuda.kube import Kube, Reflector
from vcuda.ledger.ledger import NamespaceUse
from vcuda.placement.affinity import NodeLabels
from vcuda.placement.placement import FreeCardsByPool, Nodes, free_by_model
from vcuda.quota.model import CORES_PER_CARD, Limit, NamespaceQuota

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication


class UsagePage:
    """Serves the page. ``holder`` names who leads, as far as this replica has seen; it may be empty."""

    def __init__(self, holder: Callable[[], str]) -> None:
        self._holder = holder
        self._views = Views()
        self._feed: Feed | None = None
        self._ready: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()

    def serve(self, address: tuple[str, int]) -> Server:
        """Serve on HOST:PORT. Raises OSError where it cannot be had."""
        return serve(address, create_app(self.standing, self._views))

    def show(self, source: Source, ready: Callable[[], bool]) -> None:
        """Show this source from now on, as soon as it is ``ready``."""
        with self._lock:
            # A feed for each time of leading: after another leader's, browsers have to load the page again.
            self._ready = ready
            self._feed = Feed(source, self._views)
            self._feed.start()

    def close(self) -> None:
        """Show nothing any more, and end every listener's stream."""
        with self._lock:
            feed, self._feed = self._feed, None
        if feed:
            feed.close()

    def standing(self) -> Standing:
        """Return the feed of a leader that has seen everything, else why there is none."""
        with self._lock:
            feed, ready = self._feed, self._ready
        if feed is None:
            leads = f": {holder} leads." if (holder := self._holder()) else ", and nobody leads at the moment."
            return Standing(None, f"This controller stands by{leads}")
        if not ready():
            return Standing(None, "This controller leads since a moment ago, and is reading the cluster.")
        return Standing(feed, "")


def serve(address: tuple[str, int], application: WSGIApplication) -> Server:
    """Serve the page, one request a connection: behind a Service the next one may reach another replica.

    Raises OSError where the address cannot be had.
    """
    # Listeners stay, and each holds a thread: half as many again are left for those who only look.
    return Server(address, application, threads=MAX_LISTENERS + MAX_LISTENERS // 2).in_threads()


@contextmanager
def showing(page: UsagePage, kube: Kube, labels: NodeLabels, leader: Leader) -> Iterator[None]:
    """Show the leader on the page, and follow what only the page shows; at the end the page stands by again."""
    source = LeaderSource(kube, labels, leader)
    for reflector in source.reflectors:
        reflector.start()
    page.show(source.source(), lambda: leader.synced)
    try:
        yield
    finally:
        page.close()
        for reflector in source.reflectors:
            reflector.stop()


class LeaderSource:
    """The leader's figures, and what only the page wants to know of the cluster."""

    def __init__(self, kube: Kube, labels: NodeLabels, leader: Leader) -> None:
        self._leader = leader
        self._refusals = EventInformer(kube, "FailedCreate", read_refusal)
        # Those of leaders before this one too: the cluster remembers them, this process need not.
        self._removals = EventInformer(kube, stale_gc.REASON, read_removal)
        self._capacity = CapacityInformer(kube, labels)
        # Nobody's readiness waits for these: without a right that they lack the page says less, and the leader does
        # all of its work.
        self.reflectors: Sequence[Reflector[Any]] = (
            self._refusals.reflector,
            self._removals.reflector,
            self._capacity.reflector,
        )

    def source(self) -> Source:
        """Return it as the page's source."""
        return Source(
            uses=self._leader.publisher.reports,
            pods=self._pods,
            cluster=self._cluster,
            refusals=self._refused,
            removals=self._removals.newest,
            certificates=self._certificates,
            findings=self._found,
        )

    def _pods(self, namespace: str) -> Sequence[PodRow]:
        quota = self._leader.quota.current()
        limits = quota.for_namespace(namespace) if quota else None
        return pod_rows(self._leader.settler.pods.pods(namespace), limits, self._leader.nodes.current())

    def _cluster(self) -> Sequence[ModelCards]:
        uses, pods = self._leader.publisher.reports(), self._leader.settler.pods
        # A report has what is pending too, so limited namespaces are counted by theirs and not by their pods.
        unlimited = (pod for namespace in pods.namespaces() if namespace not in uses for pod in pods.pods(namespace))
        models = cluster_cards(self._capacity.totals(), uses, unlimited, self._leader.nodes.current())
        # Only the extender knows which card a share is on; without one nobody can tell what is in fragments.
        extender = self._leader.extender
        fragments = fragmented(extender.free_cards()) if extender else {}
        return [msgspec.structs.replace(model, fragmented=fragments.get(model.model)) for model in models]

    def _found(self) -> Sequence[PodFinding]:
        found = [(each.violation, each.at) for each in self._leader.violations.ongoing()]
        return [PodFinding(one.pod.namespace, one.pod.name, one.message, at) for one, at in found]

    def _certificates(self) -> Sequence[Certificate] | None:
        watch = self._leader.certificates
        shown = watch.shown() if watch else None
        return None if shown is None else [certificate_row(one) for one in shown]

    def _refused(self) -> Sequence[RefusedWorkload] | None:
        refusals = self._refusals.newest()
        return None if refusals is None else merge_by_workload(refusals)


def fragmented(free_cards: FreeCardsByPool) -> Mapping[str, float]:
    """Return the cards of each model that are free only as shares of cards in use."""
    return {model: free.fragmented_cores / CORES_PER_CARD for model, free in free_by_model(free_cards, ()).items()}


def certificate_row(shown: ServedCertificate) -> Certificate:
    """Return what an endpoint of the webhook shows."""
    end = f"{shown.end:%Y-%m-%dT%H:%M:%SZ}" if shown.end else ""
    return Certificate(f"webhook at {shown.address}", end, shown.fault)


def pod_rows(pods: Iterable[StoredPod], quota: NamespaceQuota | None, nodes: Nodes) -> Sequence[PodRow]:
    """Return the pods that hold cards, each with what it is charged under its namespace's limits."""
    limits = quota.limits if quota else {}
    rows = []
    for pod in pods:
        if pod.live:
            model = pod.model_on(nodes)
            memory = pod.charge.memory_under(limits.get(model or "", Limit(0)))
            rows.append(PodRow(pod.name, model, pod.charge.cores, memory, pod.node, pod.created))
    return rows


def cluster_cards(
    cards: Mapping[str, float | None],
    uses: Mapping[str, NamespaceUse],
    unlimited: Iterable[StoredPod],
    nodes: Nodes,
) -> Sequence[ModelCards]:
    """Return each model in the whole cluster: every one that a node has, a limit names, or a pod holds.

    ``unlimited`` are the pods of namespaces that have no report; those that have one say what they use themselves.
    """
    used: dict[str, float] = {}
    promised: dict[str, float] = {}
    for use in uses.values():
        for model in use.models:
            used[model.model] = used.get(model.model, 0.0) + model.used
            promised[model.model] = promised.get(model.model, 0.0) + model.limit
    for name, charge in charges_of(unlimited, nodes):
        used[name] = used.get(name, 0.0) + charge.cores / CORES_PER_CARD
    return [
        ModelCards(name, cards.get(name), rounded([used.get(name, 0.0)]), rounded([promised.get(name, 0.0)]))
        for name in sorted({*cards, *used, *promised}, key=lambda name: (name.casefold(), name))
    ]
