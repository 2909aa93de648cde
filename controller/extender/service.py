"""The extender of the leading controller, put together: it listens once its view of the cluster is whole."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog
from prometheus_client import CollectorRegistry

from controller.extender.advertiser import Advertiser
from controller.extender.allocator import Allocator, Binder, Placer
from controller.extender.application import MAX_BODY, create_application, verbs_of
from controller.extender.cache import AssumedPlacement, CardCache
from controller.extender.journal import Journal
from controller.extender.metrics import CardsCollector, ExtenderMetrics
from controller.extender.publish import CardsPublisher, figures_of
from controller.httpd import Server
from controller.pods import PodInformer
from controller.workqueue import spawn
from vcuda.errors import Unavailable, UnreadableJournal, VcudaError
from vcuda.kube import Kube, NodeInformer
from vcuda.placement.placement import FreeCardsByPool
from vcuda.tls import ServingCertificate, watch

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

TRIES = 3
LOOK = 15.0
"""Seconds between two looks for pods that were promised shares and are not shown."""


class Listening(msgspec.Struct, frozen=True):
    """Where to listen, with which certificate, and the address (IP and port) that others reach it at, if any."""

    address: tuple[str, int]
    certificate: ServingCertificate
    advertised: tuple[str, int] | None = None

    @classmethod
    def on(cls, address: tuple[str, int], certificate: Path, advertised: tuple[str, int] | None) -> Listening:
        """Return it with the pair in a directory; raises BadInput where there is no good one."""
        return cls(address, ServingCertificate(certificate), advertised)


def serve(listening: Listening, application: WSGIApplication) -> Server:
    """Serve the extender. Raises OSError where the address cannot be had."""
    server = Server(
        listening.address,
        application,
        threads=32,  # the scheduler asks about one pod at a time, and binds several beside that
        tls=listening.certificate.current,
        idle_seconds=300.0,  # Go's client drops a connection that was idle for 90
        max_body=MAX_BODY,
    )
    server.start()
    return server


class Extender:
    """What the leader serves to kube-scheduler.

    ``take`` comes before the watches start, ``serve`` when everything has been listed. Only the leader listens, and it
    writes its address in the EndpointSlice of Service ``vcuda-extender``, which has no selector. So the Service leads
    to the leader, and the others are ready all the same: a rollout need not wait for them to lead.

    ``on_fault`` is called when this process may not lead any longer, or cannot, and when a loop of it has ended.
    """

    def __init__(
        self,
        kube: Kube,
        system_namespace: str,
        listening: Listening,
        pods: PodInformer,
        nodes: NodeInformer,
        *,
        registry: CollectorRegistry,
        on_fault: Callable[[], None],
    ) -> None:
        self._kube = kube
        self._namespace = system_namespace
        self._listening = listening
        self._nodes = nodes
        self._book = CardCache()
        self._journal = Journal(kube, system_namespace, uuid.uuid4().hex)
        self._metrics = ExtenderMetrics(registry)
        desk = Allocator(kube, self._book, self._journal, on_fault)
        self._placer, self._binder = Placer(desk, self._metrics), Binder(desk, self._metrics)
        self._server: Server | None = None
        self._stopping = threading.Event()
        self._taken = False
        self._on_fault = on_fault
        self._log = structlog.get_logger()
        pods.follow(self._book.pod_changed)
        nodes.follow(self._book.node_changed)
        registry.register(CardsCollector(self.figures))

    @property
    def serving(self) -> bool:
        """Whether the scheduler is answered, or never will be for a reason that was logged."""
        return self._server is not None or not self._taken

    @property
    def publishes(self) -> bool:
        """Whether it keeps up the published figures of free cards."""
        return self._server is not None

    def figures(self) -> FreeCardsByPool:
        """Return how much of the cards is free, by model and pool."""
        return figures_of(self._book.cards(), self._nodes.current())

    def take(self) -> None:
        """Take the journal over, before the pods are listed. Where that cannot be done, that is a fault.

        A damaged journal ends the extender alone: pods wait, and all else that the leader does goes on.
        """
        try:
            promises = self._try_to_take()
        except UnreadableJournal as error:
            self._log.error("no extender: the journal of placements is damaged", error=str(error))
            return
        except VcudaError as error:
            self._log.error("the journal of placements cannot be taken", error=str(error))
            self._on_fault()
            return
        for promise in promises:
            self._book.promise(promise)
        self._taken = True

    def serve(self) -> None:
        """Listen, and lead the Service here; returns at once. Raises OSError where the address cannot be had."""
        if not self._taken:
            return
        for _ in range(2):  # all that has been listed is shown: what is not now may be gone
            self._placer.look_for_the_gone()
        self._spawn("promises", self._look)
        listening = self._listening
        self._server = serve(listening, create_application(verbs_of(self._placer, self._binder), self._metrics))
        self._log.info("serving extender", port=self._server.port)
        self._spawn("certificate", lambda: watch(listening.certificate, self._stopping))
        publisher = CardsPublisher(self._kube, self._namespace, self.figures)
        self._spawn("cards", lambda: publisher.run(self._stopping))
        if listening.advertised:
            advertiser = Advertiser(self._kube, self._namespace, *listening.advertised)
            self._spawn("endpointslice", lambda: advertiser.run(self._stopping))

    def stop(self) -> None:
        """Answer no more."""
        self._stopping.set()
        if self._server is not None:
            self._server.stop()

    def _look(self) -> None:
        while not self._stopping.wait(LOOK):
            self._placer.look_for_the_gone()

    def _try_to_take(self) -> tuple[AssumedPlacement, ...]:
        for _ in range(TRIES - 1):
            try:
                return self._journal.take()
            except Unavailable as error:
                self._log.warning("journal of placements not taken yet", error=str(error))
        return self._journal.take()

    def _spawn(self, name: str, loop: Callable[[], None]) -> None:
        spawn(name, loop, self._on_fault)
