"""The HTTP side: Flask routes, size limits, and an answer in JSON for everything that can go wrong."""

from __future__ import annotations

import asyncio
import functools
import threading
from http import HTTPStatus
from typing import IO
from urllib.parse import parse_qs

import flask
from gunicorn.http.errors import ParseException
from kubernetes.utils.duration import parse_duration
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from vcuda.errors import BadReview, Unavailable, VcudaError
from webhook.admission import Service
from webhook.arrival import MAX_BODY
from webhook.faults import error_object, over_limit
from webhook.metrics import CONTENT_TYPE

DEFAULT_TIMEOUT = 10.0
"""Seconds; the API server's own default for a webhook without timeoutSeconds."""

JSON = "application/json"
COME_AGAIN = {"Retry-After": "1", "Connection": "close"}


def create_app(service: Service) -> flask.Flask:
    """Return the WSGI application that serves the reviews, the health checks and the metrics."""
    app = flask.Flask("webhook", static_folder=None)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="decisions", daemon=True).start()
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    for path in ("/mutate", "/validate", "/quota"):
        app.add_url_rule(path, path, _reviews(service, loop, path), methods=["POST"])
    app.add_url_rule("/healthz", "healthz", lambda: _text("ok"))
    app.add_url_rule("/readyz", "readyz", lambda: _readiness(service))
    app.add_url_rule("/metrics", "metrics", lambda: flask.Response(service.metrics.render(), content_type=CONTENT_TYPE))
    _answer_errors(app, service)
    return app


def _reviews(service: Service, loop: asyncio.AbstractEventLoop, path: str) -> flask.typing.RouteCallable:
    def view() -> flask.Response:
        # Once, and not for every attribute: this is the hot path.
        request = flask.request._get_current_object()  # type: ignore[attr-defined]  # a proxy, typed as a Request
        if (request.content_type or "").partition(";")[0] != JSON:
            raise BadReview(f"the body must be {JSON}", HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        timeout = _timeout(request.query_string)
        body = _read(request.environ["wsgi.input"])
        answer = asyncio.run_coroutine_threadsafe(service.answer(path, body, timeout), loop).result()
        return flask.Response(answer, content_type=JSON)

    return view


def _read(stream: IO[bytes]) -> bytes:
    """Return the body of a request, all of which is here; Flask's own limit would cut a chunked one off in silence."""
    try:
        body = stream.read(MAX_BODY + 1)
    except (ParseException, OSError) as error:  # a malformed chunk
        raise BadReview(f"the body cannot be read: {error}") from error
    if len(body) > MAX_BODY:
        raise BadReview(over_limit(), HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    return body


@functools.lru_cache(maxsize=64)
def _timeout(query: bytes) -> float:
    """Return the API server's ``?timeout=10s`` in seconds. There are few of them, so each is read once."""
    duration = parse_qs(query.decode("latin-1")).get("timeout", [""])[0]
    if not duration:
        return DEFAULT_TIMEOUT
    try:
        seconds: float = parse_duration(duration).total_seconds()
    except ValueError as error:
        raise BadReview(f"timeout={duration!r} is no duration: {error}") from error
    return seconds


def _readiness(service: Service) -> flask.Response:
    if service.ready:
        return _text("ok")
    reason = "stopping" if service.gate.leaving else "the quota has not been read yet"
    return _text(reason, HTTPStatus.SERVICE_UNAVAILABLE)


def _answer_errors(app: flask.Flask, service: Service) -> None:
    """Turn every error into a short JSON object. The caller never sees a trace; the log does."""

    def bad_review(error: BadReview) -> flask.Response:
        return _error(str(error), error.status)

    def unreachable(error: Unavailable) -> flask.Response:
        service.log.warning("not answered", path=flask.request.path, reason=str(error))
        reply = _error(str(error), HTTPStatus.SERVICE_UNAVAILABLE)
        reply.headers.update(COME_AGAIN)
        return reply

    def failed(error: VcudaError) -> flask.Response:
        service.log.error("not answered", path=flask.request.path, reason=str(error))
        return _error(str(error), HTTPStatus.INTERNAL_SERVER_ERROR)

    def http(error: HTTPException) -> flask.Response:
        reply = _error(error.description or error.name, HTTPStatus(error.code or HTTPStatus.INTERNAL_SERVER_ERROR))
        if isinstance(error, MethodNotAllowed):
            reply.headers["Allow"] = ", ".join(sorted(error.valid_methods or ()))
        return reply

    def unexpected(error: Exception) -> flask.Response:
        service.log.error("internal error", path=flask.request.path, exc_info=error)
        return _error("internal error; the webhook's log has the details", HTTPStatus.INTERNAL_SERVER_ERROR)

    app.register_error_handler(BadReview, bad_review)
    app.register_error_handler(Unavailable, unreachable)
    app.register_error_handler(VcudaError, failed)
    app.register_error_handler(HTTPException, http)
    app.register_error_handler(Exception, unexpected)


def _error(message: str, status: HTTPStatus) -> flask.Response:
    return flask.Response(error_object(message, status), status=status.value, content_type=JSON)


def _text(body: str, status: HTTPStatus = HTTPStatus.OK) -> flask.Response:
    return flask.Response(f"{body}\n", status=status.value, content_type="text/plain; charset=utf-8")
