"""A server that answers each POST of JSON with JSON, instead of another project's webhook or scheduler extender."""

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
"""A function that takes the path and body of a request, and returns the answer. Several threads may call it."""


class Server(ThreadingHTTPServer):
    """A server that ignores errors of broken connections. They occur because tests also kill the API server."""

    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: object) -> None:
        """Ignore the error of a broken connection instead of printing it."""


@contextmanager
def answering(answer: Answer, certificates: Path | None = None) -> Iterator[str]:
    """Serve ``answer`` on a free port, and yield the URL. ``certificates``: a directory with tls.crt and tls.key."""

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
            """Log nothing, because no test reads this server's log."""

    with Server(("127.0.0.1", 0), Handler) as server:
        if certificates:
            # Each connection makes its TLS handshake in its own thread, so that a silent client does not delay others.
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
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "tls.crt", certificates / "tls.key")
    return context


def reviewed(review: Json, *, allowed: bool = True, **fields: object) -> Json:
    response = {"uid": review["request"]["uid"], "allowed": allowed, **fields}
    return {"apiVersion": review["apiVersion"], "kind": review["kind"], "response": response}


def ca_bundle(certificates: Path) -> str:
    return base64.b64encode((certificates / "ca.crt").read_bytes()).decode()


def asks_about_pods(name: str, url: str, certificates: Path, label: str, **fields: object) -> Json:
    """Return a webhook for new pods with ``label``, as an item of a webhook configuration.

    If the call fails, the API server rejects the pod.

    ``certificates``: a directory with the ca.crt that the API server trusts.
    """
    selected = {"objectSelector": {"matchExpressions": [{"key": label, "operator": "Exists"}]}}
    return webhook(name, url, ca_bundle(certificates), **selected, **fields)
