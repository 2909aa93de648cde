"""A proxy between a client and the real API server. It drops replies to requests that a test chooses."""

import http.server
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import urllib3

from tests.e2e.cluster import Cluster
from tests.e2e.installation import make_certificates
from tests.e2e.json_server import tls
from tools.control_plane import write_kubeconfig

PASSED_ON = ("Authorization", "Content-Type", "Accept")
CHUNK = 65536


@dataclass
class Losses:
    """The replies that the proxy drops, in the order of ``wanted``.

    ``wanted``: pairs (method, text in the path). The reply to the next request that matches the first pair is dropped,
    and the pair is removed. ``lost``: pairs (method, path) of the dropped replies.
    """

    wanted: list[tuple[str, str]] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def takes(self, method: str, path: str) -> bool:
        with self._lock:
            hit = bool(self.wanted) and method == self.wanted[0][0] and self.wanted[0][1] in path
            if hit:
                self.lost.append(self.wanted.pop(0))
            return hit

    def delays(self, method: str, path: str) -> tuple[float, float]:  # noqa: ARG002  # subclasses use the arguments
        """Return two delays in seconds: of the request, and of its reply."""
        return 0, 0


LOST_PART, LATE_PART, LATEST = 0.15, 0.1, 8.0


@dataclass
class RandomLosses(Losses):
    """Drops random replies to ledger writes, and delays random requests and replies.

    A delay is at most ``LATEST`` seconds. This is long enough for the client to give up the call and send other
    requests.
    """

    late: int = 0

    def takes(self, method: str, path: str) -> bool:
        hit = self._concerns(method, path) and random.random() < LOST_PART  # noqa: S311  # random load
        if hit:
            self.lost.append((method, path))
        return hit

    def delays(self, method: str, path: str) -> tuple[float, float]:
        kind = random.random() if self._concerns(method, path) else 1  # noqa: S311  # random load
        seconds = random.uniform(0, LATEST)  # noqa: S311  # random load
        self.late += kind < 2 * LATE_PART
        return (seconds if kind < LATE_PART else 0), (seconds if LATE_PART <= kind < 2 * LATE_PART else 0)

    def _concerns(self, method: str, path: str) -> bool:
        return method in ("POST", "PUT") and "/configmaps" in path


@contextmanager
def lossy_proxy(cluster: Cluster, directory: Path, losses: Losses) -> Iterator[Path]:
    """Run a proxy to the API server of ``cluster``. Yield the proxy's kubeconfig, with the cluster's user.

    ``directory``: a new directory for certificates.
    """
    with urllib3.PoolManager(ca_certs=str(cluster.ca_file), maxsize=64) as upstream:
        server = Server(cluster.server, upstream, losses)
        make_certificates(directory)
        # The TLS handshake runs in the connection's own thread, so that a killed client does not delay other clients.
        server.socket = tls(directory).wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        kubeconfig = directory / "kubeconfig"
        write_kubeconfig(kubeconfig, f"https://127.0.0.1:{server.server_port}", directory / "ca.crt", cluster.token)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield kubeconfig
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class Server(http.server.ThreadingHTTPServer):
    """The server of the proxy. Closing it ends the watches that it relays."""

    block_on_close = True
    daemon_threads = False

    def __init__(self, target: str, upstream: urllib3.PoolManager, losses: Losses) -> None:
        self.target, self.upstream, self.losses = target, upstream, losses
        self.closing = threading.Event()
        self.open: set[urllib3.BaseHTTPResponse] = set()
        super().__init__(("127.0.0.1", 0), Handler)

    def server_close(self) -> None:
        self.closing.set()
        for reply in tuple(self.open):
            reply.shutdown()
        super().server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    """Handles one connection of the client to the proxy."""

    protocol_version = "HTTP/1.1"
    server: Server

    def relay(self) -> None:
        """Relay one request to the API server, and its reply to the client.

        To drop a reply, close the client's connection after the API server has answered.
        """
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        held, held_back = self.server.losses.delays(self.command, self.path)
        self.server.closing.wait(held)
        try:
            reply = self.server.upstream.request(
                self.command,
                self.server.target + self.path,
                body=body,
                headers={name: self.headers[name] for name in PASSED_ON if name in self.headers},
                preload_content=False,
                retries=False,
            )
        except urllib3.exceptions.HTTPError:
            self.close_connection = True  # the API server does not run, so the client loses its connection
            return
        self.server.open.add(reply)
        try:
            if self.server.losses.takes(self.command, self.path):
                reply.read()
                self.close_connection = True
            else:
                self.server.closing.wait(held_back)
                self.pass_back(reply)
        except (urllib3.exceptions.HTTPError, OSError):
            self.close_connection = True  # the client or the API server has closed its connection; close the other
        finally:
            self.server.open.discard(reply)
            reply.release_conn()

    def pass_back(self, reply: urllib3.BaseHTTPResponse) -> None:
        """Relay the reply in chunks as they arrive. The reply to a watch has no end."""
        # `send_response` would write the time of the proxy in the header Date. But replicas measure the age of their
        # reservations by the API server's Date.
        self.send_response_only(reply.status)
        for name in ("Date", "Content-Type", "Retry-After"):
            if name in reply.headers:
                self.send_header(name, reply.headers[name])
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in reply.stream(CHUNK):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        self.wfile.write(b"0\r\n\r\n")

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = relay  # noqa: N815  # http.server requires the names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # http.server chose this name
        """Log nothing. The tests only read the logs of the webhook."""
