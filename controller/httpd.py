"""The HTTP server of the status pages, the usage page and the extender: cheroot (a Python library) with more limits.

The limits keep a client from occupying threads or memory, and from delaying the end of the process:

* A connection needs a thread only while a request is read and answered. A silent connection needs only a descriptor. It
  is closed after `REQUEST_SECONDS`. If threads or descriptors run out, the next connection is answered 503 and closed.
* A client must send its whole request within `REQUEST_SECONDS`, and must read each part of the answer within the same
  time. cheroot's own timeout would start again with every byte.
* Threads end with the process, and `stop` closes all connections.
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

REQUEST_SECONDS = 10.0  # A client has this many seconds to send a whole request, and to read each part of the answer.
MAX_HEAD_BYTES = 16 * 2**10

# The maximum number of open connections, which no client opens by accident. Further connections are rejected, even
# kubelet's probes, so kubelet restarts the container.
MAX_CONNECTIONS = 256
SERVER_NAME = "vcuda-controller"

_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

Tls = Callable[[], ssl.SSLContext]
"""A function that returns the TLS context for each new connection, so that a new certificate needs no restart."""

Probe = Callable[[], str | None]
"""A function that checks health or readiness. It returns None if all is well, otherwise a message with the reason."""


class Server(wsgi.Server):
    """Serves one WSGI application.

    ``threads``: the number of threads, and the maximum number of requests that wait for a thread.
    ``tls``: returns the TLS context, which must require client certificates if ``client_name`` is set; None for HTTP.
    ``idle_seconds``: how long a connection is kept for the next request; 0 for one request per connection.
    ``max_body``: the maximum size of a request body in bytes.
    ``client_name``: if set, clients whose certificate does not have this common name are answered 403.

    Raises OSError if the server cannot listen on the address.
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
    ) -> None:
        # Bind the socket without cheroot, which would report a failure only as text, and would use ::1 for localhost.
        self._listener = _listen(address)
        super().__init__(
            self._listener.getsockname()[:2],
            application,
            numthreads=threads,
            max=threads,
            server_name=SERVER_NAME,
            request_queue_size=128,
            accepted_queue_size=threads,
            accepted_queue_timeout=0,  # The only thread that accepts connections must not wait while the queue is full.
        )
        self.client_name = client_name
        self.timeout = idle_seconds or REQUEST_SECONDS
        self.max_request_header_size = MAX_HEAD_BYTES
        self.max_request_body_size = max_body
        # With a limit of 0, cheroot sends "Connection: close" with each answer, so each connection serves one request.
        self.keep_alive_conn_limit = MAX_CONNECTIONS if idle_seconds else 0
        self.ConnectionClass = _Connection
        self.ssl_adapter = _TlsAdapter(tls) if tls else None
        self.open: set[_Connection] = set()

    @property
    def port(self) -> int:
        return int(self.bind_addr[1])

    def in_threads(self) -> Self:
        """Start to serve in daemon threads, and return when the server accepts connections."""
        prepared: Future[None] = Future()

        def run() -> None:
            try:
                self.prepare()
            except BaseException as error:
                prepared.set_exception(error)
                raise
            prepared.set_result(None)
            self.serve()

        # Workers that cheroot starts in a daemon thread are daemons, too. So a slow client cannot delay the exit.
        threading.Thread(target=run, name=f"http {self.port}", daemon=True).start()
        prepared.result()
        return self

    def stop(self) -> None:
        """Accept no more connections, and close all open connections. Their requests get no answer."""
        stopping = threading.Thread(target=super().stop, daemon=True)
        stopping.start()
        for connection in tuple(self.open):
            connection.hang_up()
        stopping.join(self.shutdown_timeout)  # The wait is limited, because the application may still be working.

    def bind(self, family: int, type: int, proto: int = 0) -> socket.socket:  # noqa: A002, ARG002  # named by cheroot
        """Return the listening socket, which `__init__` has already bound."""
        self.socket = self._listener
        return self._listener

    def process_conn(self, conn: Any) -> None:
        """Queue a connection that has sent a request. Watch a new connection until its first byte arrives."""
        if conn.last_used is not None:
            try:
                self.requests.put(conn)
            except queue.Full:
                conn.refuse()
        elif self.ready and len(self.open) <= MAX_CONNECTIONS:
            self.put_conn(conn)
            # cheroot closes a connection that was unused for `timeout`, maybe minutes. But a new connection that sends
            # nothing must be closed after `REQUEST_SECONDS`. So its `last_used` is set to an earlier time.
            conn.last_used -= self.timeout - REQUEST_SECONDS
        else:
            conn.refuse()

    def error_log(self, msg: str = "", level: int = logging.INFO, traceback: bool = False) -> None:
        if level >= logging.ERROR:
            structlog.get_logger().error("a request could not be served", reason=msg, exc_info=traceback)
        else:
            structlog.get_logger().debug("a connection ended early", reason=msg)


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

        # WSGI gives the headers "X_Y" and "X-Y" the same name, so a client could forge a header that only a proxy may
        # set. So headers with an underscore are dropped. cheroot 11.1 has a class for this, but the class is broken.
        self.inheaders = {name: value for name, value in self.inheaders.items() if b"_" not in name}
        if read and self.server.client_name not in ("", *self.conn.socket.peer_names()):
            self.simple_response("403 Forbidden", "the common name of this client certificate is not allowed\n")
            return False
        return bool(read)


