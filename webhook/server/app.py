"""The ASGI application, which passes admission reviews to `webhook.admission` and every other request to Flask.

The answer to a failed request is a short JSON object, ``{"error": …, "status": …}``. Only the log has the stack trace.
"""

import asyncio
import functools
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import parse_qs

import flask
import msgspec
from a2wsgi import WSGIMiddleware, asgi_typing, wsgi_typing
from kubernetes.utils.duration import parse_duration
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from vcuda.admission_review import ReviewDeadline
from vcuda.errors import BadReview, Dropped, DropReason, Unavailable, VcudaError
from webhook import admission, metrics
from webhook.intake.bodies import LARGE_BODY, MAX_BODY, BodyTooLarge, ReviewHead, read_body

REVIEWS = frozenset({"/mutate", "/validate", "/quota"})
HEALTH, METRICS = ("/healthz", "/readyz"), "/metrics"
DEFAULT_TIMEOUT_SECONDS = 10.0
"""The timeout that the API server uses for a webhook without timeoutSeconds."""

MAX_TIMEOUT_SECONDS = 30.0
"""The longest timeoutSeconds in Kubernetes (validation in k8s.io/kubernetes, pkg/apis/admissionregistration)."""

MARGIN_SECONDS = 0.5
"""Seconds that are subtracted from the API server's timeout, so that the answer arrives before this timeout."""

# The rest of a large body must arrive within this many seconds. The time is short, because meanwhile the review takes a
# place for which other large reviews wait.
LARGE_BODY_SECONDS = 3.0

ARRIVED, DEADLINE = "vcuda.arrived", "vcuda.deadline"
"""The keys of two values in the ASGI scope of a request: its time of arrival (monotonic), and its `ReviewDeadline`."""

# The number of threads for Flask, which serves only health checks and metrics, seldom more than two at a time.
PAGE_THREADS = 4

JSON = b"application/json"


def error_object(message: str, status: int) -> bytes:
    return msgspec.json.encode({"error": message, "status": int(status)})


class Callers(NamedTuple):
    """The callers whose requests are answered. Every caller may request the health checks."""

    client_ca: Path | None = None
    """The file of the CAs that sign client certificates; None if no client certificate is required."""
    name: str | None = None
    """The common name that a client certificate must have; None for any name."""
    metrics: bool = False
    """True if a client certificate is required for the metrics too."""

    def check(self, scope: asgi_typing.HTTPScope) -> None:
        """Raise BadReview if a required client certificate is missing, or lacks the required common name."""
        open_to_all = (*HEALTH, *(() if self.metrics else (METRICS,)))
        if self.client_ca is None or scope["path"] in open_to_all:
            return
        name = (scope.get("extensions") or {}).get("tls", {}).get("client_cert_name")
        if name is None:
            raise BadReview("a client certificate is required (see --client-ca)", HTTPStatus.UNAUTHORIZED)
        if self.name not in (None, name):
            raise BadReview("the client certificate has a wrong common name (see --client-name)", HTTPStatus.FORBIDDEN)


EVERYBODY = Callers()


