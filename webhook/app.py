"""The HTTP side: Flask routes, size limits, and an answer in JSON for everything that can go wrong."""

from __future__ import annotations

from http import HTTPStatus

import flask
import msgspec
from kubernetes.utils.duration import parse_duration
from werkzeug.exceptions import HTTPException

from vcuda.errors import BadReview, Unreachable, VcudaError
from webhook.metrics import CONTENT_TYPE
from webhook.service import Service

MAX_BODY = 3 * 2**20
"""Bytes. The API server takes objects up to 3 MiB, so nothing larger comes from it."""

DEFAULT_TIMEOUT = 10.0
"""Seconds; the API server's own default for a webhook without timeoutSeconds."""

JSON = "application/json"
COME_AGAIN = {"Retry-After": "1", "Connection": "close"}


def create_app(service: Service) -> flask.Flask:
    """Return the WSGI application that serves the reviews, the health checks and the metrics."""
    app = flask.Flask("webhook", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    for path in ("/mutate", "/validate", "/quota"):
        app.add_url_rule(path, path, _reviews(service, path), methods=["POST"])
    app.add_url_rule("/healthz", "healthz", lambda: _text("ok"))
    app.add_url_rule("/readyz", "readyz", lambda: _readiness(service))
    app.add_url_rule("/metrics", "metrics", lambda: flask.Response(service.metrics.render(), content_type=CONTENT_TYPE))
    _answer_errors(app, service)
    return app


def _reviews(service: Service, path: str) -> flask.typing.RouteCallable:
    def view() -> flask.Response:
        request = flask.request
        if request.mimetype != JSON:
            raise BadReview(f"the body must be {JSON}", HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        timeout = _seconds(request.args.get("timeout", ""))
        reply = service.answer(path, request.get_data(cache=False), timeout)
        return flask.Response(reply, content_type=JSON)

    return view


def _seconds(duration: str) -> float:
    """Return the API server's ?timeout=, such as ``10s``, in seconds."""
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

    def unreachable(error: Unreachable) -> flask.Response:
        service.log.warning("not answered", path=flask.request.path, reason=str(error))
        reply = _error(str(error), HTTPStatus.SERVICE_UNAVAILABLE)
        reply.headers.update(COME_AGAIN)
        return reply

    def failed(error: VcudaError) -> flask.Response:
        service.log.error("not answered", path=flask.request.path, reason=str(error))
        return _error(str(error), HTTPStatus.INTERNAL_SERVER_ERROR)

    def http(error: HTTPException) -> flask.Response:
        return _error(error.description or error.name, HTTPStatus(error.code or HTTPStatus.INTERNAL_SERVER_ERROR))

    def unexpected(error: Exception) -> flask.Response:
        service.log.error("internal error", path=flask.request.path, exc_info=error)
        return _error("internal error; the webhook's log has the details", HTTPStatus.INTERNAL_SERVER_ERROR)

    app.register_error_handler(BadReview, bad_review)
    app.register_error_handler(Unreachable, unreachable)
    app.register_error_handler(VcudaError, failed)
    app.register_error_handler(HTTPException, http)
    app.register_error_handler(Exception, unexpected)


def _error(message: str, status: HTTPStatus) -> flask.Response:
    body = msgspec.json.encode({"error": message, "status": status.value})
    return flask.Response(body, status=status.value, content_type=JSON)


def _text(body: str, status: HTTPStatus = HTTPStatus.OK) -> flask.Response:
    return flask.Response(f"{body}\n", status=status.value, content_type="text/plain; charset=utf-8")
