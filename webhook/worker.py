"""gunicorn's threaded worker, so that no client can hold a thread, and none is turned away because others idle.

gunicorn's own reads in its threads and waits there: as many clients that shake hands, ask, or take the answer slowly as
there are threads are the whole server. Here a thread is given what can go on at once: a step of a handshake, a request
that is here as a whole, an answer that the peer has room for. All else waits in the loop, each with a deadline.
"""

from __future__ import annotations

import errno
import socket
import ssl
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from selectors import EVENT_READ, EVENT_WRITE
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from gunicorn.http import wsgi
from gunicorn.workers import gthread

from webhook.connection import Connection
from webhook.faults import MALFORMED, fault, fault_of
from webhook.waiting import IDLE, PATIENCE, Room, Stage

if TYPE_CHECKING:
    from gunicorn.http.message import Request

    from webhook.server import WebhookServer

LINGER = 2.0
"""Seconds a stopping server keeps a connection without a request, for one that may be on its way."""

GREETERS = 2
"""Threads for handshakes: however many come at once, requests have threads of their own."""

ACCEPTED_AT_ONCE = 16

SPARE = 128
"""Connections over the most there may be that are taken all the same: to see which of all may go, they have to be."""

MOST_HELD = 64 * 2**20
"""Bytes of requests that are not whole, of all connections together."""

_WITHOUT_FILES = (errno.EMFILE, errno.ENFILE)
_UNASKED = frozenset({Stage.FIRST, Stage.NEXT})
_SERVED = _UNASKED | {Stage.REQUEST}


class Outbox:
    """Takes what gunicorn sends: an answer goes out in one piece, and no thread waits for its peer."""

    def __init__(self) -> None:
        self.data = b""

    def sendall(self, data: bytes) -> None:
        """Take some of an answer."""
        self.data += data


