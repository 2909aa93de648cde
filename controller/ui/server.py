"""A small HTTP server that cannot hurt the process it runs in.

The page is served inside the leading controller, since only that has the figures. Werkzeug's development server is not
made for strangers, and gunicorn forks and owns its process. So: the standard library's threading server, held within
bounds, and ``wsgiref`` to call the application.

* At most `MOST_CONNECTIONS` threads. One connection more is answered 503 without a thread, and closed.
* A request's head must be complete after `PATIENCE` seconds and within `LONGEST_HEAD` bytes, however it trickles in.
* A reader who does not take what is written within `PATIENCE` seconds is hung up on: ``socket.sendall`` counts its
  timeout over the whole of what it is given. A peer that has vanished is noticed by TCP_USER_TIMEOUT.
* One request a connection: none stands idle, and behind a Service the next one may reach another replica.
* GET and HEAD alone, and a body is never read.
"""

from __future__ import annotations

import contextlib
import io
import socket
import socketserver
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes
from wsgiref.handlers import SimpleHandler
from wsgiref.headers import Headers

import structlog

from vcuda.cli import family_of

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

MOST_CONNECTIONS = 128
"""Connections that are served at the same time, each by a thread."""

PATIENCE = 10.0
"""Seconds."""

LONGEST_HEAD = 16 * 2**10
"""Bytes of a request line and its headers."""

READABLE = ("GET", "HEAD")

_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_HEAD_ENDS = (b"\r\n\r\n", b"\n\n")


def serve(address: tuple[str, int], application: WSGIApplication, most: int = MOST_CONNECTIONS) -> Server:
    """Serve the application in a thread of its own; ``server_address`` of what is returned has the port.

    Raises OSError where the address cannot be had.
    """
    server = Server(address, application, most)
    threading.Thread(target=server.serve_forever, name="page", daemon=True).start()
    return server


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves one application to at most so many connections."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], application: WSGIApplication, most: int) -> None:
        self.address_family = family_of(address[0])
        self.application = application
        self._free = threading.BoundedSemaphore(most)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, where one is free."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        request.setblocking(False)
        with contextlib.suppress(OSError):  # a peer that takes not even this much is gone
            request.send(_BUSY)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002  # socketserver's call
        """Log what went wrong; a peer that has gone, or is too slow, is nothing to report."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            structlog.get_logger().debug("page not delivered", reason=str(error))
        else:
            structlog.get_logger().error("page not served", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """Reads one request, has the application answer it, and hangs up."""

    server: Server
    timeout = PATIENCE
    server_version = "vcuda-controller"
    sys_version = ""
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"

    def setup(self) -> None:
        """Arm the timeouts before anything is read."""
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(PATIENCE * 1000))

    def handle(self) -> None:
        """Answer one request."""
        head = read_head(self.connection)
        self.rfile = io.BufferedReader(io.BytesIO(head))
        self.raw_requestline = self.rfile.readline()
        self.close_connection = True
        if not head or not self.parse_request():
            return
        if self.command not in READABLE:
            self._refuse()
            return
        self.connection.settimeout(PATIENCE)
        _Answer(io.BytesIO(), self.wfile, sys.stderr, self._environ()).run(self.server.application)

    def _refuse(self) -> None:
        self.send_response(HTTPStatus.METHOD_NOT_ALLOWED)
        for name, value in (("Allow", ", ".join(READABLE)), ("Content-Length", "0"), ("Connection", "close")):
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keep requests out of the log."""

    def _environ(self) -> dict[str, Any]:
        path, _, query = self.path.partition("?")
        host, port = self.server.server_address[:2]
        return {
            "REQUEST_METHOD": self.command,
            "SCRIPT_NAME": "",
            "PATH_INFO": unquote_to_bytes(path).decode("latin-1"),  # as PEP 3333 has it
            "QUERY_STRING": query,
            "SERVER_NAME": str(host),
            "SERVER_PORT": str(port),
            "SERVER_PROTOCOL": self.request_version,
            "REMOTE_ADDR": self.client_address[0],
            **{
                f"HTTP_{name.upper().replace('-', '_')}": value
                for name, value in self.headers.items()
                if "_" not in name
            },
        }


class _Answer(SimpleHandler):
    """Writes an application's answer, part by part as it comes."""

    http_version = "1.1"
    server_software = "vcuda-controller"
    headers: Headers

    def __init__(self, stdin: Any, stdout: Any, stderr: Any, environ: dict[str, Any]) -> None:
        super().__init__(stdin, stdout, stderr, environ, multithread=True, multiprocess=False)

    def setup_environ(self) -> None:
        """Leave the process's own environment variables out of it."""
        self.os_environ: dict[str, str] = {}
        super().setup_environ()

    def cleanup_headers(self) -> None:
        """Say that the connection ends with the answer."""
        super().cleanup_headers()
        self.headers["Connection"] = "close"

    def log_exception(self, exc_info: Any) -> None:
        """Log a fault of the application; a reader who is gone, or too slow, is none."""
        if isinstance(exc_info[1], OSError):
            structlog.get_logger().debug("page not delivered", reason=str(exc_info[1]))
        else:
            structlog.get_logger().error("page not served", exc_info=exc_info)


def read_head(connection: socket.socket) -> bytes:
    """Return a request's line and headers, and what came with them; empty where they did not come, or did not end.

    However the bytes trickle in, this ends after `PATIENCE` seconds, by TimeoutError.
    """
    deadline = time.monotonic() + PATIENCE
    head = b""
    while not any(end in head for end in _HEAD_ENDS):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request's head did not come in time")
        connection.settimeout(left)
        part = connection.recv(LONGEST_HEAD)
        head += part
        if not part or len(head) > LONGEST_HEAD:
            return b""
    return head
