"""A test double of an API server that hangs. It answers the request for its version, and no other request."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

VERSION = b'{"gitVersion": "v1.37.2"}'
"""The answer to the request for the version, which each of our programs makes first and waits for."""


class Silence:
    """A server that answers the request for the version. It keeps the connections of all other requests open, without
    an answer, until the test closes them.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._held: dict[str, list[socket.socket]] = {}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self._listener.getsockname())

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            with near.makefile("rb") as stream:
                line = stream.readline().decode()
            if not line:  # close() connects without a request, to end this loop
                near.close()
                return
            if "/version" in line:
                near.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(VERSION), VERSION))
                near.close()
                continue
            with self._changed:
                self._held.setdefault(line.split()[1].partition("?")[0], []).append(near)
                self._changed.notify_all()

    def await_request(self, path: str, patience: float) -> None:
        """Wait until a client has requested ``path``. Raises TimeoutError after ``patience`` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: path in self._held, patience):
                raise TimeoutError(f"no request for {path}, only for {sorted(self._held)}")

    def hang_up(self, path: str) -> None:
        with self._changed:
            for near in self._held.pop(path):
                near.close()

    def close(self) -> None:
        socket.create_connection(self._listener.getsockname()).close()
        self._thread.join()
        self._listener.close()
        for path in list(self._held):
            self.hang_up(path)


@contextmanager
def silence() -> Iterator[Silence]:
    server = Silence()
    try:
        yield server
    finally:
        server.close()
