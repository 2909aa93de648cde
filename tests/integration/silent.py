"""An API server that hangs: it accepts requests, and answers only the request for its version."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

VERSION = b'{"gitVersion": "v1.37.2"}'
"""A component requests the version first, and waits for the answer."""


class Silence:
    """Keeps every other connection open until the test closes it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._held: dict[str, list[socket.socket]] = {}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    @property
    def url(self) -> str:
        """Return its URL, without TLS."""
        return "http://{}:{}".format(*self._listener.getsockname())

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            with near.makefile("rb") as stream:
                line = stream.readline().decode()
            if not line:  # from close()
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
        """Return when a client waits for an answer about ``path``. Raises TimeoutError after ``patience`` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: path in self._held, patience):
                raise TimeoutError(f"no request for {path}, only for {sorted(self._held)}")

    def hang_up(self, path: str) -> None:
        """Close the connections that wait for an answer about ``path``."""
        with self._changed:
            for near in self._held.pop(path):
                near.close()

    def close(self) -> None:
        """Close all connections, and stop listening."""
        socket.create_connection(self._listener.getsockname()).close()
        self._thread.join()
        self._listener.close()
        for path in list(self._held):
            self.hang_up(path)


@contextmanager
def silence() -> Iterator[Silence]:
    """Run a hung API server during the ``with`` statement."""
    server = Silence()
    try:
        yield server
    finally:
        server.close()
