"""Extends gunicorn's ASGI worker with limits for clients, and with a stop that loses no request.

gunicorn parses the requests, calls the application and keeps connections open. This module limits the number of
connections, the time of each wait for a client, and the bytes of incomplete requests. It also answers errors with JSON,
and drains connections at a stop. The application that handles the requests is in `webhook.server.app`.
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
from typing import TYPE_CHECKING, Any

from gunicorn.asgi.protocol import ASGIProtocol
from gunicorn.workers.gasgi import ASGIWorker

from webhook.intake.bodies import MAX_BODY
from webhook.server.app import ARRIVED, DEADLINE, error_object

if TYPE_CHECKING:
    from webhook.server.server import WebhookServer

KEEP_ALIVE_SECONDS = 120.0
"""Seconds for which an idle connection stays open. The API server closes its idle connections after 90 s
(IdleConnTimeout in client-go). So the API server never sends a request on a connection that this server has closed."""

LINGER_SECONDS = 2.0
"""Seconds for which a connection stays open after its last answer, so that the client can close it. While the server
stops, an idle connection stays open for this time too."""

MAX_UNFINISHED = 24 * 2**20  # The maximum bytes of the incomplete requests of all connections together.

# If the webhook answers before the whole body has arrived, it reads and discards at most this many more bytes of the
# body. It must read them, because most clients read an answer only after they have sent the whole body.
MAX_DISCARDED = 10 * MAX_BODY

# The size in bytes of each of a connection's three buffers: input, output, and the kernel's receive buffer. With
# asyncio's default of 256 KiB, the buffers of a thousand clients would take 250 MiB.
MAX_UNREAD = MAX_UNSENT = RECEIVE_BUFFER = 2**14

# The maximum characters of an error message. The HTTP parser's messages may repeat a long part of the request.
MAX_MESSAGE = 300

# If a client disconnects while the charge of its review may be written, the review continues for at most this many
# seconds, so that the log gets the decision.
DISCONNECT_GRACE_SECONDS = 30.0

# Seconds between the last answer and the end of a connection's output, so that the answer is sent completely.
FLUSH_SECONDS = 0.05

TICK_SECONDS = 0.25
ACCEPTED_AT_ONCE = 16

_RESET = struct.pack("ii", 1, 0)

# On Linux, the socket option TCP_INFO returns a struct tcp_info (include/uapi/linux/tcp.h). Byte 0 is the connection's
# state. Bytes 52 to 55 are the milliseconds since data last arrived. On other systems, the time at which a request is
# read counts as its time of arrival.
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_TCP_INFO_BYTES, _LAST_DATA_AT = 56, 52
_PEER_HAS_LEFT = (7, 8)  # TCP_CLOSE and TCP_CLOSE_WAIT


class Phase(Enum):
    """The phases of a connection in which the server waits for the client, each with the maximum seconds of the wait.

    A connection has no phase while its request is being decided.
    """

    HANDSHAKE = "handshake", 10.0
    FIRST = "first", KEEP_ALIVE_SECONDS  # a long time limit, because Go clients may connect before they have a request
    NEXT = "next", KEEP_ALIVE_SECONDS
    REQUEST = "request", 10.0  # 10 s are also the API server's default timeout
    RESPONSE = "response", 10.0
    CLOSING = "closing", LINGER_SECONDS  # the server waits until the client closes the connection


IDLE = (Phase.HANDSHAKE, Phase.FIRST, Phase.NEXT)


class WebhookProtocol(ASGIProtocol):
    """One client's connection."""

    worker: "WebhookWorker"
    transport: Any

    # These attributes of gunicorn's base class are declared here, because gunicorn's type stubs lack them.
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
        """Record the client's certificate, and wait for a request. asyncio calls this method after the handshake."""
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
        """Forget the connection, and cancel its review, unless the charge for the review may already be written."""
        self.worker.leave(self)
        # gunicorn would cancel the review's task only after a timeout, and would keep the TLS buffers in memory until
        # then. So hide the task from gunicorn.
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
        """Close the connection if the client has closed it. While reading is paused, asyncio does not notice this."""
        if self._reading_paused and _tcp_info(self._sock)[0] in _PEER_HAS_LEFT:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse bytes from the client. After the last answer, only count and discard the bytes.

        A client that still sends could lose the answer if the connection were closed now.
        """
        if not self._closed:
            super().data_received(data)
            return
        self.discarded += len(data)
        if self.discarded > MAX_DISCARDED:
            self.transport.abort()

    def pause_writing(self) -> None:
        """Wait until the client reads the answer. asyncio calls this when the buffer for output is full."""
        super().pause_writing()
        if not self._closed:
            self.worker.enter(self, Phase.RESPONSE)

    def reset(self) -> None:
        """Close the connection with a TCP reset, since the API server repeats its call only after a reset."""
        self.worker.leave(self)
        with suppress(OSError):  # setsockopt() fails on a socket that has just been closed
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        if self.transport is not None:
            self.transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()

    def expire(self) -> None:
        """End the connection, because a time limit has passed. An incomplete request is answered with status 408."""
        if self.phase is Phase.REQUEST:
            self.worker.overdue += 1
            self._send_error_response(408, "the request did not arrive completely in time")
            self._close_transport()
            if self._task is not None and self._has_review_to_drop():
                self._task.cancel()
        elif self.phase in (Phase.FIRST, Phase.NEXT):
            self._begin_to_close()
            self.transport.close()
        else:
            self.reset()

    # The methods below override private methods of gunicorn. So setup.cfg pins gunicorn's minor version.

    def _feed_callback_parser(self, data: bytes) -> bool:
        """Parse the next bytes of a request. Until the request is complete, the time limit of phase REQUEST applies."""
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
        """After an answer, wait for the next request, unless a part of the next request has already arrived."""
        self._scope = {}
        if self.phase is not Phase.REQUEST and not self._closed:
            self.worker.enter(self, Phase.NEXT)

    def _send_response_start(self, status: int, headers: Any, request: Any, close: bool = False) -> None:
        """Send the head of an answer, and decide whether the connection ends after this answer.

        The connection ends if the request was not read completely, if the worker stops, or if the application sets
        ``Connection: close``. gunicorn itself ignores this header of the application.
        """
        unread = not self._callback_parser.is_complete
        if close or unread or self.worker.stopping or (b"connection", b"close") in headers:
            close, self._keepalive = True, 0
        super()._send_response_start(status, headers, request, close=close)  # type: ignore[misc]

    def _send_error_response(self, status: int, message: str, extra_headers: Any = ()) -> None:  # noqa: ARG002
        """Answer a request that the parser rejects, or that is late, with the same JSON object as every other error."""
        if self._closed:
            return
        body = error_object(f"the request cannot be answered: {message}"[:MAX_MESSAGE], status)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self._safe_write(head.encode() + body)

    def _build_http_scope(self, request: Any, sockname: Any, peername: Any) -> dict[str, Any]:
        """Return gunicorn's ASGI scope of a request, plus the client certificate's common name and the arrival time."""
        scope: dict[str, Any] = super()._build_http_scope(request, sockname, peername)  # type: ignore[misc]
        # A suspended or overloaded replica reads a request long after its arrival. So ask the kernel for the time of
        # arrival.
        arrived = time.monotonic() - _tcp_info(self._sock)[1]
        tls = {"client_cert_name": self.client_name}  # the key is named as in ASGI's TLS extension
        scope["extensions"] = {"tls": tls, ARRIVED: arrived}
        self._scope = scope
        return scope

    def _is_websocket_upgrade(self, request: Any) -> bool:  # noqa: ARG002
        return False  # a server may ignore a request to upgrade (RFC 9110, section 7.8)

    def _close_transport(self) -> None:
        if self._closed or self.transport is None:
            return
        self._begin_to_close()
        if self._callback_parser.is_complete:
            self.transport.close()
        else:
            # If the socket were closed while the client still sends, the kernel would send a TCP reset, and the client
            # could lose the answer.
            self._resume_reading()
            self.worker.loop.call_later(FLUSH_SECONDS, self._end_output)

    def _begin_to_close(self) -> None:
        self._closed = True
        self.worker.enter(self, Phase.CLOSING)
        if self._body_receiver is not None:
            self._body_receiver.signal_disconnect()
        # Wake gunicorn's task of this connection. Otherwise the task would end only after a grace period.
        self._request_ready.set()

    def _end_output(self) -> None:
        # Shut down only the output, so that the client's bytes are still read. asyncio's TLS transport has no method
        # for this, so shut down the output of the socket itself.
        if not self.transport.is_closing():
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError:
                self.transport.abort()


class WebhookWorker(ASGIWorker):
    """The process that serves requests. At a stop it first fails its readiness check, and still answers requests."""

    app: "WebhookServer"
    loop: Any
    sockets: Any
    _quick_shutdown: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stopping = False
        self.shed = self.overdue = self._unfinished = 0
        self.client_expiry = math.nan  # the Unix time at which the last presented client certificate expires
        self._waiting: dict[Phase, OrderedDict[WebhookProtocol, None]] = {phase: OrderedDict() for phase in Phase}

    @property
    def connections(self) -> int:
        """The number of open connections, including connections in a TLS handshake."""
        return self.nr_conns + len(self._waiting[Phase.HANDSHAKE])

    def enter(self, connection: WebhookProtocol, phase: Phase) -> None:
        """Begin a phase (time-limited wait) of a connection. Each phase has its connections in order of deadlines."""
        self.leave(connection)
        connection.phase, connection.deadline = phase, self.loop.time() + phase.value[1]
        self._waiting[phase][connection] = None

    def leave(self, connection: WebhookProtocol) -> None:
        """End the phase (time-limited wait) of a connection that is closed, or whose request is being decided."""
        if connection.phase is not None:
            del self._waiting[connection.phase][connection]
            connection.phase = None
            self._unfinished -= connection.received
            connection.received = 0

    def note_received(self, connection: WebhookProtocol, size: int) -> None:
        """Count bytes of an incomplete request. If all incomplete requests together are too large, end the oldest."""
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
            except OSError as error:  # the server must survive a network error and a lack of file descriptors
                self.log.warning("a connection could not be accepted: %s", error)
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
        """Make the TLS handshake with the newest certificate. Open connections keep their earlier certificate."""
        try:
            await self.loop.connect_accepted_socket(
                lambda: connection, sock, ssl=self.app.certificate.current(), ssl_shutdown_timeout=LINGER_SECONDS
            )
        except OSError as error:
            # Only TLS errors are logged. A client that disconnects during the handshake, such as a port probe, is not.
            if isinstance(error, ssl.SSLError) and error.errno != ssl.SSL_ERROR_EOF:
                self.log.warning("TLS handshake with %s failed: %s", peer, error)
        finally:
            connection.handshake = None
            if connection.transport is None:
                self.leave(connection)
                sock.close()

    def _shed_one(self) -> None:
        """Close the oldest connection in the phase with the most connections. Clients that open too many lose most."""
        crowd = max(self._waiting.values(), key=len)
        if crowd:
            self.shed += 1
            next(iter(crowd)).reset()

    async def _serve(self) -> None:
        """Serve until the worker must stop or its parent process has ended. Then end the remaining connections."""
        for listener in self.sockets:
            # Each accepted socket inherits the size of the receive buffer, which bounds the bytes of a single read.
            listener.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
            self.loop.add_reader(listener.sock, self._accept, listener.sock)
        while self.alive and not self.stopping and self.ppid == os.getppid():
            await self._tick()
        for listener in self.sockets:
            self.loop.remove_reader(listener.sock)
            listener.close()
        # Idle connections stay open for a moment. If a request arrives on such a connection, the worker answers 503,
        # and the API server repeats the request on another connection.
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
        """On SIGTERM, fail readiness. Stop later, when the Service no longer routes requests to this replica."""
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
        # Keep gunicorn's flag ``alive``. Without it, gunicorn would close idle connections early and lose requests.
        self.stopping = True


def _tcp_info(sock: socket.socket) -> tuple[int, float]:
    """Return the state of a TCP connection, and the seconds since it last received data; zeros if they are unknown."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _TCP_INFO_BYTES) if _TCP_INFO is not None else b""
    except OSError:  # getsockopt() fails on a socket that has just been closed
        info = b""
    if len(info) < _TCP_INFO_BYTES:
        return 0, 0.0
    return info[0], struct.unpack_from("=I", info, _LAST_DATA_AT)[0] / 1000
