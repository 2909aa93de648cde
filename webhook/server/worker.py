"""gunicorn's ASGI worker with what it lacks: bounds on clients, and a stop that loses no request.

gunicorn parses the requests, calls the application and keeps connections. Added here: how many connections there may
be, how long each step of a client may take, how much of unfinished requests is held, errors as JSON, and the drain.
"""

import asyncio
import errno
import math
import os
import socket
import ssl
import struct
import time
from collections import OrderedDict
from contextlib import suppress
from enum import Enum
from http import HTTPStatus
from typing import Any

from gunicorn.asgi.protocol import ASGIProtocol
from gunicorn.workers.gasgi import ASGIWorker

from webhook.intake.bodies import MAX_BODY
from webhook.server.app import ARRIVED, DEADLINE, error_object
from webhook.server.application import ServedApplication

KEEP_ALIVE_SECONDS = 120.0
"""Longer than the API server's 90 (IdleConnTimeout in client-go), so that it never sends into a closed connection."""

LINGER_SECONDS = 2.0
"""How long a connection stays open after its last answer, or, without a request, after the server began to stop."""

# Bytes of requests that are not whole, of all connections together.
MAX_UNFINISHED = 24 * 2**20

# Bytes of one body that are thrown away, since most clients look for an answer only when all of it is sent.
MAX_DISCARDED = 10 * MAX_BODY

# Bytes of one connection that are taken before the application asks for them, and that are kept for its peer. What one
# read brings is bounded by the socket's buffer: asyncio's own, of 256 KiB each, are 250 MiB for a thousand senders.
MAX_UNREAD = MAX_UNSENT = RECEIVE_BUFFER = 2**14

# Letters of an error; the parser's repeat what was sent, which may be long.
MAX_MESSAGE = 300

# For how long a request whose client has gone is still decided if its charge may be written already: it is logged so.
DISCONNECT_GRACE_SECONDS = 30.0

# How long what was written just now may take to leave the process, before its connection's output is shut down.
FLUSH_SECONDS = 0.05

TICK_SECONDS = 0.25
ACCEPTED_AT_ONCE = 16

_RESET = struct.pack("ii", 1, 0)

# Linux' struct tcp_info (include/uapi/linux/tcp.h): the state in its first byte, and in milliseconds how long ago the
# last data came. No other system tells so; there a request counts as arrived when it is read.
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_TCP_INFO_BYTES, _LAST_DATA_AT = 56, 52
_PEER_HAS_LEFT = (7, 8)  # TCP_CLOSE and TCP_CLOSE_WAIT


class Phase(Enum):
    """What a connection waits for, and for how many seconds as a whole, however often something moves.

    One for which something is being decided is in none of these.
    """

    HANDSHAKE = "handshake", 10.0
    FIRST = "first", KEEP_ALIVE_SECONDS  # the first byte of all: Go's transport opens connections that it does not use
    NEXT = "next", KEEP_ALIVE_SECONDS  # the first byte of another request
    REQUEST = "request", 10.0  # the rest of a request; the API server's own default for the whole call
    RESPONSE = "response", 10.0  # its peer to take an answer
    CLOSING = "closing", LINGER_SECONDS  # its peer to have read the last answer, and to close


IDLE = (Phase.HANDSHAKE, Phase.FIRST, Phase.NEXT)


