"""Acts as kube-proxy for a Service: accepts connections at one address, and forwards each to an endpoint.

A connection stays with its endpoint, even if the endpoint is removed.
"""

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator

CHUNK = 2**16


class Balancer:
    """A proxy that listens at ``port`` of ``host``. Its endpoints are local ports, which a test adds and removes."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._listener = socket.create_server((host, port), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._endpoints: list[int] = []
        self._turns = itertools.count()
        self._open: set[socket.socket] = set()
        self._changed = threading.Lock()
        threading.Thread(target=self._accept, name="balancer", daemon=True).start()

    def add(self, port: int) -> None:
        with self._changed:
            self._endpoints.append(port)

    def remove(self, port: int) -> None:
        """Remove this port from the endpoints. Only new connections are affected. An unknown port is ignored."""
        with self._changed:
            self._endpoints = [each for each in self._endpoints if each != port]

    def endpoints(self) -> list[int]:
        with self._changed:
            return list(self._endpoints)

    def hang_up(self) -> None:
        with self._changed:
            still_open = tuple(self._open)
        for each in still_open:
            end(each)

    def disconnect(self) -> list[int]:
        ports = self.endpoints()
        for port in ports:
            self.remove(port)
        self.hang_up()
        return ports

    def close(self) -> None:
        end(self._listener)
        self.hang_up()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._hand_over(client)

    def _hand_over(self, client: socket.socket) -> None:
        """Forward a client's connection to the next endpoint. Close it if there is no endpoint, or if it is down."""
        endpoints = self.endpoints()
        try:
            if not endpoints:
                raise ConnectionRefusedError
            server = socket.create_connection(("127.0.0.1", endpoints[next(self._turns) % len(endpoints)]))
        except OSError:
            client.close()
            return
        with self._changed:
            self._open |= {client, server}
        for one, other in ((client, server), (server, client)):
            threading.Thread(target=self._pump, args=(one, other), name="connection", daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):  # after an error on one connection, both are closed below
            while data := one.recv(CHUNK):
                other.sendall(data)
        for each in (one, other):
            end(each)
        with self._changed:
            self._open -= {one, other}


def end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # another thread may have closed this connection
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


@contextlib.contextmanager
def balancing(host: str = "127.0.0.1", port: int = 0) -> Iterator[Balancer]:
    balancer = Balancer(host, port)
    try:
        yield balancer
    finally:
        balancer.close()
