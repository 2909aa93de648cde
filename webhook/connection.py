"""One client's TLS connection, never waited for: what cannot go on now says so, and goes on later."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from http import HTTPStatus
from selectors import EVENT_READ
from typing import TYPE_CHECKING

from webhook.arrival import Arrival
from webhook.faults import fault
from webhook.waiting import PATIENCE, Stage

if TYPE_CHECKING:
    from gunicorn.config import Config
    from gunicorn.http.message import Request

PART = 2**16
TURN = 64
"""Parts of up to 16 KiB, one TLS record each, that one connection may read before it is another's turn."""

_RESET = struct.pack("ii", 1, 0)


class Gone(ConnectionError):
    """The peer has closed the connection."""


class Connection:
    """A client, and how far it is. The thread that serves it and the loop that waits for it take turns."""

    def __init__(self, sock: socket.socket, client: tuple[str, int], server: tuple[str, int]) -> None:
        self.sock = sock
        self.client = client
        self.server = server
        self.events = EVENT_READ
        self.stage = Stage.HELLO
        self.deadline = 0.0
        self.counted = 0
        self._arrival: Arrival | None = None
        self._unsent = b""
        self._last = False
        sock.setblocking(False)
        self.enter(Stage.HELLO)

    @property
    def held(self) -> int:
        """Bytes of a request that is not whole yet."""
        return self._arrival.held if self._arrival else 0

    def enter(self, stage: Stage) -> Stage:
        """Begin a stage, with all the patience there is for it."""
        self.stage = stage
        self.deadline = time.monotonic() + PATIENCE[stage]
        return stage

    def shake_hands(self, context: ssl.SSLContext) -> None:
        """Go on with the handshake.

        Raises:
            SSLWantReadError, SSLWantWriteError: it is the peer's turn.
            OSError: it has failed, or the peer is gone.

        """
        if not isinstance(self.sock, ssl.SSLSocket):
            self.sock = context.wrap_socket(self.sock, server_side=True, do_handshake_on_connect=False)
        self.sock.do_handshake()

    def receive(self, cfg: Config) -> Request | None:
        """Return the next request once all of it is here; None where it is another connection's turn.

        Raises:
            SSLWantReadError, SSLWantWriteError: it is the peer's turn.
            OSError: it has failed, or the peer is gone.
            faults.MALFORMED: it is no request.

        """
        arrival = self._arrival or Arrival(cfg, self.client)
        self._arrival = arrival
        for _ in range(TURN):
            if arrival.begun:
                if self.stage is not Stage.REQUEST:
                    self.enter(Stage.REQUEST)
                request = arrival.next()
                if request is not None:
                    return request
                if arrival.awaits_continue():
                    self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            data = self.sock.recv(PART)
            if not data:
                raise Gone
            arrival.feed(data)
        return None

    def answer(self, data: bytes, *, last: bool) -> Stage:
        """Send an answer, the last one or not; return what comes next.

        Raises:
            SSLWantWriteError: the peer has to take some of it first.
            OSError: the peer is gone.

        """
        self._last = last or self._arrival is None or not self._arrival.finish()
        self._unsent += data
        return self.go_on()

    def go_on(self) -> Stage:
        """Send what is left of an answer; raises as ``answer`` does."""
        try:
            self.send(b"")
        except ssl.SSLWantWriteError:
            if self.stage is not Stage.ANSWER:
                self.enter(Stage.ANSWER)
            raise
        if self._last:
            return self._part()
        self.enter(Stage.NEXT)
        return Stage.AGAIN if self._arrival and self._arrival.begun else Stage.NEXT

    def send(self, data: bytes) -> None:
        """Send this behind what is unsent; raises as ``answer`` does."""
        self._unsent += data
        while self._unsent:
            self._unsent = self._unsent[self.sock.send(self._unsent) :]

    def discard(self) -> Stage:
        """Read what still comes after the last answer, and throw it away.

        Raises:
            BlockingIOError: more may come.
            OSError: the peer is gone.

        """
        for _ in range(TURN):
            if not self.sock.recv(PART):
                return Stage.CLOSED
        return Stage.AGAIN

    def give_up(self) -> None:
        """Tell the peer, if it takes it at once, that its request takes too long. Raises OSError where it does not."""
        self.sock.send(fault(HTTPStatus.REQUEST_TIMEOUT, "the request has not come in time"))
        self._part()

    def _part(self) -> Stage:
        self._arrival = None
        self.sock.shutdown(socket.SHUT_WR)
        return self.enter(Stage.PARTING)

    def close(self) -> None:
        """Close it; what the peer has not read of the last answer may be lost."""
        self.sock.close()

    def reset(self) -> None:
        """Close it by a reset: a request that is on its way is then known to have failed.

        After an orderly close the API server could not tell, and would not repeat the call; after a reset it does.
        """
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        finally:
            self.sock.close()
