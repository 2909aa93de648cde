"""The extender's addresses: what kube-scheduler asks, by path, and what is answered where that cannot be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING

import structlog

from controller.extender.allocator import Binder, Placer
from controller.extender.metrics import ExtenderMetrics
from controller.extender.protocol import (
    read_binding,
    read_candidates,
    read_preemption,
    write_binding,
    write_preemption,
    write_priorities,
)
from controller.httpd import reply
from vcuda import __version__
from vcuda.errors import BadInput

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

MAX_BODY = 256 * 2**20
"""Bytes of a request: some 10,000 nodes, where the scheduler sends them whole."""

Verb = Callable[[bytes], bytes]
"""Answers the body of one kind of request; raises BadInput where it is none."""


def verbs_of(placer: Placer, binder: Binder) -> Mapping[str, Verb]:
    """Return what is answered, by its path. ``priorities`` is gpu-admission's own name for ``prioritize``."""

    def scores(body: bytes) -> bytes:
        return write_priorities(placer.scores(read_candidates(body)))

    return {
        "/scheduler/predicates": lambda body: placer.filter(read_candidates(body)),
        "/scheduler/prioritize": scores,
        "/scheduler/priorities": scores,
        "/scheduler/bind": lambda body: write_binding(binder.bind(read_binding(body))),
        "/scheduler/preempt": lambda body: write_preemption(placer.preempt(read_preemption(body))),
    }


def create_application(verbs: Mapping[str, Verb], metrics: ExtenderMetrics) -> WSGIApplication:
    """Return the application that answers POST by verb, and GET /version."""

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        started = time.perf_counter()
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] == "GET" and path == "/version":
            return reply(start_response, HTTPStatus.OK, __version__)
        length = environ.get("CONTENT_LENGTH", "")
        if environ["REQUEST_METHOD"] == "POST" and not (length.isdigit() and int(length) <= MAX_BODY):
            # What follows cannot be told from a next request; cheroot hangs up after this answer.
            return reply(start_response, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"0 to {MAX_BODY} bytes are wanted")
        # In parts: asked for all at once, cheroot's reader clears room for the whole with every packet.
        body = b"".join(iter(lambda: environ["wsgi.input"].read(_PART), b""))
        verb = verbs.get(path)
        if verb is None or environ["REQUEST_METHOD"] != "POST":
            return reply(start_response, HTTPStatus.NOT_FOUND, "not found")
        status, answer = _answer(verb, body)
        metrics.observe(path.rpartition("/")[2], time.perf_counter() - started)
        return reply(start_response, status, answer, "application/json" if status == HTTPStatus.OK else "")

    return application


_PART = 2**16


def _answer(verb: Verb, body: bytes) -> tuple[HTTPStatus, str | bytes]:
    try:
        return HTTPStatus.OK, verb(body)
    except BadInput as error:
        return HTTPStatus.BAD_REQUEST, str(error)
    except Exception:  # noqa: BLE001  # the scheduler tries the pod again; logged, and never taken for an answer
        structlog.get_logger().exception("not answered")
        return HTTPStatus.INTERNAL_SERVER_ERROR, "a fault of our own; it is in the log"
