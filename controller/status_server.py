"""Health checks and metrics over plain HTTP, for kubelet and Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from vcuda.cli import family_of

Check = Callable[[], str | None]
"""Returns None when all is well, else what is wrong."""


def serve_status(address: tuple[str, int], registry: CollectorRegistry, *, healthy: Check, ready: Check) -> int:
    """Serve /healthz, /readyz and /metrics in a thread of their own; return the port.

    Raises OSError where the address cannot be had.
    """
    server = _Server(address, _handler(registry, {"/healthz": healthy, "/readyz": ready}))
    threading.Thread(target=server.serve_forever, name="status", daemon=True).start()
    return int(server.server_address[1])


class _Server(ThreadingHTTPServer):
    """Listens with the family that the host wants."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = family_of(address[0])
        super().__init__(address, handler)


def _handler(registry: CollectorRegistry, checks: dict[str, Check]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers GET."""

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._reply(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(registry))
            elif path in checks:
                wrong = checks[path]()
                status = HTTPStatus.SERVICE_UNAVAILABLE if wrong else HTTPStatus.OK
                self._reply(status, "text/plain; charset=utf-8", f"{wrong or 'ok'}\n".encode())
            else:
                self._reply(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"not found\n")

        def log_message(self, *_: object) -> None:
            """Keep probes out of the log."""

        def _reply(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler
