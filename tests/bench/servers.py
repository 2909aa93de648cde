"""The servers that are measured: ours, and a Flask webhook that does nothing, on the same gunicorn settings."""

from __future__ import annotations

import base64
import gc
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, NamedTuple

import flask
from gunicorn.app.base import BaseApplication

from tests.builders import held_to
from vcuda.logs import configure_batched
from webhook.assembly import MakeService
from webhook.server import Settings, WebhookServer
from webhook.waiting import KEEP_ALIVE

STARTED = 20.0
"""Seconds a server may take to listen."""


class Server(NamedTuple):
    """A running server: its URL, and gunicorn's arbiter."""

    url: str
    arbiter: ForkProcess

    @property
    def worker(self) -> int:
        """The process id of its one worker."""
        pid = self.arbiter.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


class IdleServer(WebhookServer):
    """The same server around an application that parses the review, as it must for the uid, and allows it."""

    def load(self) -> Any:
        """Return the WSGI application."""
        app = _idle_app(self.mutate)
        gc.freeze()
        return app

    def mutate(self) -> flask.Response:
        """Allow the pod as it is."""
        return _allow()


class PlainServer(BaseApplication):
    """A Flask webhook that does nothing as anybody would deploy it: gunicorn's own gthread worker, connections kept."""

    def __init__(self, certificates: Path, announce: Callable[[str], None]) -> None:
        self._certificates = certificates
        self._announce = announce
        super().__init__()

    def load_config(self) -> None:
        """As many threads as ours, and connections kept for longer than the API server keeps them."""
        options = {
            "bind": "127.0.0.1:0",
            "workers": 1,
            "worker_class": "gthread",
            "threads": _settings(self._certificates).threads,
            "keepalive": int(KEEP_ALIVE),
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
        """Return the WSGI application."""
        return _idle_app(_allow)


class PinningServer(IdleServer):
    """The idle server, but /mutate answers with the patch that ours makes of a plain pod, always the same."""

    def mutate(self) -> flask.Response:
        """Allow the pod, patched."""
        return _allow(patchType="JSONPatch", patch=PINNED)


PINNED = base64.b64encode(
    json.dumps(
        [
            {"op": "add", "path": "/spec/affinity", "value": held_to("M40")},
            {"op": "add", "path": "/metadata/annotations", "value": {"quota.vcuda.io/model": "M40"}},
        ]
    ).encode()
).decode()


def _idle_app(mutate: Callable[[], flask.Response]) -> flask.Flask:
    """Allow everything at /validate, and answer /mutate by this."""
    app = flask.Flask("idle", static_folder=None)
    for path, view in (("/mutate", mutate), ("/validate", _allow)):
        app.add_url_rule(path, path, view, methods=["POST"])
    return app


def _allow(**fields: str) -> flask.Response:
    review = flask.request.get_json()
    response = {"uid": review["request"]["uid"], "allowed": True, **fields}
    return flask.jsonify({"apiVersion": review["apiVersion"], "kind": review["kind"], "response": response})


@contextmanager
def ours(certificates: Path, make_service: MakeService) -> Iterator[Server]:
    """Our webhook with this service."""

    def serve(urls: Queue[str]) -> None:
        WebhookServer(_settings(certificates), make_service, urls.put).run()

    with _running(serve) as server:
        yield server


@contextmanager
def idle(certificates: Path, kind: type[IdleServer] = IdleServer) -> Iterator[Server]:
    """The webhook that does nothing, or what ``kind`` does."""

    def never(*_: object) -> Any:
        raise AssertionError("the idle server makes no service")

    def serve(urls: Queue[str]) -> None:
        kind(_settings(certificates), never, urls.put).run()

    with _running(serve) as server:
        yield server


@contextmanager
def plain(certificates: Path) -> Iterator[Server]:
    """The webhook that does nothing, on gunicorn as it comes."""

    def serve(urls: Queue[str]) -> None:
        PlainServer(certificates, urls.put).run()

    with _running(serve) as server:
        yield server


def _settings(certificates: Path) -> Settings:
    return Settings("127.0.0.1:0", certificates, drain=0.0)


@contextmanager
def _running(serve: Callable[[Queue[str]], None]) -> Iterator[Server]:
    fork = multiprocessing.get_context("fork")
    urls: Queue[str] = fork.Queue()
    process = fork.Process(target=_quietly, args=(serve, urls))
    process.start()
    try:
        yield Server(urls.get(timeout=STARTED), process)
    finally:
        process.terminate()
        process.join()


def _quietly(serve: Callable[[Queue[str]], None], urls: Queue[str]) -> None:
    """Serve with the log written, as in production, but to nowhere."""
    with Path("/dev/null").open("w") as nowhere:
        sys.stdout = nowhere
        configure_batched("info")
        serve(urls)
