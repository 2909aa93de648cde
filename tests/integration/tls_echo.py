"""A TLS server for tests, in which a test can change the certificate between two connections."""

import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any


class Echo(ThreadingTCPServer):
    """A TLS server that sends back its input. Each new connection gets the current TLS context, as in the webhook."""

    def __init__(self, current: Callable[[], ssl.SSLContext], host: str) -> None:
        super().__init__((host, 0), BaseRequestHandler)
        self._current = current
        self.address = "{}:{}".format(*self.socket.getsockname())

    def finish_request(self, request: Any, client_address: object) -> None:  # noqa: ARG002
        # A failed handshake is ignored here, because the client in the test reports its reason.
        with suppress(OSError), self._current().wrap_socket(request, server_side=True) as connection:
            while received := connection.recv(64):
                connection.sendall(received)

    def connect(self, client: ssl.SSLContext, hostname: str = "127.0.0.1") -> ssl.SSLSocket:
        """Connect to the server. Raises ssl.SSLError if its certificate is not for this name."""
        near = socket.create_connection(self.socket.getsockname())
        try:
            return client.wrap_socket(near, server_hostname=hostname)
        except OSError:
            near.close()
            raise


@contextmanager
def echoing(current: Callable[[], ssl.SSLContext], host: str = "127.0.0.1") -> Iterator[Echo]:
    """Run a TLS server during the ``with`` statement. At its end, wait until the clients have disconnected."""
    with Echo(current, host) as server:
        serving = Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield server
        finally:
            server.shutdown()
            serving.join()


def echo(connection: ssl.SSLSocket, text: bytes) -> bytes:
    connection.sendall(text)
    return connection.recv(64)
