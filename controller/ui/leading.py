"""Serves the usage page of one controller replica. The page shows data only while this replica is the leader."""

import itertools
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import flask
import msgspec

from controller import certificates, httpd, manager, refusals, workqueue
from controller.advertiser import Advertiser
from controller.garbage import stale_gc
from controller.ui import app, events, feed, page, snapshot
from controller.ui.model import HolderRow, read_node, rounded, total_cards
from controller.violations.violation_watcher import kind_of
from vcuda.allocations.stored_claims import ClaimCharge, StoredClaim
from vcuda.allocations.stored_pods import StoredPod, charges_of
from vcuda.claims.devices import NO_DEVICES, Devices
from vcuda.kube import Kube, Reflector
from vcuda.ledger.report import NamespaceUse
from vcuda.placement import affinity
from vcuda.placement.free_cards import FreeCardsByPool, free_by_model
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import CORES_PER_CARD, Charge, Limit, Mode, NamespaceQuota

SERVICE = "vcuda-page"
"""The Service through which a proxy reaches the usage page of the leader."""


class UsagePage:
    """Serves the usage page of this replica.

    ``holder``: returns the identity of the last known leader, or an empty text.
    ``hosts``: the host names of the page, in addition to localhost and IP addresses.
    ``links``: the addresses of the documentation and the dashboard to link to.
    """

    def __init__(self, holder: Callable[[], str], hosts: Collection[str] = (), links: page.Links | None = None) -> None:
        self._holder = holder
        self._hosts = hosts
        self._views = page.Views(links=links)
        self._feed: feed.Feed | None = None
        self._ready: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()

    def serve(self, address: tuple[str, int]) -> httpd.Server:
        """Serve the page at ``address``. Raises OSError if the server cannot listen at this host and port."""
        return serve(address, app.create_app(self.standing, self._views, self._hosts))

    def show(self, source: snapshot.Source, ready: Callable[[], bool]) -> None:
        """Show the data of ``source`` on the page as soon as ``ready`` returns True. The caller must be the leader."""
        with self._lock:
            # A new leader has a new `Feed` (list of changes). A browser that used an earlier list reloads the page.
            self._ready = ready
            self._feed = feed.Feed(source, self._views)
            self._feed.start()

    def close(self) -> None:
        with self._lock:
            shown, self._feed = self._feed, None
        if shown:
            shown.close()

    def standing(self) -> app.Standing:
        """Return the `Feed` with the usage page's data, or the reason why this replica has no data to show."""
        with self._lock:
            shown, ready = self._feed, self._ready
        if shown is None:
            leader = f"The leader is {holder}." if (holder := self._holder()) else "There is no leader at the moment."
            return f"This replica of the controller is a standby. {leader}"
        if not ready():
            return "This replica of the controller has just become the leader, and is still reading the cluster."
        return shown


