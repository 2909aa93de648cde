"""One HTTP server for the status pages, the usage page and the extender: cheroot, held within bounds.

What cheroot does not do by itself is done here, so that no client can hold on to threads, memory or the process:

* A connection costs a thread only while a request of it is read and answered; one that is silent costs a descriptor,
  and is closed after `REQUEST_SECONDS`. Where there are too many of either, the next one is answered 503 and closed.
* A request must be there within `REQUEST_SECONDS`, and each part of an answer be taken within them, however the bytes
  trickle: cheroot's own timeout begins anew with every byte.
* Threads end with the process, and `stop` hangs up on everybody.
"""

import contextlib
import errno
import logging
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from http import HTTPStatus
from typing import Any, Self
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import cheroot.ssl
import structlog
from cheroot import makefile, server, wsgi
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from vcuda.cli import family_of

REQUEST_SECONDS = 10.0  # for a request to arrive, its body too, and for each part of an answer to be taken
MAX_HEAD_BYTES = 16 * 2**10  # of a request line and its headers

# Those that are silent cost a descriptor each, so there may be more of them than a neighbour can hold open by accident:
# else a probe of kubelet's would be refused, and the container restarted.
MAX_CONNECTIONS = 256  # open at the same time, served or not
SERVER_NAME = "vcuda-controller"

_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

Tls = Callable[[], ssl.SSLContext]
"""Returns the context for a new connection, so that a renewed certificate is served without a restart."""

Check = Callable[[], str | None]
"""Returns None when all is well, else what is wrong."""


class Server(wsgi.Server):
    """Serves one WSGI application with at most ``threads`` threads, over TLS where ``tls`` is given.

    As many requests again wait for a thread. ``idle_seconds`` is how long a connection is kept for the next request;
    0 for one request a connection. A body may have ``max_body`` bytes. With ``client_name`` only a peer whose
    certificate has this common name is answered, and others are told 403; that they have one is for ``tls`` to see to.

    Raises OSError where the address cannot be had.
    """

    def __init__(
        self,
        address: tuple[str, int],
        application: WSGIApplication,
        *,
        threads: int,
        tls: Tls | None = None,
        idle_seconds: float = 0.0,
        max_body: int = 2**16,
        client_name: str = "",
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        # Bound here, as cheroot tells only in English why an address cannot be had, and takes ::1 for localhost.
        self._listener = _listen(address)
        super().__init__(
            self._listener.getsockname()[:2],
            application,
            numthreads=threads,
            max=threads,
            server_name=SERVER_NAME,
            request_queue_size=128,
            accepted_queue_size=threads,
            accepted_queue_timeout=0,  # it would be waited for by the one thread that accepts
        )
        self.client_name = client_name
        self.timeout = idle_seconds or request_seconds
        self.request_seconds = request_seconds
        self.max_request_header_size = MAX_HEAD_BYTES
        self.max_request_body_size = max_body
        # With 0 cheroot ends each answer by "Connection: close".
        self.keep_alive_conn_limit = MAX_CONNECTIONS if idle_seconds else 0
        self.ConnectionClass = _Connection
        self.ssl_adapter = _TlsAdapter(tls) if tls else None
        self.open: set[_Connection] = set()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.bind_addr[1])

    def in_threads(self) -> Self:
        """Serve in threads of its own, which end with the process; return once it does."""
        prepared: Future[None] = Future()

        def run() -> None:
            try:
                self.prepare()
            except BaseException as error:
                prepared.set_exception(error)
                raise
            prepared.set_result(None)
            self.serve()

        # Its workers inherit that they are daemons: cheroot's own would keep a process that ends waiting for a reader.
        threading.Thread(target=run, name=f"http {self.port}", daemon=True).start()
        prepared.result()
        return self

    def stop(self) -> None:
        """Take no more connections, and hang up on those there are: nothing is answered any more."""
        stopping = threading.Thread(target=super().stop, daemon=True)
        stopping.start()
        for connection in tuple(self.open):
            connection.hang_up()
        stopping.join(self.shutdown_timeout)  # an application that still works on an answer is not waited for longer

    def bind(self, family: int, type: int, proto: int = 0) -> socket.socket:  # noqa: A002, ARG002  # cheroot's names
        """Return the socket that listens already."""
        self.socket = self._listener
        return self._listener

    def process_conn(self, conn: Any) -> None:
        """Wait for the first byte of a new connection; serve one that has something to say, where a thread is free."""
        if conn.last_used is not None:
            try:
                self.requests.put(conn)
            except queue.Full:
                conn.refuse()
        elif self.ready and len(self.open) <= MAX_CONNECTIONS:
            self.put_conn(conn)
            # The selector closes what was not used for `timeout`, which may be minutes for one that is kept.
            conn.last_used -= self.timeout - self.request_seconds
        else:
            conn.refuse()

    def error_log(self, msg: str = "", level: int = logging.INFO, traceback: bool = False) -> None:
        """Log a fault of the application; a client that is gone, too slow, or speaks no TLS is nothing to report."""
        if level >= logging.ERROR:
            structlog.get_logger().error("request not served", reason=msg, exc_info=traceback)
        else:
            structlog.get_logger().debug("connection ended", reason=msg)