class WebhookProtocol(ASGIProtocol):
    """One client's connection."""

    worker: "WebhookWorker"
    transport: Any

    # gunicorn's own, which its type stubs do not name.
    _closed: bool
    _body_receiver: Any
    _callback_parser: Any
    _reading_paused: bool
    _request_ready: asyncio.Event
    _resume_reading: Any
    _safe_write: Any
    _task: asyncio.Task[None] | None

    def __init__(self, worker: "WebhookWorker", sock: socket.socket) -> None:
        super().__init__(worker)
        self._max_buffer_size = MAX_UNREAD
        self._sock = sock
        self.phase: Phase | None = None
        self.deadline = 0.0
        self.received = self.discarded = 0
        self.client_name: str | None = None
        self._scope: dict[str, Any] = {}
        self.handshake: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the first request: the handshake is done."""
        super().connection_made(transport)
        self.transport.set_write_buffer_limits(high=MAX_UNSENT)
        self.transport.set_read_buffer_limits(high=MAX_UNREAD)
        presented = self.transport.get_extra_info("peercert")
        if presented:
            names = [value for part in presented["subject"] for key, value in part if key == "commonName"]
            self.client_name = names[-1] if names else ""
            self.worker.client_expiry = ssl.cert_time_to_seconds(presented["notAfter"])
        self.worker.enter(self, Phase.FIRST)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, and drop its review unless a charge for it may be written already."""
        self.worker.leave(self)
        # gunicorn's own timer would keep all of the connection, its TLS buffers too, for as long as the grace period.
        task, self._task = self._task, None
        super().connection_lost(exc)
        if task is not None and not task.done():
            if self._has_review_to_drop():
                task.cancel()
            else:
                cancelling = self.worker.loop.call_later(DISCONNECT_GRACE_SECONDS, task.cancel)
                task.add_done_callback(lambda _: cancelling.cancel())
        self._request_ready.set()

    def _has_review_to_drop(self) -> bool:
        deadline = self._scope.get("extensions", {}).get(DEADLINE)
        return deadline is not None and not deadline.charging

    def notice_departure(self) -> None:
        """Close it if its peer has left while nothing is read from it: only a read would tell so otherwise."""
        if self._reading_paused and _tcp_info(self._sock)[0] in _PEER_HAS_LEFT:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take bytes; after the last answer they are thrown away, since closing before could destroy that answer."""
        if not self._closed:
            super().data_received(data)
            return
        self.discarded += len(data)
        if self.discarded > MAX_DISCARDED:
            self.transport.abort()

    def pause_writing(self) -> None:
        """Begin to wait for the peer to take what it is sent."""
        super().pause_writing()
        if not self._closed:
            self.worker.enter(self, Phase.RESPONSE)

    def reset(self) -> None:
        """Close it by a reset: a request that is on its way is then known to have failed.

        After an orderly close the API server could not tell, and would not repeat the call; after a reset it does.
        """
        self.worker.leave(self)
        with suppress(OSError):  # it has just been closed, and connection_lost() is still to come
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        if self.transport is not None:
            self.transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()

    def expire(self) -> None:
        """End it, as its phase has taken too long; in the middle of a request, with an answer."""
        if self.phase is Phase.REQUEST:
            self.worker.overdue += 1
            self._send_error_response(408, "it has not come in time")
            self._close_transport()
            if self._task is not None and self._has_review_to_drop():
                self._task.cancel()
        elif self.phase in (Phase.FIRST, Phase.NEXT):
            self._begin_to_close()
            self.transport.close()
        else:
            self.reset()

    # What follows overrides parts of gunicorn that have no public name; setup.cfg pins its minor version for them.

    def _feed_callback_parser(self, data: bytes) -> bool:
        """Take bytes of requests: those that came just now, or those behind a request that is answered."""
        going_on: bool = super()._feed_callback_parser(data)  # type: ignore[misc]
        if self._closed:
            return going_on
        if self._callback_parser.is_complete:
            self.worker.leave(self)
        else:
            if self.phase is not Phase.REQUEST:
                self.worker.enter(self, Phase.REQUEST)
            self.worker.note_received(self, len(data))
        return going_on

    def _arm_keepalive_timer(self) -> None:
        """Begin to wait for another request, unless some of it is here."""
        self._scope = {}
        if self.phase is not Phase.REQUEST and not self._closed:
            self.worker.enter(self, Phase.NEXT)

    def _send_response_start(self, status: int, headers: Any, request: Any, close: bool = False) -> None:
        """Send the head of an answer, and end the connection after it where it says so, or a body is not whole.

        gunicorn goes on after an answer with ``Connection: close`` of the application's own.
        """
        unread = not self._callback_parser.is_complete
        if close or unread or self.worker.stopping or (b"connection", b"close") in headers:
            close, self._keepalive = True, 0
        super()._send_response_start(status, headers, request, close=close)  # type: ignore[misc]

    def _send_error_response(self, status: int, message: str, extra_headers: Any = ()) -> None:  # noqa: ARG002
        """Answer what the parser refuses by the same JSON object as every other error."""
        if self._closed:
            return
        body = error_object(f"the request cannot be answered: {message}"[:MAX_MESSAGE], status)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self._safe_write(head.encode() + body)

    def _build_http_scope(self, request: Any, sockname: Any, peername: Any) -> dict[str, Any]:
        """Add whose certificate the client has presented, which OpenSSL has checked, and when the request arrived."""
        scope: dict[str, Any] = super()._build_http_scope(request, sockname, peername)  # type: ignore[misc]
        # A replica that was suspended, or is overloaded, comes to a request long after the kernel has received it.
        arrived = time.monotonic() - _tcp_info(self._sock)[1]
        tls = {"client_cert_name": self.client_name}  # as in ASGI's TLS extension
        scope["extensions"] = {"tls": tls, ARRIVED: arrived}
        self._scope = scope
        return scope

    def _is_websocket_upgrade(self, request: Any) -> bool:  # noqa: ARG002
        return False  # an Upgrade may be ignored (RFC 9110, section 7.8)

    def _close_transport(self) -> None:
        if self._closed or self.transport is None:
            return
        self._begin_to_close()
        if self._callback_parser.is_complete:
            self.transport.close()
        else:
            # A close while the peer still sends makes a reset of it, which can destroy the answer before it is read.
            self._resume_reading()
            self.worker.loop.call_later(FLUSH_SECONDS, self._end_output)

    def _begin_to_close(self) -> None:
        self._closed = True
        self.worker.enter(self, Phase.CLOSING)
        if self._body_receiver is not None:
            self._body_receiver.signal_disconnect()
        # gunicorn's wait for a next request would else go on until asgi_disconnect_grace_period cancels it.
        self._request_ready.set()

    def _end_output(self) -> None:
        # Nothing more comes, but what the peer sends is still read: with asyncio's TLS that takes the socket itself.
        if not self.transport.is_closing():
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError:
                self.transport.abort()


class WebhookWorker(ASGIWorker):
    """The process that serves. It stops so that no request is lost: readiness fails first, and work goes on a while."""

    app: ServedApplication
    loop: Any
    sockets: Any
    _quick_shutdown: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stopping = False
        self.shed = self.overdue = self._unfinished = 0
        self.client_expiry = math.nan  # of the certificate that was presented last
        self._waiting: dict[Phase, OrderedDict[WebhookProtocol, None]] = {phase: OrderedDict() for phase in Phase}

    @property
    def connections(self) -> int:
        """Connections open, with those that shake hands."""
        return self.nr_conns + len(self._waiting[Phase.HANDSHAKE])

    def enter(self, connection: WebhookProtocol, phase: Phase) -> None:
        """Let a connection begin a phase. Those of one phase stand in the order of their deadlines."""
        self.leave(connection)
        connection.phase, connection.deadline = phase, self.loop.time() + phase.value[1]
        self._waiting[phase][connection] = None

    def leave(self, connection: WebhookProtocol) -> None:
        """Let a connection wait for nothing: something is being decided for it, or it is gone."""
        if connection.phase is not None:
            del self._waiting[connection.phase][connection]
            connection.phase = None
            self._unfinished -= connection.received
            connection.received = 0

    def note_received(self, connection: WebhookProtocol, size: int) -> None:
        """Count some of a request; where all together have sent too much, the oldest that is not whole is given up."""
        connection.received += size
        self._unfinished += size
        while self._unfinished > MAX_UNFINISHED:
            next(iter(self._waiting[Phase.REQUEST])).expire()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, peer = listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # of the network, or no file is left: nothing to end the server for
                self.log.warning("no connection accepted: %s", error)
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._shed_one()
                return
            sock.setblocking(False)
            connection = WebhookProtocol(self, sock)
            self.enter(connection, Phase.HANDSHAKE)
            connection.handshake = self.loop.create_task(self._shake_hands(connection, sock, peer))
            if self.connections > self.worker_connections:
                self._shed_one()

    async def _shake_hands(self, connection: WebhookProtocol, sock: socket.socket, peer: object) -> None:
        """Speak TLS from here on, with the certificate of now: open connections keep that of their handshake."""
        try:
            await self.loop.connect_accepted_socket(
                lambda: connection, sock, ssl=self.app.certificate.current(), ssl_shutdown_timeout=LINGER_SECONDS
            )
        except OSError as error:
            # A wrong certificate somewhere is logged, but not a probe of the port, which just hangs up.
            if isinstance(error, ssl.SSLError) and error.errno != ssl.SSL_ERROR_EOF:
                self.log.warning("TLS handshake with %s failed: %s", peer, error)
        finally:
            connection.handshake = None
            if connection.transport is None:
                self.leave(connection)
                sock.close()

    def _shed_one(self) -> None:
        """Close the oldest connection of the phase that has the most.

        A flood of any one kind so closes itself, and spares the API server's connections: those are few, or are used.
        """
        crowd = max(self._waiting.values(), key=len)
        if crowd:
            self.shed += 1
            next(iter(crowd)).reset()

    async def _serve(self) -> None:
        """Serve until the worker is told to stop, or gunicorn's arbiter is gone; then end what is left."""
        for listener in self.sockets:
            # What one read of a connection can bring is bounded by this, and so what many connections together can.
            listener.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
            self.loop.add_reader(listener.sock, self._accept, listener.sock)
        while self.alive and not self.stopping and self.ppid == os.getppid():
            await self._tick()
        for listener in self.sockets:
            self.loop.remove_reader(listener.sock)
            listener.close()
        # Those without a request stay a moment, for one that may be on its way: it is told to come again.
        lingering = self.loop.time() + LINGER_SECONDS
        while self.connections and not self._quick_shutdown:
            if self.loop.time() > lingering:
                for connection in [each for phase in IDLE for each in self._waiting[phase]]:
                    connection.expire()
            await self._tick()
        if self.app.service is not None:
            await self.app.service.ledgers.close()

    async def _tick(self) -> None:
        self.notify()
        now = self.loop.time()
        for phase in self._waiting.values():
            while phase and (first := next(iter(phase))).deadline <= now:
                first.expire()
        for connection in list(self._waiting[Phase.REQUEST]):
            connection.notice_departure()
        await asyncio.sleep(TICK_SECONDS)

    def handle_exit_signal(self) -> None:
        """On SIGTERM fail readiness, and begin to stop when the endpoints have had time to lose this replica."""
        service = self.app.service
        if service is None or service.gate.leaving:
            self._stop()
        else:
            service.gate.leave()
            self.loop.call_later(self.app.drain, self._stop)

    def _stop(self) -> None:
        if self.app.service is not None:
            self.app.service.gate.close()
        self.app.stopping.set()
        # gunicorn's own flag, ``alive``, would close kept connections at once, and lose the requests on their way.
        self.stopping = True


def _tcp_info(sock: socket.socket) -> tuple[int, float]:
    """Return the state of a TCP connection, and how many seconds ago its last data came; zeros if nobody tells."""
    try:
        told = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _TCP_INFO_BYTES) if _TCP_INFO is not None else b""
    except OSError:  # it has just been closed
        told = b""
    if len(told) < _TCP_INFO_BYTES:
        return 0, 0.0
    return told[0], struct.unpack_from("=I", told, _LAST_DATA_AT)[0] / 1000
