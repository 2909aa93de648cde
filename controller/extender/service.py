"""The extender of the leading controller, put together: it listens once all pods and nodes have been listed."""

import io
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from http import HTTPStatus
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import msgspec
import structlog
from prometheus_client import CollectorRegistry

from controller import httpd, workqueue
from controller.extender import cache, journal, protocol, publish
from controller.extender.allocator import Allocator
from controller.pods import PodInformer
from vcuda import __version__, errors, k8s_types, tls
from vcuda.kube import Kube, NodeInformer
from vcuda.placement.free_cards import FreeCardsByPool

MAX_ATTEMPTS = 3
TIDY_SECONDS = 15.0
"""Between two looks for placements that count no more, and for nodes without a journal."""

NOT_TIDIED = "placements not looked through"

MAX_BODY = 128 * 2**20
"""Bytes of a request: some 8,000 nodes, where the scheduler sends them whole."""

LARGE_BODY = 2**20
"""Bytes from which on a body is read only when no other such is; by their names nodes take far less."""

ANSWER_PART = 8 * 2**20

Verb = Callable[[bytes], bytes]
"""Answers the body of one kind of request; raises BadInput where it is none."""


def verbs_of(allocator: Allocator) -> Mapping[str, Verb]:
    """Return what is answered, by its path."""

    def scores(body: bytes) -> bytes:
        return protocol.write_priorities(allocator.scores(protocol.read_extender_args(body)))

    def preempt(body: bytes) -> bytes:
        return protocol.write_preemption(allocator.preempt(protocol.read_preemption_args(body)))

    return {
        "/scheduler/predicates": lambda body: allocator.filter(protocol.read_extender_args(body)),
        "/scheduler/prioritize": scores,
        "/scheduler/priorities": scores,  # gpu-admission's own name for it
        "/scheduler/bind": lambda body: protocol.write_binding(allocator.bind(protocol.read_binding_args(body))),
        "/scheduler/preempt": preempt,
    }


def create_application(verbs: Mapping[str, Verb], metrics: publish.ExtenderMetrics) -> WSGIApplication:
    """Return the application that answers POST by verb, and GET /version."""

    large = threading.Lock()

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        started = time.perf_counter()
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        verb = verbs.get(path) if method == "POST" else None
        length = environ.get("CONTENT_LENGTH") or ("" if method == "POST" else "0")
        # In chunks nobody says how much will come; and what is for no verb is read too, to find the next request.
        unbounded = "HTTP_TRANSFER_ENCODING" in environ or not length.isdigit()
        if unbounded or int(length) > (MAX_BODY if verb else LARGE_BODY):
            # What follows cannot be told from a next request; cheroot hangs up after this answer.
            told = f"0 to {MAX_BODY} bytes are wanted"
            yield from httpd.reply(start_response, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, told)
        elif method == "GET" and path == "/version":
            yield from httpd.reply(start_response, HTTPStatus.OK, __version__)
        else:
            # Until the answer is taken too: it may be as large as the body.
            with large if int(length) > LARGE_BODY else nullcontext():
                body = _read(environ)
                if verb is None:
                    yield from httpd.reply(start_response, HTTPStatus.NOT_FOUND, "not found")
                    return
                status, answer = _answer(verb, body)
                del body
                metrics.seconds.labels(path.rpartition("/")[2]).observe(time.perf_counter() - started)
                content_type = "application/json" if status == HTTPStatus.OK else ""
                [data] = httpd.reply(start_response, status, answer, content_type)
                # cheroot makes two copies of each part.
                yield from (data[begin : begin + ANSWER_PART] for begin in range(0, len(data), ANSWER_PART))

    return application


def _read(environ: WSGIEnvironment) -> bytes:
    # In parts: asked for all at once, cheroot's reader clears room for the whole with every packet. They are not kept
    # until there are all: small blocks stay with the thread that got them, and each of the threads would keep a body.
    body = io.BytesIO()
    while part := environ["wsgi.input"].read(2**16):
        body.write(part)
    return body.getvalue()


def _answer(verb: Verb, body: bytes) -> tuple[HTTPStatus, str | bytes]:
    try:
        return HTTPStatus.OK, verb(body)
    except errors.BadInput as error:
        return HTTPStatus.BAD_REQUEST, str(error)
    except Exception:  # noqa: BLE001  # the scheduler tries the pod again; logged, and never taken for an answer
        structlog.get_logger().exception("not answered")
        return HTTPStatus.INTERNAL_SERVER_ERROR, "a fault of our own; it is in the log"


