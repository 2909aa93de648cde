"""The three webhooks in Python that the benchmarks run, each in a separate process.

They are vcuda quota's webhook, a webhook on the same HTTP server that admits everything, and a webhook in Flask that
only returns a constant patch.
"""

from __future__ import annotations

import base64
import gc
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, NamedTuple

import flask
import msgspec
from a2wsgi.asgi_typing import HTTPScope, Receive, Send
from gunicorn.app.base import BaseApplication

from bench.cpu import family
from tests.builders import held_to
from vcuda.cli import format_address
from vcuda.logs import configure_batched
from webhook.intake.bodies import read_body
from webhook.server.app import JSON
from webhook.server.server import MakeService, Settings, WebhookServer
from webhook.server.worker import KEEP_ALIVE_SECONDS

THREADS = 32
STARTED = 20.0
"""The maximum number of seconds from the start of a server until it listens."""


class Server(NamedTuple):
    """A running webhook.

    ``url``: the URL of this replica alone.
    ``pid``: the process id of gunicorn's arbiter (main process). Its child, the worker, answers the requests.
    ``called``: the URL at which the API server calls the webhook. Several replicas may share this URL.
    """

    url: str
    pid: int
    called: str

    @property
    def worker(self) -> int:
        """The process id of the only worker of this server."""
        _, worker = family(self.pid)
        return worker


PIN = json.dumps(
    [
        {"op": "add", "path": "/spec/affinity", "value": held_to("M40")},
        {"op": "add", "path": "/metadata/annotations", "value": {"quota.vcuda.io/model": "M40"}},
    ]
).encode()
"""The JSON Patch by which vcuda quota's webhook pins a pod without annotations to a GPU model."""


class IdleServer(WebhookServer):
    """vcuda quota's HTTP server with an application that only parses a review, and allows it."""

    def load(self) -> Any:
        gc.freeze()
        return _allow_all


class PinningServer(BaseApplication):
    """A Flask webhook that only returns a constant patch. It runs in gunicorn's worker with threads (gthread)."""

    def __init__(self, certificates: Path, announce: Callable[[str], None]) -> None:
        self._certificates = certificates
        self._announce = announce
        super().__init__()

    def load_config(self) -> None:
        """Set gunicorn's options. Idle connections stay open for longer than the API server keeps them open."""
        options = {
            "bind": "127.0.0.1:0",
            "workers": 1,
            "worker_class": "gthread",
            "threads": THREADS,
            "keepalive": int(KEEP_ALIVE_SECONDS),
            "certfile": str(self._certificates / "tls.crt"),
            "keyfile": str(self._certificates / "tls.key"),
            "post_worker_init": lambda worker: self._announce(
                "https://{}:{}".format(*worker.sockets[0].getsockname()[:2])
            ),
            "control_socket_disable": True,
            "loglevel": "warning",
        }
        for name, value in options.items():
            self.cfg.set(name, value)

    def load(self) -> Any:
        return _flask_app(_pin)


def _flask_app(mutate: Callable[[], flask.Response]) -> flask.Flask:
    """Return a Flask application that allows every request at /validate, and calls ``mutate`` for /mutate."""
    app = flask.Flask("bench", static_folder=None)
    for path, view in (("/mutate", mutate), ("/validate", _allow)):
        app.add_url_rule(path, path, view, methods=["POST"])
    return app


async def _allow_all(_scope: HTTPScope, receive: Receive, send: Send) -> None:
    chunks: list[bytes] = []
    await read_body(receive, chunks)
    review = msgspec.json.decode(b"".join(chunks))
    body = msgspec.json.encode(_allowing(review))
    headers = [(b"content-type", JSON), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _pin() -> flask.Response:
    return _allow(patchType="JSONPatch", patch=base64.b64encode(PIN).decode())


def _allow(**fields: str) -> flask.Response:
    return flask.jsonify(_allowing(flask.request.get_json(), **fields))


def _allowing(review: dict[str, Any], **fields: str) -> dict[str, Any]:
    response = {"uid": review["request"]["uid"], "allowed": True, **fields}
    return {"apiVersion": review["apiVersion"], "kind": review["kind"], "response": response}


class Replica(WebhookServer):
    """A replica of vcuda quota's webhook. It listens at its own address, and at a port that all replicas share.

    The kernel distributes new connections to the shared port over the replicas, like a Service but with less CPU.
    """

    def __init__(self, port: int, *arguments: Any) -> None:
        self._port = port
        super().__init__(*arguments)

    def load_config(self) -> None:
        super().load_config()
        self.cfg.set("bind", [format_address(self.settings.bind), f"127.0.0.1:{self._port}"])
        self.cfg.set("reuse_port", True)


@contextmanager
def ours(certificates: Path, make_service: MakeService, shared_port: int) -> Iterator[Server]:
    """Run a replica of vcuda quota's webhook. Other replicas may listen at the same ``shared_port``."""

    def serve(urls: Queue[str]) -> None:
        Replica(shared_port, _settings(certificates), make_service, urls.put).run()

    with _running(serve) as server:
        yield server._replace(called=f"https://127.0.0.1:{shared_port}")


@contextmanager
def alone(certificates: Path, make_service: MakeService) -> Iterator[Server]:
    """Run vcuda quota's webhook as one process without further replicas."""

    def serve(urls: Queue[str]) -> None:
        WebhookServer(_settings(certificates), make_service, urls.put).run()

    with _running(serve) as server:
        yield server


@contextmanager
def idle(certificates: Path) -> Iterator[Server]:
    """Run a webhook that admits everything, on vcuda quota's HTTP server."""

    def never(*_: object) -> Any:
        raise AssertionError("the server that does nothing must not create a service")

    def serve(urls: Queue[str]) -> None:
        IdleServer(_settings(certificates), never, urls.put).run()

    with _running(serve) as server:
        yield server


@contextmanager
def pinning(certificates: Path) -> Iterator[Server]:
    def serve(urls: Queue[str]) -> None:
        PinningServer(certificates, urls.put).run()

    with _running(serve) as server:
        yield server


def _settings(certificates: Path) -> Settings:
    return Settings(("127.0.0.1", 0), certificates, drain=0.0)


@contextmanager
def _running(serve: Callable[[Queue[str]], None]) -> Iterator[Server]:
    fork = multiprocessing.get_context("fork")
    urls: Queue[str] = fork.Queue()
    process = fork.Process(target=_quietly, args=(serve, urls))
    process.start()
    assert process.pid
    try:
        url = urls.get(timeout=STARTED)
        yield Server(url, process.pid, url)
    finally:
        # The processes are killed, because a graceful stop would wait until the API server closes its connections. The
        # arbiter is killed first, because it would replace a killed worker.
        for pid in [*family(process.pid)] if process.is_alive() else ():
            os.kill(pid, signal.SIGKILL)
        process.join()


def _quietly(serve: Callable[[Queue[str]], None], urls: Queue[str]) -> None:
    """Run a webhook server that logs to /dev/null. So the measured CPU time includes the time to write the log."""
    with Path("/dev/null").open("w") as nowhere:
        sys.stdout = nowhere
        configure_batched("info")
        serve(urls)