def serve(address: tuple[str, int], application: flask.Flask) -> httpd.Server:
    """Serve the usage page in threads. Raises OSError if the server cannot listen at the address.

    Each connection serves one request. So after a change of the leader, the next request can reach the new leader.
    """
    # Each browser that listens for changes occupies a thread. Half as many threads are added for other requests.
    return httpd.Server(address, application, threads=feed.MAX_LISTENERS * 3 // 2).in_threads()


@contextmanager
def advertising(kube: Kube, namespace: str, address: tuple[str, int]) -> Iterator[None]:
    """In the ``with`` block, Service `SERVICE` routes its connections to this IP address and port."""
    stopping = threading.Event()
    advertiser = Advertiser(kube, namespace, SERVICE, address, "http")
    # If the loop that writes the EndpointSlice fails, only the usage page is unreachable. So `on_fault` does nothing.
    loop = workqueue.spawn("page endpointslice", lambda: advertiser.run(stopping), on_fault=lambda: None)
    try:
        yield
    finally:
        stopping.set()
        # Wait for the loop to end, so that it does not overwrite the next leader's address in the EndpointSlice.
        loop.join(manager.STOP_TIMEOUT_SECONDS)


@contextmanager
def showing(shown: UsagePage, kube: Kube, labels: affinity.NodeLabels, leader: manager.Leader) -> Iterator[None]:
    """In the ``with`` block, show the leader's data on the usage page, and run the page's own watches."""
    source = LeaderSource(kube, labels, leader)
    for reflector in source.reflectors:
        reflector.start()
    shown.show(source.source(), lambda: leader.synced)
    try:
        yield
    finally:
        shown.close()
        for reflector in source.reflectors:
            reflector.stop()


class LeaderSource:
    """Collects the data of the usage page from the leader, and runs the page's own watches."""

    def __init__(self, kube: Kube, labels: affinity.NodeLabels, leader: manager.Leader) -> None:
        self._leader = leader
        reasons = (refusals.REASON, refusals.CLAIM_REASON)
        self._refusals = [events.EventInformer(kube, reason, refusals.read_refusal) for reason in reasons]
        # Removals of stale GPU allocations are read from Events, so that removals by earlier leaders are shown too.
        self._removals = events.EventInformer(kube, stale_gc.REASON, events.read_removal)
        self._nodes = Reflector(kube, "/api/v1/nodes", lambda raw: read_node(raw, labels.model))
        # The page does not wait for the first LISTs of these watches. If a LIST fails, for example for lack of a
        # permission, the page omits the part that needs it.
        self.reflectors: Sequence[Reflector[Any]] = [
            *(each.reflector for each in self._refusals),
            self._removals.reflector,
            self._nodes,
        ]

    def source(self) -> snapshot.Source:
        return snapshot.Source(
            uses=self._leader.publisher.reports,
            pods=self._pods,
            cluster=self._cluster,
            refusals=self._refused,
            removals=self._removals.newest,
            certificates=self._certificates,
            findings=self._found,
        )

    def _pods(self, namespace: str) -> Sequence[HolderRow]:
        quota = self._leader.quota.current()
        limits = quota.for_namespace(namespace) if quota else None
        pods, claims = self._leader.settler.pods.pods(namespace), self._leader.charged_claims(namespace)
        policy = self._leader.claim_policies.current()
        devices = policy.devices if policy else NO_DEVICES
        return [*holder_rows(pods, limits, self._leader.nodes.current()), *claim_rows(claims, limits, devices)]

    def _cluster(self) -> Sequence[snapshot.ModelCards]:
        uses, pods = self._leader.publisher.reports(), self._leader.settler.pods
        nodes, claims = self._leader.nodes.current(), self._leader.settler.claims
        others = {*pods.namespaces(), *claims.namespaces()} - {name for name, use in uses.items() if _is_enforced(use)}
        taken = [
            each
            for name in others
            for each in placed_charges(pods.pods(name), self._leader.charged_claims(name), nodes)
        ]
        models = cluster_cards(total_cards(self._nodes.snapshot().values(), nodes.named), uses, taken)
        # Only the scheduler extender records which pod uses which card. Without the extender, the free parts of shared
        # cards are unknown.
        extender = self._leader.extender
        fragments = fragmented(extender.free_cards()) if extender else {}
        return [msgspec.structs.replace(model, fragmented=fragments.get(model.model)) for model in models]

    def _found(self) -> Sequence[refusals.ReportedObject]:
        found = [(each.violation, each.at) for each in self._leader.violations.ongoing()]
        return [
            refusals.ReportedObject(each.holder.namespace, kind_of(each.holder), each.holder.name, each.message, at)
            for each, at in found
        ]

    def _certificates(self) -> Sequence[snapshot.Certificate] | None:
        shown = self._leader.certificates.shown() if self._leader.certificates else None
        return None if shown is None else [certificate_row(one) for one in shown]

    def _refused(self) -> Sequence[refusals.ReportedObject] | None:
        known = [newest for each in self._refusals if (newest := each.newest()) is not None]
        if len(known) < len(self._refusals):
            return None
        newest_first = sorted(itertools.chain(*known), key=lambda refusal: refusal.at, reverse=True)
        return refusals.merge_by_workload(newest_first)


def fragmented(free_cards: FreeCardsByPool) -> Mapping[str, float]:
    """Return for each GPU model the sum of the free parts of partly used cards, as a number of cards."""
    return {model: free.fragmented_cores / CORES_PER_CARD for model, free in free_by_model(free_cards, ()).items()}


def certificate_row(shown: certificates.ServedCertificate) -> snapshot.Certificate:
    end = f"{shown.end:%Y-%m-%dT%H:%M:%SZ}" if shown.end else ""
    return snapshot.Certificate(f"webhook at {shown.address}", end, shown.fault)


def holder_rows(pods: Iterable[StoredPod], quota: NamespaceQuota | None, nodes: Nodes) -> Sequence[HolderRow]:
    """Return a table row for each pod that has not ended, with its charge under the limits of its namespace."""
    limits = quota.limits if quota else {}
    rows = []
    for pod in (pod for pod in pods if pod.live):
        model = pod.model_on(nodes)
        charge = pod.charge_on(nodes)
        memory = charge.memory_under(limits.get(model or "", Limit(0)))
        rows.append(HolderRow(pod.name, model, math.ceil(charge.cores), memory, pod.node, pod.created))
    return rows


def claim_rows(
    claims: Iterable[tuple[StoredClaim, ClaimCharge]], quota: NamespaceQuota | None, devices: Devices
) -> Iterator[HolderRow]:
    """Yield a table row for each claim and GPU model. The row shows the node of the claim's first device."""
    limits = quota.limits if quota else {}
    for claim, taken in claims:
        found = filter(None, map(devices.find, claim.allocated))
        node = next((node for _, node in found), "")
        uncounted: dict[str | None, Charge] = {None: Charge()} if taken.uncounted else {}
        for model, charge in (uncounted or taken.charges).items():
            memory = charge.memory_under(limits.get(model or "", Limit(0)))
            yield HolderRow(claim.name, model, math.ceil(charge.cores), memory, node, claim.created, claim=True)


def placed_charges(
    pods: Iterable[StoredPod], claims: Iterable[tuple[StoredClaim, ClaimCharge]], nodes: Nodes
) -> Iterator[tuple[str, Charge]]:
    """Yield the GPU model and the charge of each pod that is bound to a node, and of each claim that has devices."""
    yield from charges_of((pod for pod in pods if pod.node in nodes.labels), nodes)
    for claim, found in claims:
        if claim.allocated:
            yield from found.charges.items()


def _is_enforced(use: NamespaceUse) -> bool:
    return use.mode == Mode.ENFORCE


def cluster_cards(
    cards: Mapping[str, float | None], uses: Mapping[str, NamespaceUse], others: Iterable[tuple[str, Charge]]
) -> Sequence[snapshot.ModelCards]:
    """Return one entry for each GPU model that a node has, a limit names, or a pod or claim uses.

    ``cards``: the cards of each model on all nodes. ``uses``: the usage report of each limited namespace. The report
    includes admitted pods that are not stored yet.
    ``others``: pairs of a GPU model and a charge, from the placed pods and claims of all namespaces whose quota is not
    enforced. There, anybody can create pods for more cards than the cluster has. Such pods are never placed.
    """
    used: dict[str, float] = dict.fromkeys(cards, 0.0)
    promised: dict[str, float] = {}
    for model in (model for use in uses.values() for model in use.models):
        used.setdefault(model.model, 0.0)
        cards_of_limit = (model.memory_limit or 0) / model.card_memory if model.limit is None else model.limit
        promised[model.model] = promised.get(model.model, 0.0) + cards_of_limit
    for model in (model for use in filter(_is_enforced, uses.values()) for model in use.models):
        used[model.model] += model.used
    for name, charge in others:
        used[name] = used.get(name, 0.0) + charge.cores / CORES_PER_CARD
    return [
        snapshot.ModelCards(name, cards.get(name), rounded([used[name]]), rounded([promised.get(name, 0.0)]))
        for name in sorted(used, key=lambda name: (name.casefold(), name))
    ]