class Listening(msgspec.Struct, frozen=True):
    """Where to listen, with which certificate, and the address (IP and port) that others reach it at, if any.

    ``client_name``: the common name of kube-scheduler's certificate; empty for any that the certificate's CA signed.
    """

    address: tuple[str, int]
    certificate: tls.ServingCertificate
    advertised: tuple[str, int] | None = None
    client_name: str = ""


def serve(listening: Listening, application: WSGIApplication) -> httpd.Server:
    """Serve the extender. Raises OSError where the address cannot be had."""
    return httpd.Server(
        listening.address,
        application,
        threads=32,  # the scheduler asks about one pod at a time, and binds several beside that
        tls=listening.certificate.current,
        idle_seconds=300.0,  # Go's client drops a connection that was idle for 90
        max_body=MAX_BODY,
        client_name=listening.client_name,
    ).in_threads()


class Extender:
    """What the leader serves to kube-scheduler.

    A pod that is not bound keeps its cards for ``unbound_seconds``, one that vanished for ``max_terminating`` at most.
    ``on_fault`` is called where it cannot begin, and when a loop of it has ended.
    """

    def __init__(
        self,
        kube: Kube,
        system_namespace: str,
        listening: Listening,
        pods: PodInformer,
        nodes: NodeInformer,
        *,
        unbound_seconds: float,
        max_terminating: float,
        registry: CollectorRegistry,
        on_fault: Callable[[], None],
    ) -> None:
        self._kube, self._namespace = kube, system_namespace
        self._listening = listening
        self._nodes = nodes
        self._cache = cache.CardCache(max_terminating=max_terminating)
        self._metrics = publish.ExtenderMetrics(registry)
        self._allocator = Allocator(
            kube,
            self._cache,
            journal.Journal(kube, system_namespace),
            self._metrics,
            unbound_seconds=unbound_seconds,
            model_of=lambda node: nodes.current().model_of(node),
        )
        self._server: httpd.Server | None = None
        self._stopping = threading.Event()
        self._on_fault = on_fault
        self._log = structlog.get_logger()
        pods.follow(self._cache.pod_changed)
        nodes.follow(self._cache.node_changed)
        registry.register(publish.CardsCollector(self.free_cards))

    @property
    def serving(self) -> bool:
        """Whether the scheduler is answered, and the published figures of free cards are kept up."""
        return self._server is not None

    def free_cards(self) -> FreeCardsByPool:
        """Return how much of the cards is free, by model and pool."""
        return publish.count_free(self._cache.cards(), self._nodes.current())

    def serve(self) -> None:
        """Read the journals, listen, and lead the Service here. Raises OSError where the address cannot be had.

        To be called when everything has been listed. Where the journals cannot be read, that is a fault.
        """
        if not any(self._attempt(self._allocator.load, "journals not read") for _ in range(MAX_ATTEMPTS)):
            self._on_fault()
            return
        # A pod that is not shown now may be gone; it takes two calls to tell.
        for _ in range(2):
            self._attempt(self._allocator.tidy, NOT_TIDIED)
        self._repeat("placements", self._allocator.tidy, TIDY_SECONDS, NOT_TIDIED)
        self._server = serve(self._listening, create_application(verbs_of(self._allocator), self._metrics))
        self._log.info("serving extender", port=self._server.port)
        certificate = self._listening.certificate
        workqueue.spawn("certificate", lambda: tls.watch(certificate, self._stopping), self._on_fault)
        publisher = publish.CardsPublisher(self._kube, self._namespace, self.free_cards)
        self._repeat("cards", publisher.publish, publish.MIN_INTERVAL_SECONDS, "free cards not published")
        if self._listening.advertised:
            advertiser = publish.Advertiser(self._kube, self._namespace, *self._listening.advertised)
            unknown = "whether the Service leads here is not known"
            self._repeat("endpointslice", advertiser.hold, publish.CHECK_INTERVAL_SECONDS, unknown)

    def stop(self) -> None:
        """Answer no more."""
        self._stopping.set()
        if self._server:
            self._server.stop()

    def _repeat(self, name: str, step: Callable[[], None], interval: float, failing: str) -> None:
        def loop() -> None:
            while not self._stopping.is_set():
                self._attempt(step, failing)
                self._stopping.wait(interval)

        workqueue.spawn(name, loop, self._on_fault)

    def _attempt(self, step: Callable[[], None], failing: str) -> bool:
        try:
            step()
        except (errors.VcudaError, *k8s_types.UNDECODABLE) as error:  # somebody may have written nonsense there
            self._log.warning(failing, error=str(error))
            return False
        return True
