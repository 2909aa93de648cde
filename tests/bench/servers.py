"""The servers that are measured: ours, and a Flask webhook that does nothing, on the same gunicorn settings."""

from __future__ import annotations

import gc
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import flask

from vcuda.logs import configure
from vcuda.patches import Hints
from webhook.assembly import Standalone
from webhook.server import Settings, WebhookServer

STARTED = 20.0
"""Seconds a server may take to listen."""


class IdleServer(WebhookServer):
    """The same server around an application that parses the review, as it must for the uid, and allows it."""

    def load(self) -> Any:
        """Return the WSGI application."""
        app = flask.Flask("idle", static_folder=None)
        app.add_url_rule("/mutate", "mutate", _allow, methods=["POST"])
        gc.freeze()
        return app


def _allow() -> flask.Response:
    review = flask.request.get_json()
    response = {"uid": review["request"]["uid"], "allowed": True}
    return flask.jsonify({"apiVersion": review["apiVersion"], "kind": review["kind"], "response": response})


@contextmanager
def ours(certificates: Path, quota: Path, nodes: Path) -> Iterator[str]:
    """Our webhook with its ledger in memory; its URL."""

    def serve(urls: Queue[str]) -> None:
        standalone = Standalone(quota, nodes, Hints())
        WebhookServer(_settings(certificates), standalone.make_service, urls.put).run()

    with _running(serve) as url:
        yield url


@contextmanager
def idle(certificates: Path) -> Iterator[str]:
    """The webhook that does nothing; its URL."""

    def never(*_: object) -> Any:
        raise AssertionError("the idle server makes no service")

    def serve(urls: Queue[str]) -> None:
        IdleServer(_settings(certificates), never, urls.put).run()

    with _running(serve) as url:
        yield url


def _settings(certificates: Path) -> Settings:
    return Settings("127.0.0.1:0", certificates, drain=0.0)


@contextmanager
def _running(serve: Callable[[Queue[str]], None]) -> Iterator[str]:
    fork = multiprocessing.get_context("fork")
    urls: Queue[str] = fork.Queue()
    process = fork.Process(target=_quietly, args=(serve, urls))
    process.start()
    try:
        yield urls.get(timeout=STARTED)
    finally:
        process.terminate()
        process.join()


def _quietly(serve: Callable[[Queue[str]], None], urls: Queue[str]) -> None:
    """Serve with the log written, as in production, but to nowhere."""
    with Path("/dev/null").open("w") as nowhere:
        sys.stdout = nowhere
        configure("info")
        serve(urls)
