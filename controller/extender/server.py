"""kube-scheduler's way in: HTTP/1.1 over TLS, connections kept."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import structlog

from controller.extender.allocator import Binder, Placer
from controller.extender.metrics import ExtenderMetrics
from controller.extender.protocol import (
    read_binding,
    read_candidates,
    read_preemption,
    write_binding,
    write_preemption,
    write_priorities,
)
from vcuda import __version__
from vcuda.cli import family_of
from vcuda.errors import BadInput

LARGEST = 256 * 2**20
"""Bytes of a request: some 10,000 nodes, where the scheduler sends them whole."""

HANDSHAKE = 5.0
IDLE = 300.0
"""Seconds a connection is kept without a request; Go's client drops it after 90."""

Tls = Callable[[], ssl.SSLContext]
"""Returns the context for a new connection."""

Verb = Callable[[bytes], bytes]
"""Answers the body of one kind of request; raises BadInput where it is none."""


def verbs_of(placer: Placer, binder: Binder) -> Mapping[str, Verb]:
    """Return what is answered, by its path. ``priorities`` is gpu-admission's own name for ``prioritize``."""

    def scores(body: bytes) -> bytes:
        return write_priorities(placer.scores(read_candidates(body)))

    return {
        "/scheduler/predicates": lambda body: placer.filter(read_candidates(body)),
        "/scheduler/prioritize": scores,
        "/scheduler/priorities": scores,
        "/scheduler/bind": lambda body: write_binding(binder.bind(read_binding(body))),
        "/scheduler/preempt": lambda body: write_preemption(placer.preempt(read_preemption(body))),
    }


class Server(ThreadingHTTPServer):
    """Answers the scheduler in a thread a connection. Raises OSError where the address cannot be had."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], tls: Tls, verbs: Mapping[str, Verb], metrics: ExtenderMetrics) -> None:
        self.address_family = family_of(address[0])
        self.verbs = verbs
        self.metrics = metrics
        self._tls = tls
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(address, _Handler)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.server_address[1])

    def start(self) -> None:
        """Serve in a thread of its own."""
        threading.Thread(target=self.serve_forever, name="extender", daemon=True).start()

    def stop(self) -> None:
        """Take no more connections, and end those there are: nothing is answered any more."""
        self.shutdown()
        self.server_close()
        with self._lock:
            for connection in self._connections:
                _hang_up(connection)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Shake hands, in the connection's own thread, and serve it to its end."""
        request.settimeout(HANDSHAKE)
        with self._tls().wrap_socket(request, server_side=True) as connection:
            connection.settimeout(IDLE)
            with self._lock:
                self._connections.add(connection)
            try:
                super().finish_request(connection, client_address)
            finally:
                with self._lock:
                    self._connections.discard(connection)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002  # socketserver's call
        """Log a connection that ended by an error; the scheduler comes again."""
        structlog.get_logger().info("connection of the scheduler ended", client=str(client_address), exc_info=True)


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has gone by itself


class _Handler(BaseHTTPRequestHandler):
    """Answers POST by verb, and GET /version."""

    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body in one write: one packet, and one TLS record

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/version":
            self._reply(HTTPStatus.OK, f"{__version__}\n".encode(), "text/plain; charset=utf-8")
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "not found")

    def do_POST(self) -> None:
        started = time.perf_counter()
        path = self.path.partition("?")[0]
        verb = self.server.verbs.get(path)
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > LARGEST:
            self.close_connection = True  # what follows cannot be told from a next request
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body of 0 to {LARGEST} bytes is wanted")
            return
        body = self.rfile.read(int(length))
        if verb is None:
            self._refuse(HTTPStatus.NOT_FOUND, "not found")
            return
        self._answer(verb, body)
        self.server.metrics.observe(path.rpartition("/")[2], time.perf_counter() - started)

    def log_message(self, *_: object) -> None:
        """Keep requests out of the log."""

    def _answer(self, verb: Verb, body: bytes) -> None:
        try:
            answer = verb(body)
        except BadInput as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except Exception:  # noqa: BLE001  # the scheduler tries the pod again; logged, and never taken for an answer
            structlog.get_logger().exception("not answered")
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "a fault of our own; it is in the log")
        else:
            self._reply(HTTPStatus.OK, answer, "application/json")

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        self._reply(status, f"{message}\n".encode(), "text/plain; charset=utf-8")

    def _reply(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()
