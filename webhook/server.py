"""gunicorn, set up for a webhook: one process, threads, kept connections, a cached TLS context, and a clean stop."""

from __future__ import annotations

import gc
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import msgspec
from gunicorn.app.base import BaseApplication
from gunicorn.http.wsgi import Response
from gunicorn.workers import gthread

from webhook.app import create_app
from webhook.service import Service
from webhook.tls import ServingCertificate, watch

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment
    from gunicorn.workers.gthread import TConn

KEEP_ALIVE = 120
"""Seconds an idle connection stays open: longer than the API server's 90, so that it never sends into a closed one."""

FIRST_BYTE = 5.0
"""Seconds a thread waits for a new client's first byte; slower ones wait without a thread."""

LINGER = 2.0
"""Seconds a stopping server keeps a connection without a request, for one that may be on its way."""


class Settings(msgspec.Struct, frozen=True):
    """Where and how to listen. ``drain`` is in seconds: how long readiness fails before requests are turned away."""

    bind: str
    certificate: Path
    threads: int = 32
    drain: float = 5.0


class WebhookServer(BaseApplication):
    """One gunicorn with one worker. ``make_service`` runs in the worker: threads do not outlive a fork."""

    def __init__(
        self, settings: Settings, make_service: Callable[[ServingCertificate], Service], announce: Callable[[str], None]
    ) -> None:
        self.settings = settings
        self.certificate = ServingCertificate(settings.certificate)
        self.stopping = threading.Event()
        self.service: Service | None = None
        self._make_service = make_service
        self._announce = announce
        super().__init__()

    def load_config(self) -> None:
        """Set what is ours to set; gunicorn's own configuration files and variables are not read."""
        options: dict[str, Any] = {
            "bind": self.settings.bind,
            "workers": 1,
            "worker_class": DrainingWorker,
            "threads": self.settings.threads,
            "keepalive": KEEP_ALIVE,
            "graceful_timeout": int(self.settings.drain) + 10,
            "certfile": str(self.settings.certificate / "tls.crt"),
            "keyfile": str(self.settings.certificate / "tls.key"),
            "ssl_context": self._ssl_context,
            "post_worker_init": self._ready,
            "control_socket_disable": True,
            "loglevel": "warning",
            "proc_name": "vcuda-webhook",
        }
        shared_memory = Path("/dev/shm")  # noqa: S108  # gunicorn's heartbeat file; a read-only root has no other place
        if shared_memory.is_dir():
            options["worker_tmp_dir"] = str(shared_memory)
        for name, value in options.items():
            self.cfg.set(name, value)

    def load(self) -> Any:
        """Make the application, in the worker."""
        threading.Thread(target=watch, args=(self.certificate, self.stopping), name="certificate", daemon=True).start()
        self.service = self._make_service(self.certificate)
        gc.freeze()  # what is loaded now stays: no collection while serving has to look at it again
        return HonourClose(create_app(self.service))

    def _ssl_context(self, _config: object, _default: object) -> ssl.SSLContext:
        return self.certificate.current()

    def _ready(self, worker: Any) -> None:
        """Announce the address when the worker serves it: gunicorn's own ``when_ready`` comes before there is one."""
        host, port = worker.sockets[0].getsockname()[:2]
        self._announce(f"https://{f'[{host}]' if ':' in host else host}:{port}")


class DrainingWorker(gthread.ThreadWorker):
    """Stops so that no request is lost: readiness fails at once, work goes on a while, late requests are sent away."""

    app: WebhookServer

    def handle(self, conn: TConn) -> bool:
        """Serve a request; a connection that has only shaken hands waits for its first one without a thread.

        The API server has such connections: Go's transport dials while it waits for a free one, sends on whichever
        comes first, and keeps the other. gunicorn would read from that in a thread until the API server closes it.
        """
        if not conn.initialized and not self._has_request(conn):
            later: bool = gthread._DEFER  # type: ignore[attr-defined]  # has no public name
            return later
        return super().handle(conn)

    def _has_request(self, conn: TConn) -> bool:
        """Shake hands, and return whether a request follows at once."""
        if not conn.wait_for_data(FIRST_BYTE):
            return False
        try:
            conn.init()
        except ssl.SSLError as error:
            if error.errno != ssl.SSL_ERROR_EOF:  # that is a probe of the port
                self.log.warning("TLS handshake with %s failed: %s", conn.client, error)
            raise
        conn.data_ready = False
        return cast("ssl.SSLSocket", conn.sock).pending() > 0 or conn.wait_for_data(0)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On SIGTERM fail readiness, and begin to stop when the endpoints have had time to lose this replica."""
        service: Service | None = self.app.service
        if service is None or service.gate.leaving:
            self._stop(sig, frame)
            return
        service.gate.leave()
        timer = threading.Timer(self.app.settings.drain, self._stop, (sig, frame))
        timer.daemon = True  # a second signal stops at once, and must not wait for this one
        timer.start()

    def _stop(self, sig: int, frame: FrameType | None) -> None:
        if self.app.service is not None:
            self.app.service.gate.close()
        self.app.stopping.set()
        self.method_queue.defer(self._close_unused)
        super().handle_exit(sig, frame)

    def _close_unused(self) -> None:
        """Let connections without a first request end soon: gunicorn would wait for them as long as it may."""
        deadline = time.monotonic() + LINGER
        for conn in self.pending_conns:
            conn.timeout = min(conn.timeout or deadline, deadline)


class HonourClose:
    """Lets the application end a connection: gunicorn drops ``Connection: close`` unless its response is told."""

    def __init__(self, app: WSGIApplication) -> None:
        self._app = app

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request."""

        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            if status.startswith("5") and ("Connection", "close") in headers:
                response = cast("Response", getattr(start_response, "__self__"))  # noqa: B009  # no such attribute in types
                response.force_close()
            return start_response(status, headers, *rest)

        return self._app(environ, cast("StartResponse", start))