class PatientWorker(gthread.ThreadWorker):
    """Stops so that no request is lost: readiness fails at once, work goes on a while, late requests are sent away."""

    app: WebhookServer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.room: Room[Connection] = Room()
        self.most = self.worker_connections - SPARE
        self.shed = 0
        self.overdue = 0
        self._held = 0
        self._greeters = ThreadPoolExecutor(GREETERS, thread_name_prefix="handshake")  # no thread before the first task

    # In the threads.

    def handle(self, conn: Connection) -> Stage:  # type: ignore[override]  # its own kind of connection
        """Let a connection go on as far as it can, and return what it waits for then."""
        try:
            conn.events = EVENT_READ
            return self._go_on(conn)
        except (ssl.SSLWantReadError, BlockingIOError):
            return conn.stage
        except ssl.SSLWantWriteError:
            conn.events = EVENT_WRITE
            return conn.stage
        except OSError as error:
            self._note(conn, error)
            conn.close()  # now, not when it is the loop's turn: thousands may end together
            return Stage.CLOSED

    def _go_on(self, conn: Connection) -> Stage:
        if conn.stage in _SERVED:
            return self._serve(conn)
        if conn.stage is Stage.HELLO:
            conn.shake_hands(self.app.certificate.current())
            return conn.enter(Stage.FIRST)
        return conn.go_on() if conn.stage is Stage.ANSWER else conn.discard()

    def _serve(self, conn: Connection) -> Stage:
        try:
            request = conn.receive(self.cfg)
        except MALFORMED as error:
            self.log.info("no request from %s: %s", conn.client, error)
            return conn.answer(fault_of(error), last=True)
        if request is None:
            return Stage.AGAIN
        try:
            answer, last = self._ask(request, conn)
        except Exception:  # a fault of gunicorn's or ours outside of the application, which answers its own
            self.log.exception("Error handling request %s", request.uri)
            answer, last = fault(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; the webhook's log has it"), True
        return conn.answer(answer, last=last)

    def _ask(self, request: Request, conn: Connection) -> tuple[bytes, bool]:
        """Return the application's answer, as it goes over the wire, and whether it is the last one."""
        sent = Outbox()
        response, environ = wsgi.create(request, cast("socket.socket", sent), conn.client, conn.server, self.cfg)
        environ["wsgi.multithread"] = True
        if not self.alive:
            response.force_close()
        body = self.wsgi(environ, cast("Any", response.start_response))
        try:
            for part in body:
                response.write(part)
            response.close()
        finally:
            if hasattr(body, "close"):
                body.close()
        return sent.data, response.should_close()

    def _note(self, conn: Connection, error: OSError) -> None:
        """Log a handshake that failed, which is a wrong certificate somewhere; but not a probe of the port."""
        failed = isinstance(error, ssl.SSLError) and error.errno != ssl.SSL_ERROR_EOF
        if failed and conn.stage is Stage.HELLO:
            self.log.warning("TLS handshake with %s failed: %s", conn.client, error)

    # In the loop, which alone opens, keeps and closes connections.

    def accept(self, listener: socket.socket) -> None:
        """Take the connections that are there, and let others go where there are too many."""
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, client = listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:  # of the network, or no file is left: nothing to end the server for
                self.log.warning("no connection accepted: %s", error)
                if error.errno in _WITHOUT_FILES:
                    self._let_one_go()
                return
            self.nr_conns += 1
            self._wait(Connection(sock, client, listener.getsockname()))
            if self.nr_conns > self.most:
                self._let_one_go()

    def finish_request(self, conn: Connection, fs: Future[Stage]) -> None:  # type: ignore[override]  # as handle()
        """Go on with a connection that a thread has left."""
        stage = self._result(fs)
        self._count(conn)
        if stage is Stage.CLOSED:
            self._close(conn)
        elif stage is Stage.AGAIN:
            self._dispatch(conn)
        else:
            self._wait(conn)
        while self._held > MOST_HELD and (slow := self.room.oldest(Stage.REQUEST)):
            self._expire(slow)

    def _result(self, done: Future[Stage]) -> Stage:
        if done.cancelled():
            return Stage.CLOSED
        error = done.exception()
        if error is not None:
            self.log.error("a connection ended by a fault of ours", exc_info=error)
            return Stage.CLOSED
        return done.result()

    def _count(self, conn: Connection) -> None:
        self._held += conn.held - conn.counted
        conn.counted = conn.held

    def murder_pending(self) -> None:
        """End what has waited too long; the loop calls this after each turn."""
        for conn in self.room.expired(time.monotonic()):
            self._expire(conn)

    def murder_keepalived(self, force: bool = False) -> None:
        """End everything that waits, where the time to stop is over."""
        if force:
            for conn in self.room.idle(frozenset(PATIENCE)):
                self._leave(conn)
                self._close(conn)

    def _wait(self, conn: Connection) -> None:
        if not self.alive and conn.stage in IDLE:
            conn.deadline = min(conn.deadline, time.monotonic() + LINGER)
        self.room.enter(conn)
        self.poller.register(conn.sock, conn.events, partial(self._moved, conn))

    def _moved(self, conn: Connection, _sock: object) -> None:
        """Go on with a connection for which there is something to do; one that dawdles ends all the same."""
        if conn not in self.room:
            return  # what moved just before it has let it go
        if conn.stage not in _UNASKED and conn.deadline <= time.monotonic():
            self._expire(conn)
        else:
            self._leave(conn)
            self._dispatch(conn)

    def _dispatch(self, conn: Connection) -> None:
        pool = self._greeters if conn.stage is Stage.HELLO else self.tpool
        future = pool.submit(self.handle, conn)
        future.add_done_callback(lambda done: self.method_queue.defer(self.finish_request, conn, done))

    def _leave(self, conn: Connection) -> None:
        self.poller.unregister(conn.sock)
        self.room.leave(conn)

    def _expire(self, conn: Connection) -> None:
        """End a connection that waits; where it is in the middle of a request, with an answer."""
        self._leave(conn)
        if conn.stage is not Stage.REQUEST:
            self._close(conn)
            return
        self.overdue += 1
        try:
            conn.give_up()
        except OSError:  # it takes no answer, or is gone
            self._close(conn)
        else:
            self._count(conn)
            self._wait(conn)

    def _let_one_go(self) -> None:
        conn = self.room.most_spare()
        if conn is not None:
            self.shed += 1
            self._leave(conn)
            self._close(conn, Connection.reset)

    def _close(self, conn: Connection, end: Any = Connection.close) -> None:
        self.nr_conns -= 1
        self._held -= conn.counted
        try:
            end(conn)
        except OSError as error:
            self.log.debug("closing %s: %s", conn.client, error)

    # The stop.

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On SIGTERM fail readiness, and begin to stop when the endpoints have had time to lose this replica."""
        service = self.app.service
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
        super().handle_exit(sig, frame)

    def _cap_keepalive(self, deadline: float) -> None:
        """Let connections without a request end soon; gunicorn's loop calls this when it stops."""
        for conn in self.room.idle():
            conn.deadline = min(conn.deadline, deadline)
