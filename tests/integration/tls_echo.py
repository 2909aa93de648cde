"""A TLS server for tests, over a context that may be another one for each connection."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread


class Echo:
    """Asks for the context once a connection, as gunicorn does, and sends back what it gets."""

    def __init__(self, current: Callable[[], ssl.SSLContext], host: str) -> None:
        self._current = current
        self._listener = socket.create_server((host, 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._stopping = Event()
        self._threads: list[Thread] = []
        self._accepting = Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            if self._stopping.is_set():
                near.close()
                return
            thread = Thread(target=self._answer, args=(near,))
            self._threads.append(thread)
            thread.start()

    def _answer(self, near: socket.socket) -> None:
        try:
            with self._current().wrap_socket(near, server_side=True) as connection:
                while received := connection.recv(64):
                    connection.sendall(received)
        except OSError:  # a client that refused the handshake; the client's side raises why
            near.close()

    def connect(self, client: ssl.SSLContext) -> ssl.SSLSocket:
        """Connect and check that the certificate is for 127.0.0.1; raises ssl.SSLError."""
        near = socket.create_connection(self._listener.getsockname())
        try:
            return client.wrap_socket(near, server_hostname="127.0.0.1")
        except OSError:
            near.close()
            raise

    def close(self) -> None:
        """Wait for every connection to end, then stop listening; the clients close theirs first."""
        self._stopping.set()
        socket.create_connection(self._listener.getsockname()).close()
        for thread in (self._accepting, *self._threads):
            thread.join()
        self._listener.close()


@contextmanager
def echoing(current: Callable[[], ssl.SSLContext], host: str = "127.0.0.1") -> Iterator[Echo]:
    """A server that is closed at the end of the block."""
    server = Echo(current, host)
    try:
        yield server
    finally:
        server.close()


def echo(connection: ssl.SSLSocket, text: bytes) -> bytes:
    """Send at most 64 bytes and return what comes back."""
    connection.sendall(text)
    return connection.recv(64)
