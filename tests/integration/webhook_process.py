"""``vcuda-webhook serve`` as a process of its own: started, asked over TLS as the API server asks, and stopped."""

from __future__ import annotations

import http.client
import json
import ssl
import sysconfig
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from tests.integration.reviews import Json, patched, review_of, with_uid
from tests.processes import PATIENCE, OwnProcess, Reply

PROGRAM = Path(sysconfig.get_path("scripts"), "vcuda-webhook")
JSON_TYPE = {"Content-Type": "application/json"}

Body = bytes | str | Iterable[bytes] | None


class WebhookProcess(OwnProcess):
    """A running server. ``ca`` is the file that signs its certificate; without it, that of the run is taken."""

    def __init__(self, flags: Iterable[str | Path], ca: Path | None, env: Mapping[str, str]) -> None:
        defaults = {"VCUDA_BIND": "127.0.0.1:0", "VCUDA_DRAIN_SECONDS": "0"}
        super().__init__((PROGRAM, "serve", *flags), {**defaults, **env})
        with self.starting():
            self.url: str = self.await_log("listening")["url"]
            made = ca or self.await_log("certificate made for this run")["ca"]
            self.tls = ssl.create_default_context(cafile=made)

    def connect(self) -> http.client.HTTPSConnection:
        """A connection of the caller's own, to be closed by it."""
        host = urllib.parse.urlsplit(self.url).netloc
        return http.client.HTTPSConnection(host, context=self.tls, timeout=PATIENCE)

    def send(self, method: str, path: str, body: Body = None, headers: Mapping[str, str] = JSON_TYPE) -> Reply:
        """Make one request on a new connection."""
        with closing(self.connect()) as connection:
            return exchange(connection, method, path, body, headers)

    def get(self, path: str) -> Reply:
        """GET on a new connection."""
        return self.send("GET", path)

    def review(self, path: str, subject: object, **fields: object) -> Json:
        """Return the response to a review of the creation of ``subject``, checked to be of the right form."""
        asked = review_of(subject, **fields)
        reply = self.send("POST", path, json.dumps(asked))
        assert reply.status == http.HTTPStatus.OK, reply
        answer = reply.decoded()
        assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        response: Json = answer["response"]
        assert response["uid"] == asked["request"]["uid"]
        return response

    def admit(self, pod: Json, **fields: object) -> Json:
        """Take a pod through /mutate and /validate as the API server does; return the last response."""
        response = self.review("/mutate", pod, **fields)
        if not response["allowed"]:
            return response
        return self.review("/validate", with_uid(patched(pod, response)), **fields)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name that have these labels."""
        return sum(self.get("/metrics").samples(name, labels))

    def worker(self) -> int:
        """The process id of gunicorn's one worker."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


@contextmanager
def serving(
    *flags: str | Path, ca: Path | None = None, env: Mapping[str, str] | None = None
) -> Iterator[WebhookProcess]:
    """A server with these flags of ``serve``, listening on a free port of 127.0.0.1; stopped at the end of the block.

    ``env`` adds to its environment. Unless told otherwise it stops at once, without the time endpoints need elsewhere.
    """
    server = WebhookProcess(flags, ca, env or {})
    try:
        yield server
        if server.process.poll() is None:
            server.terminate()
    finally:
        server.kill()


def exchange(
    connection: http.client.HTTPSConnection,
    method: str,
    path: str,
    body: Body = None,
    headers: Mapping[str, str] = JSON_TYPE,
) -> Reply:
    """Make one request on a connection that is kept; an iterable body goes out in chunks."""
    connection.request(method, path, body, dict(headers))
    response = connection.getresponse()
    return Reply(response.status, response.headers, response.read())
