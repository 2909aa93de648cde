"""Serves the usage page of one controller replica. The page shows data only while this replica is the leader."""

import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from controller import httpd, manager, seen_events, workqueue
from controller.advertiser import Advertiser
from controller.ui import app, document
from controller.ui.document import Documents, Holder
from controller.ui.events import ReportedEvents
from controller.violations.violation_watcher import kind_of
from vcuda.allocations.stored_claims import ClaimCharge, StoredClaim
from vcuda.allocations.stored_pods import StoredPod, charges_of
from vcuda.claims.devices import NO_DEVICES, Devices
from vcuda.kube import Kube
from vcuda.ledger.report import NamespaceUse
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import CORES_PER_CARD, Charge, Limit, Mode, NamespaceQuota

SERVICE = "vcuda-page"
"""The Service through which a proxy reaches the usage page of the leader."""

THREADS = 64
MAX_FOUND = 50
"""The most pods and claims beyond the quota on the page."""


class UsagePage:
    """Serves the usage page of this replica.

    ``holder``: returns the identity of the last known leader, or an empty text.
    ``hosts``: the host names of the page, in addition to localhost and IP addresses.
    """

    def __init__(self, holder: Callable[[], str], hosts: Collection[str] = ()) -> None:
        self._holder = holder
        self._hosts = hosts
        self._shown: tuple[Documents, Callable[[], bool]] | None = None

    def serve(self, address: tuple[str, int]) -> httpd.Server:
        """Serve the page at ``address`` in threads. Raises OSError if the server cannot listen at this host and port.

        Each connection serves one request. So after a change of the leader, the next request can reach the new leader.
        """
        return httpd.Server(address, app.create_app(self.standing, self._hosts), threads=THREADS).in_threads()

    @contextmanager
    def showing(self, documents: Documents, ready: Callable[[], bool]) -> Iterator[None]:
        """In the ``with`` block, show ``documents`` while ``ready`` returns True. The caller must be the leader."""
        self._shown = documents, ready
        try:
            yield
        finally:
            self._shown = None

    def standing(self) -> app.Standing:
        """Return the data of the usage page, or the reason why this replica has no data to show."""
        shown = self._shown
        if shown is None:
            leader = f"The leader is {holder}." if (holder := self._holder()) else "There is no leader at the moment."
            return f"This replica of the controller is a standby. {leader}"
        documents, ready = shown
        if not ready():
            return "This replica of the controller has just become the leader, and is still reading the cluster."
        return documents


@contextmanager
def advertising(kube: Kube, namespace: str, address: tuple[str, int]) -> Iterator[None]:
    """In the ``with`` block, keep this IP address and port in the EndpointSlice of Service `SERVICE`."""
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


class LeaderSource:
    """Collects the data of the usage page from the leader's watches. ``docs``, ``grafana``: the URLs to link to."""

    def __init__(self, kube: Kube, leader: manager.Leader, docs: str = "", grafana: str = "") -> None:
        self._leader = leader
        self._links = docs, grafana
        self._events = ReportedEvents(kube)

    def documents(self) -> Documents:
        return Documents(self._read, self._holders)

    def _read(self) -> document.Document:
        uses, reported = self._leader.publisher.reports(), self._events.current()
        watch = self._leader.certificates
        return document.Document(
            [without_pods(use) for _, use in sorted(uses.items())],
            self._models(uses),
            reported.rejections,
            reported.removals,
            watch.shown() if watch else None,
            self._beyond(),
            *self._links,
        )

    def _holders(self, namespace: str) -> Sequence[Holder]:
        quota = self._leader.quota.current()
        limits = quota.for_namespace(namespace) if quota else None
        pods, claims = self._leader.recounter.pods.pods(namespace), self._leader.charged_claims(namespace)
        policy = self._leader.claim_policies.current()
        devices = policy.devices if policy else NO_DEVICES
        return [*pod_rows(pods, limits, self._leader.nodes.current()), *claim_rows(claims, limits, devices)]

    def _models(self, uses: Mapping[str, NamespaceUse]) -> Sequence[document.ModelCards]:
        pods, claims, nodes = self._leader.recounter.pods, self._leader.recounter.claims, self._leader.nodes.current()
        free = {*pods.namespaces(), *claims.namespaces()} - {name for name, use in uses.items() if _is_enforced(use)}
        taken = [
            each for name in free for each in placed_charges(pods.pods(name), self._leader.charged_claims(name), nodes)
        ]
        return cluster_cards(self._leader.model_labels.cards(), uses, taken)

    def _beyond(self) -> Sequence[seen_events.ReportedObject]:
        found = [(each.violation, each.at) for each in self._leader.violations.ongoing()[:MAX_FOUND]]
        return [
            seen_events.ReportedObject(each.stored.namespace, kind_of(each.stored), each.stored.name, each.message, at)
            for each, at in found
        ]


