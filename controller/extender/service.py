"""Runs the scheduler extender in the leading controller, and serves the extender's HTTP API."""

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
from controller.advertiser import Advertiser
from controller.extender import cache, journal, protocol
from controller.extender.allocator import Allocator
from controller.extender.metrics import ExtenderMetrics
from controller.pods import PodInformer
from vcuda import __version__, errors, k8s_types, tls
from vcuda.kube import Kube, NodeInformer

SERVICE = "vcuda-extender"
"""The Service through which kube-scheduler reaches the extender of the leader."""

MAX_ATTEMPTS = 3
TIDY_SECONDS = 15.0
"""Seconds between two calls of `Allocator.tidy`, which removes expired placements and creates missing journals. A
placement is the cards that were chosen for a pod. The journal of a node is the ConfigMap with its placements."""

NOT_TIDIED = "expired placements of pods could not be removed"

MAX_BODY = 128 * 2**20
"""The maximum size of a request body in bytes. About 8,000 nodes fit if the scheduler sends complete Node objects."""

LARGE_BODY = 2**20
"""Bodies of more than this many bytes are handled one at a time, to save memory. Lists of node names are smaller."""

ANSWER_PART = 8 * 2**20

Verb = Callable[[bytes], bytes]
"""A function that handles one kind of request, such as bind: it returns the response body. Raises BadInput."""


def verbs_of(allocator: Allocator) -> Mapping[str, Verb]:
    """Return the function that handles each kind of request from kube-scheduler, by the path of the request's URL."""

    def scores(body: bytes) -> bytes:
        return protocol.write_priorities(allocator.scores(protocol.read_extender_args(body)))

    def preempt(body: bytes) -> bytes:
        return protocol.write_preemption(allocator.preempt(protocol.read_preemption_args(body)))

    return {
        "/scheduler/predicates": lambda body: allocator.filter(protocol.read_extender_args(body)),
        "/scheduler/prioritize": scores,
        "/scheduler/priorities": scores,  # gpu-admission, tkestack's extender, uses this path.
        "/scheduler/bind": lambda body: protocol.write_binding(allocator.bind(protocol.read_binding_args(body))),
        "/scheduler/preempt": preempt,
    }