def _listen(address: tuple[str, int]) -> socket.socket:
    listener = socket.socket(family_of(address[0]))
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


class _Request(server.HTTPRequest):
    def read_request_headers(self) -> bool:
        read = super().read_request_headers()  # type: ignore[no-untyped-call]
        # "X_Y" and "X-Y" become one name in WSGI, so a client could pass for the proxy before it. cheroot's own reader
        # for this fails at any header (11.1).
        self.inheaders = {name: value for name, value in self.inheaders.items() if b"_" not in name}
        if read and self.server.client_name not in ("", *self.conn.socket.peer_names()):
            self.simple_response("403 Forbidden", "this certificate is of another client\n")
            return False
        return bool(read)


class _Connection(server.HTTPConnection):
    RequestHandlerClass = _Request

    def __init__(self, server: Server, sock: socket.socket, makefile: Any = makefile.MakeFile) -> None:
        # A peer that has vanished acknowledges nothing; without this the kernel would try for a quarter of an hour.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(server.request_seconds * 1000))
        super().__init__(server, _TimedSocket(sock, server.request_seconds), makefile)
        server.open.add(self)

    def communicate(self) -> bool:
        self.socket.begin()
        return self.server.ready and bool(super().communicate())  # type: ignore[no-untyped-call]

    def refuse(self) -> None:
        """Say 503 as far as that takes no time, and hang up. Before its handshake a peer over TLS hears nothing."""
        self.socket.setblocking(False)
        with contextlib.suppress(OSError):
            self.socket.unwrapped.send(_BUSY)
        self.close()

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):  # it has gone by itself
            # SSLSocket's own method drops the encryption first, and a worker may be about to send.
            socket.socket.shutdown(self.socket.unwrapped, socket.SHUT_RDWR)

    def close(self) -> None:
        self.server.open.discard(self)
        super().close()


class _TimedSocket:
    """A socket whose request must be read, and each part of its answer written, within ``seconds``."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self.unwrapped = sock
        self._seconds = seconds
        self._due = 0.0

    def begin(self) -> None:
        """Let the time for a request run."""
        self._due = time.monotonic() + self._seconds

    def peer_names(self) -> tuple[str, ...]:
        """Return the common names in the certificate that the peer has shown."""
        shown: Any = self.unwrapped.getpeercert() if isinstance(self.unwrapped, ssl.SSLSocket) else None
        return tuple(value for names in (shown or {}).get("subject", ()) for key, value in names if key == "commonName")

    def recv_into(self, buffer: bytearray) -> int:
        left = self._due - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")  # cheroot answers 408 to these words of the standard library
        self.unwrapped.settimeout(left)
        try:
            return self.unwrapped.recv_into(buffer)
        except ssl.SSLError as error:
            # A handshake that came to nothing, as a probe's or that of who has no certificate. To cheroot it would be a
            # fault, to be logged with all its frames and answered over the connection that has failed.
            raise ConnectionResetError(errno.ECONNRESET, str(error)) from error

    def send(self, data: bytes) -> int:
        self.unwrapped.settimeout(self._seconds)
        self.unwrapped.sendall(data)  # its timeout is over the whole of what it is given
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unwrapped, name)


class _TlsAdapter(cheroot.ssl.Adapter):
    """Gives each connection the context of the moment; the worker that reads its first request shakes hands."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls

    def bind(self, sock: socket.socket) -> socket.socket:
        return sock

    def wrap(self, sock: socket.socket) -> tuple[ssl.SSLSocket, dict[str, str]]:
        # A handshake here would be waited for by the one thread that accepts.
        return self._tls().wrap_socket(sock, server_side=True, do_handshake_on_connect=False), self.get_environ()

    def get_environ(self) -> dict[str, str]:
        return {"wsgi.url_scheme": "https"}

    def makefile(self, sock: socket.socket, mode: str = "r", bufsize: int = -1) -> Any:
        return makefile.MakeFile(sock, mode, bufsize)


def serve_status(address: tuple[str, int], registry: CollectorRegistry, *, healthy: Check, ready: Check) -> Server:
    """Serve /healthz, /readyz and /metrics over plain HTTP, for kubelet and Prometheus.

    Raises OSError where the address cannot be had.
    """
    checks = {"/healthz": healthy, "/readyz": ready}

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] != "GET":
            return reply(start_response, HTTPStatus.METHOD_NOT_ALLOWED, "GET only")
        if path == "/metrics":
            return reply(start_response, HTTPStatus.OK, generate_latest(registry), CONTENT_TYPE_LATEST)
        if path not in checks:
            return reply(start_response, HTTPStatus.NOT_FOUND, "not found")
        wrong = checks[path]()
        return reply(start_response, HTTPStatus.SERVICE_UNAVAILABLE if wrong else HTTPStatus.OK, wrong or "ok")

    return Server(address, application, threads=4).in_threads()


def reply(
    start_response: StartResponse, status: HTTPStatus, body: str | bytes, content_type: str = ""
) -> Iterable[bytes]:
    """Answer with a body; a text gets a line break."""
    data = f"{body}\n".encode() if isinstance(body, str) else body
    headers = [("Content-Type", content_type or "text/plain; charset=utf-8"), ("Content-Length", str(len(data)))]
    start_response(f"{status.value} {status.phrase}", headers)
    return [data]
