"""A server of the tests' own that answers each POST of JSON with JSON: other people's webhooks and extenders."""

import base64
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.e2e.cluster import Json, webhook

Answer = Callable[[str, Json], Json]
"""The answer to a body that was sent to a path; called in a thread for each connection."""


class Server(ThreadingHTTPServer):
    """Does not mind connections that end: tests kill the API server, too."""

    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: object) -> None:
        """A connection that broke has an end, and nothing else is served on it."""


@contextmanager
def answering(answer: Answer, certificates: Path | None = None) -> Iterator[str]:
    """Serve ``answer`` on a free port and yield the URL; over TLS with tls.crt and tls.key of ``certificates``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps(answer(self.path.partition("?")[0], asked)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    with Server(("127.0.0.1", 0), Handler) as server:
        if certificates:
            # The thread of a connection shakes hands: one that says nothing holds up no other.
            context = tls(certificates)
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, name="json server")
        thread.start()
        try:
            yield f"{'https' if certificates else 'http'}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def tls(certificates: Path) -> ssl.SSLContext:
    """For a server, with tls.crt and tls.key of this directory."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "tls.crt", certificates / "tls.key")
    return context


def reviewed(review: Json, *, allowed: bool = True, **fields: object) -> Json:
    response = {"uid": review["request"]["uid"], "allowed": allowed, **fields}
    return {"apiVersion": review["apiVersion"], "kind": review["kind"], "response": response}


def ca_bundle(certificates: Path) -> str:
    """What a webhook's caller has to trust, as a configuration holds it: the ca.crt of this directory."""
    return base64.b64encode((certificates / "ca.crt").read_bytes()).decode()


def asks_about_pods(name: str, url: str, certificates: Path, label: str, **fields: object) -> Json:
    """A webhook, as an item of a configuration, that is asked about new pods with ``label``, and has to answer.

    ``certificates`` has the ca.crt that its caller trusts.
    """
    selected = {"objectSelector": {"matchExpressions": [{"key": label, "operator": "Exists"}]}}
    return webhook(name, url, ca_bundle(certificates), **selected, **fields)
