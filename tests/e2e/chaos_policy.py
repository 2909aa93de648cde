"""Somebody else's validating webhook, slow and sometimes against it: pods are charged long before they are stored."""

from __future__ import annotations

import base64
import json
import random
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.e2e.rest import Json

ASKS = "e2e.vcuda.io/policy"
"""The label of the pods that it is asked about."""

REFUSAL = "refused by another policy"
SLOWEST = 1.5
"""Seconds."""
REFUSED_PART = 0.1


class Handler(BaseHTTPRequestHandler):
    """Thinks for a while about each review."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(random.uniform(0, SLOWEST))  # noqa: S311  # a load
        allowed = random.random() > REFUSED_PART  # noqa: S311  # a load
        response = {"uid": review["request"]["uid"], "allowed": allowed, "status": {"code": 403, "message": REFUSAL}}
        body = json.dumps({**review, "request": None, "response": response}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


class Server(ThreadingHTTPServer):
    """Does not mind connections that end: the API server is killed, too."""

    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: object) -> None:
        """A connection that broke has an end, and nothing else is served on it."""


@contextmanager
def policy(directory: Path, timeout: int) -> Iterator[Json]:
    """The webhook, running, as an item of a configuration; ``directory`` holds its certificate and ``ca.crt``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    with Server(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield {
                "name": "policy.e2e.vcuda.io",
                "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
                "objectSelector": {"matchExpressions": [{"key": ASKS, "operator": "Exists"}]},
                "clientConfig": {
                    "url": f"https://127.0.0.1:{server.server_port}/",
                    "caBundle": base64.b64encode((directory / "ca.crt").read_bytes()).decode(),
                },
                "failurePolicy": "Fail",
                "sideEffects": "None",
                "admissionReviewVersions": ["v1"],
                "timeoutSeconds": timeout,
            }
        finally:
            server.shutdown()
            thread.join()