def without_pods(use: NamespaceUse) -> NamespaceUse:
    """Return a usage report without its pods. The page requests the pods of one namespace at a time."""
    models = tuple(replace(each, pods=(), more_pods=0) for each in use.models)
    return replace(use, models=models, unpinned=(), more_unpinned=len(use.unpinned))


def pod_rows(pods: Iterable[StoredPod], quota: NamespaceQuota | None, nodes: Nodes) -> Iterator[Holder]:
    """Yield a table row for each pod that has not ended, with its charge under the limits of its namespace."""
    for pod in (pod for pod in pods if pod.live):
        model = pod.model_on(nodes)
        yield Holder("pod", pod.name, model, *_charged(pod.charge_on(nodes), model, quota), pod.node, pod.created)


def claim_rows(
    claims: Iterable[tuple[StoredClaim, ClaimCharge]], quota: NamespaceQuota | None, devices: Devices
) -> Iterator[Holder]:
    """Yield a table row for each claim and GPU model. The row names the node of the claim's first device."""
    for claim, taken in claims:
        found = filter(None, map(devices.find, claim.allocated))
        node = next((node for _, node in found), "")
        uncounted: dict[str | None, Charge] = {None: Charge()} if taken.uncounted else {}
        for model, charge in (uncounted or taken.charges).items():
            yield Holder("claim", claim.name, model, *_charged(charge, model, quota), node, claim.created)


def _charged(charge: Charge, model: str | None, quota: NamespaceQuota | None) -> tuple[float, int]:
    """Return the cards and the MiB of a charge under the limit of its model."""
    limit = (quota.limits if quota else {}).get(model or "", Limit(0))
    return math.ceil(charge.cores) / CORES_PER_CARD, charge.memory_under(limit)


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
    cards: Mapping[str, float | None], uses: Mapping[str, NamespaceUse], free: Iterable[tuple[str, Charge]]
) -> Sequence[document.ModelCards]:
    """Return one entry for each GPU model that a node has, a limit names, or a pod or claim uses.

    ``cards``: the cards of each model on all nodes. ``uses``: the usage report of each limited namespace. The report
    includes admitted pods that are not stored yet.
    ``free``: pairs of a GPU model and a charge, from the placed pods and claims of all namespaces whose quota is not
    enforced. In these namespaces, anybody can create more pods than the cluster has cards for. These are never placed.
    """
    used: dict[str, float] = dict.fromkeys(cards, 0.0)
    limits: dict[str, float] = {}
    # The namespaces of a team share its limits, so these count once.
    limited = {use.team.name if use.team else (use.namespace,): use.team or use for use in uses.values()}
    for model in (model for use in (*uses.values(), *limited.values()) for model in use.models):
        used.setdefault(model.model, 0.0)
    for within, model in ((each, model) for each in limited.values() for model in each.models):
        limit = (model.memory_limit or 0) / model.card_memory if model.limit is None else model.limit
        most = limit if within.total is None else min(limit, within.total.limit or 0)
        limits[model.model] = limits.get(model.model, 0.0) + most
    for model in (model for use in filter(_is_enforced, uses.values()) for model in use.models):
        used[model.model] += model.used
    for name, charge in free:
        used[name] = used.get(name, 0.0) + charge.cores / CORES_PER_CARD
    return [
        document.ModelCards(name, cards.get(name), rounded(used[name]), rounded(limits.get(name, 0.0)))
        for name in sorted(used, key=lambda name: (name.casefold(), name))
    ]


def rounded(cards: float) -> float:
    """Return a sum of numbers of cards, rounded up to hundredths of a card."""
    # Subtract rounding errors first: the sum of three times 0.1 is 0.30000000000000004.
    return math.ceil(cards * CORES_PER_CARD - 1e-6) / CORES_PER_CARD