class Application:
    """The webhook's ASGI application. An `admission.Service` answers the admission reviews."""

    def __init__(self, service: admission.Service, callers: Callers = EVERYBODY) -> None:
        self._service = service
        self._callers = callers
        service.metrics.rejections.named = callers.metrics
        self._pages = WSGIMiddleware(cast("wsgi_typing.WSGIApp", make_pages(service)), workers=PAGE_THREADS)

    async def __call__(
        self, scope: asgi_typing.HTTPScope, receive: asgi_typing.Receive, send: asgi_typing.Send
    ) -> None:
        status, headers = HTTPStatus.OK, [(b"content-type", JSON)]
        try:
            self._callers.check(scope)
            if scope["path"] not in REVIEWS or scope["method"] != "POST":
                await self._pages(scope, receive, send)
                return
            body = await self._answer(scope, receive)
        except ConnectionAbortedError:
            return
        except Exception as error:  # noqa: BLE001  # the caller gets an answer for each error, and the log has the trace
            status, message = self._fault(scope["path"], error)
            body = error_object(message, status)
            if status is HTTPStatus.SERVICE_UNAVAILABLE:
                # With these headers, the API server repeats the call on a new connection, perhaps to another webhook
                # replica.
                headers += [(b"retry-after", b"1"), (b"connection", b"close")]
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _answer(self, scope: asgi_typing.HTTPScope, receive: asgi_typing.Receive) -> bytes:
        headers = dict(scope["headers"])
        if headers.get(b"content-type", b"").partition(b";")[0] != JSON:
            raise BadReview(f"the Content-Type must be {JSON.decode()}", HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        length, chunks = int(headers.get(b"content-length", 0)), list[bytes]()
        try:
            return await self._answer_body(scope["path"], length, receive, chunks, deadline_of(scope))
        except BodyTooLarge:
            head = ReviewHead.read(b"".join(chunks))
            if not head.uid:
                raise
            return self._service.reject_too_large(scope["path"], head)
        except (ConnectionAbortedError, asyncio.CancelledError):
            self._service.metrics.drop(scope["path"], DropReason.DISCONNECTED)
            raise

    async def _answer_body(
        self, path: str, length: int, receive: asgi_typing.Receive, chunks: list[bytes], deadline: ReviewDeadline
    ) -> bytes:
        if length > MAX_BODY:
            await read_body(receive, chunks, LARGE_BODY)
            raise BodyTooLarge
        whole = await read_body(receive, chunks, LARGE_BODY)
        size = sum(map(len, chunks))
        thread = self._service.thread_for(path, size)
        if thread is None:
            return await self._service.answer(path, b"".join(chunks), deadline)
        uid, line = ReviewHead.read(b"".join(chunks))
        if uid and not line:  # otherwise a long name of a pod would join the line of unknown namespaces
            raise BadReview(f"the first {LARGE_BODY} bytes of the review have no namespace")
        async with thread.place(line, size if whole else length or MAX_BODY, deadline):
            if not whole:
                await self._read_rest(path, receive, chunks, deadline)
            body = b"".join(chunks)
            chunks.clear()
            return await self._service.answer(path, body, deadline, line)

    async def _read_rest(
        self, path: str, receive: asgi_typing.Receive, chunks: list[bytes], deadline: ReviewDeadline
    ) -> None:
        try:
            async with asyncio.timeout(min(LARGE_BODY_SECONDS, deadline.left)):
                await read_body(receive, chunks)
        except TimeoutError:
            self._service.metrics.drop(path, DropReason.SLOW)
            raise BadReview("the request body did not arrive in time", HTTPStatus.REQUEST_TIMEOUT) from None

    def _fault(self, path: str, error: Exception) -> tuple[HTTPStatus, str]:
        match error:
            case BadReview():
                return error.status, str(error)
            case Unavailable():
                if isinstance(error, Dropped):
                    self._service.metrics.drop(path, error.reason)
                self._service.log.warning("not answered", path=path, reason=str(error))
                return HTTPStatus.SERVICE_UNAVAILABLE, str(error)
            case VcudaError():
                self._service.log.error("not answered", path=path, reason=str(error))
                return HTTPStatus.INTERNAL_SERVER_ERROR, str(error)
        return HTTPStatus.INTERNAL_SERVER_ERROR, _internal(self._service, path, error)


def deadline_of(scope: asgi_typing.HTTPScope) -> ReviewDeadline:
    """Return the deadline of a request, and store it in the ASGI scope, where the gunicorn worker reads it.

    The deadline is the arrival of the request plus the API server's timeout, minus a margin. Raises BadReview if the
    timeout is malformed.
    """
    timeout, extensions = timeout_of(scope["query_string"]), cast("dict[str, Any]", scope.setdefault("extensions", {}))
    arrived = extensions.get(ARRIVED, time.monotonic())
    deadline = extensions[DEADLINE] = ReviewDeadline(arrived + max(timeout - MARGIN_SECONDS, timeout / 2))
    return deadline


@functools.lru_cache(maxsize=64)
def timeout_of(query: bytes) -> float:
    """Return the seconds of parameter ``timeout`` in a query such as ``timeout=10s``, which the API server sends.

    Raises BadReview if the parameter is not a duration.
    """
    duration = parse_qs(query.decode("latin-1")).get("timeout", [""])[0]
    if not duration:
        return DEFAULT_TIMEOUT_SECONDS
    try:
        seconds: float = parse_duration(duration).total_seconds()
    except ValueError as error:
        raise BadReview(f"timeout={duration!r} is not a valid duration: {error}") from error
    return min(seconds, MAX_TIMEOUT_SECONDS)


def _internal(service: admission.Service, path: str, error: Exception) -> str:
    service.log.error("internal error", path=path, exc_info=error)
    return "internal error; the webhook's log has the details"


def make_pages(service: admission.Service) -> flask.Flask:
    """Return the Flask application of the health checks and the metrics."""
    app = flask.Flask("webhook", static_folder=None)
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False

    def readiness() -> flask.Response:
        if service.ready:
            return _text("ok")
        reason = "this replica is stopping" if service.gate.leaving else service.why_unread
        return _text(reason, HTTPStatus.SERVICE_UNAVAILABLE)

    def failed(error: Exception) -> flask.Response:
        if not isinstance(error, HTTPException):
            return _json(_internal(service, flask.request.path, error), HTTPStatus.INTERNAL_SERVER_ERROR)
        reply = _json(error.description or error.name, HTTPStatus(error.code or HTTPStatus.INTERNAL_SERVER_ERROR))
        if isinstance(error, MethodNotAllowed):
            reply.headers["Allow"] = ", ".join(sorted(error.valid_methods or ()))
        return reply

    healthz, readyz = HEALTH
    app.add_url_rule(healthz, healthz, lambda: _text("ok"))
    app.add_url_rule(readyz, readyz, readiness)
    app.add_url_rule(
        METRICS, METRICS, lambda: flask.Response(service.metrics.render(), content_type=metrics.CONTENT_TYPE)
    )
    for path in REVIEWS:
        # `Application` answers each POST. With this rule, Flask answers other methods, such as GET, with status 405.
        app.add_url_rule(path, path, methods=["POST"])
    app.register_error_handler(Exception, failed)
    return app


def _json(message: str, status: HTTPStatus) -> flask.Response:
    return flask.Response(error_object(message, status), status=status.value, content_type=JSON.decode())


def _text(body: str, status: HTTPStatus = HTTPStatus.OK) -> flask.Response:
    return flask.Response(f"{body}\n", status=status.value, content_type="text/plain; charset=utf-8")