class _Connection(server.HTTPConnection):
    RequestHandlerClass = _Request

    def __init__(self, server: Server, sock: socket.socket, makefile: Any = makefile.MakeFile) -> None:
        # Without TCP_USER_TIMEOUT, the kernel would resend data to an unreachable client for a quarter of an hour.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(REQUEST_SECONDS * 1000))
        super().__init__(server, _TimedSocket(sock, REQUEST_SECONDS), makefile)
        server.open.add(self)

    def communicate(self) -> bool:
        self.socket.begin()
        return self.server.ready and bool(super().communicate())  # type: ignore[no-untyped-call]

    def refuse(self) -> None:
        """Close the connection, after a 503 answer if sending does not block. Before a TLS handshake, send nothing."""
        self.socket.setblocking(False)
        with contextlib.suppress(OSError):
            self.socket.unwrapped.send(_BUSY)
        self.close()

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            # Only the plain socket is shut down. SSLSocket.shutdown would end the encryption, and another thread that
            # still sends would then send plain text.
            socket.socket.shutdown(self.socket.unwrapped, socket.SHUT_RDWR)

    def close(self) -> None:
        self.server.open.discard(self)
        super().close()


class _TimedSocket:
    """A socket with a time limit of ``seconds`` to read a whole request, and to write each part of the answer."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self.unwrapped = sock
        self._seconds = seconds
        self._due = 0.0

    def begin(self) -> None:
        self._due = time.monotonic() + self._seconds

    def peer_names(self) -> tuple[str, ...]:
        shown: Any = self.unwrapped.getpeercert() if isinstance(self.unwrapped, ssl.SSLSocket) else None
        return tuple(value for names in (shown or {}).get("subject", ()) for key, value in names if key == "commonName")

    def recv_into(self, buffer: bytearray) -> int:
        left = self._due - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")  # cheroot answers 408 only if the error has the text "timed out".
        self.unwrapped.settimeout(left)
        try:
            return self.unwrapped.recv_into(buffer)
        except ssl.SSLError as error:
            # The TLS handshake failed, for example because the client has no certificate. After an SSLError, cheroot
            # would log a traceback and answer on the failed connection. A ConnectionResetError has no such effect.
            raise ConnectionResetError(errno.ECONNRESET, str(error)) from error

    def send(self, data: bytes) -> int:
        self.unwrapped.settimeout(self._seconds)
        self.unwrapped.sendall(data)  # The timeout limits the whole call of `sendall`, not each of its writes.
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unwrapped, name)


class _TlsAdapter(cheroot.ssl.Adapter):
    """Wraps each connection in the current TLS context. The thread that reads the first request does the handshake."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls

    def bind(self, sock: socket.socket) -> socket.socket:
        return sock

    def wrap(self, sock: socket.socket) -> tuple[ssl.SSLSocket, dict[str, str]]:
        # Do no TLS handshake yet: a slow client would block this thread, which alone accepts connections.
        return self._tls().wrap_socket(sock, server_side=True, do_handshake_on_connect=False), self.get_environ()

    def get_environ(self) -> dict[str, str]:
        return {"wsgi.url_scheme": "https"}

    def makefile(self, sock: socket.socket, mode: str = "r", bufsize: int = -1) -> Any:
        return makefile.MakeFile(sock, mode, bufsize)


def serve_status(address: tuple[str, int], registry: CollectorRegistry, *, healthy: Probe, ready: Probe) -> Server:
    """Serve /healthz, /readyz and /metrics over plain HTTP, for kubelet and Prometheus.

    Raises OSError if the server cannot listen on the address.
    """
    checks = {"/healthz": healthy, "/readyz": ready}

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] != "GET":
            return reply(start_response, HTTPStatus.METHOD_NOT_ALLOWED, "the method must be GET")
        if path == "/metrics":
            return reply(start_response, HTTPStatus.OK, generate_latest(registry), CONTENT_TYPE_LATEST)
        if path not in checks:
            return reply(start_response, HTTPStatus.NOT_FOUND, "the path must be /healthz, /readyz or /metrics")
        wrong = checks[path]()
        return reply(start_response, HTTPStatus.SERVICE_UNAVAILABLE if wrong else HTTPStatus.OK, wrong or "ok")

    return Server(address, application, threads=4).in_threads()


def reply(
    start_response: StartResponse, status: HTTPStatus, body: str | bytes, content_type: str = ""
) -> Iterable[bytes]:
    data = f"{body}\n".encode() if isinstance(body, str) else body
    headers = [("Content-Type", content_type or "text/plain; charset=utf-8"), ("Content-Length", str(len(data)))]
    start_response(f"{status.value} {status.phrase}", headers)
    return [data]