def create_application(verbs: Mapping[str, Verb], metrics: ExtenderMetrics) -> WSGIApplication:
    """Return the extender's WSGI application. It answers POST requests for the paths in ``verbs``, and GET /version."""

    large = threading.Lock()

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        started = time.perf_counter()
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        verb = verbs.get(path) if method == "POST" else None
        length = environ.get("CONTENT_LENGTH") or ("" if method == "POST" else "0")
        # A request with a chunked body is rejected, because its length is unknown. The body of a request for an unknown
        # path must be read, too, because the next request follows on the same connection.
        unbounded = "HTTP_TRANSFER_ENCODING" in environ or not length.isdigit()
        if unbounded or int(length) > (MAX_BODY if verb else LARGE_BODY):
            # A rejected body is not read. cheroot closes the connection, so the body is not taken for the next request.
            message = f"the request must have a Content-Length of at most {MAX_BODY} bytes"
            yield from httpd.reply(start_response, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        elif method == "GET" and path == "/version":
            yield from httpd.reply(start_response, HTTPStatus.OK, __version__)
        else:
            # Handle one large request at a time, until its answer is sent, because the answer may be large, too.
            with large if int(length) > LARGE_BODY else nullcontext():
                body = _read(environ)
                if verb is None:
                    yield from httpd.reply(start_response, HTTPStatus.NOT_FOUND, "the extender has no such path")
                    return
                status, answer = _answer(verb, body)
                del body
                metrics.seconds.labels(path.rpartition("/")[2]).observe(time.perf_counter() - started)
                content_type = "application/json" if status == HTTPStatus.OK else ""
                [data] = httpd.reply(start_response, status, answer, content_type)
                # cheroot makes two copies of each chunk of an answer. So send a large answer in chunks, to save memory.
                yield from (data[begin : begin + ANSWER_PART] for begin in range(0, len(data), ANSWER_PART))

    return application


def _read(environ: WSGIEnvironment) -> bytes:
    # Read the request body in parts. For one large read, cheroot would fill a buffer of the body's size with zeros for
    # each packet. Collect the parts in one buffer, because Python would not free the memory of many small parts.
    body = io.BytesIO()
    while part := environ["wsgi.input"].read(2**16):
        body.write(part)
    return body.getvalue()


def _answer(verb: Verb, body: bytes) -> tuple[HTTPStatus, str | bytes]:
    try:
        return HTTPStatus.OK, verb(body)
    except errors.BadInput as error:
        return HTTPStatus.BAD_REQUEST, str(error)
    except Exception:  # noqa: BLE001  # Catch every error: it is logged, and the scheduler retries the pod.
        structlog.get_logger().exception("a request of the scheduler failed")
        return HTTPStatus.INTERNAL_SERVER_ERROR, "internal error of the extender; the controller's log has the cause"


class Listening(msgspec.Struct, frozen=True):
    """The settings of the extender's HTTPS server.

    ``address``: the host and port to listen on.
    ``advertised``: the IP address and port to publish in the EndpointSlice; None to publish no address.
    ``client_name``: the common name that kube-scheduler's certificate must have. If it is empty, every certificate from
    the client CA is accepted.
    """

    address: tuple[str, int]
    certificate: tls.ServingCertificate
    advertised: tuple[str, int] | None = None
    client_name: str = ""


def serve_extender(listening: Listening, application: WSGIApplication) -> httpd.Server:
    """Start the extender's HTTPS server in threads, and return it. Raises OSError if the address cannot be used."""
    return httpd.Server(
        listening.address,
        application,
        threads=32,  # The scheduler binds several pods in parallel, and each call needs a thread.
        tls=listening.certificate.current,
        idle_seconds=300.0,  # The scheduler, a Go client, closes an idle connection earlier: after 90 s.
        max_body=MAX_BODY,
        client_name=listening.client_name,
    ).in_threads()


class Extender:
    """The scheduler extender, with its server and its background loops.

    ``unbound_seconds``: the number of seconds for which a pod keeps its cards without being bound to a node.
    ``max_terminating_seconds``: the most seconds for which a pod that was deleted while it ran keeps its cards.
    ``on_fault``: called if the extender cannot start, or if one of its loops fails.
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
        max_terminating_seconds: float,
        registry: CollectorRegistry,
        on_fault: Callable[[], None],
    ) -> None:
        self._kube, self._namespace = kube, system_namespace
        self._listening = listening
        self._cache = cache.CardCache(max_terminating_seconds=max_terminating_seconds)
        self._metrics = ExtenderMetrics(registry)
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

    @property
    def serving(self) -> bool:
        return self._server is not None

    def serve(self) -> None:
        """Read the journals (the stored placements of pods), start the server, and publish the server's address.

        The watches must have listed all pods and nodes. If the journals cannot be read, ``on_fault`` is called. Raises
        OSError if the server cannot listen.
        """
        if not any(
            self._attempt(self._allocator.load, "the journals with the placements of pods could not be read")
            for _ in range(MAX_ATTEMPTS)
        ):
            self._on_fault()
            return
        # If the pod watch does not report a pod with a placement, the second call of `tidy` checks if the pod exists.
        for _ in range(2):
            self._attempt(self._allocator.tidy, NOT_TIDIED)
        self._repeat("placements", self._allocator.tidy, TIDY_SECONDS, NOT_TIDIED)
        self._server = serve_extender(self._listening, create_application(verbs_of(self._allocator), self._metrics))
        self._log.info("serving extender", port=self._server.port)
        certificate = self._listening.certificate
        workqueue.spawn("certificate", lambda: tls.watch(certificate, self._stopping), self._on_fault)
        if self._listening.advertised:
            advertiser = Advertiser(self._kube, self._namespace, SERVICE, self._listening.advertised, "https")
            workqueue.spawn("endpointslice", lambda: advertiser.run(self._stopping), self._on_fault)

    def stop(self) -> None:
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
        # A user may have edited a pod or journal so that it cannot be decoded. This must not end the loop.
        except (errors.VcudaError, *k8s_types.UNDECODABLE) as error:
            self._log.warning(failing, error=str(error))
            return False
        return True
